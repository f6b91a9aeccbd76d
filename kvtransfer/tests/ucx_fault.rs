//! Peers that are killed in the middle of a hand-off (SIGKILL, and reaped: UCX takes a zombie for alive). The survivor
//! must not abort, must say so in time, must get its blocks back, and must serve the next peer.
//!
//! The peer is this binary again, in the ignored test `peer`; it reads its part from standard input.
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use prost::Message;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{
    Arena, BlockOwner, Expected, Grant, Held, Incoming, Outgoing, TransferError, Transport, seal_for,
};
use tandem_proto::{HandoffId, Incarnation, trace, v1};
use tokio::sync::oneshot;

const BLOCK_BYTES: usize = 256 << 10;
const BLOCKS: u32 = 128;
const PUSH_BLOCKS: usize = 4;
const LEASE: Duration = Duration::from_secs(30);
/// One keepalive interval, and much patience with a busy machine; far below the lease.
const BOUND: Duration = Duration::from_secs(8);
const ROUNDS: u8 = 2;
/// Of writers of an abandoned hand-off.
const GRACE: Duration = Duration::from_millis(500);

/// Starts a line of the peer among those of the test harness.
const SAYS: &str = "peer says ";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_over_shm() {
    receiver_killed(UcxProfile::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_over_tcp() {
    receiver_killed(UcxProfile::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_over_shm() {
    sender_killed(UcxProfile::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_over_tcp() {
    sender_killed(UcxProfile::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_frozen_over_shm() {
    sender_frozen(UcxProfile::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_frozen_over_tcp() {
    sender_frozen(UcxProfile::Tcp).await;
}

/// SIGSTOP in the middle: no connection breaks, and no write ends. Now and then all has arrived before the signal.
async fn sender_frozen(profile: UcxProfile) {
    let Some((transport, _)) = start_with(UcxConfig { grace: GRACE, ..UcxConfig::new(profile) }) else { return };
    let counters = transport.counters();
    for round in 0..ROUNDS {
        let (owner, freed) = probe();
        let incoming = accept(&transport, round, owner);
        let peer = Peer::start(&[&profile.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
        received(&transport, 1).await;
        peer.freeze();
        drop(incoming);
        let (quarantined, frozen) = (counters.quarantined_blocks.load(Relaxed), Instant::now());
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
        println!("{profile}: {quarantined} blocks were in quarantine for {:?}", frozen.elapsed());
        // It wakes up among strangers, and what it still sends reaches nothing.
        peer.thaw();
        serve(&transport, profile, 100 + round).await;
    }
    println!("{profile}: {counters:?}");
}

async fn receiver_killed(profile: UcxProfile) {
    let Some((transport, arena)) = start(profile) else { return };
    for round in 0..ROUNDS {
        let mut peer = Peer::start(&[&profile.to_string(), "receive", &round.to_string()]);
        let ticket = peer.ticket();
        let mut outgoing = transport.open(&ticket).await.expect("open");
        // Connected, and with most of it under way.
        let (first, arrived) = probe();
        push(&mut outgoing, 0..4, &first).await.expect("the peer is alive");
        let (owner, freed) = probe();
        push(&mut outgoing, 4..40, &owner).await.expect("the peer is alive");
        drop(first);
        in_time(arrived).await.expect_err("the first range has arrived: its owner was dropped");
        peer.kill();
        let rest = async {
            push(&mut outgoing, 40..BLOCKS, &owner).await?;
            outgoing.seal(seal(&arena, &ticket)).await
        };
        in_time(rest).await.expect_err("nobody is there");
        drop(owner);
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
    }
    let mut peer = Peer::start(&[&profile.to_string(), "receive", "100"]);
    let ticket = peer.ticket();
    let mut outgoing = transport.open(&ticket).await.expect("open");
    push(&mut outgoing, 0..BLOCKS, &(Arc::new(()) as BlockOwner)).await.expect("push");
    in_time(outgoing.seal(seal(&arena, &ticket))).await.expect("the next peer is served");
    assert_eq!(peer.line(), "verified");
}

async fn sender_killed(profile: UcxProfile) {
    let Some((transport, _)) = start(profile) else { return };
    for round in 0..ROUNDS {
        let (owner, freed) = probe();
        let incoming = accept(&transport, round, owner);
        let mut peer = Peer::start(&[&profile.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
        received(&transport, 4 << 20).await;
        peer.kill();
        in_time(incoming.verified(expected())).await.expect_err("the seal never came");
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
    }
    serve(&transport, profile, 100).await;
}

/// The next sender is served.
async fn serve(transport: &UcxTransport, profile: UcxProfile, id: u8) {
    let incoming = accept(transport, id, Arc::new(()));
    let mut peer = Peer::start(&[&profile.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
    peer.say("seal");
    in_time(incoming.verified(expected())).await.expect("the next peer is served");
    assert_eq!(peer.line(), "acknowledged");
}

/// So many bytes more have arrived.
async fn received(transport: &UcxTransport, bytes: u64) {
    let counters = transport.counters();
    let until = counters.received_bytes.load(Relaxed) + bytes;
    let some = async {
        while counters.received_bytes.load(Relaxed) < until {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(BOUND, some).await.is_ok(), "stuck: {counters:?}");
}

/// The other process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the other tests"]
async fn peer() {
    let mut lines = std::io::stdin().lines();
    let mut line = || lines.next().expect("a line").expect("text");
    let profile = if line() == "shm" { UcxProfile::Shm } else { UcxProfile::Tcp };
    let (transport, arena) = start(profile).expect("UCX");
    match line().as_str() {
        "receive" => {
            let incoming = accept(&transport, line().parse().expect("number"), Arc::new(()));
            println!("{SAYS}{}", trace::hex(&incoming.ticket().encode_to_vec()));
            incoming.verified(expected()).await.expect("verified");
            println!("{SAYS}verified");
        }
        _ => {
            let ticket = v1::Ticket::decode(unhex(&line()).as_slice()).expect("ticket");
            let mut outgoing = transport.open(&ticket).await.expect("open");
            push(&mut outgoing, 0..BLOCKS, &(Arc::new(()) as BlockOwner)).await.expect("push");
            line();
            outgoing.seal(seal(&arena, &ticket)).await.expect("acknowledged");
            println!("{SAYS}acknowledged");
        }
    }
}

/// A process that is killed and reaped at the latest when dropped.
struct Peer {
    process: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Peer {
    fn start(lines: &[&str]) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["peer", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let mut peer = Self { process, input, output };
        lines.iter().for_each(|line| peer.say(line));
        peer
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the peer reads");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).expect("text") > 0 {
            // The harness writes the test's name before the first one.
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.trim_end().to_owned();
            }
            line.clear();
        }
        panic!("the peer ended without a word")
    }

    fn ticket(&mut self) -> v1::Ticket {
        v1::Ticket::decode(unhex(&self.line()).as_slice()).expect("ticket")
    }

    fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
    }

    fn thaw(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("it lives");
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// `None`: there is no UCX here.
fn start(profile: UcxProfile) -> Option<(Arc<UcxTransport>, Arc<Arena>)> {
    start_with(UcxConfig::new(profile))
}

fn start_with(config: UcxConfig) -> Option<(Arc<UcxTransport>, Arc<Arena>)> {
    let words = u64::from(BLOCKS) * BLOCK_BYTES as u64 / 8;
    let arena = Arena::new((0..words).map(AtomicU64::new).collect(), BLOCK_BYTES);
    match UcxTransport::start(arena.clone(), config) {
        Ok(transport) => Some((transport, arena)),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn accept(transport: &UcxTransport, id: u8, owner: BlockOwner) -> Incoming {
    let grant = Grant {
        handoff: HandoffId([id; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: (0..BLOCKS).rev().collect(),
        units: 1,
        held: Held::default(),
        owner,
        lease: LEASE,
    };
    transport.accept(grant).expect("accept")
}

async fn push(outgoing: &mut Outgoing, range: std::ops::Range<u32>, owner: &BlockOwner) -> Result<(), TransferError> {
    let blocks: Vec<u32> = range.collect();
    for some in blocks.chunks(PUSH_BLOCKS) {
        outgoing.push(some[0], some, owner.clone()).await?;
    }
    Ok(())
}

fn seal(arena: &Arena, ticket: &v1::Ticket) -> v1::Seal {
    seal_for(arena, &(0..BLOCKS).collect::<Vec<_>>(), ticket, 9, expected().sequence_hashes)
}

fn expected() -> Expected {
    Expected { prompt_tokens: 9, sequence_hashes: vec![5; BLOCKS as usize] }
}

/// The receiver errs when the owner was dropped.
fn probe() -> (BlockOwner, oneshot::Receiver<()>) {
    let (sender, dropped) = oneshot::channel::<()>();
    (Arc::new(std::sync::Mutex::new(sender)), dropped)
}

async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(BOUND, future).await.expect("did not end in time")
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16).expect("hexadecimal")).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}
