//! `out = x · Wᵀ` for a few rows, with the bits of [`super::tiles`] and without its registers: what a tile adds up, in
//! a tile's order, by fused multiply-adds. Weights are read in the file's format and rounded to bf16 in registers. A
//! tile of 16 rows wants them unpacked, three times the bytes, which few rows do not pay for.
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
//! **Why the bits are the same.** A tile's steps round to nearest, like those of AVX-512, but take subnormal numbers
//! for zeros. Here none ever arise: `x` and weights below [`TINY`] are zeros, on both ways, so that all of them are
//! multiples of 2⁻⁵⁷. Then each product, and each sum of them, rounded or not, is a multiple of 2⁻¹¹⁴: zero, or far
//! from subnormal. Both ways round a quantized weight by the same [`split`](super::packed::split).
use std::arch::x86_64::*;
use std::cell::RefCell;

use super::Shared;
use super::packed::{BLOCK, PANEL, PackedMatrix, TINY, WeightFormat};
use super::product::{AHEAD, ChunkId, Output, Target, for_each_task};
use super::simd::{LANES, bits, prefetch, rounded_pairs};

/// More are faster in tiles: those compute 16 rows in the time of one.
pub(super) const ROWS: usize = 4;
/// Pairs of a group.
const PAIRS: usize = BLOCK / 2;

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
                        WeightFormat::Bf16 => panel_bf16(scratch, panel, target),
                        WeightFormat::Q4_1 => panel_q4_1(scratch, panel, target),
                        WeightFormat::Q8_0 => panel_q8_0(scratch, panel, target),
                        format => panic!("{format:?} is not kept for tiles"),
                    }
                }
            }
        });
    });
}

/// 16 pairs of a group's `x` as both ways multiply them: in bf16, tiny ones zero.
///
/// # Safety
/// The caller has the features of AVX-512 with BF16 enabled. At most 32 elements.
#[inline(always)]
pub(super) unsafe fn pairs_of(group: &[f32]) -> __m512i {
    // SAFETY: as the caller says.
    unsafe {
        let pairs = bits(rounded_pairs(group));
        let magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
        let kept = _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16(TINY as i16));
        _mm512_maskz_mov_epi16(kept, pairs)
    }
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

/// The low and the high halves of pairs of bf16.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn as_f32(pairs: __m512i) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(_mm512_and_si512(pairs, high))]
    }
}

/// How half a block, of 16 columns, yields its weights. `packed.rs` has the pictures.
///
/// # Safety
/// Of both methods: `block` is a whole block of this format; `half` is 0 or 1; `four` is below 4; the caller has the
/// features enabled. All loads are unaligned ones.
trait Format {
    const KIND: WeightFormat;
    /// Scale and offset of the columns.
    #[inline(always)]
    unsafe fn scales(_block: *const u8, _half: usize) -> [__m512; 2] {
        // SAFETY: makes lanes from constants, and reads no memory.
        unsafe { [_mm512_setzero_ps(); 2] }
    }
    /// The weights of four pairs of `k`, from `8 * four` on, rounded to bf16: of each pair the even `k`, then the odd.
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512; 2]; 4];
}

struct Bf16;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q4_1;
#[allow(non_camel_case_types, reason = "the format's name")]
struct Q8_0;

impl Format for Bf16 {
    const KIND: WeightFormat = WeightFormat::Bf16;
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, _scales: [__m512; 2]) -> [[__m512; 2]; 4] {
        // SAFETY: a block is two halves of 16 vectors of 64 bytes, of which four are read from `4 * four`, at most 12.
        unsafe {
            let at = block.add((half * PAIRS + 4 * four) * 64).cast::<__m512i>();
            [
                as_f32(_mm512_loadu_si512(at)),
                as_f32(_mm512_loadu_si512(at.add(1))),
                as_f32(_mm512_loadu_si512(at.add(2))),
                as_f32(_mm512_loadu_si512(at.add(3))),
            ]
        }
    }
}

/// 0 to 15.
static NIBBLES: [f32; 16] = {
    let mut table = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = i as f32;
        i += 1;
    }
    table
};

impl Format for Q4_1 {
    const KIND: WeightFormat = WeightFormat::Q4_1;
    #[inline(always)]
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: a block begins with 64 f16, four times 32 bytes, of which two are read.
        unsafe {
            let halves = block.cast::<__m256i>();
            [
                _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(half))),
                _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(2 + half))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512; 2]; 4] {
        // SAFETY: behind 4 bytes for each of 32 columns stand two halves of 4 vectors of 64 bytes; `four` is at most 3.
        unsafe {
            let all = _mm512_loadu_si512(block.add(PANEL * 4 + (half * 4 + four) * 64).cast());
            [
                [of_nibbles(all, scales), of_nibbles(_mm512_srli_epi32::<16>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<4>(all), scales), of_nibbles(_mm512_srli_epi32::<20>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<8>(all), scales), of_nibbles(_mm512_srli_epi32::<24>(all), scales)],
                [of_nibbles(_mm512_srli_epi32::<12>(all), scales), of_nibbles(_mm512_srli_epi32::<28>(all), scales)],
            ]
        }
    }
}

