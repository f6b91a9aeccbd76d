//! The operands of the arithmetic `bf16-k32`: what of `x` and of a block of packed weights is multiplied, in which
//! bits. `tiles.rs` takes weights as tiles of pairs, `few_rows.rs` as f32 in registers. Both come from here, so that
//! both multiply the same numbers. Weights are decoded from the file's format for each product: a copy in bf16 would be
//! three times as many bytes to read.
//!
//! **Rounding.** `x` is rounded to the nearest bf16, ties to even, by the instruction. Of a quantized weight the lower
//! half of its f32 is dropped, after scale and offset were made greater by [`GROW`]: rounding that costs nothing. A
//! weight is off by 0.7 of its last place at most and by 0.305 in the root mean square, without a bias, where the
//! nearest bf16 is off by 0.5 and 0.289. Decode of one sequence spends most of its time here.
//!
//! **Tiny numbers.** A tile takes subnormal numbers for zeros, an FMA does not. None ever arise: `x` and weights below
//! [`TINY`] are zeros here, so that all are multiples of 2⁻⁵⁷. Then each product, and each sum of them, rounded or not,
//! is a multiple of 2⁻¹¹⁴: zero, or far from subnormal. Quantized weights are multiples of 2⁻⁴⁸: f16 and small
//! integers.
use std::arch::x86_64::*;

use super::block_lanes;
use super::packed::{BLOCK, TINY, WeightFormat};
use super::simd::{bits, prefetch, rounded_pairs};

/// Pairs of `k` of a block.
pub(super) const PAIRS: usize = BLOCK / 2;
/// By which scales and offsets grow before weights are cut off, 0.347 of a bf16's last place at 1: 0.347 to 0.694 of
/// it, half on average over weights whose logarithms are spread evenly.
const GROW: f32 = 1.0 + 0.347 / 128.0;
/// The upper half of each lane.
const UPPER: u32 = 0xffff_0000;

/// 16 pairs of a group's `x`, in bf16.
///
/// # Safety
/// The caller has the features of AVX-512 with BF16 enabled. At most 32 elements.
#[inline(always)]
pub(super) unsafe fn pairs_of(group: &[f32]) -> __m512i {
    // SAFETY: as the caller says.
    unsafe {
        let pairs = bits(rounded_pairs(group));
        let magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
        let kept = _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16(TINY as i16));
        _mm512_maskz_mov_epi16(kept, pairs)
    }
}

/// The low and the high halves of pairs of bf16.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn as_f32(pairs: __m512i) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), upper(pairs)] }
}

/// The bf16 in the upper half of each lane.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn upper(lanes: __m512i) -> __m512 {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { _mm512_castsi512_ps(_mm512_and_si512(lanes, _mm512_set1_epi32(UPPER as i32))) }
}

/// How half a block, of 16 columns, yields its weights. `weight_format.rs` has the pictures.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `four` is below 4; the caller has the
/// features enabled. All loads are unaligned ones.
pub(super) trait Format {
    const KIND: WeightFormat;
    /// See [`block_lanes::scales`]; grown.
    #[inline(always)]
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: as the caller says.
        unsafe {
            let [first, second] = block_lanes::scales(Self::KIND, block, half);
            [grown(first), grown(second)]
        }
    }
    /// The weights of four pairs of `k`, from `8 * four` on: of each pair the even `k`, then the odd. The upper half of
    /// a lane is the weight in bf16; the lower half is of no meaning.
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4];
}

pub(super) struct Bf16;
#[allow(non_camel_case_types, reason = "the format's name")]
pub(super) struct Q4_1;
#[allow(non_camel_case_types, reason = "the format's name")]
pub(super) struct Q5_1;
#[allow(non_camel_case_types, reason = "the format's name")]
pub(super) struct Q8_0;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Format for Bf16 {
    const KIND: WeightFormat = WeightFormat::Bf16;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, _scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: a block is two halves of 16 vectors of 64 bytes, of which four are read from `4 * four`, at most 12.
        unsafe {
            let at = block.add((half * PAIRS + 4 * four) * 64).cast::<__m512i>();
            [
                even_and_odd(_mm512_loadu_si512(at)),
                even_and_odd(_mm512_loadu_si512(at.add(1))),
                even_and_odd(_mm512_loadu_si512(at.add(2))),
                even_and_odd(_mm512_loadu_si512(at.add(3))),
            ]
        }
    }
}

impl Format for Q4_1 {
    const KIND: WeightFormat = WeightFormat::Q4_1;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has four bits.
        unsafe { of_four_bits(integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has four bits.
        unsafe { of_four_bits(integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has six bits.
        unsafe { of_six_bits(integers(Self::KIND, block, half, four), scales[four / 2]) }
    }
}

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: behind 2 bytes for each of 32 columns stand two halves of 16 pairs of 32 bytes, of which four are
        // read from `4 * four`, at most 12.
        unsafe {
            let at = block.add(Self::KIND.header_bytes() + (half * PAIRS + 4 * four) * 32).cast::<__m256i>();
            [
                of_bytes(_mm256_loadu_si256(at), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(1)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(2)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(3)), scales[0]),
            ]
        }
    }
}

// Functions and no closures, see `block_lanes.rs`.

/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn even_and_odd(pairs: __m512i) -> [__m512i; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { [_mm512_slli_epi32::<16>(pairs), pairs] }
}

