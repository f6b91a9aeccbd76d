//! How sure a number is (pure): 95 % intervals, of a number itself and of the ratio of two.
//!
//! With repeats, each gives one value, and the interval is Student's t over these values: repeats are independent,
//! requests of one run are not (they queue behind each other). Without repeats a seeded bootstrap over the requests is
//! all there is; it is said with the interval, because it is too narrow when requests wait for each other. So it is
//! with the share of requests that are good, whose interval is Wilson's.
use super::percentile;

/// Two-sided 95 % quantiles of Student's t for 1 ..= 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Beyond the table: the normal distribution's.
const NORMAL: f64 = 1.960;
/// Fewer repeats than this say little: two give a t of 12.7.
pub const FEWEST_REPEATS: usize = 3;
/// Resamples of a bootstrap.
const RESAMPLES: usize = 1000;
/// Fewer samples than this are not resampled.
const FEWEST_SAMPLES: usize = 10;
/// More samples than this are thinned evenly first: the interval of a percentile does not get better by it, only
/// slower.
const MOST_SAMPLES: usize = 20_000;

/// What an interval rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Student's t over repeated intervals.
    Repeats,
    /// Bootstrap over requests of one interval, or Wilson's interval of a share of them: optimistic.
    Requests,
}

/// A number with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    pub value: f64,
    pub low: f64,
    pub high: f64,
    pub basis: Basis,
}

impl Estimate {
    /// Whether `value` is outside of the interval: for a ratio and 1, a significant difference.
    pub fn excludes(&self, value: f64) -> bool {
        value < self.low || value > self.high
    }
}

/// A percentile of samples, as far as it can be resampled.
#[derive(Clone, Copy, Debug)]
pub struct Samples<'a> {
    /// Ascending.
    pub sorted: &'a [f64],
    /// 0 ..= 1.
    pub percentile: f64,
}

