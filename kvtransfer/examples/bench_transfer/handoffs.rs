//! Whole hand-offs through the public trait, timed.
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::{Rng, seq::SliceRandom};
use tandem_kvtransfer::{Arena, Expected, Grant, Transport, seal_for};
use tandem_proto::{HandoffId, Incarnation};

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

/// `bytes` of random words, every page touched.
pub fn noise(bytes: usize) -> Arc<[AtomicU64]> {
    let mut rng = SmallRng::seed_from_u64(bytes as u64);
    (0..bytes / 8).map(|_| AtomicU64::new(rng.random())).collect()
}

impl Bench {
    pub fn new(
        from: &Arc<[AtomicU64]>,
        to: &Arc<[AtomicU64]>,
        range_bytes: usize,
        transfer_bytes: usize,
        start: fn(&Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>>,
    ) -> anyhow::Result<Self> {
        let (from, to) = (Arena::new(from.clone(), range_bytes), Arena::new(to.clone(), range_bytes));
        let (sender, receiver) = (start(&from)?, start(&to)?);
        let blocks = (transfer_bytes / range_bytes).max(1);
        Ok(Self { from, to, sender, receiver, blocks, rng: SmallRng::seed_from_u64(1) })
    }

    /// Bytes of one hand-off.
    pub fn bytes(&self) -> usize {
        self.blocks * self.from.block_bytes()
    }

    /// One hand-off of blocks from all over the arena, none of them neighbours, so that every block is a range.
    pub async fn hand_off(&mut self) -> anyhow::Result<Sample> {
        let (from, to) = (self.table(self.from.blocks()), self.table(self.to.blocks()));
        let sequence_hashes = vec![1; self.blocks];
        let grant = Grant {
            handoff: HandoffId::random(&mut self.rng),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: to,
            owner: Arc::new(()),
            lease: Duration::from_secs(30),
        };
        let incoming = self.receiver.accept(grant)?;
        let ticket = incoming.ticket();
        let seal = seal_for(&self.from, &from, &ticket, 1, sequence_hashes.clone());
        let mut outgoing = self.sender.open(&ticket).await?;
        // A task of its own: a node's receiver does not wait on its sender's thread either.
        let received = tokio::spawn(incoming.verified(Expected { prompt_tokens: 1, sequence_hashes }));
        let start = Instant::now();
        outgoing.push(0, &from, Arc::new(())).await?;
        outgoing.seal(seal).await?;
        let verified = received.await??;
        let rate = |end: Instant| self.bytes() as f64 / end.duration_since(start).as_secs_f64() / 1e9;
        Ok(Sample { push: rate(verified.last_arrival), verified: rate(verified.verified_at) })
    }

    /// Blocks of a random table; the sender's may repeat when the arena is one hot block.
    fn table(&mut self, arena_blocks: u32) -> Vec<u32> {
        let mut table: Vec<u32> = (0..arena_blocks).collect();
        table.shuffle(&mut self.rng);
        table.into_iter().cycle().take(self.blocks).collect()
    }
}
