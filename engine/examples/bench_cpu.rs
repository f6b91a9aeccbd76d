//! Tokens a second of the CPU executor, without scheduler or network: rows `prefill<N>` (a prompt of N tokens from
//! nothing, in chunks of `--chunk`) and `decode<B>x<C>` (B sequences, one token each a step, from context C on). Prints
//! a line a row, as JSON with `--json`; `--ceilings` adds what the machine's memory and multiply-adds allow.
//!
//! `cargo run --release -p tandem-engine --example bench_cpu -- --model FILE --threads 2 --rows prefill512,decode8x256`
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::matmul::{Output, matmul};
use tandem_engine::ops::packed::PackedMatrix;
use tandem_engine::ops::peak;
use tandem_engine::ops::simd::{ArithmeticChoice, Isa, IsaChoice};
use tandem_engine::{Batch, BatchItem, BlockPool, Choose, Executor, KvDtype, KvLease, SamplingParams, Tokens};

const USAGE: &str = "bench_cpu --model FILE [--threads N] [--rows ROW,…] [--samples K] [--steps N] [--chunk N] \
                     [--kv-dtype bf16|int8|f32] [--block-size TOKENS] [--isa auto|amx|avx512|avx2|portable] \
                     [--arithmetic auto|f32|bf16] [--ceilings] [--json]";
const ROWS: &str = "prefill512,prefill2048,decode1x256,decode8x256,decode16x256,decode32x256,decode1x1024,\
                    decode8x1024,decode16x1024,decode32x1024";

struct Options {
    model: PathBuf,
    /// Of the file, or of the directory's files.
    model_bytes: usize,
    threads: usize,
    rows: Vec<Row>,
    samples: usize,
    /// Decode steps of a sample.
    steps: usize,
    chunk: usize,
    kv_dtype: KvDtype,
    block_tokens: usize,
    isa: IsaChoice,
    arithmetic: ArithmeticChoice,
    ceilings: bool,
    json: bool,
}

#[derive(Clone, Copy)]
enum Row {
    Prefill(usize),
    Decode { batch: usize, context: usize },
}

fn main() -> Result<(), String> {
    let options = Options::parse(std::env::args().skip(1))?;
    if options.ceilings {
        options.print("read", "gb_per_s", &mut ceiling_samples(&options, read_gb_per_s));
        options.print("gemm", "gflop_per_s", &mut ceiling_samples(&options, gemm_gflop_per_s));
    }
    let mut bench = Bench::load(&options)?;
    // Interleaved, so that a slow moment of the machine does not fall on one row alone.
    let mut times = vec![Vec::new(); options.rows.len()];
    for sample in 0..=options.samples {
        for (row, times) in options.rows.iter().zip(&mut times) {
            let ms = bench.sample(*row)?;
            // The first one warms up.
            times.extend((sample > 0).then_some(ms));
        }
    }
    for (row, times) in options.rows.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let ms = times[times.len() / 2];
        let tokens = match row {
            Row::Prefill(tokens) => *tokens,
            Row::Decode { batch, .. } => *batch,
        };
        let speed = tokens as f64 / ms * 1e3;
        let name = row.name();
        match options.json {
            true => println!(
                "{}",
                serde_json::json!({ "row": name, "tokens_per_s": speed, "ms": ms, "best_ms": times[0],
                                    "threads": options.threads, "samples": times.len() })
            ),
            false => println!("{name:<16}{speed:>9.0} tokens/s {ms:>9.2} ms (best {:.2})", times[0]),
        }
    }
    Ok(())
}

impl Row {
    fn parse(text: &str) -> Option<Self> {
        if let Some(tokens) = text.strip_prefix("prefill") {
            return tokens.parse().ok().filter(|&tokens| tokens > 0).map(Self::Prefill);
        }
        let (batch, context) = text.strip_prefix("decode")?.split_once('x')?;
        let (batch, context) = (batch.parse().ok()?, context.parse().ok()?);
        (batch > 0).then_some(Self::Decode { batch, context })
    }

    fn name(self) -> String {
        match self {
            Self::Prefill(tokens) => format!("prefill{tokens}"),
            Self::Decode { batch, context } => format!("decode{batch}x{context}"),
        }
    }

