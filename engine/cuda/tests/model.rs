//! A model on a device against the same one on the processor in f32: every family and format of the engine's tiny
//! checkpoints. And what else a step must be: choices of drafts, samples, soundness, reports, refusals.
mod support;

use std::path::Path;
use std::sync::Arc;

use support::*;
use tandem_cuda::{CudaConfig, CudaLoader};
use tandem_engine::sampling::uniform;
use tandem_engine::{
    Arithmetic, Batch, BatchItem, BlockPool, Choose, Chosen, Draft, EngineError, Executor, KvDtype, KvOrder,
    SamplingParams, Tokens,
};

/// Largest difference of a logit, as a share of the largest logit: weights and inputs of products have 8 bits of
/// mantissa here, and two layers of random weights make the most of it.
const TOLERANCE: f32 = 5e-2;
/// Of the root of the mean square of all differences, as a share of that of the logits. The Mistral checkpoint comes
/// nearest, by 3.8e-2, as its weights are f16 and the others' bf16: the device rounds them. A plain reference with
/// weights and inputs of products rounded as here, and all sums in f64, is 3.4e-2 off; the weights alone make 2.5e-2.
const MEAN_TOLERANCE: f32 = 5e-2;
const FAMILIES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];
const FILES: [&str; 5] = ["llama.gguf", "mistral.gguf", "qwen2.gguf", "qwen3.gguf", "formats.gguf"];

fn root_mean_square(values: impl Iterator<Item = f32>) -> f32 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value * value, count + 1));
    (sum / count.max(1) as f32).sqrt()
}

#[test]
fn logits_of_every_family_are_those_of_the_processor() {
    if !device() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    wide(folder.path());
    let mut problems: Vec<String> = FAMILIES.iter().flat_map(|name| differences(name, &family(name), 32)).collect();
    // Chunks of up to 128 rows: products over several segments, side by side in blocks of their own.
    problems.extend(differences("wide", folder.path(), 128));
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn logits_of_every_gguf_file_are_those_of_the_processor() {
    if !device() {
        return;
    }
    let problems: Vec<String> = FILES.iter().flat_map(|name| differences(name, &family(name), 32)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Where the logits of a model on the device, in chunks of prompts and decode steps, are off by too much.
fn differences(name: &str, path: &Path, chunk: usize) -> Vec<String> {
    let (mut cuda, mut cpu) = (load(path), load_cpu(path));
    let (mut most, mut means, mut problems) = (0.0f32, Vec::new(), Vec::new());
    // Longer than windows and shorter.
    for length in [1, 16, 45, 83] {
        let mut mean = 0.0f32;
        let ids = prompt(length);
        let (logits, tokens) = generate(&mut cuda, &ids, chunk, 3);
        // The processor computes what the device chose, so that both have the same sequence before them.
        let (blocks, mut wanted) = (lease(&BlockPool::new(BLOCKS, 16), length + 3), Vec::new());
        wanted.push(prefill(&mut cpu, 1, &ids, 0, length, &blocks));
        for (step, token) in tokens.iter().enumerate() {
            wanted.push(prefill(&mut cpu, 1, &[*token], length + step, 1, &blocks));
        }
        for (got, want) in logits.iter().zip(&wanted) {
            let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let off = got.iter().zip(want).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
            let errors = root_mean_square(got.iter().zip(want).map(|(a, b)| a - b));
            most = most.max(off);
            mean = mean.max(errors / root_mean_square(want.iter().copied()));
            assert!(got.len() == want.len() && got.iter().all(|logit| logit.is_finite()), "{name}: {got:?}");
            if off > TOLERANCE {
                problems.push(format!("{name}, {length} tokens: off by {off:.1e} of the largest"));
            }
        }
        means.push(format!("{mean:.1e}"));
        if mean > MEAN_TOLERANCE {
            problems.push(format!("{name}, {length} tokens: off by {mean:.1e} in the mean"));
        }
    }
    println!("{name}: logits off by at most {most:.1e} of the largest; of their mean by {}", means.join(", "));
    problems
}

#[test]
fn the_spec_is_the_processors_but_for_what_the_device_computes() {
    if !device() {
        return;
    }
    let (cuda, cpu) = (load(&family("qwen3")), load_cpu(&family("qwen3")));
    let (cuda, cpu) = (cuda.spec().clone(), cpu.spec().clone());
    assert_eq!(
        (cuda.arithmetic, cuda.kv_order, cuda.kv_dtype),
        (Arithmetic::MmaK4096, KvOrder::Bf16Tokens, KvDtype::Bf16)
    );
    assert_eq!((cuda.model_digest, cuda.layers, cuda.total_blocks), (cpu.model_digest, cpu.layers, BLOCKS));
    assert_eq!(cuda.block_bytes * 2, cpu.block_bytes, "half of f32");
    assert_ne!(cuda.compatibility_digest, cpu.compatibility_digest);
}

#[test]
fn the_device_chooses_what_the_host_would() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let pool = BlockPool::new(BLOCKS, 16);
    let ids = prompt(21);
    let rules = |temperature, top_k, top_p, min_p, seed| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        ..SamplingParams::GREEDY
    };
    let all = [
        SamplingParams::GREEDY,
        rules(0.7, 0, 1.0, 0.0, 3),
        rules(1.0, 5, 1.0, 0.0, 4),
        rules(1.3, 0, 0.8, 0.0, 5),
        rules(1.5, 0, 1.0, 0.1, 6),
        rules(2.0, 40, 0.9, 0.02, 7),
    ];
    let mut answers: Vec<Vec<(u32, f32)>> = Vec::new();
    for top_logprobs in [0, 1] {
        let mut answer = Vec::new();
        for (seq, rules) in (0..).zip(&all) {
            let blocks = lease(&pool, 64);
            let sampling = Arc::new(SamplingParams { top_logprobs, ..rules.clone() });
            let mut tokens = Tokens::Given(ids.clone());
            for position in ids.len()..ids.len() + 8 {
                let start = position - tokens.len();
                let choose = Choose { uniform: uniform(rules.seed, position), ..choose(&sampling) };
                let chosen = run(&mut executor, vec![item(seq, tokens, start, &blocks, Some(choose))]).expect("a step");
                let [Chosen::Token(sampled)] = &chosen[..] else { panic!("{chosen:?}") };
                assert_eq!(sampled.top.len(), top_logprobs as usize);
                answer.push((sampled.token, sampled.logprob));
                tokens = Tokens::Last;
            }
            executor.forget(seq);
        }
        answers.push(answer);
    }
    let tokens = |answer: &[(u32, f32)]| answer.iter().map(|(token, _)| *token).collect::<Vec<_>>();
    assert_eq!(tokens(&answers[0]), tokens(&answers[1]));
    let off = answers[0].iter().zip(&answers[1]).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max);
    assert!(off < 1e-4, "log probabilities differ by {off}");
}

