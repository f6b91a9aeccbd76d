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
    let Block { scales, numbers } = block;
    // SAFETY: a block's scales are runs of 32 f16, two of Q4_1, Q5_1, Q4_K and Q5_K, one of Q8_0 and Q6_K; a block of a
    // format with factors begins with 32 pairs of bytes. Read are 16 columns' of each.
    unsafe {
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => [_mm512_set1_ps(1.0), _mm512_setzero_ps()],
            WeightFormat::Q8_0 => [halves(scales, half), _mm512_setzero_ps()],
            WeightFormat::Q4_1 | WeightFormat::Q5_1 => [halves(scales, half), halves(scales, 2 + half)],
            WeightFormat::Q4K | WeightFormat::Q5K => {
                let [scale, offset] = bytes(_mm256_loadu_si256(numbers.add(half * 2 * LANES).cast()));
                [_mm512_mul_ps(halves(scales, half), scale), _mm512_mul_ps(halves(scales, 2 + half), offset)]
            }
            WeightFormat::Q6K => {
                let (scale, factors) = (halves(scales, half), numbers.add(half * 2 * LANES));
                let [first, last] = bytes(_mm256_loadu_si256(factors.cast()));
                [_mm512_mul_ps(scale, first), _mm512_mul_ps(scale, last)]
            }
        }
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
    // fifth, of six bits two with the upper ones.
    unsafe {
        let integers = block.numbers.add(format.factors_bytes());
        let nibbles = _mm512_loadu_si512(integers.add(format.nibbles_at(half, four)).cast());
        let upper = integers.add(format.upper_at(half, four)).cast();
        match format {
            WeightFormat::Q5_1 | WeightFormat::Q5K => {
                let fifth = _mm512_loadu_si512(upper);
                [below(nibbles, fifth, 28 + 2 * four), below(_mm512_srli_epi32::<4>(nibbles), fifth, 29 + 2 * four)]
            }
            WeightFormat::Q6K => {
                let (upper, at) = (_mm512_loadu_si512(upper), 28 + four % 2 * 4);
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
