//! The grants of a node with a lock, a clock, and somebody who waits: the shell around `session.rs` that every backend
//! receives through. It draws each hand-off's key, and lets open a hand-off whoever proves to have it
//! (`registry/keys.rs`, `handshake.rs`). A write is a claim (`registry/claim.rs`); a task watches the deadlines
//! (`registry/timer.rs`). Knows no socket; speaks to peers through the backend's [`PeerLink`].
mod claim;
mod keys;
mod timer;

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tandem_proto::{HandoffId, SequenceHash, v1};
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::arena::Arena;
use crate::clock;
use crate::counters::Counters;
use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::handshake::{KEY_BYTES, Secret};
use crate::hashing;
use crate::joints;
use crate::landing::{Arrival, Landing, Piece};
use crate::mutation::Mutation;
use crate::session::{Arrived, Ended, Offer, Quarantined, Rejected, Sessions};
use crate::terms::{Grant, PeerId};
use crate::wire::{Answer, DataHeader, parse_seal};
pub use claim::Claim;
pub use keys::Authenticated;
use keys::Secrets;

/// Hand-offs whose landed blocks are hashed at once: the cores are there for the engine.
const MAX_HASHING: usize = 2;

/// How the registry reaches a peer.
pub trait PeerLink: Send + Sync {
    /// Queues `Header::Answer(handoff, answer)` for `peer`. Never blocks; a peer that is gone is not an error.
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer);

    /// Ends the connection to `peer` by force, however long it takes: the backend calls [`Registry::fence`] when no
    /// write of it can touch the arena any more. Never blocks; may be asked again, and then has to try harder.
    fn cut_off(&self, peer: PeerId);
}

/// All grants of one transport.
pub struct Registry {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    link: Box<dyn PeerLink>,
    table: Mutex<Table>,
    /// A deadline may have come that is earlier than the timer's.
    rearm: Arc<Notify>,
    hashing: Arc<Semaphore>,
    mutation: Mutation,
}

struct Table {
    sessions: Sessions,
    waiters: HashMap<HandoffId, Waiter>,
    secrets: Secrets,
    has_timer: bool,
}

/// Who waits for a hand-off.
struct Waiter {
    arrival: oneshot::Sender<Result<Arrived, TransferError>>,
    landing: Arc<Landing>,
}

