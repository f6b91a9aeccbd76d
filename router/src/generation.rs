//! What a client asks for and what it gets, in no protocol's terms: a [`GenerationRequest`] goes from an edge to the
//! flow, [`GenerationEvent`]s come back. Plain data, with the bounds that both sides check; the handle between the two
//! is [`crate::api::Service`].
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::{TraceContext, v1};

use crate::admission::Tenant;
use crate::caller::Parent;

/// Stop strings of one request at most.
pub const MAX_STOP_STRINGS: usize = 4;
/// Bytes of one stop string at most.
pub const MAX_STOP_BYTES: usize = 256;
/// Stop tokens of one request at most.
pub const MAX_STOP_TOKENS: usize = 64;

/// Answers of one request at most, over all its prompts.
pub const MAX_CHOICES: u32 = 128;

/// One prompt to answer, as an edge hands it over: tokenized, every default resolved.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Of the client, or drawn by the edge (see [`crate::caller`]).
    pub request_id: String,
    /// The prompt's tokens; all answers to one prompt share them.
    pub prompt_ids: Arc<[u32]>,
    /// Tokens to generate at most (≥ 1); see [`crate::api::Service::resolve_max_tokens`].
    pub max_tokens: u32,
    /// Temperature 0 is greedy.
    pub sampling: v1::Sampling,
    /// Do not stop at the end-of-sequence token.
    pub ignore_eos: bool,
    /// Tokens that end the answer beside the end-of-sequence token.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Higher ones go first among the tenant's own in the queue, and on the nodes while there is one tenant; 0 is
    /// usual, -10 to 10 are possible. Both APIs, keys and metrics count the other way round: lower ones first.
    pub priority: i32,
    /// Whose request it is.
    pub tenant: Tenant,
    /// KV is reused among requests of the tenant that say the same here; empty is usual.
    pub cache_salt: Arc<str>,
    /// When the client stops waiting.
    pub deadline: Option<Instant>,
    /// The client's span.
    pub parent: Option<Parent>,
    /// The request's own, where the edge has drawn it, see [`crate::api::Service::root`].
    pub root: Option<TraceContext>,
    /// When the edge had the whole request: TTFT counts from here.
    pub received: Instant,
    /// `gen_ai.operation.name`: "chat", "text_completion" or "generate_content".
    pub api: &'static str,
}

impl GenerationRequest {
    /// The requests for `n` answers to the same prompt: the seed of each is `seed` + its number, so that any of them
    /// can be asked for alone.
    pub fn choices(self, n: u32) -> Vec<Self> {
        if n == 1 {
            return vec![self];
        }
        let of = |choice: u32| Self {
            request_id: format!("{}-{choice}", self.request_id),
            sampling: v1::Sampling { seed: self.sampling.seed.wrapping_add(choice.into()), ..self.sampling.clone() },
            // One span is one answer's.
            root: self.root.filter(|_| choice == 0),
            ..self.clone()
        };
        (0..n).map(of).collect()
    }
}

/// What the client is told, in order: tokens, then exactly one `Finish`, or an error in its place.
#[derive(Clone, Debug)]
pub enum GenerationEvent {
    /// One token.
    Token {
        /// Token id.
        id: u32,
        /// Text that this token completes; empty while a UTF-8 character or a stop string is partial.
        text: String,
        /// Natural logarithm of the probability that the model gave it.
        logprob: f32,
        /// The likeliest tokens in its place, where `top_logprobs` asked for them.
        top: Vec<v1::TokenLogprob>,
        /// 0 for the first generated token.
        index: u32,
        /// Prompt tokens that no node had to compute.
        cached: u32,
    },
    /// The answer is complete.
    Finish {
        /// Why it ended.
        reason: v1::FinishReason,
        /// Text that was still held back.
        text: String,
        /// Token counts.
        usage: Usage,
        /// Milliseconds of every phase.
        timings: Box<v1::Timings>,
        /// 32 hexadecimal digits.
        trace_id: String,
    },
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: u32,
    /// Generated, the token that ended the answer included.
    pub completion: u32,
    /// Prompt tokens that no node had to compute.
    pub cached: u32,
}
