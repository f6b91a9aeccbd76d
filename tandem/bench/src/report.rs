//! What a benchmark says (pure): a [`Run`] becomes a [`Summary`], and a summary becomes text, JSON, CSV and a page.
//!
//! A **point** is one workload row at one load on one endpoint, cold or warm: what can be compared. Its intervals are
//! the repeats.
//!
//! - [`metric`]: the few numbers that are compared, each with its interval; [`compare`] does so, [`curve`] finds the
//!   knee of goodput.
//! - [`model`]: what the hardware allows; [`regime`] concludes what bounds a point.
//! - [`text`], [`json`], [`csv`], [`html`] write; [`plot`] draws for the page.

pub mod compare;
pub mod csv;
pub mod curve;
#[cfg(test)]
pub mod fixture;
pub mod html;
pub mod json;
mod markup;
pub mod metric;
pub mod model;
mod number;
pub mod plot;
pub mod regime;
pub mod text;
pub mod timeline;

pub use csv::csv;
pub use html::html;
pub use json::json;
pub use text::text;

use compare::Comparison;
use curve::Curve;
use metric::Metric;
use model::Prediction;
use regime::Finding;
use timeline::Timeline;

use super::cost_model::Model;
use super::record::{Interval, Objectives, Record, Run, RunInfo};
use super::stats::attribution::{Attribution, attribute};
use super::stats::confidence::Estimate;
use super::stats::figures::Figures;

/// The generator's own 99th percentile of lateness that puts latencies in doubt, as a share of the median TTFT …
const LAG_SHARE: f64 = 0.05;
/// … and in milliseconds: below it nobody minds.
const LAG_FLOOR_MS: f64 = 1.0;
/// Below so many completed requests the 99th percentile is the worst one or two.
const ENOUGH_FOR_P99: usize = 100;
/// A share of unfinished requests that makes the latencies too good: the slowest are missing.
const UNFINISHED_SHARE: f64 = 0.01;

/// Everything a report says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub info: RunInfo,
    pub objectives: Option<Objectives>,
    /// What predictions for the first endpoint rest on.
    pub model: Option<Model>,
    /// By row in the order of the run, then cold before warm, by load, by endpoint.
    pub points: Vec<Point>,
    /// All points of each endpoint together.
    pub totals: Vec<(u8, Figures)>,
    /// One for each row, endpoint and warmth that was measured at two rates or more.
    pub curves: Vec<Curve>,
    /// Endpoint 1 beside endpoint 0, and warm beside cold.
    pub comparisons: Vec<Comparison>,
    /// What a reader must know before believing the numbers.
    pub warnings: Vec<String>,
}

/// What makes intervals comparable.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub row: String,
    pub endpoint: u8,
    pub load: Load,
    pub warm: bool,
}

/// How much was asked of the server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Requests a second, in an open loop.
    Rate(f64),
    /// Requests at a time, in a closed loop.
    Concurrency(u32),
    /// As a trace said.
    Given,
}

/// One workload row at one load.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub key: Key,
    /// Of all repeats together.
    pub figures: Figures,
    /// Each by itself, in the order of the run.
    pub repeats: Vec<(u32, Figures)>,
    /// Only those metrics for which there was enough to say.
    pub estimates: Vec<(Metric, Estimate)>,
    /// Empty when the server told no phases.
    pub attribution: Vec<Attribution>,
    /// None without a model.
    pub prediction: Option<Prediction>,
    pub findings: Vec<Finding>,
    pub timeline: Timeline,
}

/// The summary of a run. `hardware`: the user's facts; what nodes said of themselves is in the run.
pub fn summarize(run: &Run, objectives: Objectives, hardware: Option<&Model>) -> Summary {
    let groups = groups(&run.intervals);
    let model_of = |endpoint: u8| Model::of(hardware, run.info.models.get(usize::from(endpoint)));
    let of_group = |(key, intervals): &(Key, Vec<&Interval>)| {
        let nodes = run.info.nodes.get(usize::from(key.endpoint)).map(Vec::as_slice).unwrap_or_default();
        let mut point = point(key, intervals, objectives, run.info.seed);
        point.figures.balance = std::mem::take(&mut point.figures.balance).with_idle(nodes);
        point.prediction = model_of(key.endpoint).map(|model| model.predict(intervals, &point.figures));
        point
    };
    let mut points: Vec<Point> = groups.iter().map(of_group).collect();
    regime::conclude(&mut points);
    let mut endpoints: Vec<u8> = run.intervals.iter().map(|interval| interval.endpoint).collect();
    endpoints.sort_unstable();
    endpoints.dedup();
    let of_endpoint = |endpoint: u8| -> Vec<&Interval> {
        run.intervals.iter().filter(|interval| interval.endpoint == endpoint).collect()
    };
    Summary {
        info: run.info.clone(),
        objectives: Some(objectives),
        model: model_of(0),
        totals: endpoints.into_iter().map(|one| (one, Figures::of(&of_endpoint(one), objectives))).collect(),
        curves: curve::curves(&points),
        comparisons: compare::comparisons(&points, run.info.seed),
        warnings: warnings(run, &points),
        points,
    }
}

