//! Predicts how long a step takes: `ms = base + decode token · rows + decode context · positions + prompt token ·
//! tokens + prompt context · positions`, fitted to the steps that this engine has run. Decode and prompt have terms of
//! their own: on a GPU a decode step takes the same for one row as for a batch of them, as long as reading the weights
//! is what takes time, while a prompt is linear in its tokens. Pure: measured times come in, coefficients go out, in
//! `EngineLoad` and from there to whoever plans.
//!
//! The fit is over a small sample of *every kind* of step, not over the last steps: a node may decode for an hour
//! between two prompts, and recursive least squares with forgetting would by then have forgotten what a prompt costs
//! (and extrapolate wildly). Kinds are powers of two of the four quantities; each keeps its last few steps. Steps of
//! decode alone, of prompts alone and of both have [`KINDS`] kinds each at most: what was not seen for longest leaves,
//! and an hour of the one class takes nothing from the others. The fit minimizes the sum of *relative absolute* errors
//! (reweighted least squares), under which a few steps that the system interrupted do not count, and keeps the
//! coefficients from being negative, so that predictions grow with the work. A term of which nothing was seen is like
//! the other class's: who has only decoded expects a prompt's token to cost what a decode token does. A few steps of
//! one size or of few positions do not tell what a position costs: positions grow with the square of a prompt, and what
//! is wrong by a millisecond makes a long one take hours.
use std::collections::{BTreeMap, VecDeque};

use crate::executor::{Batch, BatchItem, Tokens};

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
/// Kinds of one class: of decode alone, of prompts alone, of both. So a fit is over 3 · 32 · 8 steps at most.
const KINDS: usize = 32;
/// How much a term resembles the other class's, as a part of what the steps say of it.
const ALIKE: f64 = 1e-6;
/// What a position costs is believed where tokens attend to more than about so many,
const BELIEVED_FROM: f64 = 10.0;
/// or after many more steps than these.
const FEW: f64 = 8.0;
/// How much terms of which only the sum is known share it, as a part of what the steps say of each.
const SHARED: f64 = 1e-9;
/// Base, decode token and context, prompt token and context.
const TERMS: usize = 5;
/// Relative errors below this count alike: they are the clock's and the system's.
const NOISE: f64 = 0.02;

/// What a step's time depends on. A position counts once for each token that attends to it: a token behind `n` others
/// attends to `n + 1`, a prompt of `n` tokens to `n · (n + 1) / 2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Sequences that decode, one token each and its drafts.
    pub decode_tokens: usize,
    /// Positions that these attend to.
    pub decode_context: usize,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Positions that these attend to.
    pub prompt_context: usize,
}

impl StepShape {
    /// Of a planned step.
    pub fn of(batch: &Batch) -> Self {
        let mut shape = Self::default();
        for item in &batch.items {
            let rows = item.rows();
            if decodes(item) {
                shape.decode_tokens += rows;
                // Drafts are attended together with the token before them: their KV is read once.
                shape.decode_context += item.start + rows;
            } else {
                shape.prompt_tokens += rows;
                shape.prompt_context += positions(item.start, rows);
            }
        }
        shape
    }

    /// Of `tokens` of one prompt, behind `start` others.
    pub fn prompt(start: usize, tokens: usize) -> Self {
        Self { prompt_tokens: tokens, prompt_context: positions(start, tokens), ..Self::default() }
    }

    /// Tokens of both kinds.
    pub fn tokens(&self) -> usize {
        self.decode_tokens + self.prompt_tokens
    }

    /// Positions of both kinds.
    pub fn context(&self) -> usize {
        self.decode_context + self.prompt_context
    }
}

/// One token after which one is chosen: executors compute it as a row of the decode batch, whether it is given or not.
/// So it is with a prompt's last chunk of one token. Everything else is prompt, also what a preempted sequence computes
/// again.
fn decodes(item: &BatchItem) -> bool {
    match &item.tokens {
        Tokens::Last => true,
        Tokens::Given(tokens) => tokens.len() == 1 && item.choose.is_some(),
    }
}

fn positions(start: usize, tokens: usize) -> usize {
    tokens * start + tokens * (tokens + 1) / 2
}

/// Coefficients of a step's time; all zero before the first step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    /// Of every step.
    pub base_ms: f64,
    /// Of each sequence that decodes, and of each draft.
    pub decode_token_ms: f64,
    /// Of each position that these attend to.
    pub decode_context_ms: f64,
    /// Of each token of a prompt.
    pub token_ms: f64,
    /// Of each position that these attend to.
    pub context_ms: f64,
}

