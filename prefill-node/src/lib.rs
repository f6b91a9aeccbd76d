//! The prefill node: reads a prompt, says its first token, and hands the prompt's KV to the decode node that granted
//! room for it. Knows nothing of what happens to the answer after its first token.
//!
//! - [`service`]: the gRPC service, and what a call's messages mean.
//! - [`prefill`]: the way of one request: blocks, forward pass, first token, and beside it the ticket.
//! - [`pressure`]: what a computed prompt without a ticket does when others need its blocks.
//! - [`handoff`]: joins engine and KV transport: pushes the blocks, seals them, waits for the receipt.
#![forbid(unsafe_code)]

pub mod handoff;
pub mod prefill;
pub mod pressure;
pub mod service;

pub use service::{SERVICE_NAME, routes};
