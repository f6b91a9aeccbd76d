//! What this router has booked on one node: where each booking is in its life, and the sums over all of them that the
//! choice and the queue see. Pure: time is an argument. The node's row is [`super::entry`]'s.
//!
//! ```text
//! book ─┬─► Computing ──computed──┐
//!       ├─► Awaiting ───computed──┼─► Running ──release──► Released ──end──► gone
//!       └────────────(kept)───────┘
//! ```
//!
//! A booking may be released or ended from wherever it is. Beside its stage, a booking counts until a report of the
//! node includes it: reports replace bookings in their order, the oldest first.
use std::collections::BTreeMap;
use std::time::Instant;

use crate::select::backlog::Backlog;
use crate::select::pending_streams::{Awaited, PendingStreams};
use crate::select::{Candidate, Work};

/// Names a booking: the table's key of its node, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BookingId {
    pub session: u64,
    pub number: u64,
}

/// What a request still is to its node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The node computes its prompt, or will.
    Computing(Prompt),
    /// Another node computes its prompt, for so many milliseconds by the prediction: it begins here then.
    Awaiting { ms: f64 },
    /// The prompt is computed: decode generates, prefill hands over.
    Running,
    /// The node has done its work for this request, but for what its next report says. With a prompt where the hand-off
    /// was over before the first token was here, which says how long the prompt took.
    Released(Option<Prompt>),
}

/// A prompt that a node is to compute, as it was predicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prompt {
    pub wait_ms: f64,
    pub prefill_ms: f64,
    /// The same without any factor; `None`: it was a guess.
    pub model_ms: Option<f64>,
    pub routed: Instant,
}

#[derive(Debug)]
struct Booking {
    stage: Stage,
    /// Without the prompt's tokens once they are computed.
    work: Work,
    /// The breaker's one request while it is half-open; until the verdict.
    probe: bool,
}

/// The bookings of one node. No more than the router's requests there.
#[derive(Debug)]
pub(super) struct Bookings {
    live: BTreeMap<u64, Booking>,
    last: u64,
    /// Up to here the bookings are in the node's reports.
    reported: u64,
    /// Work that no report includes.
    routed: Work,
    /// Work that is not released.
    held: Work,
    /// Of it, prompts that are not computed.
    prompts: u32,
    backlog: Backlog,
    awaited: Awaited,
}

impl Stage {
    /// Of the node that computes the prompt in the plan of `candidate`, unless it has it already.
    pub fn computing(candidate: &Candidate, now: Instant) -> Self {
        if candidate.kept {
            return Self::Running;
        }
        let prefill_ms = candidate.terms.prefill_ms;
        let model_ms = candidate.measured.then_some(prefill_ms / candidate.factor);
        Self::Computing(Prompt { wait_ms: candidate.ttft_ms() - prefill_ms, prefill_ms, model_ms, routed: now })
    }

    /// Whose end is not known.
    fn prompt(self) -> Option<Prompt> {
        match self {
            Self::Computing(prompt) | Self::Released(Some(prompt)) => Some(prompt),
            Self::Awaiting { .. } | Self::Running | Self::Released(None) => None,
        }
    }
}

impl Bookings {
    pub fn new(now: Instant) -> Self {
        Self {
            live: BTreeMap::new(),
            last: 0,
            reported: 0,
            routed: Work::default(),
            held: Work::default(),
            prompts: 0,
            backlog: Backlog::new(now),
            awaited: Awaited::new(now),
        }
    }

    /// A request is routed to the node. Returns the booking's number.
    pub fn book(&mut self, work: Work, stage: Stage, probe: bool, now: Instant) -> u64 {
        self.last += 1;
        self.routed.add(&work);
        self.held.add(&work);
        match stage {
            Stage::Computing(prompt) => {
                self.prompts += 1;
                self.backlog.add(now, prompt.prefill_ms);
            }
            Stage::Awaiting { ms } => self.awaited.add(now, ms),
            Stage::Running | Stage::Released(_) => {}
        }
        self.live.insert(self.last, Booking { stage, work, probe });
        self.last
    }

