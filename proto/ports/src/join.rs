//! The secret that the processes of one cluster share. It stands in a file that each of them is given
//! (`--join-token-file`): a node joins a router, and a router calls a node, only with the same one. It is asked of a
//! call's headers, before anything else of the call is read. Where the cluster has certificates ([`NodeTls`]), it is
//! their names that are asked for first. What travels of the token is a digest, one for each use: whoever sees a call's
//! header can repeat the call, and learns neither the secret nor its other uses.
use std::fmt;
use std::future::{Ready, ready};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};

use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response};
use futures::future::Either;
use sha2::{Digest, Sha256};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::TcpConnectInfo;
use tower::Service;

use crate::node_tls::{Caller, NodeTls};
use crate::peer_name::{PeerRole, Wanted};
use crate::refusals::Refusals;

/// The header of a call between the processes of a cluster.
pub const JOIN_HEADER: HeaderName = HeaderName::from_static("x-tandem-join");
/// Characters of a token, without the white space around it.
const CHARACTERS: std::ops::RangeInclusive<usize> = 16..=1024;

/// The secret. Its text is kept nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    digest: [u8; 32],
}

/// The file could not be used; says which file, and why.
#[derive(Debug, thiserror::Error)]
#[error("--join-token-file {}: {why}", .path.display())]
pub struct JoinTokenError {
    path: PathBuf,
    why: String,
}

impl JoinToken {
    /// The token in a file: one line of visible ASCII characters.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else.
    pub fn load(path: &Path) -> Result<Self, JoinTokenError> {
        read(path).and_then(|text| Self::of(&text)).map_err(|why| JoinTokenError { path: path.to_owned(), why })
    }

    /// The token that is written so.
    ///
    /// # Errors
    /// What a token is.
    pub fn of(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !CHARACTERS.contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let (least, most) = (CHARACTERS.start(), CHARACTERS.end());
            return Err(format!("a join token is one line of {least} to {most} visible ASCII characters"));
        }
        Ok(Self { digest: Sha256::digest(text.as_bytes()).into() })
    }

    /// A key for one purpose, named by `label`. Keys of other purposes, and the token, do not follow from it.
    pub fn derive(&self, label: &str) -> [u8; 32] {
        // Both parts have one length: no two purposes meet.
        Sha256::new().chain_update(self.digest).chain_update(Sha256::digest(label.as_bytes())).finalize().into()
    }

    /// What calls carry in [`JOIN_HEADER`].
    pub fn header(&self) -> HeaderValue {
        let text: String = self.derive("tandem calls").iter().map(|byte| format!("{byte:02x}")).collect();
        // Hexadecimal digits are a value.
        let mut value = HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""));
        value.set_sensitive(true);
        value
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinToken(…)")
    }
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    // One byte more than the longest with its line's end: what is longer is no token.
    let most = *CHARACTERS.end() as u64 + 64;
    file.take(most).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

/// Whoever asks callers for the token, and for the name of their certificates. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct JoinGuard {
    expected: Option<HeaderValue>,
    tls: Option<NodeTls>,
    refusals: Refusals,
}

impl JoinGuard {
    /// Lets in those who carry this token; everybody where there is none.
    pub fn new(token: Option<&JoinToken>) -> Self {
        Self { expected: token.map(JoinToken::header), ..Self::default() }
    }

    /// The same, within the cluster's TLS: callers have the role that has business here. Those whom a port refuses for
    /// their certificates are counted, too.
    pub fn within(self, tls: Option<&NodeTls>) -> Self {
        let refusals = tls.map_or(self.refusals, |tls| tls.refusals().clone());
        Self { tls: tls.cloned(), refusals, ..self }
    }

    /// Calls refused so far, and connections that never came to a call.
    pub fn refused(&self) -> u64 {
        self.refusals.count()
    }

    /// `inner`, for those who are let in.
    pub fn around<S>(&self, inner: S) -> Joined<S> {
        Joined { guard: self.clone(), inner }
    }

    /// Whether the caller of a request with these extensions may register as this node: by its certificate, where the
    /// cluster has such.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`, with the reason; it is counted.
    pub fn registers(&self, extensions: &Extensions, role: PeerRole, node_id: &str) -> Result<(), Status> {
        let wanted = Wanted::Node { role, node_id: node_id.to_owned() };
        self.named(extensions, |tls, caller| tls.is(caller, &wanted)).map_err(|status| self.refuse(extensions, status))
    }

