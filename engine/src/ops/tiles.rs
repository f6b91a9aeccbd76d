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
mod tests;
mod trial;

use std::arch::x86_64::*;
use std::cell::RefCell;

use self::amx::{TILE_ROWS, Tile, Tiles};
pub(super) use self::trial::fault;
use super::Shared;
use super::bf16_k32::{ToTiles, pairs_of, to_tiles};
use super::packed::{BLOCK, PackedMatrix};
use super::product::{ChunkId, Output, Target, for_each_task};

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
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
    }
    let (to_tiles, block_bytes) = (to_tiles(w.format()), w.format().block_bytes());
    let out = Shared(out.as_mut_ptr());
    let row_chunk = (X_BYTES / (2 * w.k())).clamp(*ROW_CHUNKS.start(), *ROW_CHUNKS.end());
    // Several tasks a thread even out cores of unequal speed.
    for_each_task(x.len() / w.k(), row_chunk.next_multiple_of(2 * TILE_ROWS), w, 4, |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the machine has the instructions, as the caller says; the task's rows are in `x` and `out`, and
            // no other task has these rows and panels; a panel is a block a group; tasks use tiles nowhere else.
            unsafe {
                if scratch.holds != Some(task.chunk) {
                    scratch.round(&x[task.rows.start * w.k()..task.rows.end * w.k()], w.k());
                    scratch.holds = Some(task.chunk);
                }
                let mut tiles = T::configured();
                for panel in task.panels {
                    let blocks = Blocks { first: w.panel(panel).as_ptr(), block_bytes };
                    scratch.multiply(&mut tiles, blocks, to_tiles);
                    scratch.put(Target::new(out.get(), w, task.rows.start, panel, output));
                }
            }
        });
    });
}

/// A chunk of `x` in bf16 tiles, and its sums with one panel. Kept by each thread.
#[derive(Default)]
struct Scratch {
    holds: Option<ChunkId>,
    rows: usize,
    groups: usize,
    /// 16 rows after 16 rows, of each its groups. The last rows of the last tiles may be no rows of `x`: they hold
    /// whatever they did, and their sums go nowhere.
    x: Vec<Tile>,
    /// Of each 16 rows the left and the right 16 columns, f32.
    sums: Vec<Tile>,
    /// Decoded weights, two tiles a group: a slice's.
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
    /// # Safety
    /// The machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn round(&mut self, x: &[f32], k: usize) {
        (self.rows, self.groups) = (x.len() / k, k.div_ceil(BLOCK));
        self.x.resize(self.row_tiles() * self.groups, Tile::ZERO);
        self.sums.resize(self.row_tiles() * 2, Tile::ZERO);
        self.weights.resize(2 * SLICE, Tile::ZERO);
        for (r, row) in x.chunks_exact(k).enumerate() {
            let tiles = &mut self.x[r / TILE_ROWS * self.groups..][..self.groups];
            for (tile, group) in tiles.iter_mut().zip(row.chunks(BLOCK)) {
                // SAFETY: at most 32 elements; a tile's row takes all 16 pairs.
                unsafe {
                    _mm512_storeu_si512(tile.0[r % TILE_ROWS].as_mut_ptr().cast(), pairs_of(group));
                }
            }
        }
    }

    /// All rows times a panel.
    ///
    /// # Safety
    /// The panel has a block for each group, which `to_tiles` decodes if it is not two tiles; and what [`Tiles`] asks
    /// for.
    #[inline(always)]
    unsafe fn multiply<T: Tiles>(&mut self, tiles: &mut T, panel: Blocks, to_tiles: Option<ToTiles>) {
        let row_tiles = self.row_tiles();
        // Weights that only one step reads need not stay.
        let slice = if row_tiles > 2 { SLICE } else { self.groups };
        for first in (0..self.groups).step_by(slice) {
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
                        groups: slice.min(self.groups - first),
                        x: self.x.as_ptr().add(row_tile * self.groups + first),
                        x_stride: self.groups,
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

    /// The sums of all rows to where they belong.
    ///
    /// # Safety
    /// `target` has the rows; the machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn put(&self, target: Target) {
        for row in 0..self.rows {
            let [left, right] = [0, 1].map(|half| self.sums[row / TILE_ROWS * 2 + half].0[row % TILE_ROWS].as_ptr());
            // SAFETY: a tile's row is 16 f32.
            unsafe { target.put(row, [_mm512_loadu_ps(left.cast()), _mm512_loadu_ps(right.cast())]) };
        }
    }

    fn row_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
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
                tiles.load::<0>(self.sums);
                tiles.load::<1>(self.sums.add(1));
                if TWICE {
                    tiles.load::<2>(self.sums.add(2));
                    tiles.load::<3>(self.sums.add(3));
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
                tiles.load::<6>(weights);
                tiles.load::<7>(weights.add(1));
                tiles.load::<4>(self.x.add(group));
                tiles.multiply::<0, 4, 6>();
                tiles.multiply::<1, 4, 7>();
                if TWICE {
                    tiles.load::<5>(self.x.add(self.x_stride + group));
                    tiles.multiply::<2, 5, 6>();
                    tiles.multiply::<3, 5, 7>();
                }
            }
            tiles.store::<0>(self.sums);
            tiles.store::<1>(self.sums.add(1));
            if TWICE {
                tiles.store::<2>(self.sums.add(2));
                tiles.store::<3>(self.sums.add(3));
            }
        }
    }
}
