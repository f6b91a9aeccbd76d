//! Each kernel alone, on one thread, beside the two ceilings that bound it: the machine's read bandwidth and its
//! multiply-adds, both measured in the same run. "share" is the time that the slower of the two would need, of the time
//! that it takes; a kernel whose data fits a cache can have more than all of the bandwidth. Medians. Of
//! products in the L2 cache the best, which neighbours do not slow down.
//!
//! `cargo bench -p tandem-engine --bench kernels [-- [--isa auto|amx|avx512|avx2|portable] [--exact] [NAME…]]`
use std::hint::black_box;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_engine::KvDtype;
use tandem_engine::ops::attention::{Attention, Queries, Sequences};
use tandem_engine::ops::kv::{KvArena, KvLayout};
use tandem_engine::ops::matmul::{Output, matmul};
use tandem_engine::ops::packed::{PackedMatrix, WeightFormat};
use tandem_engine::ops::peak;
use tandem_engine::ops::rows::{Rotations, rms_norm, swiglu};
use tandem_engine::ops::simd::{Isa, IsaChoice};
use tandem_engine::sampler::{Past, are_numbers, sample};
use tandem_engine::sampling::SamplingParams;
use tandem_engine::step::{Chunk, Place};
use tandem_gguf::TensorType;
use tandem_memory::HostMemory;

const USAGE: &str = "kernels [--isa auto|amx|avx512|avx2|portable] [--exact] [NAME…]";
/// Sizes of the model that comes with the project.
const HIDDEN: usize = 576;
const FEED_FORWARD: usize = 1536;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
/// Layers, so that weights and KV are in no cache when their turn comes again.
const LAYERS: usize = 30;
/// The gate and up projections of a layer, and of how many.
struct Projections {
    hidden: usize,
    columns: usize,
    layers: usize,
}

const SMALL: Projections = Projections { hidden: HIDDEN, columns: 2 * FEED_FORWARD, layers: LAYERS };
/// Of a 1B model; 200 MB and more, where the ones above nearly fit a large cache.
const LARGE: Projections = Projections { hidden: 2048, columns: 16_384, layers: 12 };
const VOCABULARY: usize = 49_152;
const BLOCK: usize = 16;
const SAMPLES: usize = 15;

fn main() -> Result<(), String> {
    let (isa, names) = options()?;
    let ceilings = Ceilings::measure(isa);
    let Ceilings { gb_per_s, gflop_per_s } = ceilings;
    println!("{}: {gb_per_s:.1} GB/s read, {gflop_per_s:.0} GFLOP/s of multiply-adds, one thread\n", isa.name());
    println!("| kernel | µs | GB/s | GFLOP/s | share |\n|---|---|---|---|---|");
    let bench = Bench { isa, ceilings, names };
    let exact = [("f32", 32.0), ("f16", 16.0)];
    let exact = exact.into_iter().filter(|_| !isa.rounds());
    let quantized = [("q4_1", 5.0), ("q5_1", 6.0), ("q8_0", 8.5), ("q4_k", 4.625), ("q5_k", 5.625), ("q6_k", 6.5625)];
    for (format, bits) in quantized.into_iter().chain([("bf16", 16.0)]).chain(exact) {
        for rows in [1, 8, 32, 512] {
            bench.matmul(format, bits, rows, &SMALL);
        }
        for rows in [1, 8, 32] {
            bench.matmul(format, bits, rows, &LARGE);
        }
        for rows in [1, 4, 8, 16, 32, 96] {
            bench.matmul_in_cache(format, bits, rows);
        }
    }
    for dtype in [KvDtype::Bf16, KvDtype::Int8, KvDtype::F32] {
        for (rows, batch, context) in
            [(1, 1, 256), (1, 16, 256), (1, 1, 1024), (1, 16, 1024), (1, 1, 8000), (512, 1, 0)]
        {
            bench.attention(dtype, rows, batch, context);
        }
        bench.kv_write(dtype);
    }
    bench.rows();
    bench.greedy_token();
    Ok(())
}

fn options() -> Result<(Isa, Vec<String>), String> {
    let (mut choice, mut exact, mut names) = (IsaChoice::Auto, false, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--isa" => {
                let name = args.next().unwrap_or_default();
                choice = name.parse().map_err(|error| format!("{error}; {USAGE}"))?;
            }
            "--exact" => exact = true,
            // Cargo's.
            "--bench" => {}
            flag if flag.starts_with("--") => return Err(format!("unknown {flag}; {USAGE}")),
            name => names.push(name.to_owned()),
        }
    }
    let isa = Isa::choose(choice, exact).ok_or(format!("this machine has no {choice}"))?;
    Ok((isa, names))
}

#[derive(Clone, Copy)]
struct Ceilings {
    gb_per_s: f64,
    gflop_per_s: f64,
}

impl Ceilings {
    fn measure(isa: Isa) -> Self {
        let memory = peak::Memory::new(256 << 20);
        let mut bytes = 0;
        let read = median(|| bytes = memory.read());
        let mut operations = 0;
        let busy = median(|| operations = peak::multiply_adds(isa, 1 << 20));
        let gb_per_s = bytes as f64 / read.as_secs_f64() / 1e9;
        Self { gb_per_s, gflop_per_s: operations as f64 / busy.as_secs_f64() / 1e9 }
    }
}

