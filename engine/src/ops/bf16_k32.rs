//! The operands of the arithmetic `bf16-k32`: what of `x` and of a block of packed weights is multiplied, in which bits.
//! `tiles.rs` takes weights as tiles of pairs, `few_rows.rs` as f32 in registers. Both come from here, so that both
//! multiply the same numbers. Weights are decoded from the file's format for each product: a copy in bf16 would be three
//! times as many bytes to read.
//!
//! **Rounding.** `x` is rounded to the nearest bf16, ties to even, by the instruction. Of a quantized weight the lower
//! half of its f32 is dropped, after scale and offset were made greater by [`GROW`]: rounding that costs nothing. A weight
//! is off by 0.7 of its last place at most and by 0.305 in the root mean square, without a bias, where the nearest bf16
//! is off by 0.5 and 0.289. Decode of one sequence spends most of its time here.
//!
//! **Tiny numbers.** A tile takes subnormal numbers for zeros, an FMA does not. None ever arise: `x` and weights below
//! [`TINY`] are zeros here, so that all are multiples of 2⁻⁵⁷. Then each product, and each sum of them, rounded or not,
//! is a multiple of 2⁻¹¹⁴: zero, or far from subnormal. Quantized weights are multiples of far larger numbers.
use std::arch::x86_64::*;

use super::packed::{BLOCK, PANEL, TINY, WeightFormat};
use super::simd::{LANES, bits, prefetch, rounded_pairs};
use super::tiles::amx::Tile;

/// Pairs of `k` of a block.
pub(super) const PAIRS: usize = BLOCK / 2;
/// By which scales and offsets grow before weights are cut off, 0.347 of a bf16's last place at 1: 0.347 to 0.694 of it,
/// half on average over weights whose logarithms are spread evenly.
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

/// How half a block, of 16 columns, yields its weights. `packed.rs` has the pictures.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `four` is below 4; the caller has the
/// features enabled. All loads are unaligned ones.
pub(super) trait Format {
    const KIND: WeightFormat;
    /// Scale and offset of the columns, grown.
    #[inline(always)]
    unsafe fn scales(_block: *const u8, _half: usize) -> [__m512; 2] {
        // SAFETY: makes lanes from constants, and reads no memory.
        unsafe { [_mm512_setzero_ps(); 2] }
    }
    /// The weights of four pairs of `k`, from `8 * four` on: of each pair the even `k`, then the odd. The upper half of
    /// a lane is the weight in bf16; the lower half is of no meaning.
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4];
}

pub(super) struct Bf16;
#[allow(non_camel_case_types, reason = "the format's name")]
pub(super) struct Q4_1;
#[allow(non_camel_case_types, reason = "the format's name")]
pub(super) struct Q8_0;

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
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: a block begins with 64 f16, four times 32 bytes, of which two are read.
        unsafe {
            let halves = block.cast::<__m256i>();
            [
                grown(_mm512_cvtph_ps(_mm256_loadu_si256(halves.add(half)))),
                grown(_mm512_cvtph_ps(_mm256_loadu_si256(halves.add(2 + half)))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: behind 4 bytes for each of 32 columns stand two halves of 4 vectors of 64 bytes; `four` is at most 3.
        unsafe {
            let all = _mm512_loadu_si512(block.add(PANEL * 4 + (half * 4 + four) * 64).cast());
            [
                [of_nibbles(all, scales), of_nibbles(_mm512_srli_epi32::<16>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<4>(all), scales), of_nibbles(_mm512_srli_epi32::<20>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<8>(all), scales), of_nibbles(_mm512_srli_epi32::<24>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<12>(all), scales), of_nibbles(_mm512_srli_epi32::<28>(all), scales)],
            ]
        }
    }
}

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;
    #[inline(always)]
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: a block begins with 32 f16, of which 16 are read from the first or the 17th on.
        unsafe { [grown(_mm512_cvtph_ps(_mm256_loadu_si256(block.add(half * LANES * 2).cast()))), _mm512_setzero_ps()] }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512i; 2]; 4] {
        // SAFETY: behind 2 bytes for each of 32 columns stand two halves of 16 pairs of 32 bytes, of which four are
        // read from `4 * four`, at most 12.
        unsafe {
            let at = block.add(PANEL * 2 + (half * PAIRS + 4 * four) * 32).cast::<__m256i>();
            [
                of_bytes(_mm256_loadu_si256(at), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(1)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(2)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(3)), scales[0]),
            ]
        }
    }
}

// Functions and no closures: those would not be compiled for the caller's instruction set.

/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn even_and_odd(pairs: __m512i) -> [__m512i; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { [_mm512_slli_epi32::<16>(pairs), pairs] }
}

/// 0 to 15.
static NIBBLES: [f32; 16] = {
    let mut table = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = i as f32;
        i += 1;
    }
    table
};

/// The weights of the lowest four bits of each lane.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_nibbles(lanes: __m512i, [scale, offset]: [__m512; 2]) -> __m512i {
    // SAFETY: the table has 64 bytes, and a permutation looks at the four low bits of its indices.
    unsafe {
        let q = _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(NIBBLES.as_ptr()));
        _mm512_castps_si512(_mm512_fmadd_ps(q, scale, offset))
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
        let both = _mm512_cvtepi16_epi32(pairs);
        let (even, odd) = (_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(both)), _mm512_srai_epi32::<8>(both));
        [
            _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(even), scale)),
            _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(odd), scale)),
        ]
    }
}

/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn grown(scales: __m512) -> __m512 {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { _mm512_mul_ps(scales, _mm512_set1_ps(GROW)) }
}

/// Writes a block of quantized weights as the two tiles of its left and its right columns.
///
/// # Safety
/// The function's `block` is a whole block of the format; two tiles may be written; the machine has the features.
pub(super) type ToTiles = unsafe fn(block: *const u8, tiles: *mut Tile);

macro_rules! to_tiles {
    ($name:ident, $format:ty) => {
        /// See [`ToTiles`].
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
        unsafe fn $name(block: *const u8, tiles: *mut Tile) {
            // SAFETY: the features are enabled on this function; for the rest the caller vouches.
            unsafe { block_to_tiles::<$format>(block, tiles) }
        }
    };
}
to_tiles!(q4_1_to_tiles, Q4_1);
to_tiles!(q8_0_to_tiles, Q8_0);

/// How blocks of a format become tiles; `None` where they are tiles already.
///
/// # Panics
/// For a format that is not kept for this arithmetic.
pub(super) fn to_tiles(format: WeightFormat) -> Option<ToTiles> {
    match format {
        WeightFormat::Bf16 => None,
        WeightFormat::Q4_1 => Some(q4_1_to_tiles),
        WeightFormat::Q8_0 => Some(q8_0_to_tiles),
        format => panic!("{format:?} is not kept for tiles"),
    }
}

/// # Safety
/// As [`ToTiles`]; the caller has the features enabled.
#[inline(always)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_is_what_it_says() {
        assert_eq!(f32::from_bits(u32::from(TINY) << 16), 2f32.powi(-50));
    }
}
