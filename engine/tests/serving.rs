//! The engine over the real model: a warm prefix cache gives the oracle's tokens, and, as benchmarks, what the cache
//! saves and how well step times are predicted. The golden tokens themselves are `golden.rs`'s matter.
mod smollm2;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::ArithmeticChoice;
use tandem_engine::{
    Batch, Chosen, Engine, EngineError, EngineSpec, Executor, KvDtype, LayersDone, Prefix, SamplingParams,
    SchedulerConfig, Seq, SequenceEvent, SequenceRequest, SequenceStream, Speculate, StepModel, StepShape,
};
use tandem_memory::KvMemory;
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

const LIMITS: SchedulerConfig = SchedulerConfig {
    max_running: 32,
    max_step_tokens: 256,
    inbox: 64,
    prefix_caching: true,
    speculate: Speculate::Off,
};

/// What must not change a token: how a prompt is cut, how many run at once, what is cached.
struct Way {
    kernels: Kernels,
    chunk: usize,
    batch: usize,
}

/// Number formats, and the tie of the oracle's logits below which they may choose another token.
#[derive(Clone, Copy, Debug)]
enum Kernels {
    ExactF32Kv,
    ExactBf16Kv,
    /// The default. On machines without bf16 dot products the same as `ExactBf16Kv`.
    Bf16,
}

impl Kernels {
    fn executor(self) -> CpuExecutor {
        let kv_dtype = if matches!(self, Self::ExactF32Kv) { KvDtype::F32 } else { KvDtype::Bf16 };
        let arithmetic = if matches!(self, Self::Bf16) { ArithmeticChoice::Auto } else { ArithmeticChoice::F32 };
        smollm2::executor(ModelConfig { kv_dtype, blocks: 1024, threads: 2, arithmetic, ..ModelConfig::default() })
    }

    fn tie(self) -> f32 {
        if matches!(self, Self::ExactF32Kv) { 0.02 } else { 0.05 }
    }
}

#[tokio::test]
async fn small_chunks_a_batch_of_32_and_a_warm_prefix_give_the_oracles_tokens() {
    gives_the_oracles_tokens(Way { kernels: Kernels::ExactBf16Kv, chunk: 16, batch: 32 }).await;
}

#[tokio::test]
#[ignore = "takes minutes; run with --release -- --ignored --nocapture"]
async fn every_chunk_size_batch_and_cache_gives_the_oracles_tokens() {
    for kernels in [Kernels::ExactF32Kv, Kernels::ExactBf16Kv, Kernels::Bf16] {
        for chunk in [16, 128, 512, 8192] {
            for batch in [1, 32] {
                let begin = Instant::now();
                let reused = gives_the_oracles_tokens(Way { kernels, chunk, batch }).await;
                let seconds = begin.elapsed().as_secs();
                println!(
                    "{kernels:?}, chunks of {chunk}, batch {batch}: cold equal, warm equal ({reused} tokens cached), {seconds} s"
                );
            }
        }
    }
}

/// All prompts cold, then again with what the first round left in the cache. Returns how many tokens that were.
async fn gives_the_oracles_tokens(Way { kernels, chunk, batch }: Way) -> usize {
    let limits = SchedulerConfig { max_running: batch, max_step_tokens: chunk.max(batch), ..LIMITS };
    let engine = Engine::start(Box::new(kernels.executor()), limits);
    let golden = smollm2::golden();
    let mut reused = 0;
    for warm in [false, true] {
        let mut streams = Vec::new();
        // More than 32, so that a batch of 32 is one.
        for prompt in golden.prompts.iter().cycle().take(if batch == 1 { 14 } else { 35 }) {
            let (request, cached) = request(&engine, &prompt.ids, prompt.out.f32.tokens.len() as u32).await;
            reused += if warm { cached } else { 0 };
            streams.push((prompt, cached, engine.submit(request).expect("a valid request")));
        }
        for (prompt, cached, stream) in streams {
            let (want, tokens) = (&prompt.out.f32, collect(stream).await.0);
            let sure = want.sure(kernels.tie());
            let name = &prompt.name;
            assert_eq!(&tokens[..sure.len()], sure, "{name} {kernels:?} {chunk} {batch} warm {warm}, {cached} cached");
        }
    }
    assert!(reused > 200, "{reused} tokens came from the cache");
    reused
}

