//! One hand-off as its sender sees it, as a pure state machine: pushes, answers and time in, frames and verdicts out.
//! No socket, clock or byte of KV in here; `outgoing.rs` adds the clock and the backend. The receiver's side is
//! `session.rs`, and `joint_tests.rs` lets the two meet over a faulty link.
//!
//! ```text
//! Opened ──push──► Pushing ──seal──► Sealed ──acknowledged──► Acknowledged
//!    ├────────────────┴─────────────────┴── refused, peer lost, silence ──► Failed
//!    └────────────────────────────── given up ────────────────────────────► Cancelled
//! ```
//! Every frame that could be queued is progress, and begins the lease anew on both ends.
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, v1};

use crate::arena::{Arena, Run, Slice};
use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::terms::{CheckedTicket, Receipt};
use crate::wire::{Answer, DataHeader, Header, MAX_SEAL_BYTES, Units, encode_seal};

/// Blocks in one frame, however small they are.
const MAX_FRAME_BLOCKS: usize = 1024;
/// Keep-alives in a lease: all but one may be late.
const KEEP_ALIVES_PER_LEASE: u32 = 3;

/// Where a hand-off stands on the sending side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing was pushed yet.
    Opened,
    /// Something was.
    Pushing,
    /// The seal is on its way; waits for the verdict.
    Sealed,
    /// The receiver verified it; terminal.
    Acknowledged,
    /// Refused, lost, or nothing happened for a lease; terminal.
    Failed,
    /// Given up on this side; terminal.
    Cancelled,
}

/// What a backend puts into one frame of data.
#[derive(Clone, Copy, Debug)]
pub struct FrameLimits {
    /// Bytes, though at least one block's.
    pub bytes: usize,
    /// Pieces of the arena, of the sender's and of the receiver's alike: with 1 a frame is contiguous at both ends.
    pub runs: usize,
}

/// What is left of one push.
pub struct Push<'a> {
    units: Range<u8>,
    slice: Slice,
    first: u32,
    blocks: &'a [u32],
    limits: FrameLimits,
}

/// A frame of data: its header, and where its payload lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeFrame {
    /// Of the frame.
    pub header: DataHeader,
    /// One after the other.
    pub runs: Vec<Run>,
}

impl RangeFrame {
    /// Of the payload.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes as u64).sum()
    }
}

/// An open hand-off.
pub struct Delivery {
    arena: Arc<Arena>,
    ticket: CheckedTicket,
    state: State,
    deadline: Instant,
    /// The receiver has spoken its last word.
    answered: bool,
    first_post: Option<Instant>,
    bytes: u64,
    blocks: u32,
    descriptors: u32,
}

impl Delivery {
    /// Of blocks of `arena`, into what `ticket` grants.
    pub fn new(ticket: CheckedTicket, arena: Arc<Arena>, now: Instant) -> Self {
        let deadline = now + ticket.lease;
        Self {
            arena,
            ticket,
            state: State::Opened,
            deadline,
            answered: false,
            first_post: None,
            bytes: 0,
            blocks: 0,
            descriptors: 0,
        }
    }

    /// Which one.
    pub fn handoff(&self) -> HandoffId {
        self.ticket.handoff
    }

