//! What goes into the engine and what comes out: requests, their validation, and events. Knows no scheduling.
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::SequenceKey;
use tandem_proto::hash::sequence_hashes;

use crate::blocks::{BlockPool, KvLease};
use crate::error::EngineError;
use crate::executor::EngineSpec;
use crate::sampling::{SamplingParams, TokenLogprob};

/// Tokens to continue. The roles differ only in what they put here:
///
/// | role | `tokens` | `computed` | `max_new_tokens` | `lease` |
/// |---|---|---|---|---|
/// | prefill | the prompt | what is cached | 1 | the prompt's blocks |
/// | decode | prompt + first token | prompt length | what is left | those and the first token's |
/// | local | the prompt | what is cached | all | the prompt's and the first token's |
///
/// The lease is taken before the request is submitted, for the given tokens; the blocks of new ones are taken while it
/// runs. Where none is left, sequences give theirs back and are computed again, see `scheduler.rs`. One that is to have
/// a single new token never grows, so that where there are no others (a prefill node) every sequence keeps its lease,
/// and whoever holds it beside the engine may rely on what was computed there.
///
/// A sequence that moves after a failure is submitted as prompt + tokens so far. Sampling depends on the index in the
/// whole sequence, so that every role gives the same tokens.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// Names the request in logs.
    pub id: String,
    /// The prompt and the tokens generated so far.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt: penalties and `min_tokens` count the output from here.
    pub prompt_len: usize,
    /// How many of `tokens` have their KV in `lease`: those that moved there, or [`KvLease::cached_tokens`]. Fewer than
    /// all, since the last one's step gives the next token.
    pub computed: usize,
    /// Room for the KV of `tokens`.
    pub lease: Arc<KvLease>,
    /// Tokens to generate at most, at least 1.
    pub max_new_tokens: u32,
    /// How to choose tokens.
    pub sampling: Arc<SamplingParams>,
    /// Go on after the model's end-of-sequence token.
    pub ignore_eos: bool,
    /// Further tokens that end the sequence; they are emitted like the end-of-sequence token.
    pub stop_token_ids: Vec<u32>,
    /// Fail with `DeadlineExceeded` at the first step after this instant.
    pub deadline: Option<Instant>,
    /// Higher goes first, within [`MAX_PRIORITY`] either side of the usual 0, see `scheduler.rs`.
    pub priority: i32,
    /// After how many layers of the step that gives its first token it wants a [`SequenceEvent::LayersDone`]; for who
    /// moves the KV while the rest is computed. Empty: never.
    pub report_layers: Vec<usize>,
}

pub use tandem_proto::MAX_PRIORITY;

/// Of further preemptions, and of the returns from them, a sequence's reader gets no event: a stream has room for all.
pub(crate) const MAX_PREEMPTIONS_TOLD: usize = 16;

impl SequenceRequest {
    /// Tokens whose KV a sequence of `len` tokens comes to hold that grows by `max_new_tokens`: all but the very last,
    /// whose KV nobody will read.
    pub fn kv_tokens(len: usize, max_new_tokens: u32, max_context_tokens: usize) -> usize {
        len.saturating_add(max_new_tokens as usize).min(max_context_tokens).saturating_sub(1)
    }

    /// Most events that the sequence can have: a start, a chunk for each given token, the layers that it asked for, the
    /// new tokens, what is told of preemptions, an end. Chunks that are computed again are not told.
    pub(crate) fn max_events(&self, max_context_tokens: usize) -> usize {
        let room = max_context_tokens.saturating_sub(self.tokens.len());
        let once = self.queued_tokens() + self.report_layers.len() + room.min(self.max_new_tokens as usize) + 2;
        once + MAX_PREEMPTIONS_TOLD * 2
    }

