//! An executor without a model, for tests and for clusters on machines that have none. Not a mock: it keeps its state
//! in the KV arena as a model does, it chooses tokens as a model does, and its logits are a pure hash of what it reads
//! back from there, so that a missing, misplaced or corrupted KV block gives wrong tokens.
//!
//! Arena layout, as a model's: `[layer][token]`, equal slots of 64-bit words. A slot's first word is a hash of the
//! token, its position, the slot before it and its slot of the layer below (both read from the arena); its other words
//! are hashes of the first. A step goes layer by layer.
//!
//! A step takes as long as the configuration says, and as little as may be of it is processor time: what stands beside
//! a simulated node on the same cores is what is measured.
//!
//! It computes in `finish`, as late as a device may. Where several steps may be under way, one takes the tokens that
//! the host did not have at its beginning from the step that ended before it.
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tandem_memory::{HostMemory, KvMemory};
use tandem_proto::DEFAULT_BLOCK_TOKENS;

use crate::chooser::{Chooser, Last, Slots};
use crate::error::EngineError;
use crate::executor::{Batch, Chosen, EngineSpec, Executor, LayersDone, Seq};
use crate::kv_memory::allocate_arena;
use crate::models::checkpoint::Checkpoint;
use crate::numerics::{Arithmetic, KvDtype, KvOrder};
use crate::ops::simd::{Pass, widest};
use crate::sampling::Sampled;
use crate::step::{Chunk, Step};
use crate::step_model::StepShape;
use crate::under_way::UnderWay;

/// A simulated model says only the first so many tokens of its vocabulary. To choose among more takes longer than the
/// rest of a step.
const SPOKEN_TOKENS: usize = 4096;

/// Sizes and speed of a simulated model. Two executors with equal `identity`, `vocab_size`, `block_tokens`,
/// `block_bytes` and `layers` are the same model.
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
    /// Bytes of a block, a multiple of 8 for each of its tokens in each layer.
    pub block_bytes: usize,
    /// Parts of a block, written one after the other.
    pub layers: usize,
    /// Blocks of the arena.
    pub blocks: usize,
    /// What a step takes, whatever is in it: the model of a decode step, which reads all weights.
    pub step_delay: Duration,
    /// What each token adds, of a prompt or of an answer: the model of prefill, which is bound by compute.
    pub token_delay: Duration,
    /// What each position adds that a token attends to: the model of attention.
    pub context_delay: Duration,
    /// Steps that may be under way at a time, at least 1.
    pub under_way: usize,
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
            layers: 4,
            blocks: 1024,
            step_delay: Duration::ZERO,
            token_delay: Duration::ZERO,
            context_delay: Duration::ZERO,
            under_way: 1,
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
        let variable =
            times(self.token_delay, shape.tokens()).saturating_add(times(self.context_delay, shape.context()));
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
    network: Network,
    config: SimulatedConfig,
    steps: UnderWay<Simulated>,
    /// When the last step ended.
    ended: Instant,
    /// What the last step chose, as a device keeps it.
    chosen: HashMap<Seq, u32>,
    slots: Slots,
}

/// A step, from its beginning to its end.
struct Simulated {
    step: Step,
    chooser: Chooser,
    began: Instant,
    takes: Duration,
    /// Rows whose tokens the step before chooses, and of whom.
    rows: Vec<(usize, Seq)>,
}

/// What computes on the arena.
struct Network {
    spec: EngineSpec,
    arena: Arc<HostMemory>,
    /// Of one layer.
    words_per_token: usize,
}

