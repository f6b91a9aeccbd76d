//! `out = x · Wᵀ` in AMX's tiles: `x` and the weights are bf16, see `bf16_k32.rs`, sums are f32. [`amx`] has the
//! registers.
//!
//! A tile is 16 rows of 64 bytes. `x` is rounded into tiles of 16 rows × 32 `k`; a block of weights is two tiles of 16
//! pairs of `k` × 16 columns: of bf16 every other line of it in memory, else decoded into the core's L1 cache. The
//! sums of 16 rows × 16 columns are a tile of f32.
//!
//! Every output element is one fixed sequence of operations whatever the number of rows: groups of 32 `k` ascending, of
//! each the sum that `tdpbf16ps` defines, added to the total. Which rows and columns share a step, and where a total is
//! put down and taken up again, changes nothing of it.
//!
//! One row takes tiles, too: the multiplication takes as long as for sixteen, but beside it the vector units decode the
//! weights, which takes longer.
pub(super) mod amx;
#[cfg(test)]
pub(super) mod emulated;
#[cfg(test)]
mod tests;
mod trial;

use std::arch::x86_64::*;
use std::cell::RefCell;

use self::amx::{ROW_BYTES, Shapes, TILE_ROWS, Tile, Tiles, WHOLE};
pub(super) use self::trial::fault;
use super::bf16_k32::{ToTiles, from_sums, pairs_of, to_tiles, x_lift};
use super::packed::{BLOCK, PackedMatrix, WeightFormat};
use super::prefetch::CacheLevel;
use super::product::{AHEAD, Output, Target, for_each_task};
use super::weight_format::Block;
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
/// The machine has AVX-512 with BF16 and, for quantized weights, FP16; and what `T` needs.
///
/// # Panics
/// If `w` is not [fitted](PackedMatrix::fitted) for tiles.
pub(super) unsafe fn matmul<T: Tiles>(x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    thread_local! {
        static ROUNDED: RefCell<Rounded> = RefCell::new(Rounded::default());
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
    }
    let to_tiles = to_tiles(w.format());
    let factor = from_sums(w.format(), w.lifted());
    let (rows, out) = (x.len() / w.k(), Shared(out.as_mut_ptr()));
    let row_chunk = (X_BYTES / (2 * w.k())).clamp(*ROW_CHUNKS.start(), *ROW_CHUNKS.end());
    ROUNDED.with_borrow_mut(|rounded| {
        // SAFETY: the machine has the instructions, as the caller says.
        unsafe { rounded.take(x, w.k(), x_lift(w.format())) };
        let rounded = &*rounded;
        // Several tasks a thread even out cores of unequal speed.
        for_each_task(rows, row_chunk.next_multiple_of(2 * TILE_ROWS), w, 4, |task| {
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: as above; the task's rows are rounded and in `out`, and no other task has these rows and
                // panels; a panel is a block a group; tasks use tiles nowhere else.
                unsafe {
                    let mut tiles = T::configured(shapes_of(task.rows.len()));
                    let row_tiles = task.rows.len().div_ceil(TILE_ROWS);
                    let x = Rows { row_tiles, order: rounded.order, first: rounded.from(task.rows.start) };
                    for panel in task.panels {
                        let blocks = Blocks { format: w.format(), panel: w.panel(panel).as_ptr(), first: 0 };
                        scratch.multiply(&mut tiles, x, blocks, to_tiles);
                        let target = Target::new(out.get(), w, task.rows.start, panel, output);
                        scratch.put(task.rows.len(), factor, target);
                    }
                }
            });
        });
    });
}

/// Registers for `rows` rows: of one tile's only as many as there are, since a row takes its time and a line of cache.
fn shapes_of(rows: usize) -> &'static Shapes {
    /// By the number of rows, one less.
    static FEW: [Shapes; TILE_ROWS] = {
        let mut few = [const { Shapes::new([(TILE_ROWS as u8, ROW_BYTES as u16); 8]) }; TILE_ROWS];
        let mut rows = 1;
        while rows <= TILE_ROWS {
            // The sums, left and right, and `x`.
            few[rows - 1].rows[0] = rows as u8;
            few[rows - 1].rows[1] = rows as u8;
            few[rows - 1].rows[4] = rows as u8;
            rows += 1;
        }
        few
    };
    FEW.get(rows - 1).unwrap_or(&WHOLE)
}

