//! `out = x · Wᵀ` by the bf16 dot products of AVX-512: `x` is rounded to bf16, weights enter as they are (integers of 4
//! to 8 bits are exact in bf16; their scales multiply the f32 sum of each group of 32 `k`), sums are f32.
//!
//! Every output element is one fixed sequence of operations, in every tile shape: for each group ascending, the sum of
//! its 16 pairs ascending from zero, times the scale, plus the total; then the offset times the sum of the group's `x`.
//! Of Q6_K, which has two scales a group and no offset: the sum of 8 pairs times the first, then of 8 times the second.
//! So a row gives the same bits alone, in a batch, in a prompt and in its chunks.
//!
//! Three ways through a panel, in the same order of operations:
//!
//! | rows of the chunk | function | weights |
//! |---|---|---|
//! | 1 to 8 | `tile` | straight from the panel, once: all rows' sums stay in registers over all of `k` |
//! | 9 and more | `add_group`, then `group_tile` | a group's are expanded once, then serve tiles of up to 12 rows |
//! | any, on AMX | `tiles.rs` | not here, and in another order |
//!
//! `weight_format.rs` has the pictures of what [`Format`] reads.
#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::Shared;
use super::block_lanes;
use super::packed::{BLOCK, PANEL, PackedMatrix, WeightFormat};
use super::product::{AHEAD, ChunkId, Output, Target, for_each_task};
use super::simd::{LANES, bf16, bits, rounded_pairs};
use super::weight_format::Block;

/// Rows that a task works on at a time: their `x` of one group and their sums stay in the L1 cache.
const ROW_CHUNK: usize = 96;
/// Rows of a tile: 24 sums, two vectors of weights and a broadcast fit the registers.
const TILE_ROWS: usize = 12;
/// Rows of a tile that decodes weights itself: 16 sums, the totals in memory.
const DIRECT_TILE_ROWS: usize = 8;
/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// See [`super::matmul::matmul`], which checks the lengths.
pub(super) fn matmul(x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
    }
    let out = Shared(out.as_mut_ptr());
    // Several tasks a thread even out cores of unequal speed.
    for_each_task(x.len() / w.k(), ROW_CHUNK, w, 4, |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: an `Isa` that rounds exists only where these instructions were detected; the task's rows are in
            // `x` and `out`, and no other task has these rows and panels.
            unsafe {
                if scratch.holds != Some(task.chunk) {
                    scratch.round(&x[task.rows.start * w.k()..task.rows.end * w.k()], w.k());
                    scratch.holds = Some(task.chunk);
                }
                for panel in task.panels {
                    let target = Target::new(out.get(), w, task.rows.start, panel, output);
                    let panel = w.panel(panel).as_ptr();
                    match w.format() {
                        WeightFormat::F32 => panel_of::<F32>(scratch, panel, target),
                        WeightFormat::F16 => panel_of::<F16>(scratch, panel, target),
                        WeightFormat::Bf16 => panel_of::<Bf16>(scratch, panel, target),
                        WeightFormat::Q4_1 => panel_of::<Q4_1>(scratch, panel, target),
                        WeightFormat::Q5_1 => panel_of::<Q5_1>(scratch, panel, target),
                        WeightFormat::Q8_0 => panel_of::<Q8_0>(scratch, panel, target),
                        WeightFormat::Q4K => panel_of::<Q4K>(scratch, panel, target),
                        WeightFormat::Q5K => panel_of::<Q5K>(scratch, panel, target),
                        WeightFormat::Q6K => panel_of::<Q6K>(scratch, panel, target),
                    }
                }
            }
        });
    });
}

/// A chunk of `x` in bf16, and the sums of its tiles. Kept by each thread.
#[derive(Default)]
struct Scratch {
    holds: Option<ChunkId>,
    rows: usize,
    groups: usize,
    /// Pairs of bf16, groups × rows × 16: a group's rows lie together.
    x: Vec<u32>,
    /// Sums of `x`, groups × rows.
    x_sums: Vec<f32>,
    /// rows × 32.
    totals: Vec<f32>,
}

