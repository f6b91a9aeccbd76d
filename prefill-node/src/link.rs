//! How fast KV leaves this node, learnt from the receipts of earlier hand-offs. Pure.
//!
//! A receipt says that so many bytes took so long from the first frame to the receiver's word. Where the computation
//! was the slow part that is only a lower bound of what the link can do (BBR calls such samples application-limited,
//! <https://queue.acm.org/detail.cfm?id=3022184>): it may raise the estimate, never lower it.
use std::time::Duration;

/// Before the first receipt: slower than shared memory and local sockets, as fast as a network card of 10 Gbit/s.
pub const PRIOR_BYTES_PER_SECOND: f64 = 1e9;
/// Less says more of latency than of speed.
const MIN_BYTES: u64 = 1 << 20;
/// Weight of a new sample.
const WEIGHT: f64 = 0.3;

/// The estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkSpeed {
    measured: Option<f64>,
    /// The fastest sample: what the link can do at least.
    fastest: Option<f64>,
}

impl LinkSpeed {
    /// A hand-off of `bytes` took `elapsed` from its first frame to the receipt, `exposed` of it after the computation.
    pub fn observe(&mut self, bytes: u64, elapsed: Duration, exposed: Duration) {
        if bytes < MIN_BYTES || elapsed.is_zero() {
            return;
        }
        let sample = bytes as f64 / elapsed.as_secs_f64();
        self.fastest = Some(self.fastest.map_or(sample, |before| before.max(sample)));
        let of_the_link = exposed * 2 >= elapsed;
        self.measured = match self.measured {
            Some(before) if of_the_link || sample > before => Some(before + WEIGHT * (sample - before)),
            None if of_the_link || sample > PRIOR_BYTES_PER_SECOND => Some(sample),
            unchanged => unchanged,
        };
    }

    /// Bytes a second; before the first sample a guess.
    pub fn bytes_per_second(&self) -> f64 {
        self.measured.unwrap_or(PRIOR_BYTES_PER_SECOND)
    }

    /// The same for people, without the guess: as long as the computation was the slow part, the fastest sample.
    pub fn seen(&self) -> Option<f64> {
        self.measured.or(self.fastest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn after(samples: &[(u64, Duration, Duration)]) -> f64 {
        let mut speed = LinkSpeed::default();
        samples.iter().for_each(|&(bytes, elapsed, exposed)| speed.observe(bytes, elapsed, exposed));
        speed.bytes_per_second()
    }

    #[test]
    fn what_the_link_held_up_counts() {
        assert_eq!(after(&[]), PRIOR_BYTES_PER_SECOND);
        assert_eq!(after(&[(100_000_000, SECOND, SECOND)]), 1e8);
        let settled = after(&[(100_000_000, SECOND, SECOND), (200_000_000, SECOND, SECOND)]);
        assert!((settled - 1.3e8).abs() < 1.0, "{settled}");
    }

    #[test]
    fn what_the_computation_held_up_only_raises() {
        let hidden = Duration::ZERO;
        assert_eq!(after(&[(100_000_000, SECOND, hidden)]), PRIOR_BYTES_PER_SECOND);
        assert_eq!(after(&[(3_000_000_000, SECOND, hidden)]), 3e9);
        assert_eq!(after(&[(100_000_000, SECOND, SECOND), (50_000_000, SECOND, hidden)]), 1e8);
        assert!(after(&[(100_000_000, SECOND, SECOND), (200_000_000, SECOND, hidden)]) > 1e8);
    }

    #[test]
    fn little_says_nothing() {
        let mut speed = LinkSpeed::default();
        for (bytes, elapsed) in [(1000, SECOND), (1 << 30, Duration::ZERO)] {
            speed.observe(bytes, elapsed, elapsed);
        }
        assert_eq!((speed.bytes_per_second(), speed.seen()), (PRIOR_BYTES_PER_SECOND, None), "a guess stays one");
        speed.observe(200_000_000, SECOND, Duration::ZERO);
        speed.observe(150_000_000, SECOND, Duration::ZERO);
        assert_eq!((speed.bytes_per_second(), speed.seen()), (PRIOR_BYTES_PER_SECOND, Some(2e8)), "at least");
        speed.observe(100_000_000, SECOND, SECOND);
        assert_eq!(speed.seen(), Some(1e8));
    }
}