/// `x` in bf16, for all tasks of a product: 16 rows after 16 rows. Kept by the thread that asks for products.
#[derive(Default)]
struct Rounded {
    order: Order,
    /// The last rows of the last tile may be no rows of `x`: they hold whatever they did, and their sums go nowhere.
    lines: Vec<Line>,
}

/// A tile's row: 16 pairs of bf16, a row's of one group.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; ROW_BYTES / 4]);

/// How the lines of 16 rows lie, by the distances between them.
#[derive(Clone, Copy, Default)]
struct Order {
    groups: usize,
    to_next_row: usize,
    to_next_group: usize,
}

impl Order {
    /// Tile after tile, as they are read. But a tile of few rows would use a few sets of the cache only: those lie row
    /// after row, an odd number of lines apart.
    fn new(rows: usize, groups: usize) -> Self {
        match rows {
            0..=TILE_ROWS => Self { groups, to_next_row: groups | 1, to_next_group: 1 },
            _ => Self { groups, to_next_row: 1, to_next_group: TILE_ROWS },
        }
    }

    /// Of 16 rows.
    fn lines(self) -> usize {
        TILE_ROWS * (self.groups | 1)
    }

    fn line(self, row: usize, group: usize) -> usize {
        row / TILE_ROWS * self.lines() + row % TILE_ROWS * self.to_next_row + group * self.to_next_group
    }
}

impl Rounded {
    /// Rounds all rows, on all threads; `lift` is of [`pairs_of`].
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16.
    unsafe fn take(&mut self, x: &[f32], k: usize, lift: i32) {
        let rows = x.len() / k;
        let (order, row_tiles) = (Order::new(rows, k.div_ceil(BLOCK)), rows.div_ceil(TILE_ROWS));
        self.order = order;
        self.lines.resize(row_tiles * order.lines(), Line([0; ROW_BYTES / 4]));
        let lines = Shared(self.lines.as_mut_ptr());
        // A few rows are rounded sooner than another thread has begun.
        pool::for_each_run(row_tiles, 4, |run| {
            let x = &x[run.start * TILE_ROWS * k..x.len().min(run.end * TILE_ROWS * k)];
            // SAFETY: the run's lines are in the buffer, and no other run has them; the machine has the instructions.
            unsafe {
                let lines = lines.get().add(run.start * order.lines());
                round(x, k, lift, std::slice::from_raw_parts_mut(lines, run.len() * order.lines()), order);
            }
        });
    }

    /// From the whole tile on that begins with `row`.
    fn from(&self, row: usize) -> *const Line {
        self.lines[self.order.line(row, 0)..].as_ptr()
    }
}

/// Rows of `k` numbers into lines, from a whole tile on.
///
/// # Safety
/// The machine has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn round(x: &[f32], k: usize, lift: i32, lines: &mut [Line], order: Order) {
    for (r, row) in x.chunks_exact(k).enumerate() {
        let lines = lines[order.line(r, 0)..].iter_mut().step_by(order.to_next_group);
        for (group, line) in row.chunks(BLOCK).zip(lines) {
            // SAFETY: at most 32 elements; a line takes all 16 pairs.
            unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), pairs_of(group, lift)) };
        }
    }
}

/// Some rows of `x`, from a whole tile on.
#[derive(Clone, Copy)]
struct Rows {
    row_tiles: usize,
    order: Order,
    first: *const Line,
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
    format: WeightFormat,
    panel: *const u8,
    first: usize,
}

impl Blocks {
    /// Those from `group` on, counted from the first one.
    fn from(self, group: usize) -> Self {
        Self { first: self.first + group, ..self }
    }

    /// That of `group`, counted from the first one.
    fn block(self, group: usize) -> Block {
        self.format.block(self.panel, self.first + group)
    }

    /// Asks memory for the block some groups behind that of `group`.
    fn ask_ahead(self, group: usize) {
        self.format.ask_for(1, CacheLevel::First, self.panel, self.first + group + AHEAD);
    }
}

/// Where a step's weights come from.
#[derive(Clone, Copy)]
enum Source {
    /// Blocks that are two tiles as they lie: from memory.
    Blocks(Blocks),
    /// Decoded by the slice's first step.
    Decoded(*const Tile),
    /// Decoded by the step itself, always one group ahead of the one that it multiplies: the tile registers and the
    /// vector units work at the same time. Group `g` goes to the room's place `g` modulo [`SLICE`].
    Encoded { blocks: Blocks, to_tiles: ToTiles, room: *mut Tile },
}

