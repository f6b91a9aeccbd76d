//! How fast KV leaves this node, for each receiver, learnt from the receipts of earlier hand-offs. Pure.
//!
//! A receipt says that so many bytes took so long from the first frame to the receiver's word. Where the computation
//! was the slow part that is only a lower bound of what the link can do (BBR calls such samples application-limited,
//! <https://queue.acm.org/detail.cfm?id=3022184>): it may raise the estimate, never lower it.
use std::collections::HashMap;
use std::time::Duration;

use tandem_proto::Incarnation;
use tandem_proto::v1::Ticket;

/// Before the first receipt: slower than shared memory and local sockets, as fast as a network card of 10 Gbit/s.
pub const PRIOR_BYTES_PER_SECOND: f64 = 1e9;
/// Less says more of latency than of speed.
const MIN_BYTES: u64 = 1 << 20;
/// Weight of a new sample.
const WEIGHT: f64 = 0.3;

/// Receivers that are remembered; who was sent to the longest ago makes room.
const MOST_RECEIVERS: usize = 256;

/// A receiver and the way to it: what lost its fast way is as another one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    incarnation: Incarnation,
    build_id: String,
}

impl Receiver {
    /// Who granted a ticket.
    pub fn of(ticket: &Ticket) -> Self {
        let build_id = ticket.transport.as_ref().map(|transport| transport.build_id.clone()).unwrap_or_default();
        Self { incarnation: Incarnation(ticket.decode_incarnation), build_id }
    }
}

/// The estimates: one receiver may be on this host, another one behind a slow network.
#[derive(Debug, Default)]
pub struct Links {
    each: HashMap<Receiver, Known>,
    /// Of all receivers, for one that is not known yet.
    any: LinkSpeed,
    handoffs: u64,
}

#[derive(Debug, Default)]
struct Known {
    speed: LinkSpeed,
    /// The number of its last hand-off.
    last: u64,
}

impl Links {
    /// As [`LinkSpeed::observe`], of a hand-off to `receiver`.
    pub fn observe(&mut self, receiver: Receiver, bytes: u64, elapsed: Duration, exposed: Duration) {
        self.handoffs += 1;
        self.any.observe(bytes, elapsed, exposed);
        if self.each.len() >= MOST_RECEIVERS && !self.each.contains_key(&receiver) {
            let oldest = self.each.iter().min_by_key(|(_, known)| known.last).map(|(oldest, _)| oldest.clone());
            oldest.iter().for_each(|oldest| _ = self.each.remove(oldest));
        }
        let known = self.each.entry(receiver).or_default();
        known.speed.observe(bytes, elapsed, exposed);
        known.last = self.handoffs;
    }

    /// Bytes a second to `receiver`; where nothing says so yet, or nobody is known, those of the others.
    pub fn bytes_per_second(&self, receiver: Option<&Receiver>) -> f64 {
        let known = receiver.and_then(|receiver| self.each.get(receiver)?.speed.measured);
        known.unwrap_or_else(|| self.any.bytes_per_second())
    }

    /// As [`LinkSpeed::seen`], of all receivers.
    pub fn seen(&self) -> Option<f64> {
        self.any.seen()
    }
}

/// The estimate of one link.
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

    fn receiver(number: u64) -> Receiver {
        Receiver { incarnation: Incarnation(number), build_id: "tcp/7".to_owned() }
    }

    #[test]
    fn each_receiver_has_its_own_and_a_new_one_that_of_the_others() {
        let (mut links, near, far) = (Links::default(), receiver(1), receiver(2));
        assert_eq!(links.bytes_per_second(Some(&near)), PRIOR_BYTES_PER_SECOND);
        for _ in 0..50 {
            links.observe(near.clone(), 4_000_000_000, SECOND, SECOND);
            links.observe(far.clone(), 100_000_000, SECOND, SECOND);
        }
        let speeds = [Some(&near), Some(&far), Some(&receiver(3)), None].map(|one| links.bytes_per_second(one));
        assert!((speeds[0] - 4e9).abs() < 1.0 && (speeds[1] - 1e8).abs() < 1.0, "{speeds:?}");
        assert!(speeds[2] == speeds[3] && (1e8..4e9).contains(&speeds[2]), "{speeds:?}");
        let slower = Receiver { build_id: "ucx-1.13.1/shm/7".to_owned(), ..near };
        assert_eq!(links.bytes_per_second(Some(&slower)), speeds[3], "another way is another link");
        // Hidden behind the computation, so that it says nothing.
        links.observe(receiver(4), 10_000_000, SECOND, Duration::ZERO);
        assert_eq!(links.bytes_per_second(Some(&receiver(4))), links.bytes_per_second(None));
    }

    #[test]
    fn who_was_sent_to_the_longest_ago_makes_room() {
        let mut links = Links::default();
        for number in 0..2 * MOST_RECEIVERS as u64 {
            links.observe(receiver(number), 100_000_000, SECOND, SECOND);
            links.observe(receiver(0), 100_000_000, SECOND, SECOND);
            assert!(links.each.len() <= MOST_RECEIVERS && links.each.contains_key(&receiver(0)));
        }
        assert!(!links.each.contains_key(&receiver(1)));
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
