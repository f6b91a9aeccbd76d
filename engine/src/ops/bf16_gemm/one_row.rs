//! One row of `x` times a panel of nibbles: most of what decode of a single sequence does. The operations for an
//! element and their order are those of `bf16_gemm.rs`, but two blocks are under way at a time.
//!
//! The sums of a block are two chains of 16 dot products, each of which waits for the one before. With one row there is
//! nothing else to do meanwhile, and a core's queues do not reach far into the next block. So the second half of a
//! block is multiplied beside the first half of the next one: four chains.
//!
//! ```text
//! turn            0          1          2          3
//! read            block 0    block 1    block 2    block 3
//! multiplied      k  0..16   k 16..32
//!                            k  0..16   k 16..32
//!                                       k  0..16   k 16..32
//! ```
//!
//! Integers are read in their order, and wait in registers. Each instruction that reads is a block further in each
//! turn, which the processor foresees. On one core of an AMD EPYC (Zen 4) weights of Q4_1 came from memory at 27 GB/s,
//! and those of Q4_K at 24. One block after the other it was 26 and 22.5. Two whole blocks in each turn, 23 and 19.
//! Q5_K and Q6_K were slower so, and have one block after the other.
use std::arch::x86_64::*;

use super::super::block_lanes;
use super::super::packed::WeightFormat;
use super::super::prefetch::{CacheLevel, SPARSE};
use super::super::product::{AHEAD, Target};
use super::super::simd::bf16;
use super::super::weight_format::Block;
use super::formats::{Format, PAIRS, numbers, two_of_four};
use super::{step, with_offset, with_sums};

/// # Safety
/// `panel` is a panel of the format with as many blocks as `x` has groups of 16 pairs, at least one; `x_sums` has the
/// sum of each; the panel begins at a multiple of 64 bytes; `target` has a row; the machine has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
pub(super) unsafe fn one_row<F: Format>(x: &[u32], x_sums: &[f32], panel: *const u8, target: Target) {
    const { assert!(matches!(F::KIND, WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K)) };
    // SAFETY: as the caller says: the panel has a block for each group, and `x` its 16 pairs.
    unsafe {
        let mut totals = Totals::zero();
        let (mut x, mut block) = (x.as_ptr(), F::KIND.block(panel, 0));
        F::KIND.ask_for(SPARSE, CacheLevel::Second, panel, AHEAD);
        let mut lines = Lines::none();
        for row in 0..4 {
            lines.read(F::KIND, block, row);
        }
        totals.begin::<F>(block, 0);
        let mut sums = [[_mm512_setzero_ps(); 2]];
        nibbles::<F>(&mut sums, &lines, 0, x);
        nibbles::<F>(&mut sums, &lines, 1, x);
        for group in 1..x_sums.len() {
            F::KIND.ask_for(SPARSE, CacheLevel::Second, panel, group + AHEAD);
            let next_block = F::KIND.block(panel, group);
            let mut next_lines = Lines::none();
            let (next_x, mut next_sums) = (x.add(PAIRS), [[_mm512_setzero_ps(); 2]]);
            next_lines.read(F::KIND, next_block, 0);
            nibbles::<F>(&mut sums, &lines, 2, x);
            next_lines.read(F::KIND, next_block, 1);
            nibbles::<F>(&mut next_sums, &next_lines, 0, next_x);
            next_lines.read(F::KIND, next_block, 2);
            nibbles::<F>(&mut sums, &lines, 3, x);
            next_lines.read(F::KIND, next_block, 3);
            nibbles::<F>(&mut next_sums, &next_lines, 1, next_x);
            totals.end::<F>(block, sums, x_sums[group - 1]);
            totals.begin::<F>(next_block, group);
            (x, block, lines, sums) = (next_x, next_block, next_lines, next_sums);
        }
        nibbles::<F>(&mut sums, &lines, 2, x);
        nibbles::<F>(&mut sums, &lines, 3, x);
        totals.end::<F>(block, sums, x_sums[x_sums.len() - 1]);
        target.put(0, totals.of);
    }
}

/// A block's integers, as they lie in memory: rows of the left and the right half.
struct Lines {
    nibbles: [[__m512i; 2]; 4],
    /// Of Q5_1 the fifth bits.
    fifth: [__m512i; 2],
}

impl Lines {
    /// # Safety
    /// The caller has the features enabled.
    #[inline(always)]
    unsafe fn none() -> Self {
        // SAFETY: as the caller says.
        unsafe { Self { nibbles: [[_mm512_setzero_si512(); 2]; 4], fifth: [_mm512_setzero_si512(); 2] } }
    }

