//! What bounds a point (pure): plain rules over its numbers, each said with the numbers that made it hold. Several may
//! hold, or none.
//!
//! A regime holds when:
//!
//! - scheduler saturation: the queue phase is ≥ 50 % of the server's mean TTFT, or ≥ 5 % of the requests were refused;
//! - compute-bound prefill: the prefill phase is ≥ 50 % of it, and the time that the hardware's compute predicts is
//!   ≥ 50 % of what it took;
//! - prefill itself: as that, with the time that the nodes' own cost model predicts: it says how fast they are, not
//!   why;
//! - contended prefill: the prefill phase is ≥ 50 % of it, and its predicted time is < 50 % of what it took: prompts
//!   wait for each other;
//! - bandwidth-bound decode: the step that the hardware's bandwidth predicts is ≥ 50 % of the measured TPOT;
//! - fixed cost of a step: by the nodes' own cost model a step is ≥ 50 % base and context, whatever tokens it has, and
//!   ≥ 50 % of the measured TPOT;
//! - transfer exposed: half of the mean hand-off gap or more is exposed transfer, and the gap is ≥ 3 × the median TPOT;
//! - cold cache: the same row and load, warm, has ≤ 50 % of the median TTFT.
//!
//! Without a model nothing is said of compute or bandwidth; without the server's phases nothing of queue, prefill or
//! transfer.
use super::model::Source;
use super::number::{ms, percent, short};
use super::{Key, Point};
use crate::stats::ratio;

/// A part from which on it dominates.
const HALF: f64 = 0.5;
/// Refused requests that mean saturation, as a share.
const REFUSED: f64 = 0.05;
/// Hand-off gaps over this many TPOTs are seen by a reader.
const GAP_FACTOR: f64 = 3.0;

/// What bounds a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    SchedulerSaturation,
    ComputeBoundPrefill,
    /// By the nodes' own cost model.
    PrefillItself,
    ContendedPrefill,
    BandwidthBoundDecode,
    /// By the nodes' own cost model.
    StepFixedCost,
    TransferExposed,
    ColdCache,
}

impl Regime {
    /// For people.
    pub fn label(self) -> &'static str {
        match self {
            Self::SchedulerSaturation => "scheduler saturation",
            Self::ComputeBoundPrefill => "compute-bound prefill",
            Self::PrefillItself => "prefill itself",
            Self::ContendedPrefill => "contended prefill",
            Self::BandwidthBoundDecode => "bandwidth-bound decode",
            Self::StepFixedCost => "fixed cost of a step",
            Self::TransferExposed => "transfer exposed",
            Self::ColdCache => "cold cache",
        }
    }
}

/// A regime and why.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Finding {
    pub regime: Regime,
    /// The numbers that made the rule hold.
    pub because: String,
}

/// Fills the findings of all points; a cold one is compared with its warm twin.
pub fn conclude(points: &mut [Point]) {
    let findings: Vec<Vec<Finding>> = points
        .iter()
        .map(|point| {
            let warm = Key { warm: true, ..point.key.clone() };
            let twin = points.iter().find(|other| !point.key.warm && other.key == warm);
            let rules = [saturation(point), prefill(point), decode(point), transfer(point), cold(point, twin)];
            rules.into_iter().flatten().collect()
        })
        .collect();
    for (point, findings) in points.iter_mut().zip(findings) {
        point.findings = findings;
    }
}

/// One regime of a row on an endpoint, over its loads.
#[derive(Clone, Debug)]
pub struct Grouped<'a> {
    /// The last of the points.
    pub point: &'a Point,
    /// Of that point.
    pub finding: &'a Finding,
    /// All of them, as [`super::Load::label`]s.
    pub loads: Vec<String>,
}

impl Grouped<'_> {
    /// One load, or first and last.
    pub fn span(&self) -> String {
        match &self.loads[..] {
            [first, .., last] => format!("{first} … {last}"),
            loads => loads.concat(),
        }
    }
}

/// The findings of a whole run, short: each regime once for a row on an endpoint, cold or warm.
pub fn grouped(points: &[Point]) -> Vec<Grouped<'_>> {
    let mut groups: Vec<Grouped> = Vec::new();
    for point in points {
        for finding in &point.findings {
            let same = |of: &Grouped| {
                let Key { row, endpoint, warm, .. } = &of.point.key;
                let key = &point.key;
                *row == key.row && *endpoint == key.endpoint && *warm == key.warm && of.finding.regime == finding.regime
            };
            let load = point.key.load.label();
            match groups.iter_mut().find(|group| same(group)) {
                Some(group) => {
                    (group.point, group.finding) = (point, finding);
                    group.loads.push(load);
                }
                None => groups.push(Grouped { point, finding, loads: vec![load] }),
            }
        }
    }
    groups
}

