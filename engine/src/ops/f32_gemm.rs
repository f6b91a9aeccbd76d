//! `out = x · Wᵀ` in f32: every output element is one chain of fused multiply-adds over ascending `k`, in every tile
//! shape and on every instruction set. Weights of fewer bytes become the exact f32 of their format inside the kernel:
//! the result equals that of f32 weights bit for bit, at a fraction of the bytes, and bytes are what decode waits for.
//!
//! Owns the kernel and how each format of `packed.rs` becomes lanes of f32. `bf16_gemm.rs` is its counterpart in bf16.
use std::cell::RefCell;

use super::Shared;
use super::packed::{BLOCK, PANEL, PackedMatrix, WeightFormat};
use super::product::{AHEAD, Output, Target, for_each_task};
use super::simd::{Isa, LANES, Lanes, isa_dispatch, prefetch};

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
    thread_local! {
        static EXPANDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let (rows, panel) = (x.len() / w.k(), w.panel(panel).as_ptr());
    // SAFETY: `panel` has the format's blocks for all of `k`; `x` has `rows` rows; the caller vouches for `target`.
    // `EXPANDED` is made long enough for the panel in f32, and nothing below borrows it again.
    unsafe {
        match w.format() {
            WeightFormat::F32 => panel_f32(isa, x.as_ptr(), rows, w.k(), panel, target),
            WeightFormat::F16 if rows < EXPAND_ROWS => panel_f16(isa, x.as_ptr(), rows, w.k(), panel, target),
            WeightFormat::Bf16 if rows < EXPAND_ROWS => panel_bf16(isa, x.as_ptr(), rows, w.k(), panel, target),
            WeightFormat::Q4_1 if rows < EXPAND_ROWS => panel_q4_1(isa, x.as_ptr(), rows, w.k(), panel, target),
            WeightFormat::Q8_0 if rows < EXPAND_ROWS => panel_q8_0(isa, x.as_ptr(), rows, w.k(), panel, target),
            format => EXPANDED.with_borrow_mut(|expanded| {
                expanded.resize(w.k().next_multiple_of(BLOCK) * PANEL, 0.0);
                match format {
                    WeightFormat::F16 => expand_f16(isa, panel, w.k(), expanded.as_mut_ptr()),
                    WeightFormat::Bf16 => expand_bf16(isa, panel, w.k(), expanded.as_mut_ptr()),
                    WeightFormat::Q4_1 => expand_q4_1(isa, panel, w.k(), expanded.as_mut_ptr()),
                    _ => expand_q8_0(isa, panel, w.k(), expanded.as_mut_ptr()),
                }
                panel_f32(isa, x.as_ptr(), rows, w.k(), expanded.as_ptr().cast(), target);
            }),
        }
    }
}

isa_dispatch! {
    fn panel_f32(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) = panel_of_f32
}
isa_dispatch! {
    fn panel_f16(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) = panel_of_f16
}
isa_dispatch! {
    fn panel_bf16(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) = panel_of_bf16
}
isa_dispatch! {
    fn panel_q4_1(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) = panel_of_q4_1
}
isa_dispatch! {
    fn panel_q8_0(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) = panel_of_q8_0
}
isa_dispatch! { fn expand_f16(panel: *const u8, k: usize, out: *mut f32) = expand_of_f16 }
isa_dispatch! { fn expand_bf16(panel: *const u8, k: usize, out: *mut f32) = expand_of_bf16 }
isa_dispatch! { fn expand_q4_1(panel: *const u8, k: usize, out: *mut f32) = expand_of_q4_1 }
isa_dispatch! { fn expand_q8_0(panel: *const u8, k: usize, out: *mut f32) = expand_of_q8_0 }

/// How a block of 32 columns × 32 `k` yields its weights.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format, and as for [`Lanes`].
trait Format {
    const KIND: WeightFormat;
    const BLOCK_BYTES: usize = Self::KIND.block_bytes();
    /// Blocks come from memory, not from what was expanded just now.
    const IN_MEMORY: bool = true;

    /// Scale and offset of the two halves of the panel, if the format has them.
    #[inline(always)]
    unsafe fn scales<L: Lanes>(_block: *const u8) -> [[L; 2]; 2] {
        // SAFETY: no memory involved.
        unsafe { [[L::splat(0.0); 2]; 2] }
    }

