//! Randomness by name: every use of the benchmark's seed has its own stream, so that one more draw here changes nothing
//! there, and request 17 is the same whether or not request 16 was made.
use rand::SeedableRng;
use rand::rngs::StdRng;

/// A generator for the thing that `path` names, beginning with the user's seed.
pub fn stream(path: &[u64]) -> StdRng {
    StdRng::seed_from_u64(key(path))
}

/// The 64 bits that `path` names; other paths have others, as far as 64 bits go.
pub fn key(path: &[u64]) -> u64 {
    path.iter().fold(path.len() as u64, |state, part| split_mix(state.rotate_left(29) ^ split_mix(*part)))
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA '14).
fn split_mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn paths_have_their_own_keys() {
        let mut keys = HashSet::new();
        for a in 0..100 {
            keys.insert(key(&[a]));
            for b in 0..100 {
                keys.insert(key(&[a, b]));
            }
        }
        assert_eq!(keys.len(), 100 + 100 * 100);
        assert_eq!(key(&[1, 2]), key(&[1, 2]));
    }
}