impl StepCost {
    /// Milliseconds that such a step takes.
    pub fn predict_ms(&self, shape: StepShape) -> f64 {
        dot(&self.terms(), &features(shape))
    }

    /// Of a machine on which everything takes `factor` times as long.
    pub fn times(&self, factor: f64) -> Self {
        Self::of(self.terms().map(|term| factor * term))
    }

    fn of([base_ms, decode_token_ms, decode_context_ms, token_ms, context_ms]: [f64; TERMS]) -> Self {
        Self { base_ms, decode_token_ms, decode_context_ms, token_ms, context_ms }
    }

    /// In the order of [`features`].
    fn terms(&self) -> [f64; TERMS] {
        [self.base_ms, self.decode_token_ms, self.decode_context_ms, self.token_ms, self.context_ms]
    }
}

/// The steps kept, and the coefficients that fit them.
#[derive(Debug, Default)]
pub struct StepModel {
    /// By the bits of the shape's four numbers. Ordered, so that sums of floats are alike from run to run.
    kinds: BTreeMap<Kind, VecDeque<Sample>>,
    steps: u64,
    cost: StepCost,
}

/// Steps whose shapes have numbers of equally many bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind([u32; TERMS - 1]);

impl Kind {
    fn of(shape: StepShape) -> Self {
        let StepShape { decode_tokens, decode_context, prompt_tokens, prompt_context } = shape;
        Self([decode_tokens, decode_context, prompt_tokens, prompt_context].map(|of| usize::BITS - of.leading_zeros()))
    }

    /// Whether there is decode in it, and whether there are prompts.
    fn class(&self) -> (bool, bool) {
        (self.0[0] > 0, self.0[2] > 0)
    }
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
        if !(ms.is_finite() && ms > 0.0) || shape.tokens() == 0 {
            return;
        }
        self.steps += 1;
        let kind = Kind::of(shape);
        self.make_room(kind);
        let kept = self.kinds.entry(kind).or_default();
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

    /// For a kind that is not among those of its class.
    fn make_room(&mut self, kind: Kind) {
        if self.kinds.contains_key(&kind) {
            return;
        }
        let of_class = || self.kinds.iter().filter(|(other, _)| other.class() == kind.class());
        if of_class().count() < KINDS {
            return;
        }
        let seen = |kept: &VecDeque<Sample>| kept.back().map_or(0, |sample| sample.step);
        if let Some(oldest) = of_class().min_by_key(|(_, kept)| seen(kept)).map(|(other, _)| *other) {
            self.kinds.remove(&oldest);
        }
    }

    /// Iteratively reweighted least squares: weights 1/|error| turn the sum of squares into that of absolute errors.
    fn fit(&mut self) {
        let sample = |sample: &Sample| {
            let age = (self.steps - sample.step) as f64;
            (features(sample.shape).map(|feature| feature / sample.ms), (-age / HALF_LIFE_STEPS).exp2())
        };
        let samples: Vec<_> = self.kinds.values().flatten().map(sample).collect();
        let mut terms = self.cost.terms();
        for round in 0..ROUNDS {
            let mut normal = Normal::default();
            for (row, freshness) in &samples {
                let error = dot(&terms, row) - 1.0;
                // At first there is no fit whose errors mean something.
                let trust = if round == 0 && self.steps <= FIRST_STEPS { 1.0 } else { 1.0 / error.abs().max(NOISE) };
                normal.add(row, trust * freshness);
            }
            normal.mirror();
            normal.doubt(2, 1);
            normal.doubt(4, 3);
            normal.liken(1, 3);
            normal.liken(2, 4);
            normal.share();
            terms = normal.solve();
        }
        self.cost = StepCost::of(terms);
    }
}

fn features(shape: StepShape) -> [f64; TERMS] {
    let StepShape { decode_tokens, decode_context, prompt_tokens, prompt_context } = shape;
    [1.0, decode_tokens as f64, decode_context as f64, prompt_tokens as f64, prompt_context as f64]
}

/// Normal equations of `row · x = 1`.
#[derive(Debug, Default)]
struct Normal {
    matrix: [[f64; TERMS]; TERMS],
    right: [f64; TERMS],
    /// Rows in which the term has a part.
    rows: [u32; TERMS],
}

