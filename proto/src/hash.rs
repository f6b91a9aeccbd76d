//! Chained hashes of token blocks and checksums of KV blocks, both XXH3-64
//! (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>). Not cryptographic: they guard against faults,
//! the control plane's identities guard against people.
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::BLOCK_TOKENS;

/// `seq[0] = H(root ‖ tok[0])`, `seq[i] = H(seq[i-1] ‖ tok[i])`: names a block together with everything before it.
pub type SequenceHash = u64;

/// Where the hashes of a sequence begin: two models never share a block, nor do two cache salts (see
/// `RequestSpec.cache_salt`). Salt 0 is none, and its root is the model digest.
pub fn hash_root(model_digest: u64, cache_salt: u64) -> SequenceHash {
    match cache_salt {
        0 => model_digest,
        salt => {
            let mut words = [0; 16];
            words[..8].copy_from_slice(&model_digest.to_le_bytes());
            words[8..].copy_from_slice(&salt.to_le_bytes());
            xxh3_64(&words)
        }
    }
}

/// Hashes of all blocks of `tokens`, the last partial one included (its hash covers the tokens that it has). `root` is
/// [`hash_root`]'s, or the hash of the block before the first.
pub fn sequence_hashes(root: SequenceHash, tokens: &[u32], block_tokens: usize) -> Vec<SequenceHash> {
    let mut previous = root;
    tokens
        .chunks(block_tokens)
        .map(|block| {
            previous = chain(previous, block);
            previous
        })
        .collect()
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
const CHAIN_BYTES: usize = 8 + 4 * BLOCK_TOKENS[BLOCK_TOKENS.len() - 1];

fn chain(previous: u64, block: &[u32]) -> SequenceHash {
    let mut buffer = [0; CHAIN_BYTES];
    match buffer.get_mut(..8 + 4 * block.len()) {
        Some(bytes) => {
            bytes[..8].copy_from_slice(&previous.to_le_bytes());
            let tokens = bytes[8..].chunks_exact_mut(4).zip(block);
            tokens.for_each(|(bytes, token)| bytes.copy_from_slice(&token.to_le_bytes()));
            xxh3_64(bytes)
        }
        None => chain_in_pieces(previous, block),
    }
}

fn chain_in_pieces(previous: u64, block: &[u32]) -> SequenceHash {
    let mut hasher = Xxh3::new();
    hasher.update(&previous.to_le_bytes());
    for token in block {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_prefix_keeps_its_hashes(tokens in prop::collection::vec(0u32..50_000, 0..200), cut in 0usize..200) {
            let whole = sequence_hashes(7, &tokens, 16);
            let cut = cut.min(tokens.len()) / 16 * 16;
            let prefix = sequence_hashes(7, &tokens[..cut], 16);
            prop_assert_eq!(&whole[..prefix.len()], &prefix[..]);
        }

        #[test]
        fn a_block_has_one_hash_however_it_is_computed(
            previous: u64, tokens in prop::collection::vec(any::<u32>(), 0..300),
        ) {
            prop_assert_eq!(chain(previous, &tokens), chain_in_pieces(previous, &tokens));
        }

        #[test]
        fn one_changed_token_changes_its_block_and_all_later(
            tokens in prop::collection::vec(0u32..50_000, 1..200), at in 0usize..200,
        ) {
            let at = at % tokens.len();
            let mut changed = tokens.clone();
            changed[at] += 1;
            let (a, b) = (sequence_hashes(7, &tokens, 16), sequence_hashes(7, &changed, 16));
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

    #[test]
    fn the_root_separates_models_and_salts() {
        let roots = [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)].map(|(model, salt)| hash_root(model, salt));
        assert_eq!(roots[..2], [1, 2], "no salt, no difference");
        let firsts: std::collections::BTreeSet<_> = roots.iter().map(|&root| sequence_hashes(root, &[5], 16)).collect();
        assert_eq!(firsts.len(), roots.len());
    }
}
