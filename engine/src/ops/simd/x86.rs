//! [`Lanes`] of x86-64: AVX-512 in one register, AVX2 with FMA and F16C in two. Also the conversions to and from pairs
//! of bf16 that the kernels of AVX-512 BF16 share.
use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// One zmm register.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Avx512(__m512);

/// SAFETY of every block below: see the trait; the intrinsics need exactly the features that `isa_dispatch` enables.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one sentence above covers all of these one-line bodies")]
impl Lanes for Avx512 {
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self, Self) {
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))), Self(_mm512_castsi512_ps(second)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8_pairs(p: *const i8) -> (Self, Self) {
        unsafe {
            let pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(p.cast()));
            let first = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(pairs));
            (Self(_mm512_cvtepi32_ps(first)), Self(_mm512_cvtepi32_ps(_mm512_srai_epi32::<8>(pairs))))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u32, shift: u32) -> Self {
        unsafe {
            let shifted = _mm512_srl_epi32(_mm512_loadu_si512(p.cast()), _mm_cvtsi32_si128(shift as i32));
            Self(_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(15))))
        }
    }
    #[inline(always)]
    unsafe fn load_more_bits(p: *const u32, shift: u32, upper: *const u32, at: u32, mask: u32) -> Self {
        unsafe {
            let low = _mm512_srl_epi32(_mm512_loadu_si512(p.cast()), _mm_cvtsi32_si128(shift as i32));
            let upper = _mm512_srl_epi32(_mm512_loadu_si512(upper.cast()), _mm_cvtsi32_si128(at as i32));
            let upper = _mm512_slli_epi32::<4>(_mm512_and_si512(upper, _mm512_set1_epi32(mask as i32)));
            // low & 15 | upper
            Self(_mm512_cvtepi32_ps(_mm512_ternarylogic_epi32::<0xea>(low, _mm512_set1_epi32(15), upper)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe { Self(_mm512_fmadd_ps(a.0, b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe { Self(_mm512_min_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn any_nan(self) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0) != 0 }
    }
    #[inline(always)]
    unsafe fn pow2_of_magic(self) -> Self {
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(127 << 23))))
        }
    }
    #[inline(always)]
    unsafe fn first_or(self, n: usize, other: Self) -> Self {
        unsafe { Self(_mm512_mask_blend_ps(((1u32 << n) - 1) as __mmask16, other.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn greatest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    /// Within pairs of rows, then fours, then the 128-bit quarters of all.
    #[inline(always)]
    unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        unsafe {
            let mut fours = rows;
            for r in (0..LANES).step_by(4) {
                let [a, b, c, d] = [rows[r].0, rows[r + 1].0, rows[r + 2].0, rows[r + 3].0];
                let low = [_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d)].map(|v| _mm512_castps_pd(v));
                let high = [_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d)].map(|v| _mm512_castps_pd(v));
                fours[r] = Self(_mm512_castpd_ps(_mm512_unpacklo_pd(low[0], low[1])));
                fours[r + 1] = Self(_mm512_castpd_ps(_mm512_unpackhi_pd(low[0], low[1])));
                fours[r + 2] = Self(_mm512_castpd_ps(_mm512_unpacklo_pd(high[0], high[1])));
                fours[r + 3] = Self(_mm512_castpd_ps(_mm512_unpackhi_pd(high[0], high[1])));
            }
            let mut columns = fours;
            for c in 0..4 {
                let [a, b, d, e] = [fours[c].0, fours[4 + c].0, fours[8 + c].0, fours[12 + c].0];
                let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(d, e)];
                let odd = [_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(d, e)];
                columns[c] = Self(_mm512_shuffle_f32x4::<0x88>(even[0], even[1]));
                columns[4 + c] = Self(_mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]));
                columns[8 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(even[0], even[1]));
                columns[12 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]));
            }
            columns
        }
    }
}

/// Two ymm registers.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Avx2(__m256, __m256);

