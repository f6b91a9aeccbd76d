//! The seam between scheduling and computing: what a step is, and who can run one. Implementations: `candle.rs` (a
//! real model) and `simulated.rs` (no model). An executor knows tokens, positions and arena blocks; it does not know
//! requests, sampling or streams.
use std::sync::Arc;

use tandem_memory::KvMemory;
use tandem_proto::PROTOCOL_VERSION;
use xxhash_rust::xxh3::Xxh3;

use crate::blocks::KvLease;
use crate::error::EngineError;
use crate::logits::Logits;

/// Hears of a step's progress, see [`Executor::execute`]. It holds the step up: it must be quick.
pub type LayersDone<'a> = dyn FnMut(usize) + 'a;

/// Runs steps. Owned by the engine thread.
pub trait Executor: Send {
    /// What this executor serves; constant over its life.
    fn spec(&self) -> &EngineSpec;

    /// The KV memory, `total_blocks * block_bytes` bytes, which steps read and write.
    fn memory(&self) -> Arc<dyn KvMemory>;

    /// Computes every item's tokens: writes their K and V into the item's blocks, and into `logits`, laid out for the
    /// items in their order, those of the last token (`logits` values of the spec) of each item that wants them. Calls
    /// `layers_done(n)` on this thread once the K and V of the first `n` layers are in the arena for the whole step, for
    /// each `n` from 1 to `layers`: the step writes nothing there any more.
    ///
    /// # Errors
    /// The step failed as a whole: nothing is known about the KV that its items wrote.
    fn execute(
        &mut self,
        batch: &Batch,
        logits: &mut Logits,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<(), EngineError>;

    /// Runs `f`, which may spread its work over the executor's threads (`ops::pool`). One without threads just calls it.
    fn install(&mut self, f: &mut dyn FnMut()) {
        f();
    }
}

/// One step: prefill chunks and decode tokens side by side. No sequence is in it twice.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Decode tokens first, then prefill chunks.
    pub items: Vec<BatchItem>,
}

impl Batch {
    /// Whether each item wants logits, in their order.
    pub fn wants_logits(&self) -> impl Iterator<Item = bool> {
        self.items.iter().map(|item| item.wants_logits)
    }

    /// Tokens that the step computes.
    pub fn tokens(&self) -> usize {
        self.items.iter().map(|item| item.tokens.len()).sum()
    }
}

/// One sequence's part of a step: `tokens` at the positions `start ..`, attending to everything before them.
#[derive(Clone, Debug)]
pub struct BatchItem {
    /// Names the sequence among those of this engine.
    pub seq: u64,
    /// Never empty.
    pub tokens: Vec<u32>,
    /// Position of `tokens[0]`; the KV of all positions before it is in `blocks`.
    pub start: usize,
    /// Where the sequence's KV lives. Holding the lease keeps the blocks out of the pool while the step runs.
    pub blocks: Arc<KvLease>,
    /// Whether the last token's logits are needed: they are not for an inner chunk of a prompt.
    pub wants_logits: bool,
}

/// Number format of K and V in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 4 bytes a value.
    F32,
    /// bfloat16, 2 bytes a value.
    Bf16,
    /// Signed integers of 8 bits with one scale for each token and head, see `ops/kv.rs`.
    Int8,
}

impl KvDtype {
    /// Bytes of one token's K or V of one head.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::Bf16 => 2 * head_dim,
            Self::Int8 => head_dim + 2,
        }
    }
}

/// What an engine serves: fixed when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSpec {
    /// For people.
    pub model_name: String,
    /// XXH3-64 of the model's weights and settings; the salt of its sequence hashes.
    pub model_digest: u64,
    /// Equal on two nodes whose KV blocks mean the same; see [`EngineSpec::sealed`].
    pub compatibility_digest: u64,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// So many logits has a position: those of the first tokens of the vocabulary, for a real model of all.
    pub logits: usize,
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
    /// Transformer layers.
    pub layers: usize,
    /// K and V heads of a layer.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

impl EngineSpec {
    /// The same spec with its compatibility digest computed from everything that gives a block's bytes their meaning.
    /// `total_blocks` is not part of it: two nodes may have arenas of different sizes.
    pub fn sealed(mut self) -> Self {
        let dtype = match self.kv_dtype {
            KvDtype::F32 => 0u64,
            // 1 was row by row; 2 is in pairs, see `ops/kv.rs`.
            KvDtype::Bf16 => 2,
            KvDtype::Int8 => 3,
        };
        let sizes = [self.vocab_size, self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.block_bytes];
        let mut hasher = Xxh3::new();
        let words = [u64::from(PROTOCOL_VERSION), self.model_digest, dtype];
        for word in words.into_iter().chain(sizes.map(|size| size as u64)) {
            hasher.update(&word.to_le_bytes());
        }
        self.compatibility_digest = hasher.digest();
        self
    }
}
