//! What an operator bounds of clients' requests: how many run and wait, how long, and how often one is tried. Plain
//! data, below all that keeps to it: [`crate::admission`] to the first, [`crate::flow`] to the others. Their flags are
//! in [`crate::config`]; all but the pools may change while requests run.
pub mod pools;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pools::Pools;

/// `--max-attempts` at most: a prefill call has room for as many tickets.
pub const MOST_ATTEMPTS: u32 = 16;

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests that run at the same time.
    pub max_inflight: u32,
    /// Requests that wait until there is a slot and room on the nodes. 0: whoever has a slot starts.
    pub max_queue: usize,
    /// Requests that may wait on each decode node, and one on each prefill node unless this is 0, so that they are
    /// never idle; the others wait in the queue.
    pub node_queue: u32,
    /// A request whose first token is predicted later than this is refused.
    pub max_ttft: Option<Duration>,
    /// Classes of requests by prompt length.
    pub pools: Pools,
    /// Tokens of an answer whose client does not say how many it wants, as far as the context and the nodes' KV memory
    /// go.
    pub max_tokens_default: u32,
    /// Deadline of a request that brings none.
    pub max_request: Duration,
    /// Neither leg says anything for so long: the attempt fails.
    pub silence: Duration,
    /// Attempts of a request, the first included; at most [`MOST_ATTEMPTS`].
    pub max_attempts: u32,
    /// Time that a request may spend without progress after failures of nodes.
    pub replan: Duration,
    /// Percent of the running requests that may be retries, see `flow/retry_budget.rs`.
    pub retry_budget_percent: u32,
    /// The client takes nothing for so long: the request is cancelled.
    pub client_stall: Duration,
}

/// The limits that hold now, for many to read and one to change. A request keeps those of its start, however long it
/// runs; before that each gate asks anew.
#[derive(Debug)]
pub struct CurrentLimits(RwLock<Arc<Limits>>);

impl CurrentLimits {
    /// At first these.
    pub fn new(limits: Limits) -> Self {
        Self(RwLock::new(Arc::new(limits)))
    }

    /// Those of this moment.
    pub fn get(&self) -> Arc<Limits> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// These from now on.
    pub fn set(&self, limits: Limits) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(limits);
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_inflight: 512,
            max_queue: 256,
            node_queue: 4,
            max_ttft: None,
            pools: Pools::default(),
            max_tokens_default: u32::MAX,
            max_request: Duration::from_secs(600),
            silence: Duration::from_secs(600),
            max_attempts: 4,
            replan: Duration::from_secs(30),
            retry_budget_percent: 20,
            client_stall: Duration::from_secs(30),
        }
    }
}
