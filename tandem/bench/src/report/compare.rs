//! One point beside another (pure): endpoint B beside A, warm beside cold, everything else equal.
//!
//! A ratio is other / base. It is significant when its 95 % interval leaves out 1. Seven metrics are compared at a
//! time, so that one of twenty comparisons of equal servers will look significant: read the interval, not the star.
use super::metric::Metric;
use super::{Key, Load, Point};
use crate::stats::confidence::{Estimate, ratio_over_repeats, ratio_over_requests};

/// What differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Endpoint 0 is the base, endpoint 1 the other.
    Endpoints,
    /// Cold is the base, warm the other.
    Warmth,
}

impl Kind {
    /// The names of base and other.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Endpoints => ("A", "B"),
            Self::Warmth => ("cold", "warm"),
        }
    }
}

/// Two points and their ratios.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub kind: Kind,
    pub row: String,
    pub load: Load,
    /// Of the base.
    pub endpoint: u8,
    /// Of the base.
    pub warm: bool,
    pub lines: Vec<Line>,
}

/// One metric of both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    pub metric: Metric,
    pub base: f64,
    pub other: f64,
    /// other / base.
    pub ratio: f64,
    /// None: too little was measured to say.
    pub interval: Option<Estimate>,
}

impl Line {
    /// Whether the difference is more than noise.
    pub fn is_significant(&self) -> bool {
        self.interval.is_some_and(|interval| interval.excludes(1.0))
    }

    /// Whether the other is better; None when that cannot be told from noise.
    pub fn other_is_better(&self) -> Option<bool> {
        self.is_significant().then_some((self.ratio < 1.0) == self.metric.less_is_better())
    }
}

/// All pairs of points that differ in one thing.
pub fn comparisons(points: &[Point], seed: u64) -> Vec<Comparison> {
    let pairs = points.iter().flat_map(|base| {
        let endpoints = (base.key.endpoint == 0).then(|| Key { endpoint: 1, ..base.key.clone() });
        let warmth = (!base.key.warm).then(|| Key { warm: true, ..base.key.clone() });
        [(Kind::Endpoints, endpoints), (Kind::Warmth, warmth)].map(|(kind, key)| (kind, base, key))
    });
    let found = pairs.filter_map(|(kind, base, key)| {
        let other = points.iter().find(|point| Some(&point.key) == key.as_ref())?;
        let lines: Vec<Line> = Metric::ALL.into_iter().filter_map(|metric| line(metric, base, other, seed)).collect();
        let Key { row, load, endpoint, warm } = base.key.clone();
        (!lines.is_empty()).then_some(Comparison { kind, row, load, endpoint, warm, lines })
    });
    let mut found: Vec<Comparison> = found.collect();
    found.sort_by_key(|comparison| comparison.kind == Kind::Warmth);
    found
}

fn line(metric: Metric, base: &Point, other: &Point, seed: u64) -> Option<Line> {
    let (of_base, of_other) = (metric.of(&base.figures)?, metric.of(&other.figures)?);
    let overall = of_other / of_base;
    if !overall.is_finite() || overall <= 0.0 {
        return None;
    }
    let interval = ratio_over_repeats(&pairs(metric, base, other))
        .or_else(|| ratio_over_requests(metric.samples(&base.figures)?, metric.samples(&other.figures)?, seed));
    let ratio = interval.map_or(overall, |interval| interval.value);
    Some(Line { metric, base: of_base, other: of_other, ratio, interval })
}

/// Repeats of the same number, which ran in turn: what drifted over the run, drifted for both.
fn pairs(metric: Metric, base: &Point, other: &Point) -> Vec<(f64, f64)> {
    let pair = |(repeat, figures): &(u32, _)| {
        let (_, beside) = other.repeats.iter().find(|(number, _)| number == repeat)?;
        Some((metric.of(figures)?, metric.of(beside)?))
    };
    base.repeats.iter().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS};
    use super::super::summarize;
    use super::*;
    use crate::record::Run;
    use crate::stats::confidence::Basis;

    /// 20 requests with a TTFT around `ttft_ms` and three tokens 10 ms apart.
    fn interval(endpoint: u8, repeat: u32, ttft_ms: f64) -> crate::record::Interval {
        let request = |i: u32| {
            let at = f64::from(i);
            let first = at + (ttft_ms + f64::from(i % 5) - 2.0) / 1e3;
            fixture::record(at, &[(first, 1), (first + 0.01, 1), (first + 0.02, 1)])
        };
        let mut interval = fixture::interval(20.0, (0..20).map(request).collect());
        (interval.endpoint, interval.repeat) = (endpoint, repeat);
        interval
    }

    fn ttft(intervals: Vec<crate::record::Interval>) -> Line {
        let summary = summarize(&Run { intervals, ..Run::default() }, GOALS, None);
        let [comparison] = &summary.comparisons[..] else { panic!("{:?}", summary.comparisons) };
        assert_eq!(comparison.kind.names(), ("A", "B"));
        *comparison.lines.iter().find(|line| line.metric == Metric::TtftMedian).unwrap()
    }

    #[test]
    fn repeats_are_paired() {
        // The machine slows down over the run, for both alike: B takes 1.5 times as long in every pair.
        let drifting = |endpoint, factor: f64| {
            (0..3).map(move |repeat| interval(endpoint, repeat, factor * (100.0 + 100.0 * f64::from(repeat))))
        };
        let line = ttft(drifting(0, 1.0).chain(drifting(1, 1.5)).collect());
        assert!((line.ratio - 1.5).abs() < 1e-9, "{line:?}");
        assert_eq!((line.interval.unwrap().basis, line.other_is_better()), (Basis::Repeats, Some(false)));
    }

    #[test]
    fn noise_is_not_significant() {
        let noisy = (0..3).flat_map(|repeat| {
            let [a, b] = [[100.0, 130.0], [120.0, 95.0], [110.0, 112.0]][repeat as usize];
            [interval(0, repeat, a), interval(1, repeat, b)]
        });
        let line = ttft(noisy.collect());
        assert!(!line.is_significant() && line.other_is_better().is_none(), "{line:?}");
    }

    #[test]
    fn without_repeats_the_requests_speak() {
        let line = ttft(vec![interval(0, 0, 100.0), interval(1, 0, 50.0)]);
        assert_eq!((line.interval.unwrap().basis, line.other_is_better()), (Basis::Requests, Some(true)));
        assert!((line.ratio - 0.5).abs() < 0.01);
    }
}
