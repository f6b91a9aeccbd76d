//! The grants of a node with a lock, a clock, and somebody who waits: the shell around `session.rs` that every backend
//! receives through. Knows no socket; speaks to peers through the backend's [`AnswerLink`].
use crate::clock;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tandem_proto::{HandoffId, v1};
use tokio::sync::oneshot;

use crate::arena::{Arena, Run};
use crate::counters::Counters;
use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::incoming::Incoming;
use crate::session::{Arrived, Ended, Offer, PeerId, Rejected, Sessions};
use crate::transport::Grant;
use crate::wire::{Answer, DataHeader, parse_seal};

/// How the registry speaks to a peer.
pub trait AnswerLink: Send + Sync {
    /// Queues `Header::Answer(handoff, answer)` for `peer`. Never blocks; a peer that is gone is not an error.
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer);
}

/// All grants of one transport.
pub struct Registry {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    link: Box<dyn AnswerLink>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    sessions: Sessions,
    waiters: HashMap<HandoffId, oneshot::Sender<Result<Arrived, TransferError>>>,
}

impl Registry {
    /// An empty registry over `arena`.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>, link: Box<dyn AnswerLink>) -> Arc<Self> {
        Arc::new(Self { arena, counters, link, table: Mutex::default() })
    }

    /// The arena that claims write to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Counters of the transport.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Hand-offs whose blocks wait for a writer to end, now.
    pub fn quarantined(&self) -> usize {
        self.lock().sessions.quarantined()
    }

    /// Hand-offs that are granted or in quarantine, now.
    pub fn handoffs(&self) -> usize {
        self.lock().sessions.len()
    }

    /// `Transport::accept` of every backend.
    ///
    /// # Errors
    /// As there.
    pub fn accept(
        self: &Arc<Self>,
        grant: Grant,
        info: v1::TransportInfo,
        address: Vec<u8>,
    ) -> Result<Incoming, TransferError> {
        self.check_blocks(&grant.blocks)?;
        let (units, block_bytes) = (grant.units, self.arena.block_bytes() as u64);
        if !self.arena.divides_into(units) {
            let message = format!("a KV block of {block_bytes} bytes does not divide into {units} units");
            return Err(TransferError::new(TransferErrorKind::Io, message));
        }
        let (sender, arrival) = oneshot::channel();
        let mut table = self.lock();
        let offer = Offer { blocks: grant.blocks.clone(), block_bytes, units, owner: grant.owner, lease: grant.lease };
        table.sessions.offer(grant.handoff, offer, clock::now())?;
        table.waiters.insert(grant.handoff, sender);
        drop(table);
        let ticket = v1::Ticket {
            handoff_id: grant.handoff.0.to_vec(),
            decode_incarnation: grant.decode_incarnation.0,
            prefill_incarnation: grant.prefill_incarnation.0,
            compatibility_digest: grant.compatibility_digest,
            transport: Some(info),
            address,
            blocks: grant.blocks.len() as u32,
            block_bytes,
            lease_ms: grant.lease.as_millis().try_into().unwrap_or(u32::MAX),
            held_blocks: grant.held.blocks,
            held_hash: grant.held.hash,
            units: units.into(),
        };
        Ok(Incoming::new(self.clone(), grant.handoff, ticket, grant.blocks, arrival))
    }

    /// A peer wants to write `len` bytes to a range.
    ///
    /// # Errors
    /// The refusal, which was already sent to the peer: discard the payload.
    pub fn claim(self: &Arc<Self>, peer: PeerId, range: DataHeader, len: u64) -> Result<Claim, Refusal> {
        let mut table = self.lock();
        match table.sessions.claim(peer, range, len, clock::now()) {
            Ok(pieces) => {
                drop(table);
                let runs = self.arena.runs(&pieces.blocks, self.arena.slice(pieces.of, &pieces.units));
                Ok(Claim { registry: self.clone(), range, runs, len, open: true })
            }
            Err(rejected) => Err(self.refuse(table, peer, range.handoff, rejected)),
        }
    }

    /// A seal frame arrived. Refusals go to the peer from here.
    pub fn seal(&self, peer: PeerId, handoff: HandoffId, payload: &[u8]) {
        let Some(seal) = parse_seal(handoff, payload) else {
            self.counters.protocol_errors.fetch_add(1, Relaxed);
            self.cancelled_by_refusal(peer, handoff, Refusal::Malformed);
            return;
        };
        let mut table = self.lock();
        match table.sessions.seal(peer, handoff, seal, clock::now()) {
            Ok(arrived) => table.deliver(handoff, arrived),
            Err(rejected) => {
                self.refuse(table, peer, handoff, rejected);
            }
        }
    }

    /// The sender says that it is still there. Refusals go to the peer from here.
    pub fn keep_alive(&self, peer: PeerId, handoff: HandoffId) {
        let mut table = self.lock();
        if let Err(rejected) = table.sessions.keep_alive(peer, handoff, clock::now()) {
            self.refuse(table, peer, handoff, rejected);
        }
    }

    /// The sender gave up.
    pub fn cancelled_by(&self, peer: PeerId, handoff: HandoffId) {
        let mut table = self.lock();
        if let Some(ended) = table.sessions.cancelled_by(peer, handoff) {
            table.fail(
                handoff,
                TransferError::new(TransferErrorKind::Cancelled, "the KV sender cancelled the hand-off"),
            );
            drop(table);
            self.count_end(ended, Refusal::Cancelled);
        }
    }

    /// No write of `peer` can touch the arena any more.
    pub fn fence(&self, peer: PeerId) {
        let mut table = self.lock();
        for handoff in table.sessions.fence(peer) {
            self.counters.aborted_handoffs.fetch_add(1, Relaxed);
            table.fail(handoff, TransferError::peer_gone("the KV sender is gone"));
        }
    }

    /// A frame or a connection that is not ours to read.
    pub fn violation(&self) {
        self.counters.protocol_errors.fetch_add(1, Relaxed);
    }

    /// When a hand-off ends unless something of it comes; `None`: it is over.
    pub(crate) fn deadline(&self, handoff: HandoffId) -> Option<Instant> {
        self.lock().sessions.deadline(handoff)
    }

    /// Ends what is past its lease and tells its peers. Backends with a timer may call it; waiting ends call it too.
    pub fn expire(&self) {
        let mut table = self.lock();
        let ended = table.sessions.expire(clock::now());
        for (handoff, _) in &ended {
            table.fail(*handoff, lease_ended());
        }
        drop(table);
        for (handoff, ended) in ended {
            self.tell(handoff, ended, Refusal::Expired);
        }
    }

    /// Verification succeeded: tells the sender. False when the hand-off ended meanwhile.
    pub(crate) fn verified(&self, handoff: HandoffId) -> bool {
        let peer = self.lock().sessions.verified(handoff);
        let Some(peer) = peer else { return false };
        self.counters.verified_handoffs.fetch_add(1, Relaxed);
        self.link.answer(peer, handoff, Answer::Ack);
        true
    }

    /// Ends a hand-off from this side, and tells its sender why. Nothing when it is over already.
    pub(crate) fn abort(&self, handoff: HandoffId, refusal: Refusal) {
        let mut table = self.lock();
        table.waiters.remove(&handoff);
        let ended = table.sessions.abort(handoff);
        drop(table);
        if let Some(ended) = ended {
            self.tell(handoff, ended, refusal);
        }
    }

    fn check_blocks(&self, blocks: &[u32]) -> Result<(), TransferError> {
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        let distinct = sorted.windows(2).all(|pair| pair[0] != pair[1]);
        let inside = sorted.last().is_some_and(|last| *last < self.arena.blocks());
        if distinct && inside { Ok(()) } else { Err(TransferError::from(Refusal::OutOfRange)) }
    }

    fn cancelled_by_refusal(&self, peer: PeerId, handoff: HandoffId, refusal: Refusal) {
        let mut table = self.lock();
        if let Some(ended) = table.sessions.cancelled_by(peer, handoff) {
            table.fail(handoff, refusal.into());
            drop(table);
            self.tell(handoff, Ended { peer: Some(peer), ..ended }, refusal);
        }
    }

    /// Answers a rejected frame, and ends its hand-off if the frame did.
    fn refuse(
        &self,
        mut table: MutexGuard<'_, Table>,
        peer: PeerId,
        handoff: HandoffId,
        rejected: Rejected,
    ) -> Refusal {
        let refusal = rejected.refusal;
        if rejected.aborted {
            self.counters.aborted_handoffs.fetch_add(1, Relaxed);
            table.fail(handoff, refusal.into());
        }
        drop(table);
        self.counters.count_refusal(refusal);
        tracing::warn!(%handoff, reason = refusal.label(), "KV hand-off frame refused: {refusal}");
        self.link.answer(peer, handoff, Answer::Refused(refusal));
        refusal
    }

    fn tell(&self, handoff: HandoffId, ended: Ended, refusal: Refusal) {
        if self.count_end(ended, refusal) {
            self.counters.count_refusal(refusal);
        }
        if let Some(peer) = ended.peer {
            self.link.answer(peer, handoff, Answer::Refused(refusal));
        }
    }

    /// False when it was a grant that nobody had used and somebody let go: every answer of one token leaves such a one.
    fn count_end(&self, ended: Ended, refusal: Refusal) -> bool {
        if ended.peer.is_none() && refusal == Refusal::Cancelled {
            self.counters.released_handoffs.fetch_add(1, Relaxed);
            return false;
        }
        self.counters.aborted_handoffs.fetch_add(1, Relaxed);
        self.counters.quarantined_handoffs.fetch_add(u64::from(ended.quarantined), Relaxed);
        true
    }

    fn written(&self, range: DataHeader, len: u64) {
        self.counters.received_bytes.fetch_add(len, Relaxed);
        let mut table = self.lock();
        let arrived = table.sessions.written(range, clock::now());
        table.deliver(range.handoff, arrived);
    }

    fn failed(&self, handoff: HandoffId) {
        let mut table = self.lock();
        if let Some(ended) = table.sessions.failed(handoff) {
            table.fail(handoff, Refusal::WriteFailed.into());
            drop(table);
            self.tell(handoff, ended, Refusal::WriteFailed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // A panic while holding the lock leaves the table usable: every method finishes its change before it can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lease_ended() -> TransferError {
    let message = "the KV sender was silent for the lease";
    TransferError { kind: TransferErrorKind::Timeout, refusal: Some(Refusal::Expired), message: message.to_owned() }
}

impl Table {
    fn deliver(&mut self, handoff: HandoffId, arrived: Option<Arrived>) {
        if let Some(arrived) = arrived
            && let Some(waiter) = self.waiters.remove(&handoff)
        {
            // A receiver that is gone aborts in its Drop.
            let _ = waiter.send(Ok(arrived));
        }
    }

    fn fail(&mut self, handoff: HandoffId, error: TransferError) {
        if let Some(waiter) = self.waiters.remove(&handoff) {
            let _ = waiter.send(Err(error));
        }
    }
}

/// Permission to write one range now. Its blocks stay out of the pool while it lives.
#[must_use = "a dropped claim fails its hand-off"]
pub struct Claim {
    registry: Arc<Registry>,
    range: DataHeader,
    runs: Vec<Run>,
    len: u64,
    open: bool,
}

impl Claim {
    /// Where in the arena to write, in the payload's order, neighbours joined.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Bytes of the range; equal to the runs' bytes.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// The arena to write to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.registry.arena
    }

    /// All bytes are in the arena.
    pub fn written(mut self) {
        self.open = false;
        self.registry.written(self.range, self.len);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.open {
            self.registry.failed(self.range.handoff);
        }
    }
}
