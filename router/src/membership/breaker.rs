//! Leaves a node alone that keeps failing: one circuit breaker for each incarnation. Pure: outcomes and the time go in,
//! the state comes out. What counts as a failure of a node is decided in [`crate::flow::replan`]; what the state means
//! for the choice of a pair in [`crate::select`].
//!
//! Closed → (failures in a row) → open for a time → half-open: one request at a time is a probe → closed by a success,
//! open for twice the time by the probe's failure. A success closes it whoever brought it: it is what the probe is for.
use std::time::{Duration, Instant};

/// An open breaker lets a probe through after this time at the latest.
pub const LONGEST_OPEN: Duration = Duration::from_secs(30);

/// When breakers open, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Failures in a row that open it; at least 1.
    pub failures: u32,
    /// For how long the first time; doubles with each failed probe, up to [`LONGEST_OPEN`].
    pub open: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { failures: 3, open: Duration::from_secs(2) }
    }
}

/// The state as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Circuit {
    /// Requests pass.
    Closed,
    /// One request at a time passes.
    HalfOpen,
    /// None passes while another node can take it.
    Open,
}

impl Circuit {
    /// For `/debug/cluster`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half_open",
            Self::Open => "open",
        }
    }
}

/// The breaker of one incarnation.
#[derive(Clone, Debug)]
pub struct Breaker {
    settings: Settings,
    state: State,
    /// How long it was open last; zero when it never was since its last success.
    open_for: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// A probe is out; without its verdict the breaker is open `until` then, which has passed.
    Probing {
        until: Instant,
    },
}

impl Breaker {
    /// A closed one.
    pub fn new(settings: Settings) -> Self {
        Self { settings, state: State::Closed { failures: 0 }, open_for: Duration::ZERO }
    }

    /// The state at `now`.
    pub fn circuit(&self, now: Instant) -> Circuit {
        match self.state {
            State::Closed { .. } => Circuit::Closed,
            State::Open { until } if now < until => Circuit::Open,
            State::Open { .. } | State::Probing { .. } => Circuit::HalfOpen,
        }
    }

    /// Whether a request may be sent: it is closed, or half-open without a probe.
    pub fn admits(&self, now: Instant) -> bool {
        self.state.admits(now)
    }

    /// A request is sent to the node; true if it is the probe, whose holder owes a verdict or [`Self::unproven`].
    pub fn begin(&mut self, now: Instant) -> bool {
        match self.state {
            State::Open { until } if now >= until => {
                self.state = State::Probing { until };
                true
            }
            _ => false,
        }
    }

    /// The node did its part for a request.
    pub fn succeeded(&mut self) {
        *self = Self::new(self.settings);
    }

    /// The node failed a request, the probe or another one; true if that opened the breaker. Requests that were sent
    /// before it opened and fail afterwards change nothing.
    pub fn failed(&mut self, probe: bool, now: Instant) -> bool {
        match self.state {
            State::Closed { failures } if failures + 1 < self.settings.failures => {
                self.state = State::Closed { failures: failures + 1 };
                false
            }
            State::Closed { .. } => self.open(now),
            State::Probing { .. } if probe => self.open(now),
            State::Open { .. } | State::Probing { .. } => false,
        }
    }

    /// The probe ended without a verdict: the next request is one.
    pub fn unproven(&mut self) {
        if let State::Probing { until } = self.state {
            self.state = State::Open { until };
        }
    }

    fn open(&mut self, now: Instant) -> bool {
        self.open_for = (self.open_for * 2).clamp(self.settings.open, LONGEST_OPEN.max(self.settings.open));
        self.state = State::Open { until: now + self.open_for };
        true
    }
}

impl State {
    fn admits(self, now: Instant) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Open { until } => now >= until,
            Self::Probing { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(Settings::default());
        assert!(!breaker.failed(false, now) && !breaker.failed(false, now));
        assert!(breaker.failed(false, now));
        breaker
    }

    #[test]
    fn opens_after_failures_in_a_row_only() {
        let now = Instant::now();
        let mut breaker = Breaker::new(Settings::default());
        for _ in 0..2 {
            assert!(!breaker.failed(false, now) && !breaker.failed(false, now));
            breaker.succeeded();
        }
        assert_eq!(breaker.circuit(now), Circuit::Closed);
        let breaker = opened(now);
        assert_eq!((breaker.circuit(now), breaker.admits(now)), (Circuit::Open, false));
    }

    #[test]
    fn one_probe_at_a_time_and_twice_the_time_after_each_failure() {
        let start = Instant::now();
        let (mut breaker, mut now) = (opened(start), start);
        for open_ms in [2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            assert!(!breaker.admits(now + ms(open_ms - 1)));
            now += ms(open_ms);
            assert!(breaker.admits(now) && breaker.begin(now));
            assert_eq!((breaker.circuit(now), breaker.admits(now)), (Circuit::HalfOpen, false));
            assert!(!breaker.begin(now), "one is out");
            assert!(!breaker.failed(false, now), "a late failure of an earlier request");
            assert!(breaker.failed(true, now));
        }
        now += ms(30_000);
        assert!(breaker.begin(now));
        breaker.succeeded();
        assert!(breaker.admits(now) && !breaker.failed(false, now));
    }

    #[test]
    fn a_probe_without_a_verdict_leaves_room_for_another() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let now = start + ms(2_000);
        assert!(breaker.begin(now));
        breaker.unproven();
        assert!(breaker.begin(now));
    }

    proptest! {
        /// Whatever happens, the breaker is never shut for longer than it may, and never has two probes.
        #[test]
        fn lets_a_probe_through_in_the_end(
            events in prop::collection::vec((0u8..4, 0u64..5_000), 0..200), failures in 1u32..5, open_ms in 1u64..4_000,
        ) {
            let mut breaker = Breaker::new(Settings { failures, open: ms(open_ms) });
            let (mut now, mut probe) = (Instant::now(), false);
            for (event, wait) in events {
                now += ms(wait);
                match event {
                    0 => {
                        let admitted = breaker.admits(now);
                        let begun = breaker.begin(now);
                        prop_assert!(!begun || (admitted && !probe));
                        probe |= begun;
                    }
                    1 => { breaker.succeeded(); probe = false; }
                    2 => { breaker.failed(probe, now); probe = false; }
                    _ => { breaker.unproven(); probe = false; }
                }
                prop_assert!(probe || breaker.admits(now + LONGEST_OPEN));
            }
        }
    }
}
