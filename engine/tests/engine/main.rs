//! The engine as its callers see it, over the simulated executor.

mod lifecycle;
mod roles;
mod support;
