//! Attention in f32: sub-blocks of 16 keys, ascending. The same bits on every instruction set. `in_bf16.rs` is its
//! counterpart in bf16 dot products, and has pictures of K and V as they lie in 16-bit and 8-bit arenas.
use std::ops::Range;

use super::running::Running;
use super::{Part, Tile};
use crate::numerics::KvDtype;
use crate::ops::kv::SUB_BLOCK_TOKENS;
use crate::ops::prefetch::{CacheLevel, prefetch};
use crate::ops::simd::{Isa, LANES, Lanes, isa_dispatch};

/// Query rows of a task: they share one unpacking of each sub-block of K and V.
pub(super) const TILE_ROWS: usize = 16;
/// Sub-blocks of keys and values between the one at hand and the one that is asked for.
const AHEAD: usize = 2;

/// The sub-block of K and V at hand as f32.
#[derive(Default)]
pub(super) struct Scratch {
    /// head_dim × 16, so that a vector holds one dimension of 16 keys.
    keys: Vec<f32>,
    /// 16 × head_dim.
    values: Vec<f32>,
    /// pairs × 16.
    scores: Vec<f32>,
}

impl Scratch {
    /// Takes these keys of the tile into its running softmax.
    ///
    /// # Safety
    /// The tile's pointers are valid for its rows, `running` for its pairs.
    pub unsafe fn take(&mut self, isa: Isa, tile: &Tile<'_>, keys: Range<usize>, running: Running) {
        self.keys.resize(tile.head_dim * LANES, 0.0);
        self.values.resize(tile.head_dim * LANES, 0.0);
        self.scores.resize(tile.pairs() * LANES, 0.0);
        // SAFETY: the caller keeps the contract of `take_with`; the scratch was made for a sub-block and all pairs just
        // now; an `Isa` exists only where its instructions were detected.
        unsafe { take(isa, tile, keys, running, self) }
    }
}