impl SimulatedExecutor {
    /// Allocates the arena.
    ///
    /// # Errors
    /// `InvalidArgument` when `block_bytes` is no multiple of 8 for each token and layer, or the vocabulary is empty or
    /// too large.
    pub fn new(config: &SimulatedConfig) -> Result<Self, EngineError> {
        let slots = config.block_tokens * config.layers;
        let words_per_token = config.block_bytes.checked_div(slots).unwrap_or(0) / 8;
        if words_per_token * 8 * slots != config.block_bytes || words_per_token == 0 {
            let why = format!(
                "simulated blocks of {} tokens and {} layers in {} bytes: want 8 bytes or a multiple for each",
                config.block_tokens, config.layers, config.block_bytes
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
            kv_order: KvOrder::Hashes,
            arithmetic: Arithmetic::Simulated,
            layers: config.layers,
            kv_heads: 1,
            head_dim: words_per_token,
        };
        let arena = allocate_arena(config.blocks, config.block_bytes)?;
        arena.touch(0..arena.bytes());
        Ok(Self {
            network: Network { spec: spec.sealed(), arena, words_per_token },
            config: config.clone(),
            steps: UnderWay::new((0..config.under_way.max(1)).map(|_| Simulated::new())),
            ended: Instant::now(),
            chosen: HashMap::new(),
            slots: Slots::default(),
        })
    }

    /// Sequences for which something is kept.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }
}

impl Simulated {
    fn new() -> Self {
        let (began, takes) = (Instant::now(), Duration::ZERO);
        Self { step: Step::default(), chooser: Chooser::default(), began, takes, rows: Vec::new() }
    }

    fn begin(&mut self, batch: &Batch, spec: &EngineSpec, slots: &mut Slots) -> Result<(), EngineError> {
        let Self { step, chooser, rows, .. } = self;
        chooser.begin(batch, slots)?;
        // A token that nobody knows yet is any, until the step before has chosen it.
        step.lay_out(batch, spec, |item| chooser.last(item).map(|last| last.known().unwrap_or(0)))?;
        rows.clear();
        for ((index, item), chunk) in batch.items.iter().enumerate().zip(&step.chunks) {
            if chooser.last(index) == Some(Last::UnderWay) {
                rows.push((chunk.first_row, item.seq));
            }
        }
        Ok(())
    }

    fn compute(
        &mut self,
        network: &Network,
        chosen: &HashMap<Seq, u32>,
        began: Instant,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<(), EngineError> {
        for (row, seq) in &self.rows {
            self.step.tokens[*row] = chosen.get(seq).copied().unwrap_or(0);
        }
        let layers = u32::try_from(network.spec.layers).unwrap_or(u32::MAX);
        for layer in 1..=layers {
            let last = layer == layers;
            self.step.chunks.iter().try_for_each(|chunk| network.run(&self.step, chunk, layer as usize - 1))?;
            if last {
                self.answer(network)?;
            }
            // To wait for each layer where nobody does would be wakings for nothing.
            let reports = self.step.reports(layer as usize);
            if reports || last {
                pass(began, self.takes / layers * layer);
            }
            if reports {
                layers_done(layer as usize);
            }
        }
        Ok(())
    }

    /// The logits of all rows that want them.
    fn answer(&mut self, network: &Network) -> Result<(), EngineError> {
        let Self { step, chooser, .. } = self;
        let width = network.spec.vocab_size.min(SPOKEN_TOKENS);
        let wanted = step.chunks.iter().flat_map(|chunk| step.choosing(chunk).iter().map(move |row| (chunk, row)));
        let rows = chooser.rows(width).chunks_exact_mut(width);
        wanted.zip(rows).try_for_each(|((chunk, &row), logits)| {
            network.attend(step, &Chunk { rows: row + 1 - chunk.first_row, ..*chunk }, logits)
        })
    }
}

impl Network {
    /// Writes the chunk's slots of `layer`.
    fn run(&self, step: &Step, chunk: &Chunk, layer: usize) -> Result<(), EngineError> {
        let mut previous = match chunk.start {
            0 => self.spec.model_digest,
            start => fold(self.slot(step, chunk, layer, start - 1)?),
        };
        let tokens = &step.tokens[chunk.first_row..][..chunk.rows];
        for (position, &token) in (chunk.start..).zip(tokens) {
            let below = match layer {
                0 => u64::from(token),
                layer => fold(self.slot(step, chunk, layer - 1, position)?),
            };
            let slot = self.slot(step, chunk, layer, position)?;
            let first = mix(mix(previous, below), position as u64);
            for (i, word) in slot.iter().enumerate() {
                word.store(mix(first, i as u64), Ordering::Relaxed);
            }
            previous = fold(slot);
        }
        Ok(())
    }