impl Scratch {
    /// All rows times a panel.
    ///
    /// # Safety
    /// The rows have their lines; the panel has a block for each group, which `to_tiles` decodes if it is not two
    /// tiles; and what [`Tiles`] asks for.
    #[inline(always)]
    unsafe fn multiply<T: Tiles>(&mut self, tiles: &mut T, x: Rows, panel: Blocks, to_tiles: Option<ToTiles>) {
        let (row_tiles, groups) = (x.row_tiles, x.order.groups);
        self.sums.resize(row_tiles * 2, Tile::ZERO);
        self.weights.resize(2 * SLICE, Tile::ZERO);
        // Weights that only one step reads need not stay.
        let slice = if row_tiles > 2 { SLICE } else { groups };
        for first in (0..groups).step_by(slice) {
            let (blocks, room) = (panel.from(first), self.weights.as_mut_ptr());
            for row_tile in (0..row_tiles).step_by(2) {
                let weights = match to_tiles {
                    None => Source::Blocks(blocks),
                    Some(to_tiles) if row_tile == 0 => Source::Encoded { blocks, to_tiles, room },
                    // Of a slice, which is no longer than the room.
                    Some(_) => Source::Decoded(room),
                };
                // SAFETY: the row tile's and, where there is one, the next one's `x` and sums; the slice's groups.
                unsafe {
                    let step = Step {
                        groups: slice.min(groups - first),
                        x: x.first.add(x.order.line(row_tile * TILE_ROWS, first)),
                        order: x.order,
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

    /// The sums of the first `rows` rows, multiplied by `factor`, to where they belong.
    ///
    /// # Safety
    /// These rows were multiplied; `target` has them; the machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn put(&self, rows: usize, factor: f32, target: Target) {
        for row in 0..rows {
            let [left, right] = [0, 1].map(|half| self.sums[row / TILE_ROWS * 2 + half].0[row % TILE_ROWS].as_ptr());
            // SAFETY: a tile's row is 16 f32.
            unsafe {
                let factor = _mm512_set1_ps(factor);
                let [left, right] = [_mm512_loadu_ps(left.cast()), _mm512_loadu_ps(right.cast())];
                target.put(row, [_mm512_mul_ps(left, factor), _mm512_mul_ps(right, factor)]);
            }
        }
    }
}

/// 16 or 32 rows times some groups of a panel, in tile registers: sums in 0 to 3, `x` in 4 and 5, weights in 6 and 7.
struct Step {
    groups: usize,
    x: *const Line,
    order: Order,
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
                blocks.ask_ahead(0);
                to_tiles(blocks.block(0), room.cast());
            }
            let (stride, to_second) = (self.order.to_next_row * ROW_BYTES, self.order.lines());
            let mut x = self.x;
            for group in 0..self.groups {
                let (left, right, between) = match self.weights {
                    Source::Blocks(blocks) => {
                        blocks.ask_ahead(group);
                        let rows = blocks.block(group).numbers;
                        (rows, rows.add(ROW_BYTES), 2 * ROW_BYTES)
                    }
                    Source::Decoded(tiles) => two_tiles(tiles.add(2 * group)),
                    Source::Encoded { blocks, to_tiles, room } => {
                        let place = |group: usize| room.add(2 * (group % SLICE));
                        if group + 1 < self.groups {
                            blocks.ask_ahead(group + 1);
                            to_tiles(blocks.block(group + 1), place(group + 1).cast());
                        }
                        two_tiles(place(group))
                    }
                };
                tiles.load::<6>(left, between);
                tiles.load::<7>(right, between);
                tiles.load::<4>(x.cast(), stride);
                tiles.multiply::<0, 4, 6>();
                tiles.multiply::<1, 4, 7>();
                if TWICE {
                    tiles.load::<5>(x.add(to_second).cast(), stride);
                    tiles.multiply::<2, 5, 6>();
                    tiles.multiply::<3, 5, 7>();
                }
                x = x.wrapping_add(self.order.to_next_group);
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

/// Where one tile and the next begin, and the bytes from a row to the next.
fn two_tiles(first: *const Tile) -> (*const u8, *const u8, usize) {
    (first.cast(), first.wrapping_add(1).cast(), ROW_BYTES)
}