/// SAFETY of every block below: see the trait; the intrinsics need exactly the features that `isa_dispatch` enables.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one sentence above covers all of these one-line bodies")]
impl Lanes for Avx2 {
    const TILE_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        unsafe {
            let half = |p: *const u16| {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
            };
            Self(half(p), half(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self, Self) {
        unsafe {
            let half = |p: *const u16| {
                let pairs = _mm256_loadu_si256(p.cast());
                let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second))
            };
            let (a, b) = (half(p), half(p.add(16)));
            (Self(a.0, b.0), Self(a.1, b.1))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8_pairs(p: *const i8) -> (Self, Self) {
        unsafe {
            let half = |p: *const i8| {
                let pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128(p.cast()));
                let first = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(pairs));
                (_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(_mm256_srai_epi32::<8>(pairs)))
            };
            let (a, b) = (half(p), half(p.add(16)));
            (Self(a.0, b.0), Self(a.1, b.1))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u32, shift: u32) -> Self {
        unsafe {
            let half = |p: *const u32| {
                let shifted = _mm256_srl_epi32(_mm256_loadu_si256(p.cast()), _mm_cvtsi32_si128(shift as i32));
                _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)))
            };
            Self(half(p), half(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_more_bits(p: *const u32, shift: u32, upper: *const u32, at: u32, mask: u32) -> Self {
        unsafe {
            let half = |p: *const u32, upper: *const u32| {
                let low = _mm256_srl_epi32(_mm256_loadu_si256(p.cast()), _mm_cvtsi32_si128(shift as i32));
                let upper = _mm256_srl_epi32(_mm256_loadu_si256(upper.cast()), _mm_cvtsi32_si128(at as i32));
                let upper = _mm256_slli_epi32::<4>(_mm256_and_si256(upper, _mm256_set1_epi32(mask as i32)));
                _mm256_cvtepi32_ps(_mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)), upper))
            };
            Self(half(p, upper), half(p.add(8), upper.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe { Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe { Self(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn any_nan(self) -> bool {
        // Unordered: one of the two compared is NaN.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.1)) != 0 }
    }
    #[inline(always)]
    unsafe fn pow2_of_magic(self) -> Self {
        unsafe {
            let half = |v: __m256| {
                let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(v));
                _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(127 << 23)))
            };
            Self(half(self.0), half(self.1))
        }
    }
    #[inline(always)]
    unsafe fn first_or(self, n: usize, other: Self) -> Self {
        unsafe {
            let n = _mm256_set1_epi32(n as i32);
            let half = |lane: __m256i, a: __m256, b: __m256| {
                _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane)))
            };
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
            Self(half(low, self.0, other.0), half(high, self.1, other.1))
        }
    }
}

/// A group's elements, at most 32, as 16 pairs of bf16; zeros after them.
///
/// # Safety
/// The caller has the features of AVX-512 with BF16 enabled.
#[inline(always)]
pub(in crate::ops) unsafe fn rounded_pairs(group: &[f32]) -> __m512bh {
    debug_assert!(group.len() <= 2 * LANES);
    let mask = ((1u64 << group.len()) - 1) as u32;
    // SAFETY: the mask has a bit for each element of the group, and a masked load reads no lane without one: so the
    // second pointer may lie behind the group, and is computed by wrapping addition.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask as u16, group.as_ptr());
        let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, group.as_ptr().wrapping_add(LANES));
        _mm512_cvtne2ps_pbh(high, low)
    }
}

/// 16 pairs of bf16, by their bits.
#[inline(always)]
pub(in crate::ops) fn bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is a value of both.
    unsafe { std::mem::transmute(bits) }
}

/// The bits of 16 pairs of bf16.
#[inline(always)]
pub(in crate::ops) fn bits(numbers: __m512bh) -> __m512i {
    // SAFETY: both are 64 bytes, and every bit pattern is a value of both.
    unsafe { std::mem::transmute(numbers) }
}
