//! An emulated CUDA driver for tests.
