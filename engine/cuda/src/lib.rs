//! The engine's executor on CUDA devices. It builds without a CUDA toolkit and runs without a driver: libraries are
//! opened at first use, and what is missing is an error in plain words.
//!
//! # Map
//!
//! - [`loader`]: from a model's files and a device's number to an executor. Read it first.
//! - [`executor`]: [`CudaExecutor`], which runs the engine's steps. Its parts: `flight` (what a step has to itself),
//!   `queue` (graphs and launches, in one stream), `inputs` (what a step uploads), `tables` (which blocks each sequence
//!   has), `network` (the launches of a step, and the memory between them), `large` (its products of many rows, by
//!   cuBLASLt) and `proof` (whether that adds as our kernels do).
//! - `weights` and `plan`: a model's tensors, and where they lie; [`memory`]: the KV arena, and `lane`: copies and
//!   hashes of it.
//! - [`kernels`]: launches as checked values; [`compile`] and [`loaded`]: their texts, compiled and loaded.
//! - Owners over the driver, each of one kind of thing: [`device`], [`context`], [`stream`] (and events), [`buffer`],
//!   [`pinned`], [`module`], [`graph`], and [`cublaslt`] over NVIDIA's library of products. They call the functions of
//!   `driver`; every status is a [`CudaError`]; dropping an owner frees and never panics.
//!
//! # What holds
//!
//! - **One thread** at a time works on an executor, and binds the device's context first; transports have streams of
//!   their own in [`memory`].
//! - **Nothing is allocated in a step**: weights, arena, workspace and graphs are there when the executor is, and fit,
//!   or loading has said the numbers.
//! - **A row's bits** depend on its sequence alone: whether graph or single launches compute it, in which batch, chunk
//!   or bucket ([`Arithmetic::MmaK4096`](tandem_engine::Arithmetic)).
//! - **A lost device** is [`CudaError::Lost`], and `EngineError::DeviceLost` for the engine, which stops.
pub mod buffer;
pub mod compile;
pub mod context;
pub mod cublaslt;
pub mod device;
mod driver;
pub mod error;
pub mod executor;
mod flight;
pub mod graph;
mod inputs;
pub mod kernels;
mod lane;
mod large;
pub mod loaded;
pub mod loader;
pub mod memory;
pub mod module;
mod network;
mod nvrtc;
pub mod pinned;
mod plan;
mod proof;
mod queue;
pub mod stream;
mod tables;
mod weights;
mod workspace;

pub use buffer::Buffer;
pub use context::Context;
pub use cublaslt::cublaslt_version;
pub use device::Device;
pub use error::CudaError;
pub use executor::CudaExecutor;
pub use graph::Graph;
pub use loaded::Kernels;
pub use loader::{CudaConfig, CudaLoader};
pub use memory::CudaMemory;
pub use module::{Function, Module};
pub use nvrtc::nvrtc_version;
pub use pinned::Pinned;
pub use stream::{Event, Stream};
