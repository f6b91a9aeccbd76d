//! Where TTFT went, around its percentiles (pure).
//!
//! A percentile of each phase alone would not add up: the request that queued longest is not the one that prefilled
//! longest. So the requests around a percentile of TTFT are taken, and the means of their parts: these do add up.
use super::request::{Seen, is_ok, lag_ms};
use crate::record::{Objectives, Phases, Record};

/// A percentile and the half width of the window of ranks around it, as shares of all requests.
const WINDOWS: [(f64, f64); 3] = [(0.5, 0.05), (0.95, 0.025), (0.99, 0.01)];

/// So that a rank which is whole but for the last bits of its computation stays whole.
const ROUNDING: f64 = 1e-6;

/// The mean parts of the TTFT of the requests around one percentile, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Attribution {
    /// 0.5, 0.95 or 0.99.
    pub percentile: f64,
    /// In the window.
    pub requests: usize,
    /// As the client saw it, from the intended send time.
    pub ttft_ms: f64,
    /// The generator's own lateness.
    pub lag_ms: f64,
    pub queue_ms: f64,
    pub route_ms: f64,
    pub prefill_ms: f64,
    /// What is left: network, the client, the server's edge.
    pub rest_ms: f64,
}

impl Attribution {
    /// The parts with their names, in the order in which they happen; the rest last.
    pub fn parts(&self) -> [(&'static str, f64); 5] {
        [
            ("own lag", self.lag_ms),
            ("queue", self.queue_ms),
            ("route", self.route_ms),
            ("prefill", self.prefill_ms),
            ("network, client", self.rest_ms),
        ]
    }
}

/// One for each percentile; empty when no completed request has phases.
pub fn attribute(records: &[&Record], objectives: Objectives) -> Vec<Attribution> {
    let told = |record: &Record| Some((Seen::of(record, objectives).ttft_ms?, lag_ms(record), record.phases?));
    let mut requests: Vec<(f64, f64, Phases)> =
        records.iter().filter(|record| is_ok(record)).filter_map(|record| told(record)).collect();
    requests.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let Some(last) = requests.len().checked_sub(1) else { return Vec::new() };
    let around = |(percentile, half): (f64, f64)| {
        let from = ((percentile - half) * last as f64 + ROUNDING).floor().max(0.0) as usize;
        let to = (((percentile + half) * last as f64 - ROUNDING).ceil() as usize).min(last);
        mean_parts(percentile, &requests[from..=to])
    };
    WINDOWS.map(around).to_vec()
}

fn mean_parts(percentile: f64, requests: &[(f64, f64, Phases)]) -> Attribution {
    let mean = |part: fn(&(f64, f64, Phases)) -> f64| {
        let sum: f64 = requests.iter().map(part).filter(|part| part.is_finite()).sum();
        sum / requests.len().max(1) as f64
    };
    let ttft_ms = mean(|request| request.0);
    let lag_ms = mean(|request| request.1);
    let queue_ms = mean(|request| request.2.queue_ms);
    let route_ms = mean(|request| request.2.route_ms);
    let prefill_ms = mean(|request| request.2.prefill_ms);
    // Two clocks: what is left may come out a little below zero.
    let rest_ms = (ttft_ms - lag_ms - queue_ms - route_ms - prefill_ms).max(0.0);
    Attribution { percentile, requests: requests.len(), ttft_ms, lag_ms, queue_ms, route_ms, prefill_ms, rest_ms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    const GOALS: Objectives = Objectives { ttft_ms: 150.0, tpot_ms: 60.0 };

    /// 101 requests: TTFT i + 10 ms, of which i queued, 5 prefill, 1 route, 1 lag; 3 are left.
    #[test]
    fn by_hand() {
        let records: Vec<Record> = (0..=100)
            .map(|i| {
                let queue_ms = f64::from(i);
                let phases = Phases { queue_ms, route_ms: 1.0, prefill_ms: 5.0, ..Phases::default() };
                let mut record = fixture::record(0.0, &[((queue_ms + 10.0) / 1e3, 1)]);
                record.phases = Some(phases);
                record.sent = 0.001;
                record
            })
            .collect();
        let of = attribute(&records.iter().collect::<Vec<_>>(), GOALS);
        let [p50, p95, p99] = of[..] else { panic!("{of:?}") };
        // Ranks 45 ..= 55, 92 ..= 98 (floor and ceiling of 92.5 and 97.5), 98 ..= 100.
        assert_eq!((p50.requests, p95.requests, p99.requests), (11, 7, 3));
        for (of, queue_ms) in [(p50, 50.0), (p95, 95.0), (p99, 99.0)] {
            assert!((of.queue_ms - queue_ms).abs() < 1e-9 && (of.ttft_ms - queue_ms - 10.0).abs() < 1e-9, "{of:?}");
            assert!((of.rest_ms - 3.0).abs() < 1e-9 && (of.lag_ms - 1.0).abs() < 1e-9, "{of:?}");
            assert!((of.parts().iter().map(|part| part.1).sum::<f64>() - of.ttft_ms).abs() < 1e-9);
        }
    }

    #[test]
    fn few_requests_and_none() {
        assert_eq!(attribute(&[], GOALS), []);
        let silent = fixture::record(0.0, &[(0.1, 1)]);
        assert_eq!(attribute(&[&silent], GOALS), []);
        let mut one = silent.clone();
        // The server's clock says more than the client saw.
        one.phases = Some(Phases { prefill_ms: 101.0, ..Phases::default() });
        let of = attribute(&[&silent, &one], GOALS);
        assert!(of.iter().all(|of| of.requests == 1 && of.rest_ms == 0.0 && of.prefill_ms == 101.0), "{of:?}");
    }
}
