//! Streams of a decode node whose prompts are still being computed elsewhere. They begin there later, so that a prompt
//! that the node computes itself meanwhile delays them for less of its time. Pure; [`super::cost`] asks.
use std::time::{Duration, Instant};

use super::backlog::duration;

/// The streams, as they are booked and begin.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    requests: u32,
    /// When the last of them was predicted to begin.
    until: Instant,
}

impl Awaited {
    /// None.
    pub fn new(now: Instant) -> Self {
        Self { requests: 0, until: now }
    }

    /// One that is predicted to begin after `ms`.
    pub fn add(&mut self, now: Instant, ms: f64) {
        if self.requests == 0 {
            // What was predicted of others says nothing of this one.
            self.until = now;
        }
        self.requests = self.requests.saturating_add(1);
        self.until = self.until.max(now + duration(ms));
    }

    /// One begins, or is given up.
    pub fn remove(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    /// As the choice sees them.
    pub fn seen(&self, now: Instant) -> PendingStreams {
        let within = if self.requests == 0 { Duration::ZERO } else { self.until.saturating_duration_since(now) };
        PendingStreams { requests: self.requests, within_ms: within.as_secs_f64() * 1e3 }
    }
}

/// How many are to begin, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PendingStreams {
    /// Of those that this router sent.
    pub requests: u32,
    /// Until the last of them begins, milliseconds.
    pub within_ms: f64,
}

impl PendingStreams {
    /// The share of a prompt that `requests` wait for in the mean, these among them: all of it, or what is left of it
    /// when they begin, evenly spread over the time. It is begun after `wait_ms` and takes `prefill_ms`.
    pub fn delayed(&self, requests: f64, wait_ms: f64, prefill_ms: f64) -> f64 {
        if self.requests == 0 || self.within_ms <= 0.0 || prefill_ms <= 0.0 {
            return 1.0;
        }
        let before_ms = wait_ms.min(self.within_ms);
        let during_ms = (self.within_ms - before_ms).min(prefill_ms);
        let of_pending = (before_ms + during_ms - during_ms * during_ms / (2.0 * prefill_ms)) / self.within_ms;
        let pending = f64::from(self.requests);
        1.0 - pending / requests.max(pending) * (1.0 - of_pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_begins_later_waits_for_less_of_a_prompt() {
        for (within_ms, share) in [(0.0, 1.0), (50.0, 0.75), (100.0, 0.5), (200.0, 0.25), (1000.0, 0.05)] {
            let pending = PendingStreams { requests: 2, within_ms };
            let same = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{within_ms}: {a} instead of {b}");
            same(pending.delayed(2.0, 0.0, 100.0), share);
            same(pending.delayed(4.0, 0.0, 100.0), (1.0 + share) / 2.0);
            // Those that begin before it wait for all of it.
            same(pending.delayed(2.0, within_ms, 100.0), 1.0);
            // More than are known of.
            same(pending.delayed(0.0, 0.0, 100.0), share);
            same(pending.delayed(2.0, 0.0, 0.0), 1.0);
        }
        // One of two begins in the first half second, which it waits for all of it; the other in the second one.
        assert!((PendingStreams { requests: 2, within_ms: 1000.0 }.delayed(2.0, 500.0, 500.0) - 0.75).abs() < 1e-9);
        assert_eq!(PendingStreams::default().delayed(3.0, 0.0, 100.0), 1.0);
    }

    #[test]
    fn the_last_one_says_for_how_long_they_come() {
        let start = Instant::now();
        let mut awaited = Awaited::new(start);
        assert_eq!(awaited.seen(start), PendingStreams::default());
        awaited.add(start, 300.0);
        awaited.add(start, 100.0);
        assert_eq!(awaited.seen(start), PendingStreams { requests: 2, within_ms: 300.0 });
        awaited.remove();
        let later = start + Duration::from_millis(200);
        assert_eq!(awaited.seen(later), PendingStreams { requests: 1, within_ms: 100.0 });
        assert_eq!(awaited.seen(start + Duration::from_secs(1)), PendingStreams { requests: 1, within_ms: 0.0 });
        awaited.remove();
        awaited.remove();
        assert_eq!(awaited.seen(start), PendingStreams::default());
        awaited.add(start, f64::INFINITY);
        assert!(awaited.seen(start).within_ms.is_finite());
        awaited.remove();
        awaited.add(start, 50.0);
        assert_eq!(
            awaited.seen(start),
            PendingStreams { requests: 1, within_ms: 50.0 },
            "nothing is left of those that are gone"
        );
    }
}
