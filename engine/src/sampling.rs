//! What a choice of a token asks for and what it gives: plain data, and the random number of a place. Who chooses, from
//! which logits and on which device, is the executors' matter; on the host it is `sampler.rs`.
use xxhash_rust::xxh3::xxh3_64;

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
    /// Whether a choice looks at the tokens before it.
    pub fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the rules are known to the host alone: a look at the tokens before, at a list of others, or log
    /// probabilities of those beside the chosen one.
    pub fn needs_host(&self) -> bool {
        self.penalizes() || !self.logit_bias.is_empty() || self.top_logprobs > 0
    }

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

/// The random number for the token at `position`, in `0.0..1.0`: the same on every node, whatever ran there before.
pub fn uniform(seed: u64, position: usize) -> f64 {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..].copy_from_slice(&(position as u64).to_le_bytes());
    (xxh3_64(&key) >> 11) as f64 / (1u64 << 53) as f64
}
