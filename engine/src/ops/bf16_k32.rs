//! The operands of the arithmetic `bf16-k32`: what of `x` and of a block of packed weights is multiplied, in which
//! bits. `tiles.rs` multiplies them. Weights are decoded from the file's format for each product: a copy in bf16 would
//! be three times as many bytes to read. Decode of one sequence spends its time here, so that each instruction counts.
//!
//! **Quantized weights** are computed in f16, 32 at a time: `scale * q + offset`, rounded once. Its 11 bits are then
//! rounded to the 8 of a bf16, halves away from zero. That is no conversion: the bits of an f16, moved three places to
//! the right beside the sign, are those of a bf16 that is 2⁻¹¹² times as great. [`from_sums`] makes up for that.
//!
//! **Powers of two.** f16 has few of them. So a matrix of quantized weights is lifted once, when it is loaded: its
//! scales are multiplied by the power of two that brings the greatest possible weight near f16's greatest number. And
//! `x` is multiplied by [`X_LIFT`] with such weights, so that no product gets near the smallest f32. All of these are
//! exact.
//!
//! **`x`** is rounded to the nearest bf16, ties to even, by the instruction.
//!
//! **Tiny numbers.** A tile takes subnormal numbers for zeros. Of a matrix's weights those are less than 2⁻²⁸ of the
//! greatest one. `x`, and weights that are bf16 in the file, count as zero below [`TINY`]: so all are multiples of
//! 2⁻⁵⁷, and each product, and each sum of them, rounded or not, is a multiple of 2⁻¹¹⁴: zero, or far from subnormal.
use std::arch::x86_64::*;

use half::f16;

use super::block_lanes;
use super::packed::{BLOCK, PANEL, TINY, WeightFormat};
use super::simd::{LANES, bits, rounded_pairs};
use super::weight_format::Block;

/// Pairs of `k` of a block.
pub(super) const PAIRS: usize = BLOCK / 2;
/// Binary exponent by which `x` is greater where weights are quantized.
const X_LIFT: i32 = 80;
/// By which weights moved from f16 to bf16 are smaller: the difference of the exponents' biases.
const WEIGHT_DROP: i32 = 127 - 15;
/// What sums with rounded weights are multiplied by. One weight in eight lies in the middle of two bf16 and becomes the
/// greater of them: on average weights grow by 1/16 of their last place, which is 1/16 of 0.694 of the last place at 1.
const UNBIASED: f32 = 1.0 - 0.694 / 16.0 / 128.0;

/// What sums with a matrix of this format are multiplied by; `lifted` is the binary exponent by which its weights were.
pub(super) fn from_sums(format: WeightFormat, lifted: i32) -> f32 {
    match format {
        WeightFormat::Bf16 => 1.0,
        _ => UNBIASED * 2f32.powi(WEIGHT_DROP - X_LIFT - lifted),
    }
}

/// The binary exponent by which `x` is greater for weights of this format.
pub(super) fn x_lift(format: WeightFormat) -> i32 {
    if format == WeightFormat::Bf16 { 0 } else { X_LIFT }
}

/// 16 pairs of a group's `x`, in bf16, their exponents greater by `lift`. What is too great for that becomes a NaN.
///
/// # Safety
/// The caller has the features of AVX-512 with BF16 enabled. At most 32 elements.
#[inline(always)]
pub(super) unsafe fn pairs_of(group: &[f32], lift: i32) -> __m512i {
    /// Of a bf16 all but the sign.
    const MAGNITUDE: i16 = 0x7fff;
    // SAFETY: as the caller says.
    unsafe {
        let pairs = bits(rounded_pairs(group));
        let magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(MAGNITUDE));
        let kept = _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16(TINY as i16));
        // Saturated, the bits are those of a NaN.
        let lifted = _mm512_adds_epi16(magnitudes, _mm512_set1_epi16((lift << 7) as i16));
        // mask ? lifted : pairs
        let signed = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi16(MAGNITUDE), lifted, pairs);
        _mm512_maskz_mov_epi16(kept, signed)
    }
}

/// How half a block, of 16 columns, yields its weights. `weight_format.rs` has the pictures. Vectors of f16 have one
/// column in each lane of 32 bits: of scales and offsets both halves are the same, of weights they are a pair of `k`.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `four` is below 4; the caller has the
/// features enabled. All loads are unaligned ones.
trait Format {
    const KIND: WeightFormat;
    /// Scale and offset; of Q6_K the scales of the first and of the last 16 `k`.
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2];
    /// The weights of four pairs of `k`, from `8 * four` on.
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4];
}

#[allow(non_camel_case_types, reason = "the format's name")]
struct Q4_1;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q5_1;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q8_0;
struct Q4K;
struct Q5K;
struct Q6K;

