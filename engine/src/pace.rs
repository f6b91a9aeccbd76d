//! What steps take on a machine whose nodes lend each other cores: as long as they take on the node's own cores, which
//! [`StepModel`] learns, times a factor while there are borrowed ones. One number for steps of all shapes, so that it
//! is known after a few steps: what a model of its own would say of shapes that ran only with borrowed cores, or only
//! without, is less than nothing. Pure.
use crate::step_model::{StepCost, StepModel, StepShape};

/// A step counts as alone below. Between the two it had borrowed cores for a part of its time.
const ALONE: f64 = 0.05;
/// As helped from here on.
const HELPED: f64 = 0.25;
/// The part of a new step in the factor.
const NEWEST: f64 = 0.125;
/// A single step says no more than this of the factor: it was interrupted, or the model is off.
const MOST: (f64, f64) = (0.2, 1.25);

/// Times of steps, alone and helped.
#[derive(Debug)]
pub struct Pace {
    alone: StepModel,
    factor: f64,
    helped: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self { alone: StepModel::default(), factor: 1.0, helped: false }
    }
}

impl Pace {
    /// A step of `shape` took `ms`, of which borrowed cores computed the part `lent`.
    pub fn observe(&mut self, shape: StepShape, ms: f64, lent: f64) {
        if lent < ALONE {
            self.helped = false;
            self.alone.observe(shape, ms);
        } else if lent >= HELPED {
            self.helped = true;
            let factor = ms / self.alone.cost().predict_ms(shape);
            if factor.is_finite() {
                self.factor += NEWEST * (factor.clamp(MOST.0, MOST.1) - self.factor);
            }
        }
    }

    /// What the next step will cost, if it has what the last one had.
    pub fn cost(&self) -> StepCost {
        if self.helped { self.helped_cost() } else { self.alone.cost() }
    }

    /// What a step costs while the other nodes have nothing to do. Who plans for several nodes adds what they take from
    /// each other.
    pub fn helped_cost(&self) -> StepCost {
        self.alone.cost().times(self.factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(decode_tokens: usize) -> StepShape {
        StepShape { decode_tokens, decode_context: 100 * decode_tokens, ..StepShape::default() }
    }

    fn predicted(pace: &Pace, tokens: usize) -> f64 {
        pace.cost().predict_ms(decode(tokens))
    }

    #[test]
    fn helped_steps_are_predicted_when_the_last_one_was_helped() {
        let (mut pace, alone_ms) = (Pace::default(), |tokens: usize| 4.0 + 2.0 * tokens as f64);
        (0..80).for_each(|step| pace.observe(decode(1 + step % 8), alone_ms(1 + step % 8), 0.0));
        assert!((predicted(&pace, 4) / alone_ms(4) - 1.0).abs() < 0.05);
        (0..40).for_each(|_| pace.observe(decode(1), 0.6 * alone_ms(1), 0.5));
        for tokens in [1, 4, 8] {
            assert!((predicted(&pace, tokens) / alone_ms(tokens) - 0.6).abs() < 0.05);
        }
        pace.observe(decode(1), 0.8 * alone_ms(1), 0.1);
        assert!((predicted(&pace, 4) / alone_ms(4) - 0.6).abs() < 0.05, "half of it helped: says nothing");
        pace.observe(decode(1), alone_ms(1), 0.0);
        assert!((predicted(&pace, 4) / alone_ms(4) - 1.0).abs() < 0.05, "the help is gone");
        let helped_ms = pace.helped_cost().predict_ms(decode(4));
        assert!((helped_ms / alone_ms(4) - 0.6).abs() < 0.05, "it can come back");
    }

    #[test]
    fn steps_that_say_nothing_change_little() {
        let mut pace = Pace::default();
        pace.observe(decode(1), 3.0, 0.5);
        assert_eq!(predicted(&pace, 1), 0.0, "nothing is known of its own cores");
        (0..20).for_each(|_| pace.observe(decode(1), 6.0, 0.0));
        pace.observe(decode(1), 6e9, 0.5);
        assert!(predicted(&pace, 1) < 8.0, "it was stopped");
        pace.observe(StepShape::default(), f64::NAN, 0.5);
        assert!(predicted(&pace, 1).is_finite());
    }
}
