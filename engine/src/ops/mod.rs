//! CPU kernels: matrix products, paged attention, and the row-wise pieces between them. They know numbers and
//! addresses, not models or requests. This is the one room of the engine where `unsafe` is allowed.
//!
//! **Batch invariance.** Every output element is computed by one fixed sequence of IEEE operations that does not depend
//! on how many rows, items or threads stand beside it: a product accumulates over `k` in ascending order, attention
//! walks the keys of a sequence in partitions that begin at fixed positions and merges these in ascending order. So a
//! prompt in chunks, in a batch or on another node gives the same bits. There are three such sequences
//! ([`crate::numerics::Arithmetic`]): one in f32, the same on every machine; one of bf16 dot products, faster, on
//! machines that have them ([`simd::Isa::rounds`]); and that of AMX's tiles, on machines that have these.
//!
//! The tiles' product is tested on an emulator of the registers that follows Intel's description of the instructions
//! (where there is AVX-512 BF16), and by the same tests on the registers themselves where a machine has them. An engine
//! tests them again at each start before it uses them ([`choice`]).
//!
//! - [`simd`]: 16 lanes of f32, three implementations of one trait. Read it first.
//! - [`choice`]: which instruction set an engine uses.
//! - [`packed`]: weights as the kernels read them, in the blocks of `blocks`; [`dequantize`]: a model file's rows as
//!   f32; [`lookup`]: embeddings.
//! - [`matmul`]: `out = x · Wᵀ`, and which kernel computes it: `f32_gemm` in f32, `bf16_gemm` in bf16 dot products,
//!   `tiles` in AMX's tile registers. `product` cuts it into tasks for each of them.
//! - [`kv`]: where a token's K and V lie in the arena; writing them.
//! - [`attention`]: causal attention over paged KV, in f32, bf16 dot products or AMX's tiles.
//! - [`pool`]: the threads; [`lending`]: cores that nodes of one machine lend each other.
//! - `weight_memory`: where weights lie; [`peak`]: what benchmarks compare with.
//! - [`rows`]: RMS norm, rotary embedding, SwiGLU.
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16_gemm;
#[cfg(target_arch = "x86_64")]
mod bf16_k32;
#[cfg(target_arch = "x86_64")]
mod block_lanes;
mod blocks;
pub mod choice;
pub mod dequantize;
mod f32_gemm;
pub mod kv;
pub mod lending;
pub mod lookup;
pub mod matmul;
pub mod packed;
pub mod peak;
pub mod pool;
mod prefetch;
mod product;
pub mod rows;
pub mod simd;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod weight_format;
mod weight_memory;

/// A pointer that the tasks of a region share. Whoever makes one promises that the tasks touch disjoint elements.
struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    /// A method, so that closures capture the wrapper and not the bare pointer.
    fn get(self) -> *mut T {
        self.0
    }
}

// SAFETY: the maker of the pointer keeps its target alive and the tasks' elements disjoint, see the type.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}
