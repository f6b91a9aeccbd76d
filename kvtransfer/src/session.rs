//! The receiver's rules, as a pure state machine over all grants of a node: frames and time in, decisions out. No lock,
//! socket, clock or byte of KV in here; `registry.rs` adds lock and clock.
//!
//! ```text
//! Offered ──open──► Reserved ──claim──► Writing ──seal, all blocks──► Sealed ──checked──► Verified
//!    └─────────────────┴───────────────────┴────── any violation, cancel, expiry ──────► Aborted
//! ```
//! `Offered`: the ticket is out. `Reserved`: a peer opened it, and only that peer may write from now on. Who may open
//! it is decided before (`registry.rs`: by the key in the ticket). The peer that opened it and breaks a rule aborts the
//! hand-off (fail closed); any other can do nothing. The lease is how long that peer may be silent: whatever it does
//! right, and each of its writes that ends, begins it anew.
//!
//! A block consists of units. Each is claimed once, in ascending order and without gaps, and all are written before a
//! seal counts.
//!
//! Quarantine: an aborted session whose writers are not all done keeps its owner (so the blocks stay out of the pool)
//! until the last writer is done or its peer is fenced. A writer has a grace to end by itself; then its peer is to be
//! cut off ([`Sessions::overstayed`]), again and again until it is fenced.
//!
//! Long because a hand-off's states and the rules over all hand-offs are one machine, and are tested as one.
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, v1};

use crate::error::Refusal;
use crate::mutation::Mutation;
use crate::terms::{BlockOwner, Landed, PeerId};
use crate::wire::DataHeader;

/// How long the writers of an aborted hand-off may take to end, where nothing else is configured.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);
/// Grants a node has out at once.
pub const MAX_SESSIONS: usize = 4096;
/// Ids remembered as used. An id that fell out of memory is unknown, and refused as such.
const USED_IDS: usize = 16 * 1024;

/// Where a hand-off stands on the receiving side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The ticket is out, nobody came yet.
    Offered,
    /// A peer opened it.
    Reserved,
    /// Some block was claimed.
    Writing,
    /// Seal and all blocks are there; waits for verification.
    Sealed,
    /// Verified; terminal.
    Verified,
    /// Refused, cancelled, expired or fenced; terminal once its writers are done.
    Aborted,
}

/// Groups of a hand-off that are told apart; what comes later counts for the last one.
const MAX_LANDED: usize = 128;

/// Everything of a hand-off is in the arena, and nothing of it is verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    /// As the sender wrote it.
    pub seal: v1::Seal,
    /// Of all ranges.
    pub bytes: u64,
    /// First range's header.
    pub first_arrival: Instant,
    /// Last range's last byte.
    pub last_arrival: Instant,
    /// Time in which some range was being written: what is left of the whole when a sender waits for its computation.
    pub copying: Duration,
    /// What arrived when.
    pub landed: Vec<Landed>,
}

/// A frame that was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Why.
    pub refusal: Refusal,
    /// The frame also ended its hand-off.
    pub aborted: bool,
}

/// A hand-off that ended without its own frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Who must be told, if somebody ever opened it.
    pub peer: Option<PeerId>,
    /// Its owner is kept for writers.
    pub quarantined: bool,
}

/// All grants of a node.
pub struct Sessions {
    live: HashMap<HandoffId, Session>,
    /// Ever.
    offered: u64,
    used: UsedIds,
    grace: Duration,
    quarantined: Quarantined,
    mutation: Mutation,
}

/// What is in quarantine now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quarantined {
    /// Hand-offs.
    pub handoffs: usize,
    /// Their blocks.
    pub blocks: usize,
}

/// What a hand-off may fill, and who holds it meanwhile.
pub struct Offer {
    /// Arena blocks in the order of their indices.
    pub blocks: Vec<u32>,
    /// Bytes of each.
    pub block_bytes: u64,
    /// Equal pieces of each.
    pub units: u8,
    /// Kept until no writer can touch the blocks.
    pub owner: BlockOwner,
    /// How long the peer may be silent, and how long the ticket may stay unused.
    pub lease: Duration,
}

