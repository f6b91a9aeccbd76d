//! When a node will have computed the prompts that it has: a queue with one server, in predicted time. Pure. A report
//! says anew how much is queued; a request that is routed adds its own prompt; a first token says what is still to be
//! done: the prompts behind it. Between these, time itself works the queue off.
use std::time::{Duration, Instant};

/// Longer queues are not told apart.
const LONGEST: Duration = Duration::from_secs(3600);

/// See the head of this file.
#[derive(Clone, Copy, Debug)]
pub struct Backlog {
    /// When it is empty; in the past when it is.
    until: Instant,
    /// Prompts that were added since the last report and are not done, in all.
    pending: Duration,
}

impl Backlog {
    /// An empty one.
    pub fn new(now: Instant) -> Self {
        Self { until: now, pending: Duration::ZERO }
    }

    /// Milliseconds until a prompt that comes now begins.
    pub fn wait_ms(&self, now: Instant) -> f64 {
        self.until.saturating_duration_since(now).as_secs_f64() * 1e3
    }

    /// Prompts that were added since the last report and are not done.
    #[cfg(test)]
    pub fn pending(&self) -> Duration {
        self.pending
    }

    /// The node reports work of `ms`: all that was added before is in it, or done.
    pub fn reported(&mut self, now: Instant, ms: f64) {
        *self = Self { until: now + duration(ms), pending: Duration::ZERO };
    }

    /// A prompt of `ms` is routed to the node.
    pub fn add(&mut self, now: Instant, ms: f64) {
        self.until = (self.until.max(now) + duration(ms)).min(now + LONGEST);
        self.pending += duration(ms);
    }

    /// A prompt of `ms` that was added since the last report will not be computed.
    pub fn take_back(&mut self, now: Instant, ms: f64) {
        self.until = self.until.checked_sub(duration(ms)).map_or(now, |until| until.max(now));
        self.pending = self.pending.saturating_sub(duration(ms));
    }

    /// A prompt of `ms` that was added since the last report is done, early or late: the others are left. The report's
    /// own work was before it.
    pub fn done(&mut self, now: Instant, ms: f64) {
        self.pending = self.pending.saturating_sub(duration(ms));
        self.until = now + self.pending.min(LONGEST);
    }
}

/// So many milliseconds, none of what is no number, and [`LONGEST`] at most.
pub fn duration(ms: f64) -> Duration {
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
        backlog.add(start, 100.0);
        backlog.add(start + ms(40), 50.0);
        assert!((backlog.wait_ms(start + ms(40)) - 110.0).abs() < 1e-6);
        assert_eq!(backlog.wait_ms(start + ms(1_000)), 0.0);
        backlog.add(start + ms(1_000), 10.0);
        assert!((backlog.wait_ms(start + ms(1_000)) - 10.0).abs() < 1e-6);
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
    fn a_first_token_leaves_what_stands_behind_it() {
        let start = Instant::now();
        for at in [30, 100, 150] {
            let mut backlog = Backlog::new(start);
            backlog.add(start, 100.0);
            backlog.add(start, 70.0);
            backlog.done(start + ms(at), 100.0);
            assert!((backlog.wait_ms(start + ms(at)) - 70.0).abs() < 1e-6, "after {at} ms");
        }
    }

    #[test]
    fn prompts_of_one_step_are_late_together_and_once() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        let prompts = [20.0, 30.0, 10.0, 15.0];
        prompts.iter().for_each(|prompt| backlog.add(start, *prompt));
        backlog.add(start, 5.0);
        for told in [1, 3, 0, 2] {
            backlog.done(start + ms(90), prompts[told]);
        }
        assert!((backlog.wait_ms(start + ms(90)) - 5.0).abs() < 1e-6);
    }

    #[test]
    fn what_is_taken_back_is_gone_and_nothing_overflows() {
        let start = Instant::now();
        let mut backlog = Backlog::new(start);
        backlog.add(start, 100.0);
        backlog.take_back(start + ms(10), 100.0);
        assert_eq!(backlog.wait_ms(start + ms(10)), 0.0);
        for prompt in [50.0, 30.0, 20.0] {
            backlog.add(start, prompt);
        }
        backlog.take_back(start, 30.0);
        backlog.done(start + ms(60), 50.0);
        assert!((backlog.wait_ms(start + ms(60)) - 20.0).abs() < 1e-6, "what stood behind it has moved up");
        backlog.done(start + ms(60), 20.0);
        assert_eq!(backlog.wait_ms(start + ms(60)), 0.0);
        for _ in 0..3 {
            backlog.add(start, f64::INFINITY);
        }
        backlog.add(start, f64::NAN);
        assert!((backlog.wait_ms(start) - 3_600_000.0).abs() < 1.0);
        backlog.take_back(start, f64::INFINITY);
        assert_eq!(backlog.wait_ms(start), 0.0);
    }
}