impl Format for Q4_1 {
    const KIND: WeightFormat = WeightFormat::Q4_1;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: 32 scales and 32 offsets.
        unsafe { [twice(block.scales, half), twice(block.scales.add(PANEL * 2), half)] }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: as the caller says; the format has four bits.
        unsafe { of_five_bits(&FOUR_BITS, integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: as the caller says; scales lie like those of Q4_1.
        unsafe { Q4_1::scales(block, half) }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(&FIVE_BITS, integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: as the caller says; a block begins with the factors of scales and offsets.
        unsafe {
            let [scale, offset] = Q4_1::scales(block, half);
            let [of_scale, of_offset] = factors(block.numbers, half);
            [_mm512_mul_ph(scale, of_scale), _mm512_mul_ph(offset, of_offset)]
        }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: as the caller says; the format has four bits.
        unsafe { of_five_bits(&FOUR_BITS, integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: as the caller says; scales and factors lie like those of Q4_K.
        unsafe { Q4K::scales(block, half) }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(&FIVE_BITS, integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: as the caller says; a block begins with two factors a column.
        unsafe {
            let (scale, [first, last]) = (twice(block.scales, half), factors(block.numbers, half));
            [_mm512_mul_ph(scale, first), _mm512_mul_ph(scale, last)]
        }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: as the caller says; the format has six bits.
        unsafe { of_six_bits(integers(Self::KIND, block, half, four), scales[four / 2]) }
    }
}

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512h; 2] {
        // SAFETY: 32 scales.
        unsafe { [twice(block.scales, half), _mm512_setzero_ph()] }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: Block, half: usize, four: usize, scales: [__m512h; 2]) -> [__m512h; 4] {
        // SAFETY: a block is 16 lines of 64 bytes, of two pairs and 16 columns each: the left half's, then the right
        // one's. Read are line `4 * four + half` and the second behind it, at most the last one.
        unsafe {
            let at = block.numbers.add((4 * four + half) * 64);
            let mut pairs = [_mm512_setzero_ph(); 4];
            for (i, pair) in pairs.iter_mut().enumerate() {
                *pair = _mm512_mul_ph(of_bytes(at.add(i / 2 * 2 * 64 + i % 2 * 32)), scales[0]);
            }
            pairs
        }
    }
}

// Functions and no closures, see `block_lanes.rs`.

/// 16 of 32 f16, each in both halves of a lane.
///
/// # Safety
/// All 32 are readable; the caller has the features enabled.
#[inline(always)]
unsafe fn twice(halves: *const u8, half: usize) -> __m512h {
    // SAFETY: as the caller says; the indices are 64 bytes.
    unsafe {
        let indices = _mm512_loadu_si512(TWICE[half].as_ptr().cast());
        _mm512_castsi512_ph(_mm512_permutexvar_epi16(indices, _mm512_loadu_si512(halves.cast())))
    }
}

static TWICE: [[u16; 2 * LANES]; 2] = {
    let mut indices = [[0; 2 * LANES]; 2];
    let mut i = 0;
    while i < 2 * PANEL {
        indices[i / PANEL][i % PANEL] = i as u16 / 2;
        i += 1;
    }
    indices
};

/// The first and the second ones of 16 of 32 pairs of small integers, each in both halves of a lane.
///
/// # Safety
/// All 32 pairs are readable; the caller has the features enabled.
#[inline(always)]
unsafe fn factors(pairs: *const u8, half: usize) -> [__m512h; 2] {
    // SAFETY: as the caller says; for the rest arithmetic in lanes.
    unsafe {
        let both = _mm512_castph_si512(of_bytes(pairs.add(half * 2 * LANES)));
        let (first, second) = (_mm512_slli_epi32::<16>(both), _mm512_srli_epi32::<16>(both));
        let (low, high) = (0x5555_5555, 0xaaaa_aaaa);
        [
            _mm512_castsi512_ph(_mm512_mask_mov_epi16(both, high, first)),
            _mm512_castsi512_ph(_mm512_mask_mov_epi16(both, low, second)),
        ]
    }
}

/// 32 i8 as f16.
///
/// # Safety
/// They are readable; the caller has the features enabled.
#[inline(always)]
unsafe fn of_bytes(bytes: *const u8) -> __m512h {
    // SAFETY: as the caller says.
    unsafe { _mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(_mm256_loadu_si256(bytes.cast()))) }
}

/// The numbers below 16, twice.
static FOUR_BITS: [f16; 32] = numbers(15);
/// The numbers below 32.
static FIVE_BITS: [f16; 32] = numbers(31);

/// What the lowest five bits of an index stand for where those of `mask` count.
const fn numbers(mask: usize) -> [f16; 32] {
    let mut table = [f16::ZERO; 32];
    let mut i = 0;
    while i < 32 {
        table[i] = f16::from_f32_const((i & mask) as f32);
        i += 1;
    }
    table
}

/// The integers of four pairs, each in the lowest bits of its half of a lane; above them may be others.
///
/// # Safety
/// As for [`Format::four_pairs`] of a format of nibbles.
#[inline(always)]
unsafe fn integers(format: WeightFormat, block: Block, half: usize, four: usize) -> [__m512i; 4] {
    // SAFETY: as the caller says; for the rest arithmetic in lanes.
    unsafe {
        let [first, second] = block_lanes::integers(format, block, half, four);
        [first, second, _mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(second)]
    }
}

/// The weights of four pairs of integers, whose five lowest bits are looked up.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_five_bits(table: &[f16; 32], pairs: [__m512i; 4], [scale, offset]: [__m512h; 2]) -> [__m512h; 4] {
    // SAFETY: a table has 64 bytes, and a permutation looks at the five low bits of its indices.
    unsafe {
        let table = _mm512_loadu_si512(table.as_ptr().cast());
        let mut weights = [offset; 4];
        for (weight, pair) in weights.iter_mut().zip(pairs) {
            let q = _mm512_castsi512_ph(_mm512_permutexvar_epi16(pair, table));
            *weight = _mm512_fmadd_ph(q, scale, offset);
        }
        weights
    }
}

/// Of six bits, less 32.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_six_bits(pairs: [__m512i; 4], scale: __m512h) -> [__m512h; 4] {
    /// 1,024: a small integer in its lowest bits is added to it.
    const MAGIC: f16 = f16::from_f32_const(1024.0);
    const LESS: f16 = f16::from_f32_const(1024.0 + 32.0);
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let (magic, less) = (_mm512_set1_epi16(MAGIC.to_bits() as i16), _mm512_set1_epi16(LESS.to_bits() as i16));
        let mut weights = [scale; 4];
        for (weight, pair) in weights.iter_mut().zip(pairs) {
            // pair & 63 | magic
            let q = _mm512_ternarylogic_epi32::<0xea>(pair, _mm512_set1_epi16(63), magic);
            *weight = _mm512_mul_ph(_mm512_sub_ph(_mm512_castsi512_ph(q), _mm512_castsi512_ph(less)), scale);
        }
        weights
    }
}