    /// Pieces that a block may be pushed in.
    pub fn units(&self) -> u8 {
        self.ticket.units
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// It ends then unless something happens ([`Delivery::expire`]).
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// How often a frame is due ([`Delivery::keep_alive`], when there is nothing else).
    pub fn keep_alive_every(&self) -> Duration {
        self.ticket.lease / KEEP_ALIVES_PER_LEASE
    }

    /// Begins to send `units` of `blocks` as blocks `first..` of the hand-off. Whether they are due is the receiver's
    /// matter: it refuses what comes twice or out of order.
    ///
    /// # Errors
    /// `Refused(OutOfRange)` for what lies outside grant, block or arena; `Io` after the seal and after the end.
    pub fn push<'a>(
        &mut self,
        units: Range<u8>,
        first: u32,
        blocks: &'a [u32],
        limits: FrameLimits,
        now: Instant,
    ) -> Result<Push<'a>, TransferError> {
        self.check_open()?;
        let granted = u64::from(first) + blocks.len() as u64 <= u64::from(self.ticket.blocks);
        let ours = blocks.iter().all(|block| *block < self.arena.blocks());
        let divided = !units.is_empty() && units.end <= self.ticket.units;
        if !(granted && ours && divided) {
            return Err(Refusal::OutOfRange.into());
        }
        self.state = State::Pushing;
        self.first_post.get_or_insert(now);
        let slice = self.arena.slice(self.ticket.units, &units);
        Ok(Push { units, slice, first, blocks, limits })
    }

    /// The next frame of `push`; `None` when all are out. As many blocks as fit, from wherever in the arena they are,
    /// cut at the joints of both ends where there are more than the backend takes.
    pub fn next_frame(&self, push: &mut Push<'_>) -> Option<RangeFrame> {
        let there = self.ticket.joints.within(push.first, push.limits.runs) as usize;
        let most = (push.limits.bytes / push.slice.bytes).clamp(1, MAX_FRAME_BLOCKS).min(there);
        let mut runs = self.arena.runs(&push.blocks[..push.blocks.len().min(most)], push.slice);
        runs.truncate(push.limits.runs);
        let count = runs.iter().map(|run| run.bytes).sum::<usize>() / push.slice.bytes;
        if count == 0 {
            return None;
        }
        let units = Units::new(push.units.clone(), self.ticket.units);
        let header = DataHeader { handoff: self.ticket.handoff, first: push.first, count: count as u32, units };
        push.blocks = &push.blocks[count..];
        push.first += count as u32;
        Some(RangeFrame { header, runs })
    }

    /// A frame of `bytes` of data is queued.
    pub fn pushed(&mut self, header: DataHeader, bytes: u64, now: Instant) {
        self.bytes += bytes;
        self.descriptors += 1;
        if header.units.of(self.ticket.units).is_some_and(|units| units.end == self.ticket.units) {
            self.blocks += header.count;
        }
        self.progressed(now);
    }

    /// The frame that says "still here" while nothing is ready to be sent.
    ///
    /// # Errors
    /// `Io` after the seal and after the end.
    pub fn keep_alive(&self) -> Result<Header, TransferError> {
        self.check_open()?;
        Ok(Header::KeepAlive(self.ticket.handoff))
    }

    /// The payload of the seal's frame.
    ///
    /// # Errors
    /// `Io` when it is too long, after a seal and after the end.
    pub fn seal(&self, seal: &v1::Seal) -> Result<Vec<u8>, TransferError> {
        self.check_open()?;
        let payload = encode_seal(seal);
        if payload.len() > MAX_SEAL_BYTES {
            return Err(TransferError::new(TransferErrorKind::Io, "the seal is too long"));
        }
        Ok(payload)
    }

    /// The seal is queued: only the verdict is missing.
    pub fn sealed(&mut self, now: Instant) {
        if !self.is_over() {
            self.state = State::Sealed;
            self.first_post.get_or_insert(now);
        }
        self.progressed(now);
    }

    /// A keep-alive is queued.
    pub fn progressed(&mut self, now: Instant) {
        self.deadline = self.deadline.max(now + self.ticket.lease);
    }

    /// The receiver has answered, or cannot any more. The first word stands. Returns how the hand-off ended.
    ///
    /// # Errors
    /// The refusal, or whatever else was told; `Io` for an acknowledgement of nothing.
    pub fn told(&mut self, outcome: Result<(), TransferError>) -> Result<(), TransferError> {
        let sealed = self.state == State::Sealed;
        if !self.is_over() {
            self.answered = true;
            self.state = if sealed && outcome.is_ok() { State::Acknowledged } else { State::Failed };
        }
        if outcome.is_ok() && !sealed {
            return Err(TransferError::new(TransferErrorKind::Io, "the receiver answered before the seal"));
        }
        outcome
    }

    /// As [`Delivery::told`], for an answer frame.
    ///
    /// # Errors
    /// As there.
    pub fn answered(&mut self, answer: Answer) -> Result<(), TransferError> {
        self.told(match answer {
            Answer::Ack => Ok(()),
            Answer::Refused(refusal) => Err(refusal.into()),
        })
    }

    /// A frame could not be queued: nothing more can be.
    pub fn failed(&mut self) {
        if !self.is_over() {
            self.state = State::Failed;
        }
    }

    /// Ends it when nothing happened for a lease.
    ///
    /// # Errors
    /// `Timeout`, if that was so.
    pub fn expire(&mut self, now: Instant) -> Result<(), TransferError> {
        if self.is_over() || now < self.deadline {
            return Ok(());
        }
        self.state = State::Failed;
        Err(TransferError::new(TransferErrorKind::Timeout, "nothing of the KV hand-off moved for its lease"))
    }

    /// Gives it up. Returns the frame that tells the receiver, unless that has spoken already.
    pub fn cancel(&mut self) -> Option<Header> {
        let untold = !self.answered && self.state != State::Cancelled;
        if !self.is_over() {
            self.state = State::Cancelled;
        }
        self.answered = true;
        untold.then_some(Header::Cancel(self.ticket.handoff))
    }

    /// It will not change any more.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Acknowledged | State::Failed | State::Cancelled)
    }

    /// What was sent; `post` is the time that queueing took.
    pub fn receipt(&self, post: Duration, now: Instant) -> Receipt {
        let first_post = self.first_post.unwrap_or(now);
        Receipt {
            bytes: self.bytes,
            blocks: self.blocks,
            descriptors: self.descriptors,
            elapsed: now.saturating_duration_since(first_post),
            post,
            first_post,
        }
    }

    fn check_open(&self) -> Result<(), TransferError> {
        match self.state {
            State::Opened | State::Pushing => Ok(()),
            _ => Err(TransferError::new(TransferErrorKind::Io, "the KV hand-off is sealed or over")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_memory::HostMemory;

    use super::*;
    use crate::joints::{self, Joints};

    const LEASE: Duration = Duration::from_secs(30);
    const ANY: FrameLimits = FrameLimits { bytes: 256, runs: usize::MAX };

    /// To a receiver whose blocks lie in runs of these lengths.
    fn ticket(runs: &[u32], units: u8) -> CheckedTicket {
        let blocks = runs.iter().sum();
        let joints = Joints::parse(runs, blocks).expect("their sum");
        CheckedTicket { handoff: HandoffId([1; 16]), blocks, units, joints, lease: LEASE }
    }

    fn opened(blocks: u32, units: u8) -> (Delivery, Instant) {
        let arena = Arena::new(HostMemory::zeroed(16 * 64).expect("little"), 64, 1);
        let now = Instant::now();
        (Delivery::new(ticket(&[blocks], units), arena, now), now)
    }

    #[test]
    fn the_whole_way() {
        let (mut delivery, now) = opened(3, 4);
        let mut push = delivery.push(0..4, 0, &[7, 3, 4], ANY, now).unwrap();
        let frame = delivery.next_frame(&mut push).unwrap();
        assert_eq!(frame.runs, [Run { at: 7 * 64, bytes: 64 }, Run { at: 3 * 64, bytes: 128 }]);
        assert_eq!(delivery.next_frame(&mut push), None);
        delivery.pushed(frame.header, frame.bytes(), now + LEASE / 2);
        assert_eq!((delivery.state(), delivery.deadline()), (State::Pushing, now + LEASE / 2 + LEASE));
        delivery.seal(&v1::Seal::default()).unwrap();
        delivery.sealed(now);
        assert!(delivery.keep_alive().is_err() && delivery.push(0..4, 0, &[1], ANY, now).is_err());
        assert_eq!(delivery.answered(Answer::Ack), Ok(()));
        assert_eq!((delivery.state(), delivery.cancel()), (State::Acknowledged, None));
        let receipt = delivery.receipt(Duration::ZERO, now + LEASE);
        assert_eq!((receipt.bytes, receipt.blocks, receipt.descriptors, receipt.elapsed), (192, 3, 1, LEASE));
    }

    #[test]
    fn silence_ends_it_and_the_receiver_is_still_to_be_told() {
        let (mut delivery, now) = opened(1, 1);
        assert_eq!(delivery.expire(now + LEASE - Duration::from_nanos(1)), Ok(()));
        delivery.progressed(now + LEASE / 3);
        assert_eq!(delivery.expire(now + LEASE), Ok(()));
        let late = delivery.expire(now + LEASE / 3 + LEASE).unwrap_err();
        assert_eq!((late.kind, delivery.state()), (TransferErrorKind::Timeout, State::Failed));
        assert_eq!(delivery.cancel(), Some(Header::Cancel(HandoffId([1; 16]))));
        assert_eq!((delivery.cancel(), delivery.state()), (None, State::Failed), "once");
        assert!(delivery.answered(Answer::Ack).is_err() && delivery.state() == State::Failed, "too late");
    }

    #[test]
    fn an_acknowledgement_of_nothing_is_none() {
        let (mut delivery, _) = opened(1, 1);
        assert!(delivery.answered(Answer::Ack).is_err());
        assert_eq!(delivery.state(), State::Failed);
    }

    #[test]
    fn what_was_not_granted_is_not_sent() {
        let (mut delivery, now) = opened(2, 4);
        for (units, first, blocks) in [(0..4, 1, [1, 2]), (0..5, 0, [1, 2]), (2..2, 0, [1, 2]), (0..4, 0, [1, 16])] {
            let refused = delivery.push(units, first, &blocks, ANY, now).err().unwrap();
            assert_eq!(refused.refusal, Some(Refusal::OutOfRange));
        }
        assert_eq!(delivery.state(), State::Opened);
    }

    /// Blocks that lie side by side now and then, none twice, as a pool gives them.
    fn table(blocks: u32) -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec((0u32..blocks, 1u32..6), 1..40).prop_map(move |runs| {
            let mut table: Vec<u32> = Vec::new();
            for block in runs.into_iter().flat_map(|(at, length)| at..(at + length).min(blocks)) {
                if !table.contains(&block) {
                    table.push(block);
                }
            }
            table
        })
    }

    proptest! {
        /// The frames of a push name its blocks in order, once each, within the backend's limits, and none of them has
        /// more pieces at either end than the backend takes: with 1, each is contiguous at both.
        #[test]
        fn frames_cover_a_push(
            from in table(64), to in table(64), first in any::<prop::sample::Index>(), cut in (0u8..4, 1u8..5),
            bytes in 1usize..600, runs in 1usize..4,
        ) {
            let units = cut.0.min(cut.1 - 1)..cut.1;
            let arena = Arena::new(HostMemory::zeroed(64 * 64).expect("little"), 64, 1);
            let (ticket, now) = (ticket(&joints::of(&to), 4), Instant::now());
            let mut delivery = Delivery::new(ticket, arena.clone(), now);
            let first = first.index(to.len());
            let blocks = &from[..from.len().min(to.len() - first)];
            let limits = FrameLimits { bytes, runs };
            let mut push = delivery.push(units.clone(), first as u32, blocks, limits, now).unwrap();
            let (mut next, mut pieces) = (first, Vec::new());
            while let Some(frame) = delivery.next_frame(&mut push) {
                let count = frame.header.count as usize;
                prop_assert_eq!(frame.header.first as usize, next);
                prop_assert_eq!(frame.header.units.of(4), Some(units.clone()));
                prop_assert!(count > 0 && frame.runs.len() <= runs);
                prop_assert!(arena.runs(&to[next..next + count], arena.slice(4, &units)).len() <= runs);
                prop_assert!(count == 1 || frame.bytes() <= bytes as u64);
                next += count;
                let unit = usize::from(units.start) * 16;
                let step = units.len() * 16;
                pieces.extend(frame.runs.iter().flat_map(|run| (run.at..run.at + run.bytes).step_by(step)).map(|at| (at - unit) / 64));
            }
            prop_assert_eq!(pieces, blocks.iter().map(|block| *block as usize).collect::<Vec<_>>());
        }
    }
}
