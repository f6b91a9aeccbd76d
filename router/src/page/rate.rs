//! How fast a counter grows, over the last few looks: one look alone jumps, since nodes report twice a second. Pure.
use std::collections::VecDeque;

/// Looks that are kept.
const KEPT: usize = 4;

/// The last values of a counter.
#[derive(Clone, Debug, Default)]
pub struct Rate {
    /// Milliseconds, and the counter then.
    seen: VecDeque<(u64, u64)>,
}

impl Rate {
    /// The counter at `at_ms`. One that went back began anew.
    pub fn see(&mut self, at_ms: u64, count: u64) {
        if self.seen.back().is_some_and(|(last_ms, last)| *last > count || *last_ms > at_ms) {
            self.seen.clear();
        }
        self.seen.push_back((at_ms, count));
        if self.seen.len() > KEPT {
            self.seen.pop_front();
        }
    }

    /// Counts in a second; 0 before there are two looks.
    pub fn per_second(&self) -> f64 {
        let (Some((from_ms, from)), Some((to_ms, to))) = (self.seen.front(), self.seen.back()) else { return 0.0 };
        if to_ms == from_ms { 0.0 } else { (to - from) as f64 * 1e3 / (to_ms - from_ms) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_over_the_last_looks_and_begins_anew_with_its_counter() {
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(), 0.0);
        rate.see(1_000, 50);
        assert_eq!(rate.per_second(), 0.0, "of one look nothing is known");
        (2..=9).for_each(|second| rate.see(second * 1_000, 50 + (second - 1) * 10));
        assert_eq!(rate.per_second(), 10.0);
        rate.see(9_000, 130);
        rate.see(10_000, 3);
        assert_eq!(rate.per_second(), 0.0, "another life of the node");
        rate.see(10_500, 8);
        assert_eq!(rate.per_second(), 10.0);
        rate.see(10_400, 9);
        assert_eq!(rate.per_second(), 0.0, "time that goes back");
    }
}
