//! Each kernel beside a plain reference, and the bits of a row in every batch, chunk and kernel that it can be in.
//! Shapes are small: an emulated warp takes two microseconds for a product of 16 x 8 x 16. Who compares a whole model
//! is `model.rs` beside this folder.
mod attention;
mod blocks;
mod choose;
mod gpu;
mod products;
mod qkv;
mod refused;
mod rows;
