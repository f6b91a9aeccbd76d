//! `out = x · Wᵀ` in f32: every output element is one chain of fused multiply-adds over ascending `k`, in every tile
//! shape and on every instruction set. Weights of fewer bytes become the exact f32 of their format inside the kernel:
//! the result equals that of f32 weights bit for bit, at a fraction of the bytes, and bytes are what decode waits for.
//!
//! Owns the kernel and how each format of `weight_format.rs` becomes lanes of f32. `bf16_gemm.rs` is its counterpart in
//! bf16.
use std::cell::RefCell;

use super::Shared;
use super::blocks::{fifth_shift, nibble_shift, upper_shift};
use super::packed::{BLOCK, PANEL, PackedMatrix, WeightFormat};
use super::prefetch::{CacheLevel, every_for};
use super::product::{AHEAD, Output, Target, for_each_task};
use super::simd::{Isa, LANES, Lanes, isa_dispatch};
use super::weight_format::Block;

/// Rows that a task works on at a time, so that they stay in the core's L2 cache.
const ROW_CHUNK: usize = 96;
/// From so many rows on, a panel of a smaller format is expanded to f32 once instead of in every tile.
const EXPAND_ROWS: usize = 9;

/// See [`super::matmul::matmul`], which checks the lengths.
pub(super) fn matmul(isa: Isa, x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    let out = Shared(out.as_mut_ptr());
    // Three tasks a thread even out cores of unequal speed.
    for_each_task(x.len() / w.k(), ROW_CHUNK, w, 3, |task| {
        for panel in task.panels {
            // SAFETY: rows and panel lie in `out`, and no other task has them.
            unsafe {
                let target = Target::new(out.get(), w, task.rows.start, panel, output);
                multiply_panel(isa, &x[task.rows.start * w.k()..task.rows.end * w.k()], w, panel, target);
            }
        }
    });
}

/// # Safety
/// `target` is writable for the rows of `x` and not used by others meanwhile.
unsafe fn multiply_panel(isa: Isa, x: &[f32], w: &PackedMatrix, panel: usize, target: Target) {
    let panel = w.panel(panel).as_ptr();
    let product = Product { x: x.as_ptr(), rows: x.len() / w.k(), k: w.k(), target };
    // SAFETY: `panel` has the format's blocks for all of `k`; `x` has the rows; the caller vouches for `target`.
    unsafe {
        match w.format() {
            WeightFormat::F32 => panel_of::<F32>(isa, product, panel),
            WeightFormat::F16 => small::<F16>(isa, product, panel),
            WeightFormat::Bf16 => small::<Bf16>(isa, product, panel),
            WeightFormat::Q4_1 => small::<Q4_1>(isa, product, panel),
            WeightFormat::Q5_1 => small::<Q5_1>(isa, product, panel),
            WeightFormat::Q8_0 => small::<Q8_0>(isa, product, panel),
            WeightFormat::Q4K => small::<Q4K>(isa, product, panel),
            WeightFormat::Q5K => small::<Q5K>(isa, product, panel),
            WeightFormat::Q6K => small::<Q6K>(isa, product, panel),
        }
    }
}

/// What a panel is multiplied by, and where that goes.
#[derive(Clone, Copy)]
struct Product {
    x: *const f32,
    rows: usize,
    k: usize,
    target: Target,
}

/// A panel of fewer bytes than f32.
///
/// # Safety
/// As for [`tiles`].
unsafe fn small<F: Format>(isa: Isa, product: Product, panel: *const u8) {
    thread_local! {
        static EXPANDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    if product.rows < EXPAND_ROWS {
        // SAFETY: as the caller says.
        return unsafe { panel_of::<F>(isa, product, panel) };
    }
    EXPANDED.with_borrow_mut(|expanded| {
        expanded.resize(product.k.next_multiple_of(BLOCK) * PANEL, 0.0);
        // SAFETY: as the caller says; `expanded` is long enough for the panel in f32, and nothing below borrows it
        // again.
        unsafe {
            expand::<F>(isa, panel, product.k, expanded.as_mut_ptr());
            panel_of::<F32>(isa, product, expanded.as_ptr().cast());
        }
    });
}

isa_dispatch! { fn panel_of<F: Format>(product: Product, panel: *const u8) = tiles }
isa_dispatch! { fn expand<F: Format>(panel: *const u8, k: usize, out: *mut f32) = expanded }

/// How a block of 32 columns × 32 `k` yields its weights.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format, and as for [`Lanes`].
trait Format {
    const KIND: WeightFormat;
    /// Blocks come from memory, not from what was expanded just now.
    const IN_MEMORY: bool = true;
    /// Whether rows have whole blocks only. Then eight `k` are one piece of code with constant shifts: a row times a
    /// matrix of Q4_1 or Q6_K that lies in a cache took 0.7 of the time.
    const BY_EIGHT: bool = Self::KIND.scales_bytes() > 0;

    /// Scale and offset of the two halves of the panel, if the format has them.
    #[inline(always)]
    unsafe fn scales<L: Lanes>(_block: Block) -> [[L; 2]; 2] {
        // SAFETY: no memory involved.
        unsafe { [[L::splat(0.0); 2]; 2] }
    }

    /// The 32 columns' weights at the block's `k`.
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2];
}

