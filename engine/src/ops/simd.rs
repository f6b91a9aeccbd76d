//! Sixteen lanes of f32 under one trait, for AVX-512, AVX2 with FMA and F16C, and plain Rust. All three give the same
//! bits: only operations that IEEE 754 defines exactly are used, and `fma` rounds once everywhere.
//!
//! Kernels are written once, generic over [`Lanes`], as `#[inline(always)]` functions; [`isa_dispatch`] makes the
//! `#[target_feature]` instances and chooses one at run time.
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;
use std::str::FromStr;

use crate::numerics::Arithmetic;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512, bf16, bits, rounded_pairs};

/// An instruction set that this machine was seen to have; cannot be made otherwise.
///
/// Those that [`Isa::rounds`] compute products and attention of bf16 inputs, rounded to it where they are not, in f32
/// sums; their other kernels are those of AVX-512. All others give the same bits as each other. One of those that round
/// has tiles, in which it computes the products of more than a few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(super) Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// Which instruction set the configuration asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsaChoice {
    /// The best one here.
    #[default]
    Auto,
    /// AMX's bf16 tiles for products and attention; for all else AVX-512.
    Amx,
    /// AVX-512, with its bf16 dot products where the machine has them; no tiles.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// No instruction set in particular.
    Portable,
}

impl FromStr for IsaChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name {
            "auto" => Self::Auto,
            "amx" => Self::Amx,
            "avx512" => Self::Avx512,
            "avx2" => Self::Avx2,
            "portable" => Self::Portable,
            other => return Err(format!("no instruction set {other}")),
        })
    }
}

/// As on the command line.
impl fmt::Display for IsaChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Amx => "amx",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        })
    }
}

/// In which numbers the configuration asks to compute. [`super::choice`] makes an [`Isa`] of the two choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArithmeticChoice {
    /// bf16 where the machine, the instruction set and the KV allow it, else f32.
    #[default]
    Auto,
    /// f32 throughout: the same bits on every machine.
    F32,
    /// bf16 products and attention. Faster; the bits depend on the kind of machine.
    Bf16,
}

impl FromStr for ArithmeticChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name {
            "auto" => Self::Auto,
            "f32" => Self::F32,
            "bf16" => Self::Bf16,
            other => return Err(format!("no arithmetic {other}: it is auto, f32 or bf16")),
        })
    }
}

impl Isa {
    /// The best one here.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// The best one of `choice`; with `exact` the best of those that do not round. `None` if the machine has none.
    pub fn choose(choice: IsaChoice, exact: bool) -> Option<Self> {
        Self::available().into_iter().filter(|isa| !exact || !isa.rounds()).find(|isa| match isa.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => matches!(choice, IsaChoice::Auto | IsaChoice::Amx),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => matches!(choice, IsaChoice::Auto | IsaChoice::Avx512),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => matches!(choice, IsaChoice::Auto | IsaChoice::Avx512),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => matches!(choice, IsaChoice::Auto | IsaChoice::Avx2),
            Kind::Portable => matches!(choice, IsaChoice::Auto | IsaChoice::Portable),
        })
    }

    /// All that run here, the best first. Never empty.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2 && is_x86_feature_detected!("avx512f");
            let bf16 = avx512
                && is_x86_feature_detected!("avx512bf16")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let amx = bf16 && is_x86_feature_detected!("avx512fp16") && amx::available();
            let kinds = [(amx, Kind::Amx), (bf16, Kind::Avx512Bf16), (avx512, Kind::Avx512), (avx2, Kind::Avx2)];
            found.extend(kinds.into_iter().filter_map(|(there, kind)| there.then_some(Self(kind))));
        }
        found.push(Self(Kind::Portable));
        found
    }

    /// Whether products and attention round their inputs to bf16.
    pub fn rounds(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx | Kind::Avx512Bf16 => true,
            _ => false,
        }
    }

    /// Whether products go through AMX's tiles.
    pub(crate) fn has_tiles(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => true,
            _ => false,
        }
    }

    /// The order of its additions, by name.
    pub fn arithmetic(self) -> Arithmetic {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => Arithmetic::Bf16K32,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => Arithmetic::Bf16Dots,
            _ => Arithmetic::F32,
        }
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "amx+avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            Kind::Portable => "portable",
        }
    }
}