fn saturation(point: &Point) -> Option<Finding> {
    let of = &point.figures;
    let queued = share_of_ttft(point, of.server.queue_ms.mean());
    let refused = ratio(of.refused as f64, of.requests as f64);
    let because = if queued >= HALF {
        format!("{} % of the server's TTFT is its queue", percent(queued))
    } else if refused >= REFUSED {
        format!("{} % of the requests were refused", percent(refused))
    } else {
        return None;
    };
    Some(Finding { regime: Regime::SchedulerSaturation, because })
}

fn prefill(point: &Point) -> Option<Finding> {
    let share = share_of_ttft(point, point.figures.server.prefill_ms.mean());
    let of = point.prediction?.prefill?;
    let (predicted, measured) = (ms(of.predicted_ms), ms(of.measured_ms));
    let because = format!(
        "prefill is {} % of the server's TTFT; {measured} ms where {predicted} ms were predicted{}",
        percent(share),
        by(of.source)
    );
    let regime = match (of.share_reached >= HALF, of.source.is_hardware()) {
        (true, true) => Regime::ComputeBoundPrefill,
        (true, false) => Regime::PrefillItself,
        (false, _) => Regime::ContendedPrefill,
    };
    (share >= HALF).then_some(Finding { regime, because })
}

fn decode(point: &Point) -> Option<Finding> {
    let of = point.prediction?;
    let tpot = of.tpot.filter(|tpot| tpot.memory_share >= HALF && tpot.share_reached >= HALF)?;
    let over = format!("{} sequences of {} tokens", short(of.batch), short(of.context_tokens));
    let (part, whole) = (ms(tpot.predicted_ms * tpot.memory_share), ms(tpot.measured_ms));
    Some(if tpot.source.is_hardware() {
        let because = format!("a step over {over} reads memory for {part} of {whole} ms");
        Finding { regime: Regime::BandwidthBoundDecode, because }
    } else {
        let because = format!("{part} of {whole} ms a step over {over}{}", by(tpot.source));
        Finding { regime: Regime::StepFixedCost, because }
    })
}

/// What is no figure of the hardware is said to be none.
fn by(source: Source) -> &'static str {
    if source.is_hardware() { "" } else { ", by the nodes' own cost model" }
}

fn transfer(point: &Point) -> Option<Finding> {
    let server = &point.figures.server;
    let (exposed_ms, gap_ms) = server.exposed_ms.mean().zip(server.handoff_gap_ms.mean())?;
    let tpot_ms = point.figures.tpot_ms.median()?;
    let because = format!(
        "{} of {} ms between the first two tokens is KV on its way; TPOT is {} ms",
        ms(exposed_ms),
        ms(gap_ms),
        ms(tpot_ms)
    );
    let exposed = gap_ms > 0.0 && exposed_ms >= HALF * gap_ms && gap_ms >= GAP_FACTOR * tpot_ms;
    exposed.then_some(Finding { regime: Regime::TransferExposed, because })
}

fn cold(point: &Point, twin: Option<&Point>) -> Option<Finding> {
    let (cold_ms, warm_ms) = point.figures.ttft_ms.median().zip(twin?.figures.ttft_ms.median())?;
    let because = format!("TTFT p50 is {} ms cold and {} ms warm", ms(cold_ms), ms(warm_ms));
    (cold_ms > 0.0 && warm_ms <= HALF * cold_ms).then_some(Finding { regime: Regime::ColdCache, because })
}

