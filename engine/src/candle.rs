//! [`Executor`] over a real model: [`crate::models`] reads its files, our kernels compute. This file checks a batch against the
//! arena and the model and lays its items out as one step; it owns the threads that compute.
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tandem_proto::{BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS};

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, EngineSpec, Executor, KvDtype, LayersDone, allocate_arena};
use crate::logits::Logits;
use crate::models::checkpoint::Checkpoint;
use crate::models::config::LlamaConfig;
use crate::models::llama::{Llama, Step};
use crate::ops::attention::Chunk;
use crate::ops::kv::{KvArena, KvLayout, Place};
use crate::ops::pool::Pool;
use crate::ops::simd::{Isa, IsaChoice};

/// What to load and with which memory and threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// A GGUF file or a safetensors directory.
    pub path: PathBuf,
    /// Number format of the KV arena.
    pub kv_dtype: KvDtype,
    /// Blocks of the KV arena.
    pub blocks: usize,
    /// Tokens of a block: one of [`BLOCK_TOKENS`].
    pub block_tokens: usize,
    /// Threads that compute, the caller's counted.
    pub threads: usize,
    /// Cores to which the threads are bound, in their order; empty leaves them to the system. Whoever shares a machine
    /// with others of its kind had better name them or leave it empty.
    pub cpus: Vec<usize>,
    /// Which kernels.
    pub isa: IsaChoice,
    /// One kernel path in f32 for every row count: the same bits whatever else is in the batch, and on every machine.
    pub batch_invariant: bool,
}

impl Default for ModelConfig {
    /// No file and no memory: what must be said. For the rest the usual.
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            kv_dtype: KvDtype::Bf16,
            blocks: 0,
            block_tokens: DEFAULT_BLOCK_TOKENS,
            threads: 1,
            cpus: Vec::new(),
            isa: IsaChoice::Auto,
            batch_invariant: true,
        }
    }
}

/// A Llama model, its KV arena and its threads.
pub struct LlamaExecutor {
    spec: EngineSpec,
    model: Llama,
    kv: KvArena,
    pool: Pool,
}

impl LlamaExecutor {
    /// Loads the model and allocates the arena.
    ///
    /// # Errors
    /// `Model` when the file is missing, damaged or not servable; `InvalidArgument` for impossible sizes.
    pub fn load(config: &ModelConfig) -> Result<Self, EngineError> {
        if !BLOCK_TOKENS.contains(&config.block_tokens) || config.threads == 0 || config.blocks == 0 {
            let why = format!("blocks of {BLOCK_TOKENS:?} tokens, a block and a thread at least, not {config:?}");
            return Err(EngineError::InvalidArgument(why));
        }
        let checkpoint = Checkpoint::open(&config.path)?;
        let isa = isa_of(config)?;
        let model = Llama::load(checkpoint.weights(), checkpoint.config().clone())?.with_isa(isa);
        let LlamaConfig { layers, kv_heads, head_dim, .. } = *model.config();
        let layout = KvLayout { layers, kv_heads, head_dim, dtype: config.kv_dtype, block_tokens: config.block_tokens };
        let kv = KvArena::new(allocate_arena(config.blocks, layout.block_bytes())?, layout)
            .ok_or_else(|| EngineError::InvalidArgument(format!("no KV arena of {layout:?}")))?;
        let pool = Pool::new(config.threads, config.cpus.clone())
            .map_err(|error| EngineError::Executor(format!("cannot start compute threads: {error}")))?;
        let spec = spec_of(checkpoint.digest()?, model.config(), &kv);
        tracing::info!(model = spec.model_name, isa = model.isa().name(), threads = config.threads, "model loaded");
        Ok(Self { spec, model, kv, pool })
    }