    /// The request's prompt is computed, here or elsewhere: its first token is here. Returns the prompt if this node
    /// has computed it.
    pub fn computed(&mut self, number: u64, now: Instant) -> Option<Prompt> {
        let booking = self.live.get_mut(&number)?;
        let (stage, prompt) = (booking.stage, booking.stage.prompt());
        booking.stage = if let Stage::Released(_) = stage { Stage::Released(None) } else { Stage::Running };
        if let Stage::Awaiting { .. } = stage {
            self.awaited.remove();
        }
        let prompt = prompt?;
        let computed = Work { tokens: std::mem::take(&mut booking.work.tokens), ..Work::default() };
        if let Stage::Computing(_) = stage {
            self.prompts -= 1;
            self.held.sub(&computed);
        }
        if number > self.reported {
            self.routed.sub(&computed);
            self.backlog.done(now, prompt.prefill_ms);
        }
        Some(prompt)
    }

    /// The node has done its work for this request, but for what its next report says.
    pub fn release(&mut self, number: u64) {
        let Some(booking) = self.live.get_mut(&number) else { return };
        match booking.stage {
            Stage::Computing(_) => self.prompts -= 1,
            Stage::Awaiting { .. } => self.awaited.remove(),
            Stage::Running => {}
            Stage::Released(_) => return,
        }
        self.held.sub(&booking.work);
        booking.stage = Stage::Released(booking.stage.prompt());
    }

    /// The request is over here: takes back what no report has replaced yet. True if it was a probe without a verdict.
    pub fn end(&mut self, number: u64, now: Instant) -> bool {
        self.release(number);
        let Some(Booking { stage, work, probe }) = self.live.remove(&number) else { return false };
        if number > self.reported {
            self.routed.sub(&work);
            stage.prompt().iter().for_each(|prompt| self.backlog.take_back(now, prompt.prefill_ms));
        }
        probe
    }

    /// There is a verdict on the node. True if this was its probe.
    pub fn judged(&mut self, number: u64) -> bool {
        self.live.get_mut(&number).is_some_and(|booking| std::mem::take(&mut booking.probe))
    }

    /// A report: the node's own prompts take `queued_ms`, and it has `seen` so many of the bookings that are not
    /// released, all if it does not say. The youngest are not among those.
    pub fn reported(&mut self, seen: Option<u32>, queued_ms: f64, now: Instant) {
        self.backlog.reported(now, queued_ms);
        let unseen = seen.map_or(0, |seen| self.held.requests.saturating_sub(seen));
        let before = self.live.range(self.reported + 1..).rev().nth(unseen as usize);
        self.reported = before.map_or(self.reported, |(number, _)| *number);
        self.routed = Work::default();
        for booking in self.live.range(self.reported + 1..).map(|(_, booking)| booking) {
            self.routed.add(&booking.work);
            booking.stage.prompt().iter().for_each(|prompt| self.backlog.add(now, prompt.prefill_ms));
        }
    }

    /// Work that no report includes.
    pub fn routed(&self) -> Work {
        self.routed
    }

    /// Work that is not released: what this router has there, whatever is reported.
    pub fn held(&self) -> Work {
        self.held
    }

    /// Prompts of it that the node has not computed.
    pub fn prompts(&self) -> u32 {
        self.prompts
    }

    /// Until the node has computed the prompts that it has, reported or booked.
    pub fn backlog_ms(&self, now: Instant) -> f64 {
        self.backlog.wait_ms(now)
    }

