//! From logits to the one token: temperature, the cuts, the draw.
use super::Scratch;
use super::passes::{self, Candidate, value};
use crate::sampling::{LOWEST_TEMPERATURE, SamplingParams};

/// Tokens that the first attempt to cover `top_p` looks at: most nuclei are smaller.
const FIRST_NUCLEUS: usize = 64;

/// The token that the parameters choose; `likeliest` is that of `logits`.
pub(super) fn token(
    params: &SamplingParams,
    uniform: f64,
    logits: &[f32],
    likeliest: usize,
    Scratch { weights, kept, .. }: &mut Scratch,
) -> usize {
    let greatest = value(logits.get(likeliest));
    let greedy = !(params.temperature >= LOWEST_TEMPERATURE && params.temperature.is_finite());
    if greedy || greatest == f32::NEG_INFINITY {
        return likeliest;
    }
    let weigh = passes::Weigh { greatest, scale: params.temperature.recip(), least: params.min_p };
    let limited = params.top_k > 0 && (params.top_k as usize) < logits.len();
    let by_mass = params.top_p < 1.0;
    if !limited && !by_mass {
        let total = weigh.all(logits, weights);
        return passes::at(weights, uniform * total).unwrap_or(likeliest);
    }
    if limited {
        passes::likeliest_of(logits, params.top_k as usize, kept);
        let total = weigh_candidates(&weigh, kept);
        nucleus(kept, f64::from(params.top_p) * total);
    } else {
        let wanted = f64::from(params.top_p) * weigh.all(logits, weights);
        let mut count = FIRST_NUCLEUS;
        loop {
            passes::likeliest_of(logits, count, kept);
            let all = kept.len() < count;
            weigh_candidates(&weigh, kept);
            if nucleus(kept, wanted) || all {
                break;
            }
            count = count.saturating_mul(8);
        }
    }
    // The walk goes by id, whichever cuts were made.
    kept.sort_unstable_by_key(|candidate| candidate.id);
    let mut left = uniform * kept.iter().map(|candidate| f64::from(candidate.value)).sum::<f64>();
    let hit = kept.iter().find(|candidate| {
        left -= f64::from(candidate.value);
        left < 0.0
    });
    hit.or(kept.last()).map_or(likeliest, |candidate| candidate.id as usize)
}

/// Logits to weights; drops those without one. Returns their sum.
fn weigh_candidates(weigh: &passes::Weigh, kept: &mut Vec<Candidate>) -> f64 {
    for candidate in kept.iter_mut() {
        candidate.value = weigh.one(candidate.value);
    }
    kept.retain(|candidate| candidate.value > 0.0);
    kept.iter().map(|candidate| f64::from(candidate.value)).sum()
}

/// Cuts `kept`, the likeliest first, behind the one that completes the weight `wanted`; false when none does.
fn nucleus(kept: &mut Vec<Candidate>, wanted: f64) -> bool {
    let mut sum = 0.0;
    let last = kept.iter().position(|candidate| {
        sum += f64::from(candidate.value);
        sum >= wanted
    });
    kept.truncate(last.map_or(kept.len(), |last| last + 1));
    last.is_some()
}
