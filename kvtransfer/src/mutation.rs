//! Bugs on purpose, for the tests that have to notice them. They are there only with the feature `planted-bugs`, which
//! no program of the product has; the constructor of a `MemNetwork` takes one, and the settings of UCX take the two of
//! the way with one copy.

/// Which rule is broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// An abandoned hand-off lets go of its blocks at once, whoever still writes into them.
    #[cfg(feature = "planted-bugs")]
    FreeEarly,
    /// Blocks are taken as they come.
    #[cfg(feature = "planted-bugs")]
    SkipChecksum,
    /// An abandoned hand-off lets go of its blocks, and its peer may write into them as before.
    #[cfg(feature = "planted-bugs")]
    ForgetFence,
    #[cfg(feature = "planted-bugs")]
    /// One copy: the receiver acknowledges a range that it has not copied.
    AcknowledgeUncopied,
    #[cfg(feature = "planted-bugs")]
    /// One copy: the sender lets go of its blocks when it has announced them.
    FreeAnnounced,
}

/// Without the feature each is `false` for good, and what it guards is not in the program.
impl Mutation {
    pub(crate) fn skips_checksum(self) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self == Self::SkipChecksum;
        #[cfg(not(feature = "planted-bugs"))]
        false
    }

    pub(crate) fn frees_early(self) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self == Self::FreeEarly;
        #[cfg(not(feature = "planted-bugs"))]
        false
    }

    pub(crate) fn acknowledges_uncopied(self) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self == Self::AcknowledgeUncopied;
        #[cfg(not(feature = "planted-bugs"))]
        false
    }

    pub(crate) fn frees_announced(self) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self == Self::FreeAnnounced;
        #[cfg(not(feature = "planted-bugs"))]
        false
    }

    pub(crate) fn forgets_fence(self) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self == Self::ForgetFence;
        #[cfg(not(feature = "planted-bugs"))]
        false
    }
}
