//! [`Executor`] on the processor, of a real model: [`crate::models`] reads its files, the kernels of [`crate::ops`]
//! compute, [`Chooser`] chooses. It owns the threads that do so. `loader.rs` makes it.
mod loader;

use std::path::PathBuf;
use std::sync::Arc;

use tandem_memory::KvMemory;
use tandem_proto::DEFAULT_BLOCK_TOKENS;

use crate::chooser::{Chooser, Last, Slots};
use crate::error::EngineError;
use crate::executor::{Batch, Chosen, EngineSpec, Executor, LayersDone, Seq};
use crate::logits::Logits;
use crate::memory::MemoryFiles;
use crate::models::config::LlamaConfig;
use crate::models::llama::Llama;
use crate::numerics::KvDtype;
use crate::ops::choice;
use crate::ops::kv::KvArena;
use crate::ops::pool::Pool;
use crate::ops::simd::{ArithmeticChoice, Isa, IsaChoice};
use crate::step::{Chunk, Step};

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
    /// Whether cores are lent to other nodes of this machine, and borrowed.
    pub lending: Option<Lend>,
    /// Which kernels.
    pub isa: IsaChoice,
    /// In which numbers they compute.
    pub arithmetic: ArithmeticChoice,
}

/// Cores to lend, see [`crate::ops::lending`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lend {
    /// The file that these nodes share.
    pub file: PathBuf,
    /// Cores that are this node's, one number each.
    pub own: Vec<usize>,
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
            lending: None,
            isa: IsaChoice::Auto,
            arithmetic: ArithmeticChoice::Auto,
        }
    }
}

/// A Llama model, its KV arena and its threads.
pub struct CpuExecutor {
    spec: EngineSpec,
    model: Llama,
    kv: KvArena,
    pool: Pool,
    /// Of the step under way, or the last one.
    step: Step,
    under_way: bool,
    chooser: Chooser,
    slots: Slots,
}

impl CpuExecutor {
    /// Loads the model and allocates the arena.
    ///
    /// # Errors
    /// `Model` when the file is missing, damaged or not servable; `DoesNotFit` when it takes more memory than there is;
    /// `InvalidArgument` for impossible sizes.
    pub fn load(config: &ModelConfig) -> Result<Self, EngineError> {
        ModelLoader::open(config)?.load(config.blocks, &MemoryFiles::default())
    }

    /// The logits of the last step's items that chose.
    pub fn logits(&self) -> &Logits {
        self.chooser.logits()
    }

    /// Sequences for which something is kept.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }
}

impl Executor for CpuExecutor {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.kv.memory()
    }

    /// Checks the batch; the threads compute in `finish`, whose caller has nothing better to do with its core.
    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let Self { spec, step, under_way, chooser, slots, .. } = self;
        *under_way = false;
        chooser.begin(batch, slots)?;
        step.lay_out(batch, spec, |item| chooser.last(item).and_then(Last::known))?;
        *under_way = true;
        Ok(())
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let Self { spec, model, kv, pool, step, under_way, chooser, slots } = self;
        if !std::mem::take(under_way) {
            return Err(EngineError::Executor("no step was begun".into()));
        }
        pool.install(|| {
            let report = &mut |layers| {
                if step.reports(layers) {
                    layers_done(layers);
                }
            };
            model.forward(kv, step, chooser.rows(spec.vocab_size), report);
            chooser.choose(slots, |item, behind| {
                let chunk = step.chunks[item];
                model.is_sound(&Chunk { rows: chunk.rows - behind, ..chunk })
            });
        });
        Ok(chooser.chosen())
    }

    fn rest(&mut self) {
        self.pool.rest();
    }

    fn lent_share(&mut self) -> f64 {
        self.pool.lent_share()
    }

    fn forget(&mut self, seq: Seq) {
        self.slots.forget(seq);
    }
}

fn isa_of(config: &ModelConfig) -> Result<Isa, EngineError> {
    choice::choose(config.isa, config.arithmetic, config.kv_dtype).map_err(EngineError::InvalidArgument)
}

fn spec_of(model_digest: u64, model: &LlamaConfig, kv: &KvArena, isa: Isa) -> EngineSpec {
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
        kv_order: layout.order(),
        arithmetic: isa.arithmetic(),
        layers: layout.layers,
        kv_heads: layout.kv_heads,
        head_dim: layout.head_dim,
    }
    .sealed()
}