    /// Given tokens that are still to be computed.
    pub(crate) fn queued_tokens(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// The tokens that end it; `eos_token_id` is the model's.
    pub(crate) fn ends(&self, eos_token_id: u32) -> impl Iterator<Item = u32> {
        let eos = (!self.ignore_eos).then_some(eos_token_id);
        self.stop_token_ids.iter().copied().chain(eos)
    }

    /// Checks everything that can be checked before the request queues.
    pub(crate) fn validate(&self, spec: &EngineSpec, pool: &BlockPool) -> Result<(), EngineError> {
        let (len, limit) = (self.tokens.len(), spec.max_context_tokens);
        let refuse = |why: String| Err(EngineError::InvalidArgument(why));
        if len == 0 || self.prompt_len == 0 || self.prompt_len > len {
            return refuse(format!("{len} tokens of which {} are the prompt", self.prompt_len));
        }
        if self.computed >= len {
            return refuse(format!("{} tokens computed of {len}: none is left to run", self.computed));
        }
        if self.priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
            return refuse(format!("priority {} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}", self.priority));
        }
        if self.report_layers.len() > spec.layers {
            return refuse(format!("{} reports of {} layers", self.report_layers.len(), spec.layers));
        }
        if self.max_new_tokens == 0 {
            return refuse("max_new_tokens must be at least 1".into());
        }
        if len >= limit {
            return refuse(format!("{len} tokens leave no room for a new one in a context of {limit}"));
        }
        if let Some(token) = self.tokens.iter().find(|&&token| token as usize >= spec.vocab_size) {
            return refuse(format!("token id {token} is outside the vocabulary of {}", spec.vocab_size));
        }
        self.sampling.validate(spec.vocab_size)?;
        if !self.lease.is_of(pool) {
            return refuse("the KV lease is of another engine's pool".into());
        }
        self.validate_prefix(spec)?;
        let room = self.lease.capacity_tokens();
        if len > room {
            return refuse(format!("the KV of {len} tokens does not fit a lease of {room}"));
        }
        Ok(())
    }

    /// Shared blocks must be of these tokens, and no step may write them: others read them.
    fn validate_prefix(&self, spec: &EngineSpec) -> Result<(), EngineError> {
        let (computed, read_only) = (self.computed, self.lease.read_only_tokens());
        if computed < read_only {
            let why = format!("computing from token {computed} would write blocks that are shared up to {read_only}");
            return Err(EngineError::InvalidArgument(why));
        }
        let shared = &self.tokens[..self.lease.cached_tokens()];
        let key = SequenceKey::new(spec.model_digest, self.lease.cache_salt());
        if self.lease.prefix() != sequence_hashes(key, shared, spec.block_tokens).last().copied() {
            return Err(EngineError::InvalidArgument("the lease shares blocks of another prompt".into()));
        }
        Ok(())
    }
}

/// What happens to a sequence, in order: `Started`, then `ChunkDone`, `LayersDone` (in the last chunk) and `Token`s,
/// then one `Finished` or `Failed`; `Preempted` and `Resumed` between any of them. `Failed` may come at any point; it
/// and `Finished` are the last. By then the engine has let go of the lease, but for a step that began before the end
/// was known: that writes behind the sequence's end, and holds the lease until it has ended.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// It left the queue; its first step comes next.
    Started {
        /// When.
        at: Instant,
    },
    /// It gave its blocks to others and waits for some; no `LayersDone` follows. Of many preemptions only the first are
    /// told.
    Preempted {
        /// When.
        at: Instant,
    },
    /// It is back in the batch and computes again what is not cached. The tokens that it had stay what they were.
    Resumed {
        /// When.
        at: Instant,
    },
    /// A step over given tokens ended, further than any before.
    ChunkDone {
        /// Tokens of the sequence, counted from its first, whose KV is in the lease now.
        tokens: usize,
        /// When the step ended.
        at: Instant,
    },
    /// The first layers of the step under way are done, which is the one that gives the first token: the KV of all
    /// given tokens in these layers is in the lease, and nothing writes there any more. Whoever takes this event from
    /// the stream sees those writes: they happen before it was sent.
    LayersDone {
        /// One of [`SequenceRequest::report_layers`].
        layers: usize,
        /// When.
        at: Instant,
    },
    /// A new token.
    Token {
        /// Its id.
        id: u32,
        /// Natural logarithm of the probability that the model gave it.
        logprob: f32,
        /// The likeliest tokens in its place, where `top_logprobs` asked for them.
        top: Vec<TokenLogprob>,
        /// Of the step that chose it; told with the first token of the step.
        drafts: Drafts,
        /// When the step ended.
        at: Instant,
    },
    /// It is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// When the step ended.
        at: Instant,
    },
    /// It is given up.
    Failed(EngineError),
}

impl SequenceEvent {
    /// Whether no event follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Failed(_))
    }
}

/// Guesses at tokens, see `speculation.rs`, and what came of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Computed.
    pub drafted: u32,
    /// Those of them that are tokens of the answer.
    pub accepted: u32,
}

impl std::ops::AddAssign for Drafts {
    fn add_assign(&mut self, more: Self) {
        self.drafted += more.drafted;
        self.accepted += more.accepted;
    }
}

/// Why a sequence is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The last token ends it: end-of-sequence or one of the request's stop tokens.
    Stop,
    /// `max_new_tokens`, the model's context or the engine's whole KV memory is used up.
    Length,
}
