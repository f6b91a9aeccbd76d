//! The sending end of a hand-off as a node holds it, the hook a backend implements for it, and the table that brings
//! answers back to it.
use crate::clock;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures::future::BoxFuture;
use tandem_proto::{HandoffId, v1};
use tokio::sync::watch;

use crate::arena::{Arena, Run, coalesce};
use crate::counters::Counters;
use crate::error::{TransferError, TransferErrorKind};
use crate::session::PeerId;
use crate::transport::{BlockOwner, CheckedTicket, Receipt};
use crate::wire::{Answer, DataHeader, MAX_SEAL_BYTES, encode_seal};

/// Hand-offs a node sends at once.
const MAX_PENDING: usize = 4096;
/// Blocks in one frame, however small they are.
const MAX_FRAME_BLOCKS: usize = 1024;

/// A backend's half of [`Outgoing`]. Frames leave in the order of the calls. The futures are cancel-safe: dropped before
/// they are ready, they queued nothing.
pub trait SendLink: Send {
    /// Longest range that the backend wants in one frame.
    fn max_range_bytes(&self) -> usize;

    /// Most pieces of the arena in one frame.
    fn max_runs(&self) -> usize {
        usize::MAX
    }

    /// Queues the bytes of `runs`, one after the other, for the blocks `range`; ready when queued with credit. The backend
    /// keeps `owner` until it no longer reads the runs.
    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>>;

    /// Queues the seal behind all pushes.
    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>>;

    /// Queues a cancel frame if it can; never blocks.
    fn cancel(&mut self, handoff: HandoffId);
}

/// An open hand-off. Dropping it before [`Outgoing::seal`] returned cancels it.
pub struct Outgoing {
    link: Box<dyn SendLink>,
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    ticket: CheckedTicket,
    answer: AnswerSlot,
    deadline: Instant,
    first_push: Option<Instant>,
    bytes: u64,
    blocks: u32,
    descriptors: u32,
    over: bool,
}

impl Outgoing {
    /// For backends: an open hand-off whose frames leave by `link` and whose answer arrives in `answer`.
    pub fn new(
        link: Box<dyn SendLink>,
        arena: Arc<Arena>,
        counters: Arc<Counters>,
        ticket: CheckedTicket,
        answer: AnswerSlot,
    ) -> Self {
        let deadline = clock::now() + ticket.lease;
        Self {
            link,
            arena,
            counters,
            ticket,
            answer,
            deadline,
            first_push: None,
            bytes: 0,
            blocks: 0,
            descriptors: 0,
            over: false,
        }
    }

    /// Sends `arena_blocks` as blocks `first_index..` of the hand-off, as many in one frame as the backend likes, wherever
    /// in the arena they are: what a frame costs is the same for 64 KiB and for a megabyte. Returns when all are queued;
    /// `owner` is kept until they were read.
    ///
    /// # Errors
    /// `Refused(OutOfRange)` for blocks outside grant or arena, the receiver's refusal if it came already, `PeerGone`,
    /// `Timeout` at the end of the lease.
    pub async fn push(
        &mut self,
        first_index: u32,
        arena_blocks: &[u32],
        owner: BlockOwner,
    ) -> Result<(), TransferError> {
        self.check_range(first_index, arena_blocks)?;
        self.first_push.get_or_insert_with(clock::now);
        let max_blocks = (self.link.max_range_bytes() / self.arena.block_bytes()).clamp(1, MAX_FRAME_BLOCKS);
        let (mut first, mut rest) = (first_index, arena_blocks);
        while !rest.is_empty() {
            let mut runs = coalesce(&rest[..rest.len().min(max_blocks)]);
            runs.truncate(self.link.max_runs());
            let count = runs.iter().map(|run| run.count).sum();
            let range = DataHeader { handoff: self.ticket.handoff, first, count };
            let queued = self.link.push(range, runs, owner.clone());
            unless_over(&mut self.answer, self.deadline, queued).await?;
            rest = &rest[count as usize..];
            let bytes = u64::from(count) * self.arena.block_bytes() as u64;
            self.counters.sent_bytes.fetch_add(bytes, Relaxed);
            self.bytes += bytes;
            self.blocks += count;
            self.descriptors += 1;
            first += count;
        }
        Ok(())
    }

    /// Sends the seal and waits for the receiver's verdict.
    ///
    /// # Errors
    /// The receiver's refusal, `PeerGone`, `Timeout` at the end of the lease.
    pub async fn seal(mut self, seal: v1::Seal) -> Result<Receipt, TransferError> {
        let payload = encode_seal(&seal);
        if payload.len() > MAX_SEAL_BYTES {
            return Err(TransferError::new(TransferErrorKind::Io, "the seal is too long"));
        }
        let queued = self.link.seal(self.ticket.handoff, payload);
        unless_over(&mut self.answer, self.deadline, queued).await?;
        let timed = tokio::time::timeout_at(self.deadline.into(), self.answer.wait()).await;
        let outcome = timed.unwrap_or_else(|_| Err(lease_ended()));
        // After an answer there is nothing left to cancel.
        self.over = !matches!(&outcome, Err(error) if error.kind == TransferErrorKind::Timeout);
        outcome?;
        self.counters.sent_handoffs.fetch_add(1, Relaxed);
        Ok(Receipt {
            bytes: self.bytes,
            blocks: self.blocks,
            descriptors: self.descriptors,
            elapsed: self.first_push.map(|at| clock::now().saturating_duration_since(at)).unwrap_or_default(),
        })
    }

