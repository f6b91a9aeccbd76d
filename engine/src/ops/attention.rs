//! Causal attention of query rows over the paged KV of their sequences: online softmax in f32 over sub-blocks of 16 keys in
//! ascending order (Milakov & Gimelshein, arXiv:1805.02867; tiled as in FlashAttention, arXiv:2205.14135; paged as in
//! vLLM, arXiv:2309.06180). Grouped-query heads that share K and V are computed together.
use std::cell::RefCell;

use super::kv::{KvArena, Part, SUB_BLOCK_TOKENS};
use super::simd::{Isa, LANES, Lanes, isa_dispatch, prefetch};
use super::{Shared, pool};
use crate::executor::KvDtype;

/// Query rows of a task: they share one unpacking of each sub-block of K and V.
const TILE_ROWS: usize = 16;
/// Sub-blocks of keys and values between the one at hand and the one that is asked for.
const AHEAD: usize = 2;

/// The rows of a step that belong to one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The sequence's blocks; position `p` lies in `blocks[p / block_tokens]`.
    pub blocks: &'a [u32],
    /// First row in the step's matrices.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Position of the first row.
    pub start: usize,
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

/// Row `r` of `out` (rows × heads × head_dim) becomes `softmax(q · Kᵀ / sqrt(head_dim)) · V` over the positions up to and
/// including its own (of these the last `window`), whose K and V of `layer` must be in the arena. Nobody may write these
/// blocks meanwhile. With a window it is computed in f32 on every [`Isa`].
///
/// # Panics
/// If the lengths do not fit together or a block is not of the arena.
pub fn attention(isa: Isa, kv: &KvArena, layer: usize, chunks: &[Chunk<'_>], queries: Queries<'_>, out: &mut [f32]) {
    let layout = kv.layout();
    let width = queries.heads * layout.head_dim;
    let rows = queries.values.len() / queries.stride;
    assert!(queries.stride >= width && queries.heads.is_multiple_of(layout.kv_heads) && out.len() == rows * width);
    for chunk in chunks {
        assert!(chunk.first_row + chunk.rows <= rows);
        assert!(chunk.start + chunk.rows <= chunk.blocks.len() * layout.block_tokens);
    }
    #[cfg(target_arch = "x86_64")]
    if isa.rounds() && layout.dtype != KvDtype::F32 && queries.window.is_none() {
        return super::attention_dots::attention(kv, layer, chunks, queries, out);
    }
    let mut tiles = Vec::new();
    for chunk in chunks {
        for first in (0..chunk.rows).step_by(TILE_ROWS) {
            let part = Chunk {
                first_row: chunk.first_row + first,
                rows: TILE_ROWS.min(chunk.rows - first),
                start: chunk.start + first,
                ..*chunk
            };
            tiles.extend((0..layout.kv_heads).map(|kv_head| (part, kv_head)));
        }
    }
    let out = Shared(out.as_mut_ptr());
    let group = queries.heads / layout.kv_heads;
    pool::for_each(tiles.len(), |task| {
        let (chunk, kv_head) = tiles[task];
        let head = kv_head * group * layout.head_dim;
        let tile = Tile {
            kv,
            layer,
            chunk,
            kv_head,
            group,
            // SAFETY: row and head are within `values` and `out`, as asserted above.
            queries: unsafe { queries.values.as_ptr().add(chunk.first_row * queries.stride + head) },
            stride: queries.stride,
            // SAFETY: as above.
            out: unsafe { out.get().add(chunk.first_row * width + head) },
            width,
            window: queries.window.unwrap_or(usize::MAX),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.reset(chunk.rows * group, layout.head_dim);
            // SAFETY: the tile's rows and heads exist, and no other task has them; the scratch was made for it.
            unsafe { attend(isa, &tile, scratch) }
        });
    });
}

/// One task: up to 16 rows of a sequence × the query heads of one KV head.
struct Tile<'a> {
    kv: &'a KvArena,
    layer: usize,
    chunk: Chunk<'a>,
    kv_head: usize,
    group: usize,
    queries: *const f32,
    stride: usize,
    out: *mut f32,
    width: usize,
    window: usize,
}

