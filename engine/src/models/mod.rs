//! Model files and the networks in them. Knows tensors and tokens; not blocks' owners, requests or sampling.
//!
//! - [`mmap`]: a file as bytes.
//! - [`gguf`]: a GGUF file as checked metadata and packed matrices.
//! - [`llama`]: the Llama architecture over the kernels of [`crate::ops`].
pub mod gguf;
pub mod llama;
#[allow(unsafe_code, reason = "mapping a file is unsafe; the module holds nothing else")]
mod mmap;
