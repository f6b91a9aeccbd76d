//! The engine's executor on CUDA devices. It builds without a CUDA toolkit and runs without a driver: libraries are
//! opened at first use, and what is missing is an error in plain words.
pub mod kernels;
