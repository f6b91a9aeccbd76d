//! `out = x · Wᵀ` in AMX's tiles, for more rows than a tile of `bf16_gemm.rs` reads weights for directly: `x` and the
//! weights are rounded to bf16, sums are f32. [`amx`] has the registers.
//!
//! A tile is 16 rows of 64 bytes. `x` is rounded into tiles of 16 rows × 32 `k`; a block of weights is two tiles of 16
//! pairs of `k` × 16 columns, in bf16 as it lies in memory, else decoded into the core's L1 cache; the sums of 16 rows ×
//! 16 columns are a tile of f32.
//!
//! Every output element is one fixed sequence of operations whatever the number of rows: groups of 32 `k` ascending, of
//! each the sum that `tdpbf16ps` defines, added to the total. Which rows and columns share a step, and where a total is
//! put down and taken up again, changes nothing of it. `few_rows.rs` computes the same sequence without tiles.
pub(super) mod amx;
#[cfg(test)]
pub(super) mod emulated;
#[cfg(test)]
mod tests;
mod trial;

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use self::amx::{ROW_BYTES, TILE_ROWS, Tile, Tiles, WHOLE};
pub(super) use self::trial::fault;
use super::bf16_k32::{ToTiles, pairs_of, to_tiles};
use super::packed::PackedMatrix;
use super::product::{Output, Target, for_each_task};
use super::weight_format::BLOCK;
use super::{Shared, pool};

/// Rows that a task works on at a time: a byte of weights serves as many operations, and the more, the less often all
/// weights come from memory; but their `x` should stay in the core's L2 cache.
const ROW_CHUNKS: std::ops::RangeInclusive<usize> = 96..=256;
/// Of a chunk's `x`: half of the L2 cache of the processors that have tiles.
const X_BYTES: usize = 1 << 20;
/// Groups of `k` that all rows pass before the next ones: 24 KiB of weights, half of these processors' L1 cache.
const SLICE: usize = 12;

/// See [`super::matmul::matmul`], which checks the lengths.
///
/// # Safety
/// The machine has AVX-512 with BF16, and what `T` needs.
///
/// # Panics
/// If `w` is not [fitted](PackedMatrix::fitted) for tiles.
pub(super) unsafe fn matmul<T: Tiles>(x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    thread_local! {
        static ROUNDED: RefCell<Rounded> = RefCell::new(Rounded::default());
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
    }
    let (to_tiles, block_bytes) = (to_tiles(w.format()), w.format().block_bytes());
    let (rows, out) = (x.len() / w.k(), Shared(out.as_mut_ptr()));
    let row_chunk = (X_BYTES / (2 * w.k())).clamp(*ROW_CHUNKS.start(), *ROW_CHUNKS.end());
    ROUNDED.with_borrow_mut(|rounded| {
        // SAFETY: the machine has the instructions, as the caller says.
        unsafe { rounded.take(x, w.k()) };
        let rounded = &*rounded;
        // Several tasks a thread even out cores of unequal speed.
        for_each_task(rows, row_chunk.next_multiple_of(2 * TILE_ROWS), w, 4, |task| {
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: as above; the task's rows are rounded and in `out`, and no other task has these rows and
                // panels; a panel is a block a group; tasks use tiles nowhere else.
                unsafe {
                    let mut tiles = T::configured(&WHOLE);
                    let x = rounded.rows(task.rows.clone());
                    for panel in task.panels {
                        let blocks = Blocks { first: w.panel(panel).as_ptr(), block_bytes };
                        scratch.multiply(&mut tiles, x, blocks, to_tiles);
                        scratch.put(task.rows.len(), Target::new(out.get(), w, task.rows.start, panel, output));
                    }
                }
            });
        });
    });
}

/// `x` in bf16 tiles, for all tasks of a product: 16 rows after 16 rows, of each its groups. Kept by the thread that
/// asks for products.
#[derive(Default)]
struct Rounded {
    groups: usize,
    /// The last rows of the last tiles may be no rows of `x`: they hold whatever they did, and their sums go nowhere.
    tiles: Vec<Tile>,
}

/// Some rows of it, from a whole tile on.
#[derive(Clone, Copy)]
struct Rows<'a> {
    row_tiles: usize,
    groups: usize,
    tiles: &'a [Tile],
}

