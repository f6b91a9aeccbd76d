//! Bugs on purpose, for the tests that have to notice them: the constructor of a `MemNetwork` takes one, and the
//! settings of UCX take the two of the way with one copy.

/// Which rule is broken.
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
    /// One copy: the receiver acknowledges a range that it has not copied.
    AcknowledgeUncopied,
    /// One copy: the sender lets go of its blocks when it has announced them.
    FreeAnnounced,
}