    /// The 32 columns' weights at the block's `k`.
    unsafe fn weights<L: Lanes>(block: *const u8, scales: [[L; 2]; 2], k: usize) -> [L; 2];
}

struct F32;

impl Format for F32 {
    const KIND: WeightFormat = WeightFormat::F32;
    const IN_MEMORY: bool = false;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: *const u8, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: row `k` of the block is 32 f32.
        unsafe {
            let row = block.cast::<f32>().add(k * PANEL);
            [L::load(row), L::load(row.add(LANES))]
        }
    }
}

struct F16;

impl Format for F16 {
    const KIND: WeightFormat = WeightFormat::F16;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: *const u8, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: row `k` of the block is 32 f16.
        unsafe {
            let row = block.cast::<u16>().add(k * PANEL);
            [L::load_f16(row), L::load_f16(row.add(LANES))]
        }
    }
}

struct Bf16;

impl Format for Bf16 {
    const KIND: WeightFormat = WeightFormat::Bf16;

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: *const u8, _scales: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: each half of the block is 16 pairs of 16 columns.
        unsafe {
            let half = |h: usize| {
                let pair = L::load_bf16_pairs(block.cast::<u16>().add((h * BLOCK / 2 + k / 2) * PANEL));
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
    unsafe fn scales<L: Lanes>(block: *const u8) -> [[L; 2]; 2] {
        // SAFETY: the block starts with 32 scales and 32 offsets, all f16.
        unsafe {
            let at = |i: usize| L::load_f16(block.add(i * LANES * 2).cast());
            [[at(0), at(1)], [at(2), at(3)]]
        }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: *const u8, [scale, offset]: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: after the scales and offsets stand 4 × 16 lanes of 8 weights for each half of the panel.
        unsafe {
            let half = |h: usize| {
                let lanes = block.add(PANEL * 4 + (h * 4 + k / 8) * LANES * 4);
                L::load_nibbles(lanes.cast(), (k / 2 % 4 * 4 + k % 2 * 16) as u32)
            };
            let (low, high) = (half(0), half(1));
            // Rounded twice, as GGML's dequantization is.
            [low.mul(scale[0]).add(offset[0]), high.mul(scale[1]).add(offset[1])]
        }
    }
}

#[allow(non_camel_case_types, reason = "the format's name")]
struct Q8_0;

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(block: *const u8) -> [[L; 2]; 2] {
        // SAFETY: the block starts with 32 f16.
        unsafe {
            let at = |i: usize| L::load_f16(block.add(i * LANES * 2).cast());
            [[at(0), at(1)], [L::splat(0.0); 2]]
        }
    }

    #[inline(always)]
    unsafe fn weights<L: Lanes>(block: *const u8, [scale, _]: [[L; 2]; 2], k: usize) -> [L; 2] {
        // SAFETY: after the scales stand 16 pairs of 16 columns for each half of the panel.
        unsafe {
            let half = |h: usize| {
                let pair = L::load_i8_pairs(block.add(PANEL * 2 + (h * BLOCK / 2 + k / 2) * PANEL).cast());
                if k.is_multiple_of(2) { pair.0 } else { pair.1 }
            };
            [half(0).mul(scale[0]), half(1).mul(scale[1])]
        }
    }
}

// The instances that `isa_dispatch` needs by name, since it passes no format. Each has the contract of what it calls.

#[inline(always)]
unsafe fn panel_of_f32<L: Lanes>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `panel_of`.
    unsafe { panel_of::<L, F32>(x, rows, k, panel, target) }
}

#[inline(always)]
unsafe fn panel_of_f16<L: Lanes>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `panel_of`.
    unsafe { panel_of::<L, F16>(x, rows, k, panel, target) }
}

#[inline(always)]
unsafe fn panel_of_bf16<L: Lanes>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `panel_of`.
    unsafe { panel_of::<L, Bf16>(x, rows, k, panel, target) }
}

#[inline(always)]
unsafe fn panel_of_q4_1<L: Lanes>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `panel_of`.
    unsafe { panel_of::<L, Q4_1>(x, rows, k, panel, target) }
}

#[inline(always)]
unsafe fn panel_of_q8_0<L: Lanes>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `panel_of`.
    unsafe { panel_of::<L, Q8_0>(x, rows, k, panel, target) }
}

