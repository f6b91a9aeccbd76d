//! Rate limits of one API key: requests and tokens a minute, as token buckets. Pure. A full bucket holds one minute's
//! worth, so that who was quiet may burst; a request that is larger than a bucket passes when the bucket is full and
//! leaves a debt.
use std::time::{Duration, Instant};

/// What a key may do in a minute; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Answers that are asked for.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers.
    pub tokens_per_minute: Option<u32>,
}

/// Both buckets.
#[derive(Clone, Debug)]
pub struct Limiter {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// Which limit refused a request, and when it passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// "requests" or "tokens".
    pub what: &'static str,
    /// The limit.
    pub per_minute: u32,
    /// Then the same request passes, if no other came before it.
    pub retry_after: Duration,
}

/// What is left of one rate now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// "requests" or "tokens".
    pub what: &'static str,
    /// The limit.
    pub per_minute: u32,
    /// May be asked for at once; a bucket in debt has none.
    pub remaining: u32,
    /// Then all of it is left again, if nothing is asked for meanwhile.
    pub full_in: Duration,
}

#[derive(Clone, Debug)]
struct Bucket {
    per_minute: u32,
    level: f64,
    at: Instant,
}

impl Limiter {
    /// Full buckets.
    pub fn new(rates: Rates, now: Instant) -> Self {
        let bucket = |per_minute: u32| Bucket { per_minute, level: f64::from(per_minute), at: now };
        Self { requests: rates.requests_per_minute.map(bucket), tokens: rates.tokens_per_minute.map(bucket) }
    }

    /// Takes so many requests and tokens out, or nothing.
    ///
    /// # Errors
    /// [`Exceeded`], the limit that is longest in the way.
    pub fn take(&mut self, requests: u32, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        let (requests, tokens) = (f64::from(requests), tokens as f64);
        let asked = [("requests", &mut self.requests, requests), ("tokens", &mut self.tokens, tokens)];
        let mut exceeded: Option<Exceeded> = None;
        let mut taken = Vec::with_capacity(2);
        for (what, bucket, amount) in asked {
            let Some(bucket) = bucket else { continue };
            bucket.fill(now);
            let retry_after = bucket.time_to(amount);
            if retry_after > exceeded.map_or(Duration::ZERO, |exceeded| exceeded.retry_after) {
                exceeded = Some(Exceeded { what, per_minute: bucket.per_minute, retry_after });
            }
            taken.push((bucket, amount));
        }
        if let Some(exceeded) = exceeded {
            return Err(exceeded);
        }
        taken.into_iter().for_each(|(bucket, amount)| bucket.level -= amount);
        Ok(())
    }

    /// What is left of each rate that has a limit.
    pub fn allowances(&mut self, now: Instant) -> Vec<Allowance> {
        let buckets = [("requests", &mut self.requests), ("tokens", &mut self.tokens)];
        let allowance = |(what, bucket): (&'static str, &mut Option<Bucket>)| {
            let bucket = bucket.as_mut()?;
            bucket.fill(now);
            let (per_minute, full_in) = (bucket.per_minute, bucket.time_to(bucket.full()));
            Some(Allowance { what, per_minute, remaining: bucket.level.max(0.0) as u32, full_in })
        };
        buckets.into_iter().filter_map(allowance).collect()
    }

    /// Takes tokens that were used beyond what was taken before: a debt, where there are not so many.
    pub fn owe(&mut self, tokens: u64, now: Instant) {
        if let Some(bucket) = &mut self.tokens {
            bucket.fill(now);
            bucket.level -= tokens as f64;
        }
    }

    /// Gives back what was not used.
    pub fn give_back(&mut self, requests: u32, tokens: u64, now: Instant) {
        for (bucket, amount) in [(&mut self.requests, f64::from(requests)), (&mut self.tokens, tokens as f64)] {
            if let Some(bucket) = bucket {
                bucket.fill(now);
                bucket.level = (bucket.level + amount).min(bucket.full());
            }
        }
    }
}

