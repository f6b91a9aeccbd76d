//! How far this host's clock is from the router's, from the times of probes on the membership stream: NTP's estimate
//! (RFC 5905, section 8). The probe that took the shortest way says most: its error is half of what the way took. Pure.
use std::collections::{BTreeSet, VecDeque};

use tandem_etcd::HostPort;
use tandem_proto::v1::ClockReading;

/// Readings that count: some seconds' worth.
const READINGS: usize = 8;
/// Differences below this are not worth a change: two clocks of one host differ by nothing, and the way takes about
/// this.
const WORTH_NS: i64 = 200_000;

/// Whose time line this node's times are on: a router's. With several it is the first one that is there, in an order
/// that is the same on all nodes. The others' traces are off by what lies between their clocks and that one's.
#[derive(Debug, Default)]
pub struct Reference {
    joined: BTreeSet<RouterKey>,
    offset: ClockOffset,
}

/// A router's place in the order: of its flag, and of its address among those that this stands for.
pub type RouterKey = (usize, Option<HostPort>);

impl Reference {
    /// A session with this router begins.
    pub fn joined(&mut self, router: &RouterKey) {
        self.joined.insert(router.clone());
        if self.joined.first() == Some(router) {
            self.offset.start_over();
        }
    }

    /// It is over.
    pub fn left(&mut self, router: &RouterKey) {
        let first = self.joined.first() == Some(router);
        self.joined.remove(router);
        if first {
            self.offset.start_over();
        }
    }

    /// As [`ClockOffset::read`], of a reading by this router.
    pub fn read(&mut self, router: &RouterKey, reading: &ClockReading, now_unix_ns: u64) -> Option<i64> {
        let first = self.joined.first() == Some(router);
        first.then(|| self.offset.read(reading, now_unix_ns)).flatten()
    }
}

/// The readings of the present stream, and what was made of those before.
#[derive(Debug, Default)]
pub struct ClockOffset {
    readings: VecDeque<Reading>,
    applied_ns: i64,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    /// What must be added to this host's time for the router's.
    offset_ns: i64,
    /// On the way, there and back.
    round_trip_ns: i64,
}

impl ClockOffset {
    /// The router may be another one from now on.
    pub fn start_over(&mut self) {
        self.readings.clear();
    }

