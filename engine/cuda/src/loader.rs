//! From a model's files and a device to an executor. What the model takes is added up and compared with what the card
//! has free before a weight is read; the error says every number. As `cpu/loader.rs` of the engine.
use std::path::PathBuf;
use std::sync::Arc;

use tandem_engine::models::checkpoint::Checkpoint;
use tandem_engine::models::config::LlamaConfig;
use tandem_engine::{Arithmetic, EngineError, EngineSpec, KvDtype, KvOrder};
use tandem_proto::{BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS};

use crate::buffer::Buffer;
use crate::compile;
use crate::context::Context;
use crate::cublaslt::{self, Lt, cublaslt_version};
use crate::device::Device;
use crate::error::{CudaError, gib};
use crate::executor::CudaExecutor;
use crate::kernels::choose::MOST_TOKENS;
use crate::loaded::Kernels;
use crate::memory::CudaMemory;
use crate::network::Network;
use crate::plan::WeightPlan;
use crate::queue::{MOST_SPARE, rows_with_spare};
use crate::weights;
use crate::workspace::{StepLimits, WorkspacePlan};

/// Of what is free, one part in so many stays so, for images, graphs and the driver, but not more than [`MOST_KEPT`].
const KEPT_PART: u64 = 32;
const MOST_KEPT: u64 = 1 << 30;
/// Block tables on the device at least: a warm-up has a few sequences, whatever may run.
const LEAST_TABLES: usize = 64;

/// What to load, and for which steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// A GGUF file or a safetensors directory.
    pub path: PathBuf,
    /// Number of the device, after `CUDA_VISIBLE_DEVICES`.
    pub device: u32,
    /// Number format of the KV arena; only bf16 is known.
    pub kv_dtype: KvDtype,
    /// Tokens of a block: one of [`BLOCK_TOKENS`].
    pub block_tokens: usize,
    /// Tokens of a step at most, drafts counted.
    pub max_step_tokens: usize,
    /// Sequences that run side by side at most.
    pub max_running: usize,
    /// Where compiled kernels are.
    pub kernels: compile::Folders,
    /// Products of many rows are cuBLASLt's where it is on the machine. Our own kernels give the same bits.
    pub library: bool,
}

impl Default for CudaConfig {
    /// No file: what must be said. For the rest the usual.
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            device: 0,
            kv_dtype: KvDtype::Bf16,
            block_tokens: DEFAULT_BLOCK_TOKENS,
            max_step_tokens: 512,
            max_running: 64,
            kernels: compile::Folders::of_environment(),
            library: true,
        }
    }
}

/// A model whose files are open, and a device; nothing of the one but the headers is read, nothing on the other is
/// allocated.
pub struct CudaLoader {
    config: CudaConfig,
    checkpoint: Checkpoint,
    context: Arc<Context>,
    limits: StepLimits,
    plan: WeightPlan,
    work: WorkspacePlan,
}

impl CudaLoader {
    /// Opens the model's files and the device.
    ///
    /// # Errors
    /// `Model` when a file is missing, damaged or not servable, or there is no such device; `InvalidArgument` for
    /// impossible sizes.
    pub fn open(config: &CudaConfig) -> Result<Self, EngineError> {
        let CudaConfig { kv_dtype, block_tokens, max_step_tokens, max_running, .. } = *config;
        if !BLOCK_TOKENS.contains(&block_tokens) || max_step_tokens == 0 || max_running == 0 {
            let why = format!("blocks of {BLOCK_TOKENS:?} tokens, and steps of a token at least, not {config:?}");
            return Err(EngineError::InvalidArgument(why));
        }
        if kv_dtype != KvDtype::Bf16 {
            let why = format!("on a GPU there is no {} KV, only bf16 (--kv-dtype bf16)", kv_dtype.name());
            return Err(EngineError::InvalidArgument(why));
        }
        let checkpoint = Checkpoint::open(&config.path)?;
        check_shapes(checkpoint.config())?;
        let device = Device::numbered(config.device).map_err(cannot)?;
        let context = Context::of(&device).map_err(cannot)?;
        let positions = checkpoint.config().max_context_tokens;
        let limits = StepLimits {
            rows: rows_with_spare(max_step_tokens),
            tables: max_running.max(LEAST_TABLES),
            table_blocks: positions.div_ceil(block_tokens),
            positions,
            multiprocessors: device.multiprocessors as usize,
            library: config.library && cublaslt_version().is_ok(),
        };
        let plan = WeightPlan::new(checkpoint.config(), positions);
        let work = WorkspacePlan::new(checkpoint.config(), &limits);
        Ok(Self { config: config.clone(), checkpoint, context, limits, plan, work })
    }

