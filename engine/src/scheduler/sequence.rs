//! A sequence as the scheduler has it: what it was asked for, where it stands, and where it will stand once the steps
//! under way have ended. It makes its part of a step. Knows no other sequence; what it gets is decided in
//! `scheduler.rs`.
use std::sync::Arc;

use tandem_proto::hash::sequence_hashes;
use tandem_proto::{SequenceHash, SequenceKey};

use super::Rank;
use crate::blocks::{BlockPool, Prefix};
use crate::executor::{BatchItem, Choose, Draft, History, Tokens};
use crate::sampling::{Sampled, uniform};
use crate::sequence::{Drafts, SequenceRequest};
use crate::speculation::{Acceptance, draft};

/// See the head of this file.
pub(super) struct Sequence {
    /// `tokens` and `computed` grow with every step that ends.
    pub request: SequenceRequest,
    /// Length of `tokens` on arrival.
    pub given: usize,
    pub rank: Rank,
    /// Of its hashes.
    key: SequenceKey,
    cached: Cached,
    /// Tokens whose computation was told.
    pub told: usize,
    /// Of the full blocks, while it is preempted: what the cache may still have.
    pub hashes: Vec<SequenceHash>,
    /// Whether the last of `tokens` is what the executor chose in the sequence's last step, and has kept.
    pub chosen: bool,
    pub ahead: Ahead,
    /// Tokens that may not be chosen before `min_tokens`; none where every number will do.
    ends: Option<Arc<[u32]>>,
    pub acceptance: Acceptance,
}

/// How much of a sequence is in the prefix cache.
struct Cached {
    blocks: usize,
    /// Of the last of them.
    hash: SequenceHash,
}

/// What the steps under way add to a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Positions that they compute.
    computed: usize,
    /// Tokens that they choose, whose values nobody knows yet.
    chosen: usize,
    /// Those of them by which no step can go on before the host has them.
    of_host: usize,
}

impl Ahead {
    /// A step that computes `item` is under way.
    pub fn begin(&mut self, item: &BatchItem) {
        self.computed += item.tokens.len();
        self.chosen += usize::from(item.choose.is_some());
        self.of_host += usize::from(must_be_seen(item));
    }

    /// It is so no longer.
    pub fn end(&mut self, item: &BatchItem) {
        self.computed -= item.tokens.len();
        self.chosen -= usize::from(item.choose.is_some());
        self.of_host -= usize::from(must_be_seen(item));
    }

    /// Tokens that are being chosen.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// Whether the sequence's next step hangs on more than where these tokens will be.
    pub fn must_end(&self) -> bool {
        self.of_host > 0
    }
}

fn must_be_seen(item: &BatchItem) -> bool {
    item.choose.as_ref().is_some_and(|choose| !choose.is_of_device())
}

impl Sequence {
    /// One that has come; `eos_token_id` and `model_digest` are the model's.
    pub fn new(request: SequenceRequest, rank: Rank, eos_token_id: u32, model_digest: u64) -> Self {
        let key = SequenceKey::new(model_digest, request.lease.cache_salt());
        let ends = (request.sampling.min_tokens > 0).then(|| request.ends(eos_token_id).collect());
        Self {
            given: request.tokens.len(),
            told: request.computed,
            request,
            rank,
            key,
            cached: Cached { blocks: 0, hash: SequenceHash::START },
            hashes: Vec::new(),
            chosen: false,
            ahead: Ahead::default(),
            ends,
            acceptance: Acceptance::default(),
        }
    }

    /// The end of a step: `computed` tokens have their KV, `sampled` are new.
    pub fn advance(&mut self, computed: usize, sampled: &[Sampled], Drafts { drafted, accepted }: Drafts) {
        let Self { request, told, chosen, acceptance, .. } = self;
        request.computed = computed;
        *told = (*told).max(computed);
        request.tokens.extend(sampled.iter().map(|sampled| sampled.token));
        *chosen = !sampled.is_empty();
        debug_assert!(request.computed < request.tokens.len(), "a running sequence has a token to run");
        if *chosen {
            acceptance.note(drafted as usize, accepted as usize);
        }
    }

