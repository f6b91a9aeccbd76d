//! What tests of the device share: a device or a reason to skip, tiny models, and driving an executor step by step.
#![allow(dead_code, reason = "each test program uses a part of it")]
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};
use tandem_cuda::compile::Folders;
use tandem_cuda::{CudaConfig, CudaExecutor, CudaLoader};
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::ArithmeticChoice;
use tandem_engine::{
    Batch, BatchItem, BlockPool, Choose, Chosen, EngineError, Executor, KvDtype, KvLease, Logits, SamplingParams, Seq,
    SequenceRequest, Tokens,
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

/// Runs an ignored test in a process of its own, with this in its environment: for what is decided once, is for good,
/// or is disturbed by other tests of the process. What it printed; `None` without an emulated device.
pub fn in_child(name: &str, environment: (&str, &str)) -> Option<String> {
    if !device() || !emulated() {
        return None;
    }
    let mut child = Command::new(std::env::current_exe().expect("a path"));
    child.args([name, "--exact", "--ignored", "--nocapture"]).env(environment.0, environment.1);
    let output = child.output().expect("runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{name} {environment:?}: {said}");
    Some(said)
}

/// A tiny checkpoint of the engine's own tests.
pub fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/families/data").join(name)
}

/// The usual configuration for a model; nothing is kept between tests.
pub fn config(path: &Path) -> CudaConfig {
    CudaConfig {
        path: path.into(),
        max_step_tokens: 128,
        max_running: 40,
        kernels: Folders::default(),
        ..CudaConfig::default()
    }
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

/// Width of the hidden rows of [`wide`]: two segments of a product's `k`, the last a part.
pub const WIDE: usize = 4096 + 64;

/// Copies the checkpoint `from` with another configuration, but not its weights.
fn configured(from: &Path, to: &Path, change: impl FnOnce(&mut Value)) -> Value {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if !name.contains("safetensors") {
            std::fs::copy(&path, to.join(name)).expect("copied");
        }
    }
    let file = to.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&file).expect("a configuration")).expect("JSON");
    change(&mut config);
    std::fs::write(&file, config.to_string()).expect("written");
    config
}

/// The checkpoint `from` once more, for sequences of `context` tokens.
pub fn longer(from: &Path, to: &Path, context: usize) {
    configured(from, to, |config| config["max_position_embeddings"] = context.into());
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if name.contains("safetensors") {
            std::fs::copy(&path, to.join(name)).expect("copied");
        }
    }
}

/// A checkpoint of the shape of the family's llama with random weights, but with rows as wide as those of real models,
/// in one layer: products over several segments. That of the head is one of them: its sums are the logits. Others are
/// rounded to bf16 before they come so far, which hides nearly every other order of additions.
pub fn wide(to: &Path) {
    let config = configured(&family("llama"), to, |config| {
        config["hidden_size"] = WIDE.into();
        config["num_hidden_layers"] = 1.into();
    });
    let size = |name: &str| config[name].as_u64().expect("a number") as usize;
    let (hidden, heads, vocabulary) = (size("hidden_size"), size("head_dim"), size("vocab_size"));
    let between = size("intermediate_size");
    let (q, kv) = (size("num_attention_heads") * heads, size("num_key_value_heads") * heads);
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![vocabulary, hidden]),
        ("lm_head.weight".into(), vec![vocabulary, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    let layer = [
        ("input_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![q, hidden]),
        ("self_attn.k_proj", vec![kv, hidden]),
        ("self_attn.v_proj", vec![kv, hidden]),
        ("self_attn.o_proj", vec![hidden, q]),
        ("post_attention_layernorm", vec![hidden]),
        ("mlp.gate_proj", vec![between, hidden]),
        ("mlp.up_proj", vec![between, hidden]),
        ("mlp.down_proj", vec![hidden, between]),
    ];
    tensors.extend(layer.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape)));
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let (begin, count) = (bytes.len(), shape.iter().product::<usize>());
        for index in 0..count {
            let word = xxhash_rust::xxh3::xxh3_64(format!("{name} {index}").as_bytes());
            let share = (word >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            // A sum over `k` of them has about the size of one of its factors.
            let value = shape.get(1).map_or(1.0 + share / 4.0, |&k| share * (3.0 / k as f32).sqrt() * 1.5);
            bytes.extend(half::bf16::from_f32(value).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, bytes.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(to.join("model.safetensors"), file).expect("written");
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

/// What an engine is asked for: greedy, to its full length.
pub fn request(lease: Arc<KvLease>, tokens: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: "test".into(),
        prompt_len: tokens.len(),
        tokens,
        computed: lease.cached_tokens(),
        lease,
        max_new_tokens,
        sampling: greedy(),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    }
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