    /// The card.
    pub fn device(&self) -> &Device {
        self.context.device()
    }

    /// Bytes of a KV block.
    pub fn block_bytes(&self) -> usize {
        let LlamaConfig { layers, kv_heads, head_dim, .. } = *self.checkpoint.config();
        2 * layers * kv_heads * self.config.block_tokens * KvDtype::Bf16.head_bytes(head_dim)
    }

    /// Bytes of the card that weights and workspace leave for a KV arena, of what is free now.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn left_for_kv(&self) -> Result<u64, EngineError> {
        let (free, _) = self.context.memory().map_err(cannot)?;
        let taken = self.beside_blocks();
        Ok(usable(free).saturating_sub(taken))
    }

    /// Whether the card can hold the model with an arena of `blocks`.
    ///
    /// # Errors
    /// `Model`, with every number.
    pub fn check(&self, blocks: usize) -> Result<(), EngineError> {
        let (free, total) = self.context.memory().map_err(cannot)?;
        let kv = (self.block_bytes() as u64).saturating_mul(blocks as u64);
        if self.beside_blocks().saturating_add(kv) <= usable(free) {
            return Ok(());
        }
        let (weights, workspace) = (gib(self.plan.bytes as u64), gib(self.work.bytes as u64 + self.spare_bytes()));
        Err(EngineError::Model(format!(
            "it does not fit into {}: weights {weights} (2 bytes each, whatever the file has), KV arena {}, workspace \
             {workspace}; of {} free (of {}) {} may be filled. Choose a smaller KV arena (--kv-memory, --kv-blocks), \
             fewer sequences and tokens in a step (--max-num-seqs, --max-num-batched-tokens), or another GPU (--device)",
            self.device(),
            gib(kv),
            gib(free),
            gib(total),
            gib(usable(free)),
        )))
    }

    /// Compiles the kernels, reads the weights, allocates an arena of `blocks` and records the decode steps.
    ///
    /// # Errors
    /// `Model` before anything is read where it does not fit; for a tensor that is missing, damaged or of no use; for
    /// kernels that cannot be compiled. What the device answers.
    pub fn load(self, blocks: usize) -> Result<CudaExecutor, EngineError> {
        if blocks == 0 {
            return Err(EngineError::InvalidArgument("a KV arena has one block at least".into()));
        }
        self.check(blocks)?;
        let (block_bytes, spare) = (self.block_bytes(), self.spare_bytes() as usize);
        let Self { config, checkpoint, context, limits, plan, work } = self;
        let (mib, network) = (|bytes: usize| bytes as u64 >> 20, checkpoint.config().clone());
        tracing::info!(
            device = %context.device(),
            weights_mib = mib(plan.bytes),
            kv_mib = mib(blocks * block_bytes),
            workspace_mib = mib(work.bytes),
            "the model fits into the GPU"
        );
        context.bind().map_err(cannot)?;
        let kernels = Kernels::load(&context, &config.kernels).map_err(cannot)?;
        let library = if limits.library { Lt::open(&context).map_err(cannot)? } else { None };
        let weights =
            weights::load(&context, checkpoint.weights(), &network, &plan, limits.positions).map_err(at_load)?;
        let memory = CudaMemory::new(&context, &kernels, blocks * block_bytes, spare).map_err(cannot)?;
        let workspace = Buffer::zeroed(&context, "the workspace of a step", work.bytes).map_err(cannot)?;
        let spec = spec_of(checkpoint.digest()?, &network, &config, block_bytes, blocks);
        let block_tokens = config.block_tokens;
        let network =
            Network { config: network, limits, kernels, library, weights, plan, memory, block_tokens, workspace, work };
        let executor = CudaExecutor::new(&context, spec, network).map_err(cannot)?;
        tracing::info!(model = executor_name(&executor), device = %context.device(), "model loaded");
        Ok(executor)
    }

    /// Weights, workspace, and the blocks of spare rows.
    fn beside_blocks(&self) -> u64 {
        let library = if self.limits.library { cublaslt::WORKSPACE_BYTES as u64 } else { 0 };
        let planned = (self.plan.bytes as u64).saturating_add(self.work.bytes as u64);
        planned.saturating_add(self.spare_bytes()).saturating_add(library)
    }

    fn spare_bytes(&self) -> u64 {
        (MOST_SPARE.div_ceil(self.config.block_tokens) * self.block_bytes()) as u64
    }
}

