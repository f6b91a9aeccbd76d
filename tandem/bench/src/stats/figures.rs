//! What the records of one or several intervals amount to (pure): counts, rates, distributions.
//!
//! Latencies and tokens are those of answers that came to their end; what was refused, failed or cut off counts against
//! goodput and stands beside them, because a server that refuses much looks fast.
use std::collections::BTreeMap;

use super::balance::Balance;
use super::request::{Seen, is_ok, lag_ms};
use super::served::Served;
use super::{Distribution, ratio};
use crate::record::{Interval, Objectives, Outcome, Phases, Record};

/// A gap over this many times the median gap is a stall …
const STALL_FACTOR: f64 = 4.0;
/// … if it is at least this long, in milliseconds: a server that sends bursts has a median gap of almost nothing.
const STALL_FLOOR_MS: f64 = 1.0;
/// More kinds of failures than this are counted as one.
const MOST_KINDS: usize = 16;
/// The name of that one.
const OTHER_KINDS: &str = "other kinds";

/// All numbers of a set of records. Milliseconds and seconds as the names say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// How long requests were offered, of all intervals together.
    pub seconds: f64,
    /// What throughputs are of.
    pub served: Served,
    /// Sent or to be sent, whatever became of them.
    pub requests: usize,
    /// Answered to the end.
    pub completed: usize,
    /// Refused for load.
    pub refused: usize,
    /// Not over when the run was.
    pub unfinished: usize,
    /// By kind; at most [`MOST_KINDS`] and one for the rest.
    pub failed: BTreeMap<String, usize>,
    /// Completed and within both objectives.
    pub good: usize,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Of the output tokens: no later than a reader at the TPOT objective needs them.
    pub tokens_on_time: u64,
    pub ttft_ms: Distribution,
    pub tpot_ms: Distribution,
    pub itl_ms: Distribution,
    pub e2e_ms: Distribution,
    /// The generator's own lateness, of all requests.
    pub lag_ms: Distribution,
    /// How long a refusal took, from the send on: a server that refuses late refuses badly.
    pub refusal_ms: Distribution,
    /// Gaps over four times the median gap.
    pub stalls: usize,
    /// What the server itself said, where it did.
    pub server: Server,
    /// What its nodes did, where it names them.
    pub balance: Balance,
}

/// From the phases in the last message of a Tandem server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Server {
    pub queue_ms: Distribution,
    pub route_ms: Distribution,
    pub prefill_ms: Distribution,
    pub ttft_ms: Distribution,
    /// Of requests whose KV travelled, like the next three.
    pub exposed_ms: Distribution,
    pub transfer_ms: Distribution,
    pub handoff_gap_ms: Distribution,
    /// 10⁹ bytes a second.
    pub kv_gbps: Distribution,
    /// Requests that decode prefilled itself.
    pub local: usize,
    /// |predicted − actual| / actual of TTFT without the queue.
    pub prediction_error: Distribution,
    /// (predicted − actual) / actual: below 0, the router hoped.
    pub prediction_bias: Distribution,
}

impl Figures {
    /// Of `intervals` together: their times add up.
    pub fn of(intervals: &[&Interval], objectives: Objectives) -> Self {
        let records: Vec<&Record> = intervals.iter().flat_map(|interval| interval.measured()).collect();
        let served = intervals.iter().map(|interval| Served::of(interval, seconds(interval), objectives));
        let seen: Vec<(&Record, Seen)> = records
            .iter()
            .filter(|record| is_ok(record))
            .map(|record| (*record, Seen::of(record, objectives)))
            .collect();
        let sum = |count: fn(&Seen) -> u64| seen.iter().map(|(_, seen)| count(seen)).sum();
        let itl_ms = Distribution::of(seen.iter().flat_map(|(_, seen)| seen.gaps_ms.iter().copied()));
        let threshold = stall_threshold_ms(&itl_ms);
        Self {
            seconds: intervals.iter().fold(0.0, |sum, interval| sum + seconds(interval)),
            served: served.fold(Served::default(), Served::and),
            requests: records.len(),
            completed: seen.len(),
            refused: records.iter().filter(|record| matches!(record.outcome, Outcome::Refused { .. })).count(),
            unfinished: records.iter().filter(|record| record.outcome == Outcome::Unfinished).count(),
            failed: failures(&records),
            good: seen.iter().filter(|(_, seen)| seen.is_good(objectives)).count(),
            prompt_tokens: seen.iter().map(|(record, _)| u64::from(record.prompt_tokens)).sum(),
            cached_tokens: seen.iter().map(|(record, _)| u64::from(record.cached_tokens)).sum(),
            output_tokens: sum(|seen| seen.output_tokens),
            tokens_on_time: sum(|seen| seen.tokens_on_time),
            ttft_ms: Distribution::of(seen.iter().filter_map(|(_, seen)| seen.ttft_ms)),
            tpot_ms: Distribution::of(seen.iter().filter_map(|(_, seen)| seen.tpot_ms)),
            e2e_ms: Distribution::of(seen.iter().map(|(_, seen)| seen.e2e_ms)),
            lag_ms: Distribution::of(records.iter().map(|record| lag_ms(record))),
            refusal_ms: Distribution::of(records.iter().filter_map(|record| refusal_ms(record))),
            stalls: itl_ms.sorted().iter().filter(|gap| **gap > threshold).count(),
            server: Server::of(seen.iter().filter_map(|(record, _)| record.phases)),
            balance: Balance::of(records.iter().copied()),
            itl_ms,
        }
    }