#[tokio::test]
#[ignore = "a benchmark; run with --release -- --ignored --nocapture"]
async fn warm_ttft() {
    let engine = Engine::start(Box::new(executor(1024, 2)), SchedulerConfig { max_step_tokens: 512, ..LIMITS });
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..7u32 {
        let shared: Vec<u32> = (0..922).map(|i| 1000 + (i * 37 + round * 5003) % 40_000).collect();
        for (own, times) in [(1, &mut cold), (2, &mut warm)] {
            let tokens: Vec<u32> = shared.iter().copied().chain((0..102).map(|i| 500 + i * 11 + own)).collect();
            let begin = Instant::now();
            let (request, cached) = request(&engine, &tokens, 1).await;
            collect(engine.submit(request).expect("a valid request")).await;
            times.push(begin.elapsed());
            assert_eq!(cached, if own == 1 { 0 } else { 912 });
        }
    }
    let (cold, warm) = (median(&mut cold), median(&mut warm));
    println!(
        "TTFT of 1,024 tokens, 90 % shared: cold {cold:?}, warm {warm:?}, {:.3}",
        warm.as_secs_f64() / cold.as_secs_f64()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "a benchmark; run with --release -- --ignored --nocapture"]
async fn step_time_model() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let under_way = (StepShape::default(), false, Instant::now());
    let executor = Timed { inner: executor(2048, 1), model: StepModel::default(), log: Arc::clone(&log), under_way };
    let engine = Engine::start(Box::new(executor), LIMITS);
    let mut rng = StdRng::seed_from_u64(4);
    let (begin, mut running) = (Instant::now(), tokio::task::JoinSet::new());
    while begin.elapsed() < Duration::from_secs(60) {
        let (len, new) = (rng.random_range(8..700), rng.random_range(4..120));
        let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(100..40_000)).collect();
        let (request, _) = request(&engine, &tokens, new).await;
        running.spawn(collect(engine.submit(request).expect("a valid request")));
        // One to eight at a time, so that batches of all sizes are seen.
        let most = 1 + (begin.elapsed().as_secs() / 3) as usize % 8;
        while running.len() >= most {
            running.join_next().await;
        }
    }
    drop(running);
    let (steps, cost) = (log.lock().expect("the log"), engine.load().step_cost);
    println!("{} steps, {cost:?}", steps.len());
    let parts = |step: &Step| (step.shape, step.ms);
    println!("some of them: {:?}", steps.iter().step_by(steps.len() / 24 + 1).map(parts).collect::<Vec<_>>());
    let warm = &steps[steps.len() / 10..];
    report("all", warm.iter());
    report("decode only", warm.iter().filter(|step| !step.prefill));
    report("with a prompt", warm.iter().filter(|step| step.prefill));
}

fn report<'a>(which: &str, steps: impl Iterator<Item = &'a Step>) {
    let mut errors: Vec<f64> = steps.map(|step| (step.predicted_ms / step.ms - 1.0).abs()).collect();
    errors.sort_unstable_by(f64::total_cmp);
    if let (Some(median), Some(p90)) = (errors.get(errors.len() / 2), errors.get(errors.len() * 9 / 10)) {
        let (median, p90) = (median * 100.0, p90 * 100.0);
        println!("{which}: {} steps, median error {median:.1} %, p90 {p90:.1} %", errors.len());
    }
}

struct Step {
    shape: StepShape,
    prefill: bool,
    ms: f64,
    /// Before the step was known.
    predicted_ms: f64,
}

/// Does what the engine thread does with its step model, and writes it down.
struct Timed {
    inner: CpuExecutor,
    model: StepModel,
    log: Arc<Mutex<Vec<Step>>>,
    /// The step's shape, whether prompts are in it, and when it began.
    under_way: (StepShape, bool, Instant),
}

impl Executor for Timed {
    fn spec(&self) -> &EngineSpec {
        self.inner.spec()
    }

    fn memory(&self) -> Arc<dyn KvMemory> {
        self.inner.memory()
    }

    fn begin(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let prefill = batch.items.iter().any(|item| item.tokens.len() > 1);
        self.under_way = (StepShape::of(batch), prefill, Instant::now());
        self.inner.begin(batch)
    }

    fn finish(&mut self, layers_done: &mut LayersDone<'_>) -> Result<&[Chosen], EngineError> {
        let (shape, prefill, begin) = self.under_way;
        let outcome = self.inner.finish(layers_done);
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        let predicted_ms = self.model.cost().predict_ms(shape);
        self.model.observe(shape, ms);
        self.log.lock().expect("the log").push(Step { shape, prefill, ms, predicted_ms });
        outcome
    }

    fn forget(&mut self, seq: Seq) {
        self.inner.forget(seq);
    }
}

async fn request(engine: &Engine, tokens: &[u32], max_new_tokens: u32) -> (SequenceRequest, usize) {
    let (spec, pool) = (engine.spec(), engine.pool());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), tokens, spec.block_tokens);
    let blocks = pool.blocks_for(SequenceRequest::kv_tokens(tokens.len(), max_new_tokens, spec.max_context_tokens));
    let lease = pool
        .reserve_prefix(blocks, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: tokens.len() })
        .await
        .expect("fits");
    let cached = lease.cached_tokens();
    let request = SequenceRequest {
        id: "test".into(),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len(),
        computed: cached,
        lease: Arc::new(lease),
        max_new_tokens,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: false,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    };
    (request, cached)
}

async fn collect(mut stream: SequenceStream) -> (Vec<u32>, SequenceEvent) {
    let mut tokens = Vec::new();
    loop {
        match stream.next().await.expect("an end") {
            SequenceEvent::Token { id, .. } => tokens.push(id),
            event if event.is_last() => return (tokens, event),
            _ => {}
        }
    }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn executor(blocks: usize, threads: usize) -> CpuExecutor {
    smollm2::executor(ModelConfig { kv_dtype: KvDtype::Bf16, blocks, threads, ..ModelConfig::default() })
}
