//! Sixteen lanes of f32 under one trait, for AVX-512, AVX2 with FMA and F16C, and plain Rust. All three give the same bits: only
//! operations that IEEE 754 defines exactly are used, and `fma` rounds once everywhere.
//!
//! Kernels are written once, generic over [`Lanes`], as `#[inline(always)]` functions; [`isa_dispatch`] makes the
//! `#[target_feature]` instances and chooses one at run time.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// An instruction set that this machine was seen to have; cannot be made otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(super) Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The best one here.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All that run here, the best first. Never empty.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 && is_x86_feature_detected!("avx512f") {
                found.push(Self(Kind::Avx512));
            }
            if avx2 {
                found.push(Self(Kind::Avx2));
            }
        }
        found.push(Self(Kind::Portable));
        found
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            Kind::Portable => "portable",
        }
    }
}

/// Defines `unsafe fn $name(isa, args…)`, which runs `$body::<L>(args…)` compiled for the instruction set `isa`.
macro_rules! isa_dispatch {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name(isa: $crate::ops::simd::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller keeps the body's contract; the features are enabled on this function.
                unsafe { $body::<$crate::ops::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $body::<$crate::ops::simd::Avx2>($($arg),*) }
            }
            // SAFETY: the caller keeps the body's contract, and an `Isa` exists only where its features were detected.
            unsafe {
                match isa.0 {
                    #[cfg(target_arch = "x86_64")]
                    $crate::ops::simd::Kind::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::ops::simd::Kind::Avx2 => avx2($($arg),*),
                    $crate::ops::simd::Kind::Portable => $body::<$crate::ops::simd::Portable>($($arg),*),
                }
            }
        }
    };
}
pub(super) use isa_dispatch;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sixteen f32.
///
/// # Safety
/// Of all methods: the instruction set's features are enabled in the calling function; a pointer is valid for the
/// elements that the method names (unaligned is fine).
pub(super) trait Lanes: Copy {
    /// Rows of a matrix tile whose accumulators fit the registers.
    const TILE_ROWS: usize;

    unsafe fn splat(x: f32) -> Self;
    /// 16 f32.
    unsafe fn load(p: *const f32) -> Self;
    /// 16 bf16.
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// 16 IEEE half-precision numbers.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// 16 i8.
    unsafe fn load_i8(p: *const i8) -> Self;
    /// 16 bytes: lane i of the first is the low four bits of byte i, of the second the high four.
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self);
    /// 16 f32.
    unsafe fn store(self, p: *mut f32);
    /// `self + a * b`, rounded once.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `other` where `self` is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// `other` where `self` is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// `2^n` for lanes that hold `n + 1.5 * 2^23` with a whole `n` in -126..=127.
    unsafe fn pow2_of_magic(self) -> Self;
    /// The first `n` lanes of `self`, the others of `other`.
    unsafe fn first_or(self, n: usize, other: Self) -> Self;

    /// All lanes, always added in the same order.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// The greatest lane.
    #[inline(always)]
    unsafe fn greatest(self) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
        }
        lanes[0]
    }

    /// Rows of a 16 × 16 matrix to its columns.
    #[inline(always)]
    unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        // SAFETY: the array has room for 16 rows of 16.
        unsafe {
            let mut cells = [[0.0f32; LANES]; LANES];
            for (row, cells) in rows.into_iter().zip(&mut cells) {
                row.store(cells.as_mut_ptr());
            }
            let columns: [[f32; LANES]; LANES] = std::array::from_fn(|j| std::array::from_fn(|i| cells[i][j]));
            std::array::from_fn(|j| Self::load(columns[j].as_ptr()))
        }
    }

    /// `e^self` within 2 ulp over [-87, 88], clamped beyond. Cephes' polynomial (netlib.org/cephes, `expf`).
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        const MAGIC: f32 = 12_582_912.0;
        // SAFETY: lane arithmetic only, under the caller's promise.
        unsafe {
            let x = self.max(Self::splat(-87.0)).min(Self::splat(88.0));
            let magic = Self::splat(MAGIC).fma(x, Self::splat(std::f32::consts::LOG2_E));
            let n = magic.sub(Self::splat(MAGIC));
            let r = x.fma(n, Self::splat(-0.693_359_375)).fma(n, Self::splat(2.121_944_4e-4));
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
                p = Self::splat(c).fma(p, r);
            }
            let e = r.add(Self::splat(1.0)).fma(p, r.mul(r));
            e.mul(magic.pow2_of_magic())
        }
    }
}

/// One zmm register.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

/// SAFETY of every block below: see the trait; the intrinsics need exactly the features that `isa_dispatch` enables.
#[cfg(target_arch = "x86_64")]
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
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        unsafe {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let low = _mm512_and_si512(wide, _mm512_set1_epi32(15));
            let high = _mm512_srli_epi32::<4>(wide);
            (Self(_mm512_cvtepi32_ps(low)), Self(_mm512_cvtepi32_ps(high)))
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
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// SAFETY of every block below: see the trait; the intrinsics need exactly the features that `isa_dispatch` enables.
#[cfg(target_arch = "x86_64")]
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
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            Self(half(p), half(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let half = |p: *const i8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
            Self(half(p), half(p.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        unsafe {
            let half = |p: *const u8| {
                let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                let low = _mm256_and_si256(wide, _mm256_set1_epi32(15));
                (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(wide)))
            };
            let (a, b) = (half(p), half(p.add(8)));
            (Self(a.0, b.0), Self(a.1, b.1))
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

/// The oracle: what the others must equal bit for bit, and the fallback of other machines.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

/// SAFETY of every block below: the pointers are valid for 16 elements, see the trait.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one sentence above covers all of these one-line bodies")]
impl Lanes for Portable {
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(std::array::from_fn(|i| unsafe { p.add(i).read_unaligned() }))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        Self(std::array::from_fn(|i| f32::from_bits(u32::from(unsafe { p.add(i).read_unaligned() }) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        Self(std::array::from_fn(|i| half::f16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        Self(std::array::from_fn(|i| f32::from(unsafe { p.add(i).read() })))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        let bytes: [u8; LANES] = std::array::from_fn(|i| unsafe { p.add(i).read() });
        (Self(bytes.map(|byte| f32::from(byte & 15))), Self(bytes.map(|byte| f32::from(byte >> 4))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for (i, lane) in self.0.into_iter().enumerate() {
            unsafe { p.add(i).write_unaligned(lane) };
        }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i])))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn pow2_of_magic(self) -> Self {
        Self(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23))))
    }
    #[inline(always)]
    unsafe fn first_or(self, n: usize, other: Self) -> Self {
        Self(std::array::from_fn(|i| if i < n { self.0[i] } else { other.0[i] }))
    }
}
