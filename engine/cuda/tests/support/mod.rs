//! What tests of the device share: a device or a reason to skip, tiny models, and driving an executor step by step.
#![allow(dead_code, reason = "each test program uses a part of it")]
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tandem_cuda::{CudaConfig, CudaExecutor, CudaLoader};
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::ArithmeticChoice;
use tandem_engine::{
    Batch, BatchItem, BlockPool, Choose, Chosen, EngineError, Executor, KvDtype, KvLease, Logits, SamplingParams, Seq,
    Tokens,
};

/// Blocks of the tests' arenas.
pub const BLOCKS: usize = 96;
/// Token ids of the families' checkpoints.
pub const VOCABULARY: usize = 320;

pub use tandem_cuda_emu::device;

/// Whether the device is the emulated one, which takes orders and counts.
pub fn emulated() -> bool {
    tandem_cuda_emu::count(tandem_cuda_emu::Count::Launches).is_some()
}

/// A tiny checkpoint of the engine's own tests.
pub fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/families/data").join(name)
}

/// The usual configuration for a model; nothing is kept between tests.
pub fn config(path: &Path) -> CudaConfig {
    CudaConfig { path: path.into(), max_step_tokens: 128, max_running: 40, kernel_cache: None, ..CudaConfig::default() }
}

pub fn load(path: &Path) -> CudaExecutor {
    CudaLoader::open(&config(path)).and_then(|loader| loader.load(BLOCKS)).expect("loads")
}

/// The same model on the processor, in f32 throughout.
pub fn load_cpu(path: &Path) -> CpuExecutor {
    let config = ModelConfig {
        path: path.into(),
        kv_dtype: KvDtype::F32,
        arithmetic: ArithmeticChoice::F32,
        blocks: BLOCKS,
        ..ModelConfig::default()
    };
    CpuExecutor::load(&config).expect("loads")
}

/// An executor whose logits can be looked at.
pub trait Computes: Executor {
    fn logits_of_last(&self) -> &Logits;
}

impl Computes for CudaExecutor {
    fn logits_of_last(&self) -> &Logits {
        self.logits()
    }
}

impl Computes for CpuExecutor {
    fn logits_of_last(&self) -> &Logits {
        self.logits()
    }
}

/// Runs one step.
pub fn run(executor: &mut dyn Executor, items: Vec<BatchItem>) -> Result<Vec<Chosen>, EngineError> {
    executor.begin(&Batch { items, report_layers: Vec::new() })?;
    executor.finish(&mut |_| {}).map(<[_]>::to_vec)
}

/// Rules under which the host chooses the likeliest token, so that the row's logits are there to look at.
pub fn on_host() -> Arc<SamplingParams> {
    Arc::new(SamplingParams { top_logprobs: 1, ..SamplingParams::GREEDY })
}

/// Rules under which the device does.
pub fn greedy() -> Arc<SamplingParams> {
    Arc::new(SamplingParams::GREEDY)
}

pub fn choose(sampling: &Arc<SamplingParams>) -> Choose {
    Choose { sampling: Arc::clone(sampling), uniform: 0.0, forbidden: None, history: None, drafts: Vec::new() }
}

pub fn item(seq: Seq, tokens: Tokens, start: usize, blocks: &Arc<KvLease>, choose: Option<Choose>) -> BatchItem {
    BatchItem { seq, tokens, start, blocks: Arc::clone(blocks), choose }
}

pub fn given(tokens: &[u32]) -> Tokens {
    Tokens::Given(tokens.into())
}

pub fn lease(pool: &BlockPool, tokens: usize) -> Arc<KvLease> {
    Arc::new(pool.try_reserve(pool.blocks_for(tokens)).expect("room"))
}

/// A prompt that no other length begins with.
pub fn prompt(length: usize) -> Vec<u32> {
    (0..length).map(|i| ((7 + i * 31 + i * i * 5 + length) % (VOCABULARY - 3) + 3) as u32).collect()
}

/// The token of a step's item.
pub fn token(chosen: &Chosen) -> u32 {
    match chosen {
        Chosen::Token(sampled) => sampled.token,
        other => panic!("{other:?}"),
    }
}

/// Logits of the last of `tokens`, which are computed in pieces of up to `chunk`; only the last piece chooses.
pub fn prefill(
    executor: &mut dyn Computes,
    seq: Seq,
    tokens: &[u32],
    start: usize,
    chunk: usize,
    blocks: &Arc<KvLease>,
) -> Vec<f32> {
    let pieces = tokens.chunks(chunk).count();
    for (index, piece) in tokens.chunks(chunk).enumerate() {
        let rules = (index + 1 == pieces).then(|| choose(&on_host()));
        run(executor, vec![item(seq, given(piece), start + index * chunk, blocks, rules)]).expect("a step");
    }
    executor.logits_of_last().of(0).expect("wanted").to_vec()
}

/// Logits after `tokens`, and after each of the `steps` likeliest tokens that follow; and these.
pub fn generate(executor: &mut dyn Computes, tokens: &[u32], chunk: usize, steps: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let pool = BlockPool::new(BLOCKS, executor.spec().block_tokens);
    let blocks = lease(&pool, tokens.len() + steps);
    let mut logits = vec![prefill(executor, 1, tokens, 0, chunk, &blocks)];
    let mut chosen = Vec::new();
    for step in 0..steps {
        chosen.push(likeliest(&logits[step]));
        let one = item(1, given(&chosen[step..]), tokens.len() + step, &blocks, Some(choose(&on_host())));
        run(executor, vec![one]).expect("a step");
        logits.push(executor.logits_of_last().of(0).expect("wanted").to_vec());
    }
    executor.forget(1);
    (logits, chosen)
}

/// The first of the greatest.
pub fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold(
        (0, f32::NEG_INFINITY),
        |best, (id, &logit)| {
            if logit > best.1 { (id, logit) } else { best }
        },
    );
    best.0 as u32
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}
