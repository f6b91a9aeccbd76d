//! Predicts how long a step takes: `ms = base + per token · tokens + per context · context`, fitted to the steps that
//! this engine has run. Pure: measured times come in, coefficients go out, in `EngineLoad` and from there to whoever
//! plans.
//!
//! The fit is over a small sample of *every kind* of step, not over the last steps: a node may decode for an hour
//! between two prompts, and recursive least squares with forgetting would by then have forgotten what a prompt costs
//! (and extrapolate wildly). Kinds are powers of two of tokens and of context; each keeps its last few steps. The fit
//! minimizes the sum of *relative absolute* errors (reweighted least squares), under which a few steps that the system
//! interrupted do not count, and keeps the coefficients from being negative, so that predictions grow with the work.
use std::collections::{BTreeMap, VecDeque};

use crate::executor::Batch;

/// Steps that each kind keeps.
const KEPT: usize = 8;
/// A step is half forgotten after so many others: speeds change (other kernels, a neighbour on the machine).
const HALF_LIFE_STEPS: f64 = 2048.0;
/// Refitted at each of the first steps, then at every fourth.
const FIRST_STEPS: u64 = 32;
const FIT_EVERY: u64 = 4;
/// Reweighting rounds of one fit, which starts from the coefficients before.
const ROUNDS: usize = 4;
/// A step counts as at most so many times what its kind took so far, or what is predicted where there is none: a
/// process that was stopped in mid-step, or a machine that slept, says nothing of the kernels. Speeds that did change
/// so much are believed after as many steps as it takes.
const FROZEN: f64 = 8.0;
/// A prediction for a kind that was never seen may itself be off by so much.
const UNSEEN: f64 = 4.0;
/// Relative errors below this count alike: they are the clock's and the system's.
const NOISE: f64 = 0.02;

/// What a step's time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens that it computes.
    pub tokens: usize,
    /// Positions that these attend to, summed over them: a decode token behind `n` others counts `n + 1`, a prompt of
    /// `n` tokens `n · (n + 1) / 2`.
    pub context: usize,
}

impl StepShape {
    /// Of a planned step.
    pub fn of(batch: &Batch) -> Self {
        let positions = |start: usize, rows: usize| rows * start + rows * (rows + 1) / 2;
        Self {
            tokens: batch.tokens(),
            context: batch.items.iter().map(|item| positions(item.start, item.tokens.len())).sum(),
        }
    }
}

/// Coefficients of a step's time; all zero before the first step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    /// Of every step.
    pub base_ms: f64,
    /// Of each token.
    pub token_ms: f64,
    /// Of each position attended to.
    pub context_ms: f64,
}

impl StepCost {
    /// Milliseconds that such a step takes.
    pub fn predict_ms(&self, shape: StepShape) -> f64 {
        dot(&[self.base_ms, self.token_ms, self.context_ms], &features(shape))
    }
}

/// The steps kept, and the coefficients that fit them.
#[derive(Debug, Default)]
pub struct StepModel {
    /// By the bits of tokens and of context: at most a few hundred kinds exist. Ordered, so that sums of floats are
    /// alike from run to run.
    kinds: BTreeMap<(u32, u32), VecDeque<Sample>>,
    steps: u64,
    cost: StepCost,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    shape: StepShape,
    ms: f64,
    step: u64,
}

impl StepModel {
    /// Learns that a step of `shape` took `ms`. What is no positive number is left out.
    pub fn observe(&mut self, shape: StepShape, ms: f64) {
        if !(ms.is_finite() && ms > 0.0) || shape.tokens == 0 {
            return;
        }
        self.steps += 1;
        let kept = self.kinds.entry((shape.tokens.ilog2(), shape.context.max(1).ilog2())).or_default();
        let usual_ms = kept.iter().map(|sample| sample.ms).reduce(f64::max);
        let predicted_ms = (self.steps > FIRST_STEPS).then(|| UNSEEN * self.cost.predict_ms(shape));
        let ms = usual_ms.or(predicted_ms).map_or(ms, |usual_ms| ms.min(FROZEN * usual_ms.max(f64::MIN_POSITIVE)));
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(Sample { shape, ms, step: self.steps });
        if self.steps <= FIRST_STEPS || self.steps.is_multiple_of(FIT_EVERY) {
            self.fit();
        }
    }

    /// The present coefficients.
    pub fn cost(&self) -> StepCost {
        self.cost
    }

