//! Attention over bf16 and 8-bit keys by the bf16 dot products of AVX-512: queries, softmax weights and unpacked 8-bit
//! numbers are rounded to bf16, sums are f32.
//!
//! A row takes the keys of its sequence in spans of 64, which begin at multiples of 64; what happens in a span depends
//! on the row alone. So a position gives the same bits in a prompt, in a chunk of it and in a decode step.
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
//! Where a sequence ends with an even t, the high halves of its last V vectors are not written yet. They may be
//! anything, NaN included, and NaN times a weight of zero is NaN: such a sub-block's V is copied with zeros there. K
//! needs no copy: a token's lane has nothing of its neighbours, and the scores of tokens that are not seen are masked.
use std::arch::x86_64::*;
use std::ops::Range;

use super::running::Running;
use super::{Part, Tile};
use crate::numerics::KvDtype;
use crate::ops::kv::SUB_BLOCK_TOKENS;
use crate::ops::simd::{LANES, prefetch};

/// Query rows of a task.
pub(super) const TILE_ROWS: usize = 32;
/// Sub-blocks of a span.
const SPAN: usize = 4;
const SPAN_TOKENS: usize = SPAN * SUB_BLOCK_TOKENS;
/// (row, head) pairs that are worked on together: 24 sums fit the registers.
const PAIRS: usize = 6;

const _: () = assert!(super::PARTITION.is_multiple_of(SPAN_TOKENS));

/// Queries and keys as the dot products take them.
#[derive(Default)]
pub(super) struct Scratch {
    /// Pairs of bf16, pairs × head_dim / 2.
    queries: Vec<u32>,
    /// K, then V, of a span's sub-blocks where they cannot be read in place: of 8-bit ones all, of bf16 ones a V with
    /// an unwritten token. Twice 4 × 16 × head_dim / 2.
    copies: Vec<u32>,
}

impl Scratch {
    /// Takes these keys of the tile into its running softmax.
    ///
    /// # Safety
    /// The machine has the features; the tile's pointers are valid for its rows, `running` for its pairs.
    pub unsafe fn take(&mut self, tile: &Tile<'_>, keys: Range<usize>, running: Running) {
        self.queries.resize(tile.pairs() * tile.head_dim / 2, 0);
        self.copies.resize(2 * SPAN_TOKENS * tile.head_dim / 2, 0);
        // SAFETY: the caller keeps the contract of `take`; the scratch was made for the tile's pairs just now.
        unsafe { take(tile, keys, running, self) }
    }
}

/// K and V of the sub-blocks of a span. Those that the tile does not see repeat one that it does.
struct Span {
    first_key: usize,
    keys: [*const u8; SPAN],
    values: [*const u8; SPAN],
}

/// # Safety
/// As for [`Scratch::take`]; the scratch was made for the tile's pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn take(tile: &Tile<'_>, keys: Range<usize>, running: Running, scratch: &mut Scratch) {
    // SAFETY: tile and `running` are the caller's, the features are enabled on this function. `pairs_seeing` gives
    // pairs of the tile only, each of which sees a key of the span, and no more of them are taken at a time than are
    // left.
    unsafe {
        round_queries(tile, &mut scratch.queries);
        for first_key in (keys.start / SPAN_TOKENS * SPAN_TOKENS..keys.end).step_by(SPAN_TOKENS) {
            prefetch_span(tile, first_key + SPAN_TOKENS);
            let span = span_at(tile, first_key, &mut scratch.copies);
            let Range { start: mut pair, end } = tile.pairs_seeing(first_key..first_key + SPAN_TOKENS);
            while pair < end {
                pair += match end - pair {
                    PAIRS.. => take_span::<PAIRS>(tile, &span, pair, running, &scratch.queries),
                    3.. => take_span::<3>(tile, &span, pair, running, &scratch.queries),
                    _ => take_span::<1>(tile, &span, pair, running, &scratch.queries),
                };
            }
        }
    }
}

/// The tile's queries in bf16, two neighbouring dimensions in a word.
///
/// # Safety
/// The tile's pointers are valid for its rows; `queries` has half a head's words for each pair; features as for
/// [`take`].
#[inline(always)]
unsafe fn round_queries(tile: &Tile<'_>, queries: &mut [u32]) {
    for pair in 0..tile.pairs() {
        // SAFETY: the tile has this row and head, `head_dim` f32, and `head_dim` is a multiple of 16 (`KvArena::new`
        // checks it). 16 of them become 32 bytes, so that a pair's words end where the next pair's begin. Transmuted
        // are 32 bytes to 32 bytes.
        unsafe {
            let (from, to) = (tile.query(pair), queries.as_mut_ptr().add(pair * tile.head_dim / 2));
            for d in (0..tile.head_dim).step_by(LANES) {
                let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(_mm512_loadu_ps(from.add(d))));
                _mm256_storeu_si256(to.add(d / 2).cast(), rounded);
            }
        }
    }
}

