//! Names of token blocks and checksums of KV blocks.
//!
//! A block's name decides whose KV a request reads, so it must not be met on purpose: SipHash-2-4 with 128 bits
//! (<https://www.aumasson.jp/siphash/siphash.pdf>), under a key that clients do not have. Checksums are XXH3-64
//! (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>). They guard against faults; the control plane's
//! identities guard against people.
use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::BLOCK_TOKENS;
use crate::error::{Error, ErrorKind};

/// Names a block together with everything before it: `seq[i] = H(key, seq[i-1] ‖ tok[i])`, and zero before the first.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash([u8; 16]);

impl SequenceHash {
    /// What stands before a sequence's first block.
    pub const START: Self = Self([0; 16]);

    /// Reads a field of a wire message.
    ///
    /// # Errors
    /// `InvalidArgument` for anything but 16 bytes.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, Error> {
        bytes.try_into().map(Self).map_err(|_| wrong_length("a sequence hash has 16 bytes", bytes))
    }

    /// Reads a field of many, which stand one after another.
    ///
    /// # Errors
    /// `InvalidArgument` for a last one of fewer than 16 bytes.
    pub fn all_from_wire(bytes: &[u8]) -> Result<Vec<Self>, Error> {
        match bytes.as_chunks() {
            (hashes, []) => Ok(hashes.iter().copied().map(Self).collect()),
            _ => Err(wrong_length("sequence hashes have 16 bytes each", bytes)),
        }
    }

    /// One as a field of a wire message.
    pub fn to_wire(self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// Many as one field of a wire message.
    pub fn all_to_wire(hashes: &[Self]) -> Vec<u8> {
        hashes.iter().map(|hash| hash.0).collect::<Vec<_>>().into_flattened()
    }
}

impl From<u128> for SequenceHash {
    fn from(value: u128) -> Self {
        Self(value.to_le_bytes())
    }
}

impl From<SequenceHash> for u128 {
    fn from(hash: SequenceHash) -> Self {
        Self::from_le_bytes(hash.0)
    }
}

impl fmt::Display for SequenceHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SequenceHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SequenceHash({self})")
    }
}

/// Requests with one salt may reuse each other's KV. The router derives it from the cluster's secret, the tenant and
/// what the client says; it is as secret as these.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheSalt([u8; 16]);

impl CacheSalt {
    /// Of requests that nothing tells from others, in a cluster without a secret.
    pub const NONE: Self = Self([0; 16]);

    /// These bits, as they were derived.
    pub const fn new(bits: [u8; 16]) -> Self {
        Self(bits)
    }

    /// Reads `RequestSpec.cache_salt`.
    ///
    /// # Errors
    /// `InvalidArgument` (param `cache_salt`) for anything but 16 bytes, or none.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Ok(Self::NONE);
        }
        let param = Some("cache_salt");
        let wrong = |_| Error { param, ..wrong_length("a cache salt has 16 bytes, or none", bytes) };
        bytes.try_into().map(Self).map_err(wrong)
    }

    /// As `RequestSpec.cache_salt`.
    pub fn to_wire(self) -> Vec<u8> {
        if self == Self::NONE { Vec::new() } else { self.0.to_vec() }
    }
}

impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::NONE { "CacheSalt(none)" } else { "CacheSalt(..)" })
    }
}

/// Under which the blocks of one model and one [`CacheSalt`] are named: without it nobody can tell what a prompt's
/// blocks are called, and two keys give names that have nothing to do with each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SequenceKey([u8; 16]);

impl SequenceKey {
    /// The model's digest, hashed under the salt.
    pub fn new(model_digest: u64, salt: CacheSalt) -> Self {
        Self(u128::from(SipHasher24::new_with_key(&salt.0).hash(&model_digest.to_le_bytes())).to_le_bytes())
    }

    /// Names of the blocks of `tokens`, which stand behind the block `previous`; see [`sequence_hashes`].
    pub fn hashes_after(self, previous: SequenceHash, tokens: &[u32], block_tokens: usize) -> Vec<SequenceHash> {
        let (hasher, mut previous) = (SipHasher24::new_with_key(&self.0), previous);
        let next = |block| {
            previous = chain(&hasher, previous, block);
            previous
        };
        tokens.chunks(block_tokens).map(next).collect()
    }
}

