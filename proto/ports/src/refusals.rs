//! Callers that were refused: how many, and for people a line of the log, one a second at most: who knocks at a door
//! all day does not fill the disk.
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusals {
    count: Arc<AtomicU64>,
    lines: Arc<Mutex<Lines>>,
}

impl Refusals {
    /// So far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// One more, from there.
    pub fn add(&self, peer: Option<SocketAddr>, why: &str) {
        self.count.fetch_add(1, Ordering::Relaxed);
        // The lock is free again before the line is written.
        let due = self.lines.lock().unwrap_or_else(PoisonError::into_inner).due(Instant::now());
        if let Some(unlogged) = due {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(peer, unlogged, "refused a stranger: {why}");
        }
    }
}

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    left_out: u64,
}

impl Lines {
    /// Whether a line is due, and how many were left out before it.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < LINE_INTERVAL) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_one_a_second_is_told() {
        let (mut lines, start) = (Lines::default(), Instant::now());
        let due = |lines: &mut Lines, ms| lines.due(start + Duration::from_millis(ms));
        let told: Vec<_> = [0, 1, 999, 1000, 1500, 2000].map(|ms| due(&mut lines, ms)).into();
        assert_eq!(told, [Some(0), None, None, Some(2), None, Some(1)]);
        let refusals = Refusals::default();
        (0..3).for_each(|_| refusals.clone().add(None, "a test"));
        assert_eq!(refusals.count(), 3);
    }
}
