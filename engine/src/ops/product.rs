//! What all matrix products have in common, whichever kernel computes them: how a product is cut into tasks, and where
//! and how a task's result goes. Knows packed matrices by their sizes only. `matmul.rs` chooses the kernel.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::packed::PackedMatrix;
use super::pool;
#[cfg(target_arch = "x86_64")]
use super::simd::LANES;
use super::weight_format::PANEL;

/// Blocks of weights between the one at hand and the one that is asked for. The processor's own prefetching stops at
/// pages and falls behind while rows are multiplied; this made decode steps a quarter shorter.
pub(super) const AHEAD: usize = 6;

/// How the result meets what is in `out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Overwrites it.
    Store,
    /// Adds to it, after the whole product: a residual connection.
    Add,
}

/// Names some rows of one product, so that a thread prepares them once for all of its tasks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkId {
    call: u64,
    number: usize,
}

/// What one task of a product computes: these rows of these panels.
pub(super) struct Task {
    /// Of `rows`.
    pub chunk: ChunkId,
    pub rows: Range<usize>,
    pub panels: Range<usize>,
}

/// Cuts a product with `rows` rows (at least one) into tasks of at most `row_chunk` rows, `tasks_per_thread` of them
/// for each thread of the current pool if there are enough panels, and runs `f` for each.
pub(super) fn for_each_task(
    rows: usize,
    row_chunk: usize,
    w: &PackedMatrix,
    tasks_per_thread: usize,
    f: impl Fn(Task) + Sync,
) {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let (panels, chunks) = (w.columns().div_ceil(PANEL), rows.div_ceil(row_chunk));
    let groups = (tasks_per_thread * pool::threads()).div_ceil(chunks).clamp(1, panels);
    pool::for_each(chunks * groups, |task| {
        let (chunk, group) = (task / groups, task % groups);
        f(Task {
            chunk: ChunkId { call, number: chunk },
            rows: chunk * row_chunk..rows.min((chunk + 1) * row_chunk),
            panels: group * panels / groups..(group + 1) * panels / groups,
        });
    });
}

/// Where a panel's result goes: rows `stride` apart, `columns` ≤ 32 of each.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub out: *mut f32,
    pub stride: usize,
    pub columns: usize,
    pub output: Output,
}

impl Target {
    /// From `row` on, in the columns of `panel`.
    ///
    /// # Safety
    /// `out` is the whole result of a product with `w` and has the row; `w` has the panel.
    pub unsafe fn new(out: *mut f32, w: &PackedMatrix, row: usize, panel: usize, output: Output) -> Self {
        Self {
            // SAFETY: within the result, as the caller says.
            out: unsafe { out.add(row * w.columns() + panel * PANEL) },
            stride: w.columns(),
            columns: PANEL.min(w.columns() - panel * PANEL),
            output,
        }
    }

    /// Puts a row's 32 sums where they belong, as `output` says.
    ///
    /// # Safety
    /// The target has the row, writable and nobody else's; the caller has the features of AVX-512 enabled.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub unsafe fn put(self, row: usize, sums: [__m512; 2]) {
        let mask = ((1u64 << self.columns) - 1) as u32;
        for (h, sum) in sums.into_iter().enumerate() {
            let mask = (mask >> (h * LANES)) as u16;
            let to = self.out.wrapping_add(row * self.stride + h * LANES);
            // SAFETY: the row has `columns` elements from `out` on. The mask has a bit for each of these that is in
            // this half, and lanes without a bit are neither read nor written: so `to` may lie beyond the matrix, and
            // is computed by wrapping addition.
            unsafe {
                let sum = match self.output {
                    Output::Store => sum,
                    Output::Add => _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum),
                };
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}