/// Nobody writes these blocks meanwhile: the engine thread is the only one that computes on the blocks of a running
/// sequence, the step's own writes are done, and a transfer into blocks ends before their sequence is submitted.
#[inline(always)]
unsafe fn span_at(tile: &Tile<'_>, first_key: usize, copies: &mut [u32]) -> Span {
    let (first, last) = (first_key / SUB_BLOCK_TOKENS, (tile.start + tile.rows - 1) / SUB_BLOCK_TOKENS);
    let seen = SPAN.min(last - first + 1);
    let at = |i: usize, part| tile.sub_block(first + i.min(seen - 1), part);
    let words = SUB_BLOCK_TOKENS * tile.head_dim / 2;
    let (keys, values) = copies.split_at_mut(SPAN * words);
    let unpacked = tile.kv.layout().dtype == KvDtype::Int8;
    if unpacked {
        for (i, (keys, values)) in
            keys.chunks_exact_mut(words).zip(values.chunks_exact_mut(words)).take(seen).enumerate()
        {
            // SAFETY: a sub-block is 16 × head_dim numbers and 16 scales, and a copy has half as many words.
            unsafe { unpack(at(i, Part::K).cast(), at(i, Part::V).cast(), keys, values) };
        }
    }
    let written = (tile.start + tile.rows) % SUB_BLOCK_TOKENS;
    let cleaned = last < first + SPAN && !written.is_multiple_of(2);
    if cleaned {
        // The last token's neighbour in the lane may be anything, NaN included, which even a weight of zero lets
        // through.
        let (copy, row) = (&mut values[(seen - 1) * words..][..words], written / 2 * tile.head_dim);
        if !unpacked {
            // SAFETY: a sub-block is so many words, and so long is the copy.
            unsafe { std::ptr::copy_nonoverlapping(at(seen - 1, Part::V).cast(), copy.as_mut_ptr(), words) };
        }
        copy[row..row + tile.head_dim].iter_mut().for_each(|pair| *pair &= 0xffff);
    }
    let copy = |of: &[u32], i: usize| of[i.min(seen - 1) * words..].as_ptr().cast();
    Span {
        first_key,
        keys: std::array::from_fn(|i| if unpacked { copy(keys, i) } else { at(i, Part::K) }),
        values: std::array::from_fn(|i| {
            let copied = unpacked || cleaned && i + 1 >= seen;
            if copied { copy(values, i) } else { at(i, Part::V) }
        }),
    }
}

/// Asks for the span at `first_key`: blocks lie anywhere in the arena, which the hardware does not foresee.
#[inline(always)]
fn prefetch_span(tile: &Tile<'_>, first_key: usize) {
    let (first, end) = (first_key / SUB_BLOCK_TOKENS, (tile.start + tile.rows).div_ceil(SUB_BLOCK_TOKENS));
    for index in first..end.min(first + SPAN) {
        for part in [Part::K, Part::V] {
            prefetch(tile.sub_block(index, part), tile.kv.layout().sub_block_bytes());
        }
    }
}

/// K and V of a sub-block of 8-bit numbers as bf16 in the same orders.
///
/// # Safety
/// `keys` and `values` are sub-blocks, 16 × head_dim numbers and behind them 16 scales in bf16; the copies are as long
/// as each other, 8 × head_dim words, and the features are enabled as for [`take`].
#[inline(always)]
unsafe fn unpack(keys: *const i8, values: *const i8, to_keys: &mut [u32], to_values: &mut [u32]) {
    let head_dim = to_keys.len() / (SUB_BLOCK_TOKENS / 2);
    let mut scales = [0.0f32; LANES];
    // SAFETY: the scales, 32 bytes, lie behind the 16 × head_dim numbers. The copies have a word for two numbers, and
    // 16 words are made of 32 numbers at a time: chunk `i` of the keys of the numbers from `32 * i` on, of the values
    // of two tokens from `32 * i` of that pair of tokens on. head_dim is a multiple of 16, so that all chunks are
    // whole.
    unsafe {
        let load = |of: *const i8| {
            let words = _mm256_loadu_si256(of.add(SUB_BLOCK_TOKENS * head_dim).cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
        };
        let of_keys = load(keys);
        _mm512_storeu_ps(scales.as_mut_ptr(), load(values));
        for (i, to) in to_keys.chunks_exact_mut(LANES).enumerate() {
            unpack_pairs(keys.add(2 * LANES * i), of_keys, of_keys, to.as_mut_ptr());
        }
        for (two, to) in to_values.chunks_exact_mut(head_dim).enumerate() {
            let [first, second] = [scales[2 * two], scales[2 * two + 1]].map(|scale| _mm512_set1_ps(scale));
            for (i, to) in to.chunks_exact_mut(LANES).enumerate() {
                unpack_pairs(values.add(2 * (two * head_dim + LANES * i)), first, second, to.as_mut_ptr());
            }
        }
    }
}

/// Sixteen pairs of 8-bit numbers, times the scales of the first and the second ones.
///
/// # Safety
/// `from` is readable for 32 bytes, `to` writable for 16 words; features as for [`take`].
#[inline(always)]
unsafe fn unpack_pairs(from: *const i8, first: __m512, second: __m512, to: *mut u32) {
    // SAFETY: the load reads the 32 bytes, the store writes the 64; all else is arithmetic in lanes. Transmuted are 64
    // bytes to 64 bytes.
    unsafe {
        let pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(from.cast()));
        let low = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(pairs));
        let low = _mm512_mul_ps(_mm512_cvtepi32_ps(low), first);
        let high = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32::<8>(pairs)), second);
        // The first ones' bf16, then the second ones', to pairs.
        let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        let order = _mm512_set_epi32(
            0x1f_000f, 0x1e_000e, 0x1d_000d, 0x1c_000c, 0x1b_000b, 0x1a_000a, 0x19_0009, 0x18_0008, 0x17_0007,
            0x16_0006, 0x15_0005, 0x14_0004, 0x13_0003, 0x12_0002, 0x11_0001, 0x10_0000,
        );
        _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, halves));
    }
}

