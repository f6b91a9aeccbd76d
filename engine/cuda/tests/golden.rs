//! Greedy tokens of SmolLM2 on a device against an independent engine's, as `engine/tests/golden.rs`. Under emulation a
//! step takes half a second and a prompt many: it runs when `TANDEM_GPU_GOLDEN` says of how many prompts, and how many
//! tokens each.
mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use support::*;
use tandem_cuda::{CudaConfig, CudaLoader};
use tandem_engine::{BatchItem, BlockPool, Executor, Tokens};

const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// Gaps between the two best logits in which rounding to bf16 may choose either: weights are rounded, too.
const TIE: f32 = 0.1;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    ids: Vec<u32>,
    out: Outputs,
}

#[derive(Deserialize)]
struct Outputs {
    f32: Output,
}

#[derive(Deserialize)]
struct Output {
    tokens: Vec<u32>,
    gap: Vec<f32>,
}

/// `prompts,tokens`: the first so many prompts by their length, so many tokens of each.
#[allow(clippy::disallowed_methods, reason = "a test has no command line to take it from")]
fn wanted() -> Option<(usize, usize)> {
    let text = std::env::var("TANDEM_GPU_GOLDEN").ok()?;
    let (prompts, tokens) = text.split_once(',').expect("TANDEM_GPU_GOLDEN=prompts,tokens");
    Some((prompts.parse().expect("a number of prompts"), tokens.parse().expect("a number of tokens")))
}

#[allow(clippy::disallowed_methods, reason = "a test has no command line to take the path from")]
fn model() -> PathBuf {
    let cache = std::env::var("TANDEM_CACHE").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var("HOME").unwrap_or_default()).join(".cache/tandem");
    let path = cache.unwrap_or_else(|_| home()).join(FILE);
    assert!(path.is_file(), "the model {} is missing: run `make setup`", path.display());
    path
}

#[test]
fn the_oracles_tokens() {
    let Some((prompts, tokens)) = wanted() else {
        eprintln!("SKIP: takes minutes under emulation; set TANDEM_GPU_GOLDEN=14,64 to run all");
        return;
    };
    if !device() {
        return;
    }
    let text = include_str!("../../tests/data/smollm2-135m-golden.json");
    let mut golden: Golden = serde_json::from_str(text).expect("golden file");
    golden.prompts.sort_by_key(|prompt| prompt.ids.len());
    golden.prompts.truncate(prompts);
    let config = CudaConfig { max_step_tokens: 2048, max_running: 16, ..config(&model()) };
    let mut executor = CudaLoader::open(&config).and_then(|loader| loader.load(256)).expect("loads");
    // A few at a time: the batch is part of what is tested.
    for prompts in golden.prompts.chunks(4) {
        let (began, pool) = (Instant::now(), BlockPool::new(256, 16));
        let first = |(seq, prompt): (u64, &Prompt)| {
            let blocks = lease(&pool, prompt.ids.len() + tokens);
            item(seq, given(&prompt.ids), 0, &blocks, Some(choose(&greedy())))
        };
        let mut items: Vec<BatchItem> = (0..).zip(prompts).map(first).collect();
        let mut results: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
        let eos = executor.spec().eos_token_id;
        while !items.is_empty() {
            let chosen = run(&mut executor, items.clone()).expect("a step");
            let mut next = Vec::new();
            for (item, chosen) in items.into_iter().zip(&chosen) {
                let (end, result) = (item.end(), &mut results[item.seq as usize]);
                result.push(token(chosen));
                if token(chosen) != eos && result.len() < tokens {
                    let blocks = Arc::clone(&item.blocks);
                    next.push(BatchItem { tokens: Tokens::Last, start: end, blocks, ..item });
                }
            }
            items = next;
        }
        for (prompt, got) in prompts.iter().zip(&results) {
            let Output { tokens: want, gap } = &prompt.out.f32;
            let equal = got.iter().zip(want).take_while(|(got, want)| got == want).count();
            let then = gap.get(equal).map_or("all".into(), |gap| format!("then a gap of {gap:.3}"));
            println!("{:<24} {equal:>2} of {} tokens equal, {then}", prompt.name, got.len());
            let sure = gap.iter().position(|&gap| gap < TIE).unwrap_or(want.len()).min(got.len()).min(want.len());
            assert_eq!(got[..sure], want[..sure], "{}", prompt.name);
        }
        println!("{} prompts in {:.0} s", prompts.len(), began.elapsed().as_secs_f64());
    }
}