impl fmt::Debug for SequenceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SequenceKey(..)")
    }
}

/// Names of all blocks of `tokens`, the last partial one included (its name covers the tokens that it has).
pub fn sequence_hashes(key: SequenceKey, tokens: &[u32], block_tokens: usize) -> Vec<SequenceHash> {
    key.hashes_after(SequenceHash::START, tokens, block_tokens)
}

/// XXH3-64 of a message's bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// What a leaf of a KV block has at most. XXH3 is a chain of steps of 1 KiB: short leaves are many chains side by side,
/// for a device's thousands of threads, and long enough that the leaves' own hashes are 1/512 of the bytes.
pub const LEAF_BYTES: usize = 4096;

/// The checksum of a KV block: XXH3-64, with the block's length as its seed, of the little-endian XXH3-64s of its
/// leaves. Each of its `layers` equal layers is cut into leaves of [`LEAF_BYTES`] from its start on, the last one the
/// rest, so that no leaf lies in two layers, and those that are final can be hashed, in any order. Where the layers are
/// no whole 64-bit words each, the block counts as one.
///
/// This is the definition. Who has the bytes elsewhere hashes the leaves there, and joins them by
/// [`checksum_of_leaves`].
pub fn block_checksum(block: &[u8], layers: usize) -> u64 {
    let divides = layers > 0 && block.len().is_multiple_of(layers.saturating_mul(8));
    let layer_bytes = if divides { block.len() / layers } else { block.len() };
    let layers = block.chunks(layer_bytes.max(1));
    let leaves: Vec<u64> = layers.flat_map(|layer| layer.chunks(LEAF_BYTES)).map(xxh3_64).collect();
    checksum_of_leaves(&leaves, block.len())
}

/// The checksum of a KV block of `block_bytes` from the XXH3-64s of its leaves, in their order in the block.
pub fn checksum_of_leaves(leaves: &[u64], block_bytes: usize) -> u64 {
    let bytes: Vec<u8> = leaves.iter().flat_map(|leaf| leaf.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, block_bytes as u64)
}

/// What a block of [`crate::BLOCK_TOKENS`] needs. One call over contiguous bytes is several times faster than the same
/// hash in pieces.
const CHAIN_BYTES: usize = 16 + 4 * BLOCK_TOKENS[BLOCK_TOKENS.len() - 1];

fn chain(hasher: &SipHasher24, previous: SequenceHash, block: &[u32]) -> SequenceHash {
    let mut buffer = [0; CHAIN_BYTES];
    match buffer.get_mut(..16 + 4 * block.len()) {
        Some(bytes) => {
            bytes[..16].copy_from_slice(&previous.0);
            let tokens = bytes[16..].chunks_exact_mut(4).zip(block);
            tokens.for_each(|(bytes, token)| bytes.copy_from_slice(&token.to_le_bytes()));
            u128::from(hasher.hash(bytes)).into()
        }
        None => chain_in_pieces(hasher, previous, block),
    }
}

fn chain_in_pieces(hasher: &SipHasher24, previous: SequenceHash, block: &[u32]) -> SequenceHash {
    let mut hasher = *hasher;
    hasher.write(&previous.0);
    for token in block {
        hasher.write(&token.to_le_bytes());
    }
    u128::from(hasher.finish128()).into()
}

