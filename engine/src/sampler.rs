//! Logits to a token: a pure function of (parameters, the tokens before, logits). The random number is keyed by seed and
//! position, and penalties are counted from the tokens themselves, so that every node chooses the same token for the
//! same place of a sequence, whatever ran there before.
//!
//! The order of the rules is vLLM's: `logit_bias` and `min_tokens`, then penalties (both in `adjust.rs`), then
//! temperature, `min_p`, `top_k`, `top_p` and the draw (`choose.rs`). Log probabilities are those of the model: of the
//! logits before any rule. `passes.rs` has the loops over the vocabulary.
mod adjust;
mod choose;
mod passes;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use passes::{Candidate, value};

use crate::error::EngineError;

/// Temperatures below this are greedy: they would only divide by almost nothing.
pub const LOWEST_TEMPERATURE: f32 = 1e-5;

/// How to choose a token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; below [`LOWEST_TEMPERATURE`] (and anything that is no positive number) is greedy.
    pub temperature: f32,
    /// Keeps the likeliest tokens that together have at least this probability (nucleus sampling, arXiv:1904.09751) of
    /// what `min_p` and `top_k` leave; 1 keeps all.
    pub top_p: f32,
    /// Keeps so many of the likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the tokens that have at least this share of the likeliest one's probability (arXiv:2407.01082), after
    /// temperature; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive and multiplies the negative logits of the tokens in prompt and output (CTRL,
    /// arXiv:1909.05858); 1 changes nothing.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens in the output; 0 changes nothing.
    pub presence_penalty: f32,
    /// Taken from a token's logit once for each time that it is in the output; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Added to these tokens' logits. No id twice.
    pub logit_bias: Vec<(u32, f32)>,
    /// No token that ends the sequence before so many were generated.
    pub min_tokens: u32,
    /// How many of the likeliest tokens to report with each token.
    pub top_logprobs: u32,
    /// Keys the random numbers.
    pub seed: u64,
}

impl SamplingParams {
    /// The likeliest token, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        min_tokens: 0,
        top_logprobs: 0,
        seed: 0,
    };
}

impl SamplingParams {
    /// Whether the numbers make sense; narrower ranges are the edges' matter.
    pub(crate) fn validate(&self, vocab_size: usize) -> Result<(), EngineError> {
        let share = |number: f32| (0.0..=1.0).contains(&number);
        let penalties = [self.repetition_penalty, self.presence_penalty, self.frequency_penalty];
        let wrong = if !self.temperature.is_finite() || self.temperature < 0.0 {
            format!("temperature {}", self.temperature)
        } else if !share(self.top_p) || !share(self.min_p) {
            format!("top_p {} or min_p {}", self.top_p, self.min_p)
        } else if penalties.iter().any(|penalty| !penalty.is_finite()) || self.repetition_penalty <= 0.0 {
            format!("one of the penalties {penalties:?} (repetition, presence, frequency)")
        } else if let Some(bias) =
            self.logit_bias.iter().find(|bias| bias.0 as usize >= vocab_size || !bias.1.is_finite())
        {
            format!("a logit_bias of {} for token {} of {vocab_size}", bias.1, bias.0)
        } else {
            return Ok(());
        };
        Err(EngineError::InvalidArgument(format!("{wrong} is out of range")))
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// The sequence before the token that is to be chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Past<'a> {
    /// The prompt and the tokens generated so far; their number is the position of the chosen token.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// The end-of-sequence token, unless the request ignores it.
    pub eos: Option<u32>,
    /// Further tokens that end the sequence.
    pub stop_token_ids: &'a [u32],
}

impl<'a> Past<'a> {
    fn split(&self) -> (&'a [u32], &'a [u32]) {
        self.tokens.split_at(self.prompt_len.min(self.tokens.len()))
    }
}

/// A token and the natural logarithm of the probability that the model gave it: of the full softmax, before bias,
/// penalties, temperature and cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Id.
    pub token: u32,
    /// At most 0.
    pub logprob: f32,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Id.
    pub token: u32,
    /// Natural logarithm of its probability, see [`TokenLogprob`].
    pub logprob: f32,
    /// The `top_logprobs` likeliest tokens, the likeliest first; empty unless asked for.
    pub top: Vec<TokenLogprob>,
}

/// Whether the logits are those of a sound model: impossible tokens have minus infinity, not NaN.
pub fn are_numbers(logits: &[f32]) -> bool {
    passes::are_numbers(logits)
}

/// Chooses the token at position `past.tokens.len()`. Among equal logits the lowest id comes first; NaN counts as
/// impossible, and without any possible token the answer is token 0.
pub fn sample(params: &SamplingParams, past: &Past<'_>, logits: &[f32]) -> Sampled {
    thread_local! {
        /// Memory only: nothing is carried from one call to the next.
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let likeliest = passes::likeliest(logits);
        let mass = passes::total(logits, value(logits.get(likeliest)));
        let token = choose::token(params, past, logits, likeliest, scratch);
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
