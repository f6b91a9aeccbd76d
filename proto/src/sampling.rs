//! What a `Sampling` message may hold: one set of ranges for every edge and every node. What the fields do is the
//! engine's matter; what stands in `inference.proto` is for clients.
use crate::{Error, v1};

/// Tokens with a bias in one request at most, as at OpenAI.
pub const MAX_LOGIT_BIAS: usize = 300;
/// Likeliest tokens reported with each token at most.
pub const MAX_TOP_LOGPROBS: u32 = 20;

impl v1::Sampling {
    /// Checks every field, for a model of `vocab_size` tokens.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field and its range.
    pub fn check(&self, vocab_size: u32) -> Result<(), Error> {
        within("temperature", self.temperature, "a finite number, at least 0", |t| t >= 0.0)?;
        within("top_p", self.top_p, "between 0 and 1", |p| (0.0..=1.0).contains(&p))?;
        within("min_p", self.min_p, "between 0 and 1", |p| (0.0..=1.0).contains(&p))?;
        within("repetition_penalty", self.repetition_penalty, "a finite number above 0", |r| r >= 0.0)?;
        within("presence_penalty", self.presence_penalty, "between -2 and 2", |p| p.abs() <= 2.0)?;
        within("frequency_penalty", self.frequency_penalty, "between -2 and 2", |p| p.abs() <= 2.0)?;
        if self.logit_bias.len() > MAX_LOGIT_BIAS {
            let message = format!("logit_bias of {} tokens; {MAX_LOGIT_BIAS} at most", self.logit_bias.len());
            return Err(Error::invalid("logit_bias", message));
        }
        for (token, bias) in &self.logit_bias {
            within("logit_bias", *bias, "between -100 and 100", |bias| bias.abs() <= 100.0)?;
            if *token >= vocab_size {
                let message = format!("logit_bias: token id {token} is outside the vocabulary of {vocab_size}");
                return Err(Error::invalid("logit_bias", message));
            }
        }
        if self.top_logprobs > MAX_TOP_LOGPROBS {
            let message = format!("top_logprobs must be 0 to {MAX_TOP_LOGPROBS}, not {}", self.top_logprobs);
            return Err(Error::invalid("top_logprobs", message));
        }
        Ok(())
    }

    /// Checks `min_tokens` against the tokens that the request may generate.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn check_min_tokens(&self, max_tokens: u32) -> Result<(), Error> {
        if self.min_tokens <= max_tokens {
            return Ok(());
        }
        let message = format!("min_tokens must be 0 to {max_tokens}, the tokens to generate, not {}", self.min_tokens);
        Err(Error::invalid("min_tokens", message))
    }
}

fn within(name: &'static str, number: f32, range: &str, allowed: impl Fn(f32) -> bool) -> Result<(), Error> {
    if number.is_finite() && allowed(number) {
        return Ok(());
    }
    Err(Error::invalid(name, format!("{name} must be {range}, not {number}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        type Change = fn(&mut v1::Sampling);
        let good: [Change; 6] = [
            |s| (s.temperature, s.top_p, s.min_p) = (1e9, 1.0, 1.0),
            |s| (s.presence_penalty, s.frequency_penalty) = (-2.0, 2.0),
            |s| s.repetition_penalty = 1e-3,
            |s| s.logit_bias = (0..300).map(|id| (id, -100.0)).collect(),
            |s| s.top_logprobs = 20,
            |_| (),
        ];
        let bad: [(Change, &str); 13] = [
            (|s| s.temperature = -0.1, "temperature"),
            (|s| s.temperature = f32::INFINITY, "temperature"),
            (|s| s.top_p = 1.1, "top_p"),
            (|s| s.top_p = f32::NAN, "top_p"),
            (|s| s.min_p = -0.1, "min_p"),
            (|s| s.repetition_penalty = -1.0, "repetition_penalty"),
            (|s| s.repetition_penalty = f32::INFINITY, "repetition_penalty"),
            (|s| s.presence_penalty = 2.1, "presence_penalty"),
            (|s| s.frequency_penalty = f32::NAN, "frequency_penalty"),
            (|s| s.logit_bias = (0..301).map(|id| (id, 1.0)).collect(), "logit_bias"),
            (|s| s.logit_bias = [(1, 101.0)].into(), "logit_bias"),
            (|s| s.logit_bias = [(1000, 1.0)].into(), "logit_bias"),
            (|s| s.top_logprobs = 21, "top_logprobs"),
        ];
        let with = |change: Change| {
            let mut sampling = v1::Sampling::default();
            change(&mut sampling);
            sampling.check(1000)
        };
        good.into_iter().for_each(|change| with(change).unwrap());
        for (change, param) in bad {
            let error = with(change).unwrap_err();
            assert_eq!(error.param, Some(param));
            assert!(error.message.starts_with(param), "{}", error.message);
        }
        let sampling = v1::Sampling { min_tokens: 5, ..v1::Sampling::default() };
        assert!(sampling.check_min_tokens(5).is_ok());
        assert_eq!(sampling.check_min_tokens(4).unwrap_err().param, Some("min_tokens"));
    }
}
