//! `out = x · Wᵀ` for a few rows, with the bits of [`super::tiles`] and without its registers: what a tile adds up, in
//! a tile's order, by fused multiply-adds. Weights are read in the file's format and rounded to bf16 in registers. A
//! tile computes sixteen rows in the time of one, and wants them in memory first, which so few rows do not pay for.
//!
//! **The order** in which an element is computed, as `tdpbf16ps` does it. For each group of 32 `k` ascending, two
//! chains from zero and their sum:
//!
//! ```text
//! even  = fma(x30, w30, … fma(x2, w2, fma(x0, w0, 0)))
//! odd   = fma(x31, w31, … fma(x3, w3, fma(x1, w1, 0)))
//! total = total + (even + odd)
//! ```
//!
//! **Why the bits are the same.** A tile's steps round to nearest, like those of AVX-512; it takes subnormal numbers for
//! zeros, but there are none. Both ways multiply the same operands: `bf16_k32.rs` has them.
use std::arch::x86_64::*;
use std::cell::RefCell;

use super::Shared;
use super::bf16_k32::{Bf16, Format, PAIRS, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, as_f32, pairs_of, upper};
use super::packed::PackedMatrix;
use super::product::{AHEAD, ChunkId, Output, Target, for_each_task};
use super::simd::prefetch;
use super::weight_format::{BLOCK, WeightFormat};

/// More are faster in tiles: those compute 16 rows in the time of one.
pub(super) const ROWS: usize = 2;

/// See [`super::matmul::matmul`], which checks the lengths.
///
/// # Safety
/// The machine has AVX-512 with BF16.
///
/// # Panics
/// If there are more than [`ROWS`] rows, or `w` is not [fitted](PackedMatrix::fitted) for tiles.
pub(super) unsafe fn matmul(x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
    }
    let rows = x.len() / w.k();
    assert!(rows <= ROWS);
    let out = Shared(out.as_mut_ptr());
    // Several tasks a thread even out cores of unequal speed.
    for_each_task(rows, ROWS, w, 4, |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the machine has the instructions, as the caller says; all rows are in `x` and `out`, and no other
            // task has these panels.
            unsafe {
                if scratch.holds != Some(task.chunk) {
                    scratch.round(x, w.k());
                    scratch.holds = Some(task.chunk);
                }
                for panel in task.panels {
                    let target = Target::new(out.get(), w, 0, panel, output);
                    let panel = w.panel(panel).as_ptr();
                    match w.format() {
                        WeightFormat::Bf16 => panel_of::<Bf16>(scratch, panel, target),
                        WeightFormat::Q4_1 => panel_of::<Q4_1>(scratch, panel, target),
                        WeightFormat::Q5_1 => panel_of::<Q5_1>(scratch, panel, target),
                        WeightFormat::Q8_0 => panel_of::<Q8_0>(scratch, panel, target),
                        WeightFormat::Q4K => panel_of::<Q4K>(scratch, panel, target),
                        WeightFormat::Q5K => panel_of::<Q5K>(scratch, panel, target),
                        WeightFormat::Q6K => panel_of::<Q6K>(scratch, panel, target),
                        format => panic!("{format:?} is not kept for tiles"),
                    }
                }
            }
        });
    });
}

/// `x` rounded to bf16, as f32. Kept by each thread.
#[derive(Default)]
struct Scratch {
    holds: Option<ChunkId>,
    rows: usize,
    groups: usize,
    /// Groups × rows × 32: the 16 with an even `k`, then the 16 with an odd one.
    x: Vec<f32>,
}

impl Scratch {
    /// # Safety
    /// The machine has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
    unsafe fn round(&mut self, x: &[f32], k: usize) {
        (self.rows, self.groups) = (x.len() / k, k.div_ceil(BLOCK));
        self.x.resize(self.groups * self.rows * BLOCK, 0.0);
        for (r, row) in x.chunks_exact(k).enumerate() {
            for (g, group) in row.chunks(BLOCK).enumerate() {
                // SAFETY: at most 32 elements; there is room for 32 f32 of each row and group.
                unsafe {
                    let to = self.x.as_mut_ptr().add((g * self.rows + r) * BLOCK);
                    let [even, odd] = as_f32(pairs_of(group));
                    _mm512_storeu_ps(to, even);
                    _mm512_storeu_ps(to.add(PAIRS), odd);
                }
            }
        }
    }
}

/// # Safety
/// `panel` is a panel of the format with the scratch's groups; `target` has the scratch's rows; the machine has the
/// features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn panel_of<F: Format>(scratch: &Scratch, panel: *const u8, target: Target) {
    // SAFETY: the caller keeps the contract of `multiply`, whose features are enabled on this function; a way is chosen
    // by the scratch's rows.
    unsafe {
        match scratch.rows {
            1 => multiply::<F, 1>(scratch, panel, target),
            _ => multiply::<F, ROWS>(scratch, panel, target),
        }
    }
}

/// All groups of `M` rows: their sums stay in registers over all of `k`.
///
/// # Safety
/// `panel` is a panel of the format with the scratch's groups; scratch and `target` have `M` rows; the caller has the
/// features enabled.
#[inline(always)]
unsafe fn multiply<F: Format, const M: usize>(scratch: &Scratch, panel: *const u8, target: Target) {
    // SAFETY: the panel has the scratch's groups; `x` has 32 numbers of each of `M` rows in each group. What is asked
    // for ahead may lie behind the panel: its address is computed by wrapping addition and only hinted at.
    unsafe {
        let mut totals = [[_mm512_setzero_ps(); 2]; M];
        for group in 0..scratch.groups {
            let block = panel.add(group * F::KIND.block_bytes());
            prefetch(block.wrapping_add(AHEAD * F::KIND.block_bytes()), F::KIND.block_bytes());
            let x = scratch.x.as_ptr().add(group * M * BLOCK);
            for half in 0..2 {
                let scales = F::scales(block, half);
                let mut chains = [[_mm512_setzero_ps(); 2]; M];
                for four in 0..4 {
                    let pairs = F::four_pairs(block, half, four, scales);
                    for (i, [even, odd]) in pairs.into_iter().enumerate() {
                        let (even, odd) = (upper(even), upper(odd));
                        for (m, [even_chain, odd_chain]) in chains.iter_mut().enumerate() {
                            let x = x.add(m * BLOCK + 4 * four + i);
                            *even_chain = _mm512_fmadd_ps(_mm512_set1_ps(*x), even, *even_chain);
                            *odd_chain = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(PAIRS)), odd, *odd_chain);
                        }
                    }
                }
                for (totals, [even, odd]) in totals.iter_mut().zip(chains) {
                    totals[half] = _mm512_add_ps(totals[half], _mm512_add_ps(even, odd));
                }
            }
        }
        for (row, totals) in totals.into_iter().enumerate() {
            target.put(row, totals);
        }
    }
}
