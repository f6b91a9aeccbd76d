//! How long answers are. Pure. A node takes the blocks of an answer as it grows, and how far it grows nobody knows
//! before: who asks whether there is room, or books it, counts with the usual length.

/// Counted with before answers have ended here: rather too many, since blocks that are booked are free again at the
/// end.
const UNKNOWN: f64 = 256.0;
/// What one more answer weighs.
const WEIGHT: f64 = 1.0 / 64.0;

/// The usual length of an answer, a moving mean.
#[derive(Debug)]
pub struct Answers {
    mean: f64,
}

impl Default for Answers {
    fn default() -> Self {
        Self { mean: UNKNOWN }
    }
}

impl Answers {
    /// An answer of so many tokens was complete.
    pub fn ended(&mut self, tokens: u32) {
        self.mean += (f64::from(tokens) - self.mean) * WEIGHT;
    }

    /// Tokens of an answer that may have `max_tokens`.
    pub fn usual(&self, max_tokens: u32) -> u32 {
        max_tokens.min(self.mean.ceil() as u32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_what_ended_and_no_answer_is_longer_than_it_may_be() {
        let mut answers = Answers::default();
        assert_eq!([answers.usual(u32::MAX), answers.usual(10), answers.usual(0)], [256, 10, 1]);
        (0..1000).for_each(|_| answers.ended(40));
        assert!((40..42).contains(&answers.usual(u32::MAX)), "{answers:?}");
        (0..1000).for_each(|i| answers.ended(if i % 2 == 0 { 100 } else { 300 }));
        assert!((190..212).contains(&answers.usual(u32::MAX)), "{answers:?}");
    }
}