    fn check_range(&self, first_index: u32, arena_blocks: &[u32]) -> Result<(), TransferError> {
        let granted = u64::from(first_index) + arena_blocks.len() as u64 <= u64::from(self.ticket.blocks);
        let ours = arena_blocks.iter().all(|block| *block < self.arena.blocks());
        if granted && ours { Ok(()) } else { Err(crate::error::Refusal::OutOfRange.into()) }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.over && !self.answer.answered() {
            self.link.cancel(self.ticket.handoff);
        }
    }
}

fn lease_ended() -> TransferError {
    TransferError::new(TransferErrorKind::Timeout, "the KV hand-off did not end within its lease")
}

/// Waits for `queued` unless the hand-off ends before.
async fn unless_over(
    answer: &mut AnswerSlot,
    deadline: Instant,
    queued: BoxFuture<'_, Result<(), TransferError>>,
) -> Result<(), TransferError> {
    tokio::select! {
        biased;
        outcome = answer.wait() => match outcome {
            // An acknowledgement without a seal is not one.
            Ok(()) => Err(TransferError::new(TransferErrorKind::Io, "the receiver answered before the seal")),
            Err(error) => Err(error),
        },
        result = queued => result,
        () = tokio::time::sleep_until(deadline.into()) => Err(lease_ended()),
    }
}

type Outcome = Option<Result<(), TransferError>>;

/// Brings answers and the loss of peers to the hand-offs that wait for them. One per transport.
#[derive(Default)]
pub struct PendingAnswers {
    waiting: Mutex<HashMap<HandoffId, (PeerId, watch::Sender<Outcome>)>>,
}

impl PendingAnswers {
    /// Starts to wait for the answer of `peer` to a hand-off.
    ///
    /// # Errors
    /// `Overloaded` when too many hand-offs are open; `Refused(Used)` when this one is.
    pub fn register(self: &Arc<Self>, peer: PeerId, handoff: HandoffId) -> Result<AnswerSlot, TransferError> {
        let mut waiting = self.lock();
        if waiting.len() >= MAX_PENDING {
            return Err(TransferError::new(TransferErrorKind::Overloaded, "too many KV hand-offs at once"));
        }
        if waiting.contains_key(&handoff) {
            return Err(crate::error::Refusal::Used.into());
        }
        let (sender, receiver) = watch::channel(None);
        waiting.insert(handoff, (peer, sender));
        Ok(AnswerSlot { pending: self.clone(), handoff, receiver })
    }

    /// An answer frame arrived. Ignored unless `peer` was asked: late answers are normal.
    pub fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer) {
        if let Some((asked, sender)) = self.lock().get(&handoff)
            && *asked == peer
        {
            let outcome = match answer {
                Answer::Ack => Ok(()),
                Answer::Refused(refusal) => Err(refusal.into()),
            };
            // The first one stands: frames that were already under way are refused too, for a lesser reason.
            sender.send_if_modified(|told| told.is_none() && told.replace(outcome).is_none());
        }
    }

    /// One hand-off failed on this side (for example a send that the library gave up).
    pub fn fail(&self, handoff: HandoffId, error: TransferError) {
        if let Some((_, sender)) = self.lock().get(&handoff) {
            sender.send_if_modified(|outcome| outcome.is_none() && outcome.replace(Err(error)).is_none());
        }
    }

    /// `peer` will not answer any more.
    pub fn peer_gone(&self, peer: PeerId, why: &TransferError) {
        for (asked, sender) in self.lock().values() {
            if *asked == peer {
                let error = why.clone();
                sender.send_if_modified(|outcome| outcome.is_none() && outcome.replace(Err(error)).is_none());
            }
        }
    }

    /// The transport has ended: nobody will answer.
    pub fn all_gone(&self, why: &TransferError) {
        for (_, sender) in self.lock().values() {
            let error = why.clone();
            sender.send_if_modified(|outcome| outcome.is_none() && outcome.replace(Err(error)).is_none());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HandoffId, (PeerId, watch::Sender<Outcome>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where one hand-off's answer arrives; forgets it when dropped.
pub struct AnswerSlot {
    pending: Arc<PendingAnswers>,
    handoff: HandoffId,
    receiver: watch::Receiver<Outcome>,
}

impl AnswerSlot {
    async fn wait(&mut self) -> Result<(), TransferError> {
        match self.receiver.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            Err(_) => Err(TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down")),
        }
    }

    fn answered(&self) -> bool {
        self.receiver.borrow().is_some()
    }
}

impl Drop for AnswerSlot {
    fn drop(&mut self) {
        self.pending.lock().remove(&self.handoff);
    }
}
