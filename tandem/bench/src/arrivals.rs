//! When requests are to be sent: a pure function of how they arrive, how often, and a seed.
//!
//! Gaps are drawn with mean 1 in "requests" and then mapped to seconds through the integral of the rate, so that a ramp
//! keeps the burstiness of its process. Knows nothing of what is sent.
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp1, Gamma};

use super::seed;

/// How irregular arrivals are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Process {
    /// Independent of each other: gaps with a coefficient of variation of 1.
    Poisson,
    /// Gaps from a gamma distribution with this coefficient of variation: above 1 bursts, below 1 more even than
    /// chance. vLLM's `--burstiness` is `1 / cv²`.
    Gamma {
        /// Standard deviation of the gaps, divided by their mean.
        cv: f64,
    },
    /// Equal gaps.
    Constant,
}

/// Requests a second over time: from `from` to `to` along a line that takes `over_s`, and `to` from then on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// At the beginning.
    pub from: f64,
    /// At the end of the ramp and after it.
    pub to: f64,
    /// Length of the ramp, seconds; 0: none.
    pub over_s: f64,
}

/// Numbers that describe no arrivals.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Invalid {
    /// A rate must be a number above 0.
    #[error("a rate is a number of requests a second above 0, not {0}")]
    Rate(f64),
    /// So must a coefficient of variation, and the gamma distribution must exist for it.
    #[error("the coefficient of variation of gamma arrivals is between 0.01 and 100, not {0}")]
    Variation(f64),
}

impl Rate {
    /// The same rate all the time.
    pub fn constant(rate: f64) -> Self {
        Self { from: rate, to: rate, over_s: 0.0 }
    }

    /// The mean over the first `seconds`.
    pub fn mean_over(&self, seconds: f64) -> f64 {
        // Exactly, since a sweep compares rates.
        if seconds <= 0.0 || self.from == self.to {
            return self.from;
        }
        let ramp = seconds.min(self.over_s);
        let at_end = if self.over_s > 0.0 { self.from + (self.to - self.from) * ramp / self.over_s } else { self.to };
        ((self.from + at_end) / 2.0 * ramp + self.to * (seconds - ramp)) / seconds
    }

    /// The time by which `requests` of them are due: the inverse of the rate's integral.
    fn due_s(&self, requests: f64) -> f64 {
        let in_ramp = (self.from + self.to) / 2.0 * self.over_s;
        if requests >= in_ramp {
            return self.over_s + (requests - in_ramp) / self.to;
        }
        // from·t + slope·t²/2 = requests, in the form that is exact for small slopes too.
        let slope = (self.to - self.from) / self.over_s;
        2.0 * requests / (self.from + (self.from * self.from + 2.0 * slope * requests).max(0.0).sqrt())
    }
}

/// Endless, ascending intended times in seconds from 0.
pub struct Arrivals {
    rate: Rate,
    gaps: Gaps,
    rng: StdRng,
    due: f64,
}

enum Gaps {
    Exponential,
    Gamma(Gamma<f64>),
    Even,
}

impl Arrivals {
    /// # Errors
    /// A rate or a variation that is none.
    pub fn new(process: Process, rate: Rate, seed: u64) -> Result<Self, Invalid> {
        for rate in [rate.from, rate.to] {
            if !(rate.is_finite() && rate > 0.0) {
                return Err(Invalid::Rate(rate));
            }
        }
        let gaps = match process {
            Process::Poisson => Gaps::Exponential,
            Process::Constant => Gaps::Even,
            Process::Gamma { cv } if (0.01..=100.0).contains(&cv) => {
                let variance = cv * cv;
                Gaps::Gamma(Gamma::new(1.0 / variance, variance).map_err(|_| Invalid::Variation(cv))?)
            }
            Process::Gamma { cv } => return Err(Invalid::Variation(cv)),
        };
        Ok(Self { rate, gaps, rng: seed::stream(&[seed, u64::from_be_bytes(*b"arrivals")]), due: 0.0 })
    }
}

impl Iterator for Arrivals {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        self.due += match &self.gaps {
            Gaps::Exponential => Exp1.sample(&mut self.rng),
            Gaps::Gamma(gamma) => gamma.sample(&mut self.rng),
            Gaps::Even => 1.0,
        };
        Some(self.rate.due_s(self.due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(process: Process, rate: Rate, seed: u64, count: usize) -> Vec<f64> {
        Arrivals::new(process, rate, seed).unwrap().take(count).collect()
    }

    /// Mean and coefficient of variation of the gaps.
    fn gaps(times: &[f64]) -> (f64, f64) {
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn every_process_has_its_rate_and_its_variation() {
        let cases = [
            (Process::Poisson, 1.0),
            (Process::Gamma { cv: 3.0 }, 3.0),
            (Process::Gamma { cv: 0.3 }, 0.3),
            (Process::Constant, 0.0),
        ];
        for (process, cv) in cases {
            let (mean, found) = gaps(&times(process, Rate::constant(20.0), 7, 60_000));
            assert!((mean * 20.0 - 1.0).abs() < 0.04, "{process:?}: mean gap {mean}");
            assert!((found - cv).abs() < 0.04 * cv.max(0.1), "{process:?}: variation {found}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_times_and_another_one_others() {
        let rate = Rate::constant(5.0);
        assert_eq!(times(Process::Poisson, rate, 1, 100), times(Process::Poisson, rate, 1, 100));
        assert_ne!(times(Process::Poisson, rate, 1, 100), times(Process::Poisson, rate, 2, 100));
    }

    #[test]
    fn a_ramp_has_the_line_as_its_rate() {
        let rate = Rate { from: 10.0, to: 50.0, over_s: 20.0 };
        let times = times(Process::Constant, rate, 0, 5_000);
        assert!(times.windows(2).all(|pair| pair[0] < pair[1]));
        let within = |from: f64, to: f64| times.iter().filter(|at| (from..to).contains(*at)).count() as f64;
        // 10 + 2t requests a second, then 50.
        assert!((within(0.0, 1.0) - 11.0).abs() <= 1.0);
        assert!((within(10.0, 11.0) - 31.0).abs() <= 1.0);
        assert!((within(0.0, 20.0) - 600.0).abs() <= 1.0);
        assert!((within(30.0, 31.0) - 50.0).abs() <= 1.0);
        assert!((rate.mean_over(20.0) - 30.0).abs() < 1e-9);
        assert!((rate.mean_over(40.0) - 40.0).abs() < 1e-9);
        assert!((Rate::constant(3.0).mean_over(7.0) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_ramp_may_fall() {
        let rate = Rate { from: 50.0, to: 10.0, over_s: 20.0 };
        let times = times(Process::Constant, rate, 0, 700);
        let early = times.iter().filter(|at| **at < 20.0).count() as f64;
        assert!((early - 600.0).abs() <= 1.0, "{early}");
        assert!((times[699] - times[698] - 0.1).abs() < 1e-9);
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Arrivals::new(Process::Poisson, Rate::constant(rate), 0).is_err());
        }
        let error = Arrivals::new(Process::Gamma { cv: 0.0 }, Rate::constant(1.0), 0).err();
        assert_eq!(error, Some(Invalid::Variation(0.0)));
    }
}