impl Tile<'_> {
    fn sub_block(&self, index: usize, part: Part) -> *const u8 {
        self.kv.sub_block(self.chunk.blocks, index, self.layer, part, self.kv_head)
    }

    /// First key that a row of the tile sees.
    fn first_key(&self, row: usize) -> usize {
        (self.chunk.start + row + 1).saturating_sub(self.window)
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Running softmax of each (row, head) pair, and the sub-block of K and V at hand as f32.
#[derive(Default)]
struct Scratch {
    /// head_dim × 16, so that a vector holds one dimension of 16 keys.
    keys: Vec<f32>,
    /// 16 × head_dim.
    values: Vec<f32>,
    /// pairs × 16.
    scores: Vec<f32>,
    /// Greatest score so far.
    greatest: Vec<f32>,
    /// Sums of the weights by lane, pairs × 16.
    weights: Vec<f32>,
    /// Weighted sums of values, pairs × head_dim.
    sums: Vec<f32>,
}

impl Scratch {
    fn reset(&mut self, pairs: usize, head_dim: usize) {
        self.keys.resize(head_dim * LANES, 0.0);
        self.values.resize(head_dim * LANES, 0.0);
        self.scores.resize(pairs * LANES, 0.0);
        self.greatest.clear();
        self.greatest.resize(pairs, f32::NEG_INFINITY);
        for (zeroed, len) in [(&mut self.weights, pairs * LANES), (&mut self.sums, pairs * head_dim)] {
            zeroed.clear();
            zeroed.resize(len, 0.0);
        }
    }
}

isa_dispatch! { fn attend(tile: &Tile<'_>, scratch: &mut Scratch) = attend_with }

/// # Safety
/// The tile's pointers are valid for its rows; `scratch` was reset for its pairs.
#[inline(always)]
unsafe fn attend_with<L: Lanes>(tile: &Tile<'_>, scratch: &mut Scratch) {
    let Chunk { start, rows, .. } = tile.chunk;
    let (head_dim, pairs) = (tile.kv.layout().head_dim, rows * tile.group);
    let end = (start + rows).div_ceil(SUB_BLOCK_TOKENS);
    for index in tile.first_key(0) / SUB_BLOCK_TOKENS..end {
        for part in [Part::K, Part::V] {
            // Blocks lie anywhere in the arena, which the processor does not foresee.
            let ahead = tile.sub_block((index + AHEAD).min(end - 1), part);
            prefetch(ahead, tile.kv.layout().sub_block_bytes());
        }
        let first_key = index * SUB_BLOCK_TOKENS;
        // Rows before the sub-block's first key do not see it.
        let first_pair = first_key.saturating_sub(start) * tile.group;
        // SAFETY: the scratch has room for a sub-block and for all pairs.
        unsafe {
            load_sub_block::<L>(tile, index, scratch);
            score::<L>(tile, first_pair, pairs, scratch);
            for pair in first_pair..pairs {
                let row = pair / tile.group;
                let hidden = tile.first_key(row).saturating_sub(first_key);
                let visible = (start + row + 1 - first_key).min(SUB_BLOCK_TOKENS);
                if hidden < visible {
                    accumulate::<L>(pair, hidden, visible, head_dim, scratch);
                }
            }
        }
    }
    for pair in 0..pairs {
        // SAFETY: `out` has `head_dim` elements for each pair of the tile.
        unsafe {
            let out = tile.out.add(pair / tile.group * tile.width + pair % tile.group * head_dim);
            let total = L::splat(L::load(scratch.weights.as_ptr().add(pair * LANES)).sum());
            for d in (0..head_dim).step_by(LANES) {
                L::load(scratch.sums.as_ptr().add(pair * head_dim + d)).div(total).store(out.add(d));
            }
        }
    }
}

/// Unpacks K (transposed) and V of the sequence's sub-block `index` to f32.
#[inline(always)]
unsafe fn load_sub_block<L: Lanes>(tile: &Tile<'_>, index: usize, scratch: &mut Scratch) {
    let layout = tile.kv.layout();
    let head_dim = layout.head_dim;
    let [keys, values] = [Part::K, Part::V].map(|part| tile.sub_block(index, part));
    // SAFETY: a sub-block is 16 × head_dim elements of the layout's type (and for int8 16 scales), and as many are
    // `keys` and `values` of the scratch. Nobody writes them: the engine thread is the only one that computes on the
    // blocks of a running sequence, the step's own writes are done, and a transfer into blocks ends before their sequence
    // is submitted.
    unsafe {
        let (to_keys, to_values) = (scratch.keys.as_mut_ptr(), scratch.values.as_mut_ptr());
        match layout.dtype {
            KvDtype::F32 => {
                for d in (0..head_dim).step_by(LANES) {
                    let mut square = [L::splat(0.0); LANES];
                    for (token, row) in square.iter_mut().enumerate() {
                        *row = L::load(keys.cast::<f32>().add(token * head_dim + d));
                    }
                    for (column, lanes) in L::transpose(square).into_iter().enumerate() {
                        lanes.store(to_keys.add((d + column) * LANES));
                    }
                }
                for i in (0..SUB_BLOCK_TOKENS * head_dim).step_by(LANES) {
                    L::load(values.cast::<f32>().add(i)).store(to_values.add(i));
                }
            }
            KvDtype::Bf16 => {
                for d in (0..head_dim).step_by(2) {
                    let (even, odd) = L::load_bf16_pairs(keys.cast::<u16>().add(d * LANES));
                    even.store(to_keys.add(d * LANES));
                    odd.store(to_keys.add((d + 1) * LANES));
                }
                for token in (0..SUB_BLOCK_TOKENS).step_by(2) {
                    for d in (0..head_dim).step_by(LANES) {
                        let pairs = values.cast::<u16>().add(token * head_dim + 2 * d);
                        let (even, odd) = L::load_bf16_pairs(pairs);
                        even.store(to_values.add(token * head_dim + d));
                        odd.store(to_values.add((token + 1) * head_dim + d));
                    }
                }
            }
            KvDtype::Int8 => {
                let (keys, values) = (keys.cast::<i8>(), values.cast::<i8>());
                let mut scales = [0.0f32; LANES];
                let of_keys = L::load_bf16(keys.add(SUB_BLOCK_TOKENS * head_dim).cast());
                L::load_bf16(values.add(SUB_BLOCK_TOKENS * head_dim).cast()).store(scales.as_mut_ptr());
                for d in (0..head_dim).step_by(2) {
                    let (even, odd) = L::load_i8_pairs(keys.add(d * LANES));
                    even.mul(of_keys).store(to_keys.add(d * LANES));
                    odd.mul(of_keys).store(to_keys.add((d + 1) * LANES));
                }
                for token in (0..SUB_BLOCK_TOKENS).step_by(2) {
                    let of_two = [L::splat(scales[token]), L::splat(scales[token + 1])];
                    for d in (0..head_dim).step_by(LANES) {
                        let (even, odd) = L::load_i8_pairs(values.add(token * head_dim + 2 * d));
                        even.mul(of_two[0]).store(to_values.add(token * head_dim + d));
                        odd.mul(of_two[1]).store(to_values.add((token + 1) * head_dim + d));
                    }
                }
            }
        }
    }
}

/// Scores of the pairs `first..pairs` against the sub-block's 16 keys, eight pairs at a time to hide the multiply-adds'
/// latency; each pair's arithmetic is the same in every group size.
#[inline(always)]
unsafe fn score<L: Lanes>(tile: &Tile<'_>, first: usize, pairs: usize, scratch: &mut Scratch) {
    let mut pair = first;
    while pair < pairs {
        // SAFETY: at most as many pairs as are left.
        unsafe {
            pair += match pairs - pair {
                8.. => score_pairs::<L, 8>(tile, pair, scratch),
                4.. => score_pairs::<L, 4>(tile, pair, scratch),
                2.. => score_pairs::<L, 2>(tile, pair, scratch),
                _ => score_pairs::<L, 1>(tile, pair, scratch),
            };
        }
    }
}

#[inline(always)]
unsafe fn score_pairs<L: Lanes, const P: usize>(tile: &Tile<'_>, first: usize, scratch: &mut Scratch) -> usize {
    let head_dim = tile.kv.layout().head_dim;
    // SAFETY: the queries and scores of `P` pairs from `first` exist.
    unsafe {
        let queries: [*const f32; P] = std::array::from_fn(|p| {
            let (row, head) = ((first + p) / tile.group, (first + p) % tile.group);
            tile.queries.add(row * tile.stride + head * head_dim)
        });
        let mut sums = [L::splat(0.0); P];
        for d in 0..head_dim {
            let keys = L::load(scratch.keys.as_ptr().add(d * LANES));
            for (sum, query) in sums.iter_mut().zip(queries) {
                *sum = sum.fma(L::splat(*query.add(d)), keys);
            }
        }
        let scale = L::splat(1.0 / (head_dim as f32).sqrt());
        for (p, sum) in sums.into_iter().enumerate() {
            sum.mul(scale).store(scratch.scores.as_mut_ptr().add((first + p) * LANES));
        }
    }
    P
}

/// Takes the keys `hidden..visible` of the sub-block into a pair's running softmax. What lies behind them in it may be
/// anything, NaN included, and is not touched.
#[inline(always)]
unsafe fn accumulate<L: Lanes>(pair: usize, hidden: usize, visible: usize, head_dim: usize, scratch: &mut Scratch) {
    // SAFETY: `pair` is one of the scratch's pairs.
    unsafe {
        let scores = L::load(scratch.scores.as_ptr().add(pair * LANES)).first_or(visible, L::splat(f32::NEG_INFINITY));
        let scores = L::splat(f32::NEG_INFINITY).first_or(hidden, scores);
        let old = scratch.greatest[pair];
        let new = L::splat(scores.greatest()).max(L::splat(old));
        let mut lanes = [0.0f32; LANES];
        new.store(lanes.as_mut_ptr());
        scratch.greatest[pair] = lanes[0];

        let shrink = L::splat(old).sub(new).exp();
        let weights = scores.sub(new).exp().first_or(visible, L::splat(0.0));
        weights.store(lanes.as_mut_ptr());
        let total = scratch.weights.as_mut_ptr().add(pair * LANES);
        weights.fma(L::load(total), shrink).store(total);

        let sums = scratch.sums.as_mut_ptr().add(pair * head_dim);
        let mut d = 0;
        while d < head_dim {
            let (sums, values) = (sums.add(d), scratch.values.as_ptr().add(hidden * head_dim + d));
            d += LANES
                * match (head_dim - d) / LANES {
                    4.. => weigh::<L, 4>(&lanes[hidden..visible], shrink, values, head_dim, sums),
                    2.. => weigh::<L, 2>(&lanes[hidden..visible], shrink, values, head_dim, sums),
                    _ => weigh::<L, 1>(&lanes[hidden..visible], shrink, values, head_dim, sums),
                };
        }
    }
}

/// `sums = sums * shrink + Σ weights[key] * values[key]` for `16 * W` dimensions; returns `W`.
#[inline(always)]
unsafe fn weigh<L: Lanes, const W: usize>(
    weights: &[f32],
    shrink: L,
    values: *const f32,
    head_dim: usize,
    sums: *mut f32,
) -> usize {
    // SAFETY: `sums` has `16 * W` elements, and so have the `values` of each key, `head_dim` apart.
    unsafe {
        let mut lanes = [shrink; W];
        for (w, lanes) in lanes.iter_mut().enumerate() {
            *lanes = L::load(sums.add(w * LANES)).mul(shrink);
        }
        for (key, &weight) in weights.iter().enumerate() {
            let weight = L::splat(weight);
            for (w, lanes) in lanes.iter_mut().enumerate() {
                *lanes = lanes.fma(weight, L::load(values.add(key * head_dim + w * LANES)));
            }
        }
        for (w, lanes) in lanes.into_iter().enumerate() {
            lanes.store(sums.add(w * LANES));
        }
    }
    W
}
