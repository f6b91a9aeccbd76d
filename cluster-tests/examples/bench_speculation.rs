//! What prompt lookup gains, and what it costs where there is nothing to gain: one engine with it and one without, in
//! turns, over the same requests. Rows are a kind of prompt and a batch. `summarize` asks for a summary of a part of
//! `--text`, `copy` for the part itself, `tell` for a tale about a few of its words. Answers are greedy and must be
//! equal. Alone, a few requests follow each other, and answers end where the model ends them; of a batch all have
//! `--new-tokens`. Prints the time from the first token to the last, medians of `--rounds`, and what came of drafts.
//!
//! `cargo run --release -p tandem-cluster-tests --example bench_speculation -- --model FILE`
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use futures::future::try_join_all;
use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::{
    Drafts, Engine, KvDtype, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, SequenceStream, Speculate,
};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::v1::ChatMessage;
use tandem_proto::{CacheSalt, SequenceKey};
use tandem_router::text::ModelText;

#[derive(Parser)]
struct Args {
    /// A GGUF file
    #[arg(long)]
    model: PathBuf,
    /// What prompts are made of
    #[arg(long, default_value = "LICENSE")]
    text: PathBuf,
    /// Kinds of prompts with the requests of a batch
    #[arg(long, value_delimiter = ',', default_value = "summarize1,copy1,tell1,summarize4,summarize32,tell32")]
    rows: Vec<String>,
    /// Characters of the text in a prompt
    #[arg(long, default_value_t = 2000)]
    characters: usize,
    /// Tokens of an answer
    #[arg(long, default_value_t = 96)]
    new_tokens: u32,
    /// Turns of both engines
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Threads that compute
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// Requests of a row in which each is alone.
const ALONE: usize = 6;

/// A row of the table.
struct Row {
    kind: String,
    batch: usize,
}

impl Row {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let digits = text.find(|c: char| c.is_ascii_digit()).context("a row is a kind and a batch, such as copy1")?;
        let (kind, batch) = text.split_at(digits);
        ensure!(["summarize", "copy", "tell"].contains(&kind), "no kind of prompt {kind:?}");
        Ok(Self { kind: kind.into(), batch: batch.parse()? })
    }

    /// Each request of a row is about another part of the text.
    fn prompts(&self, args: &Args, text: &str, model: &ModelText) -> anyhow::Result<Vec<Vec<u32>>> {
        let characters: Vec<char> = text.chars().collect();
        let part = |request: usize| -> String {
            let from = request * 977 % characters.len().saturating_sub(args.characters).max(1);
            characters.iter().skip(from).take(args.characters).collect()
        };
        let asked = |request: usize| match self.kind.as_str() {
            "summarize" => format!("Summarize the following text, quoting its sentences.\n\n{}", part(request)),
            "copy" => format!("Repeat the following text word for word.\n\n{}", part(request)),
            _ => {
                let words: Vec<String> = part(request).split_whitespace().take(6).map(str::to_owned).collect();
                format!("Tell a long and surprising tale about: {}.", words.join(" "))
            }
        };
        let chat = |request| vec![ChatMessage { role: "user".into(), content: asked(request) }];
        (0..self.batch.max(ALONE)).map(|request| Ok(model.encode_chat(&chat(request))?)).collect()
    }
}