struct F32;

impl Format for F32 {
    const KIND: WeightFormat = WeightFormat::F32;
    const IN_MEMORY: bool = false;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: row `k` of the block is 32 f32.
        unsafe {
            let row = block.numbers.cast::<f32>().add(k * PANEL);
            [L::load(row), L::load(row.add(LANES))]
        }
    }
}

struct F16;

impl Format for F16 {
    const KIND: WeightFormat = WeightFormat::F16;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: row `k` of the block is 32 f16.
        unsafe {
            let row = block.numbers.cast::<u16>().add(k * PANEL);
            [L::load_f16(row), L::load_f16(row.add(LANES))]
        }
    }
}

struct Bf16;

impl Format for Bf16 {
    const KIND: WeightFormat = WeightFormat::Bf16;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: the block is 16 rows of 32 pairs.
        unsafe {
            let half = |h: usize| {
                let pair = L::load_bf16_pairs(block.numbers.cast::<u16>().add((k / 2 * 2 + h) * PANEL));
                if k.is_multiple_of(2) { pair.0 } else { pair.1 }
            };
            [half(0), half(1)]
        }
    }
}

#[allow(non_camel_case_types, reason = "the format's name")]
struct Q4_1;

impl Format for Q4_1 {
    const KIND: WeightFormat = WeightFormat::Q4_1;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: as the caller says.
        unsafe { of_halves(block) }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: as the caller says.
        unsafe { scaled(nibbles(Self::KIND, block, k), scales) }
    }
}

#[allow(non_camel_case_types, reason = "the format's name")]
struct Q5_1;

impl Format for Q5_1 {
    const KIND: WeightFormat = WeightFormat::Q5_1;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: as the caller says.
        unsafe { of_halves(block) }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: as the caller says.
        unsafe { scaled(with_upper(Self::KIND, block, k, fifth_shift(k), 1), scales) }
    }
}

struct Q4K;

impl Format for Q4K {
    const KIND: WeightFormat = WeightFormat::Q4K;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: as the caller says.
        unsafe { of_factors(block) }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: as the caller says.
        unsafe { scaled(nibbles(Self::KIND, block, k), scales) }
    }
}

struct Q5K;

impl Format for Q5K {
    const KIND: WeightFormat = WeightFormat::Q5K;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: as the caller says.
        unsafe { of_factors(block) }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: as the caller says.
        unsafe { scaled(with_upper(Self::KIND, block, k, fifth_shift(k), 1), scales) }
    }
}

struct Q6K;

impl Format for Q6K {
    const KIND: WeightFormat = WeightFormat::Q6K;

    /// Those of the first and of the last 16 `k`.
    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: 32 scales in f16; the block begins with 32 pairs of factors.
        unsafe {
            let (d, factors) = (halves::<L>(block, 0), factors::<L>(block.numbers));
            [[d[0].mul(factors[0].0), d[1].mul(factors[1].0)], [d[0].mul(factors[0].1), d[1].mul(factors[1].1)]]
        }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: as the caller says.
        unsafe {
            let [left, right]: [L; 2] = with_upper(Self::KIND, block, k, upper_shift(k), 3);
            let (scale, centre) = (if k < BLOCK / 2 { scales[0] } else { scales[1] }, L::splat(32.0));
            [left.sub(centre).mul(scale[0]), right.sub(centre).mul(scale[1])]
        }
    }
}

#[allow(non_camel_case_types, reason = "the format's name")]
struct Q8_0;

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: Block) -> [[L; 2]; 2] {
        // SAFETY: the scales are 32 f16.
        unsafe { [halves(block, 0), [L::splat(0.0); 2]] }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: Block, [scale, _]: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: for each half of the panel 16 rows of 16 pairs.
        unsafe {
            let half = |h: usize| {
                let row = (k / 4 * 2 + h) * 2 + k / 2 % 2;
                let pair = L::load_i8_pairs(block.numbers.add(row * LANES * 2).cast());
                if k.is_multiple_of(2) { pair.0 } else { pair.1 }
            };
            [half(0).mul(scale[0]), half(1).mul(scale[1])]
        }
    }
}

