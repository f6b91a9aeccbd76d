//! The conformance cases, generic over a constructor of a pair of transports, and the little world they run in.
mod faults;
mod progress;
mod transfers;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub use faults::*;
pub use progress::*;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tandem_kvtransfer::{
    Arena, Expected, Grant, Held, Incoming, Outgoing, Receipt, TransferError, Transport, Verified, seal_for,
};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, SequenceHash, v1};
use tokio::sync::oneshot;
pub use transfers::*;

pub const ARENA_BLOCKS: usize = 1024;
pub const CANARY: u64 = 0xdead_beef_dead_beef;
/// Sizes of blocks that divide into so many words have them.
pub const LAYERS: u8 = 6;
const LEASE: Duration = Duration::from_secs(20);
/// Everything that must happen "promptly" happens within this.
const PROMPT: Duration = Duration::from_secs(8);

/// Two nodes; the sender's arena is to hold noise, the receiver's canaries.
pub struct Pair {
    pub sender: Arc<dyn Transport>,
    pub receiver: Arc<dyn Transport>,
    pub from: Arc<Arena>,
    pub to: Arc<Arena>,
}

/// An arena full of canaries.
pub fn arena(block_bytes: usize) -> Arc<Arena> {
    let blocks = if block_bytes > 65_536 { 64 } else { ARENA_BLOCKS };
    let memory = HostMemory::holding(&vec![CANARY; blocks * block_bytes / 8]).expect("little");
    Arena::new(memory, block_bytes, LAYERS.into())
}

/// As [`arena`], and other processes may map it.
pub fn shareable_arena(block_bytes: usize) -> Arc<Arena> {
    let memory = HostMemory::shareable(arena(block_bytes).bytes()).expect("little");
    memory.words().iter().for_each(|word| word.store(CANARY, Relaxed));
    Arena::new(memory, block_bytes, LAYERS.into())
}

/// A pair with noise to send, unless the backend cannot run here.
pub fn pair(make: crate::MakePair, block_bytes: usize, faults: tandem_kvtransfer::Faults) -> Option<Pair> {
    let pair = make(block_bytes, faults)?;
    let mut rng = StdRng::seed_from_u64(block_bytes as u64);
    words(&pair.from).iter().for_each(|word| word.store(rng.random(), Relaxed));
    Some(pair)
}

/// Tells when nobody holds the blocks any more.
pub struct Probe(Option<oneshot::Sender<()>>);

impl Probe {
    pub fn new() -> (Arc<Self>, oneshot::Receiver<()>) {
        let (sender, dropped) = oneshot::channel();
        (Arc::new(Self(Some(sender))), dropped)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.0.take().map(|sender| sender.send(()));
    }
}

/// One granted hand-off, both block tables, and probes of both owners.
pub struct HandOff {
    pub incoming: Incoming,
    pub ticket: v1::Ticket,
    pub from: Vec<u32>,
    pub to: Vec<u32>,
    pub hashes: Vec<SequenceHash>,
    pub received: oneshot::Receiver<()>,
}

impl HandOff {
    pub fn new(pair: &Pair, from: Vec<u32>, to: Vec<u32>, lease: Duration) -> Self {
        let (owner, received) = Probe::new();
        Self::granted(pair, grant(HandoffId::random(&mut rand::rng()), to, owner, lease), from, received)
    }

    fn granted(pair: &Pair, grant: Grant, from: Vec<u32>, received: oneshot::Receiver<()>) -> Self {
        let to = grant.blocks.clone();
        let incoming = pair.receiver.accept(grant).expect("accept");
        let hashes = (0..to.len() as u128).map(|i| (i * 31 + 7).into()).collect();
        Self { ticket: incoming.ticket(), incoming, from, to, hashes, received }
    }

    pub fn small(pair: &Pair) -> Self {
        Self::new(pair, vec![3, 4, 9, 1], vec![7, 2, 3, 4], LEASE)
    }

    pub fn expected(&self) -> Expected {
        Expected { prompt_tokens: 61, sequence_hashes: self.hashes.clone() }
    }

    pub fn seal(&self, pair: &Pair) -> v1::Seal {
        seal_for(&pair.from, &self.from, &self.ticket, 61, self.hashes.clone())
    }
}

pub fn grant(handoff: HandoffId, blocks: Vec<u32>, owner: Arc<Probe>, lease: Duration) -> Grant {
    Grant {
        handoff,
        prefill_incarnation: Incarnation(11),
        decode_incarnation: Incarnation(12),
        compatibility_digest: 13,
        blocks,
        units: 1,
        held: Held::default(),
        owner,
        lease,
    }
}

pub fn grant_in_units(blocks: Vec<u32>, units: u8, owner: Arc<Probe>, lease: Duration) -> Grant {
    Grant { units, ..grant(HandoffId::random(&mut rand::rng()), blocks, owner, lease) }
}

/// Pushes everything and seals with `seal`, while the receiver waits.
pub async fn run(
    pair: &Pair,
    handoff: HandOff,
    seal: v1::Seal,
) -> (Result<Receipt, TransferError>, Result<Verified, TransferError>) {
    let expected = handoff.expected();
    let send = async {
        let mut outgoing = pair.sender.open(&handoff.ticket).await?;
        outgoing.push(0, &handoff.from, Arc::new(())).await?;
        outgoing.seal(seal).await
    };
    let both = async { tokio::join!(send, handoff.incoming.verified(expected)) };
    prompt(both).await
}

pub async fn open(pair: &Pair, handoff: &HandOff) -> Outgoing {
    prompt(pair.sender.open(&handoff.ticket)).await.expect("open")
}

pub async fn prompt<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PROMPT, future).await.expect("did not end in time")
}

/// All of an arena.
pub fn words(arena: &Arena) -> &[AtomicU64] {
    arena.memory().place().host().expect("main memory")
}

/// `count` distinct blocks of the arena in random order.
pub fn table(rng: &mut StdRng, arena: &Arena, count: usize) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..arena.blocks()).collect();
    // Some runs of neighbours, some not.
    if rng.random() {
        blocks.shuffle(rng);
    } else {
        let at = rng.random_range(0..blocks.len());
        blocks.rotate_left(at);
    }
    blocks.truncate(count);
    blocks
}

pub fn block_bytes(arena: &Arena, block: u32) -> Vec<u8> {
    let mut bytes = vec![0; arena.block_bytes()];
    arena.copy_out(block, 0, &mut bytes);
    bytes
}
