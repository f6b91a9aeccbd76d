//! The engine as its callers see it, over the simulated executor.

mod lifecycle;
mod overlap;
mod preemption;
mod prefix;
mod progress;
mod roles;
mod stepped;
mod stress;
mod support;
