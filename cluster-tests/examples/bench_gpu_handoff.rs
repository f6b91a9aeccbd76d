//! Where the time of a hand-off between two processes with a GPU's memory goes: the same bytes in other pieces, with
//! and without the checksums of either end beside it. Both are on the first GPU, or the second process on the second.
//!
//! `cargo run --release -p tandem-cluster-tests --example bench_gpu_handoff -- --ucx $(deploy/gpu/ucx.sh --path)`
//!
//! The first process receives; it starts itself again as the sender, which takes orders in lines.
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use prost::Message;
use tandem_cluster_tests::open_loop::median;
use tandem_cuda::compile::Folders;
use tandem_cuda::{Context, CudaMemory, Device, Kernels};
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport, prepare_environment};
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Manifest, Transport};
use tandem_memory::{KvMemory, Run};
use tandem_proto::{HandoffId, Incarnation, SequenceHash, trace, v1};

/// As eight layers of Llama-3.1-8B have: 64 tokens, 8 KV heads of 128 values in bf16.
const LAYERS: u8 = 8;
const LAYER_BYTES: usize = 256 << 10;
const BLOCK_BYTES: usize = LAYERS as usize * LAYER_BYTES;

#[derive(Parser)]
struct Args {
    /// Folder of a UCX with CUDA
    #[arg(long)]
    ucx: PathBuf,
    /// Blocks of a hand-off, of 2 MiB
    #[arg(long, default_value_t = 32)]
    blocks: u32,
    /// Hand-offs of each kind; medians are printed
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// The other process
    #[arg(long, hide = true)]
    sender: bool,
}

/// How a hand-off is made.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Layers of a push.
    layers: u8,
    /// Blocks of a push.
    blocks: u32,
    range_bytes: usize,
    /// The sender hashes each push beside it, and waits for that.
    sender_hashes: bool,
    /// The receiver hashes while more arrives.
    receiver_hashes: bool,
    /// No two blocks are neighbours.
    is_scattered: bool,
}

const WHOLE: Kind = Kind {
    name: "as a node pushes whole",
    layers: LAYERS,
    blocks: 4,
    range_bytes: 1 << 20,
    sender_hashes: true,
    receiver_hashes: true,
    is_scattered: false,
};

fn kinds(blocks: u32) -> Vec<Kind> {
    let large = Kind { range_bytes: 256 << 20, blocks, ..WHOLE };
    let plain = Kind { sender_hashes: false, receiver_hashes: false, blocks, ..WHOLE };
    let layers = Kind { layers: 1, blocks, name: "layer by layer", ..WHOLE };
    vec![
        WHOLE,
        Kind { name: "whole, sender does not hash", sender_hashes: false, ..WHOLE },
        Kind { name: "whole, receiver hashes at the end", receiver_hashes: false, ..WHOLE },
        Kind { name: "whole, no hash beside", ..plain },
        Kind { name: "whole, no hash beside, frames of 16 MiB", range_bytes: 16 << 20, ..plain },
        Kind { name: "whole, no hash beside, one frame", range_bytes: 256 << 20, ..plain },
        Kind { name: "whole, one frame", ..large },
        Kind { name: "whole, frames of 16 MiB, one push", range_bytes: 16 << 20, ..large },
        Kind { name: "whole, scattered", is_scattered: true, ..WHOLE },
        layers,
        Kind { name: "layers, no hash beside", sender_hashes: false, receiver_hashes: false, ..layers },
        Kind { name: "layers, sender does not hash", sender_hashes: false, ..layers },
        Kind { name: "layers, receiver hashes at the end", receiver_hashes: false, ..layers },
    ]
}

fn main() -> anyhow::Result<()> {
    prepare_environment()?;
    let args = Args::parse();
    let second = u32::from(Device::all()?.len() > 1);
    let arena = arena(if args.sender { second } else { 0 }, 4 * args.blocks)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async { if args.sender { send(&args, &arena).await } else { receive(&args, &arena).await } })
}

fn arena(device: u32, blocks: u32) -> anyhow::Result<Arc<Arena>> {
    let context = Context::of(&Device::numbered(device)?)?;
    let kernels = Kernels::load(&context, &Folders::default())?;
    let memory = CudaMemory::new(&context, &kernels, blocks as usize * BLOCK_BYTES, 0)?;
    Ok(Arena::new(memory, BLOCK_BYTES, LAYERS.into()))
}

