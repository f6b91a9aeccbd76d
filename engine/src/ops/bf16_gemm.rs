//! `out = x · Wᵀ` by the bf16 dot products of AVX-512: `x` is rounded to bf16, weights enter as they are (integers of 4
//! to 8 bits are exact in bf16; their scales multiply the f32 sum of each group of 32 `k`), sums are f32.
//!
//! Every output element is one fixed sequence of operations, in every tile shape: for each group ascending, the sum of
//! its 16 pairs ascending from zero, times the scale, plus the total; then, where the format has offsets, the offset
//! times the sum of the group's `x`. Of Q6_K, which has two scales a group: the sum of 8 pairs times the first, then of
//! 8 times the second. So a row gives the same bits alone, in a batch, in a prompt and in its chunks.
//!
//! Rows are multiplied in tiles of up to eight: their sums stay in registers over a group, and nothing is put down
//! between groups. The first tile decodes weights as it goes, straight from the panel: the units that look numbers up
//! and shift have nothing else to do. For further tiles it keeps them in bf16, a slice of the panel at a time; what is
//! bf16 already is read by each of them.
//!
//! `bf16_gemm/formats.rs` decodes the weights; `bf16_gemm/one_row.rs` has a way of its own for one row.
mod formats;
mod one_row;
#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use self::formats::{Bf16, F16, F32, Format, PAIRS, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0};
use self::one_row::one_row;
use super::Shared;
use super::packed::{BLOCK, PANEL, PackedMatrix, WeightFormat};
use super::prefetch::{CacheLevel, SPARSE, every_for, prefetch};
use super::product::{AHEAD, ChunkId, Output, Target, for_each_task};
use super::simd::{LANES, bf16, bits, rounded_pairs};

/// Rows that a task works on at a time: their `x` of a slice stays in the L2 cache.
const ROW_CHUNK: usize = 96;
/// Rows of a tile: 16 sums, two vectors of weights, a broadcast, and what decodes weights fit the registers.
const TILE_ROWS: usize = 8;
/// Groups of `k` that are expanded at a time: 144 KiB with their scales, which stay in the L2 cache beside `x`.
const SLICE: usize = 64;

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
                        WeightFormat::Q4_1 => panel_or_one_row::<Q4_1>(scratch, panel, target),
                        WeightFormat::Q5_1 => panel_or_one_row::<Q5_1>(scratch, panel, target),
                        WeightFormat::Q8_0 => panel_of::<Q8_0>(scratch, panel, target),
                        WeightFormat::Q4K => panel_or_one_row::<Q4K>(scratch, panel, target),
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
    /// Pairs of bf16, of each tile groups × rows × 16: in the order in which they are read.
    x: Vec<u32>,
    /// Sums of `x`, of each tile groups × rows.
    x_sums: Vec<f32>,
    /// rows × 32.
    totals: Vec<f32>,
    /// A slice's.
    expanded: Vec<ExpandedBlock>,
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
        let mut first = 0;
        while first < self.rows {
            let height = tile_height(self.rows - first);
            for (r, row) in x[first * k..][..height * k].chunks_exact(k).enumerate() {
                for (g, group) in row.chunks(BLOCK).enumerate() {
                    let at = first * self.groups + g * height + r;
                    // SAFETY: at most 32 elements; the buffers have room for all rows and groups.
                    unsafe {
                        let pairs = rounded_pairs(group);
                        self.x_sums[at] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), pairs, ones));
                        _mm512_storeu_si512(self.x.as_mut_ptr().add(at * PAIRS).cast(), bits(pairs));
                    }
                }
            }
            first += height;
        }
    }
}

/// [`panel_of`], and a way of its own for one row: of the formats that are faster so.
///
/// # Safety
/// As for [`panel_of`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn panel_or_one_row<F: Format>(scratch: &mut Scratch, panel: *const u8, target: Target) {
    // SAFETY: as the caller says; with one row the scratch has 16 pairs and a sum for each group.
    unsafe {
        match scratch.rows {
            1 => one_row::<F>(&scratch.x, &scratch.x_sums, panel, target),
            _ => panel_of::<F>(scratch, panel, target),
        }
    }
}

