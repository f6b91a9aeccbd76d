//! Attention over bf16 and 8-bit keys in AMX's tile registers, for prompts and decode steps alike: queries, softmax
//! weights and unpacked 8-bit numbers are rounded to bf16, sums are f32. Sixteen (row, head) pairs are the rows of a
//! tile; a decode step has fewer, and its tiles fewer rows, which take less time.
//!
//! **What a register takes** (D: head_dim; `in_bf16.rs` has the pictures of K and V):
//!
//! ```text
//! scores    sum 0 to 3    pairs × 16 keys                  of a sub-block each
//!           4             pairs × 32 dimensions            of the queries
//!           5             16 pairs of d × 16 keys          K of a sub-block: D / 32 such tiles, as they lie
//!
//! values    sum 0 to 3    pairs × 16 dimensions            64 of them at a time
//!           6             pairs × 16 keys                  softmax weights of a sub-block, in bf16
//!           7             8 pairs of keys × 16 dimensions  V of a sub-block: D / 16 such tiles, as they lie
//! ```
//!
//! A tile's row depends on the same row of queries or weights only, in an order that the instruction fixes. Sub-blocks
//! behind those that a pair sees, which others of its tile see, add zeros to its sums; those are never minus zero, nor
//! subnormal, once the first sub-block of the span is added. So neighbours change no bit.
use std::arch::x86_64::*;
use std::ops::Range;

use super::Tile;
use super::running::Running;
use super::span::{Ahead, Operands, SPAN, SPAN_TOKENS, Softmax, Span, Unwritten, logits, take_scores};
use crate::ops::kv::{KvLayout, SUB_BLOCK_TOKENS};
use crate::ops::simd::LANES;
use crate::ops::tiles::amx::{self, ROW_BYTES, Shapes, Tiles};

/// Pairs of a tile.
const PAIRS: usize = amx::TILE_ROWS;
/// Bytes of a pair's weights of a span.
const WEIGHT_BYTES: usize = 2 * SPAN_TOKENS;

/// Dimensions of a tile of queries.
const HEAD_DIMS: usize = 32;

/// Whether K is whole tiles. Other heads, of 80 or 112 dimensions, are for `in_bf16.rs`.
pub(super) fn takes(layout: KvLayout) -> bool {
    layout.head_dim.is_multiple_of(HEAD_DIMS)
}

/// Scores of a span, then the weights that they come to. A thread's.
pub(super) struct Scratch {
    scores: [amx::Tile; SPAN],
    weights: [[u32; SPAN_TOKENS / 2]; PAIRS],
}

impl Default for Scratch {
    fn default() -> Self {
        Self { scores: [amx::Tile::ZERO; SPAN], weights: [[0; SPAN_TOKENS / 2]; PAIRS] }
    }
}

/// Takes these keys of the tile into its running softmax.
///
/// # Safety
/// The machine has AVX-512 with BF16 and what `T` needs; the tile's pointers are valid for its rows, `running` for its
/// pairs; and it is a layout that [`takes`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
pub(super) unsafe fn take<T: Tiles>(
    scratch: &mut Scratch,
    operands: &mut Operands,
    tile: &Tile<'_>,
    keys: Range<usize>,
    running: Running,
) {
    // SAFETY: tile and `running` are the caller's, the features are enabled on this function. `pairs_seeing` gives
    // pairs of the tile only, each of which sees a key of the span, and no more of them are taken at a time than are
    // left. The registers have as many rows as pairs are taken.
    unsafe {
        operands.round_queries(tile);
        let mut configured = tile.pairs().min(PAIRS);
        let mut tiles = T::configured(&shapes(configured));
        for first_key in (keys.start / SPAN_TOKENS * SPAN_TOKENS..keys.end).step_by(SPAN_TOKENS) {
            if let Some(ahead) = Ahead::of(tile, first_key + SPAN_TOKENS) {
                ahead.prefetch(tile);
            }
            let span = operands.span(tile, first_key, Unwritten::SubBlock);
            let Range { start, end } = tile.pairs_seeing(first_key..first_key + SPAN_TOKENS);
            for first in (start..end).step_by(PAIRS) {
                let pairs = PAIRS.min(end - first);
                if pairs != configured {
                    tiles.configure(&shapes(pairs));
                    configured = pairs;
                }
                let group = Group { tile, span: &span, first, pairs, running };
                group.take(&mut tiles, operands.queries.as_ptr(), scratch);
            }
        }
    }
}

