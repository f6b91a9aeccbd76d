//! The operands of the arithmetic `bf16-k32`: what of `x` and of a block of packed weights is multiplied, in which bits.
//! `tiles.rs` takes weights as tiles of pairs, `few_rows.rs` as f32 in registers. Both come from here, so that both
//! multiply the same numbers. Weights are decoded from the file's format for each product: a copy in bf16 would be three
//! times as many bytes to read.
//!
//! **Rounding.** `x` is rounded to the nearest bf16, ties to even, by the instruction. A quantized weight is rounded to
//! the nearest, ties away from zero, by an integer addition to its bits: the cheapest rounding that registers do.
//!
//! **Tiny numbers.** A tile takes subnormal numbers for zeros, an FMA does not. None ever arise: `x` and weights below
//! [`TINY`] are zeros here, so that all are multiples of 2⁻⁵⁷. Then each product, and each sum of them, rounded or not,
//! is a multiple of 2⁻¹¹⁴: zero, or far from subnormal. Quantized weights are multiples of far larger numbers.
use std::arch::x86_64::*;

use super::block_lanes;
use super::simd::{bits, prefetch, rounded_pairs};
use super::tiles::amx::Tile;
use super::weight_format::{BLOCK, TINY, WeightFormat};

/// Pairs of `k` of a block.
pub(super) const PAIRS: usize = BLOCK / 2;
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
    /// See [`block_lanes::scales`].
    #[inline(always)]
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: as the caller says.
        unsafe { block_lanes::scales(Self::KIND, block, half) }
    }
    /// The weights of four pairs of `k`, from `8 * four` on: of each pair the even `k`, then the odd. The upper half of
    /// a lane is the weight, rounded to bf16; the lower half is of no meaning.
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
        unsafe { of_four_bits(block_lanes::integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has four bits.
        unsafe { of_four_bits(block_lanes::integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(block_lanes::integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has five bits.
        unsafe { of_five_bits(block_lanes::integers(Self::KIND, block, half, four), scales) }
    }
}

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: as the caller says; the format has six bits.
        unsafe { of_six_bits(block_lanes::integers(Self::KIND, block, half, four), scales[four / 2]) }
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

/// The weights of four pairs of integers, as [`block_lanes::integers`] gives them.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_four_bits([first, second]: [__m512i; 2], scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
    // SAFETY: arithmetic in lanes, and that of the functions below.
    unsafe {
        [
            [from_four_bits(first, scales), from_four_bits(_mm512_srli_epi32::<16>(first), scales)],
            [from_four_bits(second, scales), from_four_bits(_mm512_srli_epi32::<16>(second), scales)],
            [
                from_four_bits(_mm512_srli_epi32::<8>(first), scales),
                from_four_bits(_mm512_srli_epi32::<24>(first), scales),
            ],
            [
                from_four_bits(_mm512_srli_epi32::<8>(second), scales),
                from_four_bits(_mm512_srli_epi32::<24>(second), scales),
            ],
        ]
    }
}

/// The weights of four pairs of integers, as [`block_lanes::integers`] gives them.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_five_bits([first, second]: [__m512i; 2], scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
    // SAFETY: arithmetic in lanes, and that of the functions below.
    unsafe {
        [
            [from_five_bits(first, scales), from_five_bits(_mm512_srli_epi32::<16>(first), scales)],
            [from_five_bits(second, scales), from_five_bits(_mm512_srli_epi32::<16>(second), scales)],
            [
                from_five_bits(_mm512_srli_epi32::<8>(first), scales),
                from_five_bits(_mm512_srli_epi32::<24>(first), scales),
            ],
            [
                from_five_bits(_mm512_srli_epi32::<8>(second), scales),
                from_five_bits(_mm512_srli_epi32::<24>(second), scales),
            ],
        ]
    }
}

/// The weights of four pairs of integers, as [`block_lanes::integers`] gives them.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_six_bits([first, second]: [__m512i; 2], scale: __m512) -> [[__m512i; 2]; 4] {
    // SAFETY: arithmetic in lanes, and that of the functions below.
    unsafe {
        [
            [from_six_bits(first, scale), from_six_bits(_mm512_srli_epi32::<16>(first), scale)],
            [from_six_bits(second, scale), from_six_bits(_mm512_srli_epi32::<16>(second), scale)],
            [from_six_bits(_mm512_srli_epi32::<8>(first), scale), from_six_bits(_mm512_srli_epi32::<24>(first), scale)],
            [
                from_six_bits(_mm512_srli_epi32::<8>(second), scale),
                from_six_bits(_mm512_srli_epi32::<24>(second), scale),
            ],
        ]
    }
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
        // The product is exact: 4 and at most 17 bits.
        rounded(_mm512_fmadd_ps(q, scale, offset))
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
        rounded(_mm512_fmadd_ps(q, scale, offset))
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
        rounded(_mm512_mul_ps(q, scale))
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
        [rounded(_mm512_mul_ps(even, scale)), rounded(_mm512_mul_ps(odd, scale))]
    }
}

/// To the nearest bf16, of two that are equally near to the one with the greater magnitude. The lower halves are of no
/// meaning.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn rounded(weights: __m512) -> __m512i {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { _mm512_add_epi32(_mm512_castps_si512(weights), _mm512_set1_epi32(0x8000)) }
}

/// Writes a block of quantized weights as the two tiles of its left and its right columns.
///
/// # Safety
/// The function's `block` is a whole block of the format; two tiles may be written; the machine has the features.
pub(super) type ToTiles = unsafe fn(block: *const u8, tiles: *mut Tile);

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
unsafe fn block_to_tiles<F: Format>(block: *const u8, tiles: *mut Tile) {
    // SAFETY: two halves of four times four pairs are the rows of two tiles. What is asked for ahead may lie behind the
    // matrix: its address is computed by wrapping addition and only hinted at.
    unsafe {
        prefetch(block.wrapping_add(super::product::AHEAD * F::KIND.block_bytes()), F::KIND.block_bytes());
        for half in 0..2 {
            let scales = F::scales(block, half);
            for four in 0..4 {
                let pairs = F::four_pairs(block, half, four, scales);
                for (i, [even, odd]) in pairs.into_iter().enumerate() {
                    let row = (*tiles.add(half)).0[4 * four + i].as_mut_ptr();
                    let pair = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd);
                    _mm512_store_si512(row.cast(), pair);
                }
            }
        }
    }
}

/// The nearest bf16; of two that are equally near the one with the greater magnitude: how [`rounded`] rounds.
#[cfg(test)]
pub(super) fn nearest(weight: f32) -> f32 {
    f32::from_bits(weight.to_bits().wrapping_add(0x8000) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_is_what_it_says() {
        assert_eq!(f32::from_bits(u32::from(TINY) << 16), 2f32.powi(-50));
    }

    #[test]
    fn weights_are_rounded_to_the_nearest_bf16() {
        for i in 0..200_000u32 {
            let weight = (i as f32 - 1e5) * 3.7e-5;
            let (ours, theirs) = (nearest(weight), half::bf16::from_f32(weight).to_f32());
            assert_eq!(half::bf16::from_f32(ours).to_f32(), ours, "a bf16");
            // Of two that are equally near either will do.
            assert!((ours - weight).abs() <= (theirs - weight).abs(), "{weight}: {ours}, not {theirs}");
        }
    }
}
