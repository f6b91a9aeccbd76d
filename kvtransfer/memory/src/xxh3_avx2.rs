//! XXH3-64 without a seed (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>) of pieces of whole
//! stripes, in AVX2: alone, or of what is copied past the caches, in one pass. The crate that we have it from takes
//! SSE2 where a program is built for every x86-64, and makes a second pass of it.
#![allow(unsafe_code)]
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi32,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

/// Hashed at once.
const STRIPE_BYTES: usize = 64;
/// Between two scrambles.
const STRIPES_PER_BLOCK: usize = 16;
/// The definition treats shorter inputs otherwise.
const MOST_SHORT_BYTES: usize = 240;
/// How far ahead of the copy its source is asked for: the processor's own prefetch ends at each page.
const AHEAD_BYTES: usize = 2048;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const START: [u64; 8] = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// Where in the secret: the keys of the last stripe, of a scramble, and of the end.
const LAST_KEY: usize = SECRET.len() - STRIPE_BYTES - 7;
const SCRAMBLE_KEY: usize = SECRET.len() - STRIPE_BYTES;
const END_KEY: usize = 11;

/// The definition's default.
#[rustfmt::skip]
const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// This module's functions are for the processor, and for pieces of so many bytes.
pub(crate) fn takes(bytes: usize) -> bool {
    bytes > MOST_SHORT_BYTES && bytes.is_multiple_of(STRIPE_BYTES) && is_x86_feature_detected!("avx2")
}

/// The hash of `bytes`.
///
/// # Safety
/// [`takes`] says yes for them.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn hash(bytes: &[u8]) -> u64 {
    let at = |stripe: usize| bytes[stripe * STRIPE_BYTES..][..STRIPE_BYTES].as_ptr().cast::<__m256i>();
    // SAFETY: 64 bytes of the slice; loads need no alignment.
    let load = |stripe| unsafe { [_mm256_loadu_si256(at(stripe)), _mm256_loadu_si256(at(stripe).add(1))] };
    let mut sum = Sum::start();
    let stripes = bytes.len() / STRIPE_BYTES;
    for stripe in 0..stripes {
        sum.add(load(stripe), stripe, stripes);
    }
    sum.end(bytes.len())
}

/// Copies `bytes` past the caches, and gives the hash of what it has written: each byte is read once, whatever
/// another process does to it meanwhile. The copy is seen by others after an `sfence`.
///
/// # Safety
/// [`takes`] says yes for `bytes`. There are so many at `from` and at `to`, which are multiples of 32; no other thread
/// touches those at `to`.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy_hashed(from: *const u8, to: *mut u8, bytes: usize) -> u64 {
    let mut sum = Sum::start();
    let stripes = bytes / STRIPE_BYTES;
    for stripe in 0..stripes {
        let at = stripe * STRIPE_BYTES;
        // SAFETY: a stripe of both, aligned, by the caller's promise. Volatile, since another process may write at
        // `from`: what is hashed has to be what is stored. To prefetch what is not there does nothing.
        let halves = unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD_BYTES).cast());
            let (from, to) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
            let halves = [from.read_volatile(), from.add(1).read_volatile()];
            _mm256_stream_si256(to, halves[0]);
            _mm256_stream_si256(to.add(1), halves[1]);
            halves
        };
        sum.add(halves, stripe, stripes);
    }
    sum.end(bytes)
}

/// The eight sums of the definition, in two vectors.
struct Sum([__m256i; 2]);

impl Sum {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn start() -> Self {
        // SAFETY: eight words.
        unsafe { Self([_mm256_loadu_si256(START.as_ptr().cast()), _mm256_loadu_si256(START.as_ptr().add(4).cast())]) }
    }

    /// Takes one stripe of so many.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn add(&mut self, halves: [__m256i; 2], stripe: usize, of: usize) {
        let is_last = stripe + 1 == of;
        let at = if is_last { LAST_KEY } else { stripe % STRIPES_PER_BLOCK * size_of::<u64>() };
        let keys = key(at);
        for i in 0..2 {
            let keyed = _mm256_xor_si256(halves[i], keys[i]);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            // Each sum takes its neighbour's data.
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(halves[i]);
            self.0[i] = _mm256_add_epi64(product, _mm256_add_epi64(self.0[i], swapped));
        }
        if !is_last && stripe % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1 {
            self.scramble();
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(&mut self) {
        let (prime, keys) = (_mm256_set1_epi32((PRIME32_1 as u32).cast_signed()), key(SCRAMBLE_KEY));
        for (lanes, key) in self.0.iter_mut().zip(keys) {
            let mixed = _mm256_xor_si256(*lanes, _mm256_srli_epi64::<47>(*lanes));
            let mixed = _mm256_xor_si256(mixed, key);
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
            *lanes = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn end(self, bytes: usize) -> u64 {
        let mut sums = [0u64; 8];
        // SAFETY: room for both halves.
        unsafe {
            _mm256_storeu_si256(sums.as_mut_ptr().cast(), self.0[0]);
            _mm256_storeu_si256(sums.as_mut_ptr().add(4).cast(), self.0[1]);
        }
        let mut hash = (bytes as u64).wrapping_mul(PRIME64_1);
        for (pair, keys) in sums.as_chunks::<2>().0.iter().zip(SECRET[END_KEY..].as_chunks::<16>().0) {
            let keys = u128::from_le_bytes(*keys);
            let product = u128::from(pair[0] ^ keys as u64) * u128::from(pair[1] ^ (keys >> 64) as u64);
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash = (hash ^ hash >> 37).wrapping_mul(0x1656_6791_9E37_79F9);
        hash ^ hash >> 32
    }
}

/// Of both halves of a stripe.
#[inline]
#[target_feature(enable = "avx2")]
fn key(at: usize) -> [__m256i; 2] {
    let key = SECRET[at..][..STRIPE_BYTES].as_ptr().cast::<__m256i>();
    // SAFETY: 64 bytes of the secret; loads need no alignment.
    unsafe { [_mm256_loadu_si256(key), _mm256_loadu_si256(key.add(1))] }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[repr(align(32))]
    struct Aligned([u8; 10_240]);

    #[test]
    fn it_is_xxh3_and_the_copy_is_one() {
        let mut from = Aligned([0; 10_240]);
        for seed in 1u64..=40 {
            from.0.iter_mut().zip(0u64..).for_each(|(byte, i)| *byte = ((i * seed * 0x9e37_79b9) >> 13) as u8);
            for bytes in (0..=8192).filter(|bytes| takes(*bytes)) {
                let start = seed as usize % 8 * 32;
                let source = &from.0[start..start + bytes];
                // SAFETY: `takes` was asked.
                assert_eq!(unsafe { hash(source) }, xxh3_64(source), "{bytes} bytes");
                let mut to = Aligned([7; 10_240]);
                // SAFETY: as above; both are as long, and aligned.
                let hashed = unsafe { copy_hashed(source.as_ptr(), to.0[64..].as_mut_ptr(), bytes) };
                assert_eq!((hashed, &to.0[64..64 + bytes]), (xxh3_64(source), source), "{bytes} bytes");
                assert!(to.0[..64].iter().chain(&to.0[64 + bytes..]).all(|byte| *byte == 7), "nothing else changes");
            }
        }
    }

    #[test]
    fn other_lengths_are_not_taken() {
        assert!([0, 64, 192, 240, 250, 4095, 4104].into_iter().all(|bytes| !takes(bytes)));
    }
}