/// 0 to 31.
static INTEGERS: [f32; 32] = {
    let mut table = [0.0; 32];
    let mut i = 0;
    while i < 32 {
        table[i] = i as f32;
        i += 1;
    }
    table
};

/// The integers of four pairs, each in the lowest bits of its lane; above them may be others.
///
/// # Safety
/// As for [`Format::four_pairs`] of a format of nibbles.
#[inline(always)]
unsafe fn integers(format: WeightFormat, block: *const u8, half: usize, four: usize) -> [[__m512i; 2]; 4] {
    // SAFETY: as the caller says; for the rest arithmetic in lanes.
    unsafe {
        let [first, second] = block_lanes::integers(format, block, half, four);
        [
            [first, _mm512_srli_epi32::<16>(first)],
            [second, _mm512_srli_epi32::<16>(second)],
            [_mm512_srli_epi32::<8>(first), _mm512_srli_epi32::<24>(first)],
            [_mm512_srli_epi32::<8>(second), _mm512_srli_epi32::<24>(second)],
        ]
    }
}

/// The weights of four pairs of integers.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_four_bits(mut pairs: [[__m512i; 2]; 4], scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
    for lanes in pairs.as_flattened_mut() {
        // SAFETY: arithmetic in lanes.
        *lanes = unsafe { from_four_bits(*lanes, scales) };
    }
    pairs
}

/// The weights of four pairs of integers.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_five_bits(mut pairs: [[__m512i; 2]; 4], scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
    for lanes in pairs.as_flattened_mut() {
        // SAFETY: arithmetic in lanes.
        *lanes = unsafe { from_five_bits(*lanes, scales) };
    }
    pairs
}

/// The weights of four pairs of integers.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_six_bits(mut pairs: [[__m512i; 2]; 4], scale: __m512) -> [[__m512i; 2]; 4] {
    for lanes in pairs.as_flattened_mut() {
        // SAFETY: arithmetic in lanes.
        *lanes = unsafe { from_six_bits(*lanes, scale) };
    }
    pairs
}

/// The weights of the lowest four bits of each lane.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn from_four_bits(lanes: __m512i, [scale, offset]: [__m512; 2]) -> __m512i {
    // SAFETY: the table has more than 64 bytes, and a permutation looks at the four low bits of its indices.
    unsafe {
        let q = _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(INTEGERS.as_ptr()));
        _mm512_castps_si512(_mm512_fmadd_ps(q, scale, offset))
    }
}

/// Of the lowest five.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn from_five_bits(lanes: __m512i, [scale, offset]: [__m512; 2]) -> __m512i {
    // SAFETY: the table has twice 64 bytes, and a permutation of two vectors looks at the five low bits of its indices.
    unsafe {
        let low = _mm512_loadu_ps(INTEGERS.as_ptr());
        let q = _mm512_permutex2var_ps(low, lanes, _mm512_loadu_ps(INTEGERS.as_ptr().add(16)));
        _mm512_castps_si512(_mm512_fmadd_ps(q, scale, offset))
    }
}

/// Of the lowest six, less 32.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn from_six_bits(lanes: __m512i, scale: __m512) -> __m512i {
    /// The bits of 2²³: a small integer in its lowest bits is added to it.
    const MAGIC: i32 = 0x4b00_0000;
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        // lanes & 63 | magic
        let q = _mm512_ternarylogic_epi32::<0xea>(lanes, _mm512_set1_epi32(63), _mm512_set1_epi32(MAGIC));
        let q = _mm512_sub_ps(_mm512_castsi512_ps(q), _mm512_set1_ps(8_388_608.0 + 32.0));
        _mm512_castps_si512(_mm512_mul_ps(q, scale))
    }
}

/// The weights of 16 pairs of bytes.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_bytes(pairs: __m256i, scale: __m512) -> [__m512i; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let [even, odd] = block_lanes::bytes(pairs);
        [_mm512_castps_si512(_mm512_mul_ps(even, scale)), _mm512_castps_si512(_mm512_mul_ps(odd, scale))]
    }
}

/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn grown(scales: __m512) -> __m512 {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { _mm512_mul_ps(scales, _mm512_set1_ps(GROW)) }
}

/// Writes a block of quantized weights as the two tiles of its left and its right columns, each 16 rows of 16 pairs.
///
/// # Safety
/// The function's `block` is a whole block of the format; two tiles may be written, which begin at a line of cache; the
/// machine has the features.
pub(super) type ToTiles = unsafe fn(block: *const u8, tiles: *mut u32);

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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn block_to_tiles<F: Format>(block: *const u8, tiles: *mut u32) {
    // SAFETY: two halves of four times four pairs are the rows of two tiles. What is asked for ahead may lie behind the
    // matrix: its address is computed by wrapping addition and only hinted at.
    unsafe {
        prefetch(block.wrapping_add(super::product::AHEAD * F::KIND.block_bytes()), F::KIND.block_bytes());
        for half in 0..2 {
            let scales = F::scales(block, half);
            for four in 0..4 {
                let pairs = F::four_pairs(block, half, four, scales);
                for (i, [even, odd]) in pairs.into_iter().enumerate() {
                    let row = tiles.add((half * PAIRS + 4 * four + i) * PAIRS);
                    let pair = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd);
                    _mm512_store_si512(row.cast(), pair);
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
