//! Attention over bf16 and 8-bit keys by the bf16 dot products of AVX-512: queries, softmax weights and unpacked 8-bit
//! numbers are rounded to bf16, sums are f32. `in_tiles.rs` is its like on AMX.
//!
//! **What an instruction takes.** `dpbf16(sum, a, b)` adds to each of 16 f32 lanes two products: of `a`'s and `b`'s low
//! halves in that lane, and of their high halves. A sub-block of 16 tokens lies in the arena so that a vector of 64
//! bytes is one operand, a row of these pictures (t: token, d: dimension, D: head_dim):
//!
//! ```text
//! K, D / 2 vectors          lane 0        lane 1               lane 15
//!                         low   high    low   high           low   high
//!   vector 0              t0d0  t0d1    t1d0  t1d1    ...    t15d0 t15d1
//!   vector 1              t0d2  t0d3    t1d2  t1d3    ...    t15d2 t15d3
//!    ...
//!
//!   score: a query's pair (d0, d1) in all lanes · vector 0, + its pair (d2, d3) · vector 1, + ... :
//!   16 tokens' scores, a token a lane; four sub-blocks make the span's 64
//!
//! V, 8 × D / 16 vectors     lane 0        lane 1               lane 15
//!                         low   high    low   high           low   high
//!   t0, t1:   vector 0    t0d0  t1d0    t0d1  t1d1    ...    t0d15  t1d15
//!             vector 1    t0d16 t1d16   t0d17 t1d17   ...    t0d31  t1d31
//!              ...
//!   t2, t3:   vector D/16 t2d0  t3d0    t2d1  t3d1    ...    t2d15  t3d15
//!              ...
//!
//!   weigh: the weights' pair (t0, t1) in all lanes · vector 0, + the pair (t2, t3) · vector D/16, + ... :
//!   the sums of dimensions 0 to 15, a dimension a lane
//! ```
//!
//! What both kernels in bf16 have in common, and what is not written yet, is the matter of `span.rs`.
use std::arch::x86_64::*;
use std::ops::Range;

use super::Tile;
use super::running::Running;
use super::span::{Ahead, Operands, SPAN, SPAN_TOKENS, Softmax, Span, Unwritten, as_bf16, logits, take_scores};
use crate::ops::kv::SUB_BLOCK_TOKENS;
use crate::ops::simd::LANES;

/// (row, head) pairs that are worked on together: 24 sums fit the registers.
const PAIRS: usize = 6;

/// Takes these keys of the tile into its running softmax.
///
/// # Safety
/// The machine has the features; the tile's pointers are valid for its rows, `running` for its pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
pub(super) unsafe fn take(operands: &mut Operands, tile: &Tile<'_>, keys: Range<usize>, running: Running) {
    // SAFETY: tile and `running` are the caller's, the features are enabled on this function. `pairs_seeing` gives
    // pairs of the tile only, each of which sees a key of the span, and no more of them are taken at a time than are
    // left.
    unsafe {
        operands.round_queries(tile);
        for first_key in (keys.start / SPAN_TOKENS * SPAN_TOKENS..keys.end).step_by(SPAN_TOKENS) {
            let mut span = operands.span(tile, first_key, Unwritten::NextToWritten);
            span.ahead = Ahead::of(tile, first_key + SPAN_TOKENS);
            let Range { start: mut pair, end } = tile.pairs_seeing(first_key..first_key + SPAN_TOKENS);
            while pair < end {
                pair += match end - pair {
                    PAIRS.. => take_span::<PAIRS>(tile, &span, pair, running, &operands.queries),
                    3.. => take_span::<3>(tile, &span, pair, running, &operands.queries),
                    _ => take_span::<1>(tile, &span, pair, running, &operands.queries),
                };
                // The first pairs have asked for it.
                span.ahead = None;
            }
        }
    }
}

/// Takes a span into the running softmax of `P` pairs, and asks for what is ahead of it; returns `P`.
///
/// # Safety
/// The pairs from `first` on are the tile's, and each sees a key of the span; `running` is valid for them, the queries
/// are rounded; features as for [`take`].
#[inline(always)]
unsafe fn take_span<const P: usize>(
    tile: &Tile<'_>,
    span: &Span,
    first: usize,
    running: Running,
    queries: &[u32],
) -> usize {
    // SAFETY: `running` has for each of the pairs a greatest score, 16 weights and head_dim sums, and `first + p` is
    // one of them. Each pair's weights are 32 words, written as two vectors of 16. `d` ends where the head does, in
    // steps of 16, and `weigh` takes 64 dimensions only where 64 are left.
    unsafe {
        let scores = score::<P>(tile, span, first, queries);
        let mut weights = [[0u32; SPAN_TOKENS / 2]; P];
        let mut shrink = [_mm512_setzero_ps(); P];
        let mut most = 0;
        for p in 0..P {
            let Softmax { shrink: by, weights: rounded, visible } =
                take_scores(tile, span, first + p, scores[p], running);
            most = visible.max(most);
            shrink[p] = by;
            for (i, rounded) in rounded.into_iter().enumerate() {
                let to = weights[p].as_mut_ptr().add(i * LANES);
                _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
            }
        }
        let sums = running.sums.add(first * tile.head_dim);
        let mut d = 0;
        while d < tile.head_dim {
            d += LANES
                * match (tile.head_dim - d) / LANES {
                    4.. => weigh::<P, 4>(tile, span, &weights, shrink, most, d, sums.add(d)),
                    _ => weigh::<P, 1>(tile, span, &weights, shrink, most, d, sums.add(d)),
                };
        }
    }
    P
}

