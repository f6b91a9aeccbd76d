//! The first frame of a hand-off: which hand-off, by which build, and where the receiver's answers go; the first of
//! them is the welcome, and nothing else of the hand-off is sent before it came. The address is tagged as in a ticket
//! (`address.rs`): a hello that is not one of our cluster's reaches nothing of UCX.
//!
//! ```text
//! 0..16  hand-off id
//! 16..68 where it comes from (`origin.rs`)
//! 68..70 bytes of the build id   (little endian)
//! 70..   build id, then the sender's address, tagged
//! ```
use tandem_proto::HandoffId;

use super::address::{AddressKey, CheckedAddress, HEAD_BYTES, MAX_ADDRESS_BYTES};
use super::origin::{ORIGIN_BYTES, Origin};
use crate::error::AddressError;
use crate::wire::MAX_HELLO_BYTES;

const BUILD_AT: usize = 18 + ORIGIN_BYTES;

/// A hello that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) handoff: HandoffId,
    pub(super) origin: Origin,
    pub(super) address: CheckedAddress,
}

/// Why a hello was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HelloError {
    #[error("it has not the form of a hello")]
    Malformed,
    #[error("it is of another build: run one build, one UCX version and one profile on all nodes")]
    Build,
    #[error("{0}")]
    Address(#[from] AddressError),
}

impl Hello {
    /// The payload; `address` as it travels.
    pub(super) fn encode(handoff: HandoffId, build_id: &str, origin: &Origin, address: &[u8]) -> Vec<u8> {
        let mut bytes = handoff.0.to_vec();
        bytes.extend_from_slice(&origin.encode());
        bytes.extend_from_slice(&(build_id.len() as u16).to_le_bytes());
        bytes.extend_from_slice(build_id.as_bytes());
        bytes.extend_from_slice(address);
        bytes
    }

    /// Reads one of `build_id`.
    pub(super) fn parse(bytes: &[u8], build_id: &str, key: &AddressKey) -> Result<Self, HelloError> {
        if bytes.len() > BUILD_AT + MAX_HELLO_BYTES + HEAD_BYTES + MAX_ADDRESS_BYTES {
            return Err(HelloError::Malformed);
        }
        let (handoff, rest) = bytes.split_first_chunk::<16>().ok_or(HelloError::Malformed)?;
        let (origin, rest) = Origin::parse(rest).ok_or(HelloError::Malformed)?;
        let (length, rest) = rest.split_first_chunk::<2>().ok_or(HelloError::Malformed)?;
        let (build, address) =
            rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).ok_or(HelloError::Malformed)?;
        if build != build_id.as_bytes() {
            return Err(HelloError::Build);
        }
        Ok(Self { handoff: HandoffId(*handoff), origin, address: CheckedAddress::parse(address, key)? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::origin::Generation;
    use super::super::process::ProcessName;
    use super::*;

    const BUILD: &str = "ucx-1.13.1/shm/tka1";

    fn origin() -> Origin {
        Origin { generation: Generation(3), paired: Some(Generation(4)), process: ProcessName::own(), memory: None }
    }

    fn key() -> AddressKey {
        AddressKey::new(&[5; 32], BUILD)
    }

    proptest! {
        #[test]
        fn round_trip_and_one_changed_byte(
            id in any::<[u8; 16]>(), address in prop::collection::vec(any::<u8>(), 1..300),
            at in any::<prop::sample::Index>(),
        ) {
            let address = CheckedAddress::own(&address).expect("short");
            let mut bytes = Hello::encode(HandoffId(id), BUILD, &origin(), &address.sealed(&key()));
            prop_assert_eq!(Hello::parse(&bytes, BUILD, &key()), Ok(Hello { handoff: HandoffId(id), origin: origin(), address }));
            prop_assert_eq!(Hello::parse(&bytes, "another", &key()), Err(HelloError::Build));
            let at = at.index(bytes.len());
            bytes[at] ^= 0x40;
            let is_covered = at >= 16 + ORIGIN_BYTES;
            prop_assert_eq!(Hello::parse(&bytes, BUILD, &key()).is_err(), is_covered, "id and origin are not");
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert!(Hello::parse(&bytes, BUILD, &key()).is_err());
        }
    }
}