/// # Safety
/// `panel` is a panel of the format with the scratch's groups; `target` has the scratch's rows; the machine has the
/// features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn panel_of<F: Format>(scratch: &mut Scratch, panel: *const u8, target: Target) {
    let (rows, groups) = (scratch.rows, scratch.groups);
    // SAFETY: as the caller says. Slices end where the groups do, and the first tile keeps them for the others. Tiles
    // leave `expanded` as it is: the pointer stays good while they use the rest of the scratch.
    unsafe {
        let packed = Packed::<F>(panel, PhantomData);
        if rows <= TILE_ROWS || matches!(F::KIND, WeightFormat::Bf16) {
            return tiles(scratch, packed, 0..rows, 0..groups, target);
        }
        scratch.expanded.resize(SLICE, ExpandedBlock::ZERO);
        let others = tile_height(rows)..rows;
        for first in (0..groups).step_by(SLICE) {
            let (slice, blocks) = (first..groups.min(first + SLICE), scratch.expanded.as_mut_ptr());
            tiles(scratch, Kept { packed, first, blocks }, 0..others.start, slice.clone(), target);
            let (blocks, next) = (blocks.cast_const(), F::KIND.block(panel, slice.end).scales);
            let bytes = F::KIND.panel_bytes(SLICE * BLOCK) / SLICE;
            let others = others.clone();
            match (F::SCALES, F::OFFSETS) {
                (1, true) => tiles(scratch, Expanded::<1, true> { first, blocks, next, bytes }, others, slice, target),
                (1, false) => {
                    tiles(scratch, Expanded::<1, false> { first, blocks, next, bytes }, others, slice, target)
                }
                _ => tiles(scratch, Expanded::<2, false> { first, blocks, next, bytes }, others, slice, target),
            }
        }
    }
}

/// Where tiles get a panel's weights from.
///
/// # Safety
/// Of all methods: the panel has the group, and so does the slice where it is one; and as for [`Format`].
trait Weights: Copy {
    /// As [`Format::SCALES`].
    const SCALES: usize;
    /// As [`Format::OFFSETS`].
    const OFFSETS: bool;
    /// Asks memory for what is needed later, while so many rows are multiplied.
    unsafe fn ask_ahead(self, group: usize, rows: usize);
    /// As [`Format::two_pairs`].
    unsafe fn two_pairs(self, group: usize, half: usize, pair: usize) -> [__m512i; 2];
    /// As [`Format::scales`].
    unsafe fn scales(self, group: usize, half: usize) -> [__m512; 2];
}

/// From the panel.
struct Packed<F>(*const u8, PhantomData<F>);

impl<F> Clone for Packed<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Packed<F> {}

impl<F: Format> Weights for Packed<F> {
    const SCALES: usize = F::SCALES;
    const OFFSETS: bool = F::OFFSETS;
    #[inline(always)]
    unsafe fn ask_ahead(self, group: usize, rows: usize) {
        // Nothing decodes bf16: more rows wait for it, too.
        let every = if matches!(F::KIND, WeightFormat::Bf16) { SPARSE } else { every_for(rows) };
        F::KIND.ask_for(every, CacheLevel::Second, self.0, group + AHEAD);
    }
    #[inline(always)]
    unsafe fn two_pairs(self, group: usize, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the caller says.
        unsafe { F::two_pairs(F::KIND.block(self.0, group), half, pair) }
    }
    #[inline(always)]
    unsafe fn scales(self, group: usize, half: usize) -> [__m512; 2] {
        // SAFETY: as the caller says.
        unsafe { F::scales(F::KIND.block(self.0, group), half) }
    }
}

/// A block in bf16, and its scales.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct ExpandedBlock {
    /// Pair by pair the left and the right columns.
    weights: [[[u32; LANES]; 2]; PAIRS],
    /// Of the left and the right columns what [`Format::scales`] says.
    scales: [[[f32; LANES]; 2]; 2],
}