impl Registry {
    /// An empty registry over `arena`. Writers of an aborted hand-off have `grace` to end; then their peer is cut off.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>, link: Box<dyn PeerLink>, grace: Duration) -> Arc<Self> {
        Self::mutated(arena, counters, link, grace, Mutation::None)
    }

    /// One with a bug.
    #[doc(hidden)]
    pub fn mutated(
        arena: Arc<Arena>,
        counters: Arc<Counters>,
        link: Box<dyn PeerLink>,
        grace: Duration,
        mutation: Mutation,
    ) -> Arc<Self> {
        let sessions = Sessions::mutated(grace, mutation);
        let table = Table { sessions, waiters: HashMap::new(), secrets: Secrets::default(), has_timer: false };
        let (rearm, hashing) = (Arc::default(), Arc::new(Semaphore::new(MAX_HASHING)));
        Arc::new(Self { arena, counters, link, table: table.into(), rearm, hashing, mutation })
    }

    pub(crate) fn mutation(&self) -> Mutation {
        self.mutation
    }

    /// The arena that claims write to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Counters of the transport.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// What waits for a writer to end, now.
    pub fn quarantined(&self) -> Quarantined {
        self.lock().sessions.quarantined()
    }

    /// Hand-offs that are granted or in quarantine, now.
    pub fn handoffs(&self) -> usize {
        self.lock().sessions.len()
    }

    /// Registers a grant: the ticket for its sender, and where it arrives. For `Incoming::accept`.
    pub(crate) fn accept(
        self: &Arc<Self>,
        grant: Grant,
        info: v1::TransportInfo,
        address: Vec<u8>,
    ) -> Result<(v1::Ticket, Arrival), TransferError> {
        self.check_blocks(&grant.blocks)?;
        let (units, block_bytes) = (grant.units, self.arena.block_bytes() as u64);
        if units != 1 && units != self.arena.units() {
            let layers = self.arena.units();
            let message = format!("a KV block of {block_bytes} bytes comes whole or in {layers} units, not in {units}");
            return Err(TransferError::new(TransferErrorKind::Io, message));
        }
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
            held_hash: grant.held.hash.map(SequenceHash::to_wire).unwrap_or_default(),
            units: units.into(),
            key: Some(v1::HandoffKey { secret: rand::random::<[u8; KEY_BYTES]>().to_vec() }),
            joints: joints::of(&grant.blocks),
        };
        let secret = Secret::of(&ticket)?;
        let (sender, arrival) = oneshot::channel();
        let landing = Arc::new(Landing::of(grant.blocks.len(), units));
        let mut table = self.lock();
        let offer = Offer { blocks: grant.blocks.clone(), block_bytes, units, owner: grant.owner, lease: grant.lease };
        table.sessions.offer(grant.handoff, offer, clock::now())?;
        table.waiters.insert(grant.handoff, Waiter { arrival: sender, landing: landing.clone() });
        table.secrets.insert(grant.handoff, secret);
        drop(table);
        self.keep_time();
        Ok((ticket, Arrival { landing, whole: arrival }))
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
                self.counters.open_writes.fetch_add(1, Relaxed);
                let runs = self.arena.runs(&pieces.blocks, self.arena.slice(pieces.of, &pieces.units));
                Ok(Claim { registry: self.clone(), range, pieces, runs, len, open: true })
            }
            Err(rejected) => Err(self.refuse(table, peer, range.handoff, rejected)),
        }
    }

    /// Lets `peer`, and nobody else, fill a hand-off. A refusal is counted here, and answered by the backend: the
    /// hand-off is not this peer's, so there may be nobody else to tell.
    ///
    /// # Errors
    /// `Used`, `WrongPeer` or `Expired`.
    pub fn open(&self, peer: PeerId, authenticated: &Authenticated) -> Result<(), Refusal> {
        let opened = self.lock().sessions.open(peer, authenticated.handoff, clock::now());
        opened.inspect_err(|refusal| self.counters.count_refusal(*refusal))
    }

    /// A seal frame arrived. Refusals go to the peer from here.
    pub fn seal(&self, peer: PeerId, handoff: HandoffId, payload: &[u8]) {
        let Some(seal) = parse_seal(handoff, payload) else { return self.unreadable(peer, handoff) };
        let mut table = self.lock();
        match table.sessions.seal(peer, handoff, seal, clock::now()) {
            Ok(arrived) => table.deliver(handoff, arrived),
            Err(rejected) => {
                self.refuse(table, peer, handoff, rejected);
            }
        }
    }

    /// A frame of a hand-off that cannot be read, or names what there is not. Refusals go to the peer from here.
    pub fn unreadable(&self, peer: PeerId, handoff: HandoffId) {
        self.counters.protocol_errors.fetch_add(1, Relaxed);
        let mut table = self.lock();
        let rejected = table.sessions.unreadable(peer, handoff, clock::now());
        self.refuse(table, peer, handoff, rejected);
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
        if let Some(ended) = table.sessions.cancelled_by(peer, handoff, clock::now()) {
            self.count_end(ended, Refusal::Cancelled);
            let message = "the KV sender cancelled the hand-off";
            table.fail(handoff, TransferError::new(TransferErrorKind::Cancelled, message));
        }
    }

    /// The sender's connection is lost, and its writes may go on: [`Registry::fence`] comes later. A hand-off that is
    /// here in whole goes on without it.
    pub fn lost_by(&self, peer: PeerId, handoff: HandoffId) {
        let mut table = self.lock();
        if let Some(ended) = table.sessions.lost_by(peer, handoff, clock::now()) {
            self.count_end(ended, Refusal::PeerLost);
            self.counters.count_refusal(Refusal::PeerLost);
            table.fail(handoff, sender_gone());
        }
    }

    /// No write of `peer` can touch the arena any more.
    pub fn fence(&self, peer: PeerId) {
        let mut table = self.lock();
        for handoff in table.sessions.fence(peer, clock::now()) {
            self.counters.aborted_handoffs.fetch_add(1, Relaxed);
            self.counters.count_refusal(Refusal::PeerLost);
            table.fail(handoff, sender_gone());
        }
    }

    /// The address in the tickets that are out leads nowhere any more: grants that nobody has opened end, so that their
    /// blocks need not wait for their leases.
    pub fn withdraw(&self) {
        let mut table = self.lock();
        for handoff in table.sessions.withdraw(clock::now()) {
            self.counters.aborted_handoffs.fetch_add(1, Relaxed);
            table.fail(handoff, TransferError::peer_gone("the KV transport has another address now"));
        }
    }

    /// A frame or a connection that is not ours to read.
    pub fn violation(&self) {
        self.counters.protocol_errors.fetch_add(1, Relaxed);
    }

    /// Ends what is past its lease, tells its peers, and cuts off those whose writes overstay. The first grant starts a
    /// task that calls it in time.
    pub fn expire(&self) {
        let now = clock::now();
        let mut table = self.lock();
        let ended = table.sessions.expire(now);
        for (handoff, ended) in &ended {
            self.count_end(*ended, Refusal::Expired);
            self.counters.count_refusal(Refusal::Expired);
            table.fail(*handoff, lease_ended());
        }
        let overstayed = table.sessions.overstayed(now);
        drop(table);
        for (handoff, ended) in ended {
            tracing::warn!(%handoff, "the KV sender was silent for its lease: the hand-off ends");
            self.tell(handoff, ended, Refusal::Expired);
        }
        for peer in overstayed {
            tracing::warn!(peer = peer.0, "writes into abandoned KV blocks do not end: their peer is cut off");
            self.counters.fenced_peers.fetch_add(1, Relaxed);
            self.link.cut_off(peer);
        }
    }

    /// Runs on a thread that may block, not many at once.
    pub(crate) async fn hash<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TransferError> {
        let place = match hashing::is_little(bytes) {
            true => None,
            false => self.hashing.clone().acquire_owned().await.ok(),
        };
        let done = hashing::start(bytes, move || {
            let _place = place;
            work()
        });
        done.await.map_err(|error| TransferError::new(TransferErrorKind::Io, format!("hashing KV failed: {error}")))
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
        let ended = table.sessions.abort(handoff, clock::now());
        if let Some(ended) = ended {
            self.conclude(table, handoff, ended, refusal);
        }
    }

    fn check_blocks(&self, blocks: &[u32]) -> Result<(), TransferError> {
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        let distinct = sorted.windows(2).all(|pair| pair[0] != pair[1]);
        let inside = sorted.last().is_some_and(|last| *last < self.arena.blocks());
        if distinct && inside { Ok(()) } else { Err(TransferError::from(Refusal::OutOfRange)) }
    }

    /// Answers a rejected frame, and ends its hand-off if the frame did.
    fn refuse(&self, mut table: Locked<'_>, peer: PeerId, handoff: HandoffId, rejected: Rejected) -> Refusal {
        let refusal = rejected.refusal;
        self.counters.count_refusal(refusal);
        if rejected.aborted {
            self.counters.aborted_handoffs.fetch_add(1, Relaxed);
            table.fail(handoff, refusal.into());
        }
        drop(table);
        // A peer that keeps sending for what is over may not fill the log.
        if rejected.aborted {
            tracing::warn!(%handoff, reason = refusal.label(), "KV hand-off frame refused: {refusal}");
        } else {
            tracing::debug!(%handoff, reason = refusal.label(), "KV hand-off frame refused: {refusal}");
        }
        self.link.answer(peer, handoff, Answer::Refused(refusal));
        refusal
    }

    /// A hand-off has ended from this side. Counted before anybody is told.
    fn conclude(&self, mut table: Locked<'_>, handoff: HandoffId, ended: Ended, refusal: Refusal) {
        if self.count_end(ended, refusal) {
            self.counters.count_refusal(refusal);
        }
        table.fail(handoff, refusal.into());
        drop(table);
        self.tell(handoff, ended, refusal);
    }

    fn tell(&self, handoff: HandoffId, ended: Ended, refusal: Refusal) {
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

    fn written(&self, range: DataHeader, len: u64, leaves: Vec<u64>) {
        self.counters.received_bytes.fetch_add(len, Relaxed);
        let mut table = self.lock();
        let arrived = table.sessions.written(range, clock::now());
        if let Some(waiter) = table.waiters.get(&range.handoff) {
            waiter.landing.note(Piece { range, leaves }, len);
        }
        table.deliver(range.handoff, arrived);
    }

    fn failed(&self, handoff: HandoffId) {
        let mut table = self.lock();
        if let Some(ended) = table.sessions.failed(handoff, clock::now()) {
            self.conclude(table, handoff, ended, Refusal::WriteFailed);
        }
    }

    fn lock(&self) -> Locked<'_> {
        // A panic while holding the lock leaves the table usable: every method finishes its change before it can panic.
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { before: table.sessions.quarantined(), table, registry: self }
    }
}

/// The table in use. Leaves the gauge as the table is, and the timer with what came into quarantine: its grace is
/// shorter than the leases.
struct Locked<'a> {
    before: Quarantined,
    table: MutexGuard<'a, Table>,
    registry: &'a Registry,
}

impl Deref for Locked<'_> {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Table {
        &mut self.table
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let now = self.table.sessions.quarantined();
        self.registry.counters.quarantined_blocks.store(now.blocks as u64, Relaxed);
        if now.handoffs > self.before.handoffs {
            self.registry.rearm.notify_one();
        }
    }
}

fn sender_gone() -> TransferError {
    TransferError::peer_gone("the KV sender is gone")
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
            let _ = waiter.arrival.send(Ok(arrived));
        }
    }

    fn fail(&mut self, handoff: HandoffId, error: TransferError) {
        if let Some(waiter) = self.waiters.remove(&handoff) {
            let _ = waiter.arrival.send(Err(error));
        }
    }
}
