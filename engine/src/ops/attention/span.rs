//! What the two kernels of attention in bf16 have in common ([`super::in_bf16`], [`super::in_tiles`]): queries and keys
//! as they take them, and the running softmax of a (row, head) pair over a span of 64 keys.
//!
//! A row takes the keys of its sequence in spans, which begin at multiples of 64; what happens in a span depends on the
//! row alone. So a position gives the same bits in a prompt, in a chunk of it and in a decode step.
//!
//! **Tokens that are not written yet.** Their K and V may be anything, NaN included. K needs no copy: a token is a lane
//! of its own in the scores, and the scores of tokens that are not seen are masked. V does: NaN times a weight of zero
//! is NaN. So the V of a sub-block that ends with such tokens is copied with zeros there ([`Unwritten`]).
use std::arch::x86_64::*;
use std::ops::Range;

use super::running::Running;
use super::{Part, Tile};
use crate::numerics::KvDtype;
use crate::ops::kv::SUB_BLOCK_TOKENS;
use crate::ops::prefetch::{CacheLevel, prefetch};
use crate::ops::simd::LANES;

/// Query rows of a task.
pub(super) const TILE_ROWS: usize = 32;
/// Sub-blocks of a span.
pub(super) const SPAN: usize = 4;
pub(super) const SPAN_TOKENS: usize = SPAN * SUB_BLOCK_TOKENS;

const _: () = assert!(super::PARTITION.is_multiple_of(SPAN_TOKENS));

/// Queries and keys as the instructions take them.
#[derive(Default)]
pub(super) struct Operands {
    /// Pairs of bf16, pairs × head_dim / 2.
    pub queries: Vec<u32>,
    /// K, then V, of a span's sub-blocks where they cannot be read in place: of 8-bit ones all, of bf16 ones a V with
    /// an unwritten token. Twice 4 × 16 × head_dim / 2.
    copies: Vec<u32>,
}

/// Which V of tokens that are not written yet a kernel multiplies by zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unwritten {
    /// That of the token that shares its lanes with the last written one.
    NextToWritten,
    /// Those of the whole sub-block.
    SubBlock,
}

/// K and V of the sub-blocks of a span. Those that the tile does not see repeat one that it does.
pub(super) struct Span {
    first_key: usize,
    /// Sub-blocks that the tile sees: one at least.
    pub seen: usize,
    pub keys: [*const u8; SPAN],
    pub values: [*const u8; SPAN],
    /// What a kernel asks for meanwhile.
    pub ahead: Option<Ahead>,
}

impl Operands {
    /// Rounds the tile's queries to bf16, two neighbouring dimensions in a word.
    ///
    /// # Safety
    /// The tile's pointers are valid for its rows; the caller has the features of AVX-512 with BF16 enabled.
    #[inline(always)]
    pub unsafe fn round_queries(&mut self, tile: &Tile<'_>) {
        self.queries.resize(tile.pairs() * tile.head_dim / 2, 0);
        self.copies.resize(2 * SPAN_TOKENS * tile.head_dim / 2, 0);
        let queries = self.queries.as_mut_ptr();
        for pair in 0..tile.pairs() {
            // SAFETY: the tile has this row and head, `head_dim` f32, and `head_dim` is a multiple of 16
            // (`KvArena::new` checks it). 16 of them become 32 bytes, so that a pair's words end where the next pair's
            // begin. Transmuted are 32 bytes to 32 bytes.
            unsafe {
                let (from, to) = (tile.query(pair), queries.add(pair * tile.head_dim / 2));
                for d in (0..tile.head_dim).step_by(LANES) {
                    let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(_mm512_loadu_ps(from.add(d))));
                    _mm256_storeu_si256(to.add(d / 2).cast(), rounded);
                }
            }
        }
    }

    /// The span at `first_key`.
    ///
    /// # Safety
    /// The tile sees a key of the span, and its queries were rounded last; features as for [`Self::round_queries`].
    #[inline(always)]
    pub unsafe fn span(&mut self, tile: &Tile<'_>, first_key: usize, unwritten: Unwritten) -> Span {
        // SAFETY: as the caller says; the copies were made for the tile's heads.
        unsafe { span_at(tile, first_key, &mut self.copies, unwritten) }
    }
}

