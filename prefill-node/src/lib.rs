//! The prefill node: reads a prompt, says its first token, and hands the prompt's KV to the decode node that granted
//! room for it. Knows nothing of what happens to the answer after its first token.
//!
//! - [`service`]: the gRPC service; [`commands`]: what a call's messages mean.
//! - [`prefill`]: the way of one request: blocks, forward pass, first token.
//! - [`delivery`]: beside it: tickets, the hand-offs that they begin, and the wait for another one after a failure.
//! - [`handoff`]: one hand-off; joins engine and KV transport: pushes the blocks, seals them, waits for the receipt.
//! - [`plan`]: which blocks and layers leave when, pure; [`groups`]: where the last chunk is cut, pure; [`link`]: how
//!   fast KV leaves here.
//! - [`pressure`]: what a computed prompt without a ticket does when others need its blocks.
//! - [`settings`]: what this role can be told.
#![forbid(unsafe_code)]

pub mod commands;
pub mod delivery;
pub mod groups;
pub mod handoff;
pub mod link;
pub mod plan;
pub mod prefill;
pub mod pressure;
pub mod service;
pub mod settings;

pub use service::{SERVICE_NAME, routes, routes_with};
pub use settings::{Args, Push, Settings};
