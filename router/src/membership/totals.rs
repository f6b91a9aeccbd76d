//! What is counted of all nodes together, for metrics: sums, deaths, circuit breakers.
use std::sync::Arc;

use super::breaker::Circuit;
use crate::select::Role;

/// Sums over the nodes, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prefill nodes.
    pub prefill_nodes: u32,
    /// Decode nodes.
    pub decode_nodes: u32,
    /// Requests of this router that are with prefill nodes: until their first token.
    pub with_prefill: u64,
    /// Those of them for which their node's batch has no place.
    pub beyond_prefill: u64,
    /// Requests of this router beyond the places of decode nodes' batches, wherever they are now.
    pub beyond_decode: u64,
    /// Free KV blocks of decode nodes.
    pub free_blocks: u64,
    /// KV blocks of decode nodes.
    pub total_blocks: u64,
    /// Tokens of a block, on every node.
    pub block_tokens: u32,
    /// Nodes that were declared dead so far, by [`Death`].
    pub deaths: [u64; DEATHS.len()],
    /// Sequences and prompts that nodes have taken blocks from since they joined, whether or not they are still here.
    pub preemptions: u64,
}

/// Why a node was declared dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It said nothing for the lease.
    Silent,
    /// Its stream ended, and it had not said before that it drains.
    StreamLost,
    /// Another process of its name registered.
    Replaced,
}

/// All of them, in their order, for metrics.
pub const DEATHS: [Death; 3] = [Death::Silent, Death::StreamLost, Death::Replaced];

impl Death {
    /// Label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::StreamLost => "stream_lost",
            Self::Replaced => "replaced",
        }
    }
}

impl Totals {
    /// Requests that are routed and wait for a place in a node's batch, each once though it has two nodes.
    pub fn waiting(&self) -> u64 {
        // Who is with a prefill node has no use for its place on the decode node yet.
        self.beyond_prefill + self.beyond_decode.saturating_sub(self.with_prefill)
    }
}

/// The nodes' circuit breakers, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breakers {
    /// Of each node: its role, its name, its breaker's state.
    pub nodes: Vec<(Role, Arc<str>, Circuit)>,
    /// How often one opened, by role.
    pub opened: [u64; 2],
}
