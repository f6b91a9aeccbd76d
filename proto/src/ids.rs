//! Random identities. This file owns their text and wire forms; who draws them and when is the caller's matter.
use std::fmt;

use crate::error::{Error, ErrorKind};

/// Random id that a node draws at start: a restarted node is another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// Draws a new one; never zero, which on the wire means "absent".
    pub fn random(rng: &mut impl rand::Rng) -> Self {
        Self(rng.random_range(1..=u64::MAX))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// 128 random bits that name one hand-off; single use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandoffId(pub [u8; 16]);

impl HandoffId {
    /// Draws a new one.
    pub fn random(rng: &mut impl rand::Rng) -> Self {
        Self(rng.random())
    }

    /// Reads the 16 bytes of a wire message.
    ///
    /// # Errors
    /// `InvalidArgument` for any other length.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, Error> {
        let id = bytes.try_into().map_err(|_| {
            Error::new(ErrorKind::InvalidArgument, format!("hand-off id has {} bytes instead of 16", bytes.len()))
        })?;
        Ok(Self(id))
    }
}

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandoffId({self})")
    }
}
