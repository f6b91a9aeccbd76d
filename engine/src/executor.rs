//! The seam between scheduling and computing: what a step is, and who can run one. Implementations: `cpu.rs` (a real
//! model) and `simulated.rs` (no model). An executor has tokens, positions, arena blocks and, for each sequence, the
//! token that it chose last; requests, clients and streams are the engine's.
use std::sync::Arc;

use tandem_memory::KvMemory;
use tandem_proto::PROTOCOL_VERSION;
use xxhash_rust::xxh3::Xxh3;

use crate::blocks::KvLease;
use crate::error::EngineError;
use crate::numerics::{Arithmetic, KvDtype, KvOrder};
use crate::sampling::{Sampled, SamplingParams};

/// Names a sequence among those of an engine; later arrivals have larger numbers.
pub type Seq = u64;

/// Receives a step's progress, see [`Executor::finish`]. The step waits for it: it must be quick.
pub type LayersDone<'a> = dyn FnMut(usize) + 'a;

/// Runs steps, one behind the other: `begin`, then `finish`. Owned by the engine thread.
///
/// Some let the host begin the next step before it has finished the one before, so that the device need not wait for
/// the host between the two. Steps then still compute in the order in which they began: each reads what those before it
/// have written and chosen. `finish` ends them in that order.
pub trait Executor: Send {
    /// What this executor serves; constant over its life.
    fn spec(&self) -> &EngineSpec;

    /// Steps that may be under way at a time, at least 1; constant over its life.
    fn most_under_way(&self) -> usize {
        1
    }

    /// The KV memory, `total_blocks * block_bytes` bytes, which steps read and write.
    fn memory(&self) -> Arc<dyn KvMemory>;

    /// Starts a step: computes every item's tokens, writes their K and V into the item's blocks, and chooses the tokens
    /// that are asked for. The caller keeps `batch`, and so the leases, until the step's `finish` has returned.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch that cannot be computed, such as [`Tokens::Last`] of a sequence for which the step
    /// before chose nothing. The step is not under way then, nor is any part of it, and no sequence of the batch can go
    /// on with `Last`; steps that were under way still are.
    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError>;

    /// Waits for the end of the oldest step under way; gives what it chose, one entry an item, in their order. Calls
    /// `layers_done(n)` on this thread, for each `n` of the batch's `report_layers` from 1 to `layers`, once the K and
    /// V of the first `n` layers are in the arena for the whole step: the step writes nothing there any more.
    ///
    /// # Errors
    /// The step failed as a whole, and has ended: nothing is known about the KV that its items wrote, and none of its
    /// sequences can go on with [`Tokens::Last`].
    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError>;

    /// There is nothing to run: until the next `begin`, other programs of this machine may have the cores that the
    /// steps run on, if the executor lends them.
    fn rest(&mut self) {}

    /// The part of the last step that was computed on cores borrowed from others, 0 to 1.
    fn lent_share(&mut self) -> f64 {
        0.0
    }

    /// Frees what is kept for a sequence that has ended. A step under way may still compute it, for nobody. Of no
    /// effect for one that was in no step.
    fn forget(&mut self, seq: Seq);
}

/// One step: prefill chunks and decode tokens side by side. No sequence is in it twice.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Decode tokens first, then prefill chunks.
    pub items: Vec<BatchItem>,
    /// After how many layers somebody waits for the KV so far; ascending. A device need not synchronize after others.
    pub report_layers: Vec<usize>,
}

impl Batch {
    /// Tokens that the step computes, drafts counted.
    pub fn tokens(&self) -> usize {
        self.items.iter().map(BatchItem::rows).sum()
    }
}

/// One sequence's part of a step: `tokens` at the positions `start ..`, attending to everything before them.
#[derive(Clone, Debug)]
pub struct BatchItem {
    /// Whose.
    pub seq: Seq,
    /// Never empty.
    pub tokens: Tokens,
    /// Position of the first of `tokens`; the KV of all positions before it is in `blocks`.
    pub start: usize,
    /// Where the sequence's KV lives. Holding the lease keeps the blocks out of the pool while the step runs.
    pub blocks: Arc<KvLease>,
    /// How to choose the token after the last of `tokens`; an inner chunk of a prompt needs none.
    pub choose: Option<Choose>,
}

impl BatchItem {
    /// The position after the last of its tokens: that of the token to be chosen.
    pub fn end(&self) -> usize {
        self.start.saturating_add(self.tokens.len())
    }

    /// Guesses at what follows its tokens.
    pub fn drafts(&self) -> &[Draft] {
        self.choose.as_ref().map_or(&[], |choose| &choose.drafts)
    }

    /// Positions that it computes: those of its tokens, and of the drafts behind them.
    pub fn rows(&self) -> usize {
        self.tokens.len() + self.drafts().len()
    }
}