impl Scratch {
    /// # Safety
    /// The machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn round(&mut self, x: &[f32], k: usize) {
        (self.rows, self.groups) = (x.len() / k, k.div_ceil(BLOCK));
        self.x.resize(self.groups * self.rows * PAIRS, 0);
        self.x_sums.resize(self.groups * self.rows, 0.0);
        self.totals.resize(self.rows * PANEL, 0.0);
        let ones = bf16(_mm512_set1_epi32(0x3f80_3f80));
        for (r, row) in x.chunks_exact(k).enumerate() {
            for (g, group) in row.chunks(BLOCK).enumerate() {
                let at = g * self.rows + r;
                // SAFETY: at most 32 elements; the buffers have room for all rows and groups.
                unsafe {
                    let pairs = rounded_pairs(group);
                    self.x_sums[at] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), pairs, ones));
                    _mm512_storeu_si512(self.x.as_mut_ptr().add(at * PAIRS).cast(), bits(pairs));
                }
            }
        }
    }
}

/// How a block of 32 columns × 32 `k` yields its weights, see `weight_format.rs` for the layouts.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `pair` is even and below 16; the caller
/// has the features enabled. All loads are unaligned ones.
trait Format {
    const KIND: WeightFormat;
    /// Scales of a column: one, and an offset; or two and none, of the first and the last 16 `k`.
    const SCALES: usize = 1;
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

struct F32;
struct F16;
struct Bf16;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q4_1;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q5_1;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q8_0;
struct Q4K;
struct Q5K;
struct Q6K;

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
        // SAFETY: a block is two halves of 16 vectors of 64 bytes. Read are those at `pair` and `pair + 1`, at most 15,
        // of one half.
        unsafe {
            let first = block.numbers.add((half * PAIRS + pair) * 64);
            [_mm512_loadu_si512(first.cast()), _mm512_loadu_si512(first.add(64).cast())]
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
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says; `pair / 4` is at most 3.
        unsafe { looked_up(&FOUR_BITS, two_integers(Self::KIND, block, half, pair)) }
    }
}

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says; `pair / 4` is at most 3.
        unsafe { looked_up(&FOUR_BITS, two_integers(Self::KIND, block, half, pair)) }
    }
}

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says; `pair / 4` is at most 3.
        unsafe { looked_up(&FIVE_BITS, two_integers(Self::KIND, block, half, pair)) }
    }
}

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says; `pair / 4` is at most 3.
        unsafe { looked_up(&FIVE_BITS, two_integers(Self::KIND, block, half, pair)) }
    }
}

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;
    const SCALES: usize = 2;
    #[inline(always)]
    unsafe fn two_pairs(block: Block, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says; `pair / 4` is at most 3.
        unsafe { six_bits(two_integers(Self::KIND, block, half, pair)) }
    }
}

