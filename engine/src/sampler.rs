//! Logits to a token, on the host: a pure function of (parameters, random number, the tokens before, logits). Penalties
//! are counted from the tokens themselves and the random number is the place's (`sampling.rs`), so that every node
//! chooses the same token for the same place of a sequence. It is the oracle of whatever chooses on a device.
//!
//! The order of the rules is vLLM's: `logit_bias` and forbidden ends, then penalties (both in `adjust.rs`), then
//! temperature, `min_p`, `top_k`, `top_p` and the draw (`choose.rs`). Log probabilities are those of the model: of the
//! logits before any rule. `passes.rs` has the loops over the vocabulary.
mod adjust;
mod choose;
mod passes;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use passes::{Candidate, value};

use crate::sampling::{Sampled, SamplingParams, TokenLogprob};

/// The sequence before the token that is to be chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Past<'a> {
    /// The prompt and the tokens generated so far. Only penalties look at them.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Tokens that must not come next: those that end the sequence, before `min_tokens`.
    pub forbidden: &'a [u32],
}

impl<'a> Past<'a> {
    fn split(&self) -> (&'a [u32], &'a [u32]) {
        self.tokens.split_at(self.prompt_len.min(self.tokens.len()))
    }
}

/// Whether the logits are those of a sound model: impossible tokens have minus infinity, not NaN.
pub fn are_numbers(logits: &[f32]) -> bool {
    passes::are_numbers(logits)
}

/// Chooses the token after `past`; `uniform` is the random number of its place. Among equal logits the lowest id comes
/// first; NaN counts as impossible, and without any possible token the answer is token 0.
pub fn sample(params: &SamplingParams, uniform: f64, past: &Past<'_>, logits: &[f32]) -> Sampled {
    thread_local! {
        /// Memory only: nothing is carried from one call to the next.
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let likeliest = passes::likeliest(logits);
        let mass = passes::total(logits, value(logits.get(likeliest)));
        let token = match adjust::adjust(params, past, logits, scratch) {
            false => choose::token(params, uniform, logits, likeliest, scratch),
            true => {
                let adjusted = std::mem::take(&mut scratch.logits);
                let token = choose::token(params, uniform, &adjusted, passes::likeliest(&adjusted), scratch);
                scratch.logits = adjusted;
                token
            }
        };
        let logprob = |token: usize| logprob(logits, token, likeliest, mass);
        passes::likeliest_of(logits, params.top_logprobs as usize, &mut scratch.kept);
        let top = scratch.kept.iter().map(|kept| TokenLogprob { token: kept.id, logprob: logprob(kept.id as usize) });
        Sampled { token: token as u32, logprob: logprob(token), top: top.collect() }
    })
}

fn logprob(logits: &[f32], token: usize, likeliest: usize, mass: f64) -> f32 {
    let greatest = value(logits.get(likeliest));
    if greatest == f32::NEG_INFINITY {
        return f32::NEG_INFINITY;
    }
    (f64::from(value(logits.get(token))) - f64::from(greatest) - mass.ln()).min(0.0) as f32
}

/// Buffers that are as large as the vocabulary, kept so that a token costs no allocation of that size.
#[derive(Default)]
struct Scratch {
    /// Logits after bias and penalties.
    logits: Vec<f32>,
    /// Unnormalized probabilities.
    weights: Vec<f32>,
    /// Tokens that the cuts left.
    kept: Vec<Candidate>,
    /// Of the tokens before, see `adjust.rs`; zero between calls.
    counts: Vec<u32>,
    /// Whose counts are not zero.
    touched: Vec<u32>,
}
