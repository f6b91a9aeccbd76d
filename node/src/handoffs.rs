//! What became of a node's hand-offs, as far as the transport cannot know: what hid behind compute, what had to be
//! repeated, what did not have to travel. Plain counts; read at the scrape.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tandem_proto::ErrorKind;

use crate::work::{OUTCOMES, outcome};

/// Counts since the node's start.
#[derive(Debug, Default)]
pub struct Handoffs {
    /// Bytes that left while the prompt was still computed.
    pub hidden_bytes: AtomicU64,
    /// Bytes that left when nothing hid them any more.
    pub exposed_bytes: AtomicU64,
    /// Blocks whose last byte left while the prompt was still computed.
    pub hidden_blocks: AtomicU64,
    /// The other blocks that left.
    pub exposed_blocks: AtomicU64,
    /// Of delivered hand-offs: first frame to the end of the computation.
    pub hidden_ns: AtomicU64,
    /// Of delivered hand-offs: from there to the receiver's word.
    pub exposed_ns: AtomicU64,
    /// Blocks that did not travel because the receiver had them.
    pub reused_blocks: AtomicU64,
    /// Tickets after the first one of a call.
    pub redelivered: AtomicU64,
    /// Calls that ended because no other ticket came in time after a failed hand-off.
    pub not_redelivered: AtomicU64,
    /// Of the links to receivers, as measured; 0 before a receipt said something of them.
    pub link_bytes_per_second: AtomicU64,
    undelivered: [AtomicU64; OUTCOMES.len()],
}

impl Handoffs {
    /// A piece was queued.
    pub fn count_piece(&self, bytes: usize, blocks: usize, hidden: bool) {
        let (all_bytes, all_blocks) = match hidden {
            true => (&self.hidden_bytes, &self.hidden_blocks),
            false => (&self.exposed_bytes, &self.exposed_blocks),
        };
        all_bytes.fetch_add(bytes as u64, Relaxed);
        all_blocks.fetch_add(blocks as u64, Relaxed);
    }

    /// A hand-off was delivered.
    pub fn count_delivered(&self, hidden: Duration, exposed: Duration) {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.hidden_ns.fetch_add(ns(hidden), Relaxed);
        self.exposed_ns.fetch_add(ns(exposed), Relaxed);
    }

    /// A receipt said something of the links.
    pub fn set_link_speed(&self, bytes_per_second: f64) {
        self.link_bytes_per_second.store(bytes_per_second as u64, Relaxed);
    }

    /// A hand-off failed for a reason of its receiver or the way there.
    pub fn count_undelivered(&self, kind: ErrorKind) {
        self.undelivered[outcome(kind)].fetch_add(1, Relaxed);
    }

    /// How many hand-offs failed of what, the never seen causes included.
    pub fn undelivered(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        // The first one is "ok".
        OUTCOMES.into_iter().zip(self.undelivered.iter().map(|count| count.load(Relaxed))).skip(1)
    }
}