    /// Takes a reading that came when this host's own clock said `now_unix_ns`. Says what is to be added to this clock
    /// from now on, where that is certainly something else than before.
    pub fn read(&mut self, reading: &ClockReading, now_unix_ns: u64) -> Option<i64> {
        let (sent, now) = (reading.sent_unix_ns.cast_signed(), now_unix_ns.cast_signed());
        let (received, answered) = (reading.received_unix_ns.cast_signed(), reading.answered_unix_ns.cast_signed());
        let (there, back) = (received.checked_sub(sent)?, answered.checked_sub(now)?);
        let round_trip_ns = now.checked_sub(sent)?.checked_sub(answered.checked_sub(received)?)?;
        // Somebody's clock jumped between two of its times, or the answer is to no probe of ours.
        if round_trip_ns < 0 {
            return None;
        }
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(Reading { offset_ns: there / 2 + back / 2, round_trip_ns });
        let best = self.readings.iter().min_by_key(|reading| reading.round_trip_ns)?;
        let change = best.offset_ns.abs_diff(self.applied_ns).cast_signed();
        if change <= WORTH_NS.max(best.round_trip_ns / 2) {
            return None;
        }
        self.applied_ns = best.offset_ns;
        Some(self.applied_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;
    const START: i64 = 1_790_000_000_000 * MS;

    /// A reading by a host whose clock is `offset` behind the router's, over ways that take so long, and the host's
    /// time then.
    fn reading(offset: i64, there: i64, back: i64) -> (ClockReading, u64) {
        let received = START + there + offset;
        let answered = received + MS;
        let clock = ClockReading {
            sent_unix_ns: START.cast_unsigned(),
            received_unix_ns: received.cast_unsigned(),
            answered_unix_ns: answered.cast_unsigned(),
        };
        (clock, (answered - offset + back).cast_unsigned())
    }

    #[test]
    fn a_minute_s_difference_is_found_at_once_and_to_half_of_the_way() {
        for offset in [60_000 * MS, -60_000 * MS] {
            for (there, back) in [(MS, MS), (3 * MS, MS), (0, 4 * MS)] {
                let (clock, now) = reading(offset, there, back);
                let found = ClockOffset::default().read(&clock, now).expect("a change");
                assert!((found - offset).abs() <= (there + back) / 2, "{found} for {offset}");
            }
        }
    }

    #[test]
    fn the_shortest_way_counts() {
        let mut offset = ClockOffset::default();
        let mut read = |there, back| {
            let (clock, now) = reading(1000 * MS, there, back);
            offset.read(&clock, now)
        };
        assert_eq!(read(40 * MS, 0), Some(1020 * MS));
        assert_eq!(read(MS, MS), Some(1000 * MS));
        assert_eq!(read(90 * MS, 0), None, "one that was held up says less");
        assert_eq!(read(2 * MS, 0), None, "nothing certain");
    }

    #[test]
    fn one_host_s_clocks_stay_as_they_are() {
        let mut offset = ClockOffset::default();
        for (there, back) in [(50_000, 150_000), (MS, 0), (0, 30 * MS)] {
            let (clock, now) = reading(0, there, back);
            assert_eq!(offset.read(&clock, now), None);
        }
    }

    #[test]
    fn a_clock_that_drifts_is_followed() {
        let mut offset = ClockOffset::default();
        let mut last = 0;
        for step in 0..100 {
            let (clock, now) = reading(step * MS, MS / 10, MS / 10);
            last = offset.read(&clock, now).unwrap_or(last);
            // The readings of some seconds count as one.
            assert!((step * MS - last).abs() <= (READINGS as i64 + 1) * MS, "{step}");
        }
        assert!(last > 80 * MS);
    }

    #[test]
    fn another_router_has_another_clock() {
        let mut offset = ClockOffset::default();
        let (clock, now) = reading(1000 * MS, 0, 0);
        assert_eq!(offset.read(&clock, now), Some(1000 * MS));
        offset.start_over();
        let (clock, now) = reading(0, MS, MS);
        assert_eq!(offset.read(&clock, now), Some(0));
    }

    #[test]
    fn of_several_routers_the_first_one_that_is_there_says_what_time_it_is() {
        let mut reference = Reference::default();
        let read = |reference: &mut Reference, router, offset| {
            let (clock, now) = reading(offset, 0, 0);
            reference.read(&(router, None), &clock, now)
        };
        reference.joined(&(1, None));
        assert_eq!(read(&mut reference, 1, 1000 * MS), Some(1000 * MS));
        reference.joined(&(0, None));
        assert_eq!(read(&mut reference, 1, 2000 * MS), None);
        assert_eq!(read(&mut reference, 0, 500 * MS), Some(500 * MS));
        reference.left(&(1, None));
        assert_eq!(read(&mut reference, 0, 500 * MS), None, "as it is");
        reference.joined(&(1, None));
        reference.left(&(0, None));
        assert_eq!(read(&mut reference, 1, 1000 * MS), Some(1000 * MS));
    }

    #[test]
    fn nonsense_is_no_reading() {
        let mut offset = ClockOffset::default();
        for (sent, received, answered, now) in
            [(10, 0, 0, 5), (0, 10, 100, 20), (u64::MAX, 0, u64::MAX, 0), (0, u64::MAX / 2, 0, u64::MAX / 2 + 1)]
        {
            let clock = ClockReading { sent_unix_ns: sent, received_unix_ns: received, answered_unix_ns: answered };
            let _ = offset.read(&clock, now);
        }
        let (clock, now) = reading(0, -MS, -MS);
        assert_eq!(offset.read(&clock, now), None);
    }
}
