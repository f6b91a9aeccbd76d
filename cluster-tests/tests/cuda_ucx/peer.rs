//! One end of a hand-off as a process: KV memory on an emulated GPU, a UCX transport over it, and orders that come in
//! lines. It is this binary again, in the ignored test `peer`.
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prost::Message;
use tandem_cuda::compile::Folders;
use tandem_cuda::{Context, CudaMemory, Device, Kernels};
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, BlockOwner, Expected, Grant, Held, Incoming, Outgoing, Transport, seal_for};
use tandem_proto::{HandoffId, Incarnation, trace, v1};
use tokio::sync::oneshot;

use super::Machine;

/// A layer of a block is 64 KiB.
const BLOCK_BYTES: usize = 256 << 10;
const LAYERS: u8 = 4;
const BLOCKS: u32 = 48;
/// Of a hand-off: not side by side, neither here nor there.
pub const SENT: [u32; 16] = [3, 4, 5, 6, 9, 8, 7, 20, 21, 22, 30, 31, 40, 41, 42, 43];
const GRANTED: [u32; 16] = [47, 10, 11, 12, 13, 14, 15, 1, 2, 30, 31, 32, 33, 34, 4, 5];
/// Nobody sends it.
const CANARY: u64 = 0xdead_beef_dead_beef;
/// Of writers of an abandoned hand-off.
const GRACE: Duration = Duration::from_millis(500);
const LEASE: Duration = Duration::from_secs(30);
/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(60);
/// Starts a line of the peer among those of the harness and of UCX.
const SAYS: &str = "peer says ";
/// Where UCX is.
const UCX: &str = "TANDEM_TEST_UCX";

/// A peer; killed and reaped at the latest when dropped.
pub struct Peer {
    process: Child,
    input: ChildStdin,
    output: Receiver<String>,
    log: Arc<Mutex<String>>,
}

impl Peer {
    /// With the memory of this GPU; waits until it has opened UCX.
    pub fn start(machine: &Machine, device: u32) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["peer::peer", "--exact", "--ignored", "--nocapture"])
            .envs(machine.environment.iter().cloned())
            .envs(tandem_kvtransfer::ucx::SETTINGS)
            .env(UCX, &machine.ucx)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("spawn");
        let (input, stdout) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        let (tell, output) = channel();
        let log = Arc::new(Mutex::new(String::new()));
        // UCX's lines are on standard error.
        keep(process.stderr.take().expect("piped"), log.clone(), |_| ());
        keep(stdout, log.clone(), move |line| {
            // The harness writes the test's name before the first one.
            if let Some((_, said)) = line.split_once(SAYS) {
                let _ = tell.send(said.to_owned());
            }
        });
        let mut peer = Self { process, input, output, log };
        let name = peer.order(&device.to_string());
        assert!(name.contains("cuda_ipc"), "{name}");
        peer
    }

    /// What it answers.
    pub fn order(&mut self, order: &str) -> String {
        self.tell(order);
        self.answer()
    }

    pub fn tell(&mut self, order: &str) {
        writeln!(self.input, "{order}").expect("the peer reads");
    }

    pub fn answer(&self) -> String {
        self.output.recv_timeout(LONG).unwrap_or_else(|error| panic!("{error}, after\n{}", self.log()))
    }

    /// All that it and UCX have printed.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).expect("it lives");
    }

    /// SIGKILL, and reaped.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Shows each line to `see`, and keeps it.
fn keep(output: impl Read + Send + 'static, log: Arc<Mutex<String>>, see: impl Fn(&str) + Send + 'static) {
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            log.lock().expect("no panic").push_str(&format!("{line}\n"));
            see(&line);
        }
    });
}

/// The other process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the other tests"]
#[allow(clippy::disallowed_methods, reason = "the environment configures this test")]
async fn peer() {
    let mut lines = std::io::stdin().lines().map(|line| line.expect("text"));
    let device = lines.next().expect("a device").parse().expect("a number");
    assert!(tandem_cuda_emu::device(), "the parent has seen one");
    let arena = arena(device);
    let lib_dir = std::env::var_os(UCX).map(Into::into);
    let config = UcxConfig { lib_dir, grace: GRACE, ..UcxConfig::new(UcxProfile::Shm) };
    let transport = UcxTransport::start(arena.clone(), config).expect("UCX with CUDA");
    say(&transport.info().name);
    let mut end = End { transport, arena, incoming: None, outgoing: None, freed: None, ticket: v1::Ticket::default() };
    for line in lines {
        let (order, argument) = line.split_once(' ').unwrap_or((line.as_str(), ""));
        end.obey(order, argument).await;
    }
}

fn say(what: &str) {
    println!("{SAYS}{what}");
}

fn arena(device: u32) -> Arc<Arena> {
    let context = Context::of(&Device::numbered(device).expect("a device")).expect("a context");
    let kernels = Kernels::load(&context, &Folders::default()).expect("kernels");
    let memory = CudaMemory::new(&context, &kernels, BLOCKS as usize * BLOCK_BYTES, 0).expect("memory");
    Arena::new(memory, BLOCK_BYTES, usize::from(LAYERS))
}

