//! How fast a queue moves: tokens of work that start in a second, measured while something waits. Pure. Times in which
//! nothing waits do not count: then the rate would be that of the arrivals.
use std::time::{Duration, Instant};

/// Work older than this weighs little.
const MEMORY: Duration = Duration::from_secs(10);
/// Fewer starts than this say nothing.
const ENOUGH_STARTS: u32 = 4;

/// An exponentially weighted mean over the time in which something waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct DrainRate {
    /// Tokens that started, and seconds in which something waited; both fade.
    tokens: f64,
    busy_s: f64,
    starts: u32,
    /// Something waits since.
    since: Option<Instant>,
}

impl DrainRate {
    /// From now on something waits, or nothing does.
    pub fn waits(&mut self, something: bool, now: Instant) {
        self.advance(now);
        self.since = something.then_some(now);
    }

    /// Work of so many tokens starts. It counts if something waited.
    pub fn started(&mut self, tokens: u64, now: Instant) {
        if self.since.is_some() {
            self.advance(now);
            self.tokens += tokens as f64;
            self.starts = self.starts.saturating_add(1);
        }
    }

    /// How long it takes until `tokens` have started; `None` while too little was seen.
    pub fn time_for(&self, tokens: u64, now: Instant) -> Option<Duration> {
        let mut self_now = *self;
        self_now.advance(now);
        let Self { tokens: seen, busy_s, starts, .. } = self_now;
        if starts < ENOUGH_STARTS || seen <= 0.0 || busy_s <= 0.0 {
            return None;
        }
        Some(Duration::try_from_secs_f64(tokens as f64 * busy_s / seen).unwrap_or(Duration::MAX))
    }

    fn advance(&mut self, now: Instant) {
        let Some(since) = self.since.replace(now) else {
            self.since = None;
            return;
        };
        let passed = now.saturating_duration_since(since).as_secs_f64();
        let (memory, kept) = (MEMORY.as_secs_f64(), (-passed / MEMORY.as_secs_f64()).exp());
        self.tokens *= kept;
        self.busy_s = self.busy_s * kept + memory * (1.0 - kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_steady_queue_is_predicted_and_idle_time_does_not_count() {
        let start = Instant::now();
        let mut rate = DrainRate::default();
        assert_eq!(rate.time_for(10, start), None);
        rate.waits(true, start);
        for step in 1..=1000 {
            rate.started(50, start + ms(20 * step));
        }
        let now = start + ms(20_000);
        let predicted = rate.time_for(2500, now).unwrap();
        assert!(predicted > ms(950) && predicted < ms(1050), "{predicted:?}");
        rate.waits(false, now);
        rate.started(1_000_000, now + ms(5));
        let later = rate.time_for(2500, now + Duration::from_secs(3600)).unwrap();
        assert_eq!(later, predicted);
    }

    #[test]
    fn a_queue_that_stands_still_becomes_slow() {
        let start = Instant::now();
        let mut rate = DrainRate::default();
        rate.waits(true, start);
        (1..=100).for_each(|step| rate.started(10, start + ms(10 * step)));
        let before = rate.time_for(100, start + ms(1000)).unwrap();
        let after = rate.time_for(100, start + ms(6000)).unwrap();
        assert!(after > before * 4, "{before:?} {after:?}");
    }
}
