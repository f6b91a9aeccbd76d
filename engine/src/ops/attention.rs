//! Causal attention of query rows over the paged KV of their sequences: online softmax (Milakov & Gimelshein,
//! arXiv:1805.02867; tiled as in FlashAttention, arXiv:2205.14135; paged as in vLLM, arXiv:2309.06180; one row's keys
//! split as in Flash-Decoding, pytorch.org/blog/flash-decoding). Grouped-query heads that share K and V are computed
//! together.
//!
//! **Order.** A row's keys are cut into partitions at fixed positions. Each has a running softmax of its own, from
//! nothing over ascending keys (`in_f32.rs` in f32, `in_bf16.rs` in bf16 dot products, `in_tiles.rs` in AMX's tiles),
//! and these are merged in ascending order (`running.rs`). Whether one task does all that or several do is this file's
//! choice and changes no bit. Read `running.rs` next, then `in_f32.rs`.
#[cfg(target_arch = "x86_64")]
mod in_bf16;
mod in_f32;
#[cfg(target_arch = "x86_64")]
mod in_tiles;
mod running;
#[cfg(target_arch = "x86_64")]
mod span;

use std::cell::RefCell;
use std::ops::Range;

use self::running::Running;
use super::kv::{KvArena, KvLayout, Part};
use super::simd::Isa;
#[cfg(target_arch = "x86_64")]
use super::tiles::amx::Amx;
use super::{Shared, pool};
use crate::numerics::KvDtype;
use crate::step::Chunk;

/// Keys of a partition: where the first one begins follows from position 0 alone. A multiple of what the kernels take
/// at a time.
pub(super) const PARTITION: usize = 512;
/// Rows up to which a tile may be split: more of them make tiles enough for all threads, and memory for partitions
/// large.
const SPLIT_ROWS: usize = 4;
/// A tile that is more than one part in so many of a thread's share of the step is split.
const SHARE_PARTS: usize = 4;

/// The sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// The blocks of all, those of one together.
    pub blocks: &'a [u32],
    /// Of each its rows.
    pub chunks: &'a [Chunk],
}

/// The query rows of a step: `heads` heads at the beginning of rows `stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// Row-major.
    pub values: &'a [f32],
    /// Length of a row.
    pub stride: usize,
    /// Query heads, a multiple of the KV heads.
    pub heads: usize,
    /// Keys that a row sees, itself included; `None`: all before it.
    pub window: Option<usize>,
}

/// The kernel, with the memory that it keeps from step to step.
pub struct Attention {
    isa: Isa,
    tasks: Vec<Task>,
    splits: Vec<Split>,
    /// Running softmaxes of the partitions of split tiles.
    partials: Vec<f32>,
    #[cfg(test)]
    emulated: bool,
}

/// Up to a tile's height of rows of one sequence × the query heads of one KV head.
#[derive(Clone, Copy)]
struct Rows {
    chunk: Chunk,
    kv_head: usize,
    /// First key that one of them sees.
    first_key: usize,
}

impl Rows {
    fn end(&self) -> usize {
        self.chunk.start + self.chunk.rows
    }

    fn partitions(&self) -> Range<usize> {
        self.first_key / PARTITION..self.end().div_ceil(PARTITION)
    }

    /// The keys of a partition that one of the rows sees.
    fn keys(&self, partition: usize) -> Range<usize> {
        self.first_key.max(partition * PARTITION)..self.end().min((partition + 1) * PARTITION)
    }

    fn cost(&self) -> usize {
        self.chunk.rows * (self.end() - self.first_key)
    }
}

#[derive(Clone, Copy)]
struct Task {
    rows: Rows,
    keys: Keys,
}

#[derive(Clone, Copy)]
enum Keys {
    All,
    One {
        partition: usize,
        /// Where its running softmax goes.
        partial: usize,
    },
}

/// A tile whose partitions are tasks of their own.
#[derive(Clone, Copy)]
struct Split {
    rows: Rows,
    /// Where the first partition's running softmax is; the others follow.
    partial: usize,
}

