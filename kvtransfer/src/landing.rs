//! What of a hand-off has landed and is not verified yet: noted by the backend's threads, taken by the receiving end.
//! Hashing follows the copy that way, and only the last pieces are left when the seal comes. Where the copy itself has
//! hashed them, their leaves are noted the same way.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use crate::clock;
use crate::error::TransferError;
use crate::session::Arrived;
use crate::wire::DataHeader;

/// Less than this is not worth a wake-up: hashing it takes some 100 µs, which is what may be left at the seal.
const BATCH_BYTES: u64 = 1 << 20;
/// The same for pieces that are hashed already: noting their leaves takes some 4 µs for each MiB. All of a prompt of
/// 8,000 tokens took 0.7 ms at the seal, where the client waits.
const HASHED_BATCH_BYTES: u64 = 8 << 20;
/// Memory that nobody has touched for so long may be slow at the next access.
const UNTOUCHED: Duration = Duration::from_secs(1);

/// How a registry tells the receiving end.
pub(crate) struct Arrival {
    /// Piece by piece.
    pub(crate) landing: Arc<Landing>,
    /// The whole, or why it does not come.
    pub(crate) whole: oneshot::Receiver<Result<Arrived, TransferError>>,
}

/// A range in the arena.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: DataHeader,
    /// Its leaves' hashes in the order of the payload, where they were taken on the way; else none.
    pub(crate) leaves: Vec<u64>,
}

/// What has landed since somebody looked.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) pieces: Vec<Piece>,
    /// Of them, still to be hashed.
    pub(crate) bytes: u64,
    /// Now is the time to touch what landed before: the end is near, and what came first has lain untouched for long.
    pub(crate) touches: bool,
}

/// The landed pieces of one hand-off. At most as many as it has units, since each lands once.
pub(crate) struct Landing {
    blocks: u64,
    units: u8,
    noted: Mutex<Noted>,
    enough: Notify,
}

#[derive(Default)]
struct Noted {
    batch: Batch,
    /// Bytes of the batch that are hashed already.
    hashed: u64,
    /// Of all pieces, those that were taken included.
    ranges: u32,
    began: Option<Instant>,
    was_near_end: bool,
}

impl Landing {
    /// Of a hand-off of so many blocks, each of so many pieces.
    pub(crate) fn of(blocks: usize, units: u8) -> Self {
        Self { blocks: blocks as u64, units, noted: Mutex::default(), enough: Notify::new() }
    }

    /// A range of `bytes` is in the arena.
    pub(crate) fn note(&self, piece: Piece, bytes: u64) {
        let mut noted = self.lock();
        let began = *noted.began.get_or_insert_with(clock::now);
        let nears_end = !noted.was_near_end && self.is_near_end(piece.range);
        noted.was_near_end |= nears_end;
        let touches = nears_end && clock::now().saturating_duration_since(began) >= UNTOUCHED;
        noted.batch.touches |= touches;
        *if piece.leaves.is_empty() { &mut noted.batch.bytes } else { &mut noted.hashed } += bytes;
        noted.batch.pieces.push(piece);
        noted.ranges += 1;
        if touches || noted.batch.bytes >= BATCH_BYTES || noted.hashed >= HASHED_BATCH_BYTES {
            self.enough.notify_one();
        }
    }

    /// Less than an eighth of the last block's layers is still to come, but not nothing: then a prompt's last tokens
    /// are computed, and some tens of milliseconds are left.
    fn is_near_end(&self, range: DataHeader) -> bool {
        let is_last = u64::from(range.first) + u64::from(range.count) >= self.blocks;
        let left = range.units.of(self.units).map_or(0, |units| self.units.saturating_sub(units.end));
        is_last && left > 0 && left < self.units.div_ceil(8)
    }

    /// Ready when a batch has come together, or the end is near, and perhaps once more after it was taken.
    pub(crate) async fn enough(&self) {
        self.enough.notified().await;
    }

    /// What has landed since the last call.
    pub(crate) fn take(&self) -> Batch {
        let mut noted = self.lock();
        noted.hashed = 0;
        std::mem::take(&mut noted.batch)
    }

    /// How many have landed so far.
    pub(crate) fn ranges(&self) -> u32 {
        self.lock().ranges
    }

    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tandem_proto::HandoffId;

    use super::*;
    use crate::wire::Units;

    #[test]
    fn a_batch_wakes_and_less_waits_to_be_taken() {
        let landing = Landing::of(2, 1);
        let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::ALL };
        let note = |leaves, bytes| landing.note(Piece { range, leaves }, bytes);
        note(vec![], BATCH_BYTES - 8);
        note(vec![1, 2], BATCH_BYTES);
        assert!(landing.enough().now_or_never().is_none(), "hashed is nearly done");
        note(vec![], 8);
        assert!(landing.enough().now_or_never().is_some());
        let batch = landing.take();
        assert_eq!((batch.pieces.len(), batch.bytes), (3, BATCH_BYTES));
        note(vec![], BATCH_BYTES - 8);
        assert!(landing.enough().now_or_never().is_none(), "counted anew");
        assert_eq!(landing.take().pieces.len(), 1);
        assert_eq!(landing.ranges(), 4, "of all time");
        (0..8).for_each(|_| note(vec![1, 2], BATCH_BYTES));
        assert!(landing.enough().now_or_never().is_some(), "much that is hashed wakes, too");
        assert_eq!((landing.take().bytes, landing.take().pieces.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn near_the_end_old_blocks_are_to_be_touched_once() {
        let landing = Landing::of(3, 24);
        let note = |first, count, units| {
            let range = DataHeader { handoff: HandoffId([1; 16]), first, count, units: Units::new(units, 24) };
            landing.note(Piece { range, leaves: vec![1] }, 8);
            (landing.enough().now_or_never().is_some(), landing.take().touches)
        };
        assert_eq!(note(0, 2, 0..24), (false, false));
        tokio::time::advance(UNTOUCHED).await;
        assert_eq!(note(1, 1, 21..22), (false, false), "the last block is missing");
        assert_eq!(note(2, 1, 20..21), (false, false), "an eighth is missing");
        assert_eq!(note(1, 2, 21..22), (true, true));
        assert_eq!(note(2, 1, 22..23), (false, false), "it was told");
        let short = Landing::of(1, 24);
        for unit in 0..24 {
            let range =
                DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::new(unit..unit + 1, 24) };
            short.note(Piece { range, leaves: vec![1] }, 8);
            assert!(!short.take().touches, "it came a moment ago");
        }
    }
}
