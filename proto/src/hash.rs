//! Chained hashes of token blocks and checksums of block bytes, both XXH3-64
//! (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>). Not cryptographic: they guard against faults,
//! the control plane's identities guard against people.
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::BLOCK_TOKENS;

/// `seq[0] = H(salt ‖ tok[0])`, `seq[i] = H(seq[i-1] ‖ tok[i])`: names a block together with everything before it.
pub type SequenceHash = u64;

/// Hashes of all blocks of `tokens`, the last partial one included (its hash covers the tokens that it has).
///
/// `salt` is the model digest, so that two models never share a block.
pub fn sequence_hashes(salt: u64, tokens: &[u32], block_tokens: usize) -> Vec<SequenceHash> {
    let mut previous = salt;
    tokens
        .chunks(block_tokens)
        .map(|block| {
            previous = chain(previous, block);
            previous
        })
        .collect()
}

/// XXH3-64 of a block's bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// What a block of [`crate::BLOCK_TOKENS`] needs. One call over contiguous bytes is several times faster than the same hash in pieces.
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

    #[test]
    fn the_salt_separates_models() {
        assert_ne!(sequence_hashes(1, &[5], 16), sequence_hashes(2, &[5], 16));
    }
}
