//! A request and the answer so far: what is left to do, for whoever goes on with it. Pure. A node that takes over gets
//! the prompt and the tokens that the client has, told apart by their number, so that it chooses the next token as the
//! node before it would have.
use std::borrow::Cow;
use std::time::{Duration, Instant};

use tandem_proto::{CacheSalt, TraceContext, v1};
use tandem_telemetry::clock;

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

    /// The prompt with the answer so far: what the next attempt goes on from.
    pub fn prompt(&self) -> Cow<'_, [u32]> {
        match self.sent.as_slice() {
            [] => Cow::Borrowed(&*self.request.prompt_ids),
            sent => Cow::Owned([&*self.request.prompt_ids, sent].concat()),
        }
    }

    /// Tokens of the answer that are left at most.
    pub fn left(&self) -> u32 {
        self.request.max_tokens.saturating_sub(u32::try_from(self.sent.len()).unwrap_or(u32::MAX))
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
    fn what_was_sent_is_prompt_for_the_next_attempt() {
        for (prompt, sent) in [(0, 0), (17, 0), (20, 60)] {
            let progress = progress(prompt, sent);
            assert_eq!((progress.prompt().len() as u32, progress.left()), (prompt + sent, 100 - sent));
        }
    }
}
