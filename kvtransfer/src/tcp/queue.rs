//! What waits to leave by one connection. Data and seals wait in order and need credit; answers, keep-alives and
//! cancels overtake them. Knows no socket.
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tandem_proto::HandoffId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::arena::Run;
use crate::error::TransferError;
use crate::handshake::Proof;
use crate::terms::{BlockOwner, Faults};
use crate::wire::{DataHeader, Header};

/// What may wait on one connection: enough that the sender sleeps long and the writer never.
const CREDIT_BYTES: usize = 64 << 20;
/// Bytes of one permit.
const CREDIT_UNIT: usize = 4 << 10;
/// More answers and cancels than this wait only when the peer does not read: it is cut off.
const MAX_URGENT: usize = 16 * 1024;

/// One frame to write.
pub(super) enum Frame {
    /// A header alone.
    Bare(Header),
    /// A hand-off that is not the connection's first, and the proof that it is the sender's.
    Join { handoff: HandoffId, proof: Proof },
    /// A header and its payload.
    Seal { handoff: HandoffId, payload: Vec<u8>, _credit: OwnedSemaphorePermit },
    /// A range, read from the arena when its turn comes.
    Data(DataFrame),
}

pub(super) struct DataFrame {
    pub range: DataHeader,
    /// What to send, in this order.
    pub runs: Vec<Run>,
    pub faults: Faults,
    /// Dropped, with the credit, when the bytes are in the socket.
    _owner: BlockOwner,
    _credit: OwnedSemaphorePermit,
}

impl DataFrame {
    /// Of the payload.
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|run| run.bytes).sum()
    }
}

pub(super) struct FrameQueue {
    state: Mutex<State>,
    ready: Condvar,
    credit: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    urgent: VecDeque<Frame>,
    ordered: VecDeque<Frame>,
    closed: bool,
    writer_waits: bool,
}

impl FrameQueue {
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            ready: Condvar::new(),
            credit: Arc::new(Semaphore::new(CREDIT_BYTES / CREDIT_UNIT)),
        }
    }

    pub async fn send_data(
        &self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
        faults: Faults,
    ) -> Result<(), TransferError> {
        let credit = self.acquire(runs.iter().map(|run| run.bytes).sum()).await?;
        self.enqueue(Frame::Data(DataFrame { range, runs, faults, _owner: owner, _credit: credit }))
    }

    pub async fn send_seal(&self, handoff: HandoffId, payload: Vec<u8>) -> Result<(), TransferError> {
        let credit = self.acquire(payload.len()).await?;
        self.enqueue(Frame::Seal { handoff, payload, _credit: credit })
    }

    /// Queues an answer, a keep-alive or a cancel before everything that waits.
    pub fn send_now(&self, header: Header) {
        self.hurry(Frame::Bare(header));
    }

    /// Queues a join before everything that waits: before any frame of its hand-off.
    pub fn join(&self, handoff: HandoffId, proof: Proof) {
        self.hurry(Frame::Join { handoff, proof });
    }

    fn hurry(&self, frame: Frame) {
        let mut state = self.lock();
        if state.urgent.len() >= MAX_URGENT {
            drop(state);
            return self.close();
        }
        if !state.closed {
            state.urgent.push_back(frame);
            self.wake(&state);
        }
    }

    /// Takes back what waits of a hand-off (this releases its owners), and tells the peer.
    pub fn cancel(&self, handoff: HandoffId) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.ordered);
        let (dropped, kept): (Vec<_>, _) = waiting.into_iter().partition(|frame| frame.handoff() == Some(handoff));
        state.ordered = kept.into();
        drop(state);
        drop(dropped);
        self.send_now(Header::Cancel(handoff));
    }

    /// The next frame to write; blocks. `None`: closed.
    pub fn next(&self) -> Option<Frame> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let frame = state.urgent.pop_front();
            if let Some(frame) = frame.or_else(|| state.ordered.pop_front()) {
                return Some(frame);
            }
            state.writer_waits = true;
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.writer_waits = false;
        }
    }

    /// Drops what waits, and refuses what comes.
    pub fn close(&self) {
        self.credit.close();
        let mut state = self.lock();
        state.closed = true;
        let dropped = (std::mem::take(&mut state.urgent), std::mem::take(&mut state.ordered));
        self.ready.notify_all();
        drop(state);
        drop(dropped);
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    async fn acquire(&self, bytes: usize) -> Result<OwnedSemaphorePermit, TransferError> {
        // A longer frame than all credit waits until it is alone.
        let permits = bytes.clamp(CREDIT_UNIT, CREDIT_BYTES).div_ceil(CREDIT_UNIT) as u32;
        self.credit.clone().acquire_many_owned(permits).await.map_err(|_| hung_up())
    }

    fn enqueue(&self, frame: Frame) -> Result<(), TransferError> {
        let mut state = self.lock();
        if state.closed {
            return Err(hung_up());
        }
        state.ordered.push_back(frame);
        self.wake(&state);
        Ok(())
    }

    /// A notification is a system call even when nobody waits.
    fn wake(&self, state: &State) {
        if state.writer_waits {
            self.ready.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Frame {
    fn handoff(&self) -> Option<HandoffId> {
        match self {
            Self::Bare(_) | Self::Join { .. } => None,
            Self::Seal { handoff, .. } => Some(*handoff),
            Self::Data(data) => Some(data.range.handoff),
        }
    }
}

fn hung_up() -> TransferError {
    TransferError::peer_gone("the KV receiver hung up")
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::wire::Units;

    fn data(queue: &FrameQueue, id: u8, owner: &Arc<()>) -> Option<Result<(), TransferError>> {
        let range = DataHeader { handoff: HandoffId([id; 16]), first: 0, count: 1, units: Units::ALL };
        let runs = vec![Run { at: 0, bytes: CREDIT_BYTES / 16 }];
        queue.send_data(range, runs, owner.clone(), Faults::default()).now_or_never()
    }

    #[test]
    fn credit_bounds_what_waits_and_cancel_gives_it_back() {
        let (queue, owner) = (FrameQueue::new(), Arc::new(()));
        for _ in 0..16 {
            assert_eq!(data(&queue, 1, &owner), Some(Ok(())));
        }
        assert_eq!(data(&queue, 2, &owner), None, "waits for credit");
        assert_eq!(Arc::strong_count(&owner), 17);
        queue.cancel(HandoffId([1; 16]));
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(data(&queue, 2, &owner), Some(Ok(())));
        assert!(matches!(queue.next(), Some(Frame::Bare(Header::Cancel(_)))), "cancels overtake");
        assert!(matches!(queue.next(), Some(Frame::Data(_))));
    }

    #[test]
    fn closing_releases_owners_and_refuses() {
        let (queue, owner) = (FrameQueue::new(), Arc::new(()));
        data(&queue, 1, &owner);
        queue.close();
        assert_eq!(Arc::strong_count(&owner), 1);
        assert!(matches!(data(&queue, 1, &owner), Some(Err(_))));
        assert!(queue.next().is_none());
    }
}