    /// Requests whose prompts other nodes compute.
    pub fn pending_streams(&self, now: Instant) -> PendingStreams {
        self.awaited.seen(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A prompt that is computed here for so long, or elsewhere, or is there already.
        Book(Work, Option<u32>, bool),
        /// Of the booking at this place, if it is there.
        Computed(prop::sample::Index),
        Release(prop::sample::Index),
        End(prop::sample::Index),
        Report(Option<u32>),
    }

    fn event() -> impl Strategy<Value = Event> {
        let work = |(tokens, blocks)| Work { requests: 1, tokens, blocks, context: tokens + 7, answers: 5 };
        let work = (0u64..500, 0u32..50).prop_map(work);
        let index = any::<prop::sample::Index>;
        prop_oneof![
            4 => (work, prop::option::of(0u32..200), any::<bool>())
                .prop_map(|(work, ms, kept)| Event::Book(work, ms, kept)),
            2 => index().prop_map(Event::Computed),
            2 => index().prop_map(Event::Release),
            2 => index().prop_map(Event::End),
            1 => prop::option::of(0u32..8).prop_map(Event::Report),
        ]
    }

    fn happens(bookings: &mut Bookings, event: Event, now: Instant) {
        let all: Vec<u64> = bookings.live.keys().copied().collect();
        let at = |index: prop::sample::Index| if all.is_empty() { 0 } else { *index.get(&all) };
        match event {
            Event::Book(work, computes_ms, kept) => {
                let prompt = |ms: u32| Prompt { wait_ms: 0.0, prefill_ms: ms.into(), model_ms: None, routed: now };
                let computing = computes_ms.map(|ms| Stage::Computing(prompt(ms)));
                let other = if kept { Stage::Running } else { Stage::Awaiting { ms: 50.0 } };
                bookings.book(work, computing.unwrap_or(other), false, now);
            }
            Event::Computed(index) => _ = bookings.computed(at(index), now),
            Event::Release(index) => bookings.release(at(index)),
            Event::End(index) => _ = bookings.end(at(index), now),
            Event::Report(seen) => bookings.reported(seen, 0.0, now),
        }
    }

    /// The counters are the sums over the bookings there are.
    fn adds_up(bookings: &Bookings) {
        let sum = |counts: fn(&Bookings, u64, &Stage) -> bool| {
            let mut sum = Work::default();
            let live = bookings.live.iter().filter(|(number, booking)| counts(bookings, **number, &booking.stage));
            live.for_each(|(_, booking)| sum.add(&booking.work));
            sum
        };
        let count = |of: fn(&Stage) -> bool| bookings.live.values().filter(|booking| of(&booking.stage)).count() as u32;
        assert_eq!(bookings.held, sum(|_, _, stage| !matches!(stage, Stage::Released(_))));
        assert_eq!(bookings.routed, sum(|bookings, number, _| number > bookings.reported));
        assert_eq!(bookings.prompts, count(|stage| matches!(stage, Stage::Computing(_))));
        assert_eq!(
            bookings.pending_streams(Instant::now()).requests,
            count(|stage| matches!(stage, Stage::Awaiting { .. }))
        );
        let unreported = bookings.live.range(bookings.reported + 1..).filter_map(|(_, booking)| booking.stage.prompt());
        let prompts_ms: f64 = unreported.map(|prompt| prompt.prefill_ms).sum();
        assert_eq!(bookings.backlog.pending(), Duration::from_secs_f64(prompts_ms / 1e3));
    }

    proptest! {
        #[test]
        fn counters_are_sums_over_what_lives_and_nothing_is_left_of_what_ended(
            events in prop::collection::vec((0u64..60, event()), 1..120),
        ) {
            let mut now = Instant::now();
            let mut bookings = Bookings::new(now);
            for (pause_ms, event) in events {
                now += Duration::from_millis(pause_ms);
                happens(&mut bookings, event, now);
                adds_up(&bookings);
            }
            for number in 1..=bookings.last {
                bookings.end(number, now);
                adds_up(&bookings);
            }
            prop_assert_eq!((bookings.held, bookings.routed, bookings.prompts), Default::default());
            prop_assert_eq!((bookings.pending_streams(now), bookings.backlog_ms(now)), (PendingStreams::default(), 0.0));
            prop_assert!(bookings.live.is_empty());
        }
    }

    #[test]
    fn a_prompt_is_timed_once_though_its_hand_off_was_seen_before_its_token() {
        let now = Instant::now();
        let mut bookings = Bookings::new(now);
        let prompt = Prompt { wait_ms: 0.0, prefill_ms: 80.0, model_ms: None, routed: now };
        let number =
            bookings.book(Work { requests: 1, tokens: 9, ..Work::default() }, Stage::Computing(prompt), true, now);
        bookings.release(number);
        assert_eq!((bookings.held(), bookings.prompts()), (Work::default(), 0));
        assert!(bookings.computed(number, now).is_some() && bookings.computed(number, now).is_none());
        assert_eq!((bookings.routed().tokens, bookings.backlog_ms(now)), (0, 0.0));
        assert!(bookings.judged(number) && !bookings.judged(number) && !bookings.end(number, now));
    }
}
