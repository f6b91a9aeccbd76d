//! Worker addresses, checked before UCX sees them. `ucp_ep_create` takes a pointer without a length and trusts what is
//! there: a made-up address ends the process, a truncated one is read past its end. Addresses come from strangers, in
//! tickets and hellos, so [`Endpoint::connect`](super::owners::Endpoint::connect) takes nothing but a
//! [`CheckedAddress`], and there are two ways to one: our own worker's word, and a tag that only a holder of the
//! cluster's key can have made.
//!
//! ```text
//! 0..4   magic "TKA1"
//! 4..6   bytes of UCX's address     (little endian)
//! 6..22  tag: HMAC-SHA256 of magic, length and address, truncated
//! 22..   UCX's address, opaque
//! ```
//! The tag's key comes from [`UcxConfig::address_keys`](super::UcxConfig::address_keys) and from the build id, so that
//! a UCX reads addresses of its own version and profile only. It says who made an address, not that its worker still
//! lives. Knows no UCX call. Read next: `owners.rs`.
use std::sync::Arc;

use crate::error::AddressError;
use crate::handshake::hmac_sha256;

/// A worker address has some hundred bytes; one with many network devices a few thousand.
pub(super) const MAX_ADDRESS_BYTES: usize = 4096;
/// In front of UCX's bytes.
pub(super) const HEAD_BYTES: usize = TAG_AT + TAG_BYTES;

const MAGIC: [u8; 4] = *b"TKA1";
const TAG_AT: usize = 6;
const TAG_BYTES: usize = 16;

/// The cluster's secrets as they are now: addresses are tagged with the first one, and read with any. Has no `Debug`.
#[derive(Clone)]
pub struct AddressKeys(Arc<dyn Fn() -> Vec<[u8; 32]> + Send + Sync>);

impl AddressKeys {
    /// Asked at each address.
    pub fn new(now: impl Fn() -> Vec<[u8; 32]> + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Whether anybody could know them.
    pub(super) fn are_secret(&self) -> bool {
        !(self.0)().contains(&[0; 32])
    }
}

impl From<[u8; 32]> for AddressKeys {
    fn from(only: [u8; 32]) -> Self {
        Self::new(move || vec![only])
    }
}

impl Default for AddressKeys {
    fn default() -> Self {
        [0; 32].into()
    }
}

/// Makes and checks the tags of one cluster and one build.
#[derive(Clone)]
pub(super) struct AddressKey {
    secrets: AddressKeys,
    build_id: Arc<str>,
}

impl AddressKey {
    pub(super) fn new(secrets: &AddressKeys, build_id: &str) -> Self {
        Self { secrets: secrets.clone(), build_id: build_id.into() }
    }

    /// By each secret.
    fn tags(&self, head: &[u8], address: &[u8]) -> Vec<[u8; TAG_BYTES]> {
        let tag = |secret: [u8; 32]| {
            let key = hmac_sha256(&secret, &[b"tandem kv address ", self.build_id.as_bytes()]);
            let mut tag = [0; TAG_BYTES];
            tag.copy_from_slice(&hmac_sha256(&key, &[head, address])[..TAG_BYTES]);
            tag
        };
        (self.secrets.0)().into_iter().map(tag).collect()
    }
}

/// A worker address that may be given to UCX: complete, and made by UCX itself. Aligned, and padded with zeros to whole
/// words.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct CheckedAddress {
    words: Box<[u64]>,
    bytes: usize,
}

impl CheckedAddress {
    /// Of our own worker, as UCX gave it.
    ///
    /// # Errors
    /// `Empty`, or `TooLong`: no peer would take it.
    pub(super) fn own(address: &[u8]) -> Result<Self, AddressError> {
        match address.len() {
            0 => Err(AddressError::Empty),
            bytes if bytes > MAX_ADDRESS_BYTES => Err(AddressError::TooLong { bytes, most: MAX_ADDRESS_BYTES }),
            _ => Ok(Self::copy(address)),
        }
    }

    /// From a ticket or a hello.
    ///
    /// # Errors
    /// Whatever [`CheckedAddress::sealed`] with this key does not write.
    pub(super) fn parse(wire: &[u8], key: &AddressKey) -> Result<Self, AddressError> {
        let most = HEAD_BYTES + MAX_ADDRESS_BYTES;
        if wire.is_empty() {
            return Err(AddressError::Empty);
        }
        if wire.len() > most {
            return Err(AddressError::TooLong { bytes: wire.len(), most });
        }
        let (head, after) = wire.split_first_chunk::<TAG_AT>().ok_or(AddressError::Truncated)?;
        let (tag, address) = after.split_first_chunk::<TAG_BYTES>().ok_or(AddressError::Truncated)?;
        if head[..4] != MAGIC {
            return Err(AddressError::Magic);
        }
        if usize::from(u16::from_le_bytes([head[4], head[5]])) != address.len() {
            return Err(AddressError::Length);
        }
        if !key.tags(head, address).iter().fold(false, |good, ours| same(ours, tag) | good) {
            return Err(AddressError::Tag);
        }
        Self::own(address)
    }