struct End {
    transport: Arc<UcxTransport>,
    arena: Arc<Arena>,
    incoming: Option<Incoming>,
    outgoing: Option<Outgoing>,
    /// Errs when the last owner is dropped.
    freed: Option<oneshot::Receiver<()>>,
    ticket: v1::Ticket,
}

impl End {
    async fn obey(&mut self, order: &str, argument: &str) {
        match order {
            // Of a receiver.
            "accept" => self.accept(argument.parse().expect("a number")),
            "verify" => {
                let incoming = self.incoming.take().expect("accepted");
                match incoming.verified(expected()).await {
                    Ok(_) => say("verified"),
                    Err(error) => say(&format!("{:?}: {error}", error.kind)),
                }
            }
            "abandon" => drop(self.incoming.take()),
            "wrong-words" => say(&self.wrong_words().to_string()),
            "sing" => self.fill_with(|_, _| CANARY),
            "silenced" => say(&self.silenced().to_string()),
            "received" => say(&self.transport.counters().received_bytes.load(Relaxed).to_string()),
            "await-bytes" => self.await_bytes(argument.parse().expect("a number")).await,
            // Of a sender.
            "fill" => self.fill_with(word),
            "open" => {
                self.ticket = v1::Ticket::decode(unhex(argument).as_slice()).expect("ticket");
                self.outgoing = Some(self.transport.open(&self.ticket).await.expect("open"));
            }
            "push" => self.push(argument.parse().expect("a number")).await,
            "flip" => {
                let at = SENT[5] as usize * BLOCK_BYTES + 4096;
                self.arena.write(at, &(word(SENT[5], 512) ^ (1 << 17)).to_le_bytes());
            }
            "seal" => {
                let seal = seal_for(&self.arena, &SENT, &self.ticket, 9, expected().sequence_hashes);
                match self.outgoing.take().expect("open").seal(seal).await {
                    Ok(_) => say("acknowledged"),
                    Err(error) => say(&format!("{:?}: {error}", error.kind)),
                }
            }
            // Of both: the blocks' owner is gone.
            "freed" => {
                let freed = self.freed.take().expect("blocks");
                let outcome = tokio::time::timeout(LONG, freed).await.expect("the blocks never come back");
                outcome.expect_err("nobody sends");
                say("freed");
            }
            other => panic!("no order {other}"),
        }
    }

    fn owner(&mut self) -> BlockOwner {
        let (sender, freed) = oneshot::channel::<()>();
        self.freed = Some(freed);
        Arc::new(Mutex::new(sender))
    }

    fn accept(&mut self, id: u8) {
        let owner = self.owner();
        let grant = Grant {
            handoff: HandoffId([id; 16]),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: GRANTED.to_vec(),
            units: LAYERS,
            held: Held::default(),
            owner,
            lease: LEASE,
        };
        let incoming = self.transport.accept(grant).expect("accept");
        say(&trace::hex(&incoming.ticket().encode_to_vec()));
        self.incoming = Some(incoming);
    }

    /// One layer after the other, as a prefill node does. The blocks' owner goes with the last copy.
    async fn push(&mut self, layers: u8) {
        let owner = self.owner();
        let outgoing = self.outgoing.as_mut().expect("open");
        for layer in 0..layers {
            outgoing.push_units(layer..layer + 1, 0, &SENT, owner.clone()).await.expect("push");
        }
    }

    async fn await_bytes(&self, bytes: u64) {
        let counters = self.transport.counters();
        while counters.received_bytes.load(Relaxed) < bytes {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        say("here");
    }

    fn fill_with(&self, word: impl Fn(u32, usize) -> u64) {
        for block in 0..BLOCKS {
            let bytes: Vec<u8> = (0..BLOCK_BYTES / 8).flat_map(|at| word(block, at).to_le_bytes()).collect();
            self.arena.copy_in(block, 0, &bytes);
        }
        say("filled");
    }

    /// Of the granted blocks, beside what the sender has in its own; of all others, which nobody may write, those that
    /// are not what they were.
    fn wrong_words(&self) -> usize {
        let sources: BTreeMap<u32, u32> = GRANTED.into_iter().zip(SENT).collect();
        let wrong = |block: u32| match sources.get(&block) {
            Some(source) => self.differing(block, |at| word(*source, at)),
            None => self.differing(block, |_| CANARY),
        };
        (0..BLOCKS).map(wrong).sum()
    }

    fn silenced(&self) -> usize {
        (0..BLOCKS).map(|block| self.differing(block, |_| CANARY)).sum()
    }

    fn differing(&self, block: u32, expected: impl Fn(usize) -> u64) -> usize {
        let mut bytes = vec![0; BLOCK_BYTES];
        self.arena.copy_out(block, 0, &mut bytes);
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        words.enumerate().filter(|(at, word)| *word != expected(*at)).count()
    }
}

/// What a sender's memory holds.
fn word(block: u32, at: usize) -> u64 {
    (u64::from(block) << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn expected() -> Expected {
    Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); SENT.len()] }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16).expect("hexadecimal")).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}
