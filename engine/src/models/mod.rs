//! Model files and the networks in them. Knows tensors and tokens; not blocks' owners, requests or sampling.
//!
//! - [`checkpoint`]: a model on disk, of either kind. Read it first.
//! - [`weights`]: tensors by name, as they lie in files; [`packing`]: what the CPU makes of them.
//! - [`sizes`]: how many bytes weights will take, from headers alone.
//! - [`mmap`]: a file as bytes; [`reading`]: how far a load is.
//! - [`gguf`]: a GGUF file, or several, as checked metadata and tensors; [`safetensors`]: the same of a directory.
//! - [`config`]: what network it is, whichever file says it; [`rope`]: its rotary embedding.
//! - [`llama`]: the network over the kernels of [`crate::ops`].
pub mod checkpoint;
pub mod config;
pub mod gguf;
pub mod llama;
#[allow(unsafe_code, reason = "mapping a file is unsafe; the module holds nothing else")]
mod mmap;
mod packing;
mod reading;
pub mod rope;
pub mod safetensors;
pub mod sizes;
pub mod weights;
