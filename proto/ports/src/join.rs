//! Who belongs to the cluster: a node joins a router, and a router calls a node, only with one of its tokens
//! ([`JoinTokens`]). It is asked of a call's headers, before anything else of the call is read. Where the cluster has
//! certificates ([`NodeTls`]), it is their names that are asked for first.
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use axum::http::{Extensions, HeaderMap, HeaderName, Request, Response};
use futures::future::Either;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::TcpConnectInfo;
use tower::Service;

use crate::join_tokens::JoinTokens;
use crate::node_tls::{Caller, NodeTls};
use crate::peer_name::{PeerRole, Wanted};
use crate::refusals::Refusals;

/// The header of a call between the processes of a cluster.
pub const JOIN_HEADER: HeaderName = HeaderName::from_static("x-tandem-join");

/// Whoever asks callers for the token, and for the name of their certificates. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct JoinGuard {
    expected: Option<JoinTokens>,
    tls: Option<NodeTls>,
    refusals: Refusals,
}

impl JoinGuard {
    /// Lets in those who carry one of these tokens; everybody where there are none.
    pub fn new(tokens: Option<&JoinTokens>) -> Self {
        Self { expected: tokens.cloned(), ..Self::default() }
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
            (Some(expected), Some(given)) if expected.accept(given) => Ok(()),
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
    use crate::join_token::JoinToken;

    const TEXT: &str = "0123456789abcdef";

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
        let guard = JoinGuard::new(token.clone().map(JoinTokens::from).as_ref());
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