// What quantized formats have in common. Each function has the contract of the method that calls it.

/// Scales and offsets, as Q4_1 has them.
#[inline(always)]
unsafe fn of_halves<L: Lanes>(block: Block) -> [[L; 2]; 2] {
    // SAFETY: 32 scales and 32 offsets, all f16.
    unsafe { [halves(block, 0), halves(block, 1)] }
}

/// Scales and offsets, as Q4_K has them.
#[inline(always)]
unsafe fn of_factors<L: Lanes>(block: Block) -> [[L; 2]; 2] {
    // SAFETY: 32 scales and 32 offsets, all f16; the block begins with 32 pairs of factors.
    unsafe {
        let ([d, e], factors) = (of_halves::<L>(block), factors::<L>(block.numbers));
        [[d[0].mul(factors[0].0), d[1].mul(factors[1].0)], [e[0].mul(factors[0].1), e[1].mul(factors[1].1)]]
    }
}

/// 32 f16, the `which`th of the runs in front of the block.
#[inline(always)]
unsafe fn halves<L: Lanes>(block: Block, which: usize) -> [L; 2] {
    // SAFETY: as the caller says.
    unsafe {
        let first = block.scales.cast::<u16>().add(which * PANEL);
        [L::load_f16(first), L::load_f16(first.add(LANES))]
    }
}

/// Pairs of i8, a pair a column.
#[inline(always)]
unsafe fn factors<L: Lanes>(first: *const u8) -> [(L, L); 2] {
    // SAFETY: as the caller says, 32 pairs.
    unsafe { [L::load_i8_pairs(first.cast()), L::load_i8_pairs(first.add(LANES * 2).cast())] }
}

/// Of a format without other bits.
#[inline(always)]
unsafe fn nibbles<L: Lanes>(format: WeightFormat, block: Block, k: usize) -> [L; 2] {
    // SAFETY: behind the factors stand, for each half of the panel, 4 × 16 lanes of 8 weights.
    unsafe {
        let integers = block.numbers.add(format.factors_bytes());
        let (left, right) = (format.nibbles_at(0, k / 8), format.nibbles_at(1, k / 8));
        let shift = nibble_shift(k);
        [L::load_nibbles(integers.add(left).cast(), shift), L::load_nibbles(integers.add(right).cast(), shift)]
    }
}

/// Nibbles, and above each the bits of `mask` that are at `at` in its row of upper bits.
#[inline(always)]
unsafe fn with_upper<L: Lanes>(format: WeightFormat, block: Block, k: usize, at: u32, mask: u32) -> [L; 2] {
    // SAFETY: behind the factors stand, for each half of the panel, 4 × 16 lanes of 8 weights, and for 2 or 4 of these
    // rows 16 lanes of the bits above them.
    unsafe {
        let integers = block.numbers.add(format.factors_bytes());
        let (left, right) = (format.nibbles_at(0, k / 8), format.nibbles_at(1, k / 8));
        let (upper_left, upper_right) = (format.upper_at(0, k / 8), format.upper_at(1, k / 8));
        let shift = nibble_shift(k);
        [
            L::load_more_bits(integers.add(left).cast(), shift, integers.add(upper_left).cast(), at, mask),
            L::load_more_bits(integers.add(right).cast(), shift, integers.add(upper_right).cast(), at, mask),
        ]
    }
}

/// Rounded once, which is what GGML's product and sum are: of an integer of 5 bits and a scale of 17 (11 and a factor
/// of 6), the product is exact.
#[inline(always)]
unsafe fn scaled<L: Lanes>(integers: [L; 2], [scale, offset]: [[L; 2]; 2]) -> [L; 2] {
    // SAFETY: no memory involved.
    unsafe { [offset[0].fma(integers[0], scale[0]), offset[1].fma(integers[1], scale[1])] }
}

/// # Safety
/// `panel` has the format's blocks for all of `k`; `out` has room for `k` rounded up to a multiple of 32, × 32 f32; and
/// as for [`Lanes`].
#[inline(always)]
unsafe fn expanded<L: Lanes, F: Format>(panel: *const u8, k: usize, out: *mut f32) {
    for first in (0..k).step_by(BLOCK) {
        // SAFETY: block by block inside the panel, row by row inside `out`.
        unsafe {
            F::KIND.ask_for(1, CacheLevel::Second, panel, first / BLOCK + AHEAD);
            let block = F::KIND.block(panel, first / BLOCK);
            let scales = F::scales::<L>(block);
            for eight in (0..BLOCK).step_by(8) {
                for inner in eight..eight + 8 {
                    let [a, b] = F::weights(block, scales, inner);
                    let to = out.add((first + inner) * PANEL);
                    a.store(to);
                    b.store(to.add(LANES));
                }
            }
        }
    }
}

