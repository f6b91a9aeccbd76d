//! A request and the answer so far: what is left to do, for whoever goes on with it. Pure. A node that takes over gets
//! the prompt and the tokens that the client has, told apart by their number, so that it chooses the next token as the
//! node before it would have.
use std::borrow::Cow;
use std::time::{Duration, Instant};

use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey, TraceContext, v1};
use tandem_telemetry::clock;

use super::find_nodes::Tokens;
use crate::generation::GenerationRequest;
use crate::text::ModelText;

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct Progress {
    /// What the client asked for.
    pub request: GenerationRequest,
    /// The tokens that it has.
    pub sent: Vec<u32>,
    /// As nodes are told, see [`Self::hide_priority`].
    priority: i32,
    /// Whose KV it may reuse.
    cache_salt: CacheSalt,
    /// Tokens that end the answer, as a node is told; the model's first one apart.
    stop_token_ids: Vec<u32>,
    eos: u32,
    /// Between two tokens.
    objective: Duration,
}

impl Progress {
    /// Nothing is sent.
    pub fn new(request: GenerationRequest, cache_salt: CacheSalt, model: &ModelText, objective: Duration) -> Self {
        let stop_token_ids = model.stop_token_ids(&request.stop_token_ids, request.ignore_eos);
        let (priority, eos) = (request.priority, model.eos);
        Self { request, sent: Vec::new(), priority, cache_salt, stop_token_ids, eos, objective }
    }

    /// Nodes are told no priority: they know of no tenants, and one's urgent requests would go before the others'
    /// there.
    pub fn hide_priority(&mut self) {
        self.priority = 0;
    }

    /// See [`v1::RequestSpec::cache_salt`].
    pub fn cache_salt(&self) -> CacheSalt {
        self.cache_salt
    }

    /// Of what is left of the answer, for the room that it needs; and what of its beginning a cache may hold, in blocks
    /// of `block_tokens`, named under `key`.
    pub fn tokens(&self, key: SequenceKey, block_tokens: u32) -> Tokens {
        let prompt = match self.sent.as_slice() {
            [] => Cow::Borrowed(&*self.request.prompt_ids),
            sent => Cow::Owned([&*self.request.prompt_ids, sent].concat()),
        };
        let left = self.request.max_tokens.saturating_sub(count(self.sent.len()));
        prompt_tokens(&prompt, left, key, block_tokens)
    }

    /// What a leg is to do, with the first `basis` tokens of the answer in its prompt.
    pub fn spec(&self, basis: usize, parent: TraceContext, deadline: Instant) -> v1::RequestSpec {
        let request = &self.request;
        let output = self.sent.get(..basis).unwrap_or(&self.sent);
        let output_tokens = u32::try_from(output.len()).unwrap_or(u32::MAX);
        v1::RequestSpec {
            request_id: request.request_id.clone(),
            prompt: [&*request.prompt_ids, output].concat(),
            sampling: Some(request.sampling.clone()),
            max_tokens: request.max_tokens.saturating_sub(output_tokens),
            ignore_eos: request.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            time_left_ns: time_left_ns(deadline),
            traceparent: parent.to_string(),
            tracestate: request.parent.as_ref().map(|parent| parent.state.as_str().to_owned()).unwrap_or_default(),
            output_tokens,
            priority: self.priority,
            tpot_objective_ms: u32::try_from(self.objective.as_millis()).unwrap_or(u32::MAX),
            cache_salt: self.cache_salt.to_wire(),
        }
    }

    /// Why the answer is complete, if it is: also when the node that made its last token cannot say so any more.
    pub fn is_complete(&self) -> Option<v1::FinishReason> {
        let last = self.sent.last()?;
        if self.stop_token_ids.contains(last) || (*last == self.eos && !self.request.ignore_eos) {
            return Some(v1::FinishReason::Stop);
        }
        (self.sent.len() >= self.request.max_tokens as usize).then_some(v1::FinishReason::Length)
    }
}

/// From now, at least a nanosecond: none would be no deadline.
fn time_left_ns(deadline: Instant) -> u64 {
    let left = deadline.saturating_duration_since(clock::now());
    u64::try_from(left.as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// Of a prompt with so many tokens after it, see [`Progress::tokens`].
pub fn prompt_tokens(prompt: &[u32], max: u32, key: SequenceKey, block_tokens: u32) -> Tokens {
    // A node always computes the last token, whose logits give the next one: its block is never all reused.
    let block_tokens = block_tokens.max(1) as usize;
    let reusable = prompt.len().saturating_sub(1) / block_tokens * block_tokens;
    Tokens { prompt: count(prompt.len()), max, hashes: sequence_hashes(key, &prompt[..reusable], block_tokens) }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(prompt: u32, sent: u32) -> Progress {
        let request = GenerationRequest {
            request_id: String::new(),
            prompt_ids: (0..prompt).collect(),
            max_tokens: 100,
            sampling: v1::Sampling::default(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            deadline: None,
            parent: None,
            root: None,
            received: clock::now(),
            api: "test",
            priority: 0,
            tenant: crate::admission::tenant::Tenant::default(),
            cache_salt: "".into(),
        };
        Progress {
            request,
            sent: (prompt..prompt + sent).collect(),
            priority: 0,
            cache_salt: CacheSalt::NONE,
            stop_token_ids: Vec::new(),
            eos: 2,
            objective: Duration::from_millis(100),
        }
    }

    #[test]
    fn the_hashes_are_those_of_the_blocks_that_a_node_would_reuse() {
        let all: Vec<u32> = (0..96).collect();
        let key = SequenceKey::new(7, CacheSalt::NONE);
        let hashes = sequence_hashes(key, &all, 16);
        for (prompt, sent, blocks) in
            [(0, 0, 0), (1, 0, 0), (16, 0, 0), (17, 0, 1), (32, 0, 1), (33, 0, 2), (20, 60, 4)]
        {
            let tokens = progress(prompt, sent).tokens(key, 16);
            assert_eq!((tokens.prompt, tokens.max), (prompt + sent, 100 - sent));
            assert_eq!(tokens.hashes, hashes[..blocks], "{prompt} and {sent} tokens");
        }
        assert_eq!(progress(64, 0).tokens(key, 32).hashes, sequence_hashes(key, &all[..32], 32));
    }
}
