//! Bugs on purpose, for the tests that have to notice them: only the constructor of a `MemNetwork` takes one.

/// Which rule of the receiver is broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// An abandoned hand-off lets go of its blocks at once, whoever still writes into them.
    FreeEarly,
    /// Blocks are taken as they come.
    SkipChecksum,
    /// An abandoned hand-off lets go of its blocks, and its peer may write into them as before.
    ForgetFence,
}
