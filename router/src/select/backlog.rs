//! When a node will have computed the prompts that it has: a queue with one server, in predicted time. Pure. A report says
//! anew how much is queued; a request that is routed adds its own prompt; a first token says how far the prediction was
//! off by then. Between these, time itself works the queue off.
use std::time::{Duration, Instant};

/// Longer queues are not told apart.
const LONGEST: Duration = Duration::from_secs(3600);

/// See the head of this file.
#[derive(Clone, Copy, Debug)]
pub struct Backlog {
    /// When it is empty; in the past when it is.
    until: Instant,
}

impl Backlog {
    /// An empty one.
    pub fn new(now: Instant) -> Self {
        Self { until: now }
    }

    /// Milliseconds until a prompt that comes now begins.
    pub fn wait_ms(&self, now: Instant) -> f64 {
        self.until.saturating_duration_since(now).as_secs_f64() * 1e3
    }

    /// The node reports work of `ms`.
    pub fn reported(&mut self, now: Instant, ms: f64) {
        self.until = now + duration(ms);
    }

    /// A prompt of `ms` is routed to the node; returns when it should be done.
    pub fn add(&mut self, now: Instant, ms: f64) -> Instant {
        self.until = (self.until.max(now) + duration(ms)).min(now + LONGEST);
        self.until
    }

    /// A prompt of `ms` that was added will not be computed.
    pub fn take_back(&mut self, now: Instant, ms: f64) {
        self.until = self.until.checked_sub(duration(ms)).map_or(now, |until| until.max(now));
    }

    /// A prompt that should be done at `expected` is done `now`: what stands behind it moves with it.
    pub fn done(&mut self, now: Instant, expected: Instant) {
        self.until = if now >= expected {
            (self.until + (now - expected)).min(now + LONGEST)
        } else {
            self.until.checked_sub(expected - now).map_or(now, |until| until.max(now))
        };
    }
}

fn duration(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms.max(0.0) / 1e3).unwrap_or(LONGEST).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn time_works_it_off() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        assert_eq!(backlog.add(start, 100.0), start + ms(100));
        assert_eq!(backlog.add(start + ms(40), 50.0), start + ms(150));
        assert!((backlog.wait_ms(start + ms(40)) - 110.0).abs() < 1e-6);
        assert_eq!(backlog.wait_ms(start + ms(1_000)), 0.0);
        assert_eq!(backlog.add(start + ms(1_000), 10.0), start + ms(1_010));
    }

    #[test]
    fn a_report_replaces_what_was_thought() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        backlog.add(start, 500.0);
        backlog.reported(start + ms(100), 20.0);
        assert!((backlog.wait_ms(start + ms(100)) - 20.0).abs() < 1e-6);
    }

    #[test]
    fn a_first_token_moves_what_stands_behind_it() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        let first = backlog.add(start, 100.0);
        backlog.add(start, 100.0);
        backlog.done(start + ms(150), first);
        assert!((backlog.wait_ms(start + ms(150)) - 100.0).abs() < 1e-6, "late");
        let mut backlog = Backlog::new(start);
        let first = backlog.add(start, 100.0);
        backlog.add(start, 100.0);
        backlog.done(start + ms(30), first);
        assert!((backlog.wait_ms(start + ms(30)) - 100.0).abs() < 1e-6, "early");
    }

    #[test]
    fn what_is_taken_back_is_gone_and_nothing_overflows() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        backlog.add(start, 100.0);
        backlog.take_back(start + ms(10), 100.0);
        assert_eq!(backlog.wait_ms(start + ms(10)), 0.0);
        for _ in 0..3 {
            backlog.add(start, f64::INFINITY);
        }
        backlog.add(start, f64::NAN);
        assert!((backlog.wait_ms(start) - 3_600_000.0).abs() < 1.0);
        backlog.take_back(start, f64::INFINITY);
        assert_eq!(backlog.wait_ms(start), 0.0);
    }
}