fn transport(args: &Args, arena: &Arc<Arena>, range_bytes: usize) -> anyhow::Result<Arc<UcxTransport>> {
    let usual = UcxConfig::new(UcxProfile::Shm);
    let credit_bytes = usual.credit_bytes.max(range_bytes);
    let config = UcxConfig { lib_dir: Some(args.ucx.clone()), max_range_bytes: range_bytes, credit_bytes, ..usual };
    Ok(UcxTransport::start(arena.clone(), config)?)
}

fn blocks_of(kind: &Kind, count: u32) -> Vec<u32> {
    (0..count).map(|index| if kind.is_scattered { 2 * index + 1 } else { count + index }).collect()
}

/// Timed by the receiver, but for the last two.
#[derive(Default)]
struct Times {
    /// First arrival to last one.
    arriving: Vec<f64>,
    /// Last arrival to verified.
    verifying: Vec<f64>,
    /// First push to acknowledged.
    elapsed: Vec<f64>,
    /// Of that, until the seal was queued.
    posting: Vec<f64>,
}

async fn receive(args: &Args, arena: &Arc<Arena>) -> anyhow::Result<()> {
    let transport = transport(args, arena, 1 << 20)?;
    println!("{}, {} blocks of {} MiB\n", transport.info().name, args.blocks, BLOCK_BYTES >> 20);
    let mut sender = Sender::start(&args.ucx, args.blocks)?;
    digests(arena.memory(), &mut sender)?;
    println!("| hand-off | GB/s | acknowledged ms | posting ms | arriving ms | verifying ms | frames |");
    println!("|---|---|---|---|---|---|---|");
    for (number, kind) in kinds(args.blocks).iter().enumerate() {
        let (mut times, mut frames) = (Times::default(), 0);
        // The first two connect and warm up.
        for round in 0..args.rounds + 2 {
            let id = [number as u8 + 1, round as u8, 7, 7].repeat(4);
            let grant = Grant {
                handoff: HandoffId(id.try_into().expect("16 bytes")),
                prefill_incarnation: Incarnation(1),
                decode_incarnation: Incarnation(2),
                compatibility_digest: 3,
                blocks: blocks_of(kind, args.blocks),
                units: LAYERS,
                held: Held::default(),
                owner: Arc::new(()),
                lease: Duration::from_secs(30),
            };
            let incoming = transport.accept(grant)?;
            let before = transport.counters().received_bytes.load(Relaxed);
            let ticket = trace::hex(&incoming.ticket().encode_to_vec());
            sender.tell(&format!("send {number} {ticket}"))?;
            while !kind.receiver_hashes && transport.counters().received_bytes.load(Relaxed) - before < bytes(args) {
                tokio::time::sleep(Duration::from_micros(50)).await;
            }
            let sequence_hashes = vec![1.into(); args.blocks as usize];
            let verified = incoming.verified(Expected { prompt_tokens: 1, sequence_hashes }).await?;
            let answer = sender.answer()?;
            let said: Vec<f64> = answer.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            if round >= 2 {
                frames = verified.descriptors;
                times.arriving.push(ms(verified.last_arrival - verified.first_arrival));
                times.verifying.push(ms(verified.verified_at - verified.last_arrival));
                times.elapsed.push(said[0]);
                times.posting.push(said[1]);
            }
        }
        let Times { arriving, verifying, elapsed, posting } = times;
        let (elapsed, name) = (median(elapsed), kind.name);
        let rate = bytes(args) as f64 / elapsed / 1e6;
        let (posting, arriving, verifying) = (median(posting), median(arriving), median(verifying));
        println!("| {name} | {rate:.1} | {elapsed:.3} | {posting:.3} | {arriving:.3} | {verifying:.3} | {frames} |");
    }
    Ok(())
}

fn bytes(args: &Args) -> u64 {
    u64::from(args.blocks) * BLOCK_BYTES as u64
}

/// Checksums of 1, 8 and 64 MiB, alone and beside those of the other process.
fn digests(memory: &Arc<dyn KvMemory>, sender: &mut Sender) -> anyhow::Result<()> {
    println!("| checksums | alone us | beside another process us |\n|---|---|---|");
    for mib in [1, 8, 64].into_iter().filter(|mib| mib << 20 <= memory.bytes()) {
        let alone = digest_us(memory, mib);
        sender.tell("hash")?;
        sender.answer()?;
        let beside = digest_us(memory, mib);
        sender.tell("rest")?;
        sender.answer()?;
        println!("| {mib} MiB | {alone:.1} | {beside:.1} |");
    }
    println!();
    Ok(())
}

