//! TTFT p99 by phase, over the last minutes: for each stretch of time the one request that stands at its p99 (nearest
//! rank), with its phases. So the parts add up to the figure, and the figure is a request that one can open. Pure.
use std::collections::BTreeMap;

use serde::Serialize;

use super::row::Row;

/// Milliseconds of a stretch.
pub const STRETCH_MS: u64 = 10_000;
/// Stretches that are shown: five minutes.
pub const STRETCHES: usize = 30;
/// Requests of a stretch; the first ones count where there are more.
const MAX_OF_STRETCH: usize = 4_096;
const PERCENTILE: f64 = 0.99;

/// One stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stretch {
    /// Unix milliseconds of its beginning.
    pub at_ms: u64,
    /// Requests with a first token that ended in it.
    pub requests: usize,
    /// p99.
    pub ttft_ms: f64,
    /// Of that request.
    pub queue_ms: f64,
    /// Of that request.
    pub route_ms: f64,
    /// Of that request.
    pub prefill_ms: f64,
    /// Of that request.
    pub trace: String,
}

/// The requests of the last minutes.
#[derive(Clone, Debug, Default)]
pub struct Tail {
    /// By the stretch's number.
    stretches: BTreeMap<u64, Vec<First>>,
}

/// A first token.
#[derive(Clone, Debug)]
struct First {
    ttft_ms: f64,
    phases: [f64; 3],
    trace: String,
}

impl Tail {
    /// A request that ended.
    pub fn add(&mut self, row: &Row) {
        let Some(ttft_ms) = row.ttft_ms else { return };
        let of = self.stretches.entry(row.ended_ms() / STRETCH_MS).or_default();
        if of.len() < MAX_OF_STRETCH {
            let phases = [row.queue_ms, row.route_ms, row.prefill_ms];
            of.push(First { ttft_ms, phases, trace: row.trace.clone() });
        }
    }

    /// Forgets what is too old at `now_ms`, and says the rest.
    pub fn stretches(&mut self, now_ms: u64) -> Vec<Stretch> {
        let first = (now_ms / STRETCH_MS).saturating_sub(STRETCHES as u64 - 1);
        self.stretches = self.stretches.split_off(&first);
        self.stretches.iter_mut().filter_map(|(number, requests)| at_percentile(*number, requests)).collect()
    }
}

fn at_percentile(number: u64, requests: &mut [First]) -> Option<Stretch> {
    let rank = (requests.len() as f64 * PERCENTILE).ceil() as usize;
    let place = rank.checked_sub(1)?;
    let (_, First { ttft_ms, phases: [queue_ms, route_ms, prefill_ms], trace }, _) =
        requests.select_nth_unstable_by(place, |a, b| a.ttft_ms.total_cmp(&b.ttft_ms));
    let (at_ms, trace) = (number * STRETCH_MS, trace.clone());
    let (ttft_ms, queue_ms, route_ms, prefill_ms) = (*ttft_ms, *queue_ms, *route_ms, *prefill_ms);
    Some(Stretch { at_ms, requests: requests.len(), ttft_ms, queue_ms, route_ms, prefill_ms, trace })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(at_ms: u64, ttft_ms: f64) -> Row {
        let (queue_ms, prefill_ms, trace) = (ttft_ms / 4.0, ttft_ms * 3.0 / 4.0, format!("t{ttft_ms}"));
        Row { at_ms, ttft_ms: Some(ttft_ms), queue_ms, prefill_ms, trace, ..Row::default() }
    }

    #[test]
    fn a_stretch_names_the_request_at_its_p99() {
        let mut tail = Tail::default();
        (1..=200).rev().for_each(|ms| tail.add(&row(50_000, f64::from(ms))));
        tail.add(&row(60_000, 7.0));
        tail.add(&Row { at_ms: 60_000, ..Row::default() });
        let stretches = tail.stretches(61_000);
        assert_eq!(stretches.len(), 2);
        let Stretch { at_ms, requests, ttft_ms, queue_ms, route_ms, prefill_ms, trace } = &stretches[0];
        assert_eq!((*at_ms, *requests, *ttft_ms, trace.as_str()), (50_000, 200, 198.0, "t198"));
        assert_eq!(queue_ms + route_ms + prefill_ms, *ttft_ms);
        assert_eq!((stretches[1].requests, stretches[1].ttft_ms), (1, 7.0), "who had no token does not count");
    }

    #[test]
    fn what_is_old_or_too_much_is_forgotten() {
        let mut tail = Tail::default();
        (0..100).for_each(|number| tail.add(&row(number * STRETCH_MS, 1.0)));
        let stretches = tail.stretches(99 * STRETCH_MS);
        assert_eq!((stretches.len(), stretches[0].at_ms), (STRETCHES, 70 * STRETCH_MS));
        (0..2 * MAX_OF_STRETCH).for_each(|_| tail.add(&row(99 * STRETCH_MS, 1.0)));
        assert_eq!(tail.stretches(99 * STRETCH_MS).last().unwrap().requests, MAX_OF_STRETCH);
        assert!(tail.stretches(u64::MAX).is_empty());
    }
}
