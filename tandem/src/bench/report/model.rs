//! What the hardware, or the nodes' own step costs, allow for a point (pure), to stand beside what was measured.
//!
//! - **Decode**, by bandwidth: a step reads all weights and the KV of its whole batch, so TPOT ≥ (weights + batch × context × KV of a token) / bandwidth.
//! - **Prefill**, by compute: time ≥ uncached tokens × FLOP of a token / FLOP a second (or tokens / the prefill rate, where that was measured).
//! - By **step cost**, a step of t tokens that attend to p positions takes base + token · t + context · p: the nodes measure it themselves. It is no
//!   bound but a forecast; hardware, where known, comes first.
//!
//! The batch is the one that the tokens really met: the mean number of answers that were being decoded, weighted by how many were, divided by the
//! decode nodes. The share reached is predicted / measured: 1 means that nothing is lost.
use serde::{Deserialize, Serialize};

use crate::bench::record::{Interval, Record};
use crate::bench::stats::figures::Figures;
use crate::bench::stats::ratio;
use crate::bench::stats::request::is_ok;

/// What is known of the server; everything may be missing. Numbers that are not positive count as missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Bytes of weights that one decode step reads.
    pub weight_bytes: Option<f64>,
    /// Of all layers, K and V.
    pub kv_bytes_per_token: Option<f64>,
    /// Of one decode node, 10⁹ bytes a second.
    pub memory_gb_per_s: Option<f64>,
    /// Some twice the parameters.
    pub flop_per_token: Option<f64>,
    /// Of one prefill node, 10⁹ operations a second.
    pub compute_gflop_per_s: Option<f64>,
    /// Of one prefill node, measured; comes before the two above.
    pub prefill_tokens_per_s: Option<f64>,
    /// As prefill nodes report it.
    pub prefill_cost: Option<StepCost>,
    /// As decode nodes report it.
    pub decode_cost: Option<StepCost>,
    /// 0 counts as 1.
    pub decode_nodes: u32,
}

/// A step of t tokens that attend to p positions takes `base_ms + token_ms · t + context_ms · p`, as `v1::StepCost` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    pub base_ms: f64,
    pub token_ms: f64,
    pub context_ms: f64,
}

impl StepCost {
    fn ms(self, tokens: f64, positions: f64) -> f64 {
        self.base_ms + self.token_ms * tokens + self.context_ms * positions
    }
}

/// What a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Bandwidth,
    Compute,
    PrefillRate,
    StepCost,
}

/// A time beside its measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    pub predicted_ms: f64,
    pub measured_ms: f64,
    /// predicted / measured.
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
        let prefill_ms = figures.server.prefill_ms.median().or_else(|| figures.ttft_ms.median());
        Prediction {
            batch,
            context_tokens,
            uncached_tokens,
            tpot: self.step(batch, context_tokens).and_then(|of| of.beside(figures.tpot_ms.median())),
            prefill: self.prefill(uncached_tokens, cached).and_then(|of| of.beside(prefill_ms)),
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
            let ms = cost.ms(batch, positions);
            // Weights are read once a step, KV once a position; the tokens themselves are computed.
            let memory_share = ratio(cost.ms(0.0, positions), ms);
            Some(Forecast { ms, source: Source::StepCost, memory_share })
        })
    }

    /// Time to prefill `uncached` tokens behind `cached` ones, alone on a node and in one step.
    fn prefill(&self, uncached: f64, cached: f64) -> Option<Forecast> {
        let by_rate = positive(self.prefill_tokens_per_s).map(|rate| (uncached / rate * 1e3, Source::PrefillRate));
        let by_compute = || {
            let (flop, gflop_per_s) = positive(self.flop_per_token).zip(positive(self.compute_gflop_per_s))?;
            Some((uncached * flop / gflop_per_s / 1e6, Source::Compute))
        };
        if let Some((ms, source)) = by_rate.or_else(by_compute) {
            return Some(Forecast { ms, source, memory_share: 0.0 });
        }
        let cost = self.prefill_cost?;
        let ms = cost.ms(uncached, uncached * cached + uncached * (uncached + 1.0) / 2.0);
        Some(Forecast { ms, source: Source::StepCost, memory_share: ratio(cost.base_ms, ms) })
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
        let cost = StepCost { base_ms: 10.0, token_ms: 2.0, context_ms: 0.01 };
        let of =
            predict(&Model { prefill_cost: Some(cost), decode_cost: Some(cost), decode_nodes: 3, ..Model::default() });
        // A batch of 0.5 is one sequence: 10 + 2 + 0.01 × 105.5.
        let tpot = of.tpot.unwrap();
        assert!(of.batch == 1.0 && (tpot.predicted_ms - 13.055).abs() < 1e-9);
        assert!((tpot.memory_share - 11.055 / 13.055).abs() < 1e-9);
        // 75 tokens behind 25: 10 + 150 + 0.01 × (75 × 25 + 75 × 76 / 2).
        assert!((of.prefill.unwrap().predicted_ms - 207.25).abs() < 1e-9);
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
