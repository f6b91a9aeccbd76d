//! What the hardware, or the nodes' own step costs, allow for a point (pure), to stand beside what was measured.
//!
//! - **Decode**, by bandwidth: a step reads all weights and the KV of its whole batch, so TPOT ≥ (weights + batch ×
//!   context × KV of a token) / bandwidth.
//! - **Prefill**, by compute: time ≥ uncached tokens × FLOP of a token / FLOP a second (or tokens / the prefill rate,
//!   where that was measured).
//! - By **step cost**, a step of t tokens that attend to p positions takes base + token · t + context · p: the nodes
//!   measure it themselves. A prompt has a base for each step of the node's budget. It is no bound but a forecast, and
//!   says nothing of the hardware; hardware, where known, comes first.
//!
//! Each answer is forecast by itself and set beside its own measurement, and the medians of both, and of their ratio,
//! are told: the mean prompt beside the median time would compare two different requests.
//!
//! The batch is the one that the tokens really met: the mean number of answers that were being decoded, weighted by how
//! many were, divided by the decode nodes. The share reached is predicted / measured: 1 means that nothing is lost.
use serde::Serialize;

use super::Point;
use crate::cost_model::Model;
use crate::record::{Interval, Objectives, Record};
use crate::stats::figures::Figures;
use crate::stats::request::{Seen, is_ok};
use crate::stats::{Distribution, ratio};

/// Times do not depend on them.
const NO_OBJECTIVES: Objectives = Objectives { ttft_ms: 0.0, tpot_ms: 0.0 };

/// What a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Bandwidth,
    Compute,
    PrefillRate,
    StepCost,
}

impl Source {
    /// Whether it is a figure of the hardware: only then does a forecast bound what is possible.
    pub fn is_hardware(self) -> bool {
        self != Self::StepCost
    }

    /// For people.
    pub fn label(self) -> &'static str {
        match self {
            Self::Bandwidth => "bandwidth",
            Self::Compute => "compute",
            Self::PrefillRate => "prefill rate",
            Self::StepCost => "own step cost",
        }
    }
}

/// A time beside its measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    pub predicted_ms: f64,
    pub measured_ms: f64,
    /// predicted / measured: the median over the answers.
    pub share_reached: f64,
    pub source: Source,
    /// Of the predicted time, what is reading memory and not computing; 1 for bandwidth, 0 for compute.
    pub memory_share: f64,
}

/// Of one point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Sequences in a decode node's step, as its tokens met them; at least 1.
    pub batch: f64,
    /// Mean positions that a generated token attends to.
    pub context_tokens: f64,
    /// Mean prompt tokens that were not cached.
    pub uncached_tokens: f64,
    /// Beside the median TPOT.
    pub tpot: Option<Predicted>,
    /// Beside the server's median prefill phase, or the median TTFT where it told none.
    pub prefill: Option<Predicted>,
}

impl Model {
    /// For the answers of `intervals`, whose numbers are `figures`.
    pub fn predict(&self, intervals: &[&Interval], figures: &Figures) -> Prediction {
        let completed = figures.completed as f64;
        let mean = |total: u64| ratio(total as f64, completed);
        let prompt = mean(figures.prompt_tokens);
        let cached = mean(figures.cached_tokens).min(prompt);
        let context_tokens = prompt + mean(figures.output_tokens) / 2.0;
        let batch = (concurrency(intervals) / f64::from(self.decode_nodes.max(1))).max(1.0);
        let uncached_tokens = prompt - cached;
        let told = figures.server.prefill_ms.count() > 0;
        let answers = || intervals.iter().flat_map(|interval| interval.measured()).filter(|record| is_ok(record));
        let tpot = answers().filter_map(|record| {
            let seen = Seen::of(record, NO_OBJECTIVES);
            let context_tokens = f64::from(record.prompt_tokens) + seen.output_tokens as f64 / 2.0;
            self.step(batch, context_tokens)?.beside(seen.tpot_ms)
        });
        let prefill = answers().filter_map(|record| {
            let phase_ms = record.phases.map(|phases| phases.prefill_ms);
            let measured_ms = if told { phase_ms } else { Seen::of(record, NO_OBJECTIVES).ttft_ms };
            self.prefill(record)?.beside(measured_ms)
        });
        Prediction {
            batch,
            context_tokens,
            uncached_tokens,
            tpot: typical(tpot.collect()),
            prefill: typical(prefill.collect()),
        }
    }