/// Nobody writes these blocks meanwhile: the engine thread is the only one that computes on the blocks of a running
/// sequence, the step's own writes are done, and a transfer into blocks ends before their sequence is submitted.
#[inline(always)]
unsafe fn span_at(tile: &Tile<'_>, first_key: usize, copies: &mut [u32], unwritten: Unwritten) -> Span {
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
    let whole = match unwritten {
        Unwritten::NextToWritten => written.is_multiple_of(2),
        Unwritten::SubBlock => written == 0,
    };
    let cleaned = last < first + SPAN && !whole;
    if cleaned {
        let copy = &mut values[(seen - 1) * words..][..words];
        if !unpacked {
            // SAFETY: a sub-block is so many words, and so long is the copy.
            unsafe { std::ptr::copy_nonoverlapping(at(seen - 1, Part::V).cast(), copy.as_mut_ptr(), words) };
        }
        let unwritten = copy.chunks_exact_mut(tile.head_dim).skip(written / 2);
        for (i, tokens) in unwritten.enumerate() {
            let keep = if i == 0 && !written.is_multiple_of(2) { 0xffff } else { 0 };
            tokens.iter_mut().for_each(|pair| *pair &= keep);
        }
    }
    let copy = |of: &[u32], i: usize| of[i.min(seen - 1) * words..].as_ptr().cast();
    Span {
        first_key,
        seen,
        keys: std::array::from_fn(|i| if unpacked { copy(keys, i) } else { at(i, Part::K) }),
        values: std::array::from_fn(|i| {
            let copied = unpacked || cleaned && i + 1 >= seen;
            if copied { copy(values, i) } else { at(i, Part::V) }
        }),
        ahead: None,
    }
}

/// Where the span lies that comes next. Blocks lie anywhere in the arena, which the hardware does not foresee.
pub(super) struct Ahead {
    /// Of sub-blocks that the tile does not see any more another one's.
    keys: [*const u8; SPAN],
    values: [*const u8; SPAN],
    /// Numbers of 8 bits lie at half of the bytes at which they do in bf16.
    halved: u32,
}

impl Ahead {
    /// Of the span at `first_key`; `None` where the tile sees no key of it.
    #[inline(always)]
    pub fn of(tile: &Tile<'_>, first_key: usize) -> Option<Self> {
        let (first, end) = (first_key / SUB_BLOCK_TOKENS, (tile.start + tile.rows).div_ceil(SUB_BLOCK_TOKENS));
        let seen = SPAN.min(end.saturating_sub(first));
        if seen == 0 {
            return None;
        }
        let part = |part| std::array::from_fn(|i| tile.sub_block(first + i.min(seen - 1), part));
        let (keys, values): ([*const u8; SPAN], _) = (part(Part::K), part(Part::V));
        let halved = u32::from(tile.kv.layout().dtype == KvDtype::Int8);
        if halved > 0 {
            for sub_block in keys.into_iter().chain(values) {
                prefetch(CacheLevel::Second, sub_block.wrapping_add(SUB_BLOCK_TOKENS * tile.head_dim), 1);
            }
        }
        Some(Self { keys, values, halved })
    }

    /// Asks for the lines which in the span at hand are vector `vector` of the keys of all sub-blocks. A kernel does so
    /// where it loads these: spread over the span the lines come while it computes, in one go they would hold it up.
    #[inline(always)]
    pub fn prefetch_keys(&self, vector: usize) {
        for keys in self.keys {
            prefetch(CacheLevel::Second, keys.wrapping_add((vector * 64) >> self.halved), 1);
        }
    }

