//! How long this node may still believe that a router counts on it. Pure: time is an argument.
//!
//! A router gives a node up `lease` after it heard of it last. It heard of the node when it got the last probe of its
//! clock that it answered, or later: so a node that lets go `lease` after it *sent* that probe does not do so later
//! than the router, whatever the network does. What a router books elsewhere after such a verdict runs nowhere twice.
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Probes without an answer that are remembered; an answer to an older one proves less than is known.
const PROBES: usize = 64;

/// The node's half of a lease.
#[derive(Debug)]
pub struct Lease {
    length: Duration,
    /// The router heard of the node at this time, or later.
    proven: Instant,
    /// Sent and not answered: the name of each, and when.
    probes: VecDeque<(u64, Instant)>,
}

impl Lease {
    /// Of a router that accepted what was sent at `registered`.
    pub fn new(length: Duration, registered: Instant) -> Self {
        Self { length, proven: registered, probes: VecDeque::new() }
    }

    /// A probe with this name is sent.
    pub fn sent(&mut self, name: u64, now: Instant) {
        if self.probes.len() == PROBES {
            self.probes.pop_front();
        }
        self.probes.push_back((name, now));
    }

    /// The router answered it.
    pub fn answered(&mut self, name: u64) {
        if let Some(at) = self.probes.iter().position(|(sent, _)| *sent == name) {
            // Those before it are older.
            self.proven = self.probes.drain(..=at).next_back().map_or(self.proven, |(_, sent)| sent);
        }
    }

    /// When it is over, unless another answer comes.
    pub fn ends(&self) -> Instant {
        self.proven + self.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_from_the_sending_of_the_last_probe_that_was_answered() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut lease = Lease::new(3 * second, start);
        assert_eq!(lease.ends(), start + 3 * second);
        for name in 1..=3_u32 {
            lease.sent(name.into(), start + name * second);
        }
        lease.answered(2);
        assert_eq!(lease.ends(), start + 5 * second);
        // A late answer, one to no probe of ours, and one that came twice.
        lease.answered(1);
        lease.answered(9);
        lease.answered(2);
        assert_eq!(lease.ends(), start + 5 * second);
        lease.answered(3);
        assert_eq!(lease.ends(), start + 6 * second);
        for name in 10..1000 {
            lease.sent(name, start + 7 * second);
        }
        assert_eq!(lease.probes.len(), PROBES);
        lease.answered(10);
        assert_eq!(lease.ends(), start + 6 * second, "forgotten");
        lease.answered(999);
        assert_eq!(lease.ends(), start + 10 * second);
    }
}
