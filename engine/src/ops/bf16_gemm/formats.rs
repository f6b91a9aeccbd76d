//! How each number format yields a block's weights as pairs of bf16. `weight_format.rs` has the layouts' pictures;
//! `bf16_gemm.rs` multiplies what this decodes.
use std::arch::x86_64::*;

use super::super::block_lanes;
use super::super::packed::{BLOCK, PANEL, WeightFormat};
use super::super::simd::LANES;
use super::super::weight_format::Block;

/// Pairs of a block.
pub(super) const PAIRS: usize = BLOCK / 2;

/// How a block of 32 columns × 32 `k` yields its weights, see `weight_format.rs` for the layouts.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `pair` is even and below 16; the caller
/// has the features enabled. All loads here are unaligned ones.
pub(super) trait Format {
    const KIND: WeightFormat;
    /// Scales of a column: one, or two, of the first and the last 16 `k`.
    const SCALES: usize = 1;
    /// Whether a column has an offset.
    const OFFSETS: bool = false;
    /// 16 columns (the left or the right ones) of the pairs `pair`, an even number, and `pair + 1`.
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2];
    /// See [`block_lanes::scales`].
    #[inline(always)]
    unsafe fn scales(block: Block, half: usize) -> [__m512; 2] {
        // SAFETY: as the caller says.
        unsafe { block_lanes::scales(Self::KIND, block, half) }
    }
}

/// 16 columns of the two pairs of rows from `row` on, rounded to bf16. `load` reads 16 values of a row as f32.
///
/// # Safety
/// `load` may be called for `row` and the three rows of [`PANEL`] values behind it; the caller has the features
/// enabled.
#[inline(always)]
unsafe fn two_rounded_pairs<T>(row: *const T, load: impl Fn(*const T) -> __m512) -> [__m512i; 2] {
    // SAFETY: the rows are those that the caller vouches for. The two types of the transmutation are 32 bytes each, in
    // which every bit pattern is a value.
    unsafe {
        let round = |row: *const T| {
            let half: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(load(row)));
            _mm512_cvtepu16_epi32(half)
        };
        let pair = |row: *const T| _mm512_or_si512(round(row), _mm512_slli_epi32::<16>(round(row.add(PANEL))));
        [pair(row), pair(row.add(2 * PANEL))]
    }
}

pub(super) struct F32;
pub(super) struct F16;
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

impl Format for F32 {
    const KIND: WeightFormat = WeightFormat::F32;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: a block is 32 rows of 32 f32. Read are 16 of each of the rows `2 * pair` to `2 * pair + 3`, from
        // column 0 or 16 on: with an even `pair` below 16 the last is row 31, and the last column 31.
        unsafe {
            let row = block.numbers.cast::<f32>().add(pair * 2 * PANEL + half * LANES);
            two_rounded_pairs(row, |row| _mm512_loadu_ps(row))
        }
    }
}

impl Format for F16 {
    const KIND: WeightFormat = WeightFormat::F16;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: a block is 32 rows of 32 f16. With an even `pair` below 16 and a `half` below 2, rows up to 31 and
        // columns up to 31 are read.
        unsafe {
            let row = block.numbers.cast::<u16>().add(pair * 2 * PANEL + half * LANES);
            two_rounded_pairs(row, |row| _mm512_cvtph_ps(_mm256_loadu_si256(row.cast())))
        }
    }
}

impl Format for Bf16 {
    const KIND: WeightFormat = WeightFormat::Bf16;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: a block is 16 rows of two vectors of 64 bytes. Read is one of each of the rows `pair` and `pair + 1`,
        // at most 15.
        unsafe {
            let first = block.numbers.add((2 * pair + half) * 64);
            [_mm512_loadu_si512(first.cast()), _mm512_loadu_si512(first.add(2 * 64).cast())]
        }
    }
}

/// bf16 of 0 to 15, twice, because the permutation looks at five bits of its index.
static FOUR_BITS: [u16; 32] = integers(16, 0);
/// bf16 of 0 to 31.
static FIVE_BITS: [u16; 32] = integers(32, 0);
/// bf16 of -32 to 31.
static SIX_BITS: [u16; 64] = integers(64, 32);

/// bf16 of the integers below `end` less `centre`, as often as there is room.
const fn integers<const N: usize>(end: usize, centre: i32) -> [u16; N] {
    let mut table = [0; N];
    let mut i = 0;
    while i < N {
        table[i] = (((i % end) as i32 - centre) as f32).to_bits().wrapping_shr(16) as u16;
        i += 1;
    }
    table
}