impl ExpandedBlock {
    const ZERO: Self = Self { weights: [[[0; LANES]; 2]; PAIRS], scales: [[[0.0; LANES]; 2]; 2] };
}

/// From the panel, and put down for others: a slice of it.
struct Kept<F> {
    packed: Packed<F>,
    /// Group.
    first: usize,
    blocks: *mut ExpandedBlock,
}

impl<F> Clone for Kept<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Kept<F> {}

impl<F: Format> Weights for Kept<F> {
    const SCALES: usize = F::SCALES;
    const OFFSETS: bool = F::OFFSETS;
    #[inline(always)]
    unsafe fn ask_ahead(self, group: usize, rows: usize) {
        // SAFETY: as the caller says.
        unsafe { self.packed.ask_ahead(group, rows) }
    }
    #[inline(always)]
    unsafe fn two_pairs(self, group: usize, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: the slice has the group, and no other tile reads its block yet; an even pair below 16 has one behind
        // it. A block lies at a multiple of 64 bytes, and so does each of its rows, which have 64.
        unsafe {
            let pairs = self.packed.two_pairs(group, half, pair);
            let weights = &mut (*self.blocks.add(group - self.first)).weights;
            _mm512_store_si512(weights[pair][half].as_mut_ptr().cast(), pairs[0]);
            _mm512_store_si512(weights[pair + 1][half].as_mut_ptr().cast(), pairs[1]);
            pairs
        }
    }
    #[inline(always)]
    unsafe fn scales(self, group: usize, half: usize) -> [__m512; 2] {
        // SAFETY: as above.
        unsafe {
            let scales = self.packed.scales(group, half);
            let to = &mut (*self.blocks.add(group - self.first)).scales[half];
            _mm512_store_ps(to[0].as_mut_ptr(), scales[0]);
            _mm512_store_ps(to[1].as_mut_ptr(), scales[1]);
            scales
        }
    }
}

/// From a slice of the panel that was kept; meanwhile the next one is asked for.
#[derive(Clone, Copy)]
struct Expanded<const SCALES: usize, const OFFSETS: bool> {
    /// Group.
    first: usize,
    blocks: *const ExpandedBlock,
    /// The next slice, packed, and how much of it is asked for with each group. It may lie behind the matrix.
    next: *const u8,
    bytes: usize,
}

impl<const SCALES: usize, const OFFSETS: bool> Weights for Expanded<SCALES, OFFSETS> {
    const SCALES: usize = SCALES;
    const OFFSETS: bool = OFFSETS;
    #[inline(always)]
    unsafe fn ask_ahead(self, group: usize, _rows: usize) {
        prefetch(CacheLevel::Second, self.next.wrapping_add((group - self.first) * self.bytes), self.bytes);
    }
    #[inline(always)]
    unsafe fn two_pairs(self, group: usize, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: the group's block was kept; an even pair below 16 has one behind it.
        unsafe {
            let weights = &(*self.blocks.add(group - self.first)).weights;
            let [first, second] = [&weights[pair][half], &weights[pair + 1][half]];
            [_mm512_loadu_si512(first.as_ptr().cast()), _mm512_loadu_si512(second.as_ptr().cast())]
        }
    }
    #[inline(always)]
    unsafe fn scales(self, group: usize, half: usize) -> [__m512; 2] {
        // SAFETY: the group's block was kept.
        unsafe {
            let [first, second] = &(*self.blocks.add(group - self.first)).scales[half];
            [_mm512_loadu_ps(first.as_ptr()), _mm512_loadu_ps(second.as_ptr())]
        }
    }
}

/// Of the first of the tiles of nearly equal height that have so many rows.
fn tile_height(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(TILE_ROWS))
}

