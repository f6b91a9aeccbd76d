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
/// Multiply-adds of a task at most, as far as panels can be parted: half a millisecond or less of a core. A guest
/// leaves a borrowed core after its present task, see `lending.rs`.
const TASK_MULTIPLY_ADDS: usize = 1 << 25;

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

/// Cuts a product with `rows` rows (at least one) into tasks of at most `row_chunk` rows, and runs `f` for each. There
/// are `tasks_per_thread` of them for each thread of the current pool, if there are enough panels, and small ones at
/// the end, see [`Tapered`].
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
    let threads = pool::threads();
    let most = (TASK_MULTIPLY_ADDS / (rows.min(row_chunk) * w.k() * PANEL).max(1)).max(1);
    let groups = (tasks_per_thread * threads).div_ceil(chunks).max(panels.div_ceil(most)).clamp(1, panels);
    // The last chunk's tasks are the last ones of all.
    let (tapered, before) = (Tapered { panels, threads, most }, (chunks - 1) * groups);
    pool::for_each(before + tapered.tasks(), |task| {
        let (chunk, panels) = match task.checked_sub(before) {
            Some(task) => (chunks - 1, tapered.task(task)),
            None => (task / groups, task % groups * panels / groups..(task % groups + 1) * panels / groups),
        };
        let rows = chunk * row_chunk..rows.min((chunk + 1) * row_chunk);
        f(Task { chunk: ChunkId { call, number: chunk }, rows, panels });
    });
}

/// Panels in tasks that become smaller towards the end: a turn of all threads takes half of what is left. So there are
/// few tasks, and a thread that finishes early waits for a panel or two of the others.
#[derive(Clone, Copy)]
struct Tapered {
    panels: usize,
    threads: usize,
    /// Panels of a task at most, if there are several threads.
    most: usize,
}

impl Tapered {
    /// How many; one for a single thread, which waits for no other.
    fn tasks(self) -> usize {
        self.turns().map(|(taken, each)| (self.panels - taken).min(self.threads * each).div_ceil(each)).sum()
    }

    /// The panels of one of them.
    fn task(self, task: usize) -> Range<usize> {
        let (turn, place) = (task / self.threads, task % self.threads);
        self.turns().nth(turn).map_or(0..0, |(taken, each)| {
            let from = self.panels.min(taken + place * each);
            from..self.panels.min(from + each)
        })
    }

    /// Of each turn: the panels before it, and those of each of its tasks.
    fn turns(self) -> impl Iterator<Item = (usize, usize)> {
        let Self { panels, threads, most } = self;
        let each = move |taken: usize| match threads {
            1 => panels - taken,
            _ => ((panels - taken) / (2 * threads)).clamp(1, most),
        };
        let first = (panels > 0).then(|| (0, each(0)));
        std::iter::successors(first, move |&(taken, of_each)| {
            let taken = taken + threads * of_each;
            (taken < panels).then(|| (taken, each(taken)))
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tapered_tasks_have_each_panel_once_and_end_small() {
        for (threads, most) in [(1, 9), (2, 9), (2, 1), (3, 500), (8, 9), (64, 500)] {
            for panels in (0..200).chain([4008]) {
                let tapered = Tapered { panels, threads, most };
                let tasks: Vec<_> = (0..tapered.tasks()).map(|task| tapered.task(task)).collect();
                assert!(tasks.iter().all(|task| !task.is_empty()), "{threads} {panels}");
                assert!(threads == 1 || tasks.iter().all(|task| task.len() <= most), "{threads} {panels}: {tasks:?}");
                assert!(tasks.iter().cloned().flatten().eq(0..panels), "{threads} {panels}: {tasks:?}");
                let last = tasks.last().map_or(0, Range::len);
                assert!(threads == 1 || last <= 1, "{threads} {panels}: {tasks:?}");
            }
        }
        let tasks = |panels, threads| Tapered { panels, threads, most: 4008 }.tasks();
        assert_eq!((tasks(18, 1), tasks(18, 2), tasks(96, 2), tasks(4008, 2)), (1, 10, 14, 24));
    }
}