/// Without what needs to know the server.
fn point(key: &Key, intervals: &[&Interval], objectives: Objectives, seed: u64) -> Point {
    let figures = Figures::of(intervals, objectives);
    let records: Vec<&Record> = intervals.iter().flat_map(|interval| interval.measured()).collect();
    let repeats: Vec<(u32, Figures)> =
        intervals.iter().map(|interval| (interval.repeat, Figures::of(&[interval], objectives))).collect();
    Point {
        key: key.clone(),
        estimates: metric::estimates(&figures, &repeats, seed),
        attribution: attribute(&records, objectives),
        prediction: None,
        findings: Vec::new(),
        timeline: Timeline::of(&records, &figures, objectives),
        figures,
        repeats,
    }
}

/// Intervals by what makes them comparable.
fn groups(intervals: &[Interval]) -> Vec<(Key, Vec<&Interval>)> {
    let mut groups: Vec<(Key, Vec<&Interval>)> = Vec::new();
    let mut rows: Vec<&str> = Vec::new();
    for interval in intervals {
        if !rows.contains(&interval.row.as_str()) {
            rows.push(&interval.row);
        }
        let key = Key::of(interval);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, members)) => members.push(interval),
            None => groups.push((key, vec![interval])),
        }
    }
    let place = |key: &Key| rows.iter().position(|row| *row == key.row);
    groups.sort_by(|(a, _), (b, _)| {
        let order = (place(a), a.warm).cmp(&(place(b), b.warm));
        order.then(a.load.number().total_cmp(&b.load.number())).then(a.endpoint.cmp(&b.endpoint))
    });
    groups
}

impl Key {
    fn of(interval: &Interval) -> Self {
        let load = match (interval.rate, interval.concurrency) {
            (Some(rate), _) if rate.is_finite() => Load::Rate(rate),
            (_, Some(concurrency)) => Load::Concurrency(concurrency),
            _ => Load::Given,
        };
        Self { row: interval.row.clone(), endpoint: interval.endpoint, load, warm: interval.warm }
    }
}

impl Load {
    /// What it is sorted by.
    pub fn number(self) -> f64 {
        match self {
            Self::Rate(rate) => rate,
            Self::Concurrency(concurrency) => f64::from(concurrency),
            Self::Given => 0.0,
        }
    }

    /// Requests a second.
    pub fn rate(self) -> Option<f64> {
        if let Self::Rate(rate) = self { Some(rate) } else { None }
    }

    /// Requests at a time.
    pub fn concurrency(self) -> Option<u32> {
        if let Self::Concurrency(concurrency) = self { Some(concurrency) } else { None }
    }

    /// Short, with its unit.
    pub fn label(self) -> String {
        match self {
            Self::Rate(rate) => format!("{}/s", number::brief(rate)),
            Self::Concurrency(concurrency) => format!("× {concurrency}"),
            Self::Given => "trace".to_owned(),
        }
    }
}

/// "A" or "B", as the tables call them.
pub fn endpoint_letter(endpoint: u8) -> char {
    char::from(b'A' + endpoint.min(25))
}

/// "cold" or "warm".
pub fn warmth(warm: bool) -> &'static str {
    if warm { "warm" } else { "cold" }
}