impl Format for Q8_0 {
    const KIND: WeightFormat = WeightFormat::Q8_0;
    #[inline(always)]
    unsafe fn scales(block: *const u8, half: usize) -> [__m512; 2] {
        // SAFETY: a block begins with 32 f16, of which 16 are read from the first or the 17th on.
        unsafe { [_mm512_cvtph_ps(_mm256_loadu_si256(block.add(half * LANES * 2).cast())), _mm512_setzero_ps()] }
    }
    #[inline(always)]
    unsafe fn four_pairs(block: *const u8, half: usize, four: usize, scales: [__m512; 2]) -> [[__m512; 2]; 4] {
        // SAFETY: behind 2 bytes for each of 32 columns stand two halves of 16 pairs of 32 bytes, of which four are
        // read from `4 * four`, at most 12.
        unsafe {
            let at = block.add(PANEL * 2 + (half * PAIRS + 4 * four) * 32).cast::<__m256i>();
            [
                of_bytes(_mm256_loadu_si256(at), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(1)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(2)), scales[0]),
                of_bytes(_mm256_loadu_si256(at.add(3)), scales[0]),
            ]
        }
    }
}

// Functions and no closures: those would not be compiled for the caller's instruction set.

/// The weights of the lowest four bits of each lane.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_nibbles(lanes: __m512i, [scale, offset]: [__m512; 2]) -> __m512 {
    // SAFETY: the table has 64 bytes, and a permutation looks at the four low bits of its indices.
    unsafe {
        let q = _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(NIBBLES.as_ptr()));
        // The product is exact: 4 and 11 bits.
        rounded(_mm512_fmadd_ps(q, scale, offset))
    }
}

/// The weights of 16 pairs of bytes.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn of_bytes(pairs: __m256i, scale: __m512) -> [__m512; 2] {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let both = _mm512_cvtepi16_epi32(pairs);
        let (even, odd) = (_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(both)), _mm512_srai_epi32::<8>(both));
        [
            rounded(_mm512_mul_ps(_mm512_cvtepi32_ps(even), scale)),
            rounded(_mm512_mul_ps(_mm512_cvtepi32_ps(odd), scale)),
        ]
    }
}

/// [`super::packed::split`] in lanes.
///
/// # Safety
/// The caller has the features enabled.
#[inline(always)]
unsafe fn rounded(weight: __m512) -> __m512 {
    // SAFETY: arithmetic in lanes, which reads no memory.
    unsafe {
        let large = _mm512_mul_ps(weight, _mm512_set1_ps(65537.0));
        _mm512_sub_ps(large, _mm512_sub_ps(large, weight))
    }
}

macro_rules! panel_of {
    ($name:ident, $format:ty) => {
        /// # Safety
        /// `panel` is a panel of the format with the scratch's groups; `target` has the scratch's rows; the machine
        /// has the features.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")]
        unsafe fn $name(scratch: &Scratch, panel: *const u8, target: Target) {
            // SAFETY: the caller keeps the contract of `multiply`, whose features are enabled on this function; a way
            // is chosen by the scratch's rows.
            unsafe {
                match scratch.rows {
                    1 => multiply::<$format, 1>(scratch, panel, target),
                    2 => multiply::<$format, 2>(scratch, panel, target),
                    3 => multiply::<$format, 3>(scratch, panel, target),
                    _ => multiply::<$format, ROWS>(scratch, panel, target),
                }
            }
        }
    };
}
panel_of!(panel_bf16, Bf16);
panel_of!(panel_q4_1, Q4_1);
panel_of!(panel_q8_0, Q8_0);

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
                    for (i, [even, odd]) in pairs.iter().enumerate() {
                        for (m, [even_chain, odd_chain]) in chains.iter_mut().enumerate() {
                            let x = x.add(m * BLOCK + 4 * four + i);
                            *even_chain = _mm512_fmadd_ps(_mm512_set1_ps(*x), *even, *even_chain);
                            *odd_chain = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(PAIRS)), *odd, *odd_chain);
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

#[cfg(test)]
mod tests {
    use super::super::packed::split;
    use super::*;

    #[test]
    fn tiny_is_what_it_says() {
        assert_eq!(f32::from_bits(u32::from(TINY) << 16), 2f32.powi(-50));
    }

    #[test]
    fn splitting_rounds_to_the_nearest_bf16() {
        for i in 0..200_000u32 {
            let weight = (i as f32 - 1e5) * 3.7e-5;
            let (split, nearest) = (split(weight), half::bf16::from_f32(weight).to_f32());
            assert_eq!(half::bf16::from_f32(split).to_f32(), split, "a bf16");
            // Of two that are equally near either will do.
            assert!((split - weight).abs() <= (nearest - weight).abs(), "{weight}: {split}, not {nearest}");
        }
    }
}
