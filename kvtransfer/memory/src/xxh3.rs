//! XXH3-64 without a seed, by the crate that has it for every processor, or by `xxh3_avx2.rs`.
#![allow(unsafe_code)]
use xxhash_rust::xxh3::xxh3_64;

#[cfg(target_arch = "x86_64")]
use crate::xxh3_avx2;

/// As fast as this processor can.
pub(crate) fn xxh3(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if xxh3_avx2::takes(bytes.len()) {
        // SAFETY: it takes them.
        return unsafe { xxh3_avx2::hash(bytes) };
    }
    xxh3_64(bytes)
}
