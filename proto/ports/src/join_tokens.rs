//! The join tokens of a process while it runs: those of `--join-token-file`, which is read again when it changes. Its
//! first token is shown to others, all of them are accepted. So a cluster goes from one token to the next without a
//! refused call: the new one comes behind the old one on all processes, then before it, then alone.
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::HeaderValue;

use crate::followed::{Followed, at_intervals};
use crate::join_token::{JoinToken, JoinTokenError, same};

/// Tokens of a file at most: the one that is, and the one that comes or goes.
const MOST: usize = 2;

type Tokens = Vec<(JoinToken, HeaderValue)>;

/// Clones are the same ones.
#[derive(Clone, Debug)]
pub struct JoinTokens(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What was shown first: keys that last as long as the process are derived from it.
    start: JoinToken,
    /// Each with how calls carry it.
    now: RwLock<Tokens>,
    file: Option<(PathBuf, Followed)>,
}

impl From<JoinToken> for JoinTokens {
    /// This one, for as long as the process runs.
    fn from(token: JoinToken) -> Self {
        let now = RwLock::new(vec![(token.clone(), token.header())]);
        Self(Arc::new(Shared { start: token, now, file: None }))
    }
}

impl JoinTokens {
    /// Those of a file: one or two lines of visible ASCII characters.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else.
    pub fn load(path: &Path) -> Result<Self, JoinTokenError> {
        let followed = Followed::new("join token", vec![path.to_owned()]);
        let (start, all) = read(path)?;
        let file = Some((path.to_owned(), followed));
        Ok(Self(Arc::new(Shared { start, now: RwLock::new(all), file })))
    }

    /// What this process's calls carry in [`JOIN_HEADER`](crate::JOIN_HEADER).
    pub fn header(&self) -> HeaderValue {
        let now = self.0.now.read().unwrap_or_else(PoisonError::into_inner);
        // There is one at least.
        now.first().map_or(HeaderValue::from_static(""), |(_, header)| header.clone())
    }

    /// A key for one purpose, for as long as this process runs; see [`JoinToken::derive`].
    pub fn derive(&self, label: &str) -> [u8; 32] {
        self.0.start.derive(label)
    }

    /// A key for one purpose out of each token, the one that is shown first.
    pub fn derive_all(&self, label: &str) -> Vec<[u8; 32]> {
        let now = self.0.now.read().unwrap_or_else(PoisonError::into_inner);
        now.iter().map(|(token, _)| token.derive(label)).collect()
    }

    /// Reads the file again, as SIGHUP asks for, and logs how that went.
    pub fn read_again(&self) {
        if let Some((path, followed)) = &self.0.file {
            followed.read_again(|| self.reload(path));
        }
    }

    /// Looks at the file from time to time, and reads it if it has changed. Ends never.
    pub async fn follow_file(self) {
        at_intervals(move || {
            if let Some((path, followed)) = &self.0.file {
                followed.read_changed(|| self.reload(path));
            }
        })
        .await;
    }

    fn reload(&self, path: &Path) -> Result<(), JoinTokenError> {
        let (_, all) = read(path)?;
        *self.0.now.write().unwrap_or_else(PoisonError::into_inner) = all;
        Ok(())
    }

    /// Whether a call that carries this is one of the cluster's, in a time that does not depend on the bytes.
    pub(crate) fn accept(&self, given: &HeaderValue) -> bool {
        let now = self.0.now.read().unwrap_or_else(PoisonError::into_inner);
        now.iter().fold(false, |good, (_, header)| same(header.as_bytes(), given.as_bytes()) | good)
    }
}

/// The first token, and all of them as calls carry them.
fn read(path: &Path) -> Result<(JoinToken, Tokens), JoinTokenError> {
    let tokens = JoinToken::all_of(path, MOST)?;
    let first = tokens.first().cloned().ok_or_else(|| JoinTokenError::empty(path))?;
    Ok((first, tokens.into_iter().map(|token| (token.clone(), token.header())).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [&str; 3] = ["0123456789abcdef", "fedcba9876543210", "another-token-of-it"];

    #[test]
    fn a_cluster_goes_from_one_token_to_the_next_and_always_accepts_its_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = ["router", "node"].map(|name| dir.path().join(name));
        let write = |file: usize, text: &str| std::fs::write(&files[file], text).expect("written");
        [0, 1].iter().for_each(|file| write(*file, TOKENS[0]));
        let [router, node] = files.each_ref().map(|file| JoinTokens::load(file).expect("a token"));
        let keys = router.derive("keys");
        let of = |token: &str| JoinToken::of(token).expect("a token").header();
        for text in ["0123456789abcdef\nfedcba9876543210\n", "fedcba9876543210\n\n0123456789abcdef", TOKENS[1]] {
            for (file, reader) in [(0, &router), (1, &node)] {
                write(file, text);
                reader.read_again();
                assert!(router.accept(&node.header()) && node.accept(&router.header()), "{text}");
            }
        }
        assert_eq!(router.header(), of(TOKENS[1]));
        assert!(!router.accept(&of(TOKENS[0])), "that one is over");
        // What is wrong changes nothing.
        for wrong in ["", "short", "two words of it all", &TOKENS.join("\n")] {
            write(0, wrong);
            router.read_again();
            assert!(JoinTokens::load(&files[0]).is_err() && router.accept(&of(TOKENS[1])), "{wrong}");
        }
        assert_eq!(router.derive("keys"), keys, "for as long as the process runs");
        assert!(router.derive_all("keys") == node.derive_all("keys") && router.derive_all("keys") != [keys]);
        assert!(!format!("{router:?}").contains("fedc"), "in no log");
    }
}