/// Of the server's own mean TTFT; 0 where it told none.
fn share_of_ttft(point: &Point, part_ms: Option<f64>) -> f64 {
    ratio(part_ms.unwrap_or_default(), point.figures.server.ttft_ms.mean().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS};
    use super::super::summarize;
    use super::*;
    use crate::cost_model::Model;
    use crate::record::{Outcome, Phases, Record, Run};

    /// Ten requests of 75 uncached tokens with these phases; five tokens, 20 ms apart.
    fn records(phases: Phases) -> Vec<Record> {
        let request = |i: u32| {
            let at = f64::from(i);
            let first = at + phases.ttft_ms / 1e3;
            let chunks: Vec<(f64, u32)> = (0..5).map(|token| (first + 0.02 * f64::from(token), 1)).collect();
            Record { phases: Some(phases), ..fixture::record(at, &chunks) }
        };
        (0..10).map(request).collect()
    }

    fn found(records: Vec<Record>, model: &Model) -> Vec<Regime> {
        let run = Run { intervals: vec![fixture::interval(10.0, records)], ..Run::default() };
        summarize(&run, GOALS, Some(model)).points[0].findings.iter().map(|finding| finding.regime).collect()
    }

    fn phases(queue_ms: f64, prefill_ms: f64) -> Phases {
        Phases { queue_ms, prefill_ms, ttft_ms: queue_ms + prefill_ms, ..Phases::default() }
    }

    #[test]
    fn saturation_is_queue_or_refusals() {
        let none = Model::default();
        assert_eq!(found(records(phases(60.0, 40.0)), &none), [Regime::SchedulerSaturation]);
        assert_eq!(found(records(phases(40.0, 60.0)), &none), []);
        let mut refused = records(phases(0.0, 60.0));
        refused[3].outcome = Outcome::Refused { retry_after_s: None };
        assert_eq!(found(refused, &none), [Regime::SchedulerSaturation]);
    }

    #[test]
    fn prefill_is_compute_or_contention() {
        // 75 tokens at 1,000 a second are 75 ms.
        let model = Model { prefill_tokens_per_s: Some(1000.0), ..Model::default() };
        assert_eq!(found(records(phases(10.0, 100.0)), &model), [Regime::ComputeBoundPrefill]);
        assert_eq!(found(records(phases(10.0, 200.0)), &model), [Regime::ContendedPrefill]);
        assert_eq!(found(records(phases(90.0, 80.0)), &model), [Regime::SchedulerSaturation]);
    }

    /// The nodes' own fit says how fast they are, and nothing of compute or bandwidth.
    #[test]
    fn a_cost_model_is_not_the_hardware() {
        let cost = crate::cost_model::StepCost { base_ms: 0.0, token_ms: 1.0, ..Default::default() };
        let model = Model { prefill_cost: Some(cost), ..Model::default() };
        assert_eq!(found(records(phases(10.0, 100.0)), &model), [Regime::PrefillItself]);
        assert_eq!(found(records(phases(10.0, 200.0)), &model), [Regime::ContendedPrefill]);
        let run = Run { intervals: vec![fixture::interval(10.0, records(phases(10.0, 100.0)))], ..Run::default() };
        let because = &summarize(&run, GOALS, Some(&model)).points[0].findings[0].because;
        assert!(because.ends_with("75.0 ms were predicted, by the nodes' own cost model"), "{because}");
    }

    #[test]
    fn decode_is_bandwidth_when_the_bytes_say_so() {
        // 20 ms a step are 200 MB at 10 GB/s.
        let model =
            |weight_bytes| Model { weight_bytes: Some(weight_bytes), memory_gb_per_s: Some(10.0), ..Model::default() };
        assert_eq!(found(records(phases(1.0, 1.0)), &model(1.5e8))[1..], [Regime::BandwidthBoundDecode]);
        assert_eq!(found(records(phases(0.0, 1.0)), &model(0.9e8)), []);
        let cost = |base_ms, token_ms| Some(crate::cost_model::StepCost { base_ms, token_ms, ..Default::default() });
        let by_cost = |cost| Model { decode_cost: cost, ..Model::default() };
        assert_eq!(found(records(phases(0.0, 1.0)), &by_cost(cost(15.0, 1.0))), [Regime::StepFixedCost]);
        assert_eq!(found(records(phases(0.0, 1.0)), &by_cost(cost(1.0, 15.0))), []);
    }

    #[test]
    fn transfers_show_when_the_gap_is_theirs() {
        let handoff = |transfer_exposed_ms, handoff_gap_ms| {
            records(Phases { transfer_exposed_ms, handoff_gap_ms, kv_bytes: 1, ..phases(0.0, 1.0) })
        };
        let none = Model::default();
        assert_eq!(found(handoff(50.0, 90.0), &none), [Regime::TransferExposed]);
        assert_eq!(found(handoff(40.0, 90.0), &none), []);
        // 50 ms are less than three TPOTs of 20.
        assert_eq!(found(handoff(40.0, 50.0), &none), []);
    }

    #[test]
    fn each_regime_is_said_once_for_a_row() {
        let summary = summarize(&fixture::sample_run(), GOALS, Some(&fixture::model()));
        let groups = grouped(&summary.points);
        let said: Vec<(Regime, String)> = groups
            .iter()
            .filter(|group| group.point.key.row == "short chat" && group.point.key.endpoint == 0)
            .map(|group| (group.finding.regime, group.span()))
            .collect();
        let want = [
            (Regime::ComputeBoundPrefill, "2/s … 8/s".to_owned()),
            (Regime::BandwidthBoundDecode, "2/s … 16/s".to_owned()),
            (Regime::SchedulerSaturation, "16/s".to_owned()),
        ];
        assert_eq!(said, want);
    }

    #[test]
    fn a_cold_cache_needs_a_warm_twin() {
        let half = |warm, ttft_ms| {
            let mut interval = fixture::interval(10.0, records(phases(0.0, ttft_ms)));
            interval.warm = warm;
            interval
        };
        let run = Run { intervals: vec![half(false, 100.0), half(true, 45.0)], ..Run::default() };
        let points = summarize(&run, GOALS, None).points;
        assert_eq!(points[0].findings[0].because, "TTFT p50 is 100 ms cold and 45.0 ms warm");
        assert_eq!((points[0].findings[0].regime, points[1].findings.len()), (Regime::ColdCache, 0));
        let run = Run { intervals: vec![half(false, 100.0), half(true, 60.0)], ..Run::default() };
        assert!(summarize(&run, GOALS, None).points.iter().all(|point| point.findings.is_empty()));
    }
}
