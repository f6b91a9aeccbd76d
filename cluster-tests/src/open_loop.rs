//! What loads at a rate have in common: when the next request comes, and what most of them saw.
use rand::Rng;

/// Seconds until the next request, of so many a second at random moments (Poisson).
pub fn until_next(rng: &mut impl Rng, rate: f64) -> f64 {
    -(1.0 - rng.random::<f64>()).ln() / rate
}

/// The value that a share of the `sorted` ones does not exceed; not a number where there are none.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let index = ((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(f64::NAN)
}