struct Bench {
    isa: Isa,
    ceilings: Ceilings,
    /// Parts of the names that shall run; empty: all.
    names: Vec<String>,
}

impl Bench {
    /// Runs `turn` for each of `turns` different inputs, and prints what one took; `bytes` and `operations` are one's.
    fn report(&self, name: &str, turns: usize, bytes: f64, operations: f64, mut turn: impl FnMut(usize)) {
        let all = median(|| (0..turns).for_each(&mut turn));
        self.print(name, all.as_secs_f64() / turns as f64, bytes, operations);
    }

    fn print(&self, name: &str, seconds: f64, bytes: f64, operations: f64) {
        let bound = (bytes / self.ceilings.gb_per_s).max(operations / self.ceilings.gflop_per_s) / 1e9;
        let (gb, gflop) = (bytes / seconds / 1e9, operations / seconds / 1e9);
        println!("| {name} | {:.1} | {gb:.1} | {gflop:.1} | {:.0} % |", seconds * 1e6, bound / seconds * 100.0);
    }

    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str()))
    }

    /// Of K-quants with rows of whole groups.
    fn matmul(&self, format: &str, bits: f64, rows: usize, &Projections { hidden, columns, layers }: &Projections) {
        let k = if format.ends_with("_k") { hidden.next_multiple_of(256) } else { hidden };
        let name = format!("matmul {format} {rows}x{k}x{columns}");
        if !self.wants(&name) {
            return;
        }
        let matrices: Vec<_> = (0..layers).map(|_| self.packed(format, columns, k)).collect();
        let (x, mut out) = (wave(rows * k), vec![0.0; rows * columns]);
        let (bytes, operations) = ((columns * k) as f64 * bits / 8.0, (2 * rows * columns * k) as f64);
        self.report(&name, layers, bytes, operations, |layer| {
            matmul(self.isa, &x, &matrices[layer], &mut out, Output::Store);
        });
    }

    /// A product whose weights stay in the L2 cache, the best of many: what the arithmetic alone takes, on a machine
    /// with neighbours, too.
    fn matmul_in_cache(&self, format: &str, bits: f64, rows: usize) {
        const RUNS: usize = 4000;
        let (columns, k) = (128, 2048);
        let name = format!("matmul {format} {rows}x{k}x{columns} in L2, best");
        if !self.wants(&name) {
            return;
        }
        let w = self.packed(format, columns, k);
        let (x, mut out) = (wave(rows * k), vec![0.0; rows * columns]);
        let run = |_| {
            let begin = Instant::now();
            matmul(self.isa, &x, &w, &mut out, Output::Store);
            begin.elapsed()
        };
        let best = (0..RUNS).map(run).min().unwrap_or_default();
        let (bytes, operations) = ((columns * k) as f64 * bits / 8.0, (2 * rows * columns * k) as f64);
        self.print(&name, best.as_secs_f64(), bytes, operations);
    }

    /// As numbers small ones in every type.
    fn packed(&self, format: &str, columns: usize, k: usize) -> PackedMatrix {
        let dtype = match format {
            "q4_1" => TensorType::Q4_1,
            "q5_1" => TensorType::Q5_1,
            "q8_0" => TensorType::Q8_0,
            "q4_k" => TensorType::Q4_K,
            "q5_k" => TensorType::Q5_K,
            "q6_k" => TensorType::Q6_K,
            "f16" => TensorType::F16,
            "bf16" => TensorType::BF16,
            _ => TensorType::F32,
        };
        let group = dtype.group().expect("sizes");
        let raw = vec![0x35u8; columns * k / group.values as usize * group.bytes as usize];
        PackedMatrix::from_raw(WeightFormat::kept(dtype, self.isa), dtype, &raw, k).fitted(self.isa)
    }

    /// `rows` query rows of each of `batch` sequences, after `context` keys.
    fn attention(&self, dtype: KvDtype, rows: usize, batch: usize, context: usize) {
        let name = format!("attention {dtype:?} {batch}x{rows} after {context}");
        if !self.wants(&name) {
            return;
        }
        let blocks_each = (context + rows).div_ceil(BLOCK);
        let kv = arena(dtype, blocks_each * batch);
        let blocks: Vec<u32> = (0..batch).flat_map(|seq| table(seq, batch, blocks_each)).collect();
        let chunk = |seq| Chunk {
            first_block: seq * blocks_each,
            blocks: blocks_each,
            first_row: seq * rows,
            rows,
            start: context,
        };
        let chunks: Vec<_> = (0..batch).map(chunk).collect();
        let (sequences, mut kernel) = (Sequences { blocks: &blocks, chunks: &chunks }, Attention::new(self.isa));
        let (width, keys) = (HEADS * HEAD_DIM, batch * (rows * context + rows * (rows + 1) / 2));
        let (values, mut out) = (wave(batch * rows * width), vec![0.0; batch * rows * width]);
        let queries = Queries { values: &values, stride: width, heads: HEADS, window: None };
        let bytes = batch * (context + rows) * 2 * KV_HEADS * dtype.head_bytes(HEAD_DIM);
        self.report(&name, LAYERS, bytes as f64, (4 * keys * width) as f64, |layer| {
            kernel.compute(&kv, layer, sequences, queries, &mut out);
        });
    }

    /// K and V of a prompt's chunk.
    fn kv_write(&self, dtype: KvDtype) {
        let (rows, stride) = (512, (HEADS + 2 * KV_HEADS) * HEAD_DIM);
        let name = format!("kv write {dtype:?} {rows} tokens");
        if !self.wants(&name) {
            return;
        }
        let (kv, values) = (arena(dtype, rows / BLOCK), wave(rows * stride));
        let place = |token: usize| Place { block: (token / BLOCK) as u32, slot: token % BLOCK };
        let places: Vec<_> = (0..rows).map(place).collect();
        let bytes = rows * 2 * KV_HEADS * (4 * HEAD_DIM + dtype.head_bytes(HEAD_DIM));
        self.report(&name, LAYERS, bytes as f64, 0.0, |layer| kv.write(layer, &values, stride, &places));
    }

    /// Logits that are in no cache; the exponentials of their sum count as their polynomial.
    fn greedy_token(&self) {
        let (rows, name) = (LAYERS, format!("greedy token of {VOCABULARY}"));
        if !self.wants(&name) {
            return;
        }
        let (logits, past) = (wave(rows * VOCABULARY), Past { tokens: &[1], prompt_len: 1, ..Past::default() });
        let (bytes, operations) = (4 * VOCABULARY, 20 * VOCABULARY);
        self.report(&name, rows, bytes as f64, operations as f64, |row| {
            let logits = &logits[row * VOCABULARY..][..VOCABULARY];
            assert!(are_numbers(logits));
            black_box(sample(&SamplingParams::GREEDY, 0.0, &past, logits));
        });
    }

    fn rows(&self) {
        for rows in [16, 512] {
            let (x, weight) = (wave(rows * HIDDEN), wave(HIDDEN));
            let mut out = vec![0.0; x.len()];
            let name = format!("rms norm {rows}x{HIDDEN}");
            if self.wants(&name) {
                self.report(&name, LAYERS, (8 * x.len()) as f64, (4 * x.len()) as f64, |_| {
                    rms_norm(self.isa, &x, &weight, 1e-5, &mut out);
                });
            }
            let (gate_up, mut activated) = (wave(rows * 2 * FEED_FORWARD), vec![0.0; rows * FEED_FORWARD]);
            let name = format!("swiglu {rows}x{FEED_FORWARD}");
            if self.wants(&name) {
                // The exponential counts as its polynomial.
                let (bytes, operations) = (12 * activated.len(), 25 * activated.len());
                self.report(&name, LAYERS, bytes as f64, operations as f64, |_| {
                    swiglu(self.isa, &gate_up, FEED_FORWARD, &mut activated);
                });
            }
            let heads = HEADS + KV_HEADS;
            let (stride, positions) = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, (0..rows).collect::<Vec<_>>());
            let frequencies: Vec<f64> = (0..HEAD_DIM / 2).map(|i| 1e4f64.powf(-(i as f64) / 32.0)).collect();
            let (mut rotations, mut x) = (Rotations::default(), wave(rows * stride));
            rotations.turn_to(&positions, &frequencies);
            let name = format!("rotary embedding {rows} tokens");
            if self.wants(&name) {
                let numbers = rows * heads * HEAD_DIM;
                self.report(&name, LAYERS, (12 * numbers) as f64, (3 * numbers) as f64, |_| {
                    rotations.apply(&mut x, stride, heads);
                });
            }
        }
    }
}

