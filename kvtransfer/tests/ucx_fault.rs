//! Peers that are killed in the middle of a hand-off (SIGKILL, and reaped: UCX takes a zombie for alive). The survivor
//! must not abort, must say so in time, must get its blocks back, and must serve the next peer; what it got back stays
//! untouched, whatever a frozen peer does when it wakes up. `TANDEM_FAULT_ROUNDS=100` takes minutes.
//!
//! The peer is this binary again, in the ignored test `peer`; it reads its part from standard input.
//!
//! Long because the survivor and the peer that is killed are one program, and speak one small language.
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use prost::Message;
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{
    Arena, BlockOwner, Expected, Grant, Held, Incoming, Outgoing, TransferError, Transport, seal_for,
};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, trace, v1};
use tokio::sync::oneshot;

const BLOCK_BYTES: usize = 256 << 10;
const BLOCKS: u32 = 128;
const PUSH_BLOCKS: usize = 4;
const LEASE: Duration = Duration::from_secs(30);
/// From a death to the error: a tick of the driver, and much patience with a busy machine; far below the lease.
const BOUND: Duration = Duration::from_secs(8);
/// Of each fault, unless `TANDEM_FAULT_ROUNDS` says another number.
const ROUNDS: u32 = 2;
/// Times as many, when some of them show nothing.
const MOST_ROUNDS: u32 = 5;
/// What is under way between two processes that run arrives within this time. Shorter than the grace.
const ARRIVED: Duration = Duration::from_millis(200);
/// Nobody sends it.
const CANARY: u64 = 0xdead_beef_dead_beef;
/// Of writers of an abandoned hand-off.
const GRACE: Duration = Duration::from_millis(500);

/// Starts a line of the peer among those of the test harness.
const SAYS: &str = "peer says ";