fn digest_us(memory: &Arc<dyn KvMemory>, mib: usize) -> f64 {
    let pieces: Vec<Run> = (0..mib << 8).map(|leaf| Run { at: leaf << 12, bytes: 4096 }).collect();
    let mut digests = vec![0; pieces.len()];
    let times = (0..60).map(|_| {
        let start = Instant::now();
        memory.digests(&pieces, &mut digests);
        1e3 * ms(start.elapsed())
    });
    median(times)
}

/// The other process.
struct Sender {
    process: std::process::Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Sender {
    fn start(ucx: &Path, blocks: u32) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--sender").arg("--ucx").arg(ucx).args(["--blocks", &blocks.to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers = BufReader::new(process.stdout.take().context("piped")?);
        let mut sender = Self { process, answers };
        sender.answer()?;
        Ok(sender)
    }

    fn tell(&mut self, order: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.process.stdin.as_mut().context("piped")?, "{order}")?)
    }

    /// UCX may print lines of its own.
    fn answer(&mut self) -> anyhow::Result<String> {
        loop {
            let mut line = String::new();
            anyhow::ensure!(self.answers.read_line(&mut line)? > 0, "the sender has ended");
            match line.strip_prefix("says ") {
                Some(said) => return Ok(said.trim().to_owned()),
                None => eprint!("{line}"),
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn send(args: &Args, arena: &Arc<Arena>) -> anyhow::Result<()> {
    let mut transports = HashMap::new();
    for range_bytes in kinds(args.blocks).iter().map(|kind| kind.range_bytes) {
        if let std::collections::hash_map::Entry::Vacant(entry) = transports.entry(range_bytes) {
            entry.insert(transport(args, arena, range_bytes)?);
        }
    }
    let rests = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let (memory, resting) = (arena.memory().clone(), rests.clone());
    std::thread::spawn(move || {
        loop {
            if resting.load(Relaxed) {
                std::thread::yield_now();
            } else {
                digest_us(&memory, 8);
            }
        }
    });
    println!("says ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["hash"] => rests.store(false, Relaxed),
            ["rest"] => rests.store(true, Relaxed),
            ["send", kind, ticket] => {
                let kind = kinds(args.blocks)[kind.parse::<usize>()?];
                let said = hand_over(&kind, args.blocks, arena, &transports[&kind.range_bytes], ticket).await?;
                println!("says {said}");
                continue;
            }
            _ => anyhow::bail!("no order {line}"),
        }
        println!("says yes");
    }
    Ok(())
}

async fn hand_over(
    kind: &Kind,
    count: u32,
    arena: &Arc<Arena>,
    transport: &Arc<UcxTransport>,
    ticket: &str,
) -> anyhow::Result<String> {
    let bytes: Vec<u8> = (0..ticket.len() / 2)
        .map(|at| u8::from_str_radix(&ticket[2 * at..2 * at + 2], 16))
        .collect::<Result<_, _>>()?;
    let ticket = v1::Ticket::decode(bytes.as_slice())?;
    let blocks = blocks_of(kind, count);
    let mut manifest = Manifest::new(arena.clone(), blocks.clone(), LAYERS);
    if !kind.sender_hashes {
        manifest.cover(0..count, 0..LAYERS);
    }
    let mut outgoing = transport.open(&ticket).await?;
    let start = Instant::now();
    for first_layer in (0..LAYERS).step_by(kind.layers.into()) {
        let units = first_layer..first_layer + kind.layers;
        for first in (0..count).step_by(kind.blocks as usize) {
            let indices = first..(first + kind.blocks).min(count);
            let pushed = blocks[first as usize..indices.end as usize].to_vec();
            let (hashed, hash) = (units.clone(), kind.sender_hashes);
            let hashing = tokio::task::spawn_blocking(move || {
                if hash {
                    manifest.cover(indices, hashed);
                }
                manifest
            });
            outgoing.push_units(units.clone(), first, &pushed, Arc::new(())).await?;
            manifest = hashing.await?;
        }
    }
    let seal = v1::Seal {
        compatibility_digest: 3,
        handoff_id: ticket.handoff_id.clone(),
        prefill_incarnation: ticket.prefill_incarnation,
        decode_incarnation: ticket.decode_incarnation,
        prompt_tokens: 1,
        sequence_hashes: SequenceHash::all_to_wire(&vec![1.into(); count as usize]),
        checksums: manifest.finish(),
        first_token: 1,
        sampler_position: 2,
        ..Default::default()
    };
    let posted = start.elapsed();
    outgoing.seal(seal).await?;
    Ok(format!("{} {}", ms(start.elapsed()), ms(posted)))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
