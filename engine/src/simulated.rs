//! An executor without a model, for tests and for clusters on machines that have none. Not a mock: it keeps its state
//! in the KV arena as a model does, and its logits are a pure hash of what it reads back from there, so that a missing,
//! misplaced or corrupted KV block gives wrong tokens.
//!
//! Arena layout: a block is `block_tokens` equal slots, one a token, of 64-bit words. A slot's first word is a hash of
//! the slot before it (read from the arena) and the token; its other words are hashes of the first.
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tandem_proto::DEFAULT_BLOCK_TOKENS;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, EngineSpec, Executor, KvDtype, allocate_arena};
use crate::logits::Logits;
use crate::models::checkpoint::Checkpoint;
use crate::step_model::StepShape;

/// Sizes and speed of a simulated model. Two executors with equal `identity`, `vocab_size`, `block_tokens` and
/// `block_bytes` are the same model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedConfig {
    /// Distinguishes models: the digest that the node registers with.
    pub identity: u64,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Ends a sequence.
    pub eos_token_id: u32,
    /// Longest sequence.
    pub max_context_tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block, a multiple of 8 for each of its tokens.
    pub block_bytes: usize,
    /// Blocks of the arena.
    pub blocks: usize,
    /// What a step takes, whatever is in it: the model of a decode step, which reads all weights.
    pub step_delay: Duration,
    /// What each token adds: the model of prefill, which is bound by compute.
    pub token_delay: Duration,
    /// What each position adds that a token attends to: the model of attention.
    pub context_delay: Duration,
}

impl Default for SimulatedConfig {
    fn default() -> Self {
        Self {
            identity: 0x7461_6e64_656d,
            vocab_size: 1024,
            eos_token_id: 2,
            max_context_tokens: 8192,
            block_tokens: DEFAULT_BLOCK_TOKENS,
            block_bytes: 4096,
            blocks: 1024,
            step_delay: Duration::ZERO,
            token_delay: Duration::ZERO,
            context_delay: Duration::ZERO,
        }
    }
}

impl SimulatedConfig {
    /// The same with blocks of so many tokens; a token keeps its bytes.
    pub fn with_block_tokens(self, block_tokens: usize) -> Self {
        Self { block_tokens, block_bytes: self.block_bytes / self.block_tokens.max(1) * block_tokens, ..self }
    }

    /// How long a step of `shape` takes.
    pub fn step_time(&self, shape: StepShape) -> Duration {
        let times = |delay: Duration, count: usize| delay.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let variable = times(self.token_delay, shape.tokens).saturating_add(times(self.context_delay, shape.context));
        self.step_delay.saturating_add(variable)
    }

    /// Stands in for a model file or directory: its vocabulary, context and digest, so that a router with
    /// that model takes the node.
    ///
    /// # Errors
    /// `Model` when no executor could load it.
    pub fn in_place_of(path: &Path) -> Result<Self, EngineError> {
        let checkpoint = Checkpoint::open(path)?;
        let config = checkpoint.config();
        Ok(Self {
            identity: checkpoint.digest()?,
            vocab_size: config.vocab_size,
            eos_token_id: config.eos_token_id,
            max_context_tokens: config.max_context_tokens,
            ..Self::default()
        })
    }
}

/// See the head of this file.
pub struct SimulatedExecutor {
    spec: EngineSpec,
    arena: Arc<[AtomicU64]>,
    words_per_token: usize,
    config: SimulatedConfig,
}