/// A share of requests: Wilson's score interval, which stays within 0 and 1 and says something at either end. None
/// without requests.
pub fn share(part: usize, all: usize) -> Option<Estimate> {
    if all == 0 {
        return None;
    }
    let (n, z2) = (all as f64, NORMAL * NORMAL);
    let value = part.min(all) as f64 / n;
    let middle = (value + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = NORMAL / (1.0 + z2 / n) * (value * (1.0 - value) / n + z2 / (4.0 * n * n)).sqrt();
    let (low, high) = ((middle - half).clamp(0.0, value), (middle + half).clamp(value, 1.0));
    Some(Estimate { value, low, high, basis: Basis::Requests })
}

/// The mean of one value a repeat. None for too few of them, or for values that are not finite.
pub fn over_repeats(values: &[f64]) -> Option<Estimate> {
    if values.len() < FEWEST_REPEATS {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let t = STUDENT.get(values.len() - 2).copied().unwrap_or(NORMAL);
    let half = t * (variance / n).sqrt();
    half.is_finite().then_some(Estimate { value: mean, low: mean - half, high: mean + half, basis: Basis::Repeats })
}

/// The ratio of paired repeats, other to base: Student's t over the logarithms, so that a doubling and a halving weigh
/// the same.
pub fn ratio_over_repeats(pairs: &[(f64, f64)]) -> Option<Estimate> {
    let logarithms: Vec<f64> = pairs.iter().map(|(base, other)| (other / base).ln()).collect();
    let of = over_repeats(&logarithms)?;
    let [value, low, high] = [of.value, of.low, of.high].map(f64::exp);
    high.is_finite().then_some(Estimate { value, low, high, basis: of.basis })
}

/// The percentile of `samples`. None for too few of them.
pub fn over_requests(samples: Samples, seed: u64) -> Option<Estimate> {
    let value = percentile(samples.sorted, samples.percentile)?;
    let mut bootstrap = Bootstrap::of(samples, seed)?;
    let drawn = (0..RESAMPLES).map(|_| bootstrap.draw()).collect();
    interval(value, drawn)
}

/// The ratio of two percentiles, other to base. None for too few samples, or a base of 0.
pub fn ratio_over_requests(base: Samples, other: Samples, seed: u64) -> Option<Estimate> {
    let value = percentile(other.sorted, other.percentile)? / percentile(base.sorted, base.percentile)?;
    let mut below = Bootstrap::of(base, seed)?;
    let mut above = Bootstrap::of(other, !seed)?;
    let drawn = (0..RESAMPLES).map(|_| above.draw() / below.draw()).collect();
    interval(value, drawn)
}

fn interval(value: f64, mut drawn: Vec<f64>) -> Option<Estimate> {
    if !value.is_finite() || drawn.iter().any(|drawn| !drawn.is_finite()) {
        return None;
    }
    drawn.sort_unstable_by(f64::total_cmp);
    let (low, high) = (percentile(&drawn, 0.025)?, percentile(&drawn, 0.975)?);
    Some(Estimate { value, low: low.min(value), high: high.max(value), basis: Basis::Requests })
}

/// Draws the percentile of as many samples, taken with replacement.
struct Bootstrap {
    samples: Vec<f64>,
    drawn: Vec<f64>,
    percentile: f64,
    random: SplitMix,
}

impl Bootstrap {
    fn of(of: Samples, seed: u64) -> Option<Self> {
        if of.sorted.len() < FEWEST_SAMPLES {
            return None;
        }
        let samples: Vec<f64> = of.sorted.iter().step_by(of.sorted.len().div_ceil(MOST_SAMPLES)).copied().collect();
        Some(Self { drawn: samples.clone(), samples, percentile: of.percentile, random: SplitMix(seed) })
    }

    /// Selects the two ranks around the percentile: much cheaper than sorting.
    fn draw(&mut self) -> f64 {
        for slot in &mut self.drawn {
            *slot = self.samples[self.random.below(self.samples.len())];
        }
        let rank = self.percentile.clamp(0.0, 1.0) * (self.drawn.len() - 1) as f64;
        let (_, below, after) = self.drawn.select_nth_unstable_by(rank.floor() as usize, f64::total_cmp);
        let below = *below;
        let above = after.iter().copied().min_by(f64::total_cmp).unwrap_or(below);
        below + (above - below) * rank.fract()
    }
}

/// Steele, Lea and Flood's SplitMix64: the same intervals for the same seed, on every machine and with every version.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Lemire's multiplication; its bias is below 2⁻⁴⁰ for the sizes here.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn student_by_hand() {
        // Mean 12, standard deviation 2, 4.303 × 2 / √3 = 4.9687.
        let of = over_repeats(&[10.0, 12.0, 14.0]).unwrap();
        assert!((of.value - 12.0).abs() < 1e-12 && (of.high - 16.9687).abs() < 1e-3 && (of.low - 7.0313).abs() < 1e-3);
        assert_eq!(of.basis, Basis::Repeats);
        assert_eq!(over_repeats(&[10.0, 12.0]), None);
        assert_eq!(over_repeats(&[10.0, f64::NAN, 1.0]), None);
        assert_eq!(over_repeats(&[5.0; 40]).unwrap().low, 5.0);
    }

    #[test]
    fn ratios_of_pairs() {
        let twice = ratio_over_repeats(&[(1.0, 2.0), (10.0, 20.0), (5.0, 10.0)]).unwrap();
        assert!((twice.value - 2.0).abs() < 1e-9 && twice.excludes(1.0));
        let either = ratio_over_repeats(&[(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)]).unwrap();
        assert!((either.value - 1.0).abs() < 1e-9 && !either.excludes(1.0));
        assert_eq!(ratio_over_repeats(&[(0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]), None);
    }

    #[test]
    fn wilson_by_hand() {
        // Brown, Cai and DasGupta's formula by hand for 9 of 10: 0.5958 … 0.9821.
        let of = share(9, 10).unwrap();
        assert!((of.low - 0.5958).abs() < 1e-3 && (of.high - 0.9821).abs() < 1e-3 && of.value == 0.9, "{of:?}");
        let (none, all) = (share(0, 20).unwrap(), share(20, 20).unwrap());
        assert!(none.low == 0.0 && none.high > 0.1 && all.high == 1.0 && all.low < 0.9, "{none:?} {all:?}");
        assert_eq!(share(0, 0), None);
    }

    #[test]
    fn the_bootstrap_is_seeded_and_covers() {
        let sorted: Vec<f64> = (0..1000).map(f64::from).collect();
        let samples = Samples { sorted: &sorted, percentile: 0.5 };
        let of = over_requests(samples, 7).unwrap();
        assert_eq!(Some(of), over_requests(samples, 7));
        // The median's standard error is 1000 / (2 √1000) = 15.8: the interval is some ± 31.
        assert!((of.value - 499.5).abs() < 1e-9 && (55.0..70.0).contains(&(of.high - of.low)), "{of:?}");
        let double: Vec<f64> = sorted.iter().map(|sample| sample * 2.0 + 1.0).collect();
        let ratio = ratio_over_requests(samples, Samples { sorted: &double, percentile: 0.5 }, 7).unwrap();
        assert!(ratio.excludes(1.0) && !ratio.excludes(2.0), "{ratio:?}");
        assert_eq!(over_requests(Samples { sorted: &sorted[..5], percentile: 0.5 }, 7), None);
        assert_eq!(ratio_over_requests(Samples { sorted: &[0.0; 20], percentile: 0.5 }, samples, 7), None);
    }

    #[test]
    fn splitmix_is_the_published_one() {
        let mut random = SplitMix(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    proptest! {
        #[test]
        fn the_value_is_inside(samples in prop::collection::vec(0.0..1e4_f64, 10..80), p in 0.0..=1.0_f64, seed: u64) {
            let mut sorted = samples;
            sorted.sort_by(f64::total_cmp);
            let of = over_requests(Samples { sorted: &sorted, percentile: p }, seed).unwrap();
            prop_assert!(of.low <= of.value && of.value <= of.high && of.high.is_finite());
        }
    }
}