/// The registers for so many pairs, as in the picture above.
fn shapes(pairs: usize) -> Shapes {
    let (pairs, half) = (pairs as u8, ROW_BYTES as u16 / 2);
    let row = ROW_BYTES as u16;
    let sum = (pairs, row);
    Shapes::new([sum, sum, sum, sum, (pairs, row), (16, row), (pairs, half), (SUB_BLOCK_TOKENS as u8 / 2, row)])
}

/// Some pairs and a span of which each sees a key.
struct Group<'a> {
    tile: &'a Tile<'a>,
    span: &'a Span,
    first: usize,
    pairs: usize,
    running: Running,
}

impl Group<'_> {
    /// # Safety
    /// The pairs are the tile's and no more than [`PAIRS`], `running` is valid for them; `queries` are the tile's
    /// rounded ones; `tiles` have the shapes for the pairs; for the rest as [`take`], whose features are enabled.
    #[inline(always)]
    unsafe fn take<T: Tiles>(&self, tiles: &mut T, queries: *const u32, scratch: &mut Scratch) {
        let head_dim = self.tile.head_dim;
        // SAFETY: a pair has a row of each tile of scores and of the weights, and head_dim sums. A row of weights is
        // two vectors of 16 words.
        unsafe {
            self.score(tiles, queries.add(self.first * head_dim / 2), &mut scratch.scores);
            let mut visible = 0;
            for pair in 0..self.pairs {
                let mut scores = [_mm512_setzero_ps(); SPAN];
                // Keys behind those that are seen are masked: of them there may be old scores here.
                for (to, from) in scores.iter_mut().zip(&scratch.scores) {
                    *to = _mm512_load_ps(from.0[pair].as_ptr().cast());
                }
                let scores = logits(self.tile, scores);
                let softmax = take_scores(self.tile, self.span, self.first + pair, scores, self.running);
                visible = softmax.visible.max(visible);
                let to = scratch.weights[pair].as_mut_ptr();
                for (i, weights) in softmax.weights.into_iter().enumerate() {
                    let weights = std::mem::transmute::<__m512bh, __m512i>(weights);
                    _mm512_storeu_si512(to.add(i * LANES).cast(), weights);
                }
                self.shrink(pair, &softmax);
            }
            let sub_blocks = visible.div_ceil(SUB_BLOCK_TOKENS);
            for d in (0..head_dim).step_by(4 * LANES) {
                match (head_dim - d) / LANES {
                    4.. => self.weigh::<T, 4>(tiles, &scratch.weights, sub_blocks, d),
                    _ => self.weigh::<T, 2>(tiles, &scratch.weights, sub_blocks, d),
                }
            }
        }
    }

    /// Products of the queries with the keys of the sub-blocks that the tile sees.
    ///
    /// # Safety
    /// As [`Self::take`]; `queries` are those of the first pair.
    #[inline(always)]
    unsafe fn score<T: Tiles>(&self, tiles: &mut T, queries: *const u32, scores: &mut [amx::Tile; SPAN]) {
        let Span { seen, keys, .. } = *self.span;
        // SAFETY: a query is head_dim / 2 words, of which a chunk takes 16; a sub-block of K is a tile for each chunk.
        unsafe {
            tiles.zero::<0>();
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
            for chunk in 0..self.tile.head_dim / HEAD_DIMS {
                tiles.load::<4>(queries.add(chunk * HEAD_DIMS / 2).cast(), self.tile.head_dim * 2);
                let at = chunk * size_of::<amx::Tile>();
                tiles.load::<5>(keys[0].add(at), ROW_BYTES);
                tiles.multiply::<0, 4, 5>();
                if seen > 1 {
                    tiles.load::<5>(keys[1].add(at), ROW_BYTES);
                    tiles.multiply::<1, 4, 5>();
                }
                if seen > 2 {
                    tiles.load::<5>(keys[2].add(at), ROW_BYTES);
                    tiles.multiply::<2, 4, 5>();
                }
                if seen > 3 {
                    tiles.load::<5>(keys[3].add(at), ROW_BYTES);
                    tiles.multiply::<3, 4, 5>();
                }
            }
            tiles.store::<0>(scores[0].0.as_mut_ptr().cast(), ROW_BYTES);
            tiles.store::<1>(scores[1].0.as_mut_ptr().cast(), ROW_BYTES);
            tiles.store::<2>(scores[2].0.as_mut_ptr().cast(), ROW_BYTES);
            tiles.store::<3>(scores[3].0.as_mut_ptr().cast(), ROW_BYTES);
        }
    }

    /// Multiplies a pair's sums by what the span's greatest score makes of the earlier ones.
    ///
    /// # Safety
    /// As [`Self::take`]; `pair` is one of the group's.
    #[inline(always)]
    unsafe fn shrink(&self, pair: usize, softmax: &Softmax) {
        // SAFETY: the pair has head_dim sums, a multiple of 16.
        unsafe {
            if _mm512_cvtss_f32(softmax.shrink) == 1.0 {
                return;
            }
            let sums = self.running.sums.add((self.first + pair) * self.tile.head_dim);
            for d in (0..self.tile.head_dim).step_by(LANES) {
                _mm512_storeu_ps(sums.add(d), _mm512_mul_ps(_mm512_loadu_ps(sums.add(d)), softmax.shrink));
            }
        }
    }

    /// `sums += Σ weights[key] * values[key]` over the span's first sub-blocks, for `16 * W` dimensions from `d` on.
    ///
    /// # Safety
    /// As [`Self::take`]; the dimensions are in a head, the sub-blocks seen.
    #[inline(always)]
    unsafe fn weigh<T: Tiles, const W: usize>(
        &self,
        tiles: &mut T,
        weights: &[[u32; SPAN_TOKENS / 2]; PAIRS],
        sub_blocks: usize,
        d: usize,
    ) {
        let head_dim = self.tile.head_dim;
        let row = 4 * head_dim;
        // SAFETY: the pairs' sums are head_dim f32 apart; a pair's weights of a sub-block are 8 words; a sub-block of V
        // is 8 rows of head_dim words, a row for two tokens, a word for a dimension of both.
        unsafe {
            let sums = self.running.sums.add(self.first * head_dim + d);
            tiles.load::<0>(sums.cast(), row);
            tiles.load::<1>(sums.add(LANES).cast(), row);
            if W > 2 {
                tiles.load::<2>(sums.add(2 * LANES).cast(), row);
                tiles.load::<3>(sums.add(3 * LANES).cast(), row);
            }
            for (i, values) in self.span.values.iter().enumerate().take(sub_blocks) {
                tiles.load::<6>(weights.as_ptr().cast::<u32>().add(i * SUB_BLOCK_TOKENS / 2).cast(), WEIGHT_BYTES);
                let values = values.cast::<u32>().add(d);
                tiles.load::<7>(values.cast(), row);
                tiles.multiply::<0, 6, 7>();
                tiles.load::<7>(values.add(LANES).cast(), row);
                tiles.multiply::<1, 6, 7>();
                if W > 2 {
                    tiles.load::<7>(values.add(2 * LANES).cast(), row);
                    tiles.multiply::<2, 6, 7>();
                    tiles.load::<7>(values.add(3 * LANES).cast(), row);
                    tiles.multiply::<3, 6, 7>();
                }
            }
            tiles.store::<0>(sums.cast(), row);
            tiles.store::<1>(sums.add(LANES).cast(), row);
            if W > 2 {
                tiles.store::<2>(sums.add(2 * LANES).cast(), row);
                tiles.store::<3>(sums.add(3 * LANES).cast(), row);
            }
        }
    }
}