#[test]
fn rules_of_the_host_alone_are_kept() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let pool = BlockPool::new(BLOCKS, 16);
    let (blocks, ids) = (lease(&pool, 64), prompt(9));
    let free = run(&mut executor, vec![item(1, given(&ids), 0, &blocks, Some(choose(&greedy())))]).expect("a step");
    let likeliest = token(&free[0]);
    // The likeliest token is forbidden, or biased away.
    let forbidden = Choose { forbidden: Some(Arc::from([likeliest])), ..choose(&greedy()) };
    let biased = SamplingParams { logit_bias: vec![(likeliest, -100.0)], ..SamplingParams::GREEDY };
    let biased = choose(&Arc::new(biased));
    let mut others = Vec::new();
    for choose in [forbidden, biased] {
        let chosen = run(&mut executor, vec![item(1, given(&ids), 0, &blocks, Some(choose))]).expect("a step");
        others.push(token(&chosen[0]));
    }
    assert!(others[0] != likeliest && others[0] == others[1], "{others:?} instead of {likeliest}");
}

#[test]
fn drafts_are_chosen_behind_and_the_first_wrong_one_ends_them() {
    if !device() {
        return;
    }
    let mut executor = load(&family("mistral"));
    let ids = prompt(18);
    let (_, tokens) = generate(&mut executor, &ids, 18, 8);
    let pool = BlockPool::new(BLOCKS, 16);
    for sampling in [greedy(), on_host()] {
        for right in 0..=4 {
            let blocks = lease(&pool, 64);
            let first = run(&mut executor, vec![item(5, given(&ids), 0, &blocks, Some(choose(&sampling)))]);
            assert_eq!(token(&first.expect("a step")[0]), tokens[0]);
            let draft = |index: usize| Draft {
                token: if index < right { tokens[1 + index] } else { (tokens[1 + index] + 1) % 320 },
                uniform: 0.0,
                forbidden: None,
            };
            let with_drafts = Choose { drafts: (0..4).map(draft).collect(), ..choose(&sampling) };
            let step = item(5, Tokens::Last, ids.len(), &blocks, Some(with_drafts));
            let chosen = run(&mut executor, vec![step]).expect("a step");
            let [Chosen::Tokens(all)] = &chosen[..] else { panic!("{chosen:?}") };
            let all: Vec<u32> = all.iter().map(|sampled| sampled.token).collect();
            assert_eq!(all, tokens[1..2 + right], "{right} drafts are right");
            // The sequence goes on behind what was accepted.
            let start = ids.len() + 1 + right;
            let step = item(5, Tokens::Last, start, &blocks, Some(choose(&sampling)));
            assert_eq!(token(&run(&mut executor, vec![step]).expect("a step")[0]), tokens[2 + right]);
            executor.forget(5);
        }
    }
}