impl Attention {
    /// By the kernels of `isa`.
    pub fn new(isa: Isa) -> Self {
        Self {
            isa,
            tasks: Vec::new(),
            splits: Vec::new(),
            partials: Vec::new(),
            #[cfg(test)]
            emulated: false,
        }
    }

    /// In emulated tile registers, on an instruction set that rounds.
    #[cfg(test)]
    pub fn emulated(isa: Isa) -> Self {
        assert!(isa.rounds());
        Self { emulated: true, ..Self::new(isa) }
    }

    /// Row `r` of `out` (rows × heads × head_dim) becomes `softmax(q · Kᵀ / sqrt(head_dim)) · V` over the positions up
    /// to and including its own (of these the last `window`), whose K and V of `layer` must be in the arena. Nobody may
    /// write these blocks meanwhile.
    ///
    /// # Panics
    /// If the lengths do not fit together or a block is not of the arena.
    pub fn compute(
        &mut self,
        kv: &KvArena,
        layer: usize,
        sequences: Sequences<'_>,
        queries: Queries<'_>,
        out: &mut [f32],
    ) {
        let layout = kv.layout();
        let width = queries.heads * layout.head_dim;
        let rows = queries.values.len() / queries.stride;
        assert!(queries.stride >= width && queries.heads.is_multiple_of(layout.kv_heads) && out.len() == rows * width);
        for chunk in sequences.chunks {
            assert!(chunk.first_row + chunk.rows <= rows);
            assert!(chunk.start + chunk.rows <= chunk.blocks * layout.block_tokens);
        }
        let kernel = Kernel::of(self.isa, layout);
        #[cfg(all(test, target_arch = "x86_64"))]
        let kernel = match kernel {
            Kernel::Bf16(isa) | Kernel::Tiles(isa) if self.emulated && in_tiles::takes(layout) => Kernel::Emulated(isa),
            kernel => kernel,
        };
        self.plan(kernel, layout, sequences, queries);

        let (group, partials, out) =
            (queries.heads / layout.kv_heads, Shared(self.partials.as_mut_ptr()), Shared(out.as_mut_ptr()));
        let tile_of = |Rows { chunk, kv_head, .. }: &Rows| {
            let head = kv_head * group * layout.head_dim;
            Tile {
                kv,
                layer,
                blocks: &sequences.blocks[chunk.first_block..][..chunk.blocks],
                start: chunk.start,
                rows: chunk.rows,
                kv_head: *kv_head,
                group,
                head_dim: layout.head_dim,
                queries: queries.values[chunk.first_row * queries.stride + head..].as_ptr(),
                stride: queries.stride,
                // SAFETY: row and head are within `out`, as asserted above.
                out: unsafe { out.get().add(chunk.first_row * width + head) },
                width,
                window: queries.window.unwrap_or(usize::MAX),
            }
        };
        pool::for_each(self.tasks.len(), |task| {
            let Task { rows, keys } = &self.tasks[task];
            let tile = tile_of(rows);
            // SAFETY: the rows and heads exist, and no other task has them, or has them with this partition, whose
            // place in `partials` it has alone.
            SCRATCH.with_borrow_mut(|scratch| unsafe {
                match *keys {
                    Keys::All => scratch.attend(kernel, &tile, rows),
                    Keys::One { partition, partial } => {
                        let running = Running::at(partials.get().add(partial), tile.pairs(), tile.head_dim);
                        scratch.take(kernel, &tile, rows.keys(partition), running);
                    }
                }
            });
        });
        pool::for_each_run(self.splits.len(), MIN_MERGES, |run| {
            for Split { rows, partial } in &self.splits[run] {
                let tile = tile_of(rows);
                let at = |index: usize| {
                    let memory = partial + index * Running::len(tile.pairs(), tile.head_dim);
                    // SAFETY: `plan` made room for all partitions, and all tasks have ended.
                    unsafe { Running::at(partials.get().add(memory), tile.pairs(), tile.head_dim) }
                };
                // SAFETY: as above; the tile's rows of `out` are in this run only.
                unsafe {
                    for (index, partition) in rows.partitions().enumerate().skip(1) {
                        at(0).merge(kernel.isa(), at(index), tile.pairs_seeing(rows.keys(partition)), kernel.ln_base());
                    }
                    at(0).finish(kernel.isa(), &tile);
                }
            }
        });
    }

