//! How many sequences run on a given KV memory, and how many answers come of it, when a node reserves the worst case
//! (prompt + `max_tokens`) and when it reserves the prompt and lets the answer grow. Row C of the benchmark (long
//! decode): prompts of 16 to 64 tokens, answers of 192 to 320, `max_tokens` 2,048. The scheduler, pool and worker are
//! the product's; steps take the time of a law, in tokio's paused clock, so that a run depends on its seed alone.
//!
//! `cargo run --release -p tandem-engine --example growing_leases`
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::{
    Engine, EngineError, Prefix, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, SimulatedConfig,
    SimulatedExecutor, Speculate,
};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, timeout_at};

const MAX_TOKENS: u32 = 2048;
/// Callers, each with one request at a time.
const CALLERS: u64 = 64;
const RUN: Duration = Duration::from_secs(120);
const TTFT: Duration = Duration::from_millis(1000);
const TPOT: Duration = Duration::from_millis(50);

#[derive(Clone, Copy)]
enum Reserve {
    WorstCase,
    Prompt,
}

#[derive(Default)]
struct Seen {
    answers: Cell<u32>,
    good: Cell<u32>,
    tokens: Cell<u64>,
}

fn main() -> Result<(), EngineError> {
    println!("| KV blocks | reserved | running, mean | answers/s | within objectives/s | tokens/s | preemptions |");
    println!("|---|---|---|---|---|---|---|");
    for blocks in [256, 512, 1024, 2048] {
        for (name, reserve) in [("prompt + max_tokens", Reserve::WorstCase), ("prompt", Reserve::Prompt)] {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            let runtime = runtime.map_err(|error| EngineError::Stopped(error.to_string()))?;
            let row = LocalSet::new().block_on(&runtime, run(blocks, reserve))?;
            println!("| {blocks} | {name} | {row} |");
        }
    }
    Ok(())
}

async fn run(blocks: usize, reserve: Reserve) -> Result<String, EngineError> {
    let config = SimulatedConfig {
        step_delay: Duration::from_millis(5),
        token_delay: Duration::from_micros(230),
        context_delay: Duration::from_nanos(200),
        block_bytes: 16 * 8,
        layers: 1,
        blocks,
        ..SimulatedConfig::default()
    };
    let law = config.clone();
    // Its arena never waits: the time of a step is the law's, in the paused clock.
    let zero = Duration::ZERO;
    let config = SimulatedConfig { step_delay: zero, token_delay: zero, context_delay: zero, ..config };
    let limits = SchedulerConfig {
        max_running: 64,
        max_step_tokens: 512,
        inbox: 256,
        prefix_caching: true,
        speculate: Speculate::Off,
    };
    let (engine, stepper) =
        Engine::stepped(Box::new(SimulatedExecutor::new(&config)?), limits, move |shape| law.step_time(shape));
    let worker = tokio::task::spawn_local(stepper.run());
    let (seen, end) = (Rc::new(Seen::default()), Instant::now() + RUN);
    for caller in 0..CALLERS {
        let (engine, seen) = (engine.clone(), Rc::clone(&seen));
        tokio::task::spawn_local(timeout_at(end, async move {
            let mut rng = StdRng::seed_from_u64(caller);
            while ask(&engine, reserve, &mut rng, &seen).await.is_ok() {}
        }));
    }
    let (mut running, mut looks) = (0, 0);
    while Instant::now() < end {
        sleep(Duration::from_millis(50)).await;
        running += engine.load().running;
        looks += 1;
    }
    let (seconds, preemptions) = (RUN.as_secs_f64(), engine.load().preemptions);
    let rate = |count: u32| f64::from(count) / seconds;
    let row = format!(
        "{:.1} | {:.2} | {:.2} | {:.0} | {preemptions}",
        running as f64 / f64::from(looks),
        rate(seen.answers.get()),
        rate(seen.good.get()),
        seen.tokens.get() as f64 / seconds,
    );
    drop(engine);
    worker.abort();
    Ok(row)
}

/// One answer; the caller leaves after its tokens, as a router does at the end of a text.
async fn ask(engine: &Engine, reserve: Reserve, rng: &mut StdRng, seen: &Seen) -> Result<(), EngineError> {
    let prompt: Vec<u32> = (0..rng.random_range(16..=64)).map(|_| rng.random_range(3..1000)).collect();
    let (answer, begun) = (rng.random_range(192..=320), Instant::now());
    let (pool, spec) = (engine.pool(), engine.spec());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), &prompt, spec.block_tokens);
    let new_tokens = match reserve {
        Reserve::WorstCase => MAX_TOKENS,
        Reserve::Prompt => 2,
    };
    let kv_tokens = SequenceRequest::kv_tokens(prompt.len(), new_tokens, spec.max_context_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: prompt.len() };
    let lease = pool.reserve_prefix(pool.blocks_for(kv_tokens), prefix).await?;
    let mut stream = engine.submit(SequenceRequest {
        id: String::new(),
        prompt_len: prompt.len(),
        tokens: prompt,
        computed: lease.cached_tokens(),
        lease: Arc::new(lease),
        max_new_tokens: MAX_TOKENS,
        sampling: Arc::new(SamplingParams::GREEDY),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    })?;
    let (mut count, mut first) = (0, None);
    while let Some(event) = stream.next().await {
        if let SequenceEvent::Failed(error) = event {
            return Err(error);
        }
        count += u32::from(matches!(event, SequenceEvent::Token { .. }));
        first = first.or_else(|| (count == 1).then(Instant::now));
        if count == answer {
            break;
        }
    }
    let (first, now) = (first.unwrap_or(begun), Instant::now());
    let good = first - begun <= TTFT && (now - first) / count.saturating_sub(1).max(1) <= TPOT;
    seen.answers.set(seen.answers.get() + 1);
    seen.good.set(seen.good.get() + u32::from(good));
    seen.tokens.set(seen.tokens.get() + u64::from(count));
    Ok(())
}
