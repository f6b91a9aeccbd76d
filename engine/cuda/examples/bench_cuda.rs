//! Tokens a second of the CUDA executor, without scheduler or network: rows `prefill<N>` (a prompt of N tokens from
//! nothing, in chunks of `--chunk`), `decode<B>x<C>` (B sequences, one token each a step, from context C on) and
//! `checksum<M>` (the digests of M MiB of KV). Prints a line of JSON a row. `deploy/gpu/check.sh` calls it on a card,
//! and puts the card's own bounds beside the figures; on an emulated driver the figures mean nothing.
//!
//! `cargo run --release -p tandem-cuda --example bench_cuda -- --model PATH --rows prefill512,decode8x256`
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tandem_cuda::{CudaConfig, CudaExecutor, CudaLoader};
use tandem_engine::{Batch, BatchItem, BlockPool, Choose, Executor, KvLease, SamplingParams, Tokens};
use tandem_memory::Run;

const USAGE: &str = "bench_cuda --model PATH [--device N] [--rows ROW,…] [--samples K] [--steps N] [--chunk N] \
                     [--block-size TOKENS]";
const ROWS: &str = "prefill2048,prefill8192,decode1x1024,decode32x1024,decode128x1024,checksum256";
/// Of a checksum's piece, as `tandem-proto` cuts blocks.
const LEAF_BYTES: usize = 4096;

struct Options {
    model: PathBuf,
    device: u32,
    rows: Vec<Row>,
    samples: usize,
    /// Decode steps of a sample.
    steps: usize,
    chunk: usize,
    block_tokens: usize,
}

#[derive(Clone, Copy)]
enum Row {
    Prefill(usize),
    Decode { batch: usize, context: usize },
    Checksum { mib: usize },
}

fn main() -> Result<(), String> {
    let options = Options::parse(std::env::args().skip(1))?;
    let mut bench = Bench::load(&options)?;
    for row in &options.rows {
        // The first one warms up.
        let times = (0..=options.samples).map(|_| bench.sample(*row)).collect::<Result<Vec<f64>, String>>()?;
        let mut times = times[1..].to_vec();
        times.sort_by(f64::total_cmp);
        let (ms, best) = (times[times.len() / 2], times[0]);
        let (unit, speed) = match row {
            Row::Prefill(tokens) => ("tokens_per_s", *tokens as f64 / ms * 1e3),
            Row::Decode { batch, .. } => ("tokens_per_s", *batch as f64 / ms * 1e3),
            Row::Checksum { mib } => ("gb_per_s", (mib << 20) as f64 / ms / 1e6),
        };
        println!(r#"{{"row":"{}","{unit}":{speed:.2},"ms":{ms:.4},"best_ms":{best:.4}}}"#, row.name());
    }
    Ok(())
}

impl Row {
    fn parse(text: &str) -> Option<Self> {
        let above_zero = |text: &str| text.parse().ok().filter(|&number: &usize| number > 0);
        if let Some(tokens) = text.strip_prefix("prefill") {
            return above_zero(tokens).map(Self::Prefill);
        }
        if let Some(mib) = text.strip_prefix("checksum") {
            return above_zero(mib).map(|mib| Self::Checksum { mib });
        }
        let (batch, context) = text.strip_prefix("decode")?.split_once('x')?;
        Some(Self::Decode { batch: above_zero(batch)?, context: context.parse().ok()? })
    }

    fn name(self) -> String {
        match self {
            Self::Prefill(tokens) => format!("prefill{tokens}"),
            Self::Decode { batch, context } => format!("decode{batch}x{context}"),
            Self::Checksum { mib } => format!("checksum{mib}"),
        }
    }

    fn blocks(self, options: &Options, block_bytes: usize) -> usize {
        match self {
            Self::Prefill(tokens) => tokens.div_ceil(options.block_tokens),
            Self::Decode { batch, context } => batch * (context + options.steps).div_ceil(options.block_tokens),
            Self::Checksum { mib } => (mib << 20).div_ceil(block_bytes),
        }
    }

    fn sequences(self) -> usize {
        match self {
            Self::Decode { batch, .. } => batch,
            Self::Prefill(_) | Self::Checksum { .. } => 1,
        }
    }
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            model: PathBuf::new(),
            device: 0,
            rows: rows(ROWS)?,
            samples: 5,
            steps: 32,
            chunk: 2048,
            block_tokens: 64,
        };
        while let Some(flag) = args.next() {
            let value = args.next().ok_or(format!("{flag} wants a value; {USAGE}"))?;
            match flag.as_str() {
                "--model" => options.model = value.into(),
                "--device" => options.device = value.parse().map_err(|_| format!("no device {value}; {USAGE}"))?,
                "--rows" => options.rows = rows(&value)?,
                "--samples" => options.samples = number(&value)?,
                "--steps" => options.steps = number(&value)?,
                "--chunk" => options.chunk = number(&value)?,
                "--block-size" => options.block_tokens = number(&value)?,
                _ => return Err(format!("unknown {flag}; {USAGE}")),
            }
        }
        match options.model.as_os_str().is_empty() {
            true => Err(format!("--model is missing; {USAGE}")),
            false => Ok(options),
        }
    }
}

fn rows(text: &str) -> Result<Vec<Row>, String> {
    text.split(',').map(|row| Row::parse(row.trim()).ok_or(format!("no row {row}; {USAGE}"))).collect()
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or(format!("{text} is no number above 0; {USAGE}"))
}

struct Bench {
    executor: CudaExecutor,
    pool: BlockPool,
    /// Sequences of samples so far: an executor must not take one for another.
    begun: u64,
    steps: usize,
    chunk: usize,
}

