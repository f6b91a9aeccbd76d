//! What a request needs of the nodes, what comes before it, when its first token would come, and whether there is room
//! for it. Plain data and one trait: [`crate::admission`] keeps the data and asks, [`crate::membership`] answers, and
//! neither knows the other.
use std::time::{Duration, Instant};

use tandem_proto::SequenceHash;
use tokio::sync::Notify;

/// What admission asks of the cluster.
pub trait Capacity: Send + Sync {
    /// Whether the nodes have room for a request behind those `ahead`, if `node_queue` may wait on each.
    fn has_room(&self, demand: &Demand, ahead: &Ahead, node_queue: u32, now: Instant) -> bool;

    /// Is notified, once, whenever [`Self::has_room`] may have another answer. There is one listener.
    fn freed(&self) -> &Notify;
}

/// What a request needs of the cluster: of admission, of the node table, of the choice of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer at most.
    pub max_tokens: u32,
    /// As long as answers usually are.
    pub answer_tokens: u32,
    /// Names of the prompt's blocks that a cache can spare a node; none where that is not asked.
    pub hashes: Vec<SequenceHash>,
}

impl Demand {
    /// Of prompt and usual answer.
    pub fn tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.answer_tokens)
    }

    /// Of prompt and longest answer.
    pub fn most_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.max_tokens)
    }

    /// KV blocks of the prompt: what the prefill node holds, and what a decode node reserves.
    pub fn prompt_blocks(&self, block_tokens: u32) -> u32 {
        self.prompt_tokens.div_ceil(block_tokens)
    }

    /// KV blocks of prompt and usual answer: what the decode node comes to hold. A longer answer takes more as it
    /// grows.
    pub fn usual_blocks(&self, block_tokens: u32) -> u32 {
        self.prompt_tokens.saturating_add(self.answer_tokens).div_ceil(block_tokens)
    }
}

/// From now to a first token, if the best nodes got the request now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predicted {
    /// Behind what the nodes have to do already.
    pub wait: Duration,
    /// Then until the first token.
    pub prefill: Duration,
}

/// What has started and is not on any node yet, or not any more: it will take room that still looks free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Requests.
    pub requests: u32,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens of prompts and usual answers.
    pub total_tokens: u64,
}

impl Ahead {
    /// One request.
    pub fn of(demand: &Demand) -> Self {
        Self { requests: 1, prompt_tokens: demand.prompt_tokens.into(), total_tokens: demand.tokens() }
    }

    /// One more.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.total_tokens += other.total_tokens;
    }

    /// One fewer.
    pub fn sub(&mut self, other: &Self) {
        self.requests = self.requests.saturating_sub(other.requests);
        self.prompt_tokens = self.prompt_tokens.saturating_sub(other.prompt_tokens);
        self.total_tokens = self.total_tokens.saturating_sub(other.total_tokens);
    }
}