fn arena(dtype: KvDtype, blocks: usize) -> KvArena {
    let layout = KvLayout { layers: LAYERS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, block_tokens: BLOCK, dtype };
    let memory = HostMemory::zeroed(blocks * layout.block_bytes()).expect("memory for the arena");
    // Small numbers of either format.
    for (i, word) in memory.words().iter().enumerate() {
        word.store(
            (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0x807f_807f_807f_807f | 0x3e00_3e00_3e00_3e00,
            Relaxed,
        );
    }
    KvArena::new(memory, layout).expect("a layout that fits")
}

/// Blocks of a sequence, between those of the others.
fn table(seq: usize, batch: usize, blocks: usize) -> Vec<u32> {
    (0..blocks).map(|i| (i * batch + seq) as u32).collect()
}

fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37).sin()).collect()
}

/// Of [`SAMPLES`] runs of at least a millisecond, after one that warms up.
fn median(mut run: impl FnMut()) -> Duration {
    run();
    let mut times: Vec<_> = (0..SAMPLES)
        .map(|_| {
            let (begin, mut runs) = (Instant::now(), 0);
            while runs == 0 || begin.elapsed() < Duration::from_millis(1) {
                run();
                runs += 1;
            }
            begin.elapsed() / runs
        })
        .collect();
    times.sort_unstable();
    times[SAMPLES / 2]
}
