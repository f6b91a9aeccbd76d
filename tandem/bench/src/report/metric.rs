//! The few numbers by which points are compared, each with how sure it is (pure).
use crate::stats::confidence::{Estimate, Samples, over_repeats, over_requests, share};
use crate::stats::figures::Figures;
use crate::stats::ratio;

/// A number that is worth comparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    TtftMedian,
    TtftP99,
    TpotMedian,
    ItlP99,
    E2eMedian,
    OutputThroughput,
    Goodput,
}

impl Metric {
    /// All of them, medians first.
    pub const ALL: [Self; 7] = [
        Self::TtftMedian,
        Self::TpotMedian,
        Self::E2eMedian,
        Self::TtftP99,
        Self::ItlP99,
        Self::OutputThroughput,
        Self::Goodput,
    ];

    /// For tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::TtftMedian => "TTFT p50",
            Self::TtftP99 => "TTFT p99",
            Self::TpotMedian => "TPOT p50",
            Self::ItlP99 => "ITL p99",
            Self::E2eMedian => "E2E p50",
            Self::OutputThroughput => "output",
            Self::Goodput => "goodput",
        }
    }

    /// For tables.
    pub fn unit(self) -> &'static str {
        match self {
            Self::OutputThroughput => "tokens/s",
            Self::Goodput => "requests/s",
            _ => "ms",
        }
    }

    /// For JSON, in vLLM's words.
    pub fn key(self) -> &'static str {
        match self {
            Self::TtftMedian => "median_ttft_ms",
            Self::TtftP99 => "p99_ttft_ms",
            Self::TpotMedian => "median_tpot_ms",
            Self::ItlP99 => "p99_itl_ms",
            Self::E2eMedian => "median_e2el_ms",
            Self::OutputThroughput => "output_throughput",
            Self::Goodput => "request_goodput",
        }
    }

    /// Latencies are; throughputs are not.
    pub fn less_is_better(self) -> bool {
        !matches!(self, Self::OutputThroughput | Self::Goodput)
    }

    /// None where nothing was answered.
    pub fn of(self, figures: &Figures) -> Option<f64> {
        match self {
            Self::OutputThroughput => (figures.completed > 0).then(|| figures.output_throughput()),
            Self::Goodput => (figures.requests > 0).then(|| figures.goodput()),
            _ => self.samples(figures).and_then(|of| crate::stats::percentile(of.sorted, of.percentile)),
        }
    }

    /// What a percentile is taken of; None for rates, which have no samples.
    pub fn samples(self, figures: &Figures) -> Option<Samples<'_>> {
        let (of, percentile) = match self {
            Self::TtftMedian => (&figures.ttft_ms, 0.5),
            Self::TtftP99 => (&figures.ttft_ms, 0.99),
            Self::TpotMedian => (&figures.tpot_ms, 0.5),
            Self::ItlP99 => (&figures.itl_ms, 0.99),
            Self::E2eMedian => (&figures.e2e_ms, 0.5),
            Self::OutputThroughput | Self::Goodput => return None,
        };
        Some(Samples { sorted: of.sorted(), percentile })
    }
}

/// What can be said: over repeats where there are enough of them, else over requests.
pub fn estimates(figures: &Figures, repeats: &[(u32, Figures)], seed: u64) -> Vec<(Metric, Estimate)> {
    let estimate = |metric: Metric| {
        let each: Option<Vec<f64>> = repeats.iter().map(|(_, of)| metric.of(of)).collect();
        let estimate = each.and_then(|each| over_repeats(&each));
        let estimate = estimate.or_else(|| match metric {
            Metric::Goodput => goodput(figures),
            _ => over_requests(metric.samples(figures)?, seed),
        })?;
        Some((metric, estimate))
    };
    Metric::ALL.into_iter().filter_map(estimate).collect()
}

/// Good requests a second, as far as the share of the good ones tells: when requests came is the generator's doing, not
/// the server's.
fn goodput(figures: &Figures) -> Option<Estimate> {
    let good = share(figures.good, figures.requests)?;
    let rate = figures.goodput();
    // Without a good one the rate of all that were asked.
    let scale = if good.value > 0.0 { rate / good.value } else { ratio(figures.requests as f64, figures.seconds) };
    let of = Estimate { value: rate, low: good.low * scale, high: good.high * scale, ..good };
    of.high.is_finite().then_some(of)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS};
    use super::*;
    use crate::stats::confidence::Basis;

    #[test]
    fn goodput_has_an_interval_without_repeats() {
        let record = |i: u32| {
            let first = f64::from(i) + if i < 2 { 1.0 } else { 0.1 };
            fixture::record(f64::from(i), &[(first, 1), (first + 0.01, 1)])
        };
        let interval = fixture::interval(20.0, (0..20).map(record).collect());
        let figures = Figures::of(&[&interval], GOALS);
        let estimates = estimates(&figures, &[(0, figures.clone())], 1);
        let (_, of) = estimates.iter().find(|(metric, _)| *metric == Metric::Goodput).unwrap();
        // 18 of 20 in 20 s; Wilson's 0.699 … 0.972.
        assert!((of.value - 0.9).abs() < 1e-9 && of.basis == Basis::Requests, "{of:?}");
        assert!((of.low - 0.699).abs() < 2e-3 && (of.high - 0.972).abs() < 2e-3, "{of:?}");
    }
}