fn executor_name(executor: &CudaExecutor) -> &str {
    &tandem_engine::Executor::spec(executor).model_name
}

/// What of `free` bytes may be filled.
fn usable(free: u64) -> u64 {
    free - (free / KEPT_PART).min(MOST_KEPT)
}

/// Whatever keeps a model from being loaded; a lost device stays one.
fn cannot(error: CudaError) -> EngineError {
    match error {
        CudaError::Lost { .. } => error.into(),
        other => EngineError::Model(other.to_string()),
    }
}

/// What the device answered while weights were read is about the model, too.
fn at_load(error: EngineError) -> EngineError {
    match error {
        EngineError::Executor(why) => EngineError::Model(why),
        other => other,
    }
}

/// Whether there are kernels for a model of these sizes.
fn check_shapes(config: &LlamaConfig) -> Result<(), EngineError> {
    let &LlamaConfig { hidden, feed_forward, heads, kv_heads, head_dim, vocab_size, .. } = config;
    let refused = |why: String| Err(EngineError::Model(format!("{why}: no GPU kernel computes that")));
    if ![16, 32, 64, 96, 128].contains(&head_dim) {
        return refused(format!("heads of {head_dim} values"));
    }
    if heads / kv_heads > 16 {
        return refused(format!("{heads} query heads on {kv_heads} of K and V"));
    }
    if let Some(k) = [hidden, feed_forward, heads * head_dim].into_iter().find(|k| !k.is_multiple_of(32)) {
        return refused(format!("rows of {k} values"));
    }
    if !vocab_size.is_multiple_of(2) || vocab_size > MOST_TOKENS {
        return refused(format!("a vocabulary of {vocab_size} tokens"));
    }
    Ok(())
}

fn spec_of(
    model_digest: u64,
    model: &LlamaConfig,
    config: &CudaConfig,
    block_bytes: usize,
    total_blocks: usize,
) -> EngineSpec {
    EngineSpec {
        model_name: model.name.clone(),
        model_digest,
        compatibility_digest: 0,
        vocab_size: model.vocab_size,
        eos_token_id: model.eos_token_id,
        max_context_tokens: model.max_context_tokens,
        block_tokens: config.block_tokens,
        block_bytes,
        total_blocks,
        kv_dtype: KvDtype::Bf16,
        kv_order: KvOrder::Bf16Tokens,
        arithmetic: Arithmetic::MmaK4096,
        layers: model.layers,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
    }
    .sealed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_little_stays_free() {
        assert_eq!(usable(32 << 20), 31 << 20);
        assert_eq!(usable(80 << 30), (80 << 30) - MOST_KEPT);
    }
}
