//! The engine over a device: the same answers as the steps alone, many sequences beside each other, prompts in chunks,
//! prefixes from the cache, drafts that are guessed.
mod support;

use std::sync::Arc;
use std::time::Duration;

use support::*;
use tandem_engine::{Engine, Executor, Prefix, SchedulerConfig, SequenceEvent, Speculate};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

/// Gaps between the two best logits in which rounding to bf16 may choose either.
const TIE: f32 = 0.15;

async fn answer(engine: &Engine, tokens: Vec<u32>, max_new_tokens: u32) -> Vec<u32> {
    let (pool, spec) = (engine.pool(), engine.spec());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), &tokens, spec.block_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: tokens.len() };
    let blocks = pool.blocks_for(tokens.len() + max_new_tokens as usize);
    let lease = pool.reserve_prefix(blocks, prefix).await.expect("room");
    let request = request(Arc::new(lease), tokens, max_new_tokens);
    let (mut stream, mut answer) = (engine.submit(request).expect("valid"), Vec::new());
    loop {
        let event = tokio::time::timeout(Duration::from_secs(120), stream.next()).await.expect("hangs");
        match event.expect("an end") {
            SequenceEvent::Token { id, .. } => answer.push(id),
            SequenceEvent::Finished { .. } => return answer,
            SequenceEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_answers_as_its_steps_do() {
    if !device() {
        return;
    }
    let path = family("qwen3.gguf");
    let prompts: Vec<Vec<u32>> = [5, 17, 40, 83].map(prompt).to_vec();
    let mut executor = load(&path);
    let wanted: Vec<Vec<u32>> = prompts.iter().map(|ids| generate(&mut executor, ids, ids.len(), 8).1).collect();
    for speculate in [Speculate::Off, Speculate::Ngram] {
        let limits =
            SchedulerConfig { max_running: 8, max_step_tokens: 24, inbox: 16, prefix_caching: true, speculate };
        let engine = Engine::start(Box::new(load(&path)), limits);
        engine.warm_up(24).await.expect("warm");
        for round in ["cold", "with prefixes in the cache"] {
            let answers = prompts.iter().map(|ids| {
                let (engine, ids) = (engine.clone(), ids.clone());
                tokio::spawn(async move { answer(&engine, ids, 8).await })
            });
            let answers: Vec<_> = answers.collect();
            for (got, want) in answers.into_iter().zip(&wanted) {
                assert_eq!(&got.await.expect("no panic"), want, "{round}, {speculate:?}");
            }
        }
        assert_eq!(engine.stopped(), None);
        engine.shutdown();
    }
}

/// Greedy answers are those of the processor wherever it is sure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_answers_as_the_processor_where_that_is_sure() {
    if !device() {
        return;
    }
    let path = family("llama.gguf");
    let mut cpu = load_cpu(&path);
    let limits = SchedulerConfig {
        max_running: 8,
        max_step_tokens: 64,
        inbox: 16,
        prefix_caching: true,
        speculate: Speculate::Off,
    };
    let engine = Engine::start(Box::new(load(&path)), limits);
    let (mut equal, mut all) = (0, 0);
    for length in (1..64).step_by(5) {
        let ids = prompt(length);
        let (logits, want) = generate(&mut cpu, &ids, length, 4);
        let unsure = logits.iter().position(|logits| gap(logits) < TIE);
        let sure = unsure.unwrap_or(want.len()).min(want.len());
        let got = answer(&engine, ids, 4).await;
        assert_eq!(got[..sure], want[..sure], "{length} tokens");
        (equal, all) = (equal + sure, all + want.len());
    }
    println!("{equal} of {all} tokens before the first near-tie of each prompt");
    assert!(equal >= 20, "only {equal} of {all} tokens compared");
    assert_eq!(Executor::spec(&cpu).vocab_size, engine.spec().vocab_size);
}

/// Best minus second-best.
fn gap(logits: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; 2];
    for &logit in logits {
        if logit > best[0] {
            best = [logit, best[0]];
        } else if logit > best[1] {
            best[1] = logit;
        }
    }
    best[0] - best[1]
}
