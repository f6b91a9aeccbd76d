//! The decode node: grants room for a prompt's KV, verifies what arrives, and generates the answer from its second
//! token on; or does all of a request by itself. Nothing that was not computed here or verified is ever read.
//!
//! - [`service`]: the gRPC service; [`stop`]: what the router says to a call that runs.
//! - [`generate`]: the way of one request: reserve, receive, decode; and the local way, prompt included.
//! - [`config`]: its command line.
//! - [`handoff`]: joins engine and KV transport: the grant of what the prefix cache has not, and what its seal must
//!   say.
#![forbid(unsafe_code)]

pub mod config;
pub mod generate;
pub mod handoff;
pub mod service;
pub mod stop;

pub use config::Args;
pub use service::{SERVICE_NAME, routes};
