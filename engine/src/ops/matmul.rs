//! `out = x · Wᵀ`, with weights packed once at load: which kernel computes a product.
//!
//! | kernel | file | where |
//! |---|---|---|
//! | chains of fused multiply-adds in f32 | `f32_gemm.rs` | every machine; exact in every format |
//! | bf16 dot products, f32 sums | `bf16_gemm.rs` | an [`Isa`] that rounds |
//! | bf16 tiles, f32 sums | `tiles.rs` | an [`Isa`] with tiles |
//!
//! The weights' layout is [`super::packed`]'s; `product.rs` cuts a product into tasks for all of them. The choice
//! depends on the instruction set alone.
use super::f32_gemm;
use super::packed::PackedMatrix;
pub use super::product::Output;
use super::simd::Isa;

/// `out[r, n] = Σ_k x[r, k] · w[n, k]`, on all threads of the current pool.
///
/// `x`: rows × k; `out`: rows × columns; both row-major and dense.
///
/// # Panics
/// If the lengths do not fit together.
pub fn matmul(isa: Isa, x: &[f32], w: &PackedMatrix, out: &mut [f32], output: Output) {
    let rows = x.len() / w.k();
    assert!(x.len() == rows * w.k() && out.len() == rows * w.columns());
    if rows == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if isa.rounds() {
        use super::{bf16_gemm, tiles};
        return match isa.has_tiles() {
            // SAFETY: an `Isa` with tiles exists only where they and AVX-512 with BF16 and FP16 were detected.
            true => unsafe { tiles::matmul::<tiles::amx::Amx>(x, w, out, output) },
            false => bf16_gemm::matmul(x, w, out, output),
        };
    }
    f32_gemm::matmul(isa, x, w, out, output);
}
