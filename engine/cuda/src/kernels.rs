//! The kernels' launches, as values: which kernel, how many blocks of how many threads, which arguments. Each function
//! here checks that the memory is large enough and that the shapes are ones the kernel takes, and gives a [`Launch`];
//! who has a stream and a loaded module queues it. Nothing here calls the driver. The texts are in `kernels/*.cu`.
//!
//! # Data
//! - `hidden`, the residual stream, and what products store: f32, row-major. Inputs of products, queries, attention's
//!   output and the KV arena: bf16. Biases and norms' weights: f32.
//! - A matrix of weights is bf16 `[n][k]`, `k` contiguous; addresses are multiples of 16 bytes.
//! - What a kernel only reads may be anything where its row is not used; what is out of range in arrays of indices
//!   (tokens, places, block tables) is the caller's to prevent, as `Step::lay_out` does.
//!
//! # Bits
//! A row's results depend neither on the other rows of a launch, nor on how many there are, nor on which of the kernels
//! for few and many rows computes it: see `kernels/products.cu` and `kernels/attention.cu`.
//!
//! # Map
//! [`launch`]: the values. [`rows`]: embedding, norms, soundness. [`qkv`]: from Q, K, V to queries and the arena.
//! [`attention`], [`product`], [`choose`], [`blocks`] (hashes and copies).
pub mod attention;
pub mod blocks;
pub mod choose;
pub mod launch;
pub mod product;
pub mod qkv;
pub mod rows;

/// A file of kernels, as NVRTC compiles it: it includes [`HEADERS`].
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The kernels in it.
    pub kernels: &'static [Kernel],
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name in the image.
    pub name: &'static str,
    /// Dynamic shared memory that a launch has at most; above 48 KiB it has to be asked for once
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    pub shared_bytes: u32,
}

/// Names and texts of the headers: the one that every source includes, and that of the kernels of attention.
pub const HEADERS: [(&str, &str); 2] = [
    ("device.cuh", include_str!("../kernels/device.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
];

/// All sources.
pub const SOURCES: [Source; 6] = [
    Source { name: "rows.cu", text: include_str!("../kernels/rows.cu"), kernels: &rows::KERNELS },
    Source { name: "qkv.cu", text: include_str!("../kernels/qkv.cu"), kernels: &qkv::KERNELS },
    Source { name: "products.cu", text: include_str!("../kernels/products.cu"), kernels: &product::KERNELS },
    Source { name: "attention.cu", text: include_str!("../kernels/attention.cu"), kernels: &attention::KERNELS },
    Source { name: "choose.cu", text: include_str!("../kernels/choose.cu"), kernels: &choose::KERNELS },
    Source { name: "blocks.cu", text: include_str!("../kernels/blocks.cu"), kernels: &blocks::KERNELS },
];