/// Products of `P` queries with the 64 keys of the span. Those that are infinite become NaN.
///
/// # Safety
/// `queries` has the `P` pairs from `first` on; the span's keys are whole sub-blocks; features as for [`take`].
#[inline(always)]
unsafe fn score<const P: usize>(tile: &Tile<'_>, span: &Span, first: usize, queries: &[u32]) -> [[__m512; SPAN]; P] {
    let twos = tile.head_dim / 2;
    // SAFETY: a sub-block of K is head_dim / 2 vectors of 64 bytes, each two dimensions of 16 keys, and `two` is below
    // that. A pair's query is as many words, and `p` is below the pairs that the caller says are there.
    unsafe {
        let queries = queries.as_ptr().add(first * twos);
        let mut sums = [[_mm512_setzero_ps(); SPAN]; P];
        for two in 0..twos {
            if let Some(ahead) = &span.ahead {
                ahead.prefetch_keys(two);
            }
            let mut keys = [as_bf16(_mm512_setzero_si512()); SPAN];
            for (keys, from) in keys.iter_mut().zip(span.keys) {
                *keys = as_bf16(_mm512_loadu_si512(from.add(two * 64).cast()));
            }
            for (p, sums) in sums.iter_mut().enumerate() {
                let query = as_bf16(_mm512_set1_epi32(*queries.add(p * twos + two) as i32));
                for (sum, keys) in sums.iter_mut().zip(keys) {
                    *sum = _mm512_dpbf16_ps(*sum, query, keys);
                }
            }
        }
        for sums in &mut sums {
            *sums = logits(tile, *sums);
        }
        sums
    }
}

/// `sums = sums * shrink + Σ weights[key] * values[key]` over the first `most` keys (rounded up to two) of the span,
/// for `16 * W` dimensions from `d` on; returns `W`.
///
/// # Safety
/// `d` and the dimensions behind it are in a head; `sums` has the `P` pairs, head_dim apart, from dimension `d` on;
/// `most` is 64 at most; the span's values are whole sub-blocks; features as for [`take`].
#[inline(always)]
unsafe fn weigh<const P: usize, const W: usize>(
    tile: &Tile<'_>,
    span: &Span,
    weights: &[[u32; SPAN_TOKENS / 2]; P],
    shrink: [__m512; P],
    most: usize,
    d: usize,
    sums: *mut f32,
) -> usize {
    const TWOS: usize = SUB_BLOCK_TOKENS / 2;
    // SAFETY: a sub-block of V is 8 rows of head_dim words, a row for two tokens, a word for a dimension of both. `two`
    // is below 32, which is 4 sub-blocks of 8 rows; `d + 16 * W` is at most head_dim, in the row and in the pair's
    // sums.
    unsafe {
        let mut lanes = [[_mm512_setzero_ps(); W]; P];
        for (p, lanes) in lanes.iter_mut().enumerate() {
            for (w, lanes) in lanes.iter_mut().enumerate() {
                *lanes = _mm512_mul_ps(_mm512_loadu_ps(sums.add(p * tile.head_dim + w * LANES)), shrink[p]);
            }
        }
        for two in 0..most.div_ceil(2) {
            let (sub_block, at) = (two / TWOS, two % TWOS * tile.head_dim + d);
            if let Some(ahead) = &span.ahead {
                ahead.prefetch_values(sub_block, at / LANES, W);
            }
            let row = span.values[sub_block].cast::<u32>().add(at);
            let mut values = [as_bf16(_mm512_setzero_si512()); W];
            for (w, values) in values.iter_mut().enumerate() {
                *values = as_bf16(_mm512_loadu_si512(row.add(w * LANES).cast()));
            }
            for (lanes, weights) in lanes.iter_mut().zip(weights) {
                let weight = as_bf16(_mm512_set1_epi32(weights[two] as i32));
                for (lanes, values) in lanes.iter_mut().zip(values) {
                    *lanes = _mm512_dpbf16_ps(*lanes, weight, values);
                }
            }
        }
        for (p, lanes) in lanes.into_iter().enumerate() {
            for (w, lanes) in lanes.into_iter().enumerate() {
                _mm512_storeu_ps(sums.add(p * tile.head_dim + w * LANES), lanes);
            }
        }
    }
    W
}