#[test]
fn broken_kv_is_no_token_and_others_do_not_see_it() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let pool = BlockPool::new(BLOCKS, 16);
    let (sound, broken, ids) = (lease(&pool, 32), lease(&pool, 32), prompt(16));
    for (seq, blocks) in [(1, &sound), (2, &broken)] {
        run(&mut executor, vec![item(seq, given(&ids), 0, blocks, None)]).expect("a step");
    }
    let block_bytes = executor.spec().block_bytes;
    executor.memory().write(broken.blocks()[0] as usize * block_bytes, &vec![0xff; block_bytes]);
    let next = |seq, blocks| item(seq, given(&[7]), 16, blocks, Some(choose(&greedy())));
    let chosen = run(&mut executor, vec![next(1, &sound), next(2, &broken)]).expect("a step");
    assert!(matches!(chosen[..], [Chosen::Token(_), Chosen::NotNumbers]), "{chosen:?}");
    // A chunk that chooses nothing is told, too; and the host's choices.
    let chunk = item(2, given(&[7, 8]), 16, &broken, None);
    assert_eq!(run(&mut executor, vec![chunk]).expect("a step"), [Chosen::NotNumbers]);
    let hosts = item(2, given(&[7]), 16, &broken, Some(choose(&on_host())));
    assert_eq!(run(&mut executor, vec![hosts]).expect("a step"), [Chosen::NotNumbers]);
    let last = item(2, Tokens::Last, 17, &broken, Some(choose(&greedy())));
    assert!(matches!(run(&mut executor, vec![last]), Err(EngineError::InvalidArgument(_))));
}

#[test]
fn layers_are_reported_that_somebody_waits_for() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let pool = BlockPool::new(BLOCKS, 16);
    let blocks = lease(&pool, 64);
    let mut told = |items: Vec<BatchItem>, report_layers: Vec<usize>| {
        let mut told = Vec::new();
        executor.begin(&Batch { items, report_layers }).expect("a batch");
        executor.finish(&mut |layers| told.push(layers)).expect("a step");
        told
    };
    let ids = prompt(33);
    assert_eq!(told(vec![item(1, given(&ids), 0, &blocks, None)], vec![1, 2]), [1, 2]);
    assert_eq!(told(vec![item(1, given(&ids), 0, &blocks, None)], vec![2]), [2]);
    // A prompt of which one token is left is a decode row.
    let one = item(1, given(&[4]), 33, &blocks, Some(choose(&greedy())));
    assert_eq!(told(vec![one], vec![1, 2]), [1, 2]);
}

#[test]
fn batches_that_cannot_be_are_refused_and_the_next_one_runs() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let pool = BlockPool::new(BLOCKS, 16);
    let blocks = lease(&pool, 512);
    let good = || item(1, given(&prompt(5)), 0, &blocks, Some(choose(&greedy())));
    let tokens = run(&mut executor, vec![good()]).expect("a step");
    let too_many = item(1, given(&prompt(200)), 0, &blocks, None);
    let unknown = item(1, given(&[9999]), 0, &blocks, None);
    let never = item(77, Tokens::Last, 5, &blocks, None);
    for wrong in [too_many, unknown, never] {
        let refused = run(&mut executor, vec![wrong]);
        assert!(matches!(refused, Err(EngineError::InvalidArgument(_))), "{refused:?}");
        assert!(matches!(executor.finish(&mut |_| {}), Err(EngineError::Executor(_))), "no step was begun");
        assert_eq!(run(&mut executor, vec![good()]).expect("a step"), tokens);
    }
}

#[test]
fn what_cannot_be_loaded_is_said_before_anything_is() {
    if !device() {
        return;
    }
    let good = config(&family("llama"));
    let open = |config: &CudaConfig| CudaLoader::open(config).map(drop).expect_err("refused").to_string();
    assert!(open(&CudaConfig { kv_dtype: KvDtype::Int8, ..good.clone() }).contains("bf16"));
    assert!(open(&CudaConfig { block_tokens: 24, ..good.clone() }).contains("blocks"));
    assert!(open(&CudaConfig { device: 9, ..good.clone() }).contains("no GPU 9"));
    let loader = CudaLoader::open(&good).expect("opens");
    let (left, block) = (loader.left_for_kv().expect("tells"), loader.block_bytes() as u64);
    let most = (left / block) as usize;
    // Other tests take and give back memory meanwhile.
    loader.check(most / 2).expect("fits");
    let why = loader.check(2 * most + 1).expect_err("too many blocks").to_string();
    for word in ["weights", "KV arena", "workspace", "free", "--kv-memory", "--max-num-seqs"] {
        assert!(why.contains(word), "{word}: {why}");
    }
    assert!(matches!(loader.load(usize::MAX), Err(EngineError::Model(_))));
}