    /// Iteratively reweighted least squares: weights 1/|error| turn the sum of squares into that of absolute errors.
    fn fit(&mut self) {
        for round in 0..ROUNDS {
            let mut normal = Normal::default();
            for sample in self.kinds.values().flatten() {
                let row = features(sample.shape).map(|feature| feature / sample.ms);
                let error = self.cost.predict_ms(sample.shape) / sample.ms - 1.0;
                let age = (self.steps - sample.step) as f64;
                // At first there is no fit whose errors mean something.
                let trust = if round == 0 && self.steps <= FIRST_STEPS { 1.0 } else { 1.0 / error.abs().max(NOISE) };
                normal.add(&row, trust * (-age / HALF_LIFE_STEPS).exp2());
            }
            let [base_ms, token_ms, context_ms] = normal.solve();
            self.cost = StepCost { base_ms, token_ms, context_ms };
        }
    }
}

fn features(shape: StepShape) -> [f64; 3] {
    [1.0, shape.tokens as f64, shape.context as f64]
}

/// Normal equations of `row · x = 1`.
#[derive(Debug, Default)]
struct Normal {
    matrix: [[f64; 3]; 3],
    right: [f64; 3],
}

impl Normal {
    fn add(&mut self, row: &[f64; 3], weight: f64) {
        for i in 0..3 {
            self.right[i] += weight * row[i];
            for j in 0..3 {
                self.matrix[i][j] += weight * row[i] * row[j];
            }
        }
    }

    /// The best `x` without a negative part. It solves the equations of its positive parts alone; three unknowns have
    /// so few subsets that the best is found by looking at all.
    fn solve(&self) -> [f64; 3] {
        let solutions = (1..8u8).filter_map(|bits| self.solve_for([0, 1, 2].map(|i| bits >> i & 1 == 1)));
        let loss = |x: &[f64; 3]| {
            let quadratic: f64 = (0..3).map(|i| x[i] * dot(&self.matrix[i], x)).sum();
            quadratic - 2.0 * dot(&self.right, x)
        };
        let feasible = solutions.filter(|x| x.iter().all(|part| part.is_finite() && *part >= 0.0));
        feasible.min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap_or_default()
    }

    /// Gaussian elimination over the `active` unknowns, the others 0. Columns differ by many orders of magnitude: they
    /// are scaled to a unit diagonal, and a trace is added to it, because two unknowns of which only the sum is known
    /// (all steps had one size) shall share it.
    fn solve_for(&self, active: [bool; 3]) -> Option<[f64; 3]> {
        let scale = [0, 1, 2].map(|i| self.matrix[i][i].sqrt());
        if (0..3).any(|i| active[i] && (scale[i] <= 0.0 || !scale[i].is_finite())) {
            return None;
        }
        let mut rows = [[0.0; 4]; 3];
        for i in 0..3 {
            rows[i][i] = 1.0 + 1e-9;
            if active[i] {
                rows[i][3] = self.right[i] / scale[i];
                for j in (0..3).filter(|&j| j != i && active[j]) {
                    rows[i][j] = self.matrix[i][j] / (scale[i] * scale[j]);
                }
            }
        }
        for pivot in 0..3 {
            let above = rows[pivot];
            for row in &mut rows[pivot + 1..] {
                let factor = row[pivot] / above[pivot];
                row.iter_mut().zip(above).for_each(|(value, above)| *value -= factor * above);
            }
        }
        let mut x = [0.0; 3];
        for i in (0..3).rev() {
            let known: f64 = (i + 1..3).map(|j| rows[i][j] * x[j]).sum();
            x[i] = (rows[i][3] - known) / rows[i][i];
        }
        Some([0, 1, 2].map(|i| if active[i] { x[i] / scale[i] } else { 0.0 }))
    }
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const LAW: StepCost = StepCost { base_ms: 5.0, token_ms: 0.2, context_ms: 0.0004 };

    /// Decode batches, and now and then a chunk of a prompt.
    fn mixed(rng: &mut StdRng) -> StepShape {
        let decoding = rng.random_range(1..32);
        let context = decoding * rng.random_range(16..1024);
        let (rows, start) =
            if rng.random_bool(0.1) { (rng.random_range(2..512), rng.random_range(0..1024)) } else { (0, 0) };
        StepShape { tokens: decoding + rows, context: context + rows * start + rows * (rows + 1) / 2 }
    }

