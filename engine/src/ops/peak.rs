//! What the machine's memory and multiply-adds could do if nothing else were to be done: the ceilings that benchmarks
//! set kernels beside.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::prefetch::{CacheLevel, prefetch};
use super::simd::{Isa, LANES, Lanes, isa_dispatch};
use super::weight_memory::WeightMemory;

/// Sums that do not wait for one another: enough for the latency, and few enough for the registers of AVX2.
const SUMS: usize = 7;

/// Keeps the calling thread's multiply-add units busy `times` rounds long, in the arithmetic that `isa`'s matrix
/// products use (of AVX-512 where that has AMX); returns how many operations that were, an addition and a
/// multiplication counted as two.
pub fn multiply_adds(isa: Isa, times: u32) -> u64 {
    let mut out = [0.0f32; LANES];
    let operations = 2 * u64::from(times) * (SUMS * LANES) as u64;
    #[cfg(target_arch = "x86_64")]
    if isa.rounds() {
        // SAFETY: an `Isa` that rounds exists only where these instructions were detected.
        unsafe { dots(times, &mut out) };
        std::hint::black_box(out);
        // Two products a lane, and twice as many sums.
        return 4 * operations;
    }
    // SAFETY: `out` is 16 long.
    unsafe { chains(isa, times, out.as_mut_ptr()) };
    std::hint::black_box(out);
    operations
}

/// Memory to read as weights are read: on huge pages, lines asked for ahead.
pub struct Memory(WeightMemory);

impl Memory {
    /// All of it written once.
    pub fn new(bytes: usize) -> Self {
        let mut memory = WeightMemory::zeroed(bytes);
        memory.fill(1);
        Self(memory)
    }

    /// Reads all of it once; returns how many bytes that were.
    pub fn read(&self) -> usize {
        /// Bytes of four lines of cache: as many as there are sums.
        const STEP: usize = 256;
        const AHEAD: usize = 16 * STEP;
        let mut sums = [0u64; STEP / 8];
        for words in self.0.as_chunks::<STEP>().0 {
            // What is asked for ahead may lie behind the memory: it is only hinted at.
            prefetch(CacheLevel::First, words.as_ptr().wrapping_add(AHEAD), STEP);
            for (sum, word) in sums.iter_mut().zip(words.as_chunks().0) {
                *sum ^= u64::from_ne_bytes(*word);
            }
        }
        std::hint::black_box(sums);
        self.0.len() / STEP * STEP
    }
}

isa_dispatch! { fn chains(times: u32, out: *mut f32) = chains_with }

#[inline(always)]
unsafe fn chains_with<L: Lanes>(times: u32, out: *mut f32) {
    // SAFETY: lane arithmetic, and a store to 16 elements.
    unsafe {
        let (mut sums, factor) = ([L::splat(1.0); SUMS], L::splat(0.999));
        for _ in 0..times {
            for sum in &mut sums {
                *sum = factor.fma(*sum, factor);
            }
        }
        let mut total = sums[0];
        for sum in &sums[1..] {
            total = total.add(*sum);
        }
        total.store(out);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dots(times: u32, out: &mut [f32; LANES]) {
    let (mut sums, factor) = ([_mm512_set1_ps(1.0); 2 * SUMS], _mm512_set1_epi32(0x3f00_3f00));
    // SAFETY: both are 64 bytes, and every bit pattern is valid.
    let factor: __m512bh = unsafe { std::mem::transmute(factor) };
    for _ in 0..times {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, factor, factor);
        }
    }
    let total = sums.into_iter().fold(_mm512_setzero_ps(), |total, sum| _mm512_add_ps(total, sum));
    // SAFETY: `out` is 16 long.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), total) };
}
