//! A request and the answer so far: what is left to do, for whoever goes on with it. Pure. A node that takes over gets the
//! prompt and the tokens that the client has, told apart by their number, so that it chooses the next token as the node
//! before it would have.
use std::time::Instant;

use tandem_proto::{TraceContext, v1};
use tandem_telemetry::clock;

use super::seek::Tokens;
use crate::api::GenerationRequest;
use crate::text::ModelText;

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct Progress {
    /// What the client asked for.
    pub request: GenerationRequest,
    /// The tokens that it has.
    pub sent: Vec<u32>,
    /// Tokens that end the answer, as a node is told; the model's first one apart.
    stop_token_ids: Vec<u32>,
    eos: u32,
}

impl Progress {
    /// Nothing is sent.
    pub fn new(request: GenerationRequest, model: &ModelText) -> Self {
        let stop_token_ids = model.stop_token_ids(&request.stop_token_ids, request.ignore_eos);
        Self { request, sent: Vec::new(), stop_token_ids, eos: model.eos }
    }

    /// Of what is left of the answer, for the room that it needs.
    pub fn tokens(&self) -> Tokens {
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        Tokens {
            prompt: count(self.request.prompt_ids.len() + self.sent.len()),
            max: self.request.max_tokens.saturating_sub(count(self.sent.len())),
        }
    }

    /// What a leg is to do, with the first `basis` tokens of the answer in its prompt.
    pub fn spec(&self, basis: usize, parent: TraceContext, deadline: Instant) -> v1::RequestSpec {
        let request = &self.request;
        let output = self.sent.get(..basis).unwrap_or(&self.sent);
        let output_tokens = u32::try_from(output.len()).unwrap_or(u32::MAX);
        v1::RequestSpec {
            request_id: request.request_id.clone(),
            prompt: [&request.prompt_ids, output].concat(),
            sampling: Some(request.sampling.clone()),
            max_tokens: request.max_tokens.saturating_sub(output_tokens),
            ignore_eos: request.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            deadline_unix_ns: clock().unix_ns(deadline),
            traceparent: parent.to_string(),
            output_tokens,
            priority: request.priority,
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