impl Rounded {
    /// Rounds all rows, on all threads.
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16.
    unsafe fn take(&mut self, x: &[f32], k: usize) {
        self.groups = k.div_ceil(BLOCK);
        let row_tiles = (x.len() / k).div_ceil(TILE_ROWS);
        self.tiles.resize(row_tiles * self.groups, Tile::ZERO);
        let (groups, tiles) = (self.groups, Shared(self.tiles.as_mut_ptr()));
        // A few rows are rounded sooner than another thread has begun.
        pool::for_each_run(row_tiles, 4, |run| {
            let x = &x[run.start * TILE_ROWS * k..x.len().min(run.end * TILE_ROWS * k)];
            // SAFETY: the run's tiles are in the buffer, and no other run has them; the machine has the instructions.
            unsafe {
                let tiles = std::slice::from_raw_parts_mut(tiles.get().add(run.start * groups), run.len() * groups);
                round(x, k, tiles);
            }
        });
    }

    /// `rows` begin at a whole tile.
    fn rows(&self, rows: Range<usize>) -> Rows<'_> {
        let (first, row_tiles) = (rows.start / TILE_ROWS, rows.len().div_ceil(TILE_ROWS));
        let tiles = &self.tiles[first * self.groups..(first + row_tiles) * self.groups];
        Rows { row_tiles, groups: self.groups, tiles }
    }
}

/// Rows of `k` numbers into tiles, from a whole one on.
///
/// # Safety
/// The machine has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn round(x: &[f32], k: usize, tiles: &mut [Tile]) {
    let groups = k.div_ceil(BLOCK);
    for (r, row) in x.chunks_exact(k).enumerate() {
        let tiles = &mut tiles[r / TILE_ROWS * groups..][..groups];
        for (tile, group) in tiles.iter_mut().zip(row.chunks(BLOCK)) {
            // SAFETY: at most 32 elements; a tile's row takes all 16 pairs.
            unsafe { _mm512_storeu_si512(tile.0[r % TILE_ROWS].as_mut_ptr().cast(), pairs_of(group)) };
        }
    }
}

/// Sums with one panel, and decoded weights of it. Kept by each thread.
#[derive(Default)]
struct Scratch {
    /// Of each 16 rows the left and the right 16 columns, f32.
    sums: Vec<Tile>,
    /// Two tiles a group: a slice's.
    weights: Vec<Tile>,
}

/// A panel's blocks, from a group on.
#[derive(Clone, Copy)]
struct Blocks {
    first: *const u8,
    block_bytes: usize,
}

impl Blocks {
    /// Those from `group` on, counted from the first one.
    fn from(self, group: usize) -> Self {
        Self { first: self.first.wrapping_add(group * self.block_bytes), ..self }
    }
}

/// Where a step's weights come from.
#[derive(Clone, Copy)]
enum Source {
    /// Blocks that are two tiles as they lie, or were decoded by the slice's first step.
    Tiles(*const Tile),
    /// Decoded by the step itself, always one group ahead of the one that it multiplies: the tile registers and the
    /// vector units work at the same time. Group `g` goes to the room's place `g` modulo [`SLICE`].
    Encoded { blocks: Blocks, to_tiles: ToTiles, room: *mut Tile },
}

impl Scratch {
    /// All rows times a panel.
    ///
    /// # Safety
    /// The panel has a block for each group, which `to_tiles` decodes if it is not two tiles; and what [`Tiles`] asks
    /// for.
    #[inline(always)]
    unsafe fn multiply<T: Tiles>(&mut self, tiles: &mut T, x: Rows<'_>, panel: Blocks, to_tiles: Option<ToTiles>) {
        let Rows { row_tiles, groups, tiles: x } = x;
        self.sums.resize(row_tiles * 2, Tile::ZERO);
        self.weights.resize(2 * SLICE, Tile::ZERO);
        // Weights that only one step reads need not stay.
        let slice = if row_tiles > 2 { SLICE } else { groups };
        for first in (0..groups).step_by(slice) {
            let (blocks, room) = (panel.from(first), self.weights.as_mut_ptr());
            for row_tile in (0..row_tiles).step_by(2) {
                let weights = match to_tiles {
                    None => Source::Tiles(blocks.first.cast()),
                    Some(to_tiles) if row_tile == 0 => Source::Encoded { blocks, to_tiles, room },
                    // Of a slice, which is no longer than the room.
                    Some(_) => Source::Tiles(room),
                };
                // SAFETY: the row tile's and, where there is one, the next one's `x` and sums; the slice's groups.
                unsafe {
                    let step = Step {
                        groups: slice.min(groups - first),
                        x: x.as_ptr().add(row_tile * groups + first),
                        x_stride: groups,
                        weights,
                        sums: self.sums.as_mut_ptr().add(2 * row_tile),
                        fresh: first == 0,
                    };
                    match row_tiles - row_tile {
                        1 => step.run::<T, false>(tiles),
                        _ => step.run::<T, true>(tiles),
                    }
                }
            }
        }
    }