impl Normal {
    /// One half of the matrix, see [`Self::mirror`].
    fn add(&mut self, row: &[f64; TERMS], weight: f64) {
        for i in 0..TERMS {
            let weighted = weight * row[i];
            self.right[i] += weighted;
            self.rows[i] += u32::from(row[i] > 0.0);
            let half = self.matrix[i].iter_mut().zip(row).skip(i);
            half.for_each(|(sum, value)| *sum += weighted * value);
        }
    }

    /// The other half.
    fn mirror(&mut self) {
        for i in 0..TERMS {
            for j in 0..i {
                self.matrix[i][j] = self.matrix[j][i];
            }
        }
    }

    /// Adds `x[i] = x[j]`, with so little weight that it decides only where nothing else does. The weight is a part of
    /// the lesser one's: what has become old does not drown in it.
    fn liken(&mut self, i: usize, j: usize) {
        let (one, other) = (self.matrix[i][i], self.matrix[j][j]);
        let known = if one > 0.0 && other > 0.0 { one.min(other) } else { one.max(other) };
        let weight = ALIKE * known;
        self.matrix[i][i] += weight;
        self.matrix[j][j] += weight;
        self.matrix[i][j] -= weight;
        self.matrix[j][i] -= weight;
    }

    /// Adds up to [`FEW`] steps in which positions, `x[i]`, cost nothing, with [`BELIEVED_FROM`] positions for each of
    /// their tokens, `x[j]`.
    fn doubt(&mut self, i: usize, j: usize) {
        let steps = (FEW / f64::from(self.rows[j].max(1))).min(1.0);
        self.matrix[i][i] += steps * BELIEVED_FROM.powi(2) * self.matrix[j][j];
    }

    /// Adds that each is nothing, with so little weight that it only decides how two of which the sum is known (all
    /// steps had one size) share it.
    fn share(&mut self) {
        (0..TERMS).for_each(|i| self.matrix[i][i] *= 1.0 + SHARED);
    }

    /// The best `x` without a negative part. It solves the equations of its positive parts alone; five unknowns have
    /// so few subsets that the best is found by looking at all.
    fn solve(&self) -> [f64; TERMS] {
        let subsets = (1..1u8 << TERMS).map(|bits| std::array::from_fn(|i| bits >> i & 1 == 1));
        let solutions = subsets.filter_map(|active| self.solve_for(active));
        let loss = |x: &[f64; TERMS]| {
            let quadratic: f64 = (0..TERMS).map(|i| x[i] * dot(&self.matrix[i], x)).sum();
            quadratic - 2.0 * dot(&self.right, x)
        };
        let feasible = solutions.filter(|x| x.iter().all(|part| part.is_finite() && *part >= 0.0));
        feasible.min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap_or_default()
    }

    /// Gaussian elimination over the `active` unknowns, the others 0. Columns differ by many orders of magnitude: they
    /// are scaled to a unit diagonal.
    fn solve_for(&self, active: [bool; TERMS]) -> Option<[f64; TERMS]> {
        let scale: [f64; TERMS] = std::array::from_fn(|i| self.matrix[i][i].sqrt());
        if (0..TERMS).any(|i| active[i] && (scale[i] <= 0.0 || !scale[i].is_finite())) {
            return None;
        }
        let mut rows = [[0.0; TERMS + 1]; TERMS];
        for i in 0..TERMS {
            rows[i][i] = 1.0;
            if active[i] {
                rows[i][TERMS] = self.right[i] / scale[i];
                for j in (0..TERMS).filter(|&j| j != i && active[j]) {
                    rows[i][j] = self.matrix[i][j] / (scale[i] * scale[j]);
                }
            }
        }
        for pivot in 0..TERMS {
            let above = rows[pivot];
            for row in &mut rows[pivot + 1..] {
                let factor = row[pivot] / above[pivot];
                row.iter_mut().zip(above).for_each(|(value, above)| *value -= factor * above);
            }
        }
        let mut x = [0.0; TERMS];
        for i in (0..TERMS).rev() {
            let known: f64 = (i + 1..TERMS).map(|j| rows[i][j] * x[j]).sum();
            x[i] = (rows[i][TERMS] - known) / rows[i][i];
        }
        Some(std::array::from_fn(|i| if active[i] { x[i] / scale[i] } else { 0.0 }))
    }
}