    /// Time of one decode step of `batch` sequences.
    fn step(&self, batch: f64, context_tokens: f64) -> Option<Forecast> {
        let positions = batch * context_tokens;
        let hardware = positive(self.weight_bytes).zip(positive(self.memory_gb_per_s)).map(|(weights, gb_per_s)| {
            let bytes = weights + positions * positive(self.kv_bytes_per_token).unwrap_or_default();
            Forecast { ms: bytes / gb_per_s / 1e6, source: Source::Bandwidth, memory_share: 1.0 }
        });
        hardware.or_else(|| {
            let cost = self.decode_cost?;
            let ms = cost.decode_ms(batch, positions);
            // Weights are read once a step, KV once a position; the tokens themselves are computed.
            let memory_share = ratio(cost.decode_ms(0.0, positions), ms);
            Some(Forecast { ms, source: Source::StepCost, memory_share })
        })
    }

    /// Time to prefill the prompt's tokens that were not cached, alone on the node that did it.
    fn prefill(&self, record: &Record) -> Option<Forecast> {
        let cached = record.cached_tokens.min(record.prompt_tokens);
        let (uncached, cached) = (f64::from(record.prompt_tokens - cached), f64::from(cached));
        let by_rate = positive(self.prefill_tokens_per_s).map(|rate| (uncached / rate * 1e3, Source::PrefillRate));
        let by_compute = || {
            let (flop, gflop_per_s) = positive(self.flop_per_token).zip(positive(self.compute_gflop_per_s))?;
            Some((uncached * flop / gflop_per_s / 1e6, Source::Compute))
        };
        if let Some((ms, source)) = by_rate.or_else(by_compute) {
            return Some(Forecast { ms, source, memory_share: 0.0 });
        }
        // A decode node that computes a prompt does so at its own cost.
        let is_local = record.phases.is_some_and(|phases| phases.local);
        let cost = if is_local { self.decode_cost.or(self.prefill_cost) } else { self.prefill_cost }?;
        let steps = positive(self.prefill_step_tokens).map_or(1.0, |budget| (uncached / budget).ceil().max(1.0));
        let more_ms = (steps - 1.0) * cost.base_ms;
        let ms = cost.prompt_ms(uncached, uncached * cached + uncached * (uncached + 1.0) / 2.0) + more_ms;
        Some(Forecast { ms, source: Source::StepCost, memory_share: ratio(cost.base_ms + more_ms, ms) })
    }
}

/// What the predictions of these points are, in a few words.
pub fn title(points: &[Point]) -> &'static str {
    let of = points.iter().filter_map(|point| point.prediction);
    let mut sources = of.flat_map(|of| [of.tpot, of.prefill]).flatten().map(|of| of.source);
    match (sources.clone().any(Source::is_hardware), sources.any(|source| !source.is_hardware())) {
        (true, false) => "the hardware allows",
        (false, _) => "the nodes' own cost model",
        (true, true) => "the hardware allows, or the nodes' own cost model",
    }
}

impl Prediction {
    /// What it rests on: of TPOT and then of prefill, said once where they are alike.
    pub fn sources(&self) -> String {
        let mut labels: Vec<&str> =
            [self.tpot, self.prefill].into_iter().flatten().map(|of| of.source.label()).collect();
        labels.dedup();
        labels.join(", ")
    }
}

struct Forecast {
    ms: f64,
    source: Source,
    memory_share: f64,
}

impl Forecast {
    /// None where either is missing or nonsense.
    fn beside(self, measured_ms: Option<f64>) -> Option<Predicted> {
        let (predicted_ms, measured_ms) = positive(Some(self.ms)).zip(positive(measured_ms))?;
        let share_reached = ratio(predicted_ms, measured_ms);
        let memory_share = self.memory_share.clamp(0.0, 1.0);
        Some(Predicted { predicted_ms, measured_ms, share_reached, source: self.source, memory_share })
    }
}

/// The medians of all; None without any.
fn typical(each: Vec<Predicted>) -> Option<Predicted> {
    let source = each.first()?.source;
    let median = |of: fn(&Predicted) -> f64| Distribution::of(each.iter().map(of)).median();
    Some(Predicted {
        predicted_ms: median(|of| of.predicted_ms)?,
        measured_ms: median(|of| of.measured_ms)?,
        share_reached: median(|of| of.share_reached)?,
        source,
        memory_share: median(|of| of.memory_share)?,
    })
}