struct Session {
    /// Later offers have larger ones.
    number: u64,
    state: State,
    offer: Offer,
    /// Of each block, the unit that comes next.
    next_unit: Vec<u8>,
    /// End of the lease; in quarantine, of the writers' grace.
    deadline: Instant,
    peer: Option<PeerId>,
    /// Claims without their `written` or `failed`.
    writers: u32,
    /// Aborted with writers: counted in `Sessions::quarantined`.
    quarantined: bool,
    /// By [`Mutation::ForgetFence`]: over, and open.
    forgotten: bool,
    /// Units of all blocks that nobody claimed yet.
    unclaimed: u64,
    seal: Option<v1::Seal>,
    bytes: u64,
    first_arrival: Option<Instant>,
    last_arrival: Option<Instant>,
    copying: Duration,
    landed: Vec<Landed>,
    /// Begin of the time in which there have been writers without a break.
    copying_since: Instant,
}

impl Sessions {
    /// None. Writers of an aborted hand-off have `grace` to end.
    pub fn new(grace: Duration) -> Self {
        Self::mutated(grace, Mutation::None)
    }

    #[doc(hidden)]
    pub fn mutated(grace: Duration, mutation: Mutation) -> Self {
        let (live, used, quarantined) = (HashMap::new(), UsedIds::default(), Quarantined::default());
        Self { live, offered: 0, used, grace, quarantined, mutation }
    }

    /// Registers a grant.
    ///
    /// # Errors
    /// `Used` for an id that was seen before, `Overloaded` when [`MAX_SESSIONS`] are out.
    pub fn offer(&mut self, id: HandoffId, offer: Offer, now: Instant) -> Result<(), Refusal> {
        if self.live.len() >= MAX_SESSIONS {
            return Err(Refusal::Overloaded);
        }
        if !self.used.insert(id) {
            return Err(Refusal::Used);
        }
        self.offered += 1;
        let session = Session {
            number: self.offered,
            state: State::Offered,
            next_unit: vec![0; offer.blocks.len()],
            deadline: now + offer.lease,
            unclaimed: offer.blocks.len() as u64 * u64::from(offer.units),
            peer: None,
            writers: 0,
            quarantined: false,
            forgotten: false,
            seal: None,
            bytes: 0,
            first_arrival: None,
            last_arrival: None,
            copying: Duration::ZERO,
            landed: Vec::new(),
            copying_since: now,
            offer,
        };
        self.live.insert(id, session);
        Ok(())
    }

