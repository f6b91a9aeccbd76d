//! The rules that change logits by what is known of tokens: bias, forbidden ends, penalties.
use super::{Past, Scratch};
use crate::sampling::SamplingParams;

/// Puts the changed logits into `scratch.logits`; false when no rule applies and the given ones stand.
pub(super) fn adjust(params: &SamplingParams, past: &Past<'_>, logits: &[f32], scratch: &mut Scratch) -> bool {
    if params.logit_bias.is_empty() && past.forbidden.is_empty() && !params.penalizes() {
        return false;
    }
    scratch.logits.clear();
    scratch.logits.extend_from_slice(logits);
    for &(id, bias) in &params.logit_bias {
        if let Some(logit) = scratch.logits.get_mut(id as usize) {
            *logit += bias;
        }
    }
    for &id in past.forbidden {
        if let Some(logit) = scratch.logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if params.penalizes() {
        penalize(params, past, scratch);
    }
    true
}

/// Repetition looks at prompt and output, presence and frequency at the output alone.
fn penalize(params: &SamplingParams, past: &Past<'_>, scratch: &mut Scratch) {
    count(past, scratch);
    let Scratch { logits, counts, touched, .. } = scratch;
    for id in touched.drain(..) {
        let (logit, count) = (&mut logits[id as usize], std::mem::take(&mut counts[id as usize]));
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        let in_output = count - 1;
        if in_output > 0 {
            *logit -= params.frequency_penalty * in_output as f32;
            *logit -= params.presence_penalty;
        }
    }
}

/// For every token before: 1, and 1 more for each time that it is in the output.
fn count(past: &Past<'_>, Scratch { logits, counts, touched, .. }: &mut Scratch) {
    counts.resize(logits.len(), 0);
    let (prompt, output) = past.split();
    for (tokens, step) in [(prompt, 0), (output, 1)] {
        for &id in tokens {
            let Some(count) = counts.get_mut(id as usize) else { continue };
            if *count == 0 {
                touched.push(id);
                *count = 1;
            }
            *count += step;
        }
    }
}