isa_dispatch! {
    fn take(tile: &Tile<'_>, keys: Range<usize>, running: Running, scratch: &mut Scratch) = take_with
}

/// # Safety
/// As for [`Scratch::take`]; `scratch` was made for the tile's pairs.
#[inline(always)]
unsafe fn take_with<L: Lanes>(tile: &Tile<'_>, keys: Range<usize>, running: Running, scratch: &mut Scratch) {
    let end = keys.end.div_ceil(SUB_BLOCK_TOKENS);
    for index in keys.start / SUB_BLOCK_TOKENS..end {
        for part in [Part::K, Part::V] {
            // Blocks lie anywhere in the arena, which the processor does not foresee.
            let ahead = tile.sub_block((index + AHEAD).min(end - 1), part);
            prefetch(CacheLevel::Second, ahead, tile.kv.layout().sub_block_bytes());
        }
        let first_key = index * SUB_BLOCK_TOKENS;
        let pairs = tile.pairs_seeing(first_key..first_key + SUB_BLOCK_TOKENS);
        // SAFETY: the scratch has room for a sub-block and for all pairs, as the caller says. `pairs_seeing` gives
        // pairs of the tile only, each of which sees a key of this sub-block: so `first_key` is not behind the row.
        unsafe {
            load_sub_block::<L>(tile, index, scratch);
            score::<L>(tile, pairs.clone(), scratch);
            for pair in pairs {
                let row = pair / tile.group;
                let hidden = tile.first_key(row).saturating_sub(first_key);
                let visible = (tile.start + row + 1 - first_key).min(SUB_BLOCK_TOKENS);
                accumulate::<L>(pair, hidden..visible, tile.head_dim, running, scratch);
            }
        }
    }
}

/// Unpacks K (transposed) and V of the sequence's sub-block `index` to f32.
///
/// # Safety
/// `keys` and `values` of the scratch have 16 × head_dim elements; nobody writes the sub-block; and as for [`Lanes`].
#[inline(always)]
unsafe fn load_sub_block<L: Lanes>(tile: &Tile<'_>, index: usize, scratch: &mut Scratch) {
    let layout = tile.kv.layout();
    let head_dim = layout.head_dim;
    let [keys, values] = [Part::K, Part::V].map(|part| tile.sub_block(index, part));
    // SAFETY: a sub-block is 16 × head_dim elements of the layout's type (and for int8 16 scales), and as many are
    // `keys` and `values` of the scratch. Nobody writes them: the engine thread is the only one that computes on the
    // blocks of a running sequence, the step's own writes are done, and a transfer into blocks ends before their
    // sequence is submitted.
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

/// Scores of the pairs against the sub-block's 16 keys, eight pairs at a time to hide the multiply-adds'
/// latency; each pair's arithmetic is the same in every group size. A score that is infinite becomes NaN.
///
/// # Safety
/// The pairs are the tile's, and the scratch was made for these; and as for [`Lanes`].
#[inline(always)]
unsafe fn score<L: Lanes>(tile: &Tile<'_>, pairs: Range<usize>, scratch: &mut Scratch) {
    let mut pair = pairs.start;
    while pair < pairs.end {
        // SAFETY: at most as many pairs as are left.
        unsafe {
            pair += match pairs.end - pair {
                8.. => score_pairs::<L, 8>(tile, pair, scratch),
                4.. => score_pairs::<L, 4>(tile, pair, scratch),
                2.. => score_pairs::<L, 2>(tile, pair, scratch),
                _ => score_pairs::<L, 1>(tile, pair, scratch),
            };
        }
    }
}

/// Of `P` pairs from `first` on; returns `P`.
///
/// # Safety
/// As for [`score`], of these pairs.
#[inline(always)]
unsafe fn score_pairs<L: Lanes, const P: usize>(tile: &Tile<'_>, first: usize, scratch: &mut Scratch) -> usize {
    let head_dim = tile.head_dim;
    // SAFETY: a pair's query is head_dim f32, and `d` is below that; the keys are 16 for each `d`. The scratch has 16
    // scores for each pair of the tile, and `first + p` is one of them.
    unsafe {
        let queries: [*const f32; P] = std::array::from_fn(|p| tile.query(first + p));
        let mut sums = [L::splat(0.0); P];
        for d in 0..head_dim {
            let keys = L::load(scratch.keys.as_ptr().add(d * LANES));
            for (sum, query) in sums.iter_mut().zip(queries) {
                *sum = sum.fma(L::splat(*query.add(d)), keys);
            }
        }
        let scale = L::splat(1.0 / (head_dim as f32).sqrt());
        for (p, sum) in sums.into_iter().enumerate() {
            let score = sum.mul(scale);
            // Zero times an infinity is NaN, anything else stays as it is.
            score.fma(score, L::splat(0.0)).store(scratch.scores.as_mut_ptr().add((first + p) * LANES));
        }
    }
    P
}

/// Takes the `seen` keys of the sub-block into a pair's running softmax. What lies behind them in it may be
/// anything, NaN included, and is not touched. A NaN among the scores of those seen makes the pair's result NaN.
///
/// # Safety
/// `pair` is one of the tile's, for which `running` and the scratch were made; `seen` is within 0 to 16 and begins
/// before 16; and as for [`Lanes`].
#[inline(always)]
unsafe fn accumulate<L: Lanes>(
    pair: usize,
    seen: Range<usize>,
    head_dim: usize,
    running: Running,
    scratch: &mut Scratch,
) {
    // SAFETY: `running` has for the pair a greatest score, 16 weights and head_dim sums, the scratch 16 scores and 16 ×
    // head_dim values. `d` ends where the head does, in steps of 16, and `weigh` takes 64 or 32 dimensions only where
    // so many are left; its values begin at key `hidden`, with a weight for each key up to `visible`.
    unsafe {
        let Range { start: hidden, end: visible } = seen;
        let scores = L::load(scratch.scores.as_ptr().add(pair * LANES)).first_or(visible, L::splat(f32::NEG_INFINITY));
        let scores = L::splat(f32::NEG_INFINITY).first_or(hidden, scores);
        let old = *running.greatest.add(pair);
        let greatest = if scores.any_nan() { f32::NAN } else { scores.greatest() };
        // In this order a NaN among the new scores is kept; an old one is in the sums already.
        let new = L::splat(old).max(L::splat(greatest));
        let mut lanes = [0.0f32; LANES];
        new.store(lanes.as_mut_ptr());
        *running.greatest.add(pair) = lanes[0];

        let shrink = L::splat(old).sub(new).exp();
        let weights = scores.sub(new).exp().first_or(visible, L::splat(0.0));
        weights.store(lanes.as_mut_ptr());
        let total = running.weights.add(pair * LANES);
        weights.fma(L::load(total), shrink).store(total);

        let sums = running.sums.add(pair * head_dim);
        let mut d = 0;
        while d < head_dim {
            let (sums, values) = (sums.add(d), scratch.values.as_ptr().add(hidden * head_dim + d));
            d += LANES
                * match (head_dim - d) / LANES {
                    4.. => weigh::<L, 4>(&lanes[seen.clone()], shrink, values, head_dim, sums),
                    2.. => weigh::<L, 2>(&lanes[seen.clone()], shrink, values, head_dim, sums),
                    _ => weigh::<L, 1>(&lanes[seen.clone()], shrink, values, head_dim, sums),
                };
        }
    }
}

/// `sums = sums * shrink + Σ weights[key] * values[key]` for `16 * W` dimensions; returns `W`.
///
/// # Safety
/// `sums` has `16 * W` elements, `values` as many for each weight, `head_dim` apart; and as for [`Lanes`].
#[inline(always)]
unsafe fn weigh<L: Lanes, const W: usize>(
    weights: &[f32],
    shrink: L,
    values: *const f32,
    head_dim: usize,
    sums: *mut f32,
) -> usize {
    // SAFETY: `w` is below `W` and `key` below the number of weights: within what the caller says is there.
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