fn warnings(run: &Run, points: &[Point]) -> Vec<String> {
    let info = &run.info;
    let mut warnings = Vec::new();
    for point in points {
        let (name, of) = (point.name(), &point.figures);
        let ttft_ms = of.ttft_ms.median().unwrap_or(f64::INFINITY);
        if let Some(lag_ms) = of.lag_ms.percentile(0.99)
            && lag_ms > (LAG_SHARE * ttft_ms).max(LAG_FLOOR_MS)
        {
            let lag = number::ms(lag_ms);
            warnings.push(format!("{name}: the generator itself sent up to {lag} ms late (p99); TTFT contains that"));
        }
        if of.completed == 0 {
            warnings.push(format!("{name}: no request was answered"));
        } else if of.completed < ENOUGH_FOR_P99 {
            warnings.push(format!("{name}: p99 of {} requests is the worst of them", of.completed));
        }
        if of.unfinished as f64 > UNFINISHED_SHARE * of.requests as f64 {
            let (unfinished, requests) = (of.unfinished, of.requests);
            warnings.push(format!(
                "{name}: {unfinished} of {requests} requests did not end in time and are missing in the latencies"
            ));
        }
    }
    if info.own_lag_p99_ms.is_finite() && info.own_lag_p99_ms > LAG_FLOOR_MS && warnings.is_empty() {
        warnings.push(format!("the generator itself sent up to {} ms late (p99)", number::ms(info.own_lag_p99_ms)));
    }
    for interval in &run.intervals {
        let Key { row, endpoint, load, .. } = Key::of(interval);
        let (load, letter, repeat) = (load.label(), endpoint_letter(endpoint), interval.repeat + 1);
        warnings.extend(interval.notes.iter().map(|note| format!("{row} {load} {letter}, repeat {repeat}: {note}")));
    }
    warnings.extend(info.notes.iter().cloned());
    warnings
}

impl Point {
    /// Row, load, endpoint and warmth in a few words.
    pub fn name(&self) -> String {
        let Key { row, endpoint, load, warm } = &self.key;
        format!("{row} {} {} {}", load.label(), endpoint_letter(*endpoint), warmth(*warm))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::cost_model::StepCost;
    use super::fixture::{GOALS, any_run, sample_run};
    use super::*;

    #[test]
    fn intervals_become_points() {
        let summary = summarize(&sample_run(), GOALS, None);
        let names: Vec<String> = summary.points.iter().map(Point::name).collect();
        assert_eq!(
            names[..4],
            ["short chat 2/s A cold", "short chat 2/s B cold", "short chat 4/s A cold", "short chat 4/s B cold"]
        );
        assert!(summary.points.iter().all(|point| point.repeats.len() == 3 || point.key.row != "short chat"));
        let total: usize = summary.totals.iter().map(|(_, of)| of.requests).sum();
        assert_eq!(total, summary.points.iter().map(|point| point.figures.requests).sum::<usize>());
    }

    #[test]
    fn doubts_are_said() {
        let mut run = sample_run();
        for record in &mut run.intervals[0].records {
            record.sent = record.intended + 0.5;
        }
        let summary = summarize(&run, GOALS, None);
        assert!(
            summary.warnings[0].contains("short chat 2/s A cold: the generator itself sent up to 500 ms late"),
            "{:?}",
            summary.warnings
        );
        run.intervals.iter_mut().for_each(|interval| interval.records.clear());
        let summary = summarize(&run, GOALS, None);
        assert!(summary.warnings.iter().all(|warning| warning.ends_with("no request was answered")));
    }

    #[test]
    fn what_intervals_and_the_run_note_is_said() {
        let mut run = sample_run();
        run.intervals[1].notes.push("no answer".into());
        run.info.notes.push("too low".into());
        let warnings = summarize(&run, GOALS, None).warnings;
        let last: Vec<&str> = warnings.iter().rev().take(2).map(String::as_str).collect();
        assert_eq!(last, ["too low", "short chat 2/s B, repeat 1: no answer"]);
    }

    #[test]
    fn each_endpoint_is_forecast_by_its_own_nodes() {
        let mut run = sample_run();
        let slow = StepCost { base_ms: 8.0, token_ms: 0.4, ..Default::default() };
        let told = |factor: f64| Model {
            decode_cost: Some(StepCost { base_ms: slow.base_ms * factor, ..slow }),
            ..Model::default()
        };
        run.info.models = vec![told(1.0), told(10.0)];
        let points = summarize(&run, GOALS, None).points;
        let predicted = |place: usize| points[place].prediction.and_then(|of| of.tpot).map(|of| of.predicted_ms);
        assert!(predicted(1) > predicted(0).map(|ms| ms * 5.0) && predicted(0).is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
        /// Whatever a run holds, every report can be written and no number in it is NaN or infinite.
        #[test]
        fn every_run_has_its_reports(run in any_run(), with_model: bool) {
            let model = fixture::model();
            let summary = summarize(&run, GOALS, with_model.then_some(&model));
            let value = json(&summary);
            for written in [text(&summary), csv(&summary), html(&summary), value.to_string()] {
                let lower = written.to_lowercase();
                let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
                prop_assert!(words.clone().all(|word| word != "nan" && word != "inf" && word != "infinity"), "{written}");
            }
            prop_assert_eq!(markup::unbalanced(&html(&summary)), None);
        }
    }
}