    /// The same for `count` vectors from `vector` on of the values of one sub-block.
    #[inline(always)]
    pub fn prefetch_values(&self, sub_block: usize, vector: usize, count: usize) {
        let from = self.values[sub_block].wrapping_add((vector * 64) >> self.halved);
        prefetch(CacheLevel::Second, from, (count * 64) >> self.halved);
    }

    /// Asks for all of it at once.
    #[inline(always)]
    pub fn prefetch(&self, tile: &Tile<'_>) {
        for sub_block in self.keys.into_iter().chain(self.values) {
            prefetch(CacheLevel::First, sub_block, tile.kv.layout().sub_block_bytes());
        }
    }
}

/// K and V of a sub-block of 8-bit numbers as bf16 in the same orders.
///
/// # Safety
/// `keys` and `values` are sub-blocks, 16 × head_dim numbers and behind them 16 scales in bf16; the copies are as long
/// as each other, 8 × head_dim words, and the features are enabled as for [`Operands::round_queries`].
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
/// `from` is readable for 32 bytes, `to` writable for 16 words; features as for [`Operands::round_queries`].
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

/// What a span is to a pair.
pub(super) struct Softmax {
    /// By which the sums of the earlier spans are to be multiplied, in all lanes.
    pub shrink: __m512,
    /// Of the 64 keys, in their order.
    pub weights: [__m512bh; 2],
    /// Keys of the span up to the last one that the pair sees.
    pub visible: usize,
}

/// Takes a span's scores into a pair's running softmax, but for the values.
///
/// # Safety
/// The pair is the tile's and sees a key of the span; `running` is valid for it; features as for
/// [`Operands::round_queries`].
#[inline(always)]
pub(super) unsafe fn take_scores(
    tile: &Tile<'_>,
    span: &Span,
    pair: usize,
    scores: [__m512; SPAN],
    running: Running,
) -> Softmax {
    // SAFETY: `running` has a greatest score and 16 weights for the pair, as the caller says.
    unsafe {
        let (row, greatest) = (pair / tile.group, running.greatest.add(pair));
        let visible = (tile.start + row + 1 - span.first_key).min(SPAN_TOKENS);
        let hidden = tile.first_key(row).saturating_sub(span.first_key);
        let (new, weights) = exponentials(scores, hidden..visible, *greatest);
        let shrink = exp2(_mm512_set1_ps(*greatest - new));
        *greatest = new;
        let total = running.weights.add(pair * LANES);
        let mut sum = _mm512_mul_ps(_mm512_loadu_ps(total), shrink);
        for weights in weights {
            // The sum of what the values will be multiplied by.
            sum = _mm512_dpbf16_ps(sum, weights, as_bf16(_mm512_set1_epi32(0x3f80_3f80)));
        }
        _mm512_storeu_ps(total, sum);
        Softmax { shrink, weights, visible }
    }
}

/// Scores of products of a query and keys. Those that are infinite become NaN.
///
/// # Safety
/// Features as for [`Operands::round_queries`].
#[inline(always)]
pub(super) unsafe fn logits(tile: &Tile<'_>, products: [__m512; SPAN]) -> [__m512; SPAN] {
    // SAFETY: lane arithmetic only.
    unsafe {
        let scale = _mm512_set1_ps(std::f32::consts::LOG2_E / (tile.head_dim as f32).sqrt());
        let mut scores = products;
        for score in &mut scores {
            *score = _mm512_mul_ps(*score, scale);
            // Zero times an infinity is NaN, anything else stays as it is.
            *score = _mm512_fmadd_ps(*score, _mm512_setzero_ps(), *score);
        }
        scores
    }
}

/// The new greatest score, and the powers of two of the distances of the scores of `keys` to it, zero for the others,
/// as bf16 in the order of the keys. A NaN among the scores of `keys` makes all of these NaN, and with them the pair's
/// result.
///
/// # Safety
/// Features as for [`Operands::round_queries`].
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

#[inline(always)]
pub(super) fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(bits) }
}
