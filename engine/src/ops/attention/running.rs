//! The running softmax of a tile's (row, head) pairs over some of its keys: what a kernel adds to, how two become one,
//! and how the last becomes the result.
use std::ops::Range;

use super::Tile;
use crate::ops::simd::{Isa, LANES, Lanes, isa_dispatch};

/// A view of memory of [`Running::len`] numbers.
#[derive(Clone, Copy)]
pub(super) struct Running {
    /// Of each pair the greatest score so far; minus infinity: it has seen no key. NaN where the last keys had a score
    /// that is no finite number: then weights and sums are NaN for good.
    pub greatest: *mut f32,
    /// Sums of the weights by lane, pairs × 16.
    pub weights: *mut f32,
    /// Weighted sums of values, pairs × head_dim.
    pub sums: *mut f32,
    head_dim: usize,
}

impl Running {
    /// A whole number of cache lines.
    pub fn len(pairs: usize, head_dim: usize) -> usize {
        pairs * (head_dim + LANES) + pairs.next_multiple_of(LANES)
    }

    /// # Safety
    /// `memory` has the length.
    pub unsafe fn at(memory: *mut f32, pairs: usize, head_dim: usize) -> Self {
        // SAFETY: the parts are as long together as the caller says.
        unsafe {
            let weights = memory.add(pairs * head_dim);
            Self { sums: memory, weights, greatest: weights.add(pairs * LANES), head_dim }
        }
    }

    /// No key seen.
    ///
    /// # Safety
    /// The memory is valid for so many pairs.
    pub unsafe fn clear(self, pairs: usize) {
        // SAFETY: sums and weights lie together, the greatest behind them; zero is a number of any bytes.
        unsafe {
            self.sums.write_bytes(0, pairs * (self.head_dim + LANES));
            std::slice::from_raw_parts_mut(self.greatest, pairs).fill(f32::NEG_INFINITY);
        }
    }

    /// Takes the later keys of `other` in, for the pairs that have seen some of them; weights are e to the power of
    /// `ln_base` times the scores.
    ///
    /// # Safety
    /// Both are valid for the pairs and not the same.
    pub unsafe fn merge(self, isa: Isa, other: Self, pairs: Range<usize>, ln_base: f32) {
        // SAFETY: both have the pairs and do not overlap, which is all that `merge_with` asks for; `isa` was detected.
        unsafe { merge(isa, self, other, pairs, ln_base) }
    }

    /// The quotients, to where the tile's go.
    ///
    /// # Safety
    /// Valid for the tile's pairs, each of which has seen a key; and so is the tile's `out`.
    pub unsafe fn finish(self, isa: Isa, tile: &Tile<'_>) {
        // SAFETY: sums, weights and `out` have the tile's pairs, and no weight is zero; `isa` was detected.
        unsafe { finish(isa, self, tile) }
    }
}

isa_dispatch! { fn merge(into: Running, from: Running, pairs: Range<usize>, ln_base: f32) = merge_with }
isa_dispatch! { fn finish(running: Running, tile: &Tile<'_>) = finish_with }

#[inline(always)]
unsafe fn merge_with<L: Lanes>(into: Running, from: Running, pairs: Range<usize>, ln_base: f32) {
    let head_dim = into.head_dim;
    for pair in pairs {
        // SAFETY: the pair is in both, as the caller says.
        unsafe {
            let (old, new) = (*into.greatest.add(pair), *from.greatest.add(pair));
            // A NaN of the newer ones is taken, or they would count as no keys at all below.
            let greatest = if old >= new { old } else { new };
            *into.greatest.add(pair) = greatest;
            let (keep, add) = (L::splat((old - greatest) * ln_base).exp(), L::splat((new - greatest) * ln_base).exp());
            for (into, from, len) in [(into.weights, from.weights, LANES), (into.sums, from.sums, head_dim)] {
                for d in (pair * len..(pair + 1) * len).step_by(LANES) {
                    let newer = L::load(from.add(d));
                    // Without an older key the newer ones stand as they are: it must not matter who else is in the
                    // tile.
                    let merged = match old == f32::NEG_INFINITY {
                        true => newer,
                        false => newer.mul(add).fma(L::load(into.add(d)), keep),
                    };
                    merged.store(into.add(d));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn finish_with<L: Lanes>(running: Running, tile: &Tile<'_>) {
    for pair in 0..tile.pairs() {
        // SAFETY: `out` has `head_dim` elements for each pair of the tile.
        unsafe {
            let (out, sums) = (tile.out(pair), running.sums.add(pair * running.head_dim));
            let total = L::splat(L::load(running.weights.add(pair * LANES)).sum());
            for d in (0..running.head_dim).step_by(LANES) {
                L::load(sums.add(d)).div(total).store(out.add(d));
            }
        }
    }
}