fn wrong_length(what: &str, found: &[u8]) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{what}, not {}", found.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: SequenceKey = SequenceKey(*b"0123456789abcdef");

    proptest! {
        #[test]
        fn a_prefix_keeps_its_hashes(tokens in prop::collection::vec(0u32..50_000, 0..200), cut in 0usize..200) {
            let whole = sequence_hashes(KEY, &tokens, 16);
            let cut = cut.min(tokens.len()) / 16 * 16;
            let prefix = sequence_hashes(KEY, &tokens[..cut], 16);
            prop_assert_eq!(&whole[..prefix.len()], &prefix[..]);
        }

        #[test]
        fn a_block_has_one_hash_however_it_is_computed(
            key: [u8; 16], previous: [u8; 16], tokens in prop::collection::vec(any::<u32>(), 0..300),
        ) {
            let (hasher, previous) = (SipHasher24::new_with_key(&key), SequenceHash(previous));
            prop_assert_eq!(chain(&hasher, previous, &tokens), chain_in_pieces(&hasher, previous, &tokens));
        }

        #[test]
        fn one_changed_token_changes_its_block_and_all_later(
            tokens in prop::collection::vec(0u32..50_000, 1..200), at in 0usize..200,
        ) {
            let at = at % tokens.len();
            let mut changed = tokens.clone();
            changed[at] += 1;
            let (a, b) = (sequence_hashes(KEY, &tokens, 16), sequence_hashes(KEY, &changed, 16));
            for (i, (x, y)) in a.iter().zip(&b).enumerate() {
                prop_assert_eq!(x == y, i < at / 16);
            }
        }
    }

    fn some_bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 31 % 251) as u8).collect()
    }

    /// Computed by `xxhash` 3 of Python, in a program of its own.
    #[test]
    fn checksums_of_blocks_are_those_of_another_implementation() {
        let known = [
            (8, 1, 0x3a26_0ff4_b77e_ed58),
            (4096, 1, 0x4a0a_e048_25c3_243c),
            (4104, 1, 0xc8e3_5283_2bad_0615),
            (4104, 3, 0xe6e0_c718_0fc4_3c07),
            (8192, 2, 0x47ff_f102_e62f_3cbe),
            // SmolLM2-135M in bf16 and in 8 bits.
            (368_640, 30, 0x53f0_d115_8b8b_e787),
            (190_080, 30, 0xfdaa_a0f4_c025_4cc8),
            (49_200, 6, 0x48ee_2f1b_2676_e188),
            // No layers, and some that are no whole words.
            (48, 0, 0x2f33_f98d_e30b_ce2c),
            (800, 7, 0x1e96_2837_6617_fc28),
        ];
        for (bytes, layers, checksum) in known {
            assert_eq!(block_checksum(&some_bytes(bytes), layers), checksum, "{bytes} bytes of {layers} layers");
        }
        assert_eq!(block_checksum(&some_bytes(800), usize::MAX), block_checksum(&some_bytes(800), 1));
    }

    #[test]
    fn a_flip_of_any_byte_is_noticed() {
        let (mut block, layers) = (some_bytes(3 * 4104), 3);
        let checksum = block_checksum(&block, layers);
        for i in 0..block.len() {
            block[i] ^= 1 << (i % 8);
            assert_ne!(block_checksum(&block, layers), checksum, "byte {i}");
            block[i] ^= 1 << (i % 8);
        }
        assert_ne!(block_checksum(&block[..3 * 4096], layers), checksum);
    }

    proptest! {
        #[test]
        fn swapped_and_misplaced_pieces_are_noticed(
            words in 2usize..5, layers in 1usize..4, a in 0usize..4, b in 0usize..4, unit in 0usize..3,
        ) {
            // Layers of two leaves, the second one short; pieces are leaves, layers, or words.
            let layer = LEAF_BYTES + 8 * words;
            let block: Vec<u8> = (0..(layers * layer) as u64 / 8).flat_map(|i| (i * i + 1).to_le_bytes()).collect();
            let piece = [8, LEAF_BYTES, layer][unit];
            let pieces = block.len() / piece;
            let (a, b) = (a % pieces, b % pieces);
            let mut swapped = block.clone();
            let (low, high) = (a.min(b) * piece, a.max(b) * piece);
            let (head, tail) = swapped.split_at_mut(high);
            if a != b {
                head[low..low + piece].swap_with_slice(&mut tail[..piece]);
            }
            prop_assert_eq!(block_checksum(&swapped, layers) == block_checksum(&block, layers), a == b);
        }
    }

    /// `vectors_sip128` of the authors' implementation (<https://github.com/veorq/SipHash>): key and input are the
    /// bytes from 0 on.
    #[test]
    fn siphash_is_that_of_its_authors() {
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        for (length, expected) in [
            (0, "a3817f04ba25a8e66df67214c7550293"),
            (1, "da87c1d86b99af44347659119b22fc45"),
            (7, "a1f1ebbed8dbc153c0b84aa61ff08239"),
            (8, "3b62a9ba6258f5610f83e264f31497b4"),
            (16, "6ee2a4ca67b054bbfd3315bf85230577"),
            (63, "5150d1772f50834a503e069a973fbd7c"),
        ] {
            let input: Vec<u8> = (0..length).collect();
            let hash = SequenceHash::from(u128::from(SipHasher24::new_with_key(&key).hash(&input)));
            assert_eq!(hash.to_string(), expected, "{length} bytes");
        }
    }

    /// Computed by a program of its own, in Python, which gives the vectors above too.
    #[test]
    fn names_are_those_of_another_implementation() {
        let tokens: Vec<u32> = (0..40).collect();
        let names = |salt| {
            let names = sequence_hashes(SequenceKey::new(0x1122_3344_5566_7788, salt), &tokens, 16);
            names.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let plain = [
            "d2769772576428a6a254610e2fa67a09",
            "365b60e7edc4d530536e60380b3aca4f",
            "ae61472440f83eca0b32184701fc2c56",
        ];
        let salted = [
            "b900fac709d9a198cdc7d8b46e7d882e",
            "63a4f36ab0329d10abecefb087666dbf",
            "ee21ba2d1811a7551f637757b23be498",
        ];
        assert_eq!(names(CacheSalt::NONE), plain);
        assert_eq!(names(CacheSalt::new(std::array::from_fn(|i| i as u8))), salted);
    }

    #[test]
    fn another_model_or_salt_gives_unrelated_names() {
        let salts = [[0; 16], [1; 16], [[0; 15].as_slice(), &[1]].concat().try_into().unwrap()].map(CacheSalt::new);
        let keys = [1, 2].map(|model| salts.map(|salt| SequenceKey::new(model, salt)));
        let names: Vec<_> = keys.as_flattened().iter().map(|key| sequence_hashes(*key, &[5; 1600], 16)).collect();
        let all: std::collections::BTreeSet<_> = names.iter().flatten().collect();
        assert_eq!(all.len(), 6 * 100);
        // As random ones would: 64 of the 128 bits differ, give or take 5.7.
        for (i, a) in names.iter().enumerate() {
            for b in &names[..i] {
                let differ = a.iter().zip(b).map(|(a, b)| (u128::from(*a) ^ u128::from(*b)).count_ones());
                assert!(differ.sum::<u32>().abs_diff(6_400) < 400, "key {i}");
            }
        }
    }

    #[test]
    fn a_chain_goes_on_where_it_was_cut() {
        let tokens: Vec<u32> = (0..100).collect();
        let (whole, head) = (sequence_hashes(KEY, &tokens, 16), sequence_hashes(KEY, &tokens[..48], 16));
        assert_eq!(whole, [head.clone(), KEY.hashes_after(head[2], &tokens[48..], 16)].concat());
    }

    #[test]
    fn other_lengths_are_no_hashes() {
        let hashes = [3, 1 << 100].map(SequenceHash::from);
        let wire = SequenceHash::all_to_wire(&hashes);
        assert_eq!(SequenceHash::all_from_wire(&wire).unwrap(), hashes);
        assert_eq!(SequenceHash::from_wire(&hashes[1].to_wire()).unwrap(), hashes[1]);
        assert_eq!(SequenceHash::all_from_wire(&[]).unwrap(), []);
        for length in (0..32).filter(|length| *length != 16) {
            let error = SequenceHash::from_wire(&wire[..length]).unwrap_err();
            assert_eq!(error.kind, ErrorKind::InvalidArgument);
            assert_eq!(error.message, format!("a sequence hash has 16 bytes, not {length}"));
            assert_eq!(SequenceHash::all_from_wire(&wire[..length]).is_err(), length != 0);
            assert_eq!(CacheSalt::from_wire(&wire[..length]).is_err(), length != 0);
        }
        assert_eq!(CacheSalt::from_wire(&wire[..15]).unwrap_err().param, Some("cache_salt"));
        for salt in [CacheSalt::NONE, CacheSalt::new([7; 16])] {
            assert_eq!(CacheSalt::from_wire(&salt.to_wire()).unwrap(), salt);
        }
    }

    #[test]
    fn keys_and_salts_are_not_printed() {
        let salt = CacheSalt::new([0xcd; 16]);
        let printed = format!("{salt:?} {:?}", SequenceKey::new(1, salt));
        assert_eq!(printed, "CacheSalt(..) SequenceKey(..)");
    }
}