    /// It lets go of its blocks, for a lease of none of the same salt, and will begin anew with another one.
    pub fn give_up_blocks(&mut self, pool: &BlockPool) {
        debug_assert_eq!(self.ahead, Ahead::default(), "a step under way computes it");
        self.request.lease = Arc::new(pool.nothing(self.request.lease.cache_salt()));
        self.request.computed = 0;
        self.chosen = false;
        self.cached = Cached { blocks: 0, hash: SequenceHash::START };
        self.hashes = sequence_hashes(self.key, &self.request.tokens, pool.block_tokens());
    }

    /// Where its next step begins.
    fn start(&self) -> usize {
        self.request.computed + self.ahead.computed
    }

    /// Its tokens, those counted that are being chosen.
    fn len(&self) -> usize {
        self.request.tokens.len() + self.ahead.chosen
    }

    /// Tokens that its next steps compute.
    pub fn queued_tokens(&self) -> usize {
        self.len() - self.start()
    }

    /// Whether its next token has no place yet.
    pub fn lacks_block(&self) -> bool {
        self.start() >= self.request.lease.capacity_tokens()
    }

    /// Whether there are guesses at what follows the tokens that are known.
    pub fn repeats_itself(&self) -> bool {
        !draft(&self.request.tokens, 1).is_empty()
    }

    /// The blocks of all its tokens, and what the cache may have of them.
    pub fn wants_again(&self, pool: &BlockPool) -> (usize, Prefix<'_>) {
        let tokens = self.request.tokens.len();
        (pool.blocks_for(tokens), Prefix { cache_salt: self.request.lease.cache_salt(), hashes: &self.hashes, tokens })
    }

    /// Puts the blocks before index `full` into the cache that are not there yet.
    pub fn cache_blocks(&mut self, full: usize, block_tokens: usize) {
        let Cached { blocks, hash } = &mut self.cached;
        let tokens = self.request.tokens.get(*blocks * block_tokens..full * block_tokens).unwrap_or_default();
        let hashes = self.key.hashes_after(*hash, tokens, block_tokens);
        if let Some(&last) = hashes.last() {
            self.request.lease.publish(*blocks, &hashes);
            (*blocks, *hash) = (full, last);
        }
    }

    /// The next `count` of its tokens, in a step.
    pub fn item(&self, count: usize) -> BatchItem {
        let (start, end) = (self.start(), self.start() + count);
        let last = self.ahead.chosen > 0 || (self.chosen && count == 1);
        BatchItem {
            seq: self.rank.1,
            tokens: if last { Tokens::Last } else { Tokens::Given(self.request.tokens[start..end].to_vec()) },
            start,
            blocks: Arc::clone(&self.request.lease),
            choose: (end == self.len()).then(|| self.choose(start, last)),
        }
    }

    /// How to choose the token after all that there are, of which those from `start` on are computed.
    fn choose(&self, start: usize, last: bool) -> Choose {
        let SequenceRequest { tokens, prompt_len, sampling, .. } = &self.request;
        let history = || History { tokens: tokens[..start].to_vec(), prompt_len: *prompt_len };
        let place = self.len();
        Choose {
            sampling: Arc::clone(sampling),
            uniform: uniform(sampling.seed, place),
            forbidden: self.forbidden(place),
            history: (sampling.penalizes() && !last).then(history),
            drafts: Vec::new(),
        }
    }

    /// Guesses at the tokens behind those that are known.
    pub fn drafts(&self, tokens: Vec<u32>) -> Vec<Draft> {
        let places = self.request.tokens.len() + 1..;
        let draft = |(token, place)| Draft {
            token,
            uniform: uniform(self.request.sampling.seed, place),
            forbidden: self.forbidden(place),
        };
        tokens.into_iter().zip(places).map(draft).collect()
    }

    /// What may not be the token at `place`.
    fn forbidden(&self, place: usize) -> Option<Arc<[u32]>> {
        let too_short = place - self.request.prompt_len < self.request.sampling.min_tokens as usize;
        self.ends.as_ref().filter(|_| too_short).cloned()
    }
}