    /// Cuts the step into tasks. Only how long they take depends on that.
    fn plan(
        &mut self,
        kernel: Kernel,
        layout: KvLayout,
        Sequences { chunks, .. }: Sequences<'_>,
        queries: Queries<'_>,
    ) {
        let Self { tasks, splits, partials, .. } = self;
        let height = kernel.tile_rows();
        // The last tiles of a prompt are the longest: first.
        let tiles = chunks.iter().flat_map(|chunk| {
            (0..chunk.rows.div_ceil(height)).rev().map(move |tile| {
                let (first, start) = (tile * height, chunk.start + tile * height);
                let rows = height.min(chunk.rows - first);
                let first_key = (start + 1).saturating_sub(queries.window.unwrap_or(usize::MAX));
                Rows {
                    chunk: Chunk { first_row: chunk.first_row + first, rows, start, ..*chunk },
                    kv_head: 0,
                    first_key,
                }
            })
        });
        let all: usize = tiles.clone().map(|rows| rows.cost()).sum();
        let most = all * layout.kv_heads / (SHARE_PARTS * pool::threads());
        tasks.clear();
        splits.clear();
        let mut partial = 0;
        for rows in tiles {
            let split = pool::threads() > 1 && rows.chunk.rows <= SPLIT_ROWS && rows.cost() > most;
            let split = split && rows.partitions().len() > 1;
            for kv_head in 0..layout.kv_heads {
                let rows = Rows { kv_head, ..rows };
                if !split {
                    tasks.push(Task { rows, keys: Keys::All });
                    continue;
                }
                splits.push(Split { rows, partial });
                for partition in rows.partitions() {
                    tasks.push(Task { rows, keys: Keys::One { partition, partial } });
                    partial += Running::len(rows.chunk.rows * queries.heads / layout.kv_heads, layout.head_dim);
                }
            }
        }
        if partials.len() < partial {
            partials.resize(partial, 0.0);
        }
    }
}

/// Fewer merges than this are not worth another thread.
const MIN_MERGES: usize = 8;

/// The arithmetic in which a step's keys are taken.
#[derive(Clone, Copy)]
enum Kernel {
    F32(Isa),
    #[cfg(target_arch = "x86_64")]
    Bf16(Isa),
    #[cfg(target_arch = "x86_64")]
    Tiles(Isa),
    #[cfg(all(test, target_arch = "x86_64"))]
    Emulated(Isa),
}

impl Kernel {
    fn of(isa: Isa, layout: KvLayout) -> Self {
        #[cfg(target_arch = "x86_64")]
        if isa.rounds() && layout.dtype != KvDtype::F32 {
            return if isa.has_tiles() && in_tiles::takes(layout) { Self::Tiles(isa) } else { Self::Bf16(isa) };
        }
        let _ = layout;
        Self::F32(isa)
    }

    fn isa(self) -> Isa {
        match self {
            Self::F32(isa) => isa,
            #[cfg(target_arch = "x86_64")]
            Self::Bf16(isa) | Self::Tiles(isa) => isa,
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::Emulated(isa) => isa,
        }
    }

    /// Rows of a tile: they share one reading of K and V.
    fn tile_rows(self) -> usize {
        match self {
            Self::F32(_) => in_f32::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            _ => span::TILE_ROWS,
        }
    }

    /// Logarithm of the base of the weights: a weight is e to the power of this times its score.
    fn ln_base(self) -> f32 {
        match self {
            Self::F32(_) => 1.0,
            #[cfg(target_arch = "x86_64")]
            _ => std::f32::consts::LN_2,
        }
    }
}

/// What a task is about.
struct Tile<'a> {
    kv: &'a KvArena,
    layer: usize,
    blocks: &'a [u32],
    /// Position of the first row.
    start: usize,
    rows: usize,
    kv_head: usize,
    /// Query heads of the KV head.
    group: usize,
    head_dim: usize,
    queries: *const f32,
    stride: usize,
    out: *mut f32,
    width: usize,
    window: usize,
}