    fn check(&self, batch: &Batch) -> Result<(), EngineError> {
        let mut written = HashSet::new();
        for item in &batch.items {
            let problem = self.problem(item, &mut written);
            problem.map_or(Ok(()), |problem| {
                Err(EngineError::InvalidArgument(format!("sequence {} in a step: {problem}", item.seq)))
            })?;
        }
        Ok(())
    }

    fn problem(&self, item: &BatchItem, written: &mut HashSet<u32>) -> Option<String> {
        let (blocks, end) = (item.blocks.blocks(), item.start.checked_add(item.tokens.len()));
        let block_tokens = self.spec.block_tokens;
        let Some(end) = end.filter(|&end| end > item.start && end <= self.spec.max_context_tokens) else {
            let limit = self.spec.max_context_tokens;
            return Some(format!("no tokens or more than the model's {limit}"));
        };
        if end > blocks.len() * block_tokens {
            return Some(format!("{end} tokens do not fit {} blocks", blocks.len()));
        }
        if let Some(token) = item.tokens.iter().find(|&&token| token as usize >= self.spec.vocab_size) {
            return Some(format!("token {token} is not in the vocabulary"));
        }
        let own = &blocks[..end.div_ceil(block_tokens)];
        if let Some(block) = own.iter().find(|&&block| block as usize >= self.spec.total_blocks) {
            return Some(format!("block {block} is not in the arena"));
        }
        let mut target = own[item.start / block_tokens..].iter();
        target.find(|&&block| !written.insert(block)).map(|block| format!("block {block} is written twice"))
    }
}

impl Executor for LlamaExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn arena(&self) -> Arc<[AtomicU64]> {
        Arc::clone(self.kv.words())
    }

    fn execute(
        &mut self,
        batch: &Batch,
        logits: &mut Logits,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<(), EngineError> {
        self.check(batch)?;
        let block_tokens = self.spec.block_tokens;
        let (mut tokens, mut positions, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let (mut chunks, mut logits_of) = (Vec::new(), Vec::new());
        for item in &batch.items {
            let (blocks, rows, first_row) = (item.blocks.blocks(), item.tokens.len(), tokens.len());
            chunks.push(Chunk { blocks, first_row, rows, start: item.start });
            tokens.extend(&item.tokens);
            for position in item.start..item.start + rows {
                positions.push(position);
                places.push(Place { block: blocks[position / block_tokens], slot: position % block_tokens });
            }
            logits_of.extend(item.wants_logits.then_some(first_row + rows - 1));
        }
        let step =
            Step { tokens: &tokens, positions: &positions, places: &places, chunks: &chunks, logits_of: &logits_of };
        let Self { model, kv, pool, .. } = self;
        let rows = logits.lay_out(self.spec.vocab_size, batch.wants_logits());
        pool.install(|| model.forward(kv, &step, rows, layers_done));
        Ok(())
    }
}

fn isa_of(config: &ModelConfig) -> Result<Isa, EngineError> {
    let exact = config.batch_invariant || config.kv_dtype == KvDtype::F32;
    Isa::choose(config.isa, exact).ok_or_else(|| {
        EngineError::InvalidArgument(match Isa::choose(config.isa, false) {
            Some(isa) => format!("{} wants bf16 or int8 KV and no batch invariance", isa.name()),
            None => format!("this machine has no {:?}", config.isa),
        })
    })
}

fn spec_of(model_digest: u64, model: &LlamaConfig, kv: &KvArena) -> EngineSpec {
    let layout = kv.layout();
    EngineSpec {
        model_name: model.name.clone(),
        model_digest,
        compatibility_digest: 0,
        vocab_size: model.vocab_size,
        eos_token_id: model.eos_token_id,
        max_context_tokens: model.max_context_tokens,
        block_tokens: layout.block_tokens,
        block_bytes: layout.block_bytes(),
        total_blocks: kv.blocks(),
        kv_dtype: layout.dtype,
        layers: layout.layers,
        kv_heads: layout.kv_heads,
        head_dim: layout.head_dim,
    }
    .sealed()
}
