//! What a closed loop decides (pure): when its window is over, how long a slot rests after an answer that was none, and
//! when the server is gone.
use crate::record::Outcome;

/// A slot's rest after a failure, and after a refusal that does not say how long, seconds.
const REST_S: f64 = 0.1;
/// No slot rests longer, whatever the server says: the load that was asked for is so many at once.
const LONGEST_REST_S: f64 = 1.0;
/// Failures to connect in a row …
const UNREACHED: u32 = 100;
/// … for so long that it is no restart, seconds: then nobody is there.
const UNREACHED_S: f64 = 5.0;

/// How long a slot waits before it asks again: a server that refuses is not to be asked in a circle.
pub(super) fn rest_s(outcome: &Outcome) -> Option<f64> {
    match outcome {
        Outcome::Refused { retry_after_s } => Some(retry_after_s.unwrap_or(REST_S).clamp(0.0, LONGEST_REST_S)),
        Outcome::Failed { .. } => Some(REST_S),
        Outcome::Ok | Outcome::Unfinished => None,
    }
}

/// The stretch of time that is measured. Times are seconds of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    pub(super) from_s: f64,
    pub(super) end_s: f64,
    /// It was too short for a single answer.
    pub(super) is_extended: bool,
}

impl Window {
    /// Whether it is over, with so many answers inside so far. Without one it goes on until each slot had one, for
    /// `grace_s` at most; then it ends at the last of them.
    pub(super) fn is_over(&mut self, now_s: f64, answers: usize, slots: usize, grace_s: f64) -> bool {
        if !self.is_extended {
            if now_s < self.end_s || answers > 0 {
                return now_s >= self.end_s;
            }
            self.is_extended = true;
            self.end_s += grace_s;
        }
        if answers >= slots {
            self.end_s = self.end_s.min(now_s);
        }
        now_s >= self.end_s
    }
}

/// Whether anybody can be reached at all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Reach {
    /// Failures to connect in a row, and when the first of them was.
    row: Option<(f64, u32)>,
}

impl Reach {
    /// What became of a request, at a time.
    pub(super) fn learn(&mut self, outcome: &Outcome, at_s: f64) {
        self.row = match (outcome, self.row) {
            (Outcome::Failed { kind, .. }, row) if kind == "connect" => {
                let (since_s, count) = row.unwrap_or((at_s, 0));
                Some((since_s.min(at_s), count.saturating_add(1)))
            }
            _ => None,
        };
    }

    pub(super) fn is_lost(&self, now_s: f64) -> bool {
        self.row.is_some_and(|(since_s, count)| count >= UNREACHED && now_s - since_s >= UNREACHED_S)
    }
}

#[cfg(test)]
mod tests {
    use super::super::failed;
    use super::*;

    #[test]
    fn rests_are_as_asked_and_short() {
        let refused = |retry_after_s| Outcome::Refused { retry_after_s };
        let cases = [
            (refused(Some(0.25)), Some(0.25)),
            (refused(Some(30.0)), Some(1.0)),
            (refused(Some(-3.0)), Some(0.0)),
            (refused(None), Some(0.1)),
            (failed("cut", String::new()), Some(0.1)),
            (Outcome::Ok, None),
            (Outcome::Unfinished, None),
        ];
        for (outcome, wanted) in cases {
            assert_eq!(rest_s(&outcome), wanted, "{outcome:?}");
        }
    }

    #[test]
    fn a_window_ends_when_it_should_or_when_each_slot_had_an_answer() {
        let window = Window { from_s: 1.0, end_s: 2.0, is_extended: false };
        let mut plain = window;
        assert!(!plain.is_over(1.9, 0, 2, 30.0) && plain.is_over(2.0, 1, 2, 30.0));
        assert_eq!(plain, window, "one answer is enough for what was asked");
        let mut long = window;
        assert!(!long.is_over(2.0, 0, 2, 30.0) && !long.is_over(5.0, 1, 2, 30.0) && long.is_over(6.0, 2, 2, 30.0));
        assert_eq!((long.end_s, long.is_extended), (6.0, true));
        let mut hung = window;
        assert!(!hung.is_over(2.0, 0, 2, 30.0) && !hung.is_over(31.0, 0, 2, 30.0) && hung.is_over(32.0, 0, 2, 30.0));
        let mut impatient = window;
        assert!(impatient.is_over(2.0, 0, 2, 0.0));
    }

    #[test]
    fn a_server_is_gone_after_many_failures_over_some_time() {
        let connect = failed("connect", String::new());
        let mut reach = Reach::default();
        (0..99).for_each(|i| reach.learn(&connect, f64::from(i)));
        assert!(!reach.is_lost(99.0), "too few");
        reach.learn(&connect, 99.0);
        assert!(reach.is_lost(99.0));
        reach.learn(&failed("http 500", String::new()), 99.0);
        assert!(!reach.is_lost(99.0), "somebody is there");
        (0..1000).for_each(|_| reach.learn(&connect, 100.0));
        assert!(!reach.is_lost(104.0) && reach.is_lost(105.0), "a restart is shorter");
    }
}