/// Pairs of f16 as bf16 2⁻¹¹² times as great.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn rounded(pairs: __m512h) -> __m512i {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        // Times 2¹², plus a half, by 2¹⁵: moved by three places, and rounded. Bits of magnitudes have their order, so
        // that a carry into the exponent is right.
        let moved = _mm512_mulhrs_epi16(_mm512_castph_si512(pairs), _mm512_set1_epi16(1 << 12));
        // The exponent of a bf16 is three bits longer: the sign was moved there.
        _mm512_and_si512(moved, _mm512_set1_epi16(0x8fff_u16 as i16))
    }
}

/// Writes a block of quantized weights as the two tiles of its left and its right columns, each 16 rows of 16 pairs.
///
/// # Safety
/// The function's `block` is a whole block of the format; two tiles may be written, which begin at a line of cache; the
/// machine has the features.
pub(super) type ToTiles = unsafe fn(block: Block, tiles: *mut u32);

/// How blocks of a format become tiles; `None` where they are tiles already.
///
/// # Panics
/// For a format that is not kept for this arithmetic.
pub(super) fn to_tiles(format: WeightFormat) -> Option<ToTiles> {
    match format {
        WeightFormat::Bf16 => None,
        WeightFormat::Q4_1 => Some(block_to_tiles::<Q4_1>),
        WeightFormat::Q5_1 => Some(block_to_tiles::<Q5_1>),
        WeightFormat::Q8_0 => Some(block_to_tiles::<Q8_0>),
        WeightFormat::Q4K => Some(block_to_tiles::<Q4K>),
        WeightFormat::Q5K => Some(block_to_tiles::<Q5K>),
        WeightFormat::Q6K => Some(block_to_tiles::<Q6K>),
        format => panic!("{format:?} is not kept for tiles"),
    }
}

/// See [`ToTiles`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512fp16,avx2,fma,f16c")]
unsafe fn block_to_tiles<F: Format>(block: Block, tiles: *mut u32) {
    // SAFETY: two halves of four times four pairs are the rows of two tiles.
    unsafe {
        let scales = [F::scales(block, 0), F::scales(block, 1)];
        for four in 0..4 {
            for (half, scales) in scales.into_iter().enumerate() {
                let pairs = F::four_pairs(block, half, four, scales);
                for (i, pair) in pairs.into_iter().enumerate() {
                    let row = tiles.add((half * PAIRS + 4 * four + i) * PAIRS);
                    _mm512_store_si512(row.cast(), rounded(pair));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_is_what_it_says() {
        assert_eq!(f32::from_bits(u32::from(TINY) << 16), 2f32.powi(-50));
    }
}