/// Defines `unsafe fn $name(isa, args…)`, which runs `$body::<L>(args…)` compiled for the instruction set `isa`; with
/// a type parameter `F`, `$body::<L, F>(args…)`.
macro_rules! isa_dispatch {
    ($(#[$doc:meta])* fn $name:ident$(<$param:ident: $bound:ident>)?($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name$(<$param: $bound>)?(isa: $crate::ops::simd::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma,f16c")]
            unsafe fn avx512$(<$param: $bound>)?($($arg: $ty),*) {
                // SAFETY: the caller keeps the body's contract; the features are enabled on this function.
                unsafe { $body::<$crate::ops::simd::Avx512 $(, $param)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2$(<$param: $bound>)?($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $body::<$crate::ops::simd::Avx2 $(, $param)?>($($arg),*) }
            }
            // SAFETY: the caller keeps the body's contract, and an `Isa` exists only where its features were detected.
            unsafe {
                match isa.0 {
                    #[cfg(target_arch = "x86_64")]
                    $crate::ops::simd::Kind::Amx
                    | $crate::ops::simd::Kind::Avx512Bf16
                    | $crate::ops::simd::Kind::Avx512 => avx512$(::<$param>)?($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::ops::simd::Kind::Avx2 => avx2$(::<$param>)?($($arg),*),
                    $crate::ops::simd::Kind::Portable => {
                        $body::<$crate::ops::simd::Portable $(, $param)?>($($arg),*)
                    }
                }
            }
        }
    };
}
pub(super) use isa_dispatch;

/// Plain loops without [`Lanes`] that are worth wide vectors. They must not depend on them: what is added in which
/// order stands in the loops, and nothing is fused.
pub trait Pass {
    /// Result.
    type Output;

    /// Runs the loops. `#[inline(always)]` where it is implemented, and nothing behind it kept out of line, or it stays
    /// narrow.
    fn run(self) -> Self::Output;
}

/// Runs a pass compiled for the widest vectors that the machine has.
pub fn widest<P: Pass>(pass: P) -> P::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
        fn avx512<P: Pass>(pass: P) -> P::Output {
            pass.run()
        }
        #[target_feature(enable = "avx2")]
        fn avx2<P: Pass>(pass: P) -> P::Output {
            pass.run()
        }
        let avx512_parts = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512_parts {
            // SAFETY: the features were detected; AVX2 is a part of AVX-512.
            return unsafe { avx512(pass) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { avx2(pass) };
        }
    }
    pass.run()
}

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
    /// 16 pairs of bf16: the first ones, the second ones.
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self, Self);
    /// 16 IEEE half-precision numbers.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// 16 pairs of i8: the first ones, the second ones.
    unsafe fn load_i8_pairs(p: *const i8) -> (Self, Self);
    /// Of each of 16 u32 the four bits from `shift` on.
    unsafe fn load_nibbles(p: *const u32, shift: u32) -> Self;
    /// The same, and above these four bits those of another 16 u32 from `at` on that `mask` has.
    unsafe fn load_more_bits(p: *const u32, shift: u32, upper: *const u32, at: u32, mask: u32) -> Self;
    /// 16 f32.
    unsafe fn store(self, p: *mut f32);
    /// `self + a * b`, rounded once.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `other` where one of the two is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// `other` where one of the two is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// Whether a lane is NaN.
    unsafe fn any_nan(self) -> bool;
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

    /// `e^self` within 2 ulp over [-87, 88], clamped beyond; NaN of NaN. Cephes' polynomial (netlib.org/cephes,
    /// `expf`).
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        const MAGIC: f32 = 12_582_912.0;
        // SAFETY: lane arithmetic only, under the caller's promise.
        unsafe {
            // The operands' order lets a NaN through, see `max`; what is multiplied by it below stays one.
            let x = Self::splat(88.0).min(Self::splat(-87.0).max(self));
            let magic = Self::splat(MAGIC).fma(x, Self::splat(std::f32::consts::LOG2_E));
            let n = magic.sub(Self::splat(MAGIC));
            let r = x.fma(n, Self::splat(-0.693_359_4)).fma(n, Self::splat(2.121_944_4e-4));
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
                p = Self::splat(c).fma(p, r);
            }
            let e = r.add(Self::splat(1.0)).fma(p, r.mul(r));
            e.mul(magic.pow2_of_magic())
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
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self, Self) {
        let at = |i: usize| f32::from_bits(u32::from(unsafe { p.add(i).read_unaligned() }) << 16);
        (Self(std::array::from_fn(|i| at(2 * i))), Self(std::array::from_fn(|i| at(2 * i + 1))))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        Self(std::array::from_fn(|i| half::f16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8_pairs(p: *const i8) -> (Self, Self) {
        let at = |i: usize| f32::from(unsafe { p.add(i).read() });
        (Self(std::array::from_fn(|i| at(2 * i))), Self(std::array::from_fn(|i| at(2 * i + 1))))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u32, shift: u32) -> Self {
        Self(std::array::from_fn(|i| (unsafe { p.add(i).read_unaligned() } >> shift & 15) as f32))
    }
    #[inline(always)]
    unsafe fn load_more_bits(p: *const u32, shift: u32, upper: *const u32, at: u32, mask: u32) -> Self {
        Self(std::array::from_fn(|i| {
            let (low, upper) = unsafe { (p.add(i).read_unaligned(), upper.add(i).read_unaligned()) };
            (low >> shift & 15 | (upper >> at & mask) << 4) as f32
        }))
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
    unsafe fn any_nan(self) -> bool {
        self.0.iter().fold(false, |any, lane| any | lane.is_nan())
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
