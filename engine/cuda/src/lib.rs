//! The engine's executor on CUDA devices. It builds without a CUDA toolkit and runs without a driver: libraries are
//! opened at first use, and what is missing is an error in plain words.
//!
//! # Map
//!
//! - Owners over the driver, each of one kind of thing: [`device`], [`context`], [`stream`] (and events), [`buffer`],
//!   [`pinned`], [`module`], [`graph`]. Every status is a [`CudaError`]; dropping an owner frees and never panics.
pub mod buffer;
pub mod context;
pub mod device;
pub mod error;
pub mod graph;
pub mod module;
pub mod nvrtc;
pub mod pinned;
pub mod stream;

pub use buffer::{Buffer, DevicePtr};
pub use context::Context;
pub use device::Device;
pub use error::CudaError;
pub use graph::Graph;
pub use module::{Arg, Function, Module, Shape};
pub use nvrtc::nvrtc_version;
pub use pinned::Pinned;
pub use stream::{Event, Stream};
