//! So many errors a millisecond. A thousand connections that ask at once for what is refused would keep a core for 70
//! ms, and hold up the tokens of all others. Those that caused errors before are served one after the other instead.
//!
//! A connection that caused errors pays for them when more is received over it: that advances the throttle's clock by
//! what they take, and the connection is read when that time has come (the generic cell rate algorithm). So there is no
//! queue to bound. No connection waits longer than a second, whatever the others caused: a longer wait wraps around,
//! and more are read each millisecond.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// For each thread of the reactor. A refusal takes it 0.07 to 0.1 ms, so all of them take a fifth of it.
const ERRORS_PER_MS: u32 = 2;
/// Errors in a row that cost no wait, as time: those of a proxy's connections after a node failed, say.
const BURST: Duration = Duration::from_millis(20);
/// The longest wait. At two errors a millisecond it has room for 2,000 connections that owe one each.
const LONGEST: Duration = Duration::from_secs(1);

/// Of one port.
pub(crate) struct Throttle {
    per_error: Duration,
    /// When all errors that were paid for have had their time, at most a burst and a second from now.
    paid: Mutex<Instant>,
    waits: AtomicU64,
}

impl Throttle {
    /// For a port that so many threads serve.
    pub fn new(threads: usize) -> Self {
        let threads = u32::try_from(threads).unwrap_or(u32::MAX).max(1);
        let per_error = Duration::from_millis(1) / ERRORS_PER_MS.saturating_mul(threads);
        Self { per_error, paid: Mutex::new(Instant::now()), waits: AtomicU64::new(0) }
    }

    /// Until when a connection waits that pays for so many errors now; `None`: it does not.
    pub fn until(&self, now: Instant, errors: u32) -> Option<Instant> {
        let wait = {
            let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
            let ahead = paid.saturating_duration_since(now) + self.per_error.saturating_mul(errors);
            let wait = within(ahead.saturating_sub(BURST), LONGEST);
            *paid = now + ahead.min(BURST + wait);
            wait
        };
        if wait.is_zero() {
            return None;
        }
        self.waits.fetch_add(1, Ordering::Relaxed);
        Some(now + wait)
    }

    /// How often a connection had to wait so far.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

/// A wait of at most `longest`: a longer one wraps around.
fn within(wait: Duration, longest: Duration) -> Duration {
    match wait <= longest {
        true => wait,
        false => Duration::from_nanos((wait.as_nanos() % longest.as_nanos()) as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_errors_cost_nothing_and_many_wait_in_order() {
        for (threads, burst, first_us, second_us) in [(0, 40, 500, 2000), (1, 40, 500, 2000), (4, 160, 125, 500)] {
            let (throttle, now) = (Throttle::new(threads), Instant::now());
            assert_eq!(throttle.until(now, burst), None, "a burst");
            let waits = [1, 3].map(|errors| (throttle.until(now, errors).expect("it waits") - now).as_micros());
            assert_eq!(waits, [first_us, second_us]);
            assert_eq!(throttle.waits(), 2);
        }
    }

    #[test]
    fn what_was_waited_for_is_forgotten() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        let until = throttle.until(start, 500).expect("it waits");
        assert!(throttle.until(until, 1).is_some(), "the burst is used up");
        assert_eq!(throttle.until(until + BURST * 2, 1), None);
    }

    #[test]
    fn nobody_waits_longer_than_a_second_for_what_others_did() {
        let (throttle, now) = (Throttle::new(1), Instant::now());
        let waits: Vec<_> =
            (0..4040).map(|_| throttle.until(now, 1).map_or(Duration::ZERO, |until| until - now)).collect();
        assert_eq!(waits.iter().max(), Some(&LONGEST));
        // Those beyond it are spread as well.
        let in_first_half = waits.iter().filter(|wait| **wait < LONGEST / 2).count();
        assert_eq!(in_first_half, 40 + 2 * 999);
        for errors in [60_000, u32::MAX] {
            assert!(throttle.until(now, errors).is_none_or(|until| until - now <= LONGEST), "{errors}");
        }
        assert!(throttle.until(now, 1).is_none_or(|until| until - now <= LONGEST));
    }
}