    fn errors(model: &StepModel, law: StepCost, rng: &mut StdRng) -> Vec<f64> {
        let error = |shape| (model.cost().predict_ms(shape) / law.predict_ms(shape) - 1.0).abs();
        let mut errors: Vec<f64> = (0..200).map(|_| error(mixed(rng))).collect();
        errors.sort_unstable_by(f64::total_cmp);
        errors
    }

    proptest! {
        #[test]
        fn finds_the_law_under_noise_and_outliers(seed in 0u64..1000, outliers in 0.0f64..0.15) {
            let (mut rng, mut model) = (StdRng::seed_from_u64(seed), StepModel::default());
            for _ in 0..300 {
                let shape = mixed(&mut rng);
                let noise = rng.random_range(0.95..1.05) * if rng.random_bool(outliers) { 12.0 } else { 1.0 };
                model.observe(shape, LAW.predict_ms(shape) * noise);
            }
            let errors = errors(&model, LAW, &mut rng);
            prop_assert!(errors[100] < 0.03 && errors[190] < 0.12, "median {} p95 {}", errors[100], errors[190]);
        }

        #[test]
        fn is_never_negative_or_broken(
            steps in prop::collection::vec((0usize..3000, 0usize..5_000_000, -1.0f64..1e5), 0..100),
        ) {
            let mut model = StepModel::default();
            for (tokens, context, ms) in steps {
                model.observe(StepShape { tokens, context }, ms);
                let StepCost { base_ms, token_ms, context_ms } = model.cost();
                prop_assert!([base_ms, token_ms, context_ms].iter().all(|part| part.is_finite() && *part >= 0.0));
            }
        }
    }

    #[test]
    fn one_kind_of_step_is_enough_to_predict_that_kind() {
        let (mut model, shape) = (StepModel::default(), StepShape { tokens: 1, context: 300 });
        (0..20).for_each(|_| model.observe(shape, 7.0));
        assert!((model.cost().predict_ms(shape) - 7.0).abs() < 1e-3, "{:?}", model.cost());
    }

    #[test]
    fn prompts_are_remembered_through_a_long_decode() {
        let (mut rng, mut model) = (StdRng::seed_from_u64(1), StepModel::default());
        for _ in 0..100 {
            let shape = mixed(&mut rng);
            model.observe(shape, LAW.predict_ms(shape));
        }
        for context in 0..5000 {
            let shape = StepShape { tokens: 4, context: 400 + 4 * context };
            model.observe(shape, LAW.predict_ms(shape) * rng.random_range(0.9..1.1));
        }
        let prompt = StepShape { tokens: 512, context: 512 * 513 / 2 };
        let predicted = model.cost().predict_ms(prompt);
        assert!((predicted / LAW.predict_ms(prompt) - 1.0).abs() < 0.1, "{predicted} of {}", LAW.predict_ms(prompt));
    }

    #[test]
    fn a_frozen_step_leaves_the_predictions_as_they_were() {
        let mut model = StepModel::default();
        let (prompt, decode) = (StepShape { tokens: 256, context: 32_896 }, StepShape { tokens: 4, context: 1200 });
        for _ in 0..4 {
            [prompt, decode].iter().for_each(|&shape| model.observe(shape, LAW.predict_ms(shape)));
        }
        for shape in [prompt, decode] {
            model.observe(shape, 5_000.0);
            for shape in [prompt, decode] {
                let ratio = model.cost().predict_ms(shape) / LAW.predict_ms(shape);
                assert!((0.9..1.1).contains(&ratio), "{ratio} of {shape:?}");
            }
        }
        for _ in 0..16 {
            [prompt, decode].iter().for_each(|&shape| model.observe(shape, 100.0 * LAW.predict_ms(shape)));
        }
        let ratio = model.cost().predict_ms(prompt) / LAW.predict_ms(prompt);
        assert!((90.0..110.0).contains(&ratio), "it lasts: {ratio}");
    }

    #[test]
    fn follows_a_machine_that_has_become_slower() {
        let (mut rng, mut model) = (StdRng::seed_from_u64(2), StepModel::default());
        let slower = StepCost { base_ms: 9.0, token_ms: 0.5, context_ms: 0.001 };
        for law in [LAW, slower] {
            for _ in 0..1000 {
                let shape = mixed(&mut rng);
                model.observe(shape, law.predict_ms(shape));
            }
        }
        assert!(errors(&model, slower, &mut rng)[100] < 0.05, "{:?}", model.cost());
    }
}
