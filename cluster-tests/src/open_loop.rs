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

/// Of an even number of values it lies between the two in the middle: the upper one alone would make of two rounds the
/// worse one. Not a number where there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match (values.get(values.len().saturating_sub(1) / 2), values.get(values.len() / 2)) {
        (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_leans_to_no_side() {
        assert_eq!((median([3.0, 1.0, 2.0]), median([4.0, 1.0]), median([7.0])), (2.0, 2.5, 7.0));
        assert!(median([]).is_nan());
    }
}
