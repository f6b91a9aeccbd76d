//! The secret that the processes of one cluster share. It stands in a file that each of them is given
//! (`--join-token-file`). What travels of it is a digest, one for each use: whoever sees a call's header can repeat the
//! call, and learns neither the secret nor its other uses. Read next: `join_tokens.rs`, `join.rs`.
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use axum::http::HeaderValue;
use sha2::{Digest, Sha256};

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

impl JoinTokenError {
    /// There is none.
    pub(crate) fn empty(path: &Path) -> Self {
        Self { path: path.to_owned(), why: "there is no token in it".to_owned() }
    }
}

impl JoinToken {
    /// The tokens in a file, each on a line of its own: one, or up to `most`.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else.
    pub(crate) fn all_of(path: &Path, most: usize) -> Result<Vec<Self>, JoinTokenError> {
        let lines = |text: String| {
            let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            match lines.len() {
                0 => Self::of("").map(|token| vec![token]),
                count if count > most => Err(format!("{count} lines; there are {most} tokens in it at most")),
                _ => lines.into_iter().map(Self::of).collect(),
            }
        };
        read(path, most).and_then(lines).map_err(|why| JoinTokenError { path: path.to_owned(), why })
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

fn read(path: &Path, tokens: usize) -> Result<String, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    // More than the longest with the ends of their lines: what is longer is no token.
    let most = (*CHARACTERS.end() + 64) * tokens;
    file.take(most as u64).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

/// In a time that does not depend on the bytes.
pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "0123456789abcdef";

    #[test]
    fn a_token_is_one_line_of_some_length() {
        let dir = tempfile::tempdir().expect("a directory");
        let load = |text: &str| {
            let path = dir.path().join("token");
            std::fs::write(&path, text).expect("written");
            JoinToken::all_of(&path, 2)
        };
        assert_eq!(load(&format!(" {TEXT}\n")).expect("a token"), [JoinToken::of(TEXT).expect("the same")]);
        assert_eq!(load(&format!("{TEXT}\n{TEXT}\r\n")).expect("tokens").len(), 2);
        let long = "x".repeat(*CHARACTERS.end() + 1);
        for wrong in ["", "short", "two words of it all", "sixteen\u{e9}characters", &long, &"x".repeat(1 << 20)] {
            let error = load(wrong).expect_err("no token").to_string();
            assert!(error.contains("--join-token-file") && error.contains("16 to 1024"), "{error}");
        }
        let missing = JoinToken::all_of(Path::new("/nowhere/token"), 2).expect_err("no file").to_string();
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
}