impl Bench {
    fn load(options: &Options) -> Result<Self, String> {
        let sequences = options.rows.iter().map(|row| row.sequences()).max().unwrap_or(1);
        let loader = CudaLoader::open(&CudaConfig {
            path: options.model.clone(),
            device: options.device,
            block_tokens: options.block_tokens,
            max_step_tokens: options.chunk.max(sequences),
            max_running: sequences,
            ..CudaConfig::default()
        })
        .map_err(|error| error.to_string())?;
        let block_bytes = loader.block_bytes();
        let blocks = options.rows.iter().map(|row| row.blocks(options, block_bytes)).max().unwrap_or(1);
        let began = Instant::now();
        let (device, executor) = (loader.device().to_string(), loader.load(blocks).map_err(|error| error.to_string())?);
        let load_s = began.elapsed().as_secs_f64();
        println!(r#"{{"row":"load","device":"{device}","s":{load_s:.2},"kv_blocks":{blocks}}}"#);
        fill(&executor, block_bytes);
        let pool = BlockPool::new(blocks, options.block_tokens);
        Ok(Self { executor, pool, begun: 0, steps: options.steps, chunk: options.chunk })
    }

    /// Milliseconds of the prompt, of one decode step, or of the digests.
    fn sample(&mut self, row: Row) -> Result<f64, String> {
        match row {
            Row::Prefill(tokens) => self.prefill(tokens),
            Row::Decode { batch, context } => self.decode(batch, context),
            Row::Checksum { mib } => Ok(self.checksum(mib)),
        }
    }

    fn prefill(&mut self, tokens: usize) -> Result<f64, String> {
        let lease = self.lease(tokens)?;
        let seq = self.sequences(1);
        let prompt: Vec<u32> = (0..tokens as u32).map(|i| 3 + i * 7 % 300).collect();
        let begin = Instant::now();
        let chunks = prompt.chunks(self.chunk).enumerate().map(|(i, chunk)| {
            let last = (i + 1) * self.chunk >= tokens;
            vec![item(seq, Tokens::Given(chunk.to_vec()), i * self.chunk, &lease, last)]
        });
        compute(&mut self.executor, chunks)?;
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        self.executor.forget(seq);
        Ok(ms)
    }

    fn decode(&mut self, batch: usize, context: usize) -> Result<f64, String> {
        let leases = (0..batch).map(|_| self.lease(context + self.steps)).collect::<Result<Vec<_>, String>>()?;
        let first = self.sequences(batch);
        let begin = Instant::now();
        let steps = (0..self.steps).map(|step| {
            // As an engine does: from the second step on the token is the one that the device chose.
            let tokens = |i: usize| match step {
                0 => Tokens::Given(vec![3 + (i as u32 * 131) % 300]),
                _ => Tokens::Last,
            };
            let items = leases.iter().enumerate();
            items.map(|(i, lease)| item(first + i as u64, tokens(i), context + step, lease, true)).collect()
        });
        compute(&mut self.executor, steps)?;
        let ms = begin.elapsed().as_secs_f64() * 1e3 / self.steps as f64;
        (0..batch as u64).for_each(|i| self.executor.forget(first + i));
        Ok(ms)
    }

    fn checksum(&self, mib: usize) -> f64 {
        let runs: Vec<Run> =
            (0..(mib << 20) / LEAF_BYTES).map(|i| Run { at: i * LEAF_BYTES, bytes: LEAF_BYTES }).collect();
        let mut digests = vec![0; runs.len()];
        let memory = self.executor.memory();
        let begin = Instant::now();
        memory.digests(&runs, &mut digests);
        black_box(&digests);
        begin.elapsed().as_secs_f64() * 1e3
    }

    fn sequences(&mut self, count: usize) -> u64 {
        self.begun += count as u64;
        self.begun - count as u64
    }

    fn lease(&self, tokens: usize) -> Result<Arc<KvLease>, String> {
        self.pool.try_reserve(self.pool.blocks_for(tokens)).map(Arc::new).map_err(|error| error.to_string())
    }
}

/// Computes steps as an engine does: the next one begins before the host has seen the end of the one before.
fn compute(executor: &mut CudaExecutor, steps: impl Iterator<Item = Vec<BatchItem>>) -> Result<(), String> {
    let mut under_way = 0;
    let finish = |executor: &mut CudaExecutor| {
        black_box(executor.finish(&mut |_| {}).map_err(|error| error.to_string())?);
        Ok::<_, String>(())
    };
    for items in steps {
        if under_way == executor.most_under_way() {
            finish(executor)?;
            under_way -= 1;
        }
        let batch = Batch { items, report_layers: Vec::new() };
        executor.begin(&batch).map_err(|error| error.to_string())?;
        under_way += 1;
    }
    (0..under_way).try_for_each(|_| finish(executor))
}

fn item(seq: u64, tokens: Tokens, start: usize, blocks: &Arc<KvLease>, chooses: bool) -> BatchItem {
    let greedy = || Choose {
        sampling: Arc::new(SamplingParams::GREEDY),
        uniform: 0.0,
        forbidden: None,
        history: None,
        drafts: Vec::new(),
    };
    BatchItem { seq, tokens, start, blocks: Arc::clone(blocks), choose: chooses.then(greedy) }
}

/// Small bf16 numbers everywhere: a context that nobody needs to compute. Zeros would be faster than what they stand
/// for.
fn fill(executor: &CudaExecutor, block_bytes: usize) {
    let memory = executor.memory();
    let mut block = vec![0; block_bytes];
    for (i, word) in block.chunks_exact_mut(8).enumerate() {
        let noise = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0x807f_807f_807f_807f;
        word.copy_from_slice(&(noise | 0x3e00_3e00_3e00_3e00).to_le_bytes());
    }
    (0..memory.bytes() / block_bytes).for_each(|at| memory.write(at * block_bytes, &block));
}
