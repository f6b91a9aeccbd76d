//! What a request that waits has to do with the nodes: how large it is, what comes before it, when its first token
//! would come, and whether there is room for it. Plain data and one trait: [`crate::admission`] keeps the data and
//! asks, [`crate::membership`] answers, and neither knows the other.
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// What admission asks of the cluster.
pub trait Capacity: Send + Sync {
    /// Whether the nodes have room for a request behind those `ahead`, if `node_queue` may wait on each.
    fn has_room(&self, size: Size, ahead: &Ahead, node_queue: u32, now: Instant) -> bool;

    /// Is notified, once, whenever [`Self::has_room`] may have another answer. There is one listener.
    fn freed(&self) -> &Notify;
}

/// A request's size, as nodes must have room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer at most.
    pub max_tokens: u32,
    /// As long as answers usually are.
    pub answer_tokens: u32,
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
