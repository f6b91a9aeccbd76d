//! What a sender says of itself in its hello: where it comes from, its build, and where the receiver's answers go. The
//! first of them is the welcome, and nothing else of the hand-off is sent before it came. Who made the hello is seen
//! first, by the key of the hand-off (`handshake.rs`); the address is tagged as in a ticket all the same
//! (`address.rs`), since a key says that its holder may fill blocks, not that its bytes may be given to UCX.
//!
//! ```text
//! 0..76  where it comes from (`origin.rs`), which is all that a receiver says of itself in the welcome
//! 76..78 bytes of the build id   (little endian)
//! 78..   build id, then the sender's address, tagged
//! ```
use tandem_proto::PROTOCOL_VERSION;

use super::address::{AddressKey, CheckedAddress, HEAD_BYTES, MAX_ADDRESS_BYTES};
use super::origin::{ORIGIN_BYTES, Origin};
use crate::build_id::difference;
use crate::error::AddressError;
use crate::handshake::HELLO_HEAD_BYTES;
use crate::wire::MAX_HELLO_BYTES;

/// All of a hello.
pub(super) const MAX_BYTES: usize =
    HELLO_HEAD_BYTES + ORIGIN_BYTES + 2 + MAX_HELLO_BYTES + HEAD_BYTES + MAX_ADDRESS_BYTES;

/// Why what a sender says of itself was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AboutError {
    #[error("it has not the form of a hello")]
    Malformed,
    #[error("its sender speaks protocol {0}, this node {PROTOCOL_VERSION}; run one version of Tandem on all nodes")]
    Protocol(u32),
    #[error("its sender is of another build: {0}")]
    Build(String),
    #[error("{0}")]
    Address(#[from] AddressError),
}

/// What a sender says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct About {
    pub(super) origin: Origin,
    pub(super) address: CheckedAddress,
}

impl About {
    /// As it travels; `address` sealed.
    pub(super) fn encode(origin: &Origin, build_id: &str, address: &[u8]) -> Vec<u8> {
        let mut bytes = origin.encode().to_vec();
        bytes.extend_from_slice(&(build_id.len() as u16).to_le_bytes());
        bytes.extend_from_slice(build_id.as_bytes());
        bytes.extend_from_slice(address);
        bytes
    }

    /// Reads that of a sender of `build_id`.
    pub(super) fn parse(about: &[u8], build_id: &str, key: &AddressKey) -> Result<Self, AboutError> {
        let (origin, rest) = Origin::parse(about).ok_or(AboutError::Malformed)?;
        let (length, rest) = rest.split_first_chunk::<2>().ok_or(AboutError::Malformed)?;
        let (build, address) =
            rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).ok_or(AboutError::Malformed)?;
        if build != build_id.as_bytes() {
            return Err(AboutError::Build(difference(build_id, &String::from_utf8_lossy(build))));
        }
        Ok(Self { origin, address: CheckedAddress::parse(address, key)? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::origin::Generation;
    use super::super::process::ProcessName;
    use super::*;

    const BUILD: &str = "ucx-1.13.1/shm/7";

    fn key() -> AddressKey {
        AddressKey::new(&[5; 32].into(), BUILD)
    }

    proptest! {
        #[test]
        fn round_trip_and_one_changed_byte(
            bytes in prop::collection::vec(any::<u8>(), 1..300), at in any::<prop::sample::Index>(),
        ) {
            let origin = Origin { generation: Generation(3), paired: None, process: ProcessName::own(), memory: None };
            let address = CheckedAddress::own(&bytes).expect("short");
            let mut said = About::encode(&origin, BUILD, &address.sealed(&key()));
            prop_assert_eq!(About::parse(&said, "another", &key()), Err(AboutError::Build(difference("another", BUILD))));
            let at = ORIGIN_BYTES + at.index(said.len() - ORIGIN_BYTES);
            prop_assert_eq!(About::parse(&said, BUILD, &key()), Ok(About { origin, address }));
            said[at] ^= 0x40;
            prop_assert!(About::parse(&said, BUILD, &key()).is_err(), "the proof covers the origin");
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert!(About::parse(&bytes, BUILD, &key()).is_err());
        }
    }
}
