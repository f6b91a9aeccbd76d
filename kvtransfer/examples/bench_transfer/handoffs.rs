//! Whole hand-offs through the public trait, timed.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::{Rng, seq::SliceRandom};
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Incoming, Outgoing, Transport, seal_for};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, v1};

use super::cores::on_core;

/// By then the pushes of [`Bench::hot`] have arrived.
const ARRIVED: Duration = Duration::from_millis(100);

/// As a small model has.
pub const LAYERS: usize = 16;

/// GB/s (10⁹ bytes) of one hand-off.
pub struct Sample {
    /// First push to last byte in the arena.
    pub push: f64,
    /// First push to verified.
    pub verified: f64,
}

/// Two nodes in this process, each with its own arena and threads.
pub struct Bench {
    from: Arc<Arena>,
    to: Arc<Arena>,
    sender: Arc<dyn Transport>,
    receiver: Arc<dyn Transport>,
    blocks: usize,
    rng: SmallRng,
}

/// `bytes` of random words, every page touched, as a node has them: other processes may map it.
pub fn noise(bytes: usize) -> anyhow::Result<Arc<HostMemory>> {
    let (memory, mut rng) = (HostMemory::shareable(bytes)?, SmallRng::seed_from_u64(bytes as u64));
    memory.touch(0..bytes);
    memory.words().iter().for_each(|word| word.store(rng.random(), Relaxed));
    Ok(memory)
}

impl Bench {
    pub fn new(
        from: &Arc<HostMemory>,
        to: &Arc<HostMemory>,
        range_bytes: usize,
        transfer_bytes: usize,
        start: fn(&Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>>,
    ) -> anyhow::Result<Self> {
        let (from, to) = (Arena::new(from.clone(), range_bytes, LAYERS), Arena::new(to.clone(), range_bytes, LAYERS));
        // As `tandem up` pins nodes.
        let (sender, receiver) = (on_core(0, || start(&from))?, on_core(1, || start(&to))?);
        let blocks = (transfer_bytes / range_bytes).max(1);
        Ok(Self { from, to, sender, receiver, blocks, rng: SmallRng::seed_from_u64(1) })
    }

    /// Bytes of one hand-off.
    pub fn bytes(&self) -> usize {
        self.blocks * self.from.block_bytes()
    }

    /// One hand-off of blocks from all over the arena, hardly any of them neighbours.
    pub async fn hand_off(&mut self) -> anyhow::Result<Sample> {
        let (from, to) = (self.table(self.from.blocks()), self.table(self.to.blocks()));
        let Granted { mut outgoing, incoming, seal, expected } = self.grant(&from, to).await?;
        // A task of its own: a node's receiver does not wait on its sender's thread either.
        let received = tokio::spawn(incoming.verified(expected));
        let start = Instant::now();
        outgoing.push(0, &from, Arc::new(())).await?;
        outgoing.seal(seal).await?;
        let verified = received.await??;
        let rate = |end: Instant| self.bytes() as f64 / end.duration_since(start).as_secs_f64() / 1e9;
        Ok(Sample { push: rate(verified.last_arrival), verified: rate(verified.verified_at) })
    }

    /// GB/s of sending one block again and again, into an arena that fits the cache: a hand-off fills each block once,
    /// so this takes many hand-offs, all announced before and pushed at once.
    pub async fn hot(&mut self) -> anyhow::Result<f64> {
        let (from, to) = (vec![0; self.to.blocks() as usize], (0..self.to.blocks()).collect::<Vec<_>>());
        let (mut pushing, mut receiving) = (vec![], vec![]);
        for _ in 0..(self.blocks / to.len()).max(1) {
            let Granted { outgoing, incoming, seal, expected } = self.grant(&from, to.clone()).await?;
            pushing.push((outgoing, seal));
            receiving.push(incoming.verified(expected));
        }
        let bytes = pushing.len() * self.to.bytes();
        let start = Instant::now();
        for (outgoing, _) in &mut pushing {
            outgoing.push(0, &from, Arc::new(())).await?;
        }
        // A seal starts a verification, which would compete with the pushes for the cores.
        tokio::time::sleep(ARRIVED).await;
        let verdicts = futures::future::try_join_all(receiving);
        let receipts = futures::future::try_join_all(pushing.into_iter().map(|(outgoing, seal)| outgoing.seal(seal)));
        let (verified, _) = tokio::try_join!(verdicts, receipts)?;
        let last = verified.iter().map(|verified| verified.last_arrival).max().unwrap_or(start);
        Ok(bytes as f64 / last.duration_since(start).as_secs_f64() / 1e9)
    }

    async fn grant(&mut self, from: &[u32], to: Vec<u32>) -> anyhow::Result<Granted> {
        let sequence_hashes = vec![1.into(); to.len()];
        let grant = Grant {
            handoff: HandoffId::random(&mut self.rng),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: to,
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: Duration::from_secs(30),
        };
        let incoming = self.receiver.accept(grant)?;
        let ticket = incoming.ticket();
        let seal = seal_for(&self.from, from, &ticket, 1, sequence_hashes.clone());
        let outgoing = self.sender.open(&ticket).await?;
        Ok(Granted { outgoing, incoming, seal, expected: Expected { prompt_tokens: 1, sequence_hashes } })
    }

    /// Blocks of a random table.
    fn table(&mut self, arena_blocks: u32) -> Vec<u32> {
        let mut table: Vec<u32> = (0..arena_blocks).collect();
        table.shuffle(&mut self.rng);
        table.truncate(self.blocks);
        table
    }
}

/// A hand-off that both ends know of.
struct Granted {
    outgoing: Outgoing,
    incoming: Incoming,
    seal: v1::Seal,
    expected: Expected,
}