fn positive(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value > 0.0)
}

/// How many answers were being decoded at a time, as their tokens met it: ∫ n² dt / ∫ n dt over all intervals.
fn concurrency(intervals: &[&Interval]) -> f64 {
    let (mut squared, mut plain) = (0.0, 0.0);
    for interval in intervals {
        let spans = interval.records.iter().filter(|record| is_ok(record)).filter_map(decoding);
        let mut edges: Vec<(f64, f64)> = spans.flat_map(|(from, to)| [(from, 1.0), (to, -1.0)]).collect();
        edges.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let (mut running, mut since) = (0.0, 0.0);
        for (at, change) in edges {
            let passed = if running > 0.0 { at - since } else { 0.0 };
            squared += running * running * passed;
            plain += running * passed;
            running += change;
            since = at;
        }
    }
    ratio(squared, plain)
}

/// From the first token to the last.
fn decoding(record: &Record) -> Option<(f64, f64)> {
    let (from, to) = (record.chunks.first()?.0, record.chunks.last()?.0);
    (from.is_finite() && to.is_finite() && from < to).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS};
    use super::*;
    use crate::cost_model::StepCost;
    use crate::record::Phases;

    /// Two answers of 11 tokens, 0.1 s apart: one from 1 to 2 s, one from 1.5 to 2.5 s.
    fn two() -> Interval {
        let answer = |from: f64| -> Vec<(f64, u32)> { (0..11).map(|i| (from + f64::from(i) / 10.0, 1)).collect() };
        fixture::interval(5.0, vec![fixture::record(0.5, &answer(1.0)), fixture::record(1.0, &answer(1.5))])
    }

    fn predict(model: &Model) -> Prediction {
        let interval = two();
        model.predict(&[&interval], &Figures::of(&[&interval], GOALS))
    }

    #[test]
    fn bandwidth_by_hand() {
        let model = Model {
            weight_bytes: Some(1e9),
            kv_bytes_per_token: Some(1e6),
            memory_gb_per_s: Some(20.0),
            ..Model::default()
        };
        let of = predict(&model);
        // One for 1 s, two for half a second: (1 + 4 × 0.5) / (1 + 2 × 0.5).
        assert!((of.batch - 1.5).abs() < 1e-9);
        assert!((of.context_tokens - 105.5).abs() < 1e-9 && (of.uncached_tokens - 75.0).abs() < 1e-9);
        // (10⁹ + 1.5 × 105.5 × 10⁶) / 20 × 10⁹ s.
        let tpot = of.tpot.unwrap();
        assert!((tpot.predicted_ms - 57.9125).abs() < 1e-6 && (tpot.measured_ms - 100.0).abs() < 1e-6, "{tpot:?}");
        assert!((tpot.share_reached - 0.579125).abs() < 1e-6);
        assert_eq!((tpot.source, of.prefill), (Source::Bandwidth, None));
    }

    #[test]
    fn prefill_by_hand() {
        let by_rate = Model { prefill_tokens_per_s: Some(300.0), ..Model::default() };
        let of = predict(&by_rate).prefill.unwrap();
        // 75 tokens; the fixture has no phases, so that the TTFT of 500 ms stands beside it.
        assert!((of.predicted_ms - 250.0).abs() < 1e-9 && (of.share_reached - 0.5).abs() < 1e-9, "{of:?}");
        let by_compute = Model { flop_per_token: Some(2e9), compute_gflop_per_s: Some(1000.0), ..Model::default() };
        let of = predict(&by_compute).prefill.unwrap();
        assert!((of.predicted_ms - 150.0).abs() < 1e-9 && of.source == Source::Compute);
    }

    #[test]
    fn step_costs_by_hand() {
        let cost = StepCost { base_ms: 10.0, token_ms: 2.0, context_ms: 0.01, ..Default::default() };
        let of =
            predict(&Model { prefill_cost: Some(cost), decode_cost: Some(cost), decode_nodes: 3, ..Model::default() });
        // A batch of 0.5 is one sequence: 10 + 2 + 0.01 × 105.5.
        let tpot = of.tpot.unwrap();
        assert!(of.batch == 1.0 && (tpot.predicted_ms - 13.055).abs() < 1e-9);
        assert!((tpot.memory_share - 11.055 / 13.055).abs() < 1e-9);
        // 75 tokens behind 25: 10 + 150 + 0.01 × (75 × 25 + 75 × 76 / 2).
        assert!((of.prefill.unwrap().predicted_ms - 207.25).abs() < 1e-9);
        // Decode's own terms change nothing of prefill: 10 + 0.5 + 0.001 × 105.5.
        let flat = StepCost { decode_token_ms: Some(0.5), decode_context_ms: Some(0.001), ..cost };
        let apart =
            predict(&Model { prefill_cost: Some(flat), decode_cost: Some(flat), decode_nodes: 3, ..Model::default() });
        assert!((apart.tpot.unwrap().predicted_ms - 10.6055).abs() < 1e-9);
        assert_eq!(apart.prefill, of.prefill);
    }

    #[test]
    fn each_answer_is_compared_with_its_own_forecast() {
        // Nine short prompts and a long one, each exactly as predicted: the mean prompt would forecast ten times the
        // median time.
        let cost = StepCost { base_ms: 2.0, token_ms: 1.0, ..Default::default() };
        let answer = |prompt_tokens: u32| Record {
            prompt_tokens,
            cached_tokens: 0,
            ..fixture::record(0.0, &[((2.0 + f64::from(prompt_tokens)) / 1e3, 1)])
        };
        let interval = fixture::interval(5.0, (0..10).map(|i| answer(if i == 0 { 1000 } else { 10 })).collect());
        let model = Model { prefill_cost: Some(cost), ..Model::default() };
        let of = model.predict(&[&interval], &Figures::of(&[&interval], GOALS)).prefill.unwrap();
        assert!((of.share_reached - 1.0).abs() < 1e-9 && (of.predicted_ms - 12.0).abs() < 1e-9, "{of:?}");
    }

    #[test]
    fn a_prompt_that_decode_computed_is_forecast_by_decodes_cost() {
        let cost = |token_ms| Some(StepCost { base_ms: 5.0, token_ms, ..Default::default() });
        let model = Model { prefill_cost: cost(1.0), decode_cost: cost(0.1), ..Model::default() };
        let predicted = |local| {
            let interval = fixture::interval(
                5.0,
                vec![fixture::with_phases(Phases { local, prefill_ms: 9.0, ..Phases::default() })],
            );
            model.predict(&[&interval], &Figures::of(&[&interval], GOALS)).prefill.map(|of| of.predicted_ms)
        };
        // 75 tokens.
        assert_eq!((predicted(false), predicted(true)), (Some(80.0), Some(12.5)));
    }

    #[test]
    fn a_long_prompt_has_a_base_for_each_step() {
        let cost = StepCost { base_ms: 10.0, token_ms: 2.0, ..Default::default() };
        let model = Model { prefill_cost: Some(cost), prefill_step_tokens: Some(30.0), ..Model::default() };
        // 75 tokens are three steps: 3 × 10 + 150.
        assert!((predict(&model).prefill.unwrap().predicted_ms - 180.0).abs() < 1e-9);
    }

    #[test]
    fn the_users_facts_come_first() {
        let told = Model { decode_nodes: 3, decode_cost: Some(StepCost::default()), ..Model::default() };
        let given = Model { memory_gb_per_s: Some(20.0), ..Model::default() };
        let of = Model::of(Some(&given), Some(&told)).unwrap();
        assert_eq!((of.memory_gb_per_s, of.decode_nodes, of.decode_cost), (Some(20.0), 3, told.decode_cost));
        assert_eq!(Model::of(Some(&Model { decode_nodes: 1, ..given }), Some(&told)).unwrap().decode_nodes, 1);
        assert_eq!((Model::of(None, Some(&told)), Model::of(None, Some(&Model::default()))), (Some(told), None));
    }

    #[test]
    fn nothing_known_or_nothing_measured() {
        assert_eq!((predict(&Model::default()).tpot, predict(&Model::default()).prefill), (None, None));
        let absurd = Model {
            weight_bytes: Some(f64::NAN),
            memory_gb_per_s: Some(0.0),
            prefill_tokens_per_s: Some(-1.0),
            ..fixture::model()
        };
        assert!(predict(&absurd).tpot.is_some_and(|of| of.source == Source::StepCost));
        let of = fixture::model().predict(&[], &Figures::default());
        assert_eq!((of.batch, of.context_tokens, of.tpot, of.prefill), (1.0, 0.0, None, None));
    }
}
