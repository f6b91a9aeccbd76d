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

/// What a router's calls to a node carry: the [`Life`] that they belong to, as it is written.
pub const LIFE_HEADER: &str = "x-tandem-life";

/// Random id of one session between a node and a router: what the router books there ends with it. A node has one for
/// each router, and draws a new one for each stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Life(pub u64);

impl Life {
    /// Draws a new one; never zero, which on the wire means "absent".
    pub fn random(rng: &mut impl rand::Rng) -> Self {
        Self(rng.random_range(1..=u64::MAX))
    }

    /// Reads what [`LIFE_HEADER`] holds.
    ///
    /// # Errors
    /// `InvalidArgument` for anything but the 16 hexadecimal digits of an id that is not zero.
    pub fn from_header(text: &[u8]) -> Result<Self, Error> {
        let digits = std::str::from_utf8(text).ok().filter(|text| text.len() == 16 && !text.starts_with('+'));
        let id = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).filter(|id| *id != 0);
        id.map(Self).ok_or_else(|| Error::new(ErrorKind::InvalidArgument, format!("{LIFE_HEADER} is no id of a life")))
    }
}

impl fmt::Display for Life {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_survives_its_header_and_nothing_else_is_one() {
        for life in [Life(1), Life(u64::MAX), Life(0x00ab_cdef)] {
            assert_eq!(Life::from_header(life.to_string().as_bytes()).ok(), Some(life));
        }
        let wrong: [&[u8]; 5] = [b"", b"0000000000000000", b"1", b"+000000000000001", b"g000000000000000\xff"];
        for wrong in wrong {
            let error = Life::from_header(wrong).expect_err("no life");
            assert_eq!(error.kind, ErrorKind::InvalidArgument);
        }
    }
}