/// The tokens that an item computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// These.
    Given(Vec<u32>),
    /// The one that the sequence's last step chose, wherever the executor keeps it: it need not travel to the host and
    /// back. That step was by the same executor, and nothing else of the sequence was computed since. It may be under
    /// way, if its choice was [the device's](Choose::is_of_device).
    Last,
}

impl Tokens {
    /// How many.
    #[allow(clippy::len_without_is_empty, reason = "an item is never empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Given(tokens) => tokens.len(),
            Self::Last => 1,
        }
    }
}

/// How the token after an item's tokens is chosen. The rest is in the executor: logits, and the tokens themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct Choose {
    /// The rules; one allocation a sequence.
    pub sampling: Arc<SamplingParams>,
    /// The random number of the token's place, [`crate::sampling::uniform`]: the host's, so that devices need no hash.
    pub uniform: f64,
    /// Tokens that must not be chosen: those that end the sequence, while it has fewer than `min_tokens`.
    pub forbidden: Option<Arc<[u32]>>,
    /// What comes before the item's tokens, where `sampling` [penalizes](SamplingParams::penalizes) and the item's
    /// tokens are given. With [`Tokens::Last`] the executor has it from the step before.
    pub history: Option<History>,
    /// Guesses at the tokens to be chosen, in their order: computed in the same step, each behind the one before. A
    /// token is chosen behind each of them as well, which holds if all drafts so far are what was chosen in their
    /// places.
    pub drafts: Vec<Draft>,
}

impl Choose {
    /// Whether the rules are known to the host alone, for the token or for one behind a draft.
    pub fn is_of_host(&self) -> bool {
        let forbids = |forbidden: &Option<Arc<[u32]>>| forbidden.as_ref().is_some_and(|tokens| !tokens.is_empty());
        self.sampling.needs_host()
            || forbids(&self.forbidden)
            || self.drafts.iter().any(|draft| forbids(&draft.forbidden))
    }

    /// Whether a next step can take the token from a device before the host has seen it: one token, by rules that can
    /// be the device's own.
    pub fn is_of_device(&self) -> bool {
        !self.is_of_host() && self.drafts.is_empty()
    }
}

/// A guess at a token, and how the one behind it is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// The guess.
    pub token: u32,
    /// As [`Choose::uniform`], for the token behind it.
    pub uniform: f64,
    /// As [`Choose::forbidden`], for the token behind it.
    pub forbidden: Option<Arc<[u32]>>,
}

/// The beginning of a sequence, as far as penalties look at it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// From position 0 on.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt; those behind it are output.
    pub prompt_len: usize,
}

/// What a step chose for one of its items.
#[derive(Clone, Debug, PartialEq)]
pub enum Chosen {
    /// It asked for no token.
    Nothing,
    /// This.
    Token(Sampled),
    /// These, for an item with drafts; at least one. All but the last are drafts that came true: their KV is that of
    /// the sequence. What is behind them in the item's blocks is of rejected drafts, and to be overwritten.
    Tokens(Vec<Sampled>),
    /// Something that the step computed for the item, whether it asked for a token or not, is no number. Weights or KV
    /// are broken, and so is the KV that the step wrote for it.
    NotNumbers,
}

/// What an engine serves: fixed when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSpec {
    /// For people.
    pub model_name: String,
    /// XXH3-64 of the model's weights and settings; in the key of its sequence hashes.
    pub model_digest: u64,
    /// Equal on two nodes whose KV blocks mean the same; see [`EngineSpec::sealed`].
    pub compatibility_digest: u64,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Ends a sequence, unless the request ignores it.
    pub eos_token_id: u32,
    /// Longest sequence, prompt and answer together.
    pub max_context_tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block, a multiple of 8.
    pub block_bytes: usize,
    /// Blocks of the arena.
    pub total_blocks: usize,
    /// Number format of the arena.
    pub kv_dtype: KvDtype,
    /// How the values of a block lie.
    pub kv_order: KvOrder,
    /// In which order its kernels add.
    pub arithmetic: Arithmetic,
    /// Transformer layers.
    pub layers: usize,
    /// K and V heads of a layer.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

impl EngineSpec {
    /// The same spec with its compatibility digest computed from everything that gives a block's bytes their meaning,
    /// and from the arithmetic that made them. `total_blocks` is not part of it: two nodes may have arenas of different
    /// sizes.
    pub fn sealed(mut self) -> Self {
        let sizes = [self.vocab_size, self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.block_bytes];
        let mut hasher = Xxh3::new();
        let words = [u64::from(PROTOCOL_VERSION), self.model_digest];
        for word in words.into_iter().chain(sizes.map(|size| size as u64)) {
            hasher.update(&word.to_le_bytes());
        }
        for name in [self.kv_order.name(), self.arithmetic.name()] {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
        }
        self.compatibility_digest = hasher.digest();
        self
    }
}