    /// Completed requests a second.
    pub fn request_throughput(&self) -> f64 {
        ratio(self.served.completed as f64, self.served.seconds)
    }

    /// Good requests a second of the time in which requests were offered: those that end in the drain are late, or were
    /// sent late.
    pub fn goodput(&self) -> f64 {
        ratio(self.served.good as f64, self.seconds)
    }

    /// Good requests of all that were asked: what was refused, failed or cut off was not good.
    pub fn good_share(&self) -> f64 {
        ratio(self.good as f64, self.requests as f64)
    }

    /// Output tokens a second.
    pub fn output_throughput(&self) -> f64 {
        ratio(self.served.output_tokens as f64, self.served.seconds)
    }

    /// Prompt tokens a second, the cached ones included.
    pub fn prompt_throughput(&self) -> f64 {
        ratio(self.served.prompt_tokens as f64, self.served.seconds)
    }

    /// Cached tokens of all prompt tokens; None without prompts.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.prompt_tokens > 0).then(|| ratio(self.cached_tokens as f64, self.prompt_tokens as f64).min(1.0))
    }

    /// Share of the tokens that came no later than a reader at the TPOT objective needs them; None without tokens.
    pub fn smoothness(&self) -> Option<f64> {
        (self.output_tokens > 0).then(|| ratio(self.tokens_on_time as f64, self.output_tokens as f64))
    }

    /// Requests that failed, of all kinds.
    pub fn failures(&self) -> usize {
        self.failed.values().sum()
    }
}

impl Server {
    fn of(phases: impl Iterator<Item = Phases>) -> Self {
        let phases: Vec<Phases> = phases.collect();
        let all = |ms: fn(&Phases) -> f64| Distribution::of(phases.iter().map(ms));
        let travelled = |value: fn(&Phases) -> f64| {
            Distribution::of(phases.iter().filter(|phases| !phases.local && phases.kv_bytes > 0).map(value))
        };
        let errors: Vec<f64> = phases.iter().filter_map(prediction_error).collect();
        Self {
            queue_ms: all(|phases| phases.queue_ms),
            route_ms: all(|phases| phases.route_ms),
            prefill_ms: all(|phases| phases.prefill_ms),
            ttft_ms: all(|phases| phases.ttft_ms),
            exposed_ms: travelled(|phases| phases.transfer_exposed_ms),
            transfer_ms: travelled(|phases| phases.transfer_total_ms),
            handoff_gap_ms: travelled(|phases| phases.handoff_gap_ms),
            kv_gbps: travelled(|phases| phases.kv_gbps),
            local: phases.iter().filter(|phases| phases.local).count(),
            prediction_error: Distribution::of(errors.iter().map(|error| error.abs())),
            prediction_bias: Distribution::of(errors),
        }
    }
}

/// A gap beyond it is a stall; without gaps, nothing is.
pub fn stall_threshold_ms(itl_ms: &Distribution) -> f64 {
    itl_ms.median().map_or(f64::INFINITY, |median| (STALL_FACTOR * median).max(STALL_FLOOR_MS))
}

/// (predicted − actual) / actual. The router predicts TTFT without the queue, and says 0 where it cannot tell.
fn prediction_error(phases: &Phases) -> Option<f64> {
    let actual = phases.ttft_ms - phases.queue_ms;
    (phases.predicted_ttft_ms > 0.0 && actual > 0.0).then(|| (phases.predicted_ttft_ms - actual) / actual)
}

/// As the runner says; from the records where it says nothing.
fn seconds(interval: &Interval) -> f64 {
    if interval.seconds.is_finite() && interval.seconds > 0.0 {
        return interval.seconds;
    }
    let times = Distribution::of(interval.records.iter().flat_map(|record| [record.intended, record.ended]));
    times.max().zip(times.percentile(0.0)).map_or(0.0, |(last, first)| last - first)
}

