//! The phases of a request on one line of time, without gap and without overlap. Pure. A phase ends where the next one
//! begins, except that its span starts one microsecond later: Jaeger's critical path wants siblings apart.
//!
//! The legs overlap in reality: prefill computes while decode reserves. On this line the phases are what the *client*
//! waits for, one after the other:
//!
//! - `queue`: the request is accepted → admitted;
//! - `route`: → the pair is chosen. The reservation (`kv.reserve`, decode's) is a child of the whole request: prefill
//!   does not wait for it;
//! - `prefill`: → the first token is in the client's stream. TTFT ends here, so queue + route + prefill = TTFT;
//! - `transfer`: → decode has verified the KV: the part of the transfer that no compute hid. A local plan has none;
//! - `decode`: → the end of the answer.
use std::time::{Duration, Instant};

/// What the client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Admission.
    Queue,
    /// Choice of the nodes.
    Route,
    /// The first token.
    Prefill,
    /// The exposed part of the KV transfer.
    Transfer,
    /// The other tokens.
    Decode,
}

const PHASES: [Phase; 5] = [Phase::Queue, Phase::Route, Phase::Prefill, Phase::Transfer, Phase::Decode];
/// Between the spans of two phases.
const GAP: Duration = Duration::from_micros(1);

impl Phase {
    /// The span's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Route => "route",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
        }
    }
}

/// Where the phases of one request ended.
#[derive(Clone, Debug)]
pub struct Timeline {
    received: Instant,
    /// In order; those that were skipped left out.
    ends: Vec<(Phase, Instant)>,
    /// Phases that ended or were skipped.
    over: usize,
}

impl Timeline {
    /// The request came.
    pub fn new(received: Instant) -> Self {
        Self { received, ends: Vec::with_capacity(PHASES.len()), over: 0 }
    }

    /// The current phase ends now, at the earliest a microsecond after the one before it. Decode is the last phase:
    /// marks beyond it are ignored.
    pub fn end_phase(&mut self, at: Instant) {
        if self.over < PHASES.len() {
            self.ends.push((self.phase(), at.max(self.last() + GAP)));
            self.over += 1;
        }
    }

    /// The current phase does not take place: the next one begins where the one before it ended. Decode, the last one,
    /// cannot be skipped.
    pub fn skip_phase(&mut self) {
        self.over += usize::from(self.over + 1 < PHASES.len());
    }

    /// The phase that has not ended.
    pub fn phase(&self) -> Phase {
        PHASES[self.over.min(PHASES.len() - 1)]
    }

    /// When the request came.
    pub fn received(&self) -> Instant {
        self.received
    }

    /// The last mark.
    pub fn last(&self) -> Instant {
        self.ends.last().map_or(self.received, |(_, end)| *end)
    }

    /// When `phase` ended; `None` while it runs, and for one that was skipped.
    pub fn end_of(&self, phase: Phase) -> Option<Instant> {
        self.ends.iter().find(|(ended, _)| *ended == phase).map(|(_, end)| *end)
    }

    /// How long the client waited for `phase`; zero if it did not end.
    pub fn length(&self, phase: Phase) -> Duration {
        let Some(index) = self.ends.iter().position(|(ended, _)| *ended == phase) else { return Duration::ZERO };
        let start = index.checked_sub(1).map_or(self.received, |before| self.ends[before].1);
        self.ends[index].1 - start
    }

    /// Start and end of every phase that ended, in order.
    pub fn spans(&self) -> impl Iterator<Item = (Phase, Instant, Instant)> {
        let starts = std::iter::once(self.received).chain(self.ends.iter().map(|(_, end)| *end + GAP));
        self.ends.iter().zip(starts).map(|((phase, end), start)| (*phase, start, *end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn phases_are_contiguous_and_add_up() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        for at in [3, 4, 30, 33, 90] {
            timeline.end_phase(start + ms(at));
        }
        let spans: Vec<_> = timeline.spans().collect();
        assert_eq!(spans.len(), 5);
        for pair in spans.windows(2) {
            assert_eq!(pair[1].1 - pair[0].2, GAP);
        }
        let ttft = timeline.end_of(Phase::Prefill).unwrap() - start;
        let parts = [Phase::Queue, Phase::Route, Phase::Prefill].map(|phase| timeline.length(phase));
        assert_eq!((ttft, parts.into_iter().sum::<Duration>()), (ms(30), ms(30)));
        assert_eq!(timeline.length(Phase::Transfer), ms(3));
    }

    #[test]
    fn marks_out_of_order_never_overlap() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        for at in [5, 5, 2, 9, 1, 100, 200] {
            timeline.end_phase(start + ms(at));
        }
        let spans: Vec<_> = timeline.spans().collect();
        assert_eq!(spans.len(), 5);
        assert!(spans.iter().all(|(_, start, end)| start <= end));
        assert!(spans.windows(2).all(|pair| pair[0].2 < pair[1].1));
    }

    #[test]
    fn an_open_phase_has_no_length() {
        let mut timeline = Timeline::new(Instant::now());
        assert_eq!((timeline.phase(), timeline.length(Phase::Queue)), (Phase::Queue, Duration::ZERO));
        timeline.end_phase(Instant::now());
        assert_eq!((timeline.phase(), timeline.end_of(Phase::Route)), (Phase::Route, None));
    }

    #[test]
    fn a_skipped_phase_leaves_no_gap() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        for at in [3, 4, 30] {
            timeline.end_phase(start + ms(at));
        }
        timeline.skip_phase();
        timeline.skip_phase();
        assert_eq!(timeline.phase(), Phase::Decode, "the last one cannot be skipped");
        timeline.end_phase(start + ms(90));
        timeline.end_phase(start + ms(91));
        let spans: Vec<_> = timeline.spans().collect();
        let phases: Vec<Phase> = spans.iter().map(|(phase, ..)| *phase).collect();
        assert_eq!(phases, [Phase::Queue, Phase::Route, Phase::Prefill, Phase::Decode]);
        assert!(spans.windows(2).all(|pair| pair[1].1 - pair[0].2 == GAP));
        assert_eq!((timeline.length(Phase::Transfer), timeline.length(Phase::Decode)), (ms(0), ms(60)));
        assert_eq!((timeline.end_of(Phase::Transfer), timeline.end_of(Phase::Decode)), (None, Some(start + ms(90))));
    }
}
