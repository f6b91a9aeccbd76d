//! What prompts are made of, before they have words: rows and traces say which pieces, [`super::prompt`] which words.

/// A run of tokens whose content its key decides: a shorter piece of the same key is the beginning of a longer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Names the content.
    pub key: u64,
    /// Length.
    pub tokens: u32,
}
