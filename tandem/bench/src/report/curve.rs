//! Rate against latency and goodput (pure): what a sweep measured, in order of rate, and its knee.
use super::number::percent;
use super::{Load, Point};
use crate::stats::confidence::{self, Estimate};
use crate::sweep::{self, GOOD_SHARE, Knee, Measured};

/// One row on one endpoint over its rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub row: String,
    pub endpoint: u8,
    pub warm: bool,
    /// By rate, ascending; at least two.
    pub steps: Vec<Step>,
    pub knee: Knee,
}

/// One rate, all its repeats together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Requests a second offered.
    pub rate: f64,
    pub good_share: f64,
    /// Wilson's, over all requests of the rate.
    pub good_interval: Option<Estimate>,
    /// Good requests a second.
    pub goodput: f64,
    /// Completed requests a second.
    pub throughput: f64,
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p99_ms: Option<f64>,
    pub tpot_p50_ms: Option<f64>,
    pub tpot_p99_ms: Option<f64>,
}

impl Curve {
    /// How sure the share of good requests at `rate` is, for people; empty where nothing was asked.
    pub fn sure(&self, rate: f64) -> String {
        let step = self.steps.iter().find(|step| step.rate == rate);
        step.and_then(|step| step.good_interval).map_or_else(String::new, |of| {
            format!(" ({} % good, {} … {})", percent(of.value), percent(of.low), percent(of.high))
        })
    }
}

/// One for each row, endpoint and warmth with two rates or more. The knee is judged by repeats, as the search does.
pub fn curves(points: &[Point]) -> Vec<Curve> {
    let mut curves: Vec<(Curve, Vec<Measured>)> = Vec::new();
    for point in points {
        let Load::Rate(rate) = point.key.load else { continue };
        let step = step(rate, point);
        let asked = point.repeats.iter().filter(|(_, of)| of.requests > 0);
        let measured = asked.map(|(_, of)| Measured { rate, good_share: of.good_share() });
        let (row, endpoint, warm) = (&point.key.row, point.key.endpoint, point.key.warm);
        let same = |curve: &Curve| curve.row == *row && curve.endpoint == endpoint && curve.warm == warm;
        match curves.iter_mut().find(|(curve, _)| same(curve)) {
            Some((curve, all)) => {
                curve.steps.push(step);
                all.extend(measured);
            }
            None => {
                let curve = Curve { row: row.clone(), endpoint, warm, steps: vec![step], knee: Knee::default() };
                curves.push((curve, measured.collect()));
            }
        }
    }
    let several = curves.into_iter().filter(|(curve, _)| curve.steps.len() > 1);
    several.map(|(curve, measured)| Curve { knee: sweep::knee(&measured, GOOD_SHARE), ..curve }).collect()
}

fn step(rate: f64, point: &Point) -> Step {
    let of = &point.figures;
    Step {
        rate,
        good_share: of.good_share(),
        good_interval: confidence::share(of.good, of.requests),
        goodput: of.goodput(),
        throughput: of.request_throughput(),
        ttft_p50_ms: of.ttft_ms.median(),
        ttft_p99_ms: of.ttft_ms.percentile(0.99),
        tpot_p50_ms: of.tpot_ms.median(),
        tpot_p99_ms: of.tpot_ms.percentile(0.99),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{GOALS, sample_run};
    use super::super::summarize;
    use super::*;

    #[test]
    fn a_sweep_has_its_knee() {
        let summary = summarize(&sample_run(), GOALS, None);
        let curve = summary.curves.iter().find(|curve| curve.row == "short chat" && curve.endpoint == 0).unwrap();
        assert_eq!(curve.steps.iter().map(|step| step.rate).collect::<Vec<_>>(), [2.0, 4.0, 8.0, 16.0]);
        // The sample's server answers the first three rates well and drowns at the fourth.
        assert_eq!(curve.knee, Knee { holds: Some(8.0), breaks: Some(16.0) });
        assert!(summary.curves.iter().all(|curve| curve.steps.windows(2).all(|pair| pair[0].rate < pair[1].rate)));
    }
}