impl Format for Q4_1 {
    const KIND: WeightFormat = WeightFormat::Q4_1;
    const OFFSETS: bool = true;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { two_pairs_of(Self::KIND, block, half, pair) }
    }
}

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;
    const OFFSETS: bool = true;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { two_pairs_of(Self::KIND, block, half, pair) }
    }
}

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;
    const OFFSETS: bool = true;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { two_pairs_of(Self::KIND, block, half, pair) }
    }
}

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;
    const OFFSETS: bool = true;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { two_pairs_of(Self::KIND, block, half, pair) }
    }
}

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;
    const SCALES: usize = 2;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { two_pairs_of(Self::KIND, block, half, pair) }
    }
}

/// [`Format::two_pairs`] of a format whose integers lie in rows of nibbles.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn two_pairs_of(format: WeightFormat, block: Block, half: usize, pair: usize) -> [__m512i; 2] {
    // SAFETY: as the caller says; `pair / 4` is at most 3.
    unsafe { numbers(format, two_of_four(block_lanes::integers(format, block, half, pair / 4), pair)) }
}

/// The integers of the pairs `pair` and `pair + 1`, each in the lowest bits of its 16, of what
/// [`block_lanes::integers`] says of the four that they belong to.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn two_of_four(integers: [__m512i; 2], pair: usize) -> [__m512i; 2] {
    let [first, second] = integers;
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        match pair.is_multiple_of(4) {
            true => [first, second],
            false => [_mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(second)],
        }
    }
}

/// The numbers that integers of a format of nibbles stand for, each integer in the lowest bits of its 16.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
pub(super) unsafe fn numbers(format: WeightFormat, pairs: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: as the caller says.
    unsafe {
        match format {
            WeightFormat::Q6K => six_bits(pairs),
            WeightFormat::Q5_1 | WeightFormat::Q5K => looked_up(&FIVE_BITS, pairs),
            _ => looked_up(&FOUR_BITS, pairs),
        }
    }
}

/// The numbers that integers of up to five bits stand for.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn looked_up(table: &[u16; 32], pairs: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: the table has 64 bytes, and a permutation takes its indices modulo the table's length.
    unsafe {
        let table = _mm512_loadu_si512(table.as_ptr().cast());
        [_mm512_permutexvar_epi16(pairs[0], table), _mm512_permutexvar_epi16(pairs[1], table)]
    }
}

/// The same of six bits.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn six_bits(pairs: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: the table has twice 64 bytes, and a permutation takes its indices modulo the table's length.
    unsafe {
        let low = _mm512_loadu_si512(SIX_BITS.as_ptr().cast());
        let high = _mm512_loadu_si512(SIX_BITS.as_ptr().add(32).cast());
        [_mm512_permutex2var_epi16(low, pairs[0], high), _mm512_permutex2var_epi16(low, pairs[1], high)]
    }
}

/// bf16 of 0 to 127: the low bytes of the first 64, of the others, and the high bytes likewise.
static MAGNITUDES: [[u8; 64]; 4] = {
    let mut tables = [[0; 64]; 4];
    let mut i = 0;
    while i < 128 {
        let [_, _, low, high] = (i as f32).to_bits().to_le_bytes();
        tables[i / 64][i % 64] = low;
        tables[2 + i / 64][i % 64] = high;
        i += 1;
    }
    tables
};

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: a block is lines of 64 bytes, of two pairs and 16 columns each: the left half's, then the right
        // one's. Read is one, of `pair` and `pair + 1`, at most 15. Each of the four tables has 64 bytes, and a
        // permutation takes its indices modulo the tables' length.
        unsafe {
            let table = |i: usize| _mm512_loadu_si512(MAGNITUDES[i].as_ptr().cast());
            let bytes = _mm512_loadu_si512(block.numbers.add((pair + half) * 64).cast());
            let magnitude = _mm512_abs_epi8(bytes);
            let low = _mm512_permutex2var_epi8(table(0), magnitude, table(1));
            let high = _mm512_permutex2var_epi8(table(2), magnitude, table(3));
            // high | (bytes & sign)
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, bytes, _mm512_set1_epi8(i8::MIN));
            // Within each quarter: columns 0..4 and 8..12 of either pair, and columns 4..8 and 12..16.
            let (left, right) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
            let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
            let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            [_mm512_permutex2var_epi64(left, first, right), _mm512_permutex2var_epi64(left, second, right)]
        }
    }
}
