//! So many errors a millisecond. A thousand connections that ask at once for what is refused would keep a core for 70
//! ms, and hold up the tokens of all others. Those that caused errors before are served one after the other instead.
//!
//! Who caused errors pays for them, one after the other, when more comes over its connection: an error shifts the
//! throttle's clock by what it takes, and the connection goes on when that time has come (the generic cell rate
//! algorithm). So there is no queue to bound, nobody overtakes, and who owes one error waits for one of each other's.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// For each thread of the reactor. A refusal takes it 0.07 to 0.1 ms, so all of them take a fifth of it.
const ERRORS_PER_MS: u32 = 2;
/// Errors in a row that nobody waits for, as time: a proxy's pool of connections after a node's end, say.
const BURST: Duration = Duration::from_millis(20);

/// Of one port.
pub(crate) struct Throttle {
    per_error: Duration,
    /// When all errors that were paid for have had their time.
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

    /// Until when a connection waits that pays for an error now; `None`: it does not.
    pub fn until(&self, now: Instant) -> Option<Instant> {
        let paid = {
            let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
            *paid = now.max(*paid) + self.per_error;
            *paid
        };
        let until = paid.checked_sub(BURST).filter(|until| *until > now)?;
        self.waits.fetch_add(1, Ordering::Relaxed);
        Some(until)
    }

    /// How often a connection had to wait so far.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_errors_cost_nothing_and_many_wait_in_order() {
        for (threads, burst, per_error_us) in [(0, 40, 500), (1, 40, 500), (4, 160, 125)] {
            let (throttle, now) = (Throttle::new(threads), Instant::now());
            assert!((0..burst).all(|_| throttle.until(now).is_none()), "a burst");
            for error in 1..=3 {
                let wait = throttle.until(now).expect("it waits") - now;
                assert_eq!(wait.as_micros(), error * per_error_us);
            }
            assert_eq!(throttle.waits(), 3);
        }
    }

    #[test]
    fn what_was_waited_for_is_forgotten() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        let last = (0..1000).filter_map(|_| throttle.until(start)).last().expect("they wait");
        assert!(throttle.until(last).is_some(), "the burst is used up");
        assert_eq!(throttle.until(last + BURST * 2), None);
    }
}