/// How the bytes get over.
#[derive(Clone, Copy)]
enum Way {
    /// Through UCX's queue in shared memory.
    Shm,
    /// The receiver copies out of the sender's memory.
    OneCopy,
    Tcp,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::OneCopy => "one copy",
            Self::Tcp => "tcp",
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_over_one_copy() {
    receivers_killed(Way::OneCopy, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_over_one_copy() {
    senders_killed(Way::OneCopy, rounds()).await;
}

/// It writes nothing of ours: the blocks come back without a grace, and nobody is cut off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_frozen_over_one_copy_holds_nothing() {
    let Some((transport, arena)) = start(Way::OneCopy) else { return };
    let counters = transport.counters();
    let mut seen = Seen::default();
    for round in 0..rounds() {
        let (owner, freed) = probe();
        let incoming = accept(&transport, round, owner);
        let mut peer = Peer::start(&["one copy", "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
        seen.prepared(received(&transport, &mut peer, 1).await);
        peer.freeze();
        let frozen = Instant::now();
        drop(incoming);
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
        seen.noticed(frozen.elapsed());
        sing(&arena);
        peer.thaw();
        tokio::time::sleep(ARRIVED).await;
        assert_eq!(silenced(&arena), 0, "words of freed blocks that were written");
        serve(&transport, Way::OneCopy, 1000 + round).await;
    }
    assert_eq!((counters.fenced_peers.load(Relaxed), counters.quarantined_blocks.load(Relaxed)), (0, 0));
    assert_eq!(counters.copied_bytes.load(Relaxed), counters.received_bytes.load(Relaxed));
    println!("one copy: senders frozen, given up by us, {seen}, 0 canaries touched");
}

/// It acknowledges nothing that it has not copied: the blocks come back when it is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_frozen_over_one_copy_holds_nothing() {
    let Some((transport, arena)) = start(Way::OneCopy) else { return };
    let mut peer = Peer::start(&["one copy", "receive", "1"]);
    let ticket = peer.ticket();
    let mut outgoing = transport.open(&ticket).await.expect("open");
    peer.freeze();
    let (owner, freed) = probe();
    let send = async {
        push(&mut outgoing, 0..BLOCKS, &owner).await?;
        outgoing.seal(seal(&arena, &ticket)).await
    };
    in_time(send).await.expect_err("nobody copies");
    drop(owner);
    in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
    peer.kill();
    serve_receiver(&transport, &arena, Way::OneCopy, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_over_shm() {
    receivers_killed(Way::Shm, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_over_tcp() {
    receivers_killed(Way::Tcp, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_over_shm() {
    senders_killed(Way::Shm, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_over_tcp() {
    senders_killed(Way::Tcp, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_frozen_over_shm() {
    sender_frozen(Way::Shm, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_frozen_over_tcp() {
    sender_frozen(Way::Tcp, rounds()).await;
}

/// SIGSTOP in the middle: no connection breaks, and no write ends. Now and then all has arrived before the signal: such
/// a round shows nothing, and another one follows.
async fn sender_frozen(way: Way, rounds: u32) {
    let Some((transport, arena)) = start_with(way, GRACE) else { return };
    let counters = transport.counters();
    let (mut held, mut replaced, mut seen) = (0, 0, Seen::default());
    for round in 0..MOST_ROUNDS * rounds {
        if held == rounds {
            break;
        }
        let (owner, freed) = probe();
        let incoming = accept(&transport, round, owner);
        let mut peer = Peer::start(&[&way.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
        seen.prepared(received(&transport, &mut peer, 1).await);
        peer.freeze();
        let (fenced, address) = (counters.fenced_peers.load(Relaxed), transport.address());
        let aborted = Instant::now();
        drop(incoming);
        // What had left the sender has arrived by then; what is open now only a fence can end.
        tokio::time::sleep(ARRIVED).await;
        let quarantined = counters.quarantined_blocks.load(Relaxed);
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
        let freed_after = aborted.elapsed();
        // On a busy machine the last write may end by itself, late but within the grace: then nobody is cut off.
        if quarantined > 0 && freed_after >= GRACE {
            held += 1;
            seen.noticed(freed_after);
            replaced += u32::from(transport.address() != address);
            assert!(counters.fenced_peers.load(Relaxed) > fenced, "the blocks came back and nobody was cut off");
        }
        // It wakes up among strangers, and what it still sends reaches nothing.
        sing(&arena);
        peer.thaw();
        tokio::time::sleep(ARRIVED).await;
        assert_eq!(silenced(&arena), 0, "words of freed blocks that a cut-off sender has written");
        serve(&transport, way, 1000 + round).await;
    }
    assert_eq!(held, rounds, "too few senders were held in the middle of a transfer: {counters:?}");
    println!("{way}: senders frozen inside a transfer, {replaced} workers replaced, {seen}, 0 canaries touched");
}

/// Each in the middle of a hand-off; after each the next receiver is served.
async fn receivers_killed(way: Way, kills: u32) {
    let Some((transport, arena)) = start(way) else { return };
    let mut seen = Seen::default();
    for kill in 0..kills {
        let preparing = Instant::now();
        let mut peer = Peer::start(&[&way.to_string(), "receive", &kill.to_string()]);
        let ticket = peer.ticket();
        let mut outgoing = transport.open(&ticket).await.expect("open");
        // Connected, and with most of it under way.
        let (first, arrived) = probe();
        push(&mut outgoing, 0..4, &first).await.expect("the peer is alive");
        let (owner, freed) = probe();
        push(&mut outgoing, 4..8 + kill % 64, &owner).await.expect("the peer is alive");
        drop(first);
        in_time(arrived).await.expect_err("the first range has arrived: its owner was dropped");
        seen.prepared(preparing.elapsed());
        let killed = Instant::now();
        peer.kill();
        let rest = async {
            push(&mut outgoing, 8 + kill % 64..BLOCKS, &owner).await?;
            outgoing.seal(seal(&arena, &ticket)).await
        };
        in_time(rest).await.expect_err("nobody is there");
        drop(owner);
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
        seen.noticed(killed.elapsed());
        serve_receiver(&transport, &arena, way, 1000 + kill).await;
    }
    println!("{way}: receivers killed, {seen}");
}

/// The next receiver is served.
async fn serve_receiver(transport: &UcxTransport, arena: &Arena, way: Way, id: u32) {
    let mut peer = Peer::start(&[&way.to_string(), "receive", &id.to_string()]);
    let ticket = peer.ticket();
    let mut outgoing = in_time(transport.open(&ticket)).await.expect("open");
    in_time(push(&mut outgoing, 0..BLOCKS, &(Arc::new(()) as BlockOwner))).await.expect("push");
    in_time(outgoing.seal(seal(arena, &ticket))).await.expect("the next peer is served");
    assert_eq!(peer.line(), "verified");
    peer.leaves().await;
}

/// Each in the middle of a hand-off; after each the next sender is served.
async fn senders_killed(way: Way, kills: u32) {
    let Some((transport, arena)) = start(way) else { return };
    let mut seen = Seen::default();
    for kill in 0..kills {
        let (owner, freed) = probe();
        let incoming = accept(&transport, kill, owner);
        let mut peer = Peer::start(&[&way.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
        seen.prepared(received(&transport, &mut peer, u64::from(1 + kill % 24) << 20).await);
        let killed = Instant::now();
        peer.kill();
        in_time(incoming.verified(expected())).await.expect_err("the seal never came");
        in_time(freed).await.expect_err("the blocks are free: their owner was dropped");
        seen.noticed(killed.elapsed());
        sing(&arena);
        tokio::time::sleep(ARRIVED).await;
        assert_eq!(silenced(&arena), 0, "words of freed blocks that a dead sender has written");
        serve(&transport, way, 1000 + kill).await;
    }
    println!("{way}: senders killed, {seen}, 0 canaries touched");
}

/// How long things took in each round; `in_time` has seen to the worst.
#[derive(Default)]
struct Seen {
    /// From the fault to the error and the blocks.
    notices: Vec<Duration>,
    /// From the peer's start to the moment of the fault: the longest one.
    longest_preparation: Duration,
}

impl Seen {
    fn noticed(&mut self, after: Duration) {
        self.notices.push(after);
    }

    fn prepared(&mut self, within: Duration) {
        self.longest_preparation = self.longest_preparation.max(within);
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut notices = self.notices.clone();
        notices.sort();
        let (rounds, worst) = (notices.len(), notices.last().copied().unwrap_or_default());
        let median = notices.get(rounds / 2).copied().unwrap_or_default();
        let prepared = self.longest_preparation;
        write!(f, "{rounds} rounds: free after {median:?} (median), {worst:?} (worst), ready within {prepared:?}")
    }
}

/// Of each fault.
#[allow(clippy::disallowed_methods, reason = "a test has no command line to be told by")]
fn rounds() -> u32 {
    let told = std::env::var("TANDEM_FAULT_ROUNDS").ok();
    told.map_or(ROUNDS, |rounds| rounds.parse().expect("TANDEM_FAULT_ROUNDS is a number"))
}

/// Fills freed memory with what nobody sends.
fn sing(arena: &Arena) {
    words(arena).iter().for_each(|word| word.store(CANARY, Relaxed));
}

/// Words that somebody has written since.
fn silenced(arena: &Arena) -> usize {
    words(arena).iter().filter(|word| word.load(Relaxed) != CANARY).count()
}

/// The next sender is served.
async fn serve(transport: &UcxTransport, way: Way, id: u32) {
    let incoming = accept(transport, id, Arc::new(()));
    let mut peer = Peer::start(&[&way.to_string(), "send", &trace::hex(&incoming.ticket().encode_to_vec())]);
    peer.say("seal");
    in_time(incoming.verified(expected())).await.expect("the next peer is served");
    assert_eq!(peer.line(), "acknowledged");
    peer.leaves().await;
}

/// Waits until so many bytes more have arrived, and says how long that took.
async fn received(transport: &UcxTransport, from: &mut Peer, bytes: u64) -> Duration {
    let (counters, start) = (transport.counters(), Instant::now());
    let until = counters.received_bytes.load(Relaxed) + bytes;
    let some = async {
        while counters.received_bytes.load(Relaxed) < until {
            tokio::task::yield_now().await;
        }
    };
    // Not what is bounded here: a machine that is busy with other things moves little.
    let arrived = tokio::time::timeout(LEASE, some).await.is_ok();
    assert!(arrived, "stuck, the sender is {:?}: {counters:?}", from.process.try_wait());
    start.elapsed()
}

/// The other process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the other tests"]
async fn peer() {
    let mut lines = std::io::stdin().lines();
    let mut line = || lines.next().expect("a line").expect("text");
    let way = match line().as_str() {
        "shm" => Way::Shm,
        "one copy" => Way::OneCopy,
        _ => Way::Tcp,
    };
    let (transport, arena) = start(way).expect("UCX");
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

    /// Returns when it stands still: one of its threads has to run to stop the others, which on a busy machine takes a
    /// while.
    fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).expect("a child");
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }

    fn thaw(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(self.pid(), signal).expect("it lives");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    /// It has nothing more to do, and ends by itself. Killed meanwhile, it would be one fault more than a round has:
    /// its goodbyes go through the queue of the survivor, whose worker may then have to be replaced.
    async fn leaves(&mut self) {
        let ends = async {
            while self.process.try_wait().expect("a child").is_none() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        in_time(ends).await;
        assert!(self.process.wait().expect("a child").success(), "the peer failed");
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
fn start(way: Way) -> Option<(Arc<UcxTransport>, Arc<Arena>)> {
    start_with(way, UcxConfig::new(UcxProfile::Shm).grace)
}

fn start_with(way: Way, grace: Duration) -> Option<(Arc<UcxTransport>, Arc<Arena>)> {
    let bytes = BLOCKS as usize * BLOCK_BYTES;
    let (profile, memory) = match way {
        Way::Shm => (UcxProfile::Shm, HostMemory::zeroed(bytes)),
        Way::OneCopy => (UcxProfile::Shm, HostMemory::shareable(bytes)),
        Way::Tcp => (UcxProfile::Tcp, HostMemory::zeroed(bytes)),
    };
    let memory = memory.expect("little");
    memory.words().iter().zip(0..).for_each(|(word, i)| word.store(i, Relaxed));
    let arena = Arena::new(memory, BLOCK_BYTES, 1);
    let config = UcxConfig { grace, ..UcxConfig::new(profile) };
    Some((or_skip(UcxTransport::start(arena.clone(), config))?, arena))
}

fn words(arena: &Arena) -> &[AtomicU64] {
    arena.memory().place().host().expect("main memory")
}

fn accept(transport: &UcxTransport, id: u32, owner: BlockOwner) -> Incoming {
    let mut handoff = [9; 16];
    handoff[..4].copy_from_slice(&id.to_le_bytes());
    let grant = Grant {
        handoff: HandoffId(handoff),
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
    Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); BLOCKS as usize] }
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