    /// `peer` has proved that the hand-off is its own: it, and nobody else, may act on it from now on. Counts as
    /// progress.
    ///
    /// # Errors
    /// `Unknown`, `Used` (over, or in quarantine), `WrongPeer` or `Expired`.
    pub fn open(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Result<(), Refusal> {
        let session = self.live.get(&handoff).ok_or_else(|| self.unknown(handoff))?;
        session.admits(session.peer.unwrap_or(peer) == peer, now)?;
        if let Some(session) = self.live.get_mut(&handoff) {
            session.extend(now);
            if session.state == State::Offered {
                (session.state, session.peer) = (State::Reserved, Some(peer));
            }
        }
        Ok(())
    }

    /// Asks to write `len` bytes to a range. On success the caller may write to the returned pieces, and owes one
    /// [`Sessions::written`] or [`Sessions::failed`].
    ///
    /// # Errors
    /// Known, opened by this peer, not expired, exact length, in range, not yet written, in order: whichever does not
    /// hold.
    pub fn claim(&mut self, peer: PeerId, range: DataHeader, len: u64, now: Instant) -> Result<Pieces, Rejected> {
        let session = self.admit(peer, range.handoff, now)?;
        session.claim(range, len, now).map_err(|refusal| self.reject(range.handoff, refusal, now))
    }

    /// A claimed range is in the arena. Returns the whole hand-off when it was the last missing piece.
    pub fn written(&mut self, range: DataHeader, now: Instant) -> Option<Arrived> {
        let session = self.live.get_mut(&range.handoff)?;
        session.writers = session.writers.saturating_sub(1);
        if session.state == State::Aborted {
            self.release(range.handoff);
            return None;
        }
        session.land(range, now);
        session.last_arrival = Some(now);
        if session.writers == 0 {
            session.copying += now.saturating_duration_since(session.copying_since);
        }
        session.extend(now);
        session.arrived(now)
    }

    /// The sender is still there.
    ///
    /// # Errors
    /// As [`Sessions::claim`]: whoever may not write may not keep others from it either.
    pub fn keep_alive(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Result<(), Rejected> {
        self.admit(peer, handoff, now).map(|_| ())
    }

    /// A claimed range will not come. Returns whether this ended the hand-off (it may have ended before).
    pub fn failed(&mut self, handoff: HandoffId, now: Instant) -> Option<Ended> {
        let session = self.live.get_mut(&handoff)?;
        session.writers = session.writers.saturating_sub(1);
        if session.state == State::Aborted {
            self.release(handoff);
            return None;
        }
        self.abort(handoff, now)
    }

    /// A seal arrived; `None` means that some claimed range is still being written.
    ///
    /// # Errors
    /// As [`Sessions::claim`], or `Incomplete` when a block was never claimed, or `Malformed` for a second seal.
    pub fn seal(
        &mut self,
        peer: PeerId,
        handoff: HandoffId,
        seal: v1::Seal,
        now: Instant,
    ) -> Result<Option<Arrived>, Rejected> {
        let session = self.admit(peer, handoff, now)?;
        if session.seal.is_some() {
            return Err(self.reject(handoff, Refusal::Malformed, now));
        }
        if session.unclaimed > 0 {
            return Err(self.reject(handoff, Refusal::Incomplete, now));
        }
        session.seal = Some(seal);
        Ok(session.arrived(now))
    }

    /// A frame of a hand-off could not be read. Always a rejection.
    pub fn unreadable(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Rejected {
        match self.admit(peer, handoff, now) {
            Ok(_) => self.reject(handoff, Refusal::Malformed, now),
            Err(rejected) => rejected,
        }
    }

    /// The sender gives up.
    pub fn cancelled_by(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Option<Ended> {
        let theirs = self.live.get(&handoff).is_some_and(|session| session.peer == Some(peer));
        if theirs { self.abort(handoff, now) } else { None }
    }

    /// Verification succeeded. `None`: the hand-off was aborted meanwhile, so it does not count.
    pub fn verified(&mut self, handoff: HandoffId) -> Option<PeerId> {
        let session = self.live.get_mut(&handoff).filter(|session| session.state == State::Sealed)?;
        session.state = State::Verified;
        let peer = session.peer;
        self.live.remove(&handoff);
        peer
    }

    /// Ends a hand-off from this side. `None` when it is already over.
    pub fn abort(&mut self, handoff: HandoffId, now: Instant) -> Option<Ended> {
        let session = self.live.get_mut(&handoff).filter(|session| session.state != State::Aborted)?;
        if session.mutate(self.mutation, now) {
            return Some(Ended { peer: session.peer, quarantined: false });
        }
        session.state = State::Aborted;
        session.quarantined = session.writers > 0;
        session.deadline = now + self.grace;
        let ended = Ended { peer: session.peer, quarantined: session.quarantined };
        if ended.quarantined {
            self.quarantined.handoffs += 1;
            self.quarantined.blocks += session.offer.blocks.len();
        }
        self.release(handoff);
        Some(ended)
    }

    /// `peer` is lost, and may still write: ends the hand-off unless all of it is here. Its blocks wait for its
    /// writers.
    pub fn lost_by(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Option<Ended> {
        if self.state(handoff) == Some(State::Sealed) {
            return None;
        }
        self.cancelled_by(peer, handoff, now)
    }

    /// No write of `peer` touches the arena any more: ends its hand-offs and its quarantine. Returns those that ended
    /// now. A sealed hand-off is whole and has no writers: it needs its peer no more, and is left to its verification.
    pub fn fence(&mut self, peer: PeerId, now: Instant) -> Vec<HandoffId> {
        let ids = self.ids(|session| session.peer == Some(peer) && session.state != State::Sealed);
        let mut ended = Vec::new();
        for id in ids {
            if self.abort(id, now).is_some() {
                ended.push(id);
            }
            if let Some(session) = self.live.get_mut(&id) {
                session.writers = 0;
            }
            self.release(id);
        }
        ended
    }

    /// The tickets that are out lead nowhere any more: ends what nobody has opened. Returns those that ended.
    pub fn withdraw(&mut self, now: Instant) -> Vec<HandoffId> {
        let unopened = self.ids(|session| session.state == State::Offered);
        unopened.into_iter().filter(|id| self.abort(*id, now).is_some()).collect()
    }

    /// Ends what is past its lease (a sealed hand-off is being verified, and is left to that).
    pub fn expire(&mut self, now: Instant) -> Vec<(HandoffId, Ended)> {
        let over = |s: &Session| now >= s.deadline && !matches!(s.state, State::Sealed | State::Aborted);
        self.ids(over).into_iter().filter_map(|id| Some((id, self.abort(id, now)?))).collect()
    }

    /// Peers whose writes into quarantined blocks did not end within their grace, which begins anew: they are to be cut
    /// off, and fenced when that is done.
    pub fn overstayed(&mut self, now: Instant) -> Vec<PeerId> {
        let late = self.live.values_mut().filter(|s| s.quarantined && now >= s.deadline);
        let peers: BTreeSet<PeerId> = late
            .filter_map(|session| {
                session.deadline = now + self.grace;
                session.peer
            })
            .collect();
        peers.into_iter().collect()
    }

    /// When [`Sessions::expire`] or [`Sessions::overstayed`] may have something to do, if nothing comes before.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.live.values().filter(|s| s.state != State::Sealed).map(|s| s.deadline).min()
    }

    /// State of a hand-off that is not over (or in quarantine).
    pub fn state(&self, handoff: HandoffId) -> Option<State> {
        self.live.get(&handoff).map(|session| session.state)
    }

    /// Hand-offs that are not over, or in quarantine.
    pub fn len(&self) -> usize {
        self.live.values().filter(|session| !session.forgotten).count()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// In quarantine now.
    pub fn quarantined(&self) -> Quarantined {
        self.quarantined
    }

    /// In the order in which they were offered.
    fn ids(&self, which: impl Fn(&Session) -> bool) -> Vec<HandoffId> {
        let chosen = self.live.iter().filter(|(_, session)| which(session));
        let mut ids: Vec<_> = chosen.map(|(id, session)| (session.number, *id)).collect();
        ids.sort_unstable_by_key(|(number, _)| *number);
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// Finds a hand-off that `peer` has opened.
    fn admit(&mut self, peer: PeerId, handoff: HandoffId, now: Instant) -> Result<&mut Session, Rejected> {
        let foreign = |refusal| Rejected { refusal, aborted: false };
        let session = self.live.get(&handoff).ok_or_else(|| foreign(self.unknown(handoff)))?;
        match session.admits(session.peer == Some(peer), now) {
            Ok(()) => {}
            Err(Refusal::Expired) => return Err(self.reject(handoff, Refusal::Expired, now)),
            Err(refusal) => return Err(foreign(refusal)),
        }
        let session = self.live.get_mut(&handoff).ok_or(foreign(Refusal::Unknown))?;
        session.extend(now);
        Ok(session)
    }

    /// Why there is nothing of this id.
    fn unknown(&self, handoff: HandoffId) -> Refusal {
        if self.used.contains(handoff) { Refusal::Used } else { Refusal::Unknown }
    }

    fn reject(&mut self, handoff: HandoffId, refusal: Refusal, now: Instant) -> Rejected {
        let aborted = self.abort(handoff, now).is_some();
        Rejected { refusal, aborted }
    }

    /// Forgets an aborted session without writers: this drops its owner.
    fn release(&mut self, handoff: HandoffId) {
        let idle = |s: &Session| s.state == State::Aborted && s.writers == 0;
        if self.live.get(&handoff).is_some_and(idle) {
            let session = self.live.remove(&handoff).filter(|session| session.quarantined);
            if let Some(session) = session {
                self.quarantined.handoffs -= 1;
                self.quarantined.blocks -= session.offer.blocks.len();
            }
        }
    }
}

/// What a claim may write, in the payload's order: these units of each of these arena blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Arena blocks.
    pub blocks: Vec<u32>,
    /// Of each of them.
    pub units: Range<u8>,
    /// Units of a block.
    pub of: u8,
}

impl Session {
    /// Whether the peer may act on it; `theirs`: it is the one that opened it.
    fn admits(&self, theirs: bool, now: Instant) -> Result<(), Refusal> {
        if self.state == State::Aborted {
            return Err(Refusal::Used);
        }
        if !theirs {
            return Err(if self.peer.is_some() { Refusal::WrongPeer } else { Refusal::Unauthenticated });
        }
        if now >= self.deadline && self.state != State::Sealed { Err(Refusal::Expired) } else { Ok(()) }
    }

    /// What a bug does instead of, or before, an abort. Whether it is instead.
    fn mutate(&mut self, mutation: Mutation, now: Instant) -> bool {
        let forgets = mutation.forgets_fence() && self.peer.is_some();
        if forgets || mutation.frees_early() {
            self.offer.owner = Arc::new(());
        }
        if forgets {
            self.forgotten = true;
            self.deadline = now + Duration::from_secs(3600);
        }
        forgets
    }

    fn claim(&mut self, range: DataHeader, len: u64, now: Instant) -> Result<Pieces, Refusal> {
        let (first, count) = (range.first as usize, range.count as usize);
        let end = first.checked_add(count).filter(|end| count > 0 && *end <= self.offer.blocks.len());
        let end = end.ok_or(Refusal::OutOfRange)?;
        let units = range.units.of(self.offer.units).ok_or(Refusal::OutOfRange)?;
        if self.range_bytes(range) != len {
            return Err(Refusal::Length);
        }
        let next = &mut self.next_unit[first..end];
        if self.seal.is_some() || next.iter().any(|next| units.start < *next) {
            return Err(Refusal::AlreadyWritten);
        }
        if next.iter().any(|next| units.start > *next) {
            return Err(Refusal::OutOfOrder);
        }
        next.fill(units.end);
        self.unclaimed -= count as u64 * units.len() as u64;
        if self.writers == 0 {
            self.copying_since = now;
        }
        self.writers += 1;
        self.state = State::Writing;
        self.first_arrival.get_or_insert(now);
        Ok(Pieces { blocks: self.offer.blocks[first..end].to_vec(), units, of: self.offer.units })
    }

    /// Of a range whose units were checked.
    fn range_bytes(&self, range: DataHeader) -> u64 {
        let units = range.units.of(self.offer.units).map_or(0, |units| units.len() as u64);
        u64::from(range.count) * (self.offer.block_bytes / u64::from(self.offer.units)) * units
    }

    /// Counts a range that is in the arena.
    fn land(&mut self, range: DataHeader, at: Instant) {
        let (units, bytes) = (range.units.of(self.offer.units).unwrap_or(0..0), self.range_bytes(range));
        self.bytes += bytes;
        let units = (units.start, units.end.saturating_sub(units.start));
        let full = self.landed.len() == MAX_LANDED;
        match self.landed.last_mut().filter(|last| full || last.units == units) {
            Some(last) => (last.blocks, last.bytes, last.at) = (last.blocks + range.count, last.bytes + bytes, at),
            None => self.landed.push(Landed { units, blocks: range.count, bytes, at }),
        }
    }

    /// Progress: the lease begins anew.
    fn extend(&mut self, now: Instant) {
        self.deadline = self.deadline.max(now + self.offer.lease);
    }

    /// Sealed, once the seal and every block are there.
    fn arrived(&mut self, now: Instant) -> Option<Arrived> {
        if self.writers > 0 || self.unclaimed > 0 {
            return None;
        }
        let seal = self.seal.clone()?;
        self.state = State::Sealed;
        Some(Arrived {
            seal,
            bytes: self.bytes,
            first_arrival: self.first_arrival.unwrap_or(now),
            last_arrival: self.last_arrival.unwrap_or(now),
            copying: self.copying,
            landed: std::mem::take(&mut self.landed),
        })
    }
}

/// The last [`USED_IDS`] ids.
#[derive(Default)]
struct UsedIds {
    order: VecDeque<HandoffId>,
    ids: HashSet<HandoffId>,
}

impl UsedIds {
    /// False when the id was there.
    fn insert(&mut self, id: HandoffId) -> bool {
        if !self.ids.insert(id) {
            return false;
        }
        self.order.push_back(id);
        if self.order.len() > USED_IDS
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        true
    }

    fn contains(&self, id: HandoffId) -> bool {
        self.ids.contains(&id)
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