    fn admit(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<(), Status> {
        self.named(extensions, NodeTls::admit)
            .and_then(|()| self.shows_token(headers).map_err(Status::unauthenticated))
            .map_err(|status| self.refuse(extensions, status))
    }

    /// Whether its certificate is `good`.
    fn named(
        &self,
        extensions: &Extensions,
        good: impl FnOnce(&NodeTls, &Caller) -> Result<(), String>,
    ) -> Result<(), Status> {
        let Some(tls) = &self.tls else { return Ok(()) };
        let nobody = Caller::default();
        let caller = extensions.get::<Caller>().unwrap_or(&nobody);
        good(tls, caller).map_err(|why| Status::permission_denied(format!("this caller is refused: {why}")))
    }

    fn shows_token(&self, headers: &HeaderMap) -> Result<(), &'static str> {
        match (&self.expected, headers.get(JOIN_HEADER)) {
            (None, None) => Ok(()),
            (Some(expected), Some(given)) if same(expected.as_bytes(), given.as_bytes()) => Ok(()),
            (Some(_), Some(_)) => {
                Err("this is not the cluster's join token: give all its processes the same --join-token-file")
            }
            (Some(_), None) => {
                Err("the cluster's join token is missing: start with the --join-token-file of the others")
            }
            // It would be refused by whom it trusts, call by call.
            (None, Some(_)) => Err("this process has no join token: start it with the same --join-token-file"),
        }
    }

    fn refuse(&self, extensions: &Extensions, status: Status) -> Status {
        let peer = extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
        self.refusals.add(peer, status.message());
        status
    }
}

/// In a time that does not depend on the bytes.
pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b))) == 0
}

/// A gRPC service for processes of this cluster only.
#[derive(Clone, Debug)]
pub struct Joined<S> {
    guard: JoinGuard,
    inner: S,
}

impl<S: NamedService> NamedService for Joined<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<Request<Body>, Response = Response<Body>>> Service<Request<Body>> for Joined<S> {
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.guard.admit(request.headers(), request.extensions()) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    const TEXT: &str = "0123456789abcdef";

    #[test]
    fn a_token_is_one_line_of_some_length() {
        let dir = tempfile::tempdir().expect("a directory");
        let load = |text: &str| {
            let path = dir.path().join("token");
            std::fs::write(&path, text).expect("written");
            JoinToken::load(&path)
        };
        assert_eq!(load(&format!(" {TEXT}\n")).expect("a token"), JoinToken::of(TEXT).expect("the same"));
        let long = "x".repeat(*CHARACTERS.end() + 1);
        for wrong in ["", "short", "two words of it all", "sixteen\u{e9}characters", &long, &"x".repeat(1 << 20)] {
            let error = load(wrong).expect_err("no token").to_string();
            assert!(error.contains("--join-token-file") && error.contains("16 to 1024"), "{error}");
        }
        let missing = JoinToken::load(Path::new("/nowhere/token")).expect_err("no file").to_string();
        assert!(missing.contains("/nowhere/token"), "{missing}");
    }

    #[test]
    fn neither_the_token_nor_its_uses_follow_from_each_other() {
        let token = JoinToken::of(TEXT).expect("a token");
        let other = JoinToken::of("0123456789abcdeg").expect("a token");
        assert_ne!(token.derive("a"), token.derive("b"));
        assert_ne!(token.derive("a"), other.derive("a"));
        assert_eq!(format!("{token:?}"), "JoinToken(…)");
        assert!(!format!("{:?}", token.header()).contains(|c: char| c.is_ascii_digit()), "nor is it in any log");
    }

    #[test]
    fn calls_without_the_token_are_refused_and_counted() {
        let (token, other) =
            (JoinToken::of(TEXT).ok(), JoinToken::of("another one, 16+".replace(' ', "-").as_str()).ok());
        let headers = |token: &Option<JoinToken>| {
            let mut headers = HeaderMap::new();
            token.iter().for_each(|token| drop(headers.insert(JOIN_HEADER, token.header())));
            headers
        };
        let admit = |guard: &JoinGuard, token| guard.admit(&headers(token), &Extensions::new());
        let guard = JoinGuard::new(token.as_ref());
        assert!(admit(&guard, &token).is_ok());
        for stranger in [&None, &other] {
            assert_eq!(admit(&guard, stranger).expect_err("refused").code(), Code::Unauthenticated);
        }
        assert_eq!(guard.clone().refused(), 2);
        let open = JoinGuard::default();
        assert!(admit(&open, &None).is_ok());
        let error = admit(&open, &token).expect_err("refused");
        assert!(error.message().contains("this process has no join token"), "{error}");
    }
}
