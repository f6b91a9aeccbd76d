//! What all commands of `tandem` share, `tandem bench` included: how they reach a router, and where they print. Knows
//! nothing of what is asked there.
//!
//! - [`connect`]: a router's address, key, headers, TLS; its hint when a port speaks HTTP/1.1 is in [`wrong_port`].
//! - [`state`]: where the cluster of the running `tandem up` is.
//! - [`sse`]: server-sent events out of bytes (pure).
//! - [`terminal`]: standard output and standard error, whose readers may end first.
#![forbid(unsafe_code)]
// They panic where nobody reads: `terminal` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod connect;
pub mod sse;
pub mod state;
pub mod terminal;
pub mod wrong_port;