    /// The sums of the first `rows` rows to where they belong.
    ///
    /// # Safety
    /// These rows were multiplied; `target` has them; the machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn put(&self, rows: usize, target: Target) {
        for row in 0..rows {
            let [left, right] = [0, 1].map(|half| self.sums[row / TILE_ROWS * 2 + half].0[row % TILE_ROWS].as_ptr());
            // SAFETY: a tile's row is 16 f32.
            unsafe { target.put(row, [_mm512_loadu_ps(left.cast()), _mm512_loadu_ps(right.cast())]) };
        }
    }
}

/// 16 or 32 rows times some groups of a panel, in tile registers: sums in 0 to 3, `x` in 4 and 5, weights in 6 and 7.
struct Step {
    groups: usize,
    /// A tile a group.
    x: *const Tile,
    /// Tiles to the next 16 rows.
    x_stride: usize,
    weights: Source,
    /// Two tiles, or four.
    sums: *mut Tile,
    /// Whether the sums begin here.
    fresh: bool,
}

impl Step {
    /// # Safety
    /// The pointers are valid for what is said above; and what [`Tiles`] asks for.
    #[inline(always)]
    unsafe fn run<T: Tiles, const TWICE: bool>(self, tiles: &mut T) {
        // SAFETY: the second 16 rows are there if `TWICE`; groups stay below `self.groups`.
        unsafe {
            if self.fresh {
                tiles.zero::<0>();
                tiles.zero::<1>();
                if TWICE {
                    tiles.zero::<2>();
                    tiles.zero::<3>();
                }
            } else {
                tiles.load::<0>(self.sums.cast(), ROW_BYTES);
                tiles.load::<1>(self.sums.add(1).cast(), ROW_BYTES);
                if TWICE {
                    tiles.load::<2>(self.sums.add(2).cast(), ROW_BYTES);
                    tiles.load::<3>(self.sums.add(3).cast(), ROW_BYTES);
                }
            }
            if let Source::Encoded { blocks, to_tiles, room } = self.weights {
                to_tiles(blocks.first, room);
            }
            for group in 0..self.groups {
                let weights = match self.weights {
                    Source::Tiles(tiles) => tiles.add(2 * group),
                    Source::Encoded { blocks, to_tiles, room } => {
                        let place = |group: usize| room.add(2 * (group % SLICE));
                        if group + 1 < self.groups {
                            to_tiles(blocks.from(group + 1).first, place(group + 1));
                        }
                        place(group).cast_const()
                    }
                };
                tiles.load::<6>(weights.cast(), ROW_BYTES);
                tiles.load::<7>(weights.add(1).cast(), ROW_BYTES);
                tiles.load::<4>(self.x.add(group).cast(), ROW_BYTES);
                tiles.multiply::<0, 4, 6>();
                tiles.multiply::<1, 4, 7>();
                if TWICE {
                    tiles.load::<5>(self.x.add(self.x_stride + group).cast(), ROW_BYTES);
                    tiles.multiply::<2, 5, 6>();
                    tiles.multiply::<3, 5, 7>();
                }
            }
            tiles.store::<0>(self.sums.cast(), ROW_BYTES);
            tiles.store::<1>(self.sums.add(1).cast(), ROW_BYTES);
            if TWICE {
                tiles.store::<2>(self.sums.add(2).cast(), ROW_BYTES);
                tiles.store::<3>(self.sums.add(3).cast(), ROW_BYTES);
            }
        }
    }
}
