//! Tests that start the real programs: this library is their harness, `tests/` holds the tests.
//!
//! - [`process`]: one program, from its `ready …` line to its end; kill -9, freeze, wake.
//! - [`cluster`]: a router with its nodes, one cluster at a time.
//! - [`fleet`]: a router with several nodes of each role, every connection over a [`link`] that can be cut or slowed.
//! - [`routers`]: several routers with the same nodes. [`load`]: clients of all of them.
//! - [`client`]: what a client of the router does: gRPC, HTTP, the view of the nodes.
//! - [`pair`]: two nodes in this process, over the in-process transport.
//! - [`open_loop`]: when the next request of a load comes, and percentiles of what it saw.
//! - [`reference`]: what simulated nodes answer when nothing goes wrong.
//! - [`seeds`]: flags of tests that run seeds, and whether a planted bug shows.
//! - [`equivalence`]: disaggregated output against single-node output.
//!
//! `tests/cluster` tests behaviour, `tests/tidy.rs` the shape of the sources, `examples/equivalence.rs` runs
//! [`equivalence`] as long as one likes. The programs come from the directory of the test itself (`target/tests`,
//! `target/release`): build them first, in the same profile. `make test` does.
#![forbid(unsafe_code)]

pub mod client;
pub mod cluster;
pub mod equivalence;
pub mod fleet;
pub mod link;
pub mod load;
pub mod open_loop;
pub mod pair;
pub mod process;
pub mod reference;
pub mod routers;
pub mod seeds;

pub use client::{Answer, Failure};
pub use cluster::{Cluster, Options};
pub use fleet::{Fleet, FleetOptions};
pub use pair::Pair;
pub use process::Process;
