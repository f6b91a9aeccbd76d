//! Many senders and one receiver: the total beside what one sender moves of the same hand-offs, how evenly the senders
//! get on, and what memory it takes.
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Outgoing, Transport, seal_for};
use tandem_proto::{HandoffId, Incarnation, v1};

use super::cores::on_core;
use super::handoffs::{LAYERS, noise};

/// Starts a node's transport on its arena.
pub type Start = fn(&Arc<Arena>) -> anyhow::Result<Arc<dyn Transport>>;

/// Of an incast.
pub const SENDERS: usize = 16;
const BLOCK_BYTES: usize = 1 << 20;

/// What one round of hand-offs showed.
pub struct Round {
    /// GB/s (10⁹ bytes) from the first push to the last byte of all.
    pub rate: f64,
    /// The fastest hand-off's rate over the slowest one's: 1 where all got the same.
    pub spread: f64,
    /// MiB by which the process grew at most.
    pub grown_mib: f64,
}

/// Who sends the sixteen hand-offs of a round.
#[derive(Clone, Copy)]
pub enum Senders {
    /// One sender all of them, each out of memory of its own: what is sent twice comes out of the caches.
    One,
    /// Each of sixteen senders one.
    Each,
}

/// A node.
struct Sender {
    arena: Arc<Arena>,
    transport: Arc<dyn Transport>,
}

/// The nodes, in this process.
pub struct Incast {
    /// Has as much memory as the senders together.
    alone: Sender,
    senders: Vec<Sender>,
    to: Arc<Arena>,
    receiver: Arc<dyn Transport>,
    blocks: u32,
    rounds: u32,
}

impl Incast {
    /// Each sender has `bytes` for the receiver.
    pub fn new(bytes: usize, start: Start) -> anyhow::Result<Self> {
        let to = Arena::new(noise(SENDERS * bytes)?, BLOCK_BYTES, LAYERS);
        let receiver = on_core(1, || start(&to))?;
        let sender = |bytes| {
            let arena = Arena::new(noise(bytes)?, BLOCK_BYTES, LAYERS);
            let transport = on_core(0, || start(&arena))?;
            anyhow::Ok(Sender { arena, transport })
        };
        let senders = (0..SENDERS).map(|_| sender(bytes)).collect::<anyhow::Result<_>>()?;
        let alone = sender(SENDERS * bytes)?;
        Ok(Self { alone, senders, to, receiver, blocks: (bytes / BLOCK_BYTES) as u32, rounds: 0 })
    }

    /// Sixteen hand-offs at once.
    pub async fn round(&mut self, senders: Senders) -> anyhow::Result<Round> {
        self.rounds += 1;
        let expected = || Expected { prompt_tokens: 1, sequence_hashes: vec![1.into(); self.blocks as usize] };
        let (mut receiving, mut sending) = (vec![], vec![]);
        for index in 0..SENDERS {
            let (sender, blocks) = match senders {
                Senders::One => (&self.alone, self.part(index as u32)),
                Senders::Each => (&self.senders[index], self.part(0)),
            };
            let incoming = self.receiver.accept(self.grant(index as u32))?;
            let ticket = incoming.ticket();
            let seal = seal_for(&sender.arena, &blocks, &ticket, 1, expected().sequence_hashes);
            sending.push((sender.transport.open(&ticket).await?, seal, blocks));
            receiving.push(tokio::spawn(incoming.verified(expected())));
        }
        let before = peak_mib(true)?;
        let start = Instant::now();
        let sent = sending.into_iter().map(|(outgoing, seal, blocks)| tokio::spawn(send(outgoing, seal, blocks)));
        try_join_all(sent).await?.into_iter().collect::<anyhow::Result<Vec<()>>>()?;
        let verified = try_join_all(receiving).await?.into_iter().collect::<Result<Vec<_>, _>>()?;
        let took = verified.iter().map(|verified| verified.last_arrival.duration_since(start).as_secs_f64());
        let (longest, shortest) = took.fold((0f64, f64::MAX), |(most, least), one| (most.max(one), least.min(one)));
        let rate = self.to.bytes() as f64 / longest / 1e9;
        Ok(Round { rate, spread: longest / shortest, grown_mib: peak_mib(false)? - before })
    }

    /// The blocks of a hand-off, out of memory that holds so many in front of them.
    fn part(&self, index: u32) -> Vec<u32> {
        (index * self.blocks..(index + 1) * self.blocks).collect()
    }

    fn grant(&self, index: u32) -> Grant {
        let mut handoff = [7; 16];
        handoff[..4].copy_from_slice(&index.to_le_bytes());
        handoff[4..8].copy_from_slice(&self.rounds.to_le_bytes());
        Grant {
            handoff: HandoffId(handoff),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: self.part(index),
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: Duration::from_secs(60),
        }
    }
}

async fn send(mut outgoing: Outgoing, seal: v1::Seal, blocks: Vec<u32>) -> anyhow::Result<()> {
    outgoing.push(0, &blocks, Arc::new(())).await?;
    outgoing.seal(seal).await?;
    Ok(())
}

/// The most that was resident since it was last asked anew.
fn peak_mib(anew: bool) -> anyhow::Result<f64> {
    if anew {
        // Of Linux: forget the peak.
        std::fs::write("/proc/self/clear_refs", "5")?;
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