#[derive(Default)]
struct Outcome {
    /// Of each round.
    took: Vec<Duration>,
    steps: usize,
    drafts: Drafts,
    answers: Vec<Vec<u32>>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let rows: Vec<Row> = args.rows.iter().map(|row| Row::parse(row)).collect::<anyhow::Result<_>>()?;
    let text = std::fs::read_to_string(&args.text).with_context(|| args.text.display().to_string())?;
    let model = ModelText::load(&args.model)?;
    let engines = [start(&args, Speculate::Off).await?, start(&args, Speculate::Ngram).await?];
    println!("row              off ms/token  ngram ms/token   speed-up   drafted  accepted");
    for row in &rows {
        let prompts = row.prompts(&args, &text, &model)?;
        let mut outcomes = [Outcome::default(), Outcome::default()];
        for round in 0..=args.rounds {
            // A B, B A: whoever is second in a turn is first in the next one.
            for turn in 0..2 {
                let which = (round + turn) % 2;
                let outcome = &mut outcomes[which];
                let mut took = Duration::ZERO;
                (outcome.drafts, outcome.answers, outcome.steps) = (Drafts::default(), Vec::new(), 0);
                for together in prompts.chunks(row.batch) {
                    let (time, drafts, answers) = run(&engines[which], together, args.new_tokens).await?;
                    took += time;
                    outcome.drafts += drafts;
                    outcome.steps += answers.iter().map(|answer| answer.len() - 1).max().unwrap_or(0);
                    outcome.answers.extend(answers);
                }
                // The first turn brings the prompts into the cache.
                outcome.took.extend((round > 0).then_some(took));
            }
        }
        let [off, ngram] = &mut outcomes;
        ensure!(off.answers == ngram.answers, "{}{}: the answers differ", row.kind, row.batch);
        let per_token = |outcome: &mut Outcome| {
            outcome.took.sort_unstable();
            outcome.took[outcome.took.len() / 2].as_secs_f64() * 1e3 / outcome.steps.max(1) as f64
        };
        let (plain, guessing) = (per_token(off), per_token(ngram));
        let (name, Drafts { drafted, accepted }) = (format!("{}{}", row.kind, row.batch), ngram.drafts);
        let speed_up = plain / guessing;
        println!("{name:<16} {plain:>12.3} {guessing:>15.3} {speed_up:>9.3}x {drafted:>9} {accepted:>9}");
    }
    Ok(())
}

async fn start(args: &Args, speculate: Speculate) -> anyhow::Result<Engine> {
    let config = ModelConfig {
        path: args.model.clone(),
        kv_dtype: KvDtype::Bf16,
        blocks: 4096,
        threads: args.threads,
        ..ModelConfig::default()
    };
    let limits = SchedulerConfig { max_running: 64, max_step_tokens: 512, inbox: 256, prefix_caching: true, speculate };
    let engine = Engine::start(Box::new(CpuExecutor::load(&config)?), limits);
    engine.warm_up(limits.max_step_tokens).await?;
    Ok(engine)
}

/// All prompts at once: the time from the moment when all have their first token, what was drafted, and the answers.
async fn run(engine: &Engine, prompts: &[Vec<u32>], new: u32) -> anyhow::Result<(Duration, Drafts, Vec<Vec<u32>>)> {
    let mut streams = Vec::new();
    for prompt in prompts {
        streams.push(submit(engine, prompt, new, prompts.len() > 1).await?);
    }
    let all = try_join_all(streams.into_iter().map(read)).await?;
    let begin = all.iter().map(|(times, ..)| times[0]).max().context("no prompts")?;
    let end = all.iter().filter_map(|(times, ..)| times.last()).max().context("no tokens")?;
    let mut sum = Drafts::default();
    all.iter().for_each(|(_, drafts, _)| sum += *drafts);
    Ok((*end - begin, sum, all.into_iter().map(|(.., tokens)| tokens).collect()))
}

async fn submit(engine: &Engine, prompt: &[u32], new: u32, ignore_eos: bool) -> anyhow::Result<SequenceStream> {
    let (pool, spec) = (engine.pool(), engine.spec());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), prompt, spec.block_tokens);
    let prefix = tandem_engine::Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: prompt.len() };
    let lease = pool.reserve_prefix(pool.blocks_for(prompt.len() + 1), prefix).await?;
    Ok(engine.submit(SequenceRequest {
        id: "bench".into(),
        tokens: prompt.to_vec(),
        prompt_len: prompt.len(),
        computed: lease.cached_tokens(),
        lease: Arc::new(lease),
        max_new_tokens: new,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    })?)
}

async fn read(mut stream: SequenceStream) -> anyhow::Result<(Vec<Instant>, Drafts, Vec<u32>)> {
    let (mut times, mut sum, mut tokens) = (Vec::new(), Drafts::default(), Vec::new());
    while let Some(event) = stream.next().await {
        match event {
            SequenceEvent::Token { id, drafts, at, .. } => {
                tokens.push(id);
                times.push(at);
                sum += drafts;
            }
            SequenceEvent::Failed(error) => bail!("{error}"),
            _ => {}
        }
    }
    ensure!(!tokens.is_empty(), "an answer without a token");
    Ok((times, sum, tokens))
}