    /// Like attention, the last position reads all positions in all layers: damage anywhere shows.
    fn attend(&self, step: &Step, chunk: &Chunk, logits: &mut [f32]) -> Result<(), EngineError> {
        let mut state = self.spec.model_digest;
        for position in 0..chunk.start + chunk.rows {
            for layer in 0..self.spec.layers {
                state = mix(state, fold(self.slot(step, chunk, layer, position)?));
            }
        }
        widest(Say { state, logits });
        Ok(())
    }

    /// The words of the token at `position` in `layer`.
    fn slot(&self, step: &Step, chunk: &Chunk, layer: usize, position: usize) -> Result<&[AtomicU64], EngineError> {
        let block_tokens = self.spec.block_tokens;
        let own = step.blocks.get(chunk.first_block..chunk.first_block + chunk.blocks).unwrap_or_default();
        let block = own
            .get(position / block_tokens)
            .ok_or_else(|| EngineError::Executor(format!("no KV block for position {position} of a sequence")))?;
        let slot = (*block as usize * self.spec.layers + layer) * block_tokens + position % block_tokens;
        let range = slot * self.words_per_token..(slot + 1) * self.words_per_token;
        self.arena
            .words()
            .get(range)
            .ok_or_else(|| EngineError::Executor(format!("KV block {block} is outside the arena")))
    }
}

impl Executor for SimulatedExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.network.spec
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.network.arena.clone()
    }

    fn most_under_way(&self) -> usize {
        self.steps.most()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let Self { network, config, steps, slots, .. } = self;
        let simulated = steps.next_step().ok_or_else(|| EngineError::Executor("too many steps under way".into()))?;
        simulated.begin(batch, &network.spec, slots).inspect_err(|_| simulated.chooser.give_up(slots))?;
        (simulated.began, simulated.takes) = (Instant::now(), config.step_time(StepShape::of(batch)));
        steps.began();
        Ok(())
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let Self { network, steps, slots, ended, chosen, .. } = self;
        let simulated = steps.end().ok_or_else(|| EngineError::Executor("no step was begun".into()))?;
        // Behind the step before it.
        let began = simulated.began.max(*ended);
        let computed = simulated.compute(network, chosen, began, layers_done);
        *ended = Instant::now();
        chosen.clear();
        computed.inspect_err(|_| simulated.chooser.give_up(slots))?;
        // Slots of KV that are not what they should be are an error of the step.
        simulated.chooser.choose(slots, |_, _| true);
        let last = |(seq, of)| match of {
            &Chosen::Token(Sampled { token, .. }) => Some((seq, token)),
            _ => None,
        };
        chosen.extend(simulated.chooser.chosen_of().filter_map(last));
        Ok(simulated.chooser.chosen())
    }

    fn forget(&mut self, seq: Seq) {
        self.slots.forget(seq);
    }
}

/// The logits of all tokens, by what was read.
struct Say<'a> {
    state: u64,
    logits: &'a mut [f32],
}

impl Pass for Say<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        (0..).zip(self.logits).for_each(|(id, to)| *to = logit(mix(self.state, id)));
    }
}

/// The time is the simulated compute, not a wait for something else.
fn pass(started: Instant, takes: Duration) {
    while let Some(left) = takes.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
        std::thread::park_timeout(left);
    }
}

/// Every bit of the slot counts, and where it stands. Its words are hashes already: a product each is enough.
fn fold(slot: &[AtomicU64]) -> u64 {
    slot.iter().fold(0, |state: u64, word| state.wrapping_mul(FACTOR).wrapping_add(word.load(Ordering::Relaxed)))
}

/// Odd, so that nothing is lost in products (PCG's multiplier).
const FACTOR: u64 = 0x5851_f42d_4c95_7f2d;