/// All rows, in tiles as tall as the registers allow.
///
/// # Safety
/// `x` has `rows` rows of `k`; `panel` has the format's blocks for all of `k`; `target` has the rows; and as for
/// [`Lanes`].
#[inline(always)]
unsafe fn tiles<L: Lanes, F: Format>(Product { x, rows, k, target }: Product, panel: *const u8) {
    let every = every_for(rows);
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        // SAFETY: rows `row ..` of `x` and of the target, as many as the tile is tall.
        unsafe {
            let x = x.add(row * k);
            let target = Target { out: target.out.add(row * target.stride), ..target };
            row += match left.min(L::TILE_ROWS) {
                12.. => tile::<L, F, 12>(x, k, panel, every, target),
                8.. => tile::<L, F, 8>(x, k, panel, every, target),
                6.. => tile::<L, F, 6>(x, k, panel, every, target),
                4.. => tile::<L, F, 4>(x, k, panel, every, target),
                3 => tile::<L, F, 3>(x, k, panel, every, target),
                2 => tile::<L, F, 2>(x, k, panel, every, target),
                _ => tile::<L, F, 1>(x, k, panel, every, target),
            };
        }
    }
}

/// `M` rows × 32 columns, while one line in `every` of the weights is asked for; returns `M`.
///
/// # Safety
/// As for [`tiles`], of `M` rows.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Format, const M: usize>(
    x: *const f32,
    k: usize,
    panel: *const u8,
    every: usize,
    target: Target,
) -> usize {
    // SAFETY: `x` has `M` rows of `k`, and `inner` ends where `k` does. The panel is whole blocks, `k` rounded up, and
    // `first` ends where `k` does; what is asked for ahead may lie behind it, and is only hinted at. `target` has the
    // `M` rows.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; M];
        for first in (0..k).step_by(BLOCK) {
            if F::IN_MEMORY {
                F::KIND.ask_for(every, CacheLevel::Second, panel, first / BLOCK + AHEAD);
            }
            let block = F::KIND.block(panel, first / BLOCK);
            let scales = F::scales::<L>(block);
            if F::BY_EIGHT {
                for eight in (0..BLOCK).step_by(8) {
                    for inner in 0..8 {
                        add_k(&mut sums, F::weights(block, scales, eight + inner), x.add(first + eight + inner), k);
                    }
                }
                continue;
            }
            for inner in 0..BLOCK.min(k - first) {
                add_k(&mut sums, F::weights(block, scales, inner), x.add(first + inner), k);
            }
        }
        for (m, sum) in sums.into_iter().enumerate() {
            finish(sum, target.out.add(m * target.stride), target);
        }
    }
    M
}

/// One `k` of `M` rows, whose `x` are `stride` apart.
///
/// # Safety
/// `x` is readable in these `M` places; and as for [`Lanes`].
#[inline(always)]
unsafe fn add_k<L: Lanes, const M: usize>(sums: &mut [[L; 2]; M], weights: [L; 2], x: *const f32, stride: usize) {
    for (m, sum) in sums.iter_mut().enumerate() {
        // SAFETY: `m` is below `M`, as many places as the caller's `x` has.
        unsafe {
            let value = L::splat(*x.add(m * stride));
            *sum = [sum[0].fma(value, weights[0]), sum[1].fma(value, weights[1])];
        }
    }
}

/// A row's 32 sums to where they belong, as `target.output` says.
///
/// # Safety
/// `out` is the row in the target, `target.columns` elements that nobody else uses; and as for [`Lanes`].
#[inline(always)]
unsafe fn finish<L: Lanes>(sum: [L; 2], out: *mut f32, target: Target) {
    let mut row = [0.0f32; PANEL];
    let whole = target.columns == PANEL;
    // SAFETY: `out` has `target.columns` writable elements; `row` has 32 and stands in where `out` has fewer.
    unsafe {
        let to = if whole { out } else { row.as_mut_ptr() };
        let mut sum = sum;
        if target.output == Output::Add {
            if !whole {
                std::ptr::copy_nonoverlapping(out, to, target.columns);
            }
            sum = [L::load(to).add(sum[0]), L::load(to.add(LANES)).add(sum[1])];
        }
        sum[0].store(to);
        sum[1].store(to.add(LANES));
        if !whole {
            std::ptr::copy_nonoverlapping(to, out, target.columns);
        }
    }
}
