//! Model files and the networks in them. Knows tensors and tokens; not blocks' owners, requests or sampling.
//!
//! - [`checkpoint`]: a model on disk, of either kind. Read it first.
//! - [`mmap`]: a file as bytes; [`reading`]: how far a load is.
//! - [`gguf`]: a GGUF file as checked metadata and packed matrices; [`safetensors`]: the same of a directory.
//! - [`config`]: what network it is, whichever file says it; [`rope`]: its rotary embedding.
//! - [`llama`]: the network over the kernels of [`crate::ops`].
pub mod checkpoint;
pub mod config;
pub mod gguf;
pub mod llama;
#[allow(unsafe_code, reason = "mapping a file is unsafe; the module holds nothing else")]
mod mmap;
mod reading;
pub mod rope;
pub mod safetensors;
