//! From an opened checkpoint to an executor: what the model takes is added up and compared with what the machine has
//! before any weight is read. The numbers are the matter of `footprint.rs` and of `models/sizes.rs`.
use tandem_proto::BLOCK_TOKENS;

use super::{CpuExecutor, Lend, ModelConfig, isa_of, spec_of};
use crate::chooser::{Chooser, Slots};
use crate::error::EngineError;
use crate::footprint::{Footprint, StepSize};
use crate::kv_memory::allocate_arena;
use crate::memory::MemoryFiles;
use crate::models::checkpoint::Checkpoint;
use crate::models::config::LlamaConfig;
use crate::models::llama::Llama;
use crate::models::sizes::weights_bytes;
use crate::ops::kv::{KvArena, KvLayout};
use crate::ops::lending::Lending;
use crate::ops::pool::Pool;
use crate::ops::simd::Isa;
use crate::step::Step;

/// A model whose files are open, and nothing of them but the headers is read.
pub struct ModelLoader {
    config: ModelConfig,
    checkpoint: Checkpoint,
    isa: Isa,
    layout: KvLayout,
}

impl ModelLoader {
    /// Opens the model's files; `blocks` of the configuration does not matter yet.
    ///
    /// # Errors
    /// `Model` when a file is missing, damaged or not servable; `InvalidArgument` for impossible sizes.
    pub fn open(config: &ModelConfig) -> Result<Self, EngineError> {
        if !BLOCK_TOKENS.contains(&config.block_tokens) || config.threads == 0 {
            let why = format!("blocks of {BLOCK_TOKENS:?} tokens and a thread at least, not {config:?}");
            return Err(EngineError::InvalidArgument(why));
        }
        let checkpoint = Checkpoint::open(&config.path)?;
        let isa = isa_of(config)?;
        let LlamaConfig { layers, kv_heads, head_dim, .. } = *checkpoint.config();
        let layout = KvLayout { layers, kv_heads, head_dim, dtype: config.kv_dtype, block_tokens: config.block_tokens };
        Ok(Self { config: config.clone(), checkpoint, isa, layout })
    }

    /// Bytes of a KV block.
    pub fn block_bytes(&self) -> usize {
        self.layout.block_bytes()
    }

    /// What the model takes beside its KV arena.
    pub fn footprint(&self) -> Footprint {
        let config = self.checkpoint.config();
        let LlamaConfig { hidden, feed_forward, vocab_size, .. } = *config;
        // The matrices of `llama.rs`: twice the residual stream, Q, K and V, what is attended, gate and up and the same
        // once more where these cannot be one product, what is activated.
        let values = 2 * hidden + config.qkv_width() + config.attended_width() + 4 * feed_forward;
        let step = StepSize {
            tokens: self.config.max_step_tokens as u64,
            sequences: self.config.max_running as u64,
            token_values: values as u64,
            vocabulary: vocab_size as u64,
        };
        Footprint::new(weights_bytes(&self.checkpoint.sizes(), self.isa), step)
    }

    /// Whether the machine can hold the model with an arena of `blocks`.
    ///
    /// # Errors
    /// `DoesNotFit`, with every number.
    pub fn check(&self, blocks: usize, machine: &MemoryFiles) -> Result<(), EngineError> {
        let kv = (self.block_bytes() as u64).saturating_mul(blocks as u64);
        self.footprint().check(kv, machine.available()).map_err(EngineError::DoesNotFit)
    }

    /// Reads the weights and allocates an arena of `blocks`, on a machine that has what `machine` says.
    ///
    /// # Errors
    /// `DoesNotFit` before anything is read; `Model` for a tensor that is missing, damaged or of no use;
    /// `InvalidArgument` for an arena that cannot be.
    pub fn load(self, blocks: usize, machine: &MemoryFiles) -> Result<CpuExecutor, EngineError> {
        if blocks == 0 {
            return Err(EngineError::InvalidArgument("a KV arena has one block at least".into()));
        }
        self.check(blocks, machine)?;
        let (footprint, mib) = (self.footprint(), |bytes: u64| bytes >> 20);
        tracing::info!(
            weights_mib = mib(footprint.weights),
            kv_mib = mib((self.block_bytes() * blocks) as u64),
            workspace_mib = mib(footprint.workspace),
            "the model fits into memory"
        );
        let Self { config, checkpoint, isa, layout } = self;
        let mut pool = pool_of(&config)?;
        let (weights, network) = (checkpoint.weights(), checkpoint.config().clone());
        let model = pool.install(|| Llama::load(weights, network, isa))?;
        let kv = KvArena::new(allocate_arena(blocks, layout.block_bytes())?, layout)
            .ok_or_else(|| EngineError::InvalidArgument(format!("no KV arena of {blocks} blocks of {layout:?}")))?;
        pool.install(|| kv.touch());
        let spec = spec_of(checkpoint.digest()?, model.config(), &kv, isa);
        tracing::info!(model = spec.model_name, isa = model.isa().name(), threads = config.threads, "model loaded");
        let (step, chooser, slots) = (Step::default(), Chooser::default(), Slots::default());
        Ok(CpuExecutor { spec, model, kv, pool, step, under_way: false, chooser, slots })
    }
}

fn pool_of(config: &ModelConfig) -> Result<Pool, EngineError> {
    let mut pool = Pool::new(config.threads, config.cpus.clone())
        .map_err(|error| EngineError::Executor(format!("cannot start compute threads: {error}")))?;
    if let Some(Lend { file, own }) = &config.lending {
        let lending = Lending::join(file, own).map_err(|error| {
            EngineError::InvalidArgument(format!("cores cannot be lent by {}: {error}", file.display()))
        })?;
        pool.share_cores(lending);
    }
    Ok(pool)
}
