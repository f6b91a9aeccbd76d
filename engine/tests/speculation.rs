//! Lossless speculation over a real, if tiny, model on the CPU's kernels: answers are token for token what they are
//! without, greedy and sampled, with penalties, ends, log probabilities, 8-bit KV, and in batches of any size.
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::ArithmeticChoice;
use tandem_engine::{
    Batch, Chosen, Drafts, Engine, EngineError, EngineSpec, Executor, FinishReason, KvDtype, LayersDone, Prefix,
    SamplingParams, SchedulerConfig, Seq, SequenceEvent, SequenceRequest, Speculate, TokenLogprob,
};
use tandem_memory::KvMemory;
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

const BLOCKS: usize = 512;
/// Of each kind of kernels.
const REQUESTS: usize = 250;
const STEP: Duration = Duration::from_micros(300);

/// What an engine computes with.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    arithmetic: ArithmeticChoice,
    kv_dtype: KvDtype,
}

fn engine(kernels: Kernels, max_running: usize, speculate: Speculate) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families/data/llama");
    let Kernels { arithmetic, kv_dtype } = kernels;
    let config = ModelConfig { path, kv_dtype, arithmetic, blocks: BLOCKS, threads: 2, ..ModelConfig::default() };
    let executor = CpuExecutor::load(&config).expect("the checkpoint of the families' test");
    let limits = SchedulerConfig { max_running, max_step_tokens: 96, inbox: REQUESTS, prefix_caching: true, speculate };
    Engine::start(Box::new(Unhurried(executor)), limits)
}

/// Takes some time for every step, whatever is in it, as reading the weights of a larger model does: then drafts are
/// worth their rows.
struct Unhurried(CpuExecutor);

impl Executor for Unhurried {
    fn spec(&self) -> &EngineSpec {
        self.0.spec()
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.0.memory()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.0.begin(batch)
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let begin = Instant::now();
        while begin.elapsed() < STEP {
            std::hint::spin_loop();
        }
        self.0.finish(layers_done)
    }

    fn forget(&mut self, seq: Seq) {
        self.0.forget(seq);
    }
}

struct Job {
    prompt: Vec<u32>,
    max_new_tokens: u32,
    sampling: Arc<SamplingParams>,
    ignore_eos: bool,
    stop_token_ids: Vec<u32>,
}

/// A prompt that repeats itself, and rules of every kind.
fn job(rng: &mut StdRng, vocabulary: u32) -> Job {
    let phrase: Vec<u32> = (0..rng.random_range(2..12)).map(|_| rng.random_range(3..vocabulary)).collect();
    let mut prompt: Vec<u32> = phrase.iter().copied().cycle().take(rng.random_range(1..60)).collect();
    prompt.extend((0..rng.random_range(0..4)).map(|_| rng.random_range(3..vocabulary)));
    prompt.extend(&phrase[..phrase.len() / 2]);
    let penalized = rng.random_bool(0.25);
    let sampling = SamplingParams {
        temperature: [0.0, 0.0, 0.2, 1.0][rng.random_range(0..4)],
        top_p: if rng.random_bool(0.3) { 0.8 } else { 1.0 },
        top_k: if rng.random_bool(0.3) { 5 } else { 0 },
        repetition_penalty: if penalized { 1.1 } else { 1.0 },
        frequency_penalty: if penalized { 0.2 } else { 0.0 },
        // Some answers say one token again and again.
        logit_bias: if rng.random_bool(0.3) { vec![(phrase[0], 6.0)] } else { Vec::new() },
        min_tokens: rng.random_range(0..20),
        top_logprobs: rng.random_range(0..3),
        seed: rng.random(),
        ..SamplingParams::GREEDY
    };
    Job {
        prompt,
        max_new_tokens: rng.random_range(1..48),
        sampling: Arc::new(sampling),
        ignore_eos: rng.random_bool(0.3),
        stop_token_ids: if rng.random_bool(0.4) { phrase[1..].to_vec() } else { Vec::new() },
    }
}

