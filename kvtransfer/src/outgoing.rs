//! The sending end of a hand-off as a node holds it: the clock and the backend around `delivery.rs`; the hook a backend
//! implements for it, and the table that brings answers back to it.
use crate::clock;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_proto::{HandoffId, v1};
use tokio::sync::watch;

use crate::arena::{Arena, Run};
use crate::counters::Counters;
use crate::delivery::{Delivery, FrameLimits};
use crate::error::{TransferError, TransferErrorKind};
use crate::terms::{BlockOwner, CheckedTicket, PeerId, Receipt};
use crate::wire::{Answer, DataHeader};

/// Hand-offs a node sends at once.
const MAX_PENDING: usize = 4096;

/// A backend's half of [`Outgoing`]. Frames leave in the order of the calls. The futures are cancel-safe: dropped
/// before they are ready, they queued nothing.
pub trait SendLink: Send {
    /// Longest range that the backend wants in one frame.
    fn max_range_bytes(&self) -> usize;

    /// Most pieces of the arena in one frame, at either end.
    fn max_runs(&self) -> usize {
        usize::MAX
    }

    /// Queues the bytes of `runs`, one after the other, for the pieces `range`; ready when queued with credit. The
    /// backend keeps `owner` until it no longer reads the runs.
    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>>;

    /// Queues a keep-alive, before data that waits if it can.
    fn keep_alive(&mut self, handoff: HandoffId) -> BoxFuture<'_, Result<(), TransferError>>;

    /// Queues the seal behind all pushes.
    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>>;

    /// Queues a cancel frame if it can; never blocks.
    fn cancel(&mut self, handoff: HandoffId);
}

/// An open hand-off. Dropping it before [`Outgoing::seal`] returned cancels it.
pub struct Outgoing {
    delivery: Delivery,
    link: Box<dyn SendLink>,
    counters: Arc<Counters>,
    answer: AnswerSlot,
    post: Duration,
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
        let delivery = Delivery::new(ticket, arena, clock::now());
        Self { delivery, link, counters, answer, post: Duration::ZERO }
    }

    /// Sends `arena_blocks` as blocks `first_index..` of the hand-off, as many in one frame as the backend likes,
    /// wherever in the arena they are: what a frame costs is the same for 64 KiB and for a megabyte. Returns when all
    /// are queued; `owner` is kept until they were read.
    ///
    /// # Errors
    /// `Refused(OutOfRange)` for blocks outside grant or arena, the receiver's refusal if it came already, `PeerGone`,
    /// `Timeout` when nothing could be queued for a lease.
    pub async fn push(
        &mut self,
        first_index: u32,
        arena_blocks: &[u32],
        owner: BlockOwner,
    ) -> Result<(), TransferError> {
        self.push_units(0..self.delivery.units(), first_index, arena_blocks, owner).await
    }

    /// As [`Outgoing::push`], of each block only `units`. The receiver takes the units of a block in ascending order
    /// and without gaps, whatever the order of the blocks.
    ///
    /// # Errors
    /// As [`Outgoing::push`]; `Refused(OutOfRange)` also for no units, or more than a block has.
    pub async fn push_units(
        &mut self,
        units: Range<u8>,
        first_index: u32,
        arena_blocks: &[u32],
        owner: BlockOwner,
    ) -> Result<(), TransferError> {
        let start = clock::now();
        let limits = FrameLimits { bytes: self.link.max_range_bytes(), runs: self.link.max_runs() };
        let mut push = self.delivery.push(units, first_index, arena_blocks, limits, start)?;
        while let Some(frame) = self.delivery.next_frame(&mut push) {
            let (header, bytes) = (frame.header, frame.bytes());
            let queued = self.link.push(header, frame.runs, owner.clone());
            unless_over(&mut self.delivery, &mut self.answer, queued).await?;
            self.counters.sent_bytes.fetch_add(bytes, Relaxed);
            self.delivery.pushed(header, bytes, clock::now());
        }
        self.post += clock::now().saturating_duration_since(start);
        Ok(())
    }

    /// Tells the receiver that this end is still there while nothing is ready to be sent: both ends' leases begin anew.
    ///
    /// # Errors
    /// As [`Outgoing::push`].
    pub async fn keep_alive(&mut self) -> Result<(), TransferError> {
        self.delivery.keep_alive()?;
        let queued = self.link.keep_alive(self.delivery.handoff());
        unless_over(&mut self.delivery, &mut self.answer, queued).await?;
        self.delivery.progressed(clock::now());
        Ok(())
    }

    /// How often [`Outgoing::keep_alive`] is due while nothing is pushed: a third of the lease, so that one may be
    /// late.
    pub fn keep_alive_every(&self) -> Duration {
        self.delivery.keep_alive_every()
    }

    /// Ready when the hand-off is over before its seal: the receiver refused it, or is gone. Cancel-safe.
    pub async fn ended(&mut self) -> TransferError {
        let over = unless_over(&mut self.delivery, &mut self.answer, std::future::pending().boxed()).await;
        over.err().unwrap_or_else(|| TransferError::new(TransferErrorKind::Io, "the receiver answered before the seal"))
    }

    /// Sends the seal and waits for the receiver's verdict.
    ///
    /// # Errors
    /// The receiver's refusal, `PeerGone`, `Timeout` when no verdict came for a lease.
    pub async fn seal(mut self, seal: v1::Seal) -> Result<Receipt, TransferError> {
        let start = clock::now();
        let payload = self.delivery.seal(&seal)?;
        let queued = self.link.seal(self.delivery.handoff(), payload);
        unless_over(&mut self.delivery, &mut self.answer, queued).await?;
        let sealed = clock::now();
        self.post += sealed.saturating_duration_since(start);
        self.delivery.sealed(sealed);
        // Nothing is left to queue: the verdict, or the end of the lease.
        unless_over(&mut self.delivery, &mut self.answer, std::future::pending().boxed()).await?;
        self.counters.sent_handoffs.fetch_add(1, Relaxed);
        Ok(self.delivery.receipt(self.post, clock::now()))
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        // An answer that nobody waited for is one too.
        if !self.answer.answered() && self.delivery.cancel().is_some() {
            self.link.cancel(self.delivery.handoff());
        }
    }
}

/// Waits for `queued` unless the hand-off ends before.
async fn unless_over(
    delivery: &mut Delivery,
    answer: &mut AnswerSlot,
    queued: BoxFuture<'_, Result<(), TransferError>>,
) -> Result<(), TransferError> {
    let deadline = delivery.deadline();
    tokio::select! {
        biased;
        outcome = answer.wait() => delivery.told(outcome),
        result = queued => result.inspect_err(|_| delivery.failed()),
        () = tokio::time::sleep_until(deadline.into()) => delivery.expire(clock::now()),
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
