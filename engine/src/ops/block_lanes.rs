//! Half a block's scales and integers as lanes of AVX-512, one of 32 bits for each of 16 columns: what both kernels of
//! bf16 products decode. `weight_format.rs` has the pictures; `bf16_gemm.rs` and `bf16_k32.rs` go on from here.
//!
//! Functions and no closures: those would not be compiled for the caller's instruction set.
use std::arch::x86_64::*;

use super::simd::LANES;
use super::weight_format::{Block, WeightFormat};

/// Scale and offset of the columns, one and zero where weights are no quantized ones; of Q6_K the scales of the first
/// and of the last 16 `k`.
///
/// # Safety
/// `block` is a whole block of the format; `half` is 0 or 1; the caller has the features of AVX-512 with BF16 enabled.
#[inline(always)]
pub(super) unsafe fn scales(format: WeightFormat, block: Block, half: usize) -> [__m512; 2] {
    // SAFETY: as the caller says.
    unsafe { with_factors(format, shared_scales(format, block, half), block, half) }
}

/// The same before the block's factors: what all blocks of a super-block have in common.
///
/// # Safety
/// As for [`scales`].
#[inline(always)]
pub(super) unsafe fn shared_scales(format: WeightFormat, block: Block, half: usize) -> [__m512; 2] {
    let scales = block.scales;
    // SAFETY: a block's scales are runs of 32 f16, two of Q4_1, Q5_1, Q4_K and Q5_K, one of Q8_0 and Q6_K. Read are 16
    // columns' of each.
    unsafe {
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => [_mm512_set1_ps(1.0), _mm512_setzero_ps()],
            WeightFormat::Q8_0 => [halves(scales, half), _mm512_setzero_ps()],
            WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => {
                [halves(scales, half), halves(scales, 2 + half)]
            }
            WeightFormat::Q6K => [halves(scales, half); 2],
        }
    }
}

/// [`scales`] from what [`shared_scales`] says.
///
/// # Safety
/// As for [`scales`].
#[inline(always)]
pub(super) unsafe fn with_factors(format: WeightFormat, shared: [__m512; 2], block: Block, half: usize) -> [__m512; 2] {
    if format.factors_bytes() == 0 {
        return shared;
    }
    // SAFETY: a block of a format with factors begins with 32 pairs of bytes. Read are 16 columns'.
    unsafe {
        let [first, second] = bytes(_mm256_loadu_si256(block.numbers.add(half * 2 * LANES).cast()));
        [_mm512_mul_ps(shared[0], first), _mm512_mul_ps(shared[1], second)]
    }
}

/// 16 f16, the `which`th.
///
/// # Safety
/// They are readable; the caller has the features enabled.
#[inline(always)]
unsafe fn halves(scales: *const u8, which: usize) -> __m512 {
    // SAFETY: as the caller says.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(which * 2 * LANES).cast())) }
}

/// Of 16 pairs of i8 the first and the second ones.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn bytes(pairs: __m256i) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let both = _mm512_cvtepi16_epi32(pairs);
        let (even, odd) = (_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(both)), _mm512_srai_epi32::<8>(both));
        [_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(odd)]
    }
}

/// Four pairs of integers, from the pair `4 * four` on. A vector holds two pairs, integers of up to six bits in bytes:
///
/// ```text
/// byte            0               1               2               3
/// vector 0        pair 0, even    pair 2, even    pair 0, odd     pair 2, odd
/// vector 1        pair 1, even    pair 3, even    pair 1, odd     pair 3, odd
/// ```
///
/// What is above an integer's bits in its byte is of no meaning.
///
/// # Safety
/// `block` is a whole block of the format, one of nibbles; `half` is 0 or 1; `four` is below 4; the caller has the
/// features enabled.
#[inline(always)]
pub(super) unsafe fn integers(format: WeightFormat, block: Block, half: usize, four: usize) -> [__m512i; 2] {
    // SAFETY: behind the factors stand rows of 16 lanes: for each half four with nibbles, of five bits one with the
    // fifth, of six bits two with the upper ones. (Of four bits `upper` is some row of nibbles that nobody reads.)
    unsafe {
        let integers = block.numbers.add(format.factors_bytes());
        let nibbles = _mm512_loadu_si512(integers.add(format.nibbles_at(half, four)).cast());
        joined(format, nibbles, _mm512_loadu_si512(integers.add(format.upper_at(half, four)).cast()), four)
    }
}

/// [`integers`] from a row of nibbles, the `four`th, and that of the bits above them, if the format has any.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn joined(format: WeightFormat, nibbles: __m512i, upper: __m512i, four: usize) -> [__m512i; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        match format {
            WeightFormat::Q5_1 | WeightFormat::Q5K => {
                [below(nibbles, upper, 28 + 2 * four), below(_mm512_srli_epi32::<4>(nibbles), upper, 29 + 2 * four)]
            }
            WeightFormat::Q6K => {
                let at = 28 + four % 2 * 4;
                [below(nibbles, upper, at), below(_mm512_srli_epi32::<4>(nibbles), upper, at + 2)]
            }
            _ => [nibbles, _mm512_srli_epi32::<4>(nibbles)],
        }
    }
}

/// The low nibble of each byte, and above it the bits that come there when `upper` is rotated to the right.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn below(nibbles: __m512i, upper: __m512i, rotation: usize) -> __m512i {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let upper = _mm512_rorv_epi32(upper, _mm512_set1_epi32(rotation as i32));
        // mask ? nibbles : upper
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(15), nibbles, upper)
    }
}