    /// As it travels.
    pub(super) fn sealed(&self, key: &AddressKey) -> Vec<u8> {
        let address = self.to_bytes();
        let mut wire = MAGIC.to_vec();
        // `own` has bounded it.
        wire.extend_from_slice(&(self.bytes as u16).to_le_bytes());
        // Without one nobody reads it.
        let tag = key.tags(&wire, &address).first().copied().unwrap_or_default();
        wire.extend_from_slice(&tag);
        wire.extend_from_slice(&address);
        wire
    }

    /// What UCX reads.
    pub(super) fn as_ptr(&self) -> *const u64 {
        self.words.as_ptr()
    }

    fn copy(address: &[u8]) -> Self {
        let word = |part: &[u8]| {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            u64::from_ne_bytes(bytes)
        };
        Self { words: address.chunks(8).map(word).collect(), bytes: address.len() }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(self.bytes);
        bytes
    }
}

/// In a time that does not tell where they differ.
fn same(ours: &[u8; TAG_BYTES], theirs: &[u8; TAG_BYTES]) -> bool {
    std::hint::black_box(ours.iter().zip(theirs).fold(0, |difference, (a, b)| difference | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> AddressKey {
        AddressKey::new(&[byte; 32].into(), "ucx-1.13.1/shm/7")
    }

    #[test]
    fn an_address_is_read_with_any_key_and_tagged_with_the_first() {
        let keys = |keys: &'static [u8]| {
            AddressKey::new(&AddressKeys::new(|| keys.iter().map(|byte| [*byte; 32]).collect()), "ucx-1.13.1/shm/7")
        };
        let address = CheckedAddress::own(&[7; 100]).expect("short");
        let read = |from: &AddressKey, by: &AddressKey| CheckedAddress::parse(&address.sealed(from), by).is_ok();
        let (old, both, next, new) = (keys(&[1]), keys(&[1, 2]), keys(&[2, 1]), keys(&[2]));
        assert!(read(&old, &both) && read(&both, &old) && read(&both, &next) && read(&next, &both));
        assert!(read(&next, &new) && read(&new, &next) && !read(&old, &new) && !read(&new, &old));
        assert!(!read(&keys(&[]), &keys(&[])) && !read(&keys(&[]), &old));
    }

    #[test]
    fn each_wrong_address_has_its_own_error() {
        let wire = CheckedAddress::own(&[7; 100]).expect("short").sealed(&key(0));
        let changed = |at: usize| {
            let mut wire = wire.clone();
            wire[at] ^= 1;
            CheckedAddress::parse(&wire, &key(0))
        };
        assert_eq!(CheckedAddress::parse(&[], &key(0)), Err(AddressError::Empty));
        assert_eq!(CheckedAddress::parse(&wire[..HEAD_BYTES - 1], &key(0)), Err(AddressError::Truncated));
        assert_eq!(CheckedAddress::parse(&wire[..wire.len() - 1], &key(0)), Err(AddressError::Length));
        assert_eq!(changed(0), Err(AddressError::Magic));
        assert_eq!(changed(4), Err(AddressError::Length));
        assert_eq!(changed(HEAD_BYTES - 1), Err(AddressError::Tag));
        assert_eq!(changed(HEAD_BYTES), Err(AddressError::Tag));
        assert_eq!(CheckedAddress::parse(&wire, &key(1)), Err(AddressError::Tag), "another cluster");
        let other_build = AddressKey::new(&[0; 32].into(), "ucx-1.22.0/shm/7");
        assert_eq!(CheckedAddress::parse(&wire, &other_build), Err(AddressError::Tag), "another build");
        let (bytes, most) = (HEAD_BYTES + MAX_ADDRESS_BYTES + 1, HEAD_BYTES + MAX_ADDRESS_BYTES);
        assert_eq!(CheckedAddress::parse(&vec![0; bytes], &key(0)), Err(AddressError::TooLong { bytes, most }));
    }

    #[test]
    fn an_own_address_that_no_peer_would_take_is_an_error() {
        let (bytes, most) = (MAX_ADDRESS_BYTES + 1, MAX_ADDRESS_BYTES);
        assert_eq!(CheckedAddress::own(&vec![1; bytes]), Err(AddressError::TooLong { bytes, most }));
        assert_eq!(CheckedAddress::own(&[]), Err(AddressError::Empty));
        let longest = CheckedAddress::own(&vec![1; most]).expect("just short enough");
        assert_eq!(CheckedAddress::parse(&longest.sealed(&key(3)), &key(3)), Ok(longest));
    }

    proptest! {
        #[test]
        fn round_trip_and_one_changed_bit(
            address in prop::collection::vec(any::<u8>(), 1..600), at in any::<prop::sample::Index>(), bit in 0..8,
        ) {
            let checked = CheckedAddress::own(&address).expect("short");
            prop_assert_eq!(checked.to_bytes(), address);
            let mut wire = checked.sealed(&key(9));
            prop_assert_eq!(CheckedAddress::parse(&wire, &key(9)), Ok(checked));
            let at = at.index(wire.len());
            wire[at] ^= 1u8 << bit;
            prop_assert!(CheckedAddress::parse(&wire, &key(9)).is_err());
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert!(CheckedAddress::parse(&bytes, &key(0)).is_err());
        }
    }
}
