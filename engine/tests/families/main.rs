//! Every family and format against `transformers`, on tiny checkpoints that `make_references.py` made together with
//! what is expected of them: logits and greedy tokens, whole and in chunks. And directories that are no checkpoints.
mod damaged;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use std::collections::BTreeMap;
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::{
    Batch, BatchItem, BlockPool, Choose, EngineError, Executor, KvDtype, SamplingParams, SimulatedConfig, Tokens,
};

/// Largest difference of a logit, as a share of the largest logit: f32 sums in another order.
const TOLERANCE: f32 = 2e-5;
/// Steps whose two best logits are closer are ties.
const TIE: f32 = 1e-3;
const BLOCKS: usize = 16;

#[derive(Deserialize)]
struct References {
    models: BTreeMap<String, Vec<Reference>>,
    /// Of the directories.
    digests: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Reference {
    ids: Vec<u32>,
    /// Of the last position.
    logits: Vec<f32>,
    /// Greedy continuation, and best minus second-best logit of each of its steps.
    tokens: Vec<u32>,
    gaps: Vec<f32>,
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families/data")
}

fn load(path: &Path) -> Result<CpuExecutor, EngineError> {
    let path = path.to_owned();
    let config = ModelConfig { path, kv_dtype: KvDtype::F32, blocks: BLOCKS, threads: 2, ..ModelConfig::default() };
    CpuExecutor::load(&config)
}

fn references() -> References {
    let text = std::fs::read(data().join("references.json")).expect("references.json");
    serde_json::from_slice(&text).expect("references")
}

/// Logits of the last of `ids`, fed in pieces of `chunk` tokens, and the greedy tokens after them.
fn generate(executor: &mut CpuExecutor, ids: &[u32], chunk: usize, steps: usize) -> (Vec<f32>, Vec<u32>) {
    let pool = BlockPool::new(BLOCKS, 16);
    let blocks = Arc::new(pool.try_reserve(pool.blocks_for(ids.len() + steps)).expect("room"));
    let sampling = Arc::new(SamplingParams::GREEDY);
    let mut step = |tokens: &[u32], start: usize| {
        let choose = Choose {
            sampling: Arc::clone(&sampling),
            uniform: 0.0,
            forbidden: None,
            history: None,
            drafts: Vec::new(),
        };
        let tokens = Tokens::Given(tokens.into());
        let item = BatchItem { seq: 1, tokens, start, blocks: Arc::clone(&blocks), choose: Some(choose) };
        executor.begin(&Batch { items: vec![item], report_layers: Vec::new() }).expect("a batch");
        executor.finish(&mut |_| {}).expect("a step");
        executor.logits().of(0).expect("wanted").to_vec()
    };
    let mut first = Vec::new();
    for (index, piece) in ids.chunks(chunk).enumerate() {
        first = step(piece, index * chunk);
    }
    let (mut tokens, mut logits) = (Vec::new(), first.clone());
    while tokens.len() < steps {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(id, _)| id as u32);
        tokens.extend(best);
        logits = step(&tokens[tokens.len() - 1..], ids.len() + tokens.len() - 1);
    }
    (first, tokens)
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    let references = references().models;
    assert_eq!(references.len(), 9);
    let mut problems = Vec::new();
    for (name, prompts) in &references {
        let mut executor = load(&data().join(name)).expect("loads");
        assert_eq!(executor.spec().eos_token_id, 2);
        let mut worst = 0.0f32;
        for want in prompts {
            for chunk in [want.ids.len(), 7, 16] {
                let (logits, tokens) = generate(&mut executor, &want.ids, chunk, want.tokens.len());
                let largest = want.logits.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let off = logits.iter().zip(&want.logits).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
                worst = worst.max(off / largest);
                let sure = want.gaps.iter().position(|&gap| gap < TIE).unwrap_or(tokens.len());
                if logits.len() != want.logits.len() || tokens[..sure] != want.tokens[..sure] {
                    let length = want.ids.len();
                    problems.push(format!("{name}, {length} tokens by {chunk}: {tokens:?}, not {:?}", want.tokens));
                }
            }
        }
        println!("{name}: logits off by {worst:.1e} of the largest");
        if worst > TOLERANCE {
            problems.push(format!("{name}: logits off by {worst:.1e}"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn a_gguf_file_and_a_directory_of_the_same_weights_differ_only_in_their_digest() {
    let (file, directory) = (load(&data().join("llama.gguf")), load(&data().join("llama")));
    let (file, directory) = (file.expect("loads"), directory.expect("loads"));
    let (file, directory) = (file.spec(), directory.spec());
    assert_ne!(file.model_digest, directory.model_digest);
    assert_ne!(file.compatibility_digest, directory.compatibility_digest);
    assert_eq!((file.block_bytes, file.vocab_size), (directory.block_bytes, directory.vocab_size));
    assert_eq!((file.model_name.as_str(), directory.model_name.as_str()), ("llama", "llama"));
}

#[test]
fn a_directorys_digest_is_the_one_that_the_router_finds() {
    let digests = references().digests;
    assert_eq!(digests.len(), 4);
    for (name, digest) in digests {
        assert_eq!(load(&data().join(&name)).expect("loads").spec().model_digest, digest, "{name}");
    }
}

#[test]
fn a_simulated_model_stands_in_for_a_directory() {
    let config = SimulatedConfig::in_place_of(&data().join("qwen3")).expect("reads");
    assert_eq!((config.vocab_size, config.eos_token_id, config.max_context_tokens), (320, 2, 512));
    assert_eq!(config.identity, load(&data().join("qwen3")).expect("loads").spec().model_digest);
}
