//! The first frame of a hand-off: which hand-off, by which build, and where the receiver's answers go; the first of them
//! is the welcome, and nothing else of the hand-off is sent before it came. UCX parses worker
//! addresses in C and trusts them, so what arrives is measured and checksummed first; that guards against garbage, and
//! the network must guard against malice, as it must for UCX itself.
//!
//! ```text
//! 0..16  hand-off id
//! 16..24 XXH3-64 of the rest     (little endian)
//! 24..26 bytes of the build id   (little endian)
//! 26..   build id, then the sender's worker address
//! ```
use tandem_proto::{HandoffId, hash};

use crate::wire::MAX_HELLO_BYTES;

/// A worker address has some hundred bytes; one with many network devices a few thousand.
pub(super) const MAX_ADDRESS_BYTES: usize = 4096;

const BUILD_AT: usize = 26;

/// A hello, read or to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello<'a> {
    pub(super) handoff: HandoffId,
    pub(super) build_id: &'a str,
    pub(super) address: &'a [u8],
}

impl<'a> Hello<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut rest = (self.build_id.len() as u16).to_le_bytes().to_vec();
        rest.extend_from_slice(self.build_id.as_bytes());
        rest.extend_from_slice(self.address);
        let mut bytes = self.handoff.0.to_vec();
        bytes.extend_from_slice(&hash::checksum(&rest).to_le_bytes());
        bytes.extend_from_slice(&rest);
        bytes
    }

    /// `None` for anything that [`Hello::encode`] does not write.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (handoff, after) = bytes.split_first_chunk::<16>()?;
        let (checksum, rest) = after.split_first_chunk::<8>()?;
        let sizes = BUILD_AT..=BUILD_AT + MAX_HELLO_BYTES + MAX_ADDRESS_BYTES;
        if !sizes.contains(&bytes.len()) || hash::checksum(rest) != u64::from_le_bytes(*checksum) {
            return None;
        }
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let (build_id, address) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        if address.is_empty() || address.len() > MAX_ADDRESS_BYTES {
            return None;
        }
        Some(Self { handoff: HandoffId(*handoff), build_id: str::from_utf8(build_id).ok()?, address })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trip_and_one_changed_byte(
            id in any::<[u8; 16]>(), build_id in "[a-z0-9/.]{0,40}",
            address in prop::collection::vec(any::<u8>(), 1..300), at in any::<prop::sample::Index>(),
        ) {
            let hello = Hello { handoff: HandoffId(id), build_id: &build_id, address: &address };
            let mut bytes = hello.encode();
            prop_assert_eq!(Hello::parse(&bytes), Some(hello));
            let at = at.index(bytes.len());
            bytes[at] ^= 0x40;
            prop_assert_eq!(Hello::parse(&bytes).is_some(), at < 16, "only the id is not covered");
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert_eq!(Hello::parse(&bytes), None);
        }
    }
}
