//! The process clock. Span times derive from `Instant`, so two phases that share a boundary share the nanosecond,
//! whatever the wall clock does meanwhile. Unix times of a cluster are the router's: each node measures how far its own
//! clock is from that one and takes the difference off ([`relate`]), so that the spans of one request stand on one time
//! line.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
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

/// Nanoseconds that this process's clock is behind the cluster's; negative: ahead.
static BEHIND_NS: AtomicI64 = AtomicI64::new(0);
/// Nanoseconds by which a demonstration puts this process's clock wrong.
static SHIFTED_NS: AtomicI64 = AtomicI64::new(0);

/// From now on this process's Unix times are so many nanoseconds later than its own clock says.
pub fn relate(behind_ns: i64) {
    BEHIND_NS.store(behind_ns, Ordering::Relaxed);
}

/// For demonstrations: this process's own clock goes wrong by so much, before anybody has asked it.
pub fn shift(by_ns: i64) {
    SHIFTED_NS.store(by_ns, Ordering::Relaxed);
}

impl Clock {
    fn read() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { unix: moved(unix, SHIFTED_NS.load(Ordering::Relaxed)), instant: now() }
    }

    /// Unix nanoseconds of `at`, by the cluster's clock.
    pub fn unix_ns(&self, at: Instant) -> u64 {
        self.related().own_unix_ns(at)
    }

    /// The instant of a Unix time in nanoseconds by the cluster's clock. `None` when this clock cannot represent it.
    pub fn instant(&self, unix_ns: u64) -> Option<Instant> {
        self.related().own_instant(unix_ns)
    }

    fn related(&self) -> Self {
        Self { unix: moved(self.unix, BEHIND_NS.load(Ordering::Relaxed)), ..*self }
    }

    /// Unix nanoseconds of `at`, by this process's own clock.
    pub fn own_unix_ns(&self, at: Instant) -> u64 {
        let unix = match at.checked_duration_since(self.instant) {
            Some(later) => self.unix.saturating_add(later),
            None => self.unix.saturating_sub(self.instant.duration_since(at)),
        };
        u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX)
    }

    fn own_instant(&self, unix_ns: u64) -> Option<Instant> {
        let unix = Duration::from_nanos(unix_ns);
        match unix.checked_sub(self.unix) {
            Some(later) => self.instant.checked_add(later),
            None => self.instant.checked_sub(self.unix - unix),
        }
    }
}

fn moved(unix: Duration, by_ns: i64) -> Duration {
    let by = Duration::from_nanos(by_ns.unsigned_abs());
    if by_ns < 0 { unix.saturating_sub(by) } else { unix.saturating_add(by) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_moved_both_ways_and_not_before_the_beginning() {
        let (second, unix) = (1_000_000_000, Duration::from_secs(10));
        assert_eq!(moved(unix, 3 * second), Duration::from_secs(13));
        assert_eq!(moved(unix, -3 * second), Duration::from_secs(7));
        assert_eq!(moved(unix, -30 * second), Duration::ZERO);
        let at = now();
        let ahead = Clock { unix: moved(clock().unix, 60 * second), ..clock() };
        let related = Clock { unix: moved(ahead.unix, -60 * second), ..ahead };
        assert_eq!(related.own_unix_ns(at), clock().own_unix_ns(at));
        assert_eq!(related.own_instant(clock().own_unix_ns(at)), Some(at));
    }

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
