//! Logits to a token: a pure function. The random number is keyed by seed and position, so that every node draws the same
//! token for the same place of a sequence, whatever ran there before.
use std::cmp::Ordering;

use xxhash_rust::xxh3::xxh3_64;

/// How to choose a token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 (and anything that is no positive number) is greedy.
    pub temperature: f32,
    /// Keeps the likeliest tokens that together have at least this probability (nucleus sampling, arXiv:1904.09751);
    /// 1 keeps all.
    pub top_p: f32,
    /// Keeps so many of the likeliest tokens, before `top_p`; 0 keeps all.
    pub top_k: u32,
    /// Keys the random numbers.
    pub seed: u64,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// Id.
    pub token: u32,
    /// Natural logarithm of its probability under the full softmax: temperature 1, nothing cut off.
    pub logprob: f32,
}

/// Chooses the token at `position` of the whole sequence. Among equal logits the lowest id comes first; NaN counts as
/// impossible, and without any possible token the answer is token 0.
pub fn sample(params: &SamplingParams, position: usize, logits: &[f32]) -> Sampled {
    let best = (0..logits.len()).fold(0, |best, id| if value(logits, id) > value(logits, best) { id } else { best });
    let greedy = !(params.temperature > 0.0 && params.temperature.is_finite());
    let token = if greedy || value(logits, best) == f64::NEG_INFINITY {
        best
    } else {
        draw(params, uniform(params.seed, position), logits, best)
    };
    Sampled { token: token as u32, logprob: logprob(logits, token, best) }
}

/// A logit as a number that can be compared and subtracted.
fn value(logits: &[f32], id: usize) -> f64 {
    match logits.get(id) {
        Some(logit) if !logit.is_nan() && *logit > f32::NEG_INFINITY => f64::from(logit.min(f32::MAX)),
        _ => f64::NEG_INFINITY,
    }
}

fn logprob(logits: &[f32], token: usize, best: usize) -> f32 {
    let greatest = value(logits, best);
    if greatest == f64::NEG_INFINITY {
        return f32::NEG_INFINITY;
    }
    let total: f64 = (0..logits.len()).map(|id| (value(logits, id) - greatest).exp()).sum();
    (value(logits, token) - greatest - total.ln()) as f32
}

/// The token at the point `uniform` of the distribution that the parameters leave.
fn draw(params: &SamplingParams, uniform: f64, logits: &[f32], best: usize) -> usize {
    let (greatest, temperature) = (value(logits, best), f64::from(params.temperature));
    let mut kept: Vec<(usize, f64)> = (0..logits.len())
        .map(|id| (id, ((value(logits, id) - greatest) / temperature).exp()))
        .filter(|&(_, weight)| weight > 0.0)
        .collect();
    let likelier = |a: &(usize, f64), b: &(usize, f64)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, likelier);
        kept.truncate(top_k);
    }
    if params.top_p < 1.0 {
        kept.sort_unstable_by(likelier);
        let wanted = f64::from(params.top_p) * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let enough = kept.iter().position(|(_, weight)| {
            sum += weight;
            sum >= wanted
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    // A fixed order for the walk, whichever of the cuts were made.
    kept.sort_unstable_by_key(|&(id, _)| id);
    let mut left = uniform * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let hit = kept.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    hit.or(kept.last()).map_or(best, |&(id, _)| id)
}

/// In `0.0..1.0`.
fn uniform(seed: u64, position: usize) -> f64 {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..].copy_from_slice(&(position as u64).to_le_bytes());
    (xxh3_64(&key) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(temperature: f32, top_p: f32, top_k: u32, seed: u64) -> SamplingParams {
        SamplingParams { temperature, top_p, top_k, seed }
    }

    #[test]
    fn greedy_takes_the_greatest_and_tells_its_probability() {
        let sampled = sample(&params(0.0, 1.0, 0, 1), 3, &[1.0, 3.0, 2.0, 3.0]);
        let total = 1f64.exp() + 2.0 * 3f64.exp() + 2f64.exp();
        assert_eq!(sampled.token, 1);
        assert!((f64::from(sampled.logprob) - (3.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 1.0, 2.0];
        let mut counts = [0u32; 3];
        for position in 0..20_000 {
            counts[sample(&params(1.0, 1.0, 0, 7), position, &logits).token as usize] += 1;
        }
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        for (count, logit) in counts.into_iter().zip(logits) {
            assert!((f64::from(count) / 20_000.0 - f64::from(logit).exp() / total).abs() < 0.015);
        }
    }

    #[test]
    fn edges_of_the_cuts() {
        let logits = [0.0, 5.0, 4.9, -3.0];
        for position in 0..200 {
            for top_p in [0.0, -1.0, 1e-9] {
                assert_eq!(sample(&params(1.0, top_p, 0, 1), position, &logits).token, 1);
            }
            assert_eq!(sample(&params(9.0, 1.0, 1, 1), position, &logits).token, 1);
            assert!([1, 2].contains(&sample(&params(9.0, 1.0, 2, 1), position, &logits).token));
            // The best has 0.52: 0.6 needs the second, too, and no more.
            assert!([1, 2].contains(&sample(&params(1.0, 0.6, 0, 1), position, &logits).token));
        }
        let seen = (0..2000).map(|p| sample(&params(9.0, f32::NAN, 99, 1), p, &logits).token);
        assert_eq!(seen.collect::<std::collections::BTreeSet<_>>().len(), 4);
    }

    #[test]
    fn impossible_tokens_are_never_chosen() {
        let logits = [f32::NAN, f32::NEG_INFINITY, 0.5, f32::NAN];
        for temperature in [0.0, 1.0, f32::NAN, f32::INFINITY, -1.0] {
            assert_eq!(sample(&params(temperature, 0.9, 3, 4), 0, &logits), Sampled { token: 2, logprob: 0.0 });
        }
        assert_eq!(sample(&params(1.0, 1.0, 0, 0), 0, &[f32::NAN; 3]).token, 0);
        assert_eq!(sample(&params(1.0, 1.0, 0, 0), 0, &[]).token, 0);
        assert_eq!(sample(&params(1.0, 1.0, 0, 0), 0, &[0.0, f32::INFINITY]).token, 1);
    }

    proptest! {
        #[test]
        fn a_pure_function_into_the_vocabulary(
            logits in prop::collection::vec(prop::num::f32::ANY, 1..50),
            temperature in prop::num::f32::ANY, top_p in prop::num::f32::ANY,
            top_k in 0u32..60, seed in any::<u64>(), position in any::<usize>(),
        ) {
            let params = params(temperature, top_p, top_k, seed);
            let sampled = sample(&params, position, &logits);
            prop_assert!((sampled.token as usize) < logits.len());
            prop_assert!(!sampled.logprob.is_nan() && sampled.logprob <= 0.0);
            prop_assert_eq!(sampled, sample(&params, position, &logits));
        }
    }
}
