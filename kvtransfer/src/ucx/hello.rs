//! The first frame of a hand-off: which hand-off, by which build, and where the receiver's answers go; the first of
//! them is the welcome, and nothing else of the hand-off is sent before it came. The address is tagged as in a ticket
//! (`address.rs`): a hello that is not one of our cluster's reaches nothing of UCX.
//!
//! ```text
//! 0..16  hand-off id
//! 16..18 bytes of the build id   (little endian)
//! 18..   build id, then the sender's memory as a process of its host maps it, or zeros (`one_copy/`): process id,
//!        descriptor (4 bytes each), inode, bytes, XXH3-64 of these (8 bytes each); then the sender's address, tagged
//! ```
use tandem_memory::Share;
use tandem_proto::{HandoffId, hash};

use super::address::{AddressKey, CheckedAddress, HEAD_BYTES, MAX_ADDRESS_BYTES};
use crate::error::AddressError;
use crate::wire::MAX_HELLO_BYTES;

/// Names the layout; part of the build id.
pub(super) const FORMAT: &str = "h2";

const BUILD_AT: usize = 18;
const SHARE_BYTES: usize = 32;

/// A hello that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) handoff: HandoffId,
    /// Where the sender's memory is, if this host's processes may read it: its word.
    pub(super) memory: Option<Share>,
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
    pub(super) fn encode(handoff: HandoffId, build_id: &str, memory: Option<Share>, address: &[u8]) -> Vec<u8> {
        let mut bytes = handoff.0.to_vec();
        bytes.extend_from_slice(&(build_id.len() as u16).to_le_bytes());
        bytes.extend_from_slice(build_id.as_bytes());
        bytes.extend_from_slice(&encode_share(memory));
        bytes.extend_from_slice(address);
        bytes
    }

    /// Reads one of `build_id`.
    pub(super) fn parse(bytes: &[u8], build_id: &str, key: &AddressKey) -> Result<Self, HelloError> {
        if bytes.len() > BUILD_AT + MAX_HELLO_BYTES + SHARE_BYTES + HEAD_BYTES + MAX_ADDRESS_BYTES {
            return Err(HelloError::Malformed);
        }
        let (handoff, rest) = bytes.split_first_chunk::<16>().ok_or(HelloError::Malformed)?;
        let (length, rest) = rest.split_first_chunk::<2>().ok_or(HelloError::Malformed)?;
        let (build, rest) =
            rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).ok_or(HelloError::Malformed)?;
        if build != build_id.as_bytes() {
            return Err(HelloError::Build);
        }
        let (memory, address) = rest.split_first_chunk().ok_or(HelloError::Malformed)?;
        let memory = parse_share(memory).ok_or(HelloError::Malformed)?;
        Ok(Self { handoff: HandoffId(*handoff), memory, address: CheckedAddress::parse(address, key)? })
    }
}

fn encode_share(share: Option<Share>) -> [u8; SHARE_BYTES] {
    let mut bytes = [0; SHARE_BYTES];
    if let Some(share) = share {
        bytes[..4].copy_from_slice(&share.process.to_le_bytes());
        bytes[4..8].copy_from_slice(&share.descriptor.to_le_bytes());
        bytes[8..16].copy_from_slice(&share.inode.to_le_bytes());
        bytes[16..24].copy_from_slice(&share.bytes.to_le_bytes());
    }
    let checksum = hash::checksum(&bytes[..24]);
    bytes[24..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// `None`: it was changed on its way.
fn parse_share(bytes: &[u8; SHARE_BYTES]) -> Option<Option<Share>> {
    let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let whole = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
    let share = Share { process: half(0), descriptor: half(4), inode: whole(8), bytes: whole(16) };
    (whole(24) == hash::checksum(&bytes[..24])).then_some((share.bytes > 0).then_some(share))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BUILD: &str = "ucx-1.13.1/shm/tka1";

    fn key() -> AddressKey {
        AddressKey::new(&[5; 32], BUILD)
    }

    proptest! {
        #[test]
        fn round_trip_and_one_changed_byte(
            id in any::<[u8; 16]>(), address in prop::collection::vec(any::<u8>(), 1..300),
            at in any::<prop::sample::Index>(), share in any::<Option<(u32, u32, u64, u32)>>(),
        ) {
            let address = CheckedAddress::own(&address).expect("short");
            let memory = share.map(|(process, descriptor, inode, bytes)| {
                Share { process, descriptor, inode, bytes: u64::from(bytes) << 9 | 8 }
            });
            let mut bytes = Hello::encode(HandoffId(id), BUILD, memory, &address.sealed(&key()));
            prop_assert_eq!(Hello::parse(&bytes, BUILD, &key()), Ok(Hello { handoff: HandoffId(id), memory, address }));
            prop_assert_eq!(Hello::parse(&bytes, "another", &key()), Err(HelloError::Build));
            let at = at.index(bytes.len());
            bytes[at] ^= 0x40;
            prop_assert_eq!(Hello::parse(&bytes, BUILD, &key()).is_ok(), at < 16, "only the id is not covered");
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert!(Hello::parse(&bytes, BUILD, &key()).is_err());
        }
    }
}
