//! [`Executor`] over a real model: [`crate::models`] reads its files, our kernels compute. This file checks a batch against the
//! arena and the model and lays its items out as one step; it owns the threads that compute. `loader.rs` makes it.
mod loader;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use tandem_memory::KvMemory;
use tandem_proto::DEFAULT_BLOCK_TOKENS;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, EngineSpec, Executor, KvDtype, LayersDone};
use crate::logits::Logits;
use crate::memory::MemoryFiles;
use crate::models::config::LlamaConfig;
use crate::models::llama::{Llama, Step};
use crate::ops::attention::Chunk;
use crate::ops::kv::{KvArena, Place};
use crate::ops::pool::Pool;
use crate::ops::simd::{Isa, IsaChoice};

pub use loader::ModelLoader;

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
    /// Tokens of a step at most: memory for its intermediate matrices is counted before the model is loaded.
    pub max_step_tokens: usize,
    /// Sequences of a step at most; so is memory for their logits.
    pub max_running: usize,
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
            max_step_tokens: 512,
            max_running: 64,
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
    /// Of the last step; the memory is kept.
    step: Step,
    /// Blocks that the step at hand writes; likewise.
    written: HashSet<u32>,
}

impl LlamaExecutor {
    /// Loads the model and allocates the arena.
    ///
    /// # Errors
    /// `Model` when the file is missing, damaged or not servable; `DoesNotFit` when it takes more memory than there is;
    /// `InvalidArgument` for impossible sizes.
    pub fn load(config: &ModelConfig) -> Result<Self, EngineError> {
        ModelLoader::open(config)?.load(config.blocks, &MemoryFiles::default())
    }

    fn check(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.written.clear();
        for item in &batch.items {
            if let Some(problem) = self.problem(item) {
                return Err(EngineError::InvalidArgument(format!("sequence {} in a step: {problem}", item.seq)));
            }
        }
        Ok(())
    }

    fn problem(&mut self, item: &BatchItem) -> Option<String> {
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
        target.find(|&&block| !self.written.insert(block)).map(|block| format!("block {block} is written twice"))
    }
}

impl Executor for LlamaExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.kv.memory()
    }

    fn execute(
        &mut self,
        batch: &Batch,
        logits: &mut Logits,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<(), EngineError> {
        self.check(batch)?;
        self.step.lay_out(batch, self.spec.block_tokens);
        let Self { model, kv, pool, step, .. } = self;
        let rows = logits.lay_out(self.spec.vocab_size, batch.wants_logits());
        pool.install(|| model.forward(kv, step, rows, layers_done));
        Ok(())
    }

    fn install(&mut self, f: &mut dyn FnMut()) {
        self.pool.install(f);
    }
}

impl Step {
    fn lay_out(&mut self, batch: &Batch, block_tokens: usize) {
        let Self { tokens, positions, places, blocks, chunks, logits_of } = self;
        tokens.clear();
        positions.clear();
        places.clear();
        blocks.clear();
        chunks.clear();
        logits_of.clear();
        for BatchItem { tokens: given, start, blocks: lease, wants_logits, .. } in &batch.items {
            let (own, rows, first_row) = (lease.blocks(), given.len(), tokens.len());
            chunks.push(Chunk { first_block: blocks.len(), blocks: own.len(), first_row, rows, start: *start });
            blocks.extend(own);
            tokens.extend(given);
            for position in *start..start + rows {
                positions.push(position);
                places.push(Place { block: own[position / block_tokens], slot: position % block_tokens });
            }
            logits_of.extend(wants_logits.then_some(first_row + rows - 1));
        }
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
        logits: model.vocab_size,
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