fn dot(a: &[f64; TERMS], b: &[f64; TERMS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const LAW: StepCost =
        StepCost { base_ms: 5.0, decode_token_ms: 0.1, decode_context_ms: 0.0004, token_ms: 0.2, context_ms: 0.0002 };

    fn decode(decode_tokens: usize, decode_context: usize) -> StepShape {
        StepShape { decode_tokens, decode_context, ..StepShape::default() }
    }

    fn beside(decode: StepShape, prompt: StepShape) -> StepShape {
        let StepShape { decode_tokens, decode_context, .. } = decode;
        StepShape { decode_tokens, decode_context, ..prompt }
    }

    /// Decode batches, and now and then a chunk of a prompt.
    fn mixed(rng: &mut StdRng) -> StepShape {
        let decoding = rng.random_range(1..32);
        let (tokens, start) =
            if rng.random_bool(0.1) { (rng.random_range(2..512), rng.random_range(0..1024)) } else { (0, 0) };
        beside(decode(decoding, decoding * rng.random_range(16..1024)), StepShape::prompt(start, tokens))
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
            steps in prop::collection::vec(
                ((0usize..300, 0usize..5_000_000), (0usize..3000, 0usize..5_000_000), -1.0f64..1e5, 0usize..3), 0..100,
            ),
        ) {
            let mut model = StepModel::default();
            for ((rows, positions), (prompt_tokens, prompt_context), ms, class) in steps {
                let prompt = StepShape { prompt_tokens, prompt_context, ..StepShape::default() };
                let decode = decode(rows, positions);
                model.observe([decode, prompt, beside(decode, prompt)][class], ms);
                prop_assert!(model.cost().terms().iter().all(|part| part.is_finite() && *part >= 0.0));
            }
        }
    }

    #[test]
    fn one_kind_of_step_is_enough_to_predict_that_kind() {
        let (mut model, shape) = (StepModel::default(), decode(1, 300));
        (0..20).for_each(|_| model.observe(shape, 7.0));
        assert!((model.cost().predict_ms(shape) - 7.0).abs() < 1e-3, "{:?}", model.cost());
    }

    #[test]
    fn short_prompts_do_not_make_a_long_one_take_hours() {
        // Alone, and beside one that took less as it was not the first.
        for steps in [&[(5, 45.0)][..], &[(5, 45.0), (5, 45.0), (5, 44.0)], &[(5, 60.0), (4, 35.0)]] {
            let mut model = StepModel::default();
            steps.iter().for_each(|&(tokens, ms)| model.observe(StepShape::prompt(0, tokens), ms));
            let cost = model.cost();
            let (each, all) = (cost.token_ms, cost.predict_ms(StepShape::prompt(0, 2000)));
            assert!((4.0..13.0).contains(&each) && all < 2100.0 * 13.0, "{all} ms after {steps:?}: {cost:?}");
            // A longer one tells more.
            model.observe(StepShape::prompt(0, 505), 505.0);
            let all = model.cost().predict_ms(StepShape::prompt(0, 2000));
            assert!((1_500.0..3_000.0).contains(&all), "{all} ms after {steps:?}: {:?}", model.cost());
        }
        // Nor do a few decode steps that differ by the noise.
        let mut model = StepModel::default();
        (6..13).for_each(|context| model.observe(decode(1, context), 14.0 + 0.2 * context as f64));
        let long = model.cost().predict_ms(decode(1, 2000));
        assert!(long < 50.0, "{long} ms: {:?}", model.cost());
    }

    #[test]
    fn prompts_are_remembered_through_a_long_decode() {
        let (mut rng, mut model) = (StdRng::seed_from_u64(1), StepModel::default());
        for _ in 0..100 {
            let shape = mixed(&mut rng);
            model.observe(shape, LAW.predict_ms(shape));
        }
        for context in 0..5000 {
            let shape = decode(4, 400 + 4 * context);
            model.observe(shape, LAW.predict_ms(shape) * rng.random_range(0.9..1.1));
        }
        let prompt = StepShape::prompt(0, 512);
        let predicted = model.cost().predict_ms(prompt);
        assert!((predicted / LAW.predict_ms(prompt) - 1.0).abs() < 0.1, "{predicted} of {}", LAW.predict_ms(prompt));
    }

    #[test]
    fn a_frozen_step_leaves_the_predictions_as_they_were() {
        let mut model = StepModel::default();
        let (prompt, decode) = (StepShape::prompt(0, 256), decode(4, 1200));
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
        let slower = StepCost {
            base_ms: 9.0,
            decode_token_ms: 0.3,
            decode_context_ms: 0.001,
            token_ms: 0.5,
            context_ms: 0.0005,
        };
        for law in [LAW, slower] {
            for _ in 0..1000 {
                let shape = mixed(&mut rng);
                model.observe(shape, law.predict_ms(shape));
            }
        }
        assert!(errors(&model, slower, &mut rng)[100] < 0.05, "{:?}", model.cost());
    }

    /// The cost after 400 mixed steps that follow `law`.
    fn fitted(law: StepCost) -> StepCost {
        let (mut rng, mut model) = (StdRng::seed_from_u64(3), StepModel::default());
        for _ in 0..400 {
            let shape = mixed(&mut rng);
            model.observe(shape, law.predict_ms(shape));
        }
        model.cost()
    }

    #[test]
    fn each_term_is_found_in_mixed_steps() {
        let found = fitted(LAW);
        for (found, law) in found.terms().into_iter().zip(LAW.terms()) {
            assert!((found / law - 1.0).abs() < 0.02, "{found} of {law}");
        }
    }

    #[test]
    fn a_flat_part_does_not_flatten_the_other() {
        let flat_decode = StepCost { decode_token_ms: 0.0, decode_context_ms: 0.0, ..LAW };
        let found = fitted(flat_decode);
        assert!((found.token_ms / LAW.token_ms - 1.0).abs() < 0.02, "{found:?}");
        assert!(found.decode_token_ms < 0.01 * LAW.token_ms && found.decode_context_ms < 1e-6, "{found:?}");
        let flat_prompt = StepCost { token_ms: 0.0, context_ms: 0.0, ..LAW };
        let found = fitted(flat_prompt);
        assert!((found.decode_token_ms / LAW.decode_token_ms - 1.0).abs() < 0.02, "{found:?}");
        assert!(found.token_ms < 0.01 * LAW.decode_token_ms && found.context_ms < 1e-6, "{found:?}");
    }

    #[test]
    fn what_was_never_seen_costs_what_the_other_kind_does() {
        let mut rng = StdRng::seed_from_u64(4);
        let (mut decoded, mut prompted) = (StepModel::default(), StepModel::default());
        for _ in 0..200 {
            let rows = rng.random_range(1..64);
            let decode = decode(rows, rows * rng.random_range(1..2000));
            decoded.observe(decode, LAW.predict_ms(decode));
            let prompt = StepShape::prompt(rng.random_range(0..1000), rng.random_range(2..512));
            prompted.observe(prompt, LAW.predict_ms(prompt));
        }
        for cost in [decoded.cost(), prompted.cost()] {
            assert!((cost.token_ms / cost.decode_token_ms - 1.0).abs() < 0.01, "{cost:?}");
            assert!((cost.context_ms / cost.decode_context_ms - 1.0).abs() < 0.01, "{cost:?}");
        }
        assert!((decoded.cost().token_ms / LAW.decode_token_ms - 1.0).abs() < 0.02, "{:?}", decoded.cost());
        assert!((prompted.cost().decode_token_ms / LAW.token_ms - 1.0).abs() < 0.02, "{:?}", prompted.cost());
    }

    #[test]
    fn kinds_are_bounded_and_each_class_keeps_its_own() {
        let mut model = StepModel::default();
        let prompt = StepShape::prompt(0, 300);
        model.observe(prompt, 50.0);
        for bits in 0..20 * 40 {
            let decode = decode(1 << (bits % 20), 1 << (bits / 20));
            model.observe(decode, 5.0);
            model.observe(beside(decode, StepShape::prompt(1 << (bits % 10), 20)), 9.0);
        }
        let of = |class| model.kinds.keys().filter(|kind| kind.class() == class).count();
        assert_eq!((of((true, false)), of((true, true)), of((false, true))), (KINDS, KINDS, 1));
        assert!(model.kinds.contains_key(&Kind::of(prompt)));
    }

    #[test]
    #[ignore = "a benchmark; run with --release -- --ignored --nocapture"]
    fn time_of_a_fit() {
        let mut model = StepModel::default();
        for bits in 0..20 * 40 * KEPT {
            let (decode, prompt) =
                (decode(1 << (bits % 20), 1 << (bits / 20 % 40)), StepShape::prompt(bits % 3000, 1 + bits % 512));
            [decode, prompt, beside(decode, prompt)]
                .iter()
                .for_each(|&shape| model.observe(shape, LAW.predict_ms(shape)));
        }
        let begin = std::time::Instant::now();
        (0..100).for_each(|_| model.fit());
        let samples: usize = model.kinds.values().map(VecDeque::len).sum();
        println!("{samples} steps of {} kinds: {:?} a fit", model.kinds.len(), begin.elapsed() / 100);
    }
}
