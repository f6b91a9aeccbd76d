//! The process clock. Span times derive from `Instant`, so two phases that share a boundary share the nanosecond,
//! whatever the wall clock does meanwhile.
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Maps the monotonic clock to Unix time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    unix: Duration,
    instant: Instant,
}

/// Now, by tokio's clock: the system's monotonic one, or in a simulation the paused one.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The clock of this process: its pair is read once, at the first call.
pub fn clock() -> Clock {
    static CLOCK: OnceLock<Clock> = OnceLock::new();
    *CLOCK.get_or_init(Clock::read)
}

impl Clock {
    fn read() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { unix, instant: now() }
    }

    /// Unix nanoseconds of `at`.
    pub fn unix_ns(&self, at: Instant) -> u64 {
        let unix = match at.checked_duration_since(self.instant) {
            Some(later) => self.unix.saturating_add(later),
            None => self.unix.saturating_sub(self.instant.duration_since(at)),
        };
        u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The instant of a Unix time in nanoseconds. `None` when this clock cannot represent it.
    pub fn instant(&self, unix_ns: u64) -> Option<Instant> {
        let unix = Duration::from_nanos(unix_ns);
        match unix.checked_sub(self.unix) {
            Some(later) => self.instant.checked_add(later),
            None => self.instant.checked_sub(self.unix - unix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_and_back() {
        let (clock, base) = (clock(), Instant::now());
        for at in [base, base + Duration::from_millis(1500), base - Duration::from_millis(1)] {
            assert_eq!(clock.instant(clock.unix_ns(at)), Some(at));
        }
    }

    #[test]
    fn differences_are_exact() {
        let base = Instant::now();
        let gap = clock().unix_ns(base + Duration::from_nanos(12_345)) - clock().unix_ns(base);
        assert_eq!(gap, 12_345);
    }

    #[test]
    fn extreme_times_do_not_panic() {
        for unix_ns in [0, 1, u64::MAX] {
            let _ = clock().instant(unix_ns);
        }
    }
}