/// SplitMix64's finalizer (<https://prng.di.unimi.it/splitmix64.c>) over both inputs.
#[inline(always)]
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in [-8, 8): the spread of a real model's logits, roughly.
#[inline(always)]
fn logit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1u64 << 20) as f32 - 8.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sampling::uniform;
    use crate::{BatchItem, BlockPool, Choose, SamplingParams, Tokens};

    const TOKENS: usize = 20;

    /// Computes a prompt of [`TOKENS`] and then one token more, before which `harm` has the arena. The latter's logits.
    fn last_logits(vocab_size: usize, harm: impl FnOnce(&[AtomicU64])) -> Vec<f32> {
        let config = SimulatedConfig { vocab_size, blocks: 2, ..SimulatedConfig::default() };
        let mut executor = SimulatedExecutor::new(&config).unwrap();
        let blocks = Arc::new(BlockPool::new(2, config.block_tokens).try_reserve(2).unwrap());
        let sampling = Arc::new(SamplingParams::GREEDY);
        let mut step = |start: usize, tokens: usize| {
            let tokens = Tokens::Given((start..start + tokens).map(|token| token as u32).collect());
            let choose = Choose {
                sampling: Arc::clone(&sampling),
                uniform: 0.0,
                forbidden: None,
                history: None,
                drafts: Vec::new(),
            };
            let item = BatchItem { seq: 1, tokens, start, blocks: Arc::clone(&blocks), choose: Some(choose) };
            executor.begin(&Batch { items: vec![item], report_layers: Vec::new() }).unwrap();
            executor.finish(&mut |_| ()).unwrap();
            (executor.network.arena.clone(), executor.steps.ended().chooser.logits().of(0).unwrap().to_vec())
        };
        harm(step(0, TOKENS).0.words());
        step(TOKENS, 1).1
    }

    proptest! {
        #[test]
        fn a_changed_bit_anywhere_gives_other_logits(layer in 0usize..4, token in 0usize..TOKENS, word in 0usize..8, bit in 0u32..64) {
            let harmed = last_logits(1024, |arena| {
                // `[layer][token]` in each block of 16 tokens, 8 words a slot.
                let slot = (token / 16 * 4 + layer) * 16 + token % 16;
                arena[slot * 8 + word].fetch_xor(1 << bit, Ordering::Relaxed);
            });
            prop_assert_ne!(harmed, last_logits(1024, |_| ()));
        }
    }

    #[test]
    fn the_last_token_is_the_given_one_until_it_is_forgotten() {
        let answer = |kind: fn(u32) -> Tokens| {
            let mut executor = SimulatedExecutor::new(&SimulatedConfig { blocks: 2, ..Default::default() }).unwrap();
            let blocks = Arc::new(BlockPool::new(2, 16).try_reserve(2).unwrap());
            let sampling = Arc::new(SamplingParams { temperature: 0.9, ..SamplingParams::GREEDY });
            let mut step = |start: usize, tokens: Tokens| {
                let uniform = uniform(3, start);
                let choose = Choose {
                    sampling: Arc::clone(&sampling),
                    uniform,
                    forbidden: None,
                    history: None,
                    drafts: Vec::new(),
                };
                let item = BatchItem { seq: 1, tokens, start, blocks: Arc::clone(&blocks), choose: Some(choose) };
                executor.begin(&Batch { items: vec![item], report_layers: Vec::new() })?;
                match executor.finish(&mut |_| ())? {
                    [Chosen::Token(sampled)] => Ok::<u32, EngineError>(sampled.token),
                    other => panic!("{other:?}"),
                }
            };
            let mut tokens = vec![step(0, Tokens::Given((0..16).collect())).unwrap()];
            for start in 16..31 {
                tokens.push(step(start, kind(tokens[tokens.len() - 1])).unwrap());
            }
            executor.forget(1);
            assert_eq!(executor.slots(), 0);
            let item = BatchItem { seq: 1, tokens: Tokens::Last, start: 31, blocks, choose: None };
            let refused = executor.begin(&Batch { items: vec![item], report_layers: Vec::new() });
            assert!(matches!(refused, Err(EngineError::InvalidArgument(_))), "{refused:?}");
            let words: Vec<u64> =
                executor.network.arena.words().iter().map(|word| word.load(Ordering::Relaxed)).collect();
            (tokens, words)
        };
        assert_eq!(answer(|_| Tokens::Last), answer(|token| Tokens::Given(vec![token])));
    }

    #[test]
    fn a_large_vocabulary_is_not_spoken_whole() {
        assert_eq!(last_logits(1024, |_| ()).len(), 1024);
        assert_eq!(last_logits(49_152, |_| ()).len(), SPOKEN_TOKENS);
    }
}