/// Takes a span into the running softmax of `P` pairs; returns `P`.
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
            let (row, greatest) = ((first + p) / tile.group, running.greatest.add(first + p));
            let visible = (tile.start + row + 1 - span.first_key).min(SPAN_TOKENS);
            let hidden = tile.first_key(row).saturating_sub(span.first_key);
            most = visible.max(most);
            let (new, lanes) = exponentials(scores[p], hidden..visible, *greatest);
            shrink[p] = exp2(_mm512_set1_ps(*greatest - new));
            *greatest = new;
            let total = running.weights.add((first + p) * LANES);
            let mut sum = _mm512_mul_ps(_mm512_loadu_ps(total), shrink[p]);
            for (i, rounded) in lanes.into_iter().enumerate() {
                // The sum of what the values will be multiplied by.
                sum = _mm512_dpbf16_ps(sum, rounded, as_bf16(_mm512_set1_epi32(0x3f80_3f80)));
                let to = weights[p].as_mut_ptr().add(i * LANES);
                _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
            }
            _mm512_storeu_ps(total, sum);
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
        let scale = _mm512_set1_ps(std::f32::consts::LOG2_E / (tile.head_dim as f32).sqrt());
        for sum in sums.as_flattened_mut() {
            *sum = _mm512_mul_ps(*sum, scale);
            // Zero times an infinity is NaN, anything else stays as it is.
            *sum = _mm512_fmadd_ps(*sum, _mm512_setzero_ps(), *sum);
        }
        sums
    }
}

/// The new greatest score, and the powers of two of the distances of the scores of `keys` to it, zero for the others,
/// as bf16 in the order of the keys. A NaN among the scores of `keys` makes all of these NaN, and with them the pair's
/// result.
///
/// # Safety
/// Features as for [`take`].
#[inline(always)]
unsafe fn exponentials(scores: [__m512; SPAN], keys: Range<usize>, greatest: f32) -> (f32, [__m512bh; 2]) {
    // SAFETY: lane arithmetic only.
    unsafe {
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut seen = scores;
        if keys != (0..SPAN_TOKENS) {
            let before = |key: usize| if key < SPAN_TOKENS { (1u64 << key) - 1 } else { u64::MAX };
            let keys = before(keys.end) & !before(keys.start);
            for (i, seen) in seen.iter_mut().enumerate() {
                *seen = _mm512_mask_blend_ps((keys >> (i * LANES)) as __mmask16, none, *seen);
            }
        }
        let two = [_mm512_max_ps(seen[0], seen[1]), _mm512_max_ps(seen[2], seen[3])];
        let new = _mm512_reduce_max_ps(_mm512_max_ps(two[0], two[1])).max(greatest);
        // Maxima lose a NaN; unordered means that one of the two compared is one.
        let nan = |a, b| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b) != 0;
        let new = if nan(seen[0], seen[1]) || nan(seen[2], seen[3]) { f32::NAN } else { new };
        let mut powers = seen;
        for power in &mut powers {
            *power = exp2(_mm512_sub_ps(*power, _mm512_set1_ps(new)));
        }
        (new, [_mm512_cvtne2ps_pbh(powers[1], powers[0]), _mm512_cvtne2ps_pbh(powers[3], powers[2])])
    }
}

/// `2^x` for x ≤ 0, minus infinity included, within 7e-06: bf16 keeps less; NaN of NaN. The polynomial interpolates
/// `(2^r - 1) / r` at the Chebyshev nodes of -0.5..0.5.
#[inline(always)]
unsafe fn exp2(x: __m512) -> __m512 {
    // SAFETY: lane arithmetic only.
    unsafe {
        // Of two of which one is NaN this gives the second: `x` goes there.
        let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
        let n = _mm512_roundscale_ps::<0>(x);
        let r = _mm512_sub_ps(x, n);
        let mut p = _mm512_set1_ps(9.656_71e-3);
        for c in [5.583_828_3e-2, 2.402_253e-1, 6.931_367_5e-1, 1.0] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
        }
        let power = _mm512_scalef_ps(p, n);
        // What is below the range is nothing.
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(x, _mm512_set1_ps(-126.0)), power, _mm512_setzero_ps())
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
            let row = span.values[two / TWOS].cast::<u32>().add(two % TWOS * tile.head_dim + d);
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

#[inline(always)]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(bits) }
}