/// These rows, from a tile's first to another's last.
///
/// # Safety
/// `weights` has the groups, the scratch too, and the rows; `target` has the scratch's rows; the machine has the
/// features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn tiles<W: Weights>(
    scratch: &mut Scratch,
    weights: W,
    rows: Range<usize>,
    groups: Range<usize>,
    target: Target,
) {
    let mut row = rows.start;
    while row < rows.end {
        let groups = groups.clone();
        // SAFETY: no tile is taller than the rows that are left.
        unsafe {
            row += match tile_height(rows.end - row) {
                1 => tile::<W, 1>(scratch, weights, groups, row, target),
                2 => tile::<W, 2>(scratch, weights, groups, row, target),
                3 => tile::<W, 3>(scratch, weights, groups, row, target),
                4 => tile::<W, 4>(scratch, weights, groups, row, target),
                5 => tile::<W, 5>(scratch, weights, groups, row, target),
                6 => tile::<W, 6>(scratch, weights, groups, row, target),
                7 => tile::<W, 7>(scratch, weights, groups, row, target),
                _ => tile::<W, TILE_ROWS>(scratch, weights, groups, row, target),
            };
        }
    }
}

/// `M` rows from `first` on. Totals are taken up where the groups before left them, and put down for those behind.
/// Returns `M`.
///
/// # Safety
/// As for [`tiles`]; the scratch has the `M` rows.
#[inline(always)]
unsafe fn tile<W: Weights, const M: usize>(
    scratch: &mut Scratch,
    weights: W,
    groups: Range<usize>,
    first: usize,
    target: Target,
) -> usize {
    // SAFETY: pairs are even and below 16. `round` made `x` rows × groups × 16 words, `x_sums` rows × groups, and
    // totals rows × 32. Of the first two, tiles before this one have `first * groups`, and it has `M * groups`: `row`
    // and the `M - 1` behind it are among these. `first + m` is a row, of the target, too.
    unsafe {
        let mut totals = [[_mm512_setzero_ps(); 2]; M];
        if groups.start > 0 {
            for (m, totals) in totals.iter_mut().enumerate() {
                let from = scratch.totals.as_ptr().add((first + m) * PANEL);
                *totals = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(LANES))];
            }
        }
        for group in groups.clone() {
            weights.ask_ahead(group, M);
            let row = first * scratch.groups + group * M;
            let x = scratch.x.as_ptr().add(row * PAIRS);
            let scales = [weights.scales(group, 0), weights.scales(group, 1)];
            for part in 0..W::SCALES {
                let mut sums = [[_mm512_setzero_ps(); 2]; M];
                // Four pairs are decoded from the same vectors.
                for four in (part * PAIRS / W::SCALES..(part + 1) * PAIRS / W::SCALES).step_by(4) {
                    for pair in [four, four + 2] {
                        let (left, right) = (weights.two_pairs(group, 0, pair), weights.two_pairs(group, 1, pair));
                        step(&mut sums, [bf16(left[0]), bf16(right[0])], x.add(pair));
                        step(&mut sums, [bf16(left[1]), bf16(right[1])], x.add(pair + 1));
                    }
                }
                for (totals, sums) in totals.iter_mut().zip(sums) {
                    *totals = with_sums(*totals, sums, &scales, part);
                }
            }
            if W::OFFSETS {
                for (m, totals) in totals.iter_mut().enumerate() {
                    let x_sum = _mm512_set1_ps(*scratch.x_sums.as_ptr().add(row + m));
                    *totals = with_offset(*totals, &scales, x_sum);
                }
            }
        }
        for (m, totals) in totals.into_iter().enumerate() {
            if groups.end == scratch.groups {
                target.put(first + m, totals);
                continue;
            }
            let to = scratch.totals.as_mut_ptr().add((first + m) * PANEL);
            _mm512_storeu_ps(to, totals[0]);
            _mm512_storeu_ps(to.add(LANES), totals[1]);
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

/// The totals with a group's offsets in them.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn with_offset(totals: [__m512; 2], scales: &[[__m512; 2]; 2], x_sum: __m512) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe { [_mm512_fmadd_ps(x_sum, scales[0][1], totals[0]), _mm512_fmadd_ps(x_sum, scales[1][1], totals[1])] }
}