impl Tile<'_> {
    /// (row, head) pairs, row by row.
    fn pairs(&self) -> usize {
        self.rows * self.group
    }

    /// The pairs that see one of the keys: rows before the first do not, nor those whose window begins behind the last.
    fn pairs_seeing(&self, keys: Range<usize>) -> Range<usize> {
        let row = |position: usize| position.saturating_sub(self.start).min(self.rows);
        row(keys.start) * self.group..row((keys.end - 1).saturating_add(self.window)) * self.group
    }

    /// K or V of 16 tokens of the sequence.
    fn sub_block(&self, index: usize, part: Part) -> *const u8 {
        self.kv.sub_block(self.blocks, index, self.layer, part, self.kv_head)
    }

    /// First key that a row sees.
    fn first_key(&self, row: usize) -> usize {
        (self.start + row + 1).saturating_sub(self.window)
    }

    /// Where a pair's head is in the rows of queries, and in those of `out`.
    fn query(&self, pair: usize) -> *const f32 {
        self.queries.wrapping_add(pair / self.group * self.stride + pair % self.group * self.head_dim)
    }

    fn out(&self, pair: usize) -> *mut f32 {
        self.out.wrapping_add(pair / self.group * self.width + pair % self.group * self.head_dim)
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What a thread needs for a task.
#[derive(Default)]
struct Scratch {
    /// Of all partitions so far, and of the present one.
    running: [Vec<f32>; 2],
    in_f32: in_f32::Scratch,
    #[cfg(target_arch = "x86_64")]
    operands: span::Operands,
    #[cfg(target_arch = "x86_64")]
    in_tiles: in_tiles::Scratch,
}

impl Scratch {
    /// All keys of a tile.
    ///
    /// # Safety
    /// The tile's pointers are valid for its rows, which are `rows`.
    unsafe fn attend(&mut self, kernel: Kernel, tile: &Tile<'_>, rows: &Rows) {
        let len = Running::len(tile.pairs(), tile.head_dim);
        let [all, present] = self.running.each_mut().map(|memory| {
            if memory.len() < len {
                memory.resize(len, 0.0);
            }
            // SAFETY: long enough for the tile's pairs; nothing else uses it before the end of the task.
            unsafe { Running::at(memory.as_mut_ptr(), tile.pairs(), tile.head_dim) }
        });
        // SAFETY: the tile is the caller's, the memory was made for its pairs.
        unsafe {
            for (index, partition) in rows.partitions().enumerate() {
                if index == 0 {
                    self.take(kernel, tile, rows.keys(partition), all);
                } else {
                    self.take(kernel, tile, rows.keys(partition), present);
                    all.merge(kernel.isa(), present, tile.pairs_seeing(rows.keys(partition)), kernel.ln_base());
                }
            }
            all.finish(kernel.isa(), tile);
        }
    }

    /// The keys of one partition, from nothing.
    ///
    /// # Safety
    /// The tile's pointers are valid for its rows, `running` for its pairs.
    unsafe fn take(&mut self, kernel: Kernel, tile: &Tile<'_>, keys: Range<usize>, running: Running) {
        // SAFETY: the caller's; an `Isa` exists only where its instructions were detected.
        unsafe {
            running.clear(tile.pairs());
            match kernel {
                Kernel::F32(isa) => self.in_f32.take(isa, tile, keys, running),
                #[cfg(target_arch = "x86_64")]
                Kernel::Bf16(_) => in_bf16::take(&mut self.operands, tile, keys, running),
                #[cfg(target_arch = "x86_64")]
                Kernel::Tiles(_) => {
                    in_tiles::take::<Amx>(&mut self.in_tiles, &mut self.operands, tile, keys, running);
                }
                #[cfg(all(test, target_arch = "x86_64"))]
                Kernel::Emulated(_) => {
                    use super::tiles::emulated::Emulated;
                    in_tiles::take::<Emulated>(&mut self.in_tiles, &mut self.operands, tile, keys, running);
                }
            }
        }
    }
}
