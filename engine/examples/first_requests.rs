//! What an engine predicts of its first prompts, beside what they take:
//! `cargo run --release --example first_requests -p tandem-engine -- MODEL.gguf [threads]`. One line for each prompt,
//! in the order in which they run after the warm-up.
use std::sync::Arc;
use std::time::Instant;

use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::{Engine, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, Speculate, StepShape};

/// Prompts as clients have them; each below the 512 tokens of a step.
const PROMPTS: [usize; 12] = [64, 200, 32, 400, 120, 300, 64, 200, 32, 400, 120, 300];
const STEP_TOKENS: usize = 512;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which model?")?.into();
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let config = ModelConfig { path, threads, blocks: 1024, ..ModelConfig::default() };
    let limits = SchedulerConfig {
        max_running: 64,
        max_step_tokens: STEP_TOKENS,
        inbox: 64,
        prefix_caching: false,
        speculate: Speculate::Off,
    };
    let engine = Engine::start(Box::new(CpuExecutor::load(&config)?), limits);
    let begun = Instant::now();
    engine.warm_up(STEP_TOKENS).await?;
    println!("warm after {:.0} ms: {:?}", begun.elapsed().as_secs_f64() * 1e3, engine.load().step_cost);
    println!("{:>8} {:>12} {:>12} {:>8}", "tokens", "predicted ms", "measured ms", "off by");
    let mut ratios = Vec::new();
    for (index, tokens) in PROMPTS.into_iter().enumerate() {
        let shape = StepShape::prompt(0, tokens);
        let predicted_ms = engine.load().step_cost.predict_ms(shape);
        let measured_ms = first_token_ms(&engine, index, tokens).await?;
        let ratio = predicted_ms / measured_ms;
        println!("{tokens:>8} {predicted_ms:>12.1} {measured_ms:>12.1} {:>+7.0}%", (ratio - 1.0) * 100.0);
        ratios.push(ratio);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    println!("median {:+.0}%", (ratios[ratios.len() / 2] - 1.0) * 100.0);
    Ok(())
}

async fn first_token_ms(engine: &Engine, index: usize, tokens: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let vocabulary = engine.spec().vocab_size;
    let prompt: Vec<u32> = (0..tokens).map(|i| ((i * 7919 + index * 31) % vocabulary) as u32).collect();
    let lease = Arc::new(engine.pool().try_reserve(engine.pool().blocks_for(tokens + 8))?);
    let begun = Instant::now();
    let mut stream = engine.submit(SequenceRequest {
        id: format!("prompt {index}"),
        prompt_len: tokens,
        tokens: prompt,
        computed: 0,
        lease,
        max_new_tokens: 8,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    })?;
    let mut first_ms = None;
    while let Some(event) = stream.next().await {
        match event {
            SequenceEvent::Token { .. } => {
                first_ms.get_or_insert(begun.elapsed().as_secs_f64() * 1e3);
            }
            SequenceEvent::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    first_ms.ok_or_else(|| "no token".into())
}