    fn blocks(self, steps: usize, block_tokens: usize) -> usize {
        match self {
            Self::Prefill(tokens) => tokens.div_ceil(block_tokens),
            Self::Decode { batch, context } => batch * (context + steps).div_ceil(block_tokens),
        }
    }
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            model: PathBuf::new(),
            model_bytes: 0,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            rows: rows(ROWS)?,
            samples: 5,
            steps: 8,
            chunk: 512,
            kv_dtype: KvDtype::Bf16,
            block_tokens: 16,
            isa: IsaChoice::Auto,
            arithmetic: ArithmeticChoice::Auto,
            ceilings: false,
            json: false,
        };
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("{flag} wants a value; {USAGE}"));
            match flag.as_str() {
                "--model" => options.model = value()?.into(),
                "--threads" => options.threads = number(&value()?)?,
                "--rows" => options.rows = rows(&value()?)?,
                "--samples" => options.samples = number(&value()?)?,
                "--steps" => options.steps = number(&value()?)?,
                "--chunk" => options.chunk = number(&value()?)?,
                "--kv-dtype" => {
                    options.kv_dtype = match value()?.as_str() {
                        "bf16" => KvDtype::Bf16,
                        "int8" => KvDtype::Int8,
                        "f32" => KvDtype::F32,
                        other => return Err(format!("no KV type {other}; {USAGE}")),
                    }
                }
                "--block-size" => options.block_tokens = number(&value()?)?,
                "--isa" => options.isa = value()?.parse().map_err(|error| format!("{error}; {USAGE}"))?,
                "--arithmetic" => options.arithmetic = value()?.parse().map_err(|error| format!("{error}; {USAGE}"))?,
                "--ceilings" => options.ceilings = true,
                "--json" => options.json = true,
                _ => return Err(format!("unknown {flag}; {USAGE}")),
            }
        }
        if options.model.as_os_str().is_empty() {
            return Err(format!("--model is missing; {USAGE}"));
        }
        options.model_bytes = bytes_of(&options.model).map_err(|error| format!("--model: {error}"))?;
        Ok(options)
    }

    fn print(&self, row: &str, unit: &str, samples: &mut [f64]) {
        samples.sort_by(f64::total_cmp);
        let value = samples[samples.len() / 2];
        match self.json {
            true => println!("{}", serde_json::json!({ "row": row, unit: value, "threads": self.threads })),
            false => println!("{row:<16}{value:>9.1} {unit}"),
        }
    }
}

fn bytes_of(model: &Path) -> std::io::Result<usize> {
    let metadata = std::fs::metadata(model)?;
    if !metadata.is_dir() {
        return Ok(metadata.len() as usize);
    }
    let files = std::fs::read_dir(model)?.map(|file| Ok(file?.metadata()?.len() as usize));
    files.sum()
}

fn rows(text: &str) -> Result<Vec<Row>, String> {
    text.split(',').map(|row| Row::parse(row.trim()).ok_or(format!("no row {row}; {USAGE}"))).collect()
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or(format!("{text} is no number above 0; {USAGE}"))
}

struct Bench {
    executor: CpuExecutor,
    pool: BlockPool,
    steps: usize,
    chunk: usize,
}

impl Bench {
    fn load(options: &Options) -> Result<Self, String> {
        let blocks = options.rows.iter().map(|row| row.blocks(options.steps, options.block_tokens)).max().unwrap_or(1);
        let executor = CpuExecutor::load(&ModelConfig {
            path: options.model.clone(),
            kv_dtype: options.kv_dtype,
            blocks,
            block_tokens: options.block_tokens,
            threads: options.threads,
            isa: options.isa,
            arithmetic: options.arithmetic,
            ..ModelConfig::default()
        })
        .map_err(|error| error.to_string())?;
        // Small bf16 numbers (f32 ones, read in pairs; 8-bit ones, scaled by such): a context that nobody needs to
        // compute.
        let memory = executor.memory();
        for (i, word) in memory.place().host().into_iter().flatten().enumerate() {
            let noise = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0x807f_807f_807f_807f;
            word.store(noise | 0x3e00_3e00_3e00_3e00, Ordering::Relaxed);
        }
        Ok(Self {
            executor,
            pool: BlockPool::new(blocks, options.block_tokens),
            steps: options.steps,
            chunk: options.chunk,
        })
    }