#[inline(always)]
unsafe fn expand_of_f16<L: Lanes>(panel: *const u8, k: usize, out: *mut f32) {
    // SAFETY: the caller keeps the contract of `expand`.
    unsafe { expand::<L, F16>(panel, k, out) }
}

#[inline(always)]
unsafe fn expand_of_bf16<L: Lanes>(panel: *const u8, k: usize, out: *mut f32) {
    // SAFETY: the caller keeps the contract of `expand`.
    unsafe { expand::<L, Bf16>(panel, k, out) }
}

#[inline(always)]
unsafe fn expand_of_q4_1<L: Lanes>(panel: *const u8, k: usize, out: *mut f32) {
    // SAFETY: the caller keeps the contract of `expand`.
    unsafe { expand::<L, Q4_1>(panel, k, out) }
}

#[inline(always)]
unsafe fn expand_of_q8_0<L: Lanes>(panel: *const u8, k: usize, out: *mut f32) {
    // SAFETY: the caller keeps the contract of `expand`.
    unsafe { expand::<L, Q8_0>(panel, k, out) }
}

/// # Safety
/// `panel` has the format's blocks for all of `k`; `out` has room for `k` rounded up to a multiple of 32, × 32 f32; and
/// as for [`Lanes`].
#[inline(always)]
unsafe fn expand<L: Lanes, F: Format>(panel: *const u8, k: usize, out: *mut f32) {
    for first in (0..k).step_by(BLOCK) {
        // SAFETY: block by block inside the panel, row by row inside `out`.
        unsafe {
            let block = panel.add(first / BLOCK * F::BLOCK_BYTES);
            prefetch(block.wrapping_add(AHEAD * F::BLOCK_BYTES), F::BLOCK_BYTES);
            let scales = F::scales::<L>(block);
            for inner in 0..BLOCK {
                let [a, b] = F::weights(block, scales, inner);
                let to = out.add((first + inner) * PANEL);
                a.store(to);
                b.store(to.add(LANES));
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
unsafe fn panel_of<L: Lanes, F: Format>(x: *const f32, rows: usize, k: usize, panel: *const u8, target: Target) {
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        // SAFETY: rows `row ..` of `x` and of the target, as many as the tile is tall.
        unsafe {
            let x = x.add(row * k);
            let target = Target { out: target.out.add(row * target.stride), ..target };
            row += match left.min(L::TILE_ROWS) {
                12.. => tile::<L, F, 12>(x, k, panel, target),
                8.. => tile::<L, F, 8>(x, k, panel, target),
                6.. => tile::<L, F, 6>(x, k, panel, target),
                4.. => tile::<L, F, 4>(x, k, panel, target),
                3 => tile::<L, F, 3>(x, k, panel, target),
                2 => tile::<L, F, 2>(x, k, panel, target),
                _ => tile::<L, F, 1>(x, k, panel, target),
            };
        }
    }
}

/// `M` rows × 32 columns; returns `M`.
///
/// # Safety
/// As for [`panel_of`], of `M` rows.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Format, const M: usize>(
    x: *const f32,
    k: usize,
    panel: *const u8,
    target: Target,
) -> usize {
    // SAFETY: `x` has `M` rows of `k`, and `inner` ends where `k` does. The panel is whole blocks, `k` rounded up, and
    // `first` ends where `k` does; what is asked for ahead may lie behind it, and is only hinted at. `target` has the
    // `M` rows.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; M];
        for first in (0..k).step_by(BLOCK) {
            let block = panel.add(first / BLOCK * F::BLOCK_BYTES);
            if F::IN_MEMORY {
                prefetch(block.wrapping_add(AHEAD * F::BLOCK_BYTES), F::BLOCK_BYTES);
            }
            let scales = F::scales::<L>(block);
            for inner in 0..BLOCK.min(k - first) {
                let weights = F::weights(block, scales, inner);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let value = L::splat(*x.add(m * k + first + inner));
                    *sum = [sum[0].fma(value, weights[0]), sum[1].fma(value, weights[1])];
                }
            }
        }
        for (m, sum) in sums.into_iter().enumerate() {
            finish(sum, target.out.add(m * target.stride), target);
        }
    }
    M
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