impl SimulatedExecutor {
    /// Allocates the arena.
    ///
    /// # Errors
    /// `InvalidArgument` when `block_bytes` is no multiple of 8 for each token, or the vocabulary is empty or too large.
    pub fn new(config: &SimulatedConfig) -> Result<Self, EngineError> {
        let token_bytes = config.block_bytes.checked_div(config.block_tokens).unwrap_or(0);
        let words_per_token = token_bytes / 8;
        if words_per_token * 8 * config.block_tokens != config.block_bytes || words_per_token == 0 {
            let why = format!(
                "simulated blocks of {} tokens in {} bytes: want 8 bytes or a multiple for each token",
                config.block_tokens, config.block_bytes
            );
            return Err(EngineError::InvalidArgument(why));
        }
        if config.vocab_size == 0 || u32::try_from(config.vocab_size).is_err() {
            return Err(EngineError::InvalidArgument(format!("a vocabulary of {} tokens", config.vocab_size)));
        }
        let spec = EngineSpec {
            model_name: "simulated".into(),
            model_digest: config.identity,
            compatibility_digest: 0,
            vocab_size: config.vocab_size,
            eos_token_id: config.eos_token_id,
            max_context_tokens: config.max_context_tokens,
            block_tokens: config.block_tokens,
            block_bytes: config.block_bytes,
            total_blocks: config.blocks,
            kv_dtype: KvDtype::F32,
            layers: 1,
            kv_heads: 1,
            head_dim: words_per_token,
        };
        Ok(Self {
            spec: spec.sealed(),
            arena: allocate_arena(config.blocks, config.block_bytes)?,
            words_per_token,
            config: config.clone(),
        })
    }

    /// Fills `logits` if the item wants them.
    fn run(&self, item: &BatchItem, logits: &mut [f32]) -> Result<(), EngineError> {
        let mut previous = match item.start {
            0 => self.spec.model_digest,
            start => fold(self.slot(item, start - 1)?),
        };
        for (position, &token) in (item.start..).zip(&item.tokens) {
            let slot = self.slot(item, position)?;
            let first = mix(mix(previous, u64::from(token)), position as u64);
            for (i, word) in slot.iter().enumerate() {
                word.store(mix(first, i as u64), Ordering::Relaxed);
            }
            previous = fold(slot);
        }
        if !item.wants_logits {
            return Ok(());
        }
        // Like attention, the last position reads all positions: damage anywhere shows.
        let mut state = self.spec.model_digest;
        for position in 0..item.start + item.tokens.len() {
            state = mix(state, fold(self.slot(item, position)?));
        }
        (0..).zip(logits).for_each(|(id, to)| *to = logit(mix(state, id)));
        Ok(())
    }

    /// The words of the token at `position`.
    fn slot(&self, item: &BatchItem, position: usize) -> Result<&[AtomicU64], EngineError> {
        let block_tokens = self.spec.block_tokens;
        let block = item.blocks.blocks().get(position / block_tokens).ok_or_else(|| {
            EngineError::Executor(format!("sequence {}: no KV block for position {position}", item.seq))
        })?;
        let slot = *block as usize * block_tokens + position % block_tokens;
        let range = slot * self.words_per_token..(slot + 1) * self.words_per_token;
        self.arena.get(range).ok_or_else(|| EngineError::Executor(format!("KV block {block} is outside the arena")))
    }
}

impl Executor for SimulatedExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn arena(&self) -> Arc<[AtomicU64]> {
        Arc::clone(&self.arena)
    }

    fn execute(&mut self, batch: &Batch, logits: &mut Logits) -> Result<(), EngineError> {
        let started = Instant::now();
        let mut rows =
            logits.lay_out(self.spec.vocab_size, batch.wants_logits()).chunks_exact_mut(self.spec.vocab_size);
        let mut items = batch.items.iter();
        let outcome = items.try_for_each(|item| {
            let row = if item.wants_logits { rows.next() } else { None };
            self.run(item, row.unwrap_or_default())
        });
        let takes = self.config.step_time(StepShape::of(batch));
        // The time is the simulated compute, not a wait for something else.
        while let Some(left) = takes.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::park_timeout(left);
        }
        outcome
    }
}

fn fold(slot: &[AtomicU64]) -> u64 {
    slot.iter().fold(0, |state, word| mix(state, word.load(Ordering::Relaxed)))
}

/// SplitMix64's finalizer (<https://prng.di.unimi.it/splitmix64.c>) over both inputs.
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in [-8, 8): the spread of a real model's logits, roughly.
fn logit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1u64 << 20) as f32 - 8.0
}
