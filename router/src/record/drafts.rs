//! Speculative decoding as nodes report it: how many tokens they guessed for one request, and how many were right.

/// Guesses at tokens, and those of them that came true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Verified.
    pub drafted: u32,
    /// Right.
    pub accepted: u32,
}

impl Drafts {
    /// Counts both; they are a node's word.
    pub fn add(&mut self, Self { drafted, accepted }: Self) {
        self.drafted = self.drafted.saturating_add(drafted);
        self.accepted = self.accepted.saturating_add(accepted);
    }
}