/// The integers of the pairs `pair` and `pair + 1`, each in the lowest bits of its 16.
///
/// # Safety
/// As for [`Format::two_pairs`] of a format of nibbles.
#[inline(always)]
unsafe fn two_integers(format: WeightFormat, block: Block, half: usize, pair: usize) -> [__m512i; 2] {
    // SAFETY: as the caller says; `pair / 4` is at most 3.
    unsafe {
        let [first, second] = block_lanes::integers(format, block, half, pair / 4);
        match pair.is_multiple_of(4) {
            true => [first, second],
            false => [_mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(second)],
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
        // SAFETY: a block is two halves of 16 pairs of 32 bytes. Read are 64 bytes, of the pairs `pair` and `pair + 1`,
        // at most 15, of one half. Each of the four tables has 64 bytes, and a
        // permutation takes its indices modulo the tables' length.
        unsafe {
            let table = |i: usize| _mm512_loadu_si512(MAGNITUDES[i].as_ptr().cast());
            let bytes = _mm512_loadu_si512(block.numbers.add((half * PAIRS + pair) * 32).cast());
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

/// Rows up to which tiles read the panel themselves.
const DIRECT_ROWS: usize = 8;

/// # Safety
/// `panel` is a panel of the format with the scratch's groups; `target` has the scratch's rows; the machine has the
/// features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn panel_of<F: Format>(scratch: &mut Scratch, panel: *const u8, target: Target) {
    if scratch.rows <= DIRECT_ROWS {
        // SAFETY: as the caller says.
        return unsafe { direct::<F>(scratch, panel, target) };
    }
    // SAFETY: `group` stays below the scratch's groups, as many blocks as the panel has; `two` below 8, so that pairs
    // are even and below 16. Row `row` of the totals is 32 f32, since `round` made room for all rows, and `target` has
    // the row.
    unsafe {
        let mut weights = [[_mm512_setzero_si512(); 2]; PAIRS];
        for group in 0..scratch.groups {
            F::KIND.ask_for(panel, group + AHEAD);
            let block = F::KIND.block(panel, group);
            for (two, weights) in weights.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (left, right) = (F::two_pairs(block, 0, 2 * two), F::two_pairs(block, 1, 2 * two));
                *weights = [[left[0], right[0]], [left[1], right[1]]];
            }
            let scales = [F::scales(block, 0), F::scales(block, 1)];
            match F::SCALES {
                1 => add_group::<1>(scratch, group, &weights, &scales),
                _ => add_group::<2>(scratch, group, &weights, &scales),
            }
        }
        for row in 0..scratch.rows {
            let sums = scratch.totals.as_ptr().add(row * PANEL);
            target.put(row, [_mm512_loadu_ps(sums), _mm512_loadu_ps(sums.add(LANES))]);
        }
    }
}

/// All rows' products with one group of weights, in tiles as tall as the registers allow.
///
/// # Safety
/// As for [`panel_of`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn add_group<const SCALES: usize>(
    scratch: &mut Scratch,
    group: usize,
    weights: &[[__m512i; 2]; PAIRS],
    scales: &[[__m512; 2]; 2],
) {
    let mut row = 0;
    while row < scratch.rows {
        // SAFETY: no tile is taller than the rows that are left.
        unsafe {
            row += match scratch.rows - row {
                // Two of equal height rather than a tall one and a stump, whose few sums wait for one another.
                14..=16 => group_tile::<8, SCALES>(scratch, group, row, weights, scales),
                TILE_ROWS.. => group_tile::<TILE_ROWS, SCALES>(scratch, group, row, weights, scales),
                8.. => group_tile::<8, SCALES>(scratch, group, row, weights, scales),
                6.. => group_tile::<6, SCALES>(scratch, group, row, weights, scales),
                4.. => group_tile::<4, SCALES>(scratch, group, row, weights, scales),
                2.. => group_tile::<2, SCALES>(scratch, group, row, weights, scales),
                _ => group_tile::<1, SCALES>(scratch, group, row, weights, scales),
            };
        }
    }
}

/// All rows, in tiles of nearly equal height.
///
/// # Safety
/// As for [`panel_of`].
#[inline(always)]
unsafe fn direct<F: Format>(scratch: &Scratch, panel: *const u8, target: Target) {
    let mut row = 0;
    while row < scratch.rows {
        let left = scratch.rows - row;
        // SAFETY: no tile is taller than the rows that are left.
        unsafe {
            row += match left.div_ceil(left.div_ceil(DIRECT_TILE_ROWS)) {
                1 => tile::<F, 1>(scratch, row, panel, target),
                2 => tile::<F, 2>(scratch, row, panel, target),
                3 => tile::<F, 3>(scratch, row, panel, target),
                4 => tile::<F, 4>(scratch, row, panel, target),
                5 => tile::<F, 5>(scratch, row, panel, target),
                6 => tile::<F, 6>(scratch, row, panel, target),
                7 => tile::<F, 7>(scratch, row, panel, target),
                _ => tile::<F, DIRECT_TILE_ROWS>(scratch, row, panel, target),
            };
        }
    }
}

/// All groups of `M` rows from `first` on, weights straight from the panel: the way of small batches. Returns `M`.
///
/// # Safety
/// As for [`panel_of`]; the scratch has `M` rows from `first` on.
#[inline(always)]
unsafe fn tile<F: Format, const M: usize>(scratch: &Scratch, first: usize, panel: *const u8, target: Target) -> usize {
    // SAFETY: the panel has the scratch's groups, and pairs are even and below 16. `round` made `x` groups × rows × 16
    // words and `x_sums` groups × rows: `row` and the `M - 1` behind it index both. What is asked for ahead may lie
    // behind the panel and is only hinted at. `target` has the `M` rows.
    unsafe {
        let mut totals = [[_mm512_setzero_ps(); 2]; M];
        for group in 0..scratch.groups {
            F::KIND.ask_for(panel, group + AHEAD);
            let block = F::KIND.block(panel, group);
            let row = group * scratch.rows + first;
            let x = scratch.x.as_ptr().add(row * PAIRS);
            let scales = [F::scales(block, 0), F::scales(block, 1)];
            for part in 0..F::SCALES {
                let mut sums = [[_mm512_setzero_ps(); 2]; M];
                for pair in (part * PAIRS / F::SCALES..(part + 1) * PAIRS / F::SCALES).step_by(2) {
                    let (left, right) = (F::two_pairs(block, 0, pair), F::two_pairs(block, 1, pair));
                    step(&mut sums, [bf16(left[0]), bf16(right[0])], x.add(pair));
                    step(&mut sums, [bf16(left[1]), bf16(right[1])], x.add(pair + 1));
                }
                for (totals, sums) in totals.iter_mut().zip(sums) {
                    *totals = with_sums(*totals, sums, &scales, part);
                }
            }
            if F::SCALES == 1 {
                for (m, totals) in totals.iter_mut().enumerate() {
                    let x_sum = _mm512_set1_ps(*scratch.x_sums.as_ptr().add(row + m));
                    *totals = with_offset(*totals, &scales, x_sum);
                }
            }
        }
        for (m, totals) in totals.into_iter().enumerate() {
            target.put(first + m, totals);
        }
    }
    M
}

/// One group of `M` rows from `first` on, weights expanded beforehand: the way of prompts and large batches. Returns
/// `M`.
///
/// # Safety
/// `group` is one of the scratch's, which has the `M` rows from `first` on; the caller has the features enabled.
#[inline(always)]
unsafe fn group_tile<const M: usize, const SCALES: usize>(
    scratch: &mut Scratch,
    group: usize,
    first: usize,
    weights: &[[__m512i; 2]; PAIRS],
    scales: &[[__m512; 2]; 2],
) -> usize {
    let row = group * scratch.rows + first;
    // SAFETY: `round` made `x` groups × rows × 16 words, `x_sums` groups × rows, and totals rows × 32: `row` and the
    // `M - 1` behind it index the first two, `first + m` the last.
    unsafe {
        let x = scratch.x.as_ptr().add(row * PAIRS);
        for part in 0..SCALES {
            let mut sums = [[_mm512_setzero_ps(); 2]; M];
            let x = x.add(part * PAIRS / SCALES);
            for (pair, [left, right]) in weights[part * PAIRS / SCALES..][..PAIRS / SCALES].iter().enumerate() {
                step(&mut sums, [bf16(*left), bf16(*right)], x.add(pair));
            }
            for (m, sums) in sums.into_iter().enumerate() {
                let to = scratch.totals.as_mut_ptr().add((first + m) * PANEL);
                let totals = match (group, part) {
                    (0, 0) => [_mm512_setzero_ps(); 2],
                    _ => [_mm512_loadu_ps(to), _mm512_loadu_ps(to.add(LANES))],
                };
                let mut totals = with_sums(totals, sums, scales, part);
                if SCALES == 1 {
                    let x_sum = _mm512_set1_ps(*scratch.x_sums.as_ptr().add(row + m));
                    totals = with_offset(totals, scales, x_sum);
                }
                _mm512_storeu_ps(to, totals[0]);
                _mm512_storeu_ps(to.add(LANES), totals[1]);
            }
        }
    }
    M
}

/// One pair of `k` for `M` rows, whose `x` are 16 words apart.
///
/// # Safety
/// `x` is readable in these `M` places; the caller has the features enabled.
#[inline(always)]
unsafe fn step<const M: usize>(sums: &mut [[__m512; 2]; M], weights: [__m512bh; 2], x: *const u32) {
    for (m, sums) in sums.iter_mut().enumerate() {
        // SAFETY: `m` is below `M`, as many places as the caller's `x` has.
        unsafe {
            let x = bf16(_mm512_set1_epi32(*x.add(m * PAIRS) as i32));
            *sums = [_mm512_dpbf16_ps(sums[0], x, weights[0]), _mm512_dpbf16_ps(sums[1], x, weights[1])];
        }
    }
}

/// The totals with the sums of a group in them, or of a part that has its own scales.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn with_sums(totals: [__m512; 2], sums: [__m512; 2], scales: &[[__m512; 2]; 2], part: usize) -> [__m512; 2] {
    // No closure: it would not be inlined into the caller's instruction set, nor the intrinsics into it.
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        [_mm512_fmadd_ps(sums[0], scales[0][part], totals[0]), _mm512_fmadd_ps(sums[1], scales[1][part], totals[1])]
    }
}

/// The totals with a group's offsets in them. Formats without scales or offsets have ones and zeros, which change
/// nothing.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn with_offset(totals: [__m512; 2], scales: &[[__m512; 2]; 2], x_sum: __m512) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { [_mm512_fmadd_ps(x_sum, scales[0][1], totals[0]), _mm512_fmadd_ps(x_sum, scales[1][1], totals[1])] }
}