impl Bucket {
    fn full(&self) -> f64 {
        f64::from(self.per_minute)
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + passed * self.full() / 60.0).min(self.full());
        self.at = self.at.max(now);
    }

    /// Until `amount` can be taken; zero when it can now.
    fn time_to(&self, amount: f64) -> Duration {
        let missing = amount.min(self.full()) - self.level;
        // A rounding error is not a reason.
        if missing <= 1e-6 { Duration::ZERO } else { Duration::from_secs_f64(missing * 60.0 / self.full()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limiter(requests: Option<u32>, tokens: Option<u32>, now: Instant) -> Limiter {
        Limiter::new(Rates { requests_per_minute: requests, tokens_per_minute: tokens }, now)
    }

    #[test]
    fn a_refused_request_passes_after_exactly_the_time_it_was_told() {
        let now = Instant::now();
        let mut limiter = limiter(Some(60), Some(6000), now);
        assert_eq!(limiter.take(1, 6000, now), Ok(()));
        let exceeded = limiter.take(1, 100, now).unwrap_err();
        assert_eq!((exceeded.what, exceeded.per_minute), ("tokens", 6000));
        assert_eq!(exceeded.retry_after, Duration::from_secs(1));
        let almost = now + exceeded.retry_after - Duration::from_millis(1);
        assert!(limiter.take(1, 100, almost).is_err());
        assert_eq!(limiter.take(1, 100, now + exceeded.retry_after), Ok(()));
    }

    #[test]
    fn refusals_cost_nothing_and_what_is_given_back_can_be_used() {
        let now = Instant::now();
        let mut limiter = limiter(Some(2), Some(100), now);
        assert_eq!(limiter.take(1, 100, now), Ok(()));
        for _ in 0..10 {
            assert_eq!(limiter.take(1, 10, now).unwrap_err().what, "tokens");
        }
        limiter.give_back(0, 90, now);
        assert_eq!(limiter.take(1, 90, now), Ok(()));
        assert_eq!(limiter.take(1, 0, now).unwrap_err().what, "requests");
        limiter.give_back(1, 0, now);
        assert_eq!(limiter.take(1, 0, now), Ok(()));
    }

    #[test]
    fn what_is_larger_than_the_bucket_waits_for_a_full_one() {
        let now = Instant::now();
        let mut limiter = limiter(None, Some(60), now);
        assert_eq!(limiter.take(1, 120, now), Ok(()));
        assert_eq!(limiter.take(1, 120, now).unwrap_err().retry_after, Duration::from_secs(120));
        assert_eq!(self::limiter(None, None, now).take(1, u64::MAX, now), Ok(()));
    }

    #[test]
    fn what_is_left_is_told_with_when_it_is_full_again() {
        let now = Instant::now();
        let mut limiter = limiter(Some(60), Some(600), now);
        assert_eq!(limiter.take(2, 900, now), Ok(()), "more than a bucket");
        let [requests, tokens] = limiter.allowances(now)[..] else { panic!("two rates") };
        let full_in = Duration::from_secs;
        assert_eq!(requests, Allowance { what: "requests", per_minute: 60, remaining: 58, full_in: full_in(2) });
        assert_eq!(tokens, Allowance { what: "tokens", per_minute: 600, remaining: 0, full_in: full_in(90) });
        let later = limiter.allowances(now + Duration::from_secs(60));
        assert_eq!((later[0].remaining, later[1].remaining), (60, 300));
        assert!(self::limiter(None, None, now).allowances(now).is_empty());
    }

    #[test]
    fn several_requests_are_taken_together_or_not_at_all() {
        let now = Instant::now();
        let mut limiter = limiter(Some(4), None, now);
        assert_eq!(limiter.take(3, 0, now), Ok(()));
        let exceeded = limiter.take(3, 0, now).unwrap_err();
        assert_eq!((exceeded.what, exceeded.retry_after), ("requests", Duration::from_secs(30)));
        assert_eq!(limiter.take(1, 0, now), Ok(()), "the refusal took nothing");
    }

    proptest! {
        /// Over any time t no more than (1 + t) minutes' worth and one request passes.
        #[test]
        fn never_more_than_the_limit(per_minute in 1u32..10_000, asks in prop::collection::vec((0u64..3000, 0u64..2000), 1..200)) {
            let start = Instant::now();
            let (mut limiter, mut passed, mut at_ms) = (limiter(None, Some(per_minute), start), 0u64, 0u64);
            for (pause_ms, tokens) in asks {
                at_ms += pause_ms;
                if limiter.take(1, tokens, start + Duration::from_millis(at_ms)).is_ok() {
                    passed += tokens;
                }
                let allowed = f64::from(per_minute) * (1.0 + at_ms as f64 / 60_000.0) + 2000.0;
                prop_assert!(passed as f64 <= allowed + 1e-3, "{passed} {allowed}");
            }
        }
    }
}
