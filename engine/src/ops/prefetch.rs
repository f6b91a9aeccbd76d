//! Hints of what memory will be read.

/// How near to the core a line of memory is to come.
///
/// A core has few misses of the first level under way at a time, more of the second: on one core of an AMD EPYC (Zen 4)
/// lines asked for to the second one made products of one row with 8-bit weights 1.8 times as fast, of eight rows with
/// bf16 1.5 times, and attention to 8,000 tokens 1.4 times (`cargo bench -p tandem-engine --bench kernels`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheLevel {
    First,
    Second,
}

/// Rows whose products are done before the next integers come from memory.
const MEMORY_BOUND_ROWS: usize = 4;
/// Where lines are read in order and the core waits for them, one of so many is asked for: the processor brings the
/// others by itself, and hints at each of them only take places among its misses. On one core of the same machine one
/// row had 1.35 times the GB/s with weights of Q4_1, 1.2 times with Q4_K and bf16, as many with Q8_0 and Q6_K. Eight
/// rows with integers had 0.8 times: they wait for what they decode, and then want every line.
pub(super) const SPARSE: usize = 4;

/// Of so many lines of weights one is asked for in a product of `rows` rows.
#[inline(always)]
pub(super) fn every_for(rows: usize) -> usize {
    if rows <= MEMORY_BOUND_ROWS { SPARSE } else { 1 }
}

/// Asks for `bytes` of memory, which need not exist.
#[inline(always)]
pub(super) fn prefetch(to: CacheLevel, from: *const u8, bytes: usize) {
    prefetch_every(1, to, from, bytes);
}

/// Asks for one in `every` line of it.
#[inline(always)]
pub(super) fn prefetch_every(every: usize, to: CacheLevel, from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64 * every) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let line = from.wrapping_add(line).cast();
        // SAFETY: hints, which touch nothing.
        unsafe {
            match to {
                CacheLevel::First => _mm_prefetch::<_MM_HINT_T0>(line),
                CacheLevel::Second => _mm_prefetch::<_MM_HINT_T1>(line),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (to, from, bytes, every);
}
