//! Statistics of a benchmark (pure): distributions here; what one request saw in [`request`], what an interval did in
//! [`figures`], how much came in how long in [`served`], where TTFT went in [`attribution`], how evenly nodes were used
//! in [`balance`], how sure a number is in [`confidence`].
//!
//! Percentiles are exact: all samples are kept and sorted, and the percentile p of n samples is taken at rank p · (n −
//! 1), linearly between the two samples around it (Hyndman and Fan's type 7, the default of numpy and so of vLLM's
//! benchmark).

pub mod attribution;
pub mod balance;
pub mod confidence;
pub mod figures;
pub mod request;
pub mod served;

/// Samples of one quantity, in its unit. Values that are not finite are left out: they say nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    sorted: Vec<f64>,
    mean: f64,
    deviation: f64,
}

impl Distribution {
    /// Of all finite `samples`.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = samples.into_iter().filter(|sample| sample.is_finite()).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let mean = mean(&sorted).unwrap_or_default();
        let square = sorted.iter().map(|sample| (sample - mean).powi(2)).sum::<f64>();
        let deviation = if sorted.is_empty() { 0.0 } else { (square / sorted.len() as f64).sqrt() };
        Self { sorted, mean, deviation }
    }

    /// How many samples there are.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// The samples, ascending.
    pub fn sorted(&self) -> &[f64] {
        &self.sorted
    }

    /// None without samples, like all that follow.
    pub fn mean(&self) -> Option<f64> {
        (!self.sorted.is_empty()).then_some(self.mean)
    }

    /// Standard deviation of the samples themselves (divided by n, as numpy does).
    pub fn deviation(&self) -> Option<f64> {
        (!self.sorted.is_empty() && self.deviation.is_finite()).then_some(self.deviation)
    }

    /// `p` in 0 ..= 1.
    pub fn percentile(&self, p: f64) -> Option<f64> {
        percentile(&self.sorted, p)
    }

    /// The 50th percentile.
    pub fn median(&self) -> Option<f64> {
        self.percentile(0.5)
    }

    /// The largest sample.
    pub fn max(&self) -> Option<f64> {
        self.sorted.last().copied()
    }

    /// The cumulative distribution as at most `most` points (value, share of samples ≤ value), evenly spaced in rank
    /// but with the tail whole: the last hundredth gets a fifth of the points.
    pub fn cumulative(&self, most: usize) -> Vec<(f64, f64)> {
        let n = self.sorted.len();
        let point = |index: usize| (self.sorted[index], (index + 1) as f64 / n as f64);
        if n <= most.max(2) {
            return (0..n).map(point).collect();
        }
        let tail = (most / 5).clamp(1, n);
        let body = (most - tail).max(1);
        let knee = n - (n / 100).max(tail).min(n);
        let mut ranks: Vec<usize> = (0..body).map(|step| knee * step / body).collect();
        ranks.extend((0..tail).map(|step| knee + (n - 1 - knee) * (step + 1) / tail));
        ranks.dedup();
        ranks.into_iter().map(point).collect()
    }
}

/// The percentile `p` (0 ..= 1) of ascending samples; None without samples.
pub fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    debug_assert!((0.0..=1.0).contains(&p), "a share, not a percentage: {p}");
    let last = sorted.len().checked_sub(1)?;
    let rank = p.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[rank.floor() as usize], sorted[(rank.ceil() as usize).min(last)]);
    Some(below + (above - below) * rank.fract())
}

/// None without values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// `part / whole`, and 0 when there is no whole: no rate or share in a report is ever NaN or infinite.
pub fn ratio(part: f64, whole: f64) -> f64 {
    let ratio = part / whole;
    if whole > 0.0 && ratio.is_finite() { ratio } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn by_hand() {
        let of = Distribution::of([4.0, 1.0, 3.0, 2.0, f64::NAN, f64::INFINITY]);
        assert_eq!((of.count(), of.mean(), of.median(), of.max()), (4, Some(2.5), Some(2.5), Some(4.0)));
        // Rank 0.9 × 3 = 2.7: between 3 and 4.
        assert!((of.percentile(0.9).unwrap() - 3.7).abs() < 1e-12);
        // Squares 2.25 + 0.25 + 0.25 + 2.25, over 4.
        assert!((of.deviation().unwrap() - 1.25_f64.sqrt()).abs() < 1e-12);
        assert_eq!(of.cumulative(10), [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]);
    }

    #[test]
    fn nothing_is_none_and_one_is_itself() {
        let none = Distribution::of([]);
        assert_eq!((none.mean(), none.median(), none.max(), none.deviation()), (None, None, None, None));
        assert!(none.cumulative(5).is_empty());
        let one = Distribution::of([7.0]);
        assert_eq!((one.percentile(0.0), one.percentile(0.99), one.deviation()), (Some(7.0), Some(7.0), Some(0.0)));
        assert_eq!((ratio(1.0, 0.0), ratio(f64::INFINITY, 2.0), ratio(1.0, 4.0)), (0.0, 0.0, 0.25));
    }

    proptest! {
        /// Against the definition: at a whole rank the percentile is the sample there, between two ranks it is between
        /// them.
        #[test]
        fn percentiles_agree_with_sorting(samples in prop::collection::vec(-1e6..1e6_f64, 1..200), p in 0.0..=1.0_f64) {
            let of = Distribution::of(samples.iter().copied());
            let mut sorted = samples.clone();
            sorted.sort_by(f64::total_cmp);
            let rank = p * (sorted.len() - 1) as f64;
            let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
            let got = of.percentile(p).unwrap();
            prop_assert!((low..=high).contains(&got) || (got - low).abs() < 1e-6);
            for (rank, sample) in sorted.iter().enumerate().skip(1) {
                let at = of.percentile(rank as f64 / (sorted.len() - 1) as f64).unwrap();
                prop_assert!((at - sample).abs() <= 1e-6 * (1.0 + sorted[sorted.len() - 1] - sorted[0]));
            }
        }

        #[test]
        fn the_cumulative_distribution_rises_to_one(samples in prop::collection::vec(-1e3..1e3_f64, 1..900), most in 2..60_usize) {
            let of = Distribution::of(samples);
            let points = of.cumulative(most);
            prop_assert!(points.len() <= most.max(2));
            prop_assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 < pair[1].1));
            let last = points.last().unwrap();
            prop_assert_eq!(Some(last.0), of.max());
            prop_assert!((last.1 - 1.0).abs() < 1e-12);
        }
    }
}
