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

/// The nodes, in this process.
pub struct Incast {
    senders: Vec<(Arc<Arena>, Arc<dyn Transport>)>,
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
        let sender = || {
            let from = Arena::new(noise(bytes)?, BLOCK_BYTES, LAYERS);
            let transport = on_core(0, || start(&from))?;
            anyhow::Ok((from, transport))
        };
        let senders = (0..SENDERS).map(|_| sender()).collect::<anyhow::Result<_>>()?;
        Ok(Self { senders, to, receiver, blocks: (bytes / BLOCK_BYTES) as u32, rounds: 0 })
    }

    /// Sixteen hand-offs at once by the first `senders` of them, in turn.
    pub async fn round(&mut self, senders: usize) -> anyhow::Result<Round> {
        self.rounds += 1;
        let expected = || Expected { prompt_tokens: 1, sequence_hashes: vec![1; self.blocks as usize] };
        let blocks: Arc<[u32]> = (0..self.blocks).collect();
        let (mut receiving, mut sending) = (vec![], vec![]);
        for index in 0..SENDERS {
            let (from, sender) = &self.senders[index % senders];
            let incoming = self.receiver.accept(self.grant(index as u32))?;
            let ticket = incoming.ticket();
            let seal = seal_for(from, &blocks, &ticket, 1, expected().sequence_hashes);
            sending.push((sender.open(&ticket).await?, seal));
            receiving.push(tokio::spawn(incoming.verified(expected())));
        }
        let before = peak_mib(true)?;
        let start = Instant::now();
        let sent = sending.into_iter().map(|(outgoing, seal)| tokio::spawn(send(outgoing, seal, blocks.clone())));
        try_join_all(sent).await?.into_iter().collect::<anyhow::Result<Vec<()>>>()?;
        let verified = try_join_all(receiving).await?.into_iter().collect::<Result<Vec<_>, _>>()?;
        let took = verified.iter().map(|verified| verified.last_arrival.duration_since(start).as_secs_f64());
        let (longest, shortest) = took.fold((0f64, f64::MAX), |(most, least), one| (most.max(one), least.min(one)));
        let rate = self.to.bytes() as f64 / longest / 1e9;
        Ok(Round { rate, spread: longest / shortest, grown_mib: peak_mib(false)? - before })
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
            blocks: (index * self.blocks..(index + 1) * self.blocks).collect(),
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: Duration::from_secs(60),
        }
    }
}

async fn send(mut outgoing: Outgoing, seal: v1::Seal, blocks: Arc<[u32]>) -> anyhow::Result<()> {
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
