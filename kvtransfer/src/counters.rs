//! What a transport counts; read by a node's metrics. Plain relaxed atomics: no lock, no order between them.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::{REFUSAL_LABELS, Refusal};

/// Counters of one transport since its start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes of block ranges queued for sending.
    pub sent_bytes: AtomicU64,
    /// Bytes of block ranges that landed.
    pub received_bytes: AtomicU64,
    /// Hand-offs that the receiver acknowledged.
    pub sent_handoffs: AtomicU64,
    /// Hand-offs verified here.
    pub verified_handoffs: AtomicU64,
    /// Hand-offs that ended otherwise here (receiving side).
    pub aborted_handoffs: AtomicU64,
    /// Grants that were let go before any sender used them: nothing was moved, nobody was refused.
    pub released_handoffs: AtomicU64,
    /// Cancelled hand-offs whose blocks wait for a writer to end, ever.
    pub quarantined_handoffs: AtomicU64,
    /// Blocks that wait for a writer to end, now: a gauge.
    pub quarantined_blocks: AtomicU64,
    /// Ranges that are being written into the arena, now: a gauge.
    pub open_writes: AtomicU64,
    /// The most bytes of announced payloads that were let in at once (over UCX): bounded, however many peers there are.
    pub landing_peak_bytes: AtomicU64,
    /// Peers that were cut off because their writes into quarantined blocks did not end within their grace.
    pub fenced_peers: AtomicU64,
    /// Frames or connections that were not ours to read: garbage.
    pub protocol_errors: AtomicU64,
    /// Frames and ranges for which there was no room: a peer sends more than this node reads.
    pub dropped_frames: AtomicU64,
    /// Bytes that this node copied out of a peer's memory itself; part of the received ones.
    pub copied_bytes: AtomicU64,
    /// Senders on this host whose memory could not be mapped: their ranges come through UCX's queues.
    pub unmapped_peers: AtomicU64,
    /// Tickets that were refused before anything was sent.
    pub rejected_tickets: AtomicU64,
    /// Hellos that were refused before anything that they say was used: without their hand-off's key, or with an
    /// address that is none.
    pub rejected_hellos: AtomicU64,
    /// Peers lost.
    pub lost_peers: AtomicU64,
    refused: [AtomicU64; REFUSAL_LABELS.len()],
}

impl Counters {
    /// What several transports of one node counted together, as it is now.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let total = Self::default();
        for Self {
            sent_bytes,
            received_bytes,
            sent_handoffs,
            verified_handoffs,
            aborted_handoffs,
            released_handoffs,
            quarantined_handoffs,
            quarantined_blocks,
            open_writes,
            landing_peak_bytes,
            fenced_peers,
            protocol_errors,
            dropped_frames,
            copied_bytes,
            unmapped_peers,
            rejected_tickets,
            rejected_hellos,
            lost_peers,
            refused,
        } in all
        {
            for (sum, count) in [
                (&total.sent_bytes, sent_bytes),
                (&total.received_bytes, received_bytes),
                (&total.sent_handoffs, sent_handoffs),
                (&total.verified_handoffs, verified_handoffs),
                (&total.aborted_handoffs, aborted_handoffs),
                (&total.released_handoffs, released_handoffs),
                (&total.quarantined_handoffs, quarantined_handoffs),
                (&total.quarantined_blocks, quarantined_blocks),
                (&total.open_writes, open_writes),
                (&total.landing_peak_bytes, landing_peak_bytes),
                (&total.fenced_peers, fenced_peers),
                (&total.protocol_errors, protocol_errors),
                (&total.dropped_frames, dropped_frames),
                (&total.copied_bytes, copied_bytes),
                (&total.unmapped_peers, unmapped_peers),
                (&total.rejected_tickets, rejected_tickets),
                (&total.rejected_hellos, rejected_hellos),
                (&total.lost_peers, lost_peers),
            ]
            .into_iter()
            .chain(total.refused.iter().zip(refused))
            {
                sum.fetch_add(count.load(Relaxed), Relaxed);
            }
        }
        total
    }

    /// Counts a refusal that this node spoke.
    pub fn count_refusal(&self, refusal: Refusal) {
        self.refused[refusal.code() as usize].fetch_add(1, Relaxed);
    }

    /// Refusals by reason label, the never seen ones included.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REFUSAL_LABELS.into_iter().zip(self.refused.iter().map(|count| count.load(Relaxed)))
    }

    /// Refusals of one reason.
    pub fn refused_for(&self, refusal: Refusal) -> u64 {
        self.refused[refusal.code() as usize].load(Relaxed)
    }
}
