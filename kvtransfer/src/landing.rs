//! What of a hand-off has landed and is not hashed yet: noted by the backend's threads, taken by the receiving end.
//! Hashing follows the copy that way, and only the last pieces are left when the seal comes.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::error::TransferError;
use crate::session::Arrived;
use crate::wire::DataHeader;

/// Less than this is not worth a wake-up: hashing it takes some 100 µs, which is what may be left at the seal.
const BATCH_BYTES: u64 = 1 << 20;

/// How a registry tells the receiving end.
pub(crate) struct Arrival {
    /// Piece by piece.
    pub(crate) landing: Arc<Landing>,
    /// The whole, or why it does not come.
    pub(crate) whole: oneshot::Receiver<Result<Arrived, TransferError>>,
}

/// The landed pieces of one hand-off. At most as many as it has units, since each lands once.
#[derive(Default)]
pub(crate) struct Landing {
    noted: Mutex<Noted>,
    enough: Notify,
}

#[derive(Default)]
struct Noted {
    pieces: Vec<DataHeader>,
    bytes: u64,
    /// Of all pieces, those that were taken included.
    ranges: u32,
}

impl Landing {
    /// A range of `bytes` is in the arena.
    pub(crate) fn note(&self, range: DataHeader, bytes: u64) {
        let mut noted = self.lock();
        noted.pieces.push(range);
        noted.bytes += bytes;
        noted.ranges += 1;
        if noted.bytes >= BATCH_BYTES {
            self.enough.notify_one();
        }
    }

    /// Ready when a batch has come together, and perhaps once more after it was taken.
    pub(crate) async fn enough(&self) {
        self.enough.notified().await;
    }

    /// What has landed since the last call.
    pub(crate) fn take(&self) -> Vec<DataHeader> {
        let mut noted = self.lock();
        noted.bytes = 0;
        std::mem::take(&mut noted.pieces)
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
        let landing = Landing::default();
        let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::ALL };
        landing.note(range, BATCH_BYTES - 8);
        assert!(landing.enough().now_or_never().is_none());
        landing.note(range, 8);
        assert!(landing.enough().now_or_never().is_some());
        assert_eq!(landing.take().len(), 2);
        landing.note(range, BATCH_BYTES - 8);
        assert!(landing.enough().now_or_never().is_none(), "counted anew");
        assert_eq!(landing.take().len(), 1);
        assert_eq!(landing.ranges(), 3, "of all time");
    }
}
