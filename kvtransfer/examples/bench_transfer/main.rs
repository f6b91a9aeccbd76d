//! How fast hand-offs move bytes, beside what bounds them, measured in turns so that a busy machine disturbs both
//! alike: the receiver's one copy and UCX shared memory beside memcpy of equally cold memory, our tcp, plain and
//! encrypted, beside a plain blocking socket loop, UCX on one hot buffer beside `ucx_perftest`, and sixteen senders
//! beside one; and how fast one core verifies. Prints markdown; medians.
//!
//! `cargo run --release -p tandem-kvtransfer --example bench_transfer`
mod baseline;
mod cores;
mod handoffs;
mod incast;
mod verify;

use std::net::Ipv4Addr;
use std::sync::Arc;

use clap::Parser;
use cores::on_core;
use handoffs::{Bench, noise};
use tandem_kvtransfer::tcp::{Protection, TcpConfig, TcpTransport};
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, Transport};

/// Most hand-offs at once of the hot part.
const HOT_MESSAGES: usize = 2048;

/// UCX variables of the ring in shared memory.
const RING: [&str; 2] = ["MM_FIFO_SIZE", "MM_SEG_SIZE"];

/// Bandwidth of KV hand-offs beside memcpy, plain sockets and ucx_perftest.
#[derive(Parser)]
struct Args {
    /// Size of each of the two arenas; larger than the caches.
    #[arg(long, default_value_t = 512)]
    arena_mib: usize,
    /// Bytes of one measured hand-off.
    #[arg(long, default_value_t = 128)]
    transfer_mib: usize,
    /// Measurements per cell; the median counts.
    #[arg(long, default_value_t = 11)]
    samples: usize,
    /// Sizes of a range (= block) in KiB.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1024, 4096, 16384])]
    range_kib: Vec<usize>,
    /// KiB that the hot part fills again and again, in ranges of one buffer; larger ranges fill themselves alone.
    #[arg(long, default_value_t = 1024)]
    hot_kib: usize,
    /// Parts to run.
    #[arg(long, value_delimiter = ',', default_values_t = ["shm", "tcp", "hot", "incast", "verify"].map(str::to_owned))]
    parts: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    for part in &args.parts {
        let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        match part.as_str() {
            "shm" => runtime()?.block_on(shm(&args))?,
            // Its sending threads start when it connects, from the runtime's.
            "tcp" => on_core(0, || runtime()?.block_on(tcp(&args)))?,
            "hot" => runtime()?.block_on(hot(&args))?,
            "incast" => runtime()?.block_on(incast(&args))?,
            "verify" => on_core(0, || verify(&args))?,
            other => anyhow::bail!("no part is called {other}; there are shm, tcp, hot, incast and verify"),
        }
    }
    Ok(())
}

