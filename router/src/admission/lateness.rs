//! By how much first tokens come later than was predicted when their requests got in. Pure. What is promised to clients
//! is refused by the prediction and this on top of it: else, at full load, most answers would begin just after the
//! moment up to which they are of use, and the nodes would work for nobody.
//!
//! An estimate of a high quantile by steps of fixed size: one up for each that was later than the estimate, a small one
//! down for each that was not. A request that a fault delayed for seconds counts as one that was late by a millisecond.
use std::time::{Duration, Instant};

/// The share that comes later than predicted and this.
const LATE: f64 = 0.03;
/// A step, in terms of the prediction.
const STEP: f64 = 0.04;
const SMALLEST_STEP_MS: f64 = 1.0;
/// It halves in this time: what was learnt at another load must not refuse everybody for ever.
const HALF_LIFE: Duration = Duration::from_secs(20);
/// No more than this share of the time that is allowed: somebody gets in, from whom it learns.
const MOST: f64 = 0.5;

/// See the head of this file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lateness {
    ms: f64,
    at: Option<Instant>,
}

impl Lateness {
    /// A first token that was predicted to come after `predicted` came after `actual`.
    pub fn observe(&mut self, predicted: Duration, actual: Duration, now: Instant) {
        self.ms = self.faded(now);
        self.at = Some(now);
        let late_ms = (actual.as_secs_f64() - predicted.as_secs_f64()) * 1e3;
        let step = (STEP * predicted.as_secs_f64() * 1e3).max(SMALLEST_STEP_MS);
        let change = if late_ms > self.ms { (1.0 - LATE) * step } else { -LATE * step };
        self.ms = (self.ms + change).max(0.0);
    }

    /// What to add to a prediction that is compared with `allowed`.
    pub fn margin(&self, allowed: Duration, now: Instant) -> Duration {
        Duration::try_from_secs_f64(self.faded(now) / 1e3).unwrap_or_default().min(allowed.mul_f64(MOST))
    }

    fn faded(&self, now: Instant) -> f64 {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.ms * 0.5_f64.powf(passed.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const ALLOWED: Duration = Duration::from_millis(500);

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    #[test]
    fn it_finds_what_few_exceed() {
        let (mut lateness, mut rng, start) = (Lateness::default(), StdRng::seed_from_u64(1), Instant::now());
        for i in 0..2000 {
            lateness.observe(ms(400.0), ms(400.0 + rng.random_range(-50.0..150.0)), start + ms(f64::from(i) * 10.0));
        }
        let margin = lateness.margin(ALLOWED, start + ms(20_000.0)).as_secs_f64() * 1e3;
        assert!((115.0..170.0).contains(&margin), "{margin}");
    }

    #[test]
    fn single_faults_move_it_little_and_time_heals() {
        let (mut lateness, now) = (Lateness::default(), Instant::now());
        (0..100).for_each(|_| lateness.observe(ms(100.0), ms(90.0), now));
        lateness.observe(ms(100.0), ms(9_000.0), now);
        assert!(lateness.margin(ALLOWED, now) < ms(5.0));
        (0..1000).for_each(|_| lateness.observe(ms(100.0), ms(9_000.0), now));
        assert_eq!(lateness.margin(ALLOWED, now), ALLOWED / 2, "somebody still gets in");
        assert!(lateness.margin(ALLOWED, now + 20 * HALF_LIFE) < ms(1.0));
    }
}