/// Ids, log probabilities to the bit, the likeliest tokens, and why it ended.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<(u32, u32, Vec<TokenLogprob>)>,
    reason: FinishReason,
}

async fn answer(engine: &Engine, job: &Job) -> (Answer, Drafts) {
    let (spec, pool) = (engine.spec(), engine.pool());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), &job.prompt, spec.block_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: job.prompt.len() };
    let lease = pool.reserve_prefix(pool.blocks_for(job.prompt.len() + 1), prefix).await.expect("room");
    let request = SequenceRequest {
        id: "test".into(),
        tokens: job.prompt.clone(),
        prompt_len: job.prompt.len(),
        computed: lease.cached_tokens(),
        lease: Arc::new(lease),
        max_new_tokens: job.max_new_tokens,
        sampling: Arc::clone(&job.sampling),
        ignore_eos: job.ignore_eos,
        stop_token_ids: job.stop_token_ids.clone(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    };
    let mut stream = engine.submit(request).expect("a valid request");
    let (mut tokens, mut all) = (Vec::new(), Drafts::default());
    loop {
        match stream.next().await.expect("an end") {
            SequenceEvent::Token { id, logprob, top, drafts, .. } => {
                tokens.push((id, logprob.to_bits(), top));
                all += drafts;
            }
            SequenceEvent::Finished { reason, .. } => return (Answer { tokens, reason }, all),
            SequenceEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

/// All of them, `together` at once.
async fn answers(engine: &Engine, jobs: &Arc<Vec<Job>>, together: usize) -> (Vec<Answer>, Drafts) {
    let readers: Vec<_> = (0..together)
        .map(|first| {
            let (engine, jobs) = (engine.clone(), Arc::clone(jobs));
            tokio::spawn(async move {
                let mut own = Vec::new();
                for index in (first..jobs.len()).step_by(together) {
                    own.push((index, answer(&engine, &jobs[index]).await));
                }
                own
            })
        })
        .collect();
    let (mut all, mut sum) = (Vec::new(), Drafts::default());
    for reader in readers {
        all.extend(reader.await.expect("no panic"));
    }
    all.sort_by_key(|(index, _)| *index);
    let answers = all.into_iter().map(|(_, (answer, drafts))| {
        sum += drafts;
        answer
    });
    (answers.collect(), sum)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_answers_are_equal_with_and_without_drafts() {
    let (f32, auto) = (ArithmeticChoice::F32, ArithmeticChoice::Auto);
    let all = [(f32, KvDtype::F32), (f32, KvDtype::Int8), (auto, KvDtype::Bf16), (auto, KvDtype::Int8)];
    for (seed, (arithmetic, kv_dtype)) in (0..).zip(all) {
        let kernels = Kernels { arithmetic, kv_dtype };
        let (plain, guessing) = (engine(kernels, 32, Speculate::Off), engine(kernels, 8, Speculate::Ngram));
        let mut rng = StdRng::seed_from_u64(seed);
        let vocabulary = plain.spec().vocab_size as u32;
        let jobs: Arc<Vec<Job>> = Arc::new((0..REQUESTS).map(|_| job(&mut rng, vocabulary)).collect());
        let (want, none) = answers(&plain, &jobs, 32).await;
        assert_eq!(none, Drafts::default());
        for together in [2, 8] {
            let (got, drafts) = answers(&guessing, &jobs, together).await;
            for (index, (want, got)) in want.iter().zip(&got).enumerate() {
                assert_eq!(got, want, "{kernels:?}, request {index} of {together} at once");
            }
            println!("{kernels:?}, {together} at once: {drafts:?}");
            assert!(drafts.accepted > 100 && drafts.drafted > drafts.accepted, "{drafts:?}");
        }
        let stopped = want.iter().filter(|answer| answer.reason == FinishReason::Stop).count();
        assert!((20..REQUESTS - 20).contains(&stopped), "{stopped} answers end by a token");
    }
}