/// As nodes on one host have it.
fn one_copy(arena: &Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>> {
    Ok(UcxTransport::start(arena.clone(), UcxConfig::new(UcxProfile::Shm))?)
}

/// Through UCX's queue in shared memory.
fn ucx(arena: &Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>> {
    let config = UcxConfig { one_copy: false, ..UcxConfig::new(UcxProfile::Shm) };
    Ok(UcxTransport::start(arena.clone(), config)?)
}

/// UCX over sockets.
fn ucx_tcp(arena: &Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>> {
    Ok(UcxTransport::start(arena.clone(), UcxConfig::new(UcxProfile::Tcp))?)
}

fn tcp_node(arena: &Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>> {
    tcp_with(arena, Protection::Bound)
}

fn encrypted_node(arena: &Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>> {
    tcp_with(arena, Protection::Encrypted)
}

fn tcp_with(arena: &Arc<Arena>, protection: Protection) -> anyhow::Result<Arc<dyn Transport>> {
    let config = TcpConfig { protection, ..TcpConfig::default() };
    Ok(TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena.clone(), config)?)
}

/// Hand-offs before the first that counts: while a guest's memory is touched for the first times, its host gives it the
/// pages, and everything is slow for seconds.
const WARMING: usize = 40;

/// A size of ranges in bytes, and its hand-offs.
struct Cell {
    range_bytes: usize,
    samples: usize,
    counts: bool,
}

fn cells(args: &Args) -> impl Iterator<Item = Cell> {
    let warming = args.range_kib.first().map(|kib| Cell { range_bytes: kib << 10, samples: WARMING, counts: false });
    let counted = |kib: &usize| Cell { range_bytes: kib << 10, samples: args.samples, counts: true };
    warming.into_iter().chain(args.range_kib.iter().map(counted))
}

async fn shm(args: &Args) -> anyhow::Result<()> {
    let (from, to) = (noise(args.arena_mib << 20)?, noise(args.arena_mib << 20)?);
    let mut plain = baseline::Memcpy::new(args.arena_mib << 20);
    println!("\n### One copy, and UCX's queue, beside memcpy (cold {} MiB arenas, GB/s)\n", args.arena_mib);
    println!("| range | memcpy | one copy: push | ratio | verified | ratio | ucx: push | ratio | verified | ratio |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for Cell { range_bytes, samples, counts } in cells(args) {
        let bench = |start| Bench::new(&from, &to, range_bytes, args.transfer_mib << 20, start);
        let (mut once, mut twice) = (bench(one_copy)?, bench(ucx)?);
        let mut rates: [Vec<f64>; 5] = Default::default();
        for _ in 0..samples {
            let (copied, once, twice) =
                (plain.copy(range_bytes, once.bytes()), once.hand_off().await?, twice.hand_off().await?);
            let sample = [copied, once.push, once.verified, twice.push, twice.verified];
            rates.iter_mut().zip(sample).for_each(|(rates, rate)| rates.push(rate));
        }
        if counts {
            let [copied, rates @ ..] = rates.map(median);
            let cells = rates.map(|rate| format!(" {rate:.2} | {:.2} |", rate / copied)).concat();
            println!("| {} | {copied:.2} |{cells}", kib(range_bytes));
        }
    }
    Ok(())
}

async fn tcp(args: &Args) -> anyhow::Result<()> {
    let (from, to) = (noise(args.arena_mib << 20)?, noise(args.arena_mib << 20)?);
    let mut plain = baseline::Sockets::new(args.arena_mib << 20)?;
    println!("\n### Our tcp beside a plain blocking socket (cold {} MiB arenas, loopback, GB/s)\n", args.arena_mib);
    println!("| range | plain socket | tcp push | ratio | tcp with verification | tcp encrypted push | of tcp |");
    println!("|---|---|---|---|---|---|---|");
    for Cell { range_bytes, samples, counts } in cells(args) {
        let mut bench = Bench::new(&from, &to, range_bytes, args.transfer_mib << 20, tcp_node)?;
        let mut encrypted = Bench::new(&from, &to, range_bytes, args.transfer_mib << 20, encrypted_node)?;
        let (mut streamed, mut pushed, mut verified, mut sealed) = (vec![], vec![], vec![], vec![]);
        for _ in 0..samples {
            streamed.push(plain.stream(range_bytes, bench.bytes())?);
            let sample = bench.hand_off().await?;
            pushed.push(sample.push);
            verified.push(sample.verified);
            sealed.push(encrypted.hand_off().await?.push);
        }
        let [streamed, pushed, verified, sealed] = [streamed, pushed, verified, sealed].map(median);
        if counts {
            let (ratio, of_tcp) = (pushed / streamed, sealed / pushed);
            println!(
                "| {} | {streamed:.2} | {pushed:.2} | {ratio:.2} | {verified:.2} | {sealed:.2} | {of_tcp:.2} |",
                kib(range_bytes)
            );
        }
    }
    Ok(())
}

async fn hot(args: &Args) -> anyhow::Result<()> {
    let ours = UcxConfig::new(UcxProfile::Shm).settings(false);
    let theirs: Vec<_> = ours.iter().filter(|(name, _)| !RING.contains(name)).cloned().collect();
    println!("\n### UCX shared memory beside ucx_perftest (one buffer into one buffer, GB/s)\n");
    println!(
        "`ucx_perftest -t ucp_am_bw`, rendezvous, as many bytes as ours, over the same transports; ours carry several blocks below 1 MiB each;"
    );
    println!("\"our ring\": with all of {ours:?}.\n");
    println!(
        "| range | ucx_perftest | ucx push, hot | ratio | ucx_perftest, our ring | ratio |\n|---|---|---|---|---|---|"
    );
    for range_bytes in args.range_kib.iter().map(|kib| kib << 10) {
        let (from, to) = (noise(range_bytes)?, noise(range_bytes.max(args.hot_kib << 10))?);
        // Long enough that waking up does not count.
        let messages = HOT_MESSAGES.min(((4 * args.transfer_mib) << 20) / range_bytes).max(1);
        let mut bench = Bench::new(&from, &to, range_bytes, messages * range_bytes, ucx)?;
        let (mut alike, mut default, mut pushed) = (vec![], vec![], vec![]);
        for _ in 0..args.samples {
            alike.extend(baseline::perftest(range_bytes, messages, &ours)?);
            pushed.push(bench.hot().await?);
            default.extend(baseline::perftest(range_bytes, messages, &theirs)?);
        }
        let pushed = median(pushed);
        if alike.is_empty() {
            println!("| {} | not installed | {pushed:.2} | | | |", kib(range_bytes));
        } else {
            let (alike, default) = (median(alike), median(default));
            let (of_alike, of_default) = (pushed / alike, pushed / default);
            println!(
                "| {} | {default:.2} | {pushed:.2} | {of_default:.2} | {alike:.2} | {of_alike:.2} |",
                kib(range_bytes)
            );
        }
    }
    Ok(())
}

async fn incast(args: &Args) -> anyhow::Result<()> {
    let bytes = (args.transfer_mib << 20) / 4;
    println!(
        "\n### {} senders, {} MiB each, to one receiver, beside one sender of all (GB/s)\n",
        incast::SENDERS,
        bytes >> 20
    );
    println!("| way | one sender | {} senders | ratio | fastest / slowest | grew by, MiB |", incast::SENDERS);
    println!("|---|---|---|---|---|---|");
    let ways: [(&str, incast::Start); 4] =
        [("ucx/shm, one copy", one_copy), ("ucx/shm, queue", ucx), ("ucx/tcp", ucx_tcp), ("tcp", tcp_node)];
    for (name, start) in ways {
        let mut nodes = incast::Incast::new(bytes, start)?;
        let (mut alone, mut together, mut spread, mut grown) = (vec![], vec![], vec![], 0f64);
        // The first of each connects, and touches memory for the first time.
        for counts in (0..=args.samples).map(|sample| sample > 0) {
            let (one, all) = (nodes.round(incast::Senders::One).await?, nodes.round(incast::Senders::Each).await?);
            if counts {
                alone.push(one.rate);
                together.push(all.rate);
                spread.push(all.spread);
                grown = grown.max(all.grown_mib);
            }
        }
        let [alone, together, spread] = [alone, together, spread].map(median);
        let ratio = together / alone;
        println!("| {name} | {alone:.2} | {together:.2} | {ratio:.2} | {spread:.2} | {grown:.0} |");
    }
    Ok(())
}

fn verify(args: &Args) -> anyhow::Result<()> {
    let memory = noise(args.arena_mib << 20)?;
    println!("\n### Verification on one core (XXH3-64, GB/s)\n");
    println!("| block | warm | cold {} MiB arena | cold, unit by unit |\n|---|---|---|---|", args.arena_mib);
    for block_bytes in args.range_kib.iter().map(|kib| kib << 10) {
        let rates: Vec<_> =
            (0..args.samples).map(|_| verify::measure(&memory, block_bytes, args.transfer_mib << 20)).collect();
        let rate = |of: fn(&verify::Rates) -> f64| median(rates.iter().map(of).collect());
        let (warm, cold, cold_units) = (rate(|r| r.warm), rate(|r| r.cold), rate(|r| r.cold_units));
        println!("| {} | {warm:.2} | {cold:.2} | {cold_units:.2} |", kib(block_bytes));
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn kib(bytes: usize) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}