fn refusal_ms(record: &Record) -> Option<f64> {
    matches!(record.outcome, Outcome::Refused { .. }).then(|| ((record.ended - record.sent) * 1e3).max(0.0))
}

fn failures(records: &[&Record]) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for record in records {
        let Outcome::Failed { kind, .. } = &record.outcome else { continue };
        let full = kinds.len() >= MOST_KINDS && !kinds.contains_key(kind.as_str());
        *kinds.entry(if full { OTHER_KINDS.to_owned() } else { kind.clone() }).or_default() += 1;
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    const GOALS: Objectives = Objectives { ttft_ms: 150.0, tpot_ms: 60.0 };

    #[test]
    fn by_hand() {
        let interval = fixture::interval(
            10.0,
            vec![
                fixture::record(0.0, &[(0.1, 1), (0.15, 1), (0.2, 1)]),
                fixture::record(1.0, &[(1.2, 1), (1.25, 1), (1.5, 1)]),
                fixture::with_outcome(2.0, Outcome::Refused { retry_after_s: Some(1.0) }),
                fixture::with_outcome(3.0, Outcome::Failed { kind: "connection".into(), message: "cut".into() }),
                fixture::with_outcome(4.0, Outcome::Unfinished),
            ],
        );
        let of = Figures::of(&[&interval], GOALS);
        assert_eq!((of.requests, of.completed, of.refused, of.failures(), of.unfinished), (5, 2, 1, 1, 1));
        assert_eq!((of.good, of.good_share(), of.goodput()), (1, 0.2, 0.1));
        // The fixture's prompts have 100 tokens, 25 of them cached.
        assert_eq!((of.prompt_tokens, of.output_tokens, of.hit_rate()), (200, 6, Some(0.25)));
        assert_eq!((of.request_throughput(), of.output_throughput(), of.prompt_throughput()), (0.2, 0.6, 20.0));
        assert!((of.ttft_ms.median().unwrap() - 150.0).abs() < 1e-9);
        // 50 and (1.5 − 1.2) / 2.
        assert!((of.tpot_ms.median().unwrap() - 100.0).abs() < 1e-9);
        // Gaps 50, 50, 50, 250 ms: the last one is over 4 × 50; at 60 ms a token it is also the only late one.
        assert_eq!((of.itl_ms.count(), of.stalls, of.tokens_on_time), (4, 1, 5));
        assert_eq!(of.refusal_ms.median(), Some(500.0));
    }

    #[test]
    fn what_the_server_says() {
        let phases = |queue_ms, prefill_ms, predicted_ttft_ms, local| Phases {
            queue_ms,
            prefill_ms,
            route_ms: 1.0,
            ttft_ms: queue_ms + prefill_ms + 1.0,
            transfer_exposed_ms: 4.0,
            kv_bytes: 1000,
            predicted_ttft_ms,
            local,
            ..Phases::default()
        };
        let records = [phases(10.0, 39.0, 50.0, false), phases(0.0, 99.0, 50.0, false), phases(0.0, 9.0, 0.0, true)];
        let of = Figures::of(&[&fixture::interval(1.0, records.map(fixture::with_phases).to_vec())], GOALS);
        // 50 for 40: + 25 %; 50 for 100: − 50 %; the third was not predicted.
        assert!((of.server.prediction_error.median().unwrap() - 0.375).abs() < 1e-9);
        assert!((of.server.prediction_bias.median().unwrap() + 0.125).abs() < 1e-9);
        assert_eq!((of.server.local, of.server.exposed_ms.count(), of.server.queue_ms.count()), (1, 2, 3));
    }

    #[test]
    fn runs_with_nothing_in_them() {
        for records in [vec![], vec![fixture::with_outcome(0.0, Outcome::Unfinished)]] {
            let of = Figures::of(&[&fixture::interval(0.0, records)], GOALS);
            assert_eq!((of.completed, of.goodput(), of.good_share(), of.output_throughput()), (0, 0.0, 0.0, 0.0));
            assert_eq!((of.hit_rate(), of.smoothness(), of.stalls), (None, None, 0));
        }
        assert_eq!(Figures::of(&[], GOALS), Figures::default());
    }

    #[test]
    fn kinds_of_failures_are_bounded() {
        let failed = |kind: usize| Outcome::Failed { kind: kind.to_string(), message: String::new() };
        let records = (0..100).map(|kind| fixture::with_outcome(0.0, failed(kind))).collect();
        let of = Figures::of(&[&fixture::interval(1.0, records)], GOALS);
        assert_eq!((of.failed.len(), of.failures()), (MOST_KINDS + 1, 100));
    }
}