    /// Milliseconds of the prompt, or of one decode step.
    fn sample(&mut self, row: Row) -> Result<f64, String> {
        match row {
            Row::Prefill(tokens) => {
                let lease = self.lease(tokens)?;
                let prompt: Vec<u32> = (0..tokens as u32).map(|i| 1000 + i * 7 % 30_000).collect();
                let begin = Instant::now();
                for (i, chunk) in prompt.chunks(self.chunk).enumerate() {
                    let last = (i + 1) * self.chunk >= tokens;
                    self.step(vec![item(0, chunk.to_vec(), i * self.chunk, &lease, last)])?;
                }
                Ok(begin.elapsed().as_secs_f64() * 1e3)
            }
            Row::Decode { batch, context } => {
                let leases =
                    (0..batch).map(|_| self.lease(context + self.steps)).collect::<Result<Vec<_>, String>>()?;
                let begin = Instant::now();
                for step in 0..self.steps {
                    let token = |i: usize| vec![(1000 + i * 131 + step * 17) as u32];
                    let items = leases.iter().enumerate();
                    self.step(items.map(|(i, lease)| item(i as u64, token(i), context + step, lease, true)).collect())?;
                }
                Ok(begin.elapsed().as_secs_f64() * 1e3 / self.steps as f64)
            }
        }
    }

    fn lease(&self, tokens: usize) -> Result<Arc<KvLease>, String> {
        self.pool.try_reserve(self.pool.blocks_for(tokens)).map(Arc::new).map_err(|error| error.to_string())
    }

    fn step(&mut self, items: Vec<BatchItem>) -> Result<(), String> {
        let batch = Batch { items, report_layers: Vec::new() };
        let outcome = self.executor.begin(&batch).and_then(|()| self.executor.finish(&mut |_| {}));
        black_box(outcome.map_err(|error| error.to_string())?);
        Ok(())
    }
}

fn item(seq: u64, tokens: Vec<u32>, start: usize, blocks: &Arc<KvLease>, chooses: bool) -> BatchItem {
    let greedy = || Choose {
        sampling: Arc::new(SamplingParams::GREEDY),
        uniform: 0.0,
        forbidden: None,
        history: None,
        drafts: Vec::new(),
    };
    let (tokens, blocks) = (Tokens::Given(tokens), Arc::clone(blocks));
    BatchItem { seq, tokens, start, blocks, choose: chooses.then(greedy) }
}

/// Runs `measure` on every thread at once and adds up, `samples` times.
fn ceiling_samples(options: &Options, measure: fn(&Options) -> f64) -> Vec<f64> {
    let once = || {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..options.threads).map(|_| scope.spawn(|| measure(options))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
        })
    };
    (0..options.samples).map(|_| once()).collect()
}

/// Reads a thread's part of the model's bytes again and again, as decode steps do: how much of it stays in a shared
/// cache is the machine's affair.
fn read_gb_per_s(options: &Options) -> f64 {
    let memory = peak::Memory::new(options.model_bytes / options.threads);
    memory.read();
    let begin = Instant::now();
    (0..4).map(|_| memory.read()).sum::<usize>() as f64 / begin.elapsed().as_secs_f64() / 1e9
}

/// A product of the size of a feed-forward layer, on the caller's thread, by the kernel that prompts use.
fn gemm_gflop_per_s(_: &Options) -> f64 {
    let (rows, columns, k) = (96, 1536, 576);
    let weights: Vec<f32> = (0..columns * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let isa = Isa::detect();
    let w = PackedMatrix::from_f32(&weights, k).fitted(isa);
    let (x, mut out) = (vec![0.5; rows * k], vec![0.0; rows * columns]);
    let begin = Instant::now();
    let times = 40;
    for _ in 0..times {
        matmul(isa, &x, &w, &mut out, Output::Store);
    }
    black_box(&out);
    (2 * rows * columns * k * times) as f64 / begin.elapsed().as_secs_f64() / 1e9
}
