//! What came in a stretch of time, and how long that stretch was (pure): both sides of every throughput.
//!
//! - **Open loop**, and intervals of so many requests: all answers, over the time in which requests were offered or,
//!   where that is longer, the time from the first intended send to the last answer. What is answered in the drain
//!   counts, and so does the drain.
//! - **Closed loop over a window of time**: what came inside the window, whenever it was asked: answers by their end,
//!   tokens by their arrival, prompts by their first token. Counting what was *sent* inside it would give so many
//!   rounds more or less: a step of the whole concurrency.
use super::request::{Seen, is_ok};
use crate::record::{Interval, Objectives, Record};

/// Of one interval, or of several: they add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    /// What throughputs are divided by.
    pub seconds: f64,
    /// Answers that came to their end.
    pub completed: usize,
    /// Of these, within both objectives.
    pub good: usize,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
}

impl Served {
    /// `window_s`: how long requests were offered.
    pub fn of(interval: &Interval, window_s: f64, objectives: Objectives) -> Self {
        let answered: Vec<&Record> = interval.records.iter().filter(|record| is_ok(record)).collect();
        match interval.window_from {
            Some(from) => Self { seconds: window_s, ..Self::inside((from, from + window_s), &answered, objectives) },
            None => Self { seconds: window_s.max(took_s(interval, &answered)), ..Self::all(&answered, objectives) },
        }
    }

    fn all(answered: &[&Record], objectives: Objectives) -> Self {
        let mut served = Self { completed: answered.len(), ..Self::default() };
        for record in answered {
            let seen = Seen::of(record, objectives);
            served.good += usize::from(seen.is_good(objectives));
            served.prompt_tokens += u64::from(record.prompt_tokens);
            served.output_tokens += seen.output_tokens;
        }
        served
    }

    fn inside((from, to): (f64, f64), answered: &[&Record], objectives: Objectives) -> Self {
        let is_inside = |at: f64| from <= at && at < to;
        let mut served = Self::default();
        for record in answered {
            if is_inside(record.ended) {
                served.completed += 1;
                served.good += usize::from(Seen::of(record, objectives).is_good(objectives));
            }
            if record.chunks.first().is_some_and(|(at, _)| is_inside(*at)) {
                served.prompt_tokens += u64::from(record.prompt_tokens);
            }
            let tokens = record.chunks.iter().filter(|(at, _)| is_inside(*at)).map(|(_, tokens)| u64::from(*tokens));
            served.output_tokens += tokens.sum::<u64>();
        }
        served
    }

    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            completed: self.completed + other.completed,
            good: self.good + other.good,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            output_tokens: self.output_tokens + other.output_tokens,
        }
    }
}

/// From the first intended send to the last answer; 0 without one.
fn took_s(interval: &Interval, answered: &[&Record]) -> f64 {
    let finite = |at: &f64| at.is_finite();
    let first = interval.records.iter().map(|record| record.intended).filter(finite).reduce(f64::min);
    let last = answered.iter().map(|record| record.ended).filter(finite).reduce(f64::max);
    first.zip(last).map(|(first, last)| last - first).filter(finite).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Outcome;
    use crate::report::fixture;

    const GOALS: Objectives = Objectives { ttft_ms: 400.0, tpot_ms: 60.0 };

    #[test]
    fn the_drain_counts_on_both_sides() {
        // Offered for 2 s, answered after 10: beyond capacity.
        let late = fixture::record(1.5, &[(9.0, 1), (11.0, 3)]);
        let hung = fixture::with_outcome(1.9, Outcome::Failed { kind: "timeout".into(), message: String::new() });
        let mut interval = fixture::interval(2.0, vec![fixture::record(1.0, &[(1.1, 1), (1.15, 1)]), late, hung]);
        let served = Served::of(&interval, 2.0, GOALS);
        assert_eq!((served.completed, served.good, served.output_tokens), (2, 1, 6));
        assert!((served.seconds - 10.0).abs() < 1e-9, "from 1.0 to 11.0: {served:?}");
        interval.records.truncate(1);
        assert_eq!(
            Served::of(&interval, 2.0, GOALS).seconds,
            2.0,
            "a server that keeps up is measured over the window"
        );
    }

    #[test]
    fn a_window_counts_what_came_inside_it() {
        // Sent before it and ended inside; whole; begun inside and ended behind it.
        let across = fixture::record(1.0, &[(1.2, 1), (2.5, 1), (3.0, 1)]);
        let whole = fixture::record(3.0, &[(3.1, 1), (3.15, 1)]);
        let beyond = fixture::record(3.5, &[(3.6, 1), (3.9, 1), (4.1, 1)]);
        let mut interval = fixture::interval(2.0, vec![across, whole, beyond]);
        interval.window_from = Some(2.0);
        let served = Served::of(&interval, 2.0, GOALS);
        // The fixture's prompts have 100 tokens; the first one's was computed before the window.
        assert_eq!((served.completed, served.output_tokens, served.prompt_tokens), (2, 2 + 2 + 2, 200));
        assert_eq!((served.seconds, served.good), (2.0, 1));
        assert_eq!(interval.measured().count(), 2, "latencies are of what was sent inside");
    }
}