    /// Reads a row of nibbles, and what stands before it. Rows are read in their order.
    ///
    /// # Safety
    /// `block` is a whole block of the format, one of nibbles; `row` is below 4; the caller has the features enabled.
    #[inline(always)]
    unsafe fn read(&mut self, format: WeightFormat, block: Block, row: usize) {
        // SAFETY: a block has its factors, or its scales before it, and rows of both halves.
        unsafe {
            if row == 0 {
                // Scales are needed later, but are the next to lie in memory.
                if format.factors_bytes() > 0 { block.numbers } else { block.scales }.read_volatile();
            }
            let integers = block.numbers.add(format.factors_bytes());
            if row == 0 && matches!(format, WeightFormat::Q5_1) {
                self.fifth = [line(integers.add(format.upper_at(0, 0))), line(integers.add(format.upper_at(1, 0)))];
            }
            self.nibbles[row] =
                [line(integers.add(format.nibbles_at(0, row))), line(integers.add(format.nibbles_at(1, row)))];
        }
    }
}

/// 64 bytes, read here and not where they are used.
///
/// # Safety
/// They are readable and begin at a multiple of 64; the caller has the features enabled.
#[inline(always)]
unsafe fn line(from: *const u8) -> __m512i {
    debug_assert!(from.cast::<__m512i>().is_aligned());
    // SAFETY: as the caller says.
    unsafe { from.cast::<__m512i>().read_volatile() }
}

/// The totals of the blocks so far.
struct Totals {
    of: [__m512; 2],
    /// Of the left and the right half: see [`block_lanes::shared_scales`].
    shared: [[__m512; 2]; 2],
}

impl Totals {
    /// # Safety
    /// The caller has the features enabled.
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller says.
        unsafe { Self { of: [_mm512_setzero_ps(); 2], shared: [[_mm512_setzero_ps(); 2]; 2] } }
    }

    /// Before the end of the block `group` of the panel, and after that of the one before.
    ///
    /// # Safety
    /// It is a whole block of the format; the caller has the features enabled.
    #[inline(always)]
    unsafe fn begin<F: Format>(&mut self, block: Block, group: usize) {
        if group.is_multiple_of(F::KIND.blocks_together()) {
            // SAFETY: as the caller says.
            unsafe {
                self.shared =
                    [block_lanes::shared_scales(F::KIND, block, 0), block_lanes::shared_scales(F::KIND, block, 1)];
            }
        }
    }

    /// # Safety
    /// As for [`Self::begin`].
    #[inline(always)]
    unsafe fn scales<F: Format>(&self, block: Block) -> [[__m512; 2]; 2] {
        // SAFETY: as the caller says.
        unsafe {
            [
                block_lanes::with_factors(F::KIND, self.shared[0], block, 0),
                block_lanes::with_factors(F::KIND, self.shared[1], block, 1),
            ]
        }
    }

    /// After a block whose `x` have this sum.
    ///
    /// # Safety
    /// As for [`Self::begin`].
    #[inline(always)]
    unsafe fn end<F: Format>(&mut self, block: Block, sums: [[__m512; 2]; 1], x_sum: f32) {
        // SAFETY: as the caller says.
        unsafe {
            let scales = self.scales::<F>(block);
            self.of = with_sums(self.of, sums[0], &scales, 0);
            self.of = with_offset(self.of, &scales, _mm512_set1_ps(x_sum));
        }
    }
}

/// Multiplies a row of a block's nibbles: four pairs of `k`.
///
/// # Safety
/// `row` is below 4; `x` has the block's 16 pairs; the caller has the features enabled.
#[inline(always)]
unsafe fn nibbles<F: Format>(sums: &mut [[__m512; 2]; 1], lines: &Lines, row: usize, x: *const u32) {
    // SAFETY: as the caller says.
    unsafe {
        let left = block_lanes::joined(F::KIND, lines.nibbles[row][0], lines.fifth[0], row);
        let right = block_lanes::joined(F::KIND, lines.nibbles[row][1], lines.fifth[1], row);
        for pair in [4 * row, 4 * row + 2] {
            let (left, right) = (numbers(F::KIND, two_of_four(left, pair)), numbers(F::KIND, two_of_four(right, pair)));
            step(sums, [bf16(left[0]), bf16(right[0])], x.add(pair));
            step(sums, [bf16(left[1]), bf16(right[1])], x.add(pair + 1));
        }
    }
}
