//! Runs for the tests of the reports: small ones whose numbers can be worked out by hand, a larger one that looks like
//! a benchmark, and any.
use proptest::prelude::*;

use crate::cost_model::{Model, StepCost};
use crate::record::{Interval, Nodes, Objectives, Outcome, Phases, Record, Run, RunInfo};

/// Of all tests here.
pub const GOALS: Objectives = Objectives { ttft_ms: 400.0, tpot_ms: 40.0 };

/// An answered request with a prompt of 100 tokens, 25 of them cached.
pub fn record(intended: f64, chunks: &[(f64, u32)]) -> Record {
    Record {
        index: 0,
        row: "row".into(),
        endpoint: 0,
        intended,
        sent: intended,
        prompt_tokens: 100,
        cached_tokens: 25,
        max_tokens: 64,
        chunks: chunks.to_vec(),
        ended: chunks.last().map_or(intended + 0.5, |chunk| chunk.0),
        outcome: Outcome::Ok,
        phases: None,
        nodes: Nodes::default(),
        trace_id: None,
    }
}

/// Without a token, over after half a second.
pub fn with_outcome(intended: f64, outcome: Outcome) -> Record {
    Record { outcome, ..record(intended, &[]) }
}

/// One token after 100 ms.
pub fn with_phases(phases: Phases) -> Record {
    Record { phases: Some(phases), ..record(0.0, &[(0.1, 1)]) }
}

/// Of the row "row", at one request a second.
pub fn interval(seconds: f64, records: Vec<Record>) -> Interval {
    Interval { row: "row".into(), rate: Some(1.0), seconds, records, ..Interval::default() }
}

/// Of a small machine.
pub fn model() -> Model {
    let cost = StepCost { base_ms: 8.0, token_ms: 0.4, context_ms: 0.0005, ..Default::default() };
    Model {
        weight_bytes: Some(2.7e8),
        kv_bytes_per_token: Some(23_040.0),
        memory_gb_per_s: Some(25.0),
        prefill_tokens_per_s: Some(2500.0),
        prefill_cost: Some(cost),
        decode_cost: Some(cost),
        decode_nodes: 1,
        ..Model::default()
    }
}

/// Two endpoints over a sweep of rates with three repeats each, and a row with a shared prefix, cold and warm.
pub fn sample_run() -> Run {
    let mut dice = Dice(42);
    let mut intervals = Vec::new();
    let mut began = 0.0;
    for rate in [2.0, 4.0, 8.0, 16.0] {
        for repeat in 0..3 {
            for endpoint in [0, 1] {
                let slowness = if endpoint == 0 { 1.0 } else { 1.35 };
                // The queue of an open loop: it explodes near 14 requests a second.
                let queue_ms = if rate > 14.0 { 900.0 } else { 40.0 * rate / (14.0 - rate) };
                let shape =
                    Shape { prompt: 180, cached: 16, queue_ms, prefill_ms: 75.0 * slowness, step_ms: 14.0 * slowness };
                let mut interval = dice.interval("short chat", began, rate, shape);
                (interval.endpoint, interval.repeat) = (endpoint, repeat);
                began += interval.seconds + 2.0;
                intervals.push(interval);
            }
        }
    }
    for (warm, cached, prefill_ms) in [(false, 0, 820.0), (true, 1920, 60.0)] {
        let shape = Shape { prompt: 2048, cached, queue_ms: 9.0, prefill_ms, step_ms: 16.0 };
        let mut interval = dice.interval("shared prefix", began, 1.0, shape);
        interval.warm = warm;
        began += interval.seconds + 2.0;
        intervals.push(interval);
    }
    Run { info: info(), intervals }
}

fn info() -> RunInfo {
    RunInfo {
        command: ["tandem", "bench", "--rows", "a,e", "--sweep", "--repeats", "3"].map(str::to_owned).to_vec(),
        tandem_version: "0.1.0".into(),
        commit: "b1eec6e".into(),
        started_unix_s: 1_795_312_800,
        machine: "2 cores, AVX-512".into(),
        endpoints: vec!["http://127.0.0.1:8000".into(), "http://127.0.0.1:8001".into()],
        model: "SmolLM2-135M-Instruct".into(),
        dtype: "bf16".into(),
        seed: 42,
        server_flags: vec!["--prefill 1".into(), "--decode 1".into()],
        own_lag_p99_ms: 0.4,
        own_lag_max_ms: 1.9,
        ..RunInfo::default()
    }
}

/// How requests of an interval go.
#[derive(Clone, Copy)]
struct Shape {
    prompt: u32,
    cached: u32,
    queue_ms: f64,
    prefill_ms: f64,
    step_ms: f64,
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    /// 0 .. 1.
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1_u64 << 24) as f64
    }

    /// Around 1, with a long tail.
    fn spread(&mut self) -> f64 {
        0.7 + 0.5 * self.roll() + if self.roll() > 0.95 { 1.5 * self.roll() } else { 0.0 }
    }

    fn interval(&mut self, row: &str, began: f64, rate: f64, shape: Shape) -> Interval {
        let seconds = 20.0;
        let (mut at, mut records) = (began, Vec::new());
        loop {
            at += -(1.0 - self.roll()).ln() / rate;
            if at > began + seconds {
                break;
            }
            records.push(self.request(row, at, shape));
        }
        Interval { row: row.into(), rate: Some(rate), seconds, records, ..Interval::default() }
    }

    fn request(&mut self, row: &str, at: f64, shape: Shape) -> Record {
        let sent = at + 0.0004 * self.roll();
        if shape.queue_ms > 500.0 && self.roll() > 0.9 {
            let outcome = Outcome::Refused { retry_after_s: Some(1.0) };
            return Record { row: row.into(), sent, ended: sent + 0.01, ..with_outcome(at, outcome) };
        }
        let (queue_ms, prefill_ms) = (shape.queue_ms * self.spread(), shape.prefill_ms * self.spread());
        let ttft_ms = queue_ms + 0.3 + prefill_ms;
        let mut now = sent + (ttft_ms + 1.2 + self.roll()) / 1e3;
        let mut chunks = vec![(now, 1)];
        for _ in 0..(16 + (self.roll() * 40.0) as u32) {
            let stall = if self.roll() > 0.996 { 120.0 * self.roll() } else { 0.0 };
            now += (shape.step_ms * self.spread() + stall) / 1e3;
            chunks.push((now, 1));
        }
        let phases = Phases {
            queue_ms,
            route_ms: 0.3,
            prefill_ms,
            ttft_ms,
            transfer_exposed_ms: 2.0 * self.roll(),
            transfer_total_ms: 9.0,
            handoff_gap_ms: shape.step_ms + 3.0,
            kv_bytes: 4_000_000,
            kv_gbps: 2.1,
            predicted_ttft_ms: (prefill_ms + 0.3) * (0.85 + 0.3 * self.roll()),
            ..Phases::default()
        };
        Record {
            row: row.into(),
            sent,
            prompt_tokens: shape.prompt,
            cached_tokens: shape.cached,
            ended: now + 0.001,
            phases: Some(phases),
            ..record(at, &chunks)
        }
    }
}

/// Runs of up to five intervals with anything in them, times that are not numbers included.
pub fn any_run() -> impl Strategy<Value = Run> {
    let info = (text(), any::<u64>()).prop_map(|(model, seed)| RunInfo {
        model: model.clone(),
        machine: model,
        seed,
        ..RunInfo::default()
    });
    (info, prop::collection::vec(any_interval(), 0..5)).prop_map(|(info, intervals)| Run { info, intervals })
}

fn text() -> impl Strategy<Value = String> {
    // Neither "nan" nor "inf" can come of these letters: the tests look for them.
    "[<>&\"'=;, \\n\\x00-\\x1fé0-9x-z]{0,12}"
}

fn time() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0..20.0_f64, 1 => Just(0.0), 1 => prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(-1e300)]]
}

fn any_interval() -> impl Strategy<Value = Interval> {
    let load = prop_oneof![
        (0.01..100.0_f64).prop_map(|rate| (Some(rate), None)),
        Just((Some(2.0), None)),
        (0..64_u32).prop_map(|concurrency| (None, Some(concurrency))),
        Just((Some(f64::NAN), None)),
    ];
    let shape = (prop_oneof![Just("row".to_owned()), text()], 0..2_u8, 0..3_u32, load, any::<bool>(), time());
    (shape, prop::collection::vec(any_record(), 0..14)).prop_map(
        |((row, endpoint, repeat, load, warm, seconds), records)| Interval {
            row,
            endpoint,
            repeat,
            rate: load.0,
            concurrency: load.1,
            warm,
            seconds,
            window_from: warm.then_some(3.0),
            notes: Vec::new(),
            records,
        },
    )
}

fn any_record() -> impl Strategy<Value = Record> {
    let outcome = prop_oneof![
        6 => Just(Outcome::Ok),
        1 => Just(Outcome::Refused { retry_after_s: Some(f64::NAN) }),
        1 => (text(), text()).prop_map(|(kind, message)| Outcome::Failed { kind, message }),
        1 => Just(Outcome::Unfinished),
    ];
    let phases = prop::option::of((time(), time(), time(), any::<bool>()).prop_map(
        |(queue_ms, prefill_ms, predicted_ttft_ms, local)| {
            let (ttft_ms, kv_bytes) = (queue_ms + prefill_ms, 5);
            Phases { queue_ms, prefill_ms, ttft_ms, predicted_ttft_ms, local, kv_bytes, ..Phases::default() }
        },
    ));
    let times = (time(), time(), time(), prop::collection::vec((time(), 0..4_u32), 0..8));
    (times, outcome, phases, text()).prop_map(|((intended, sent, ended, chunks), outcome, phases, node)| Record {
        nodes: Nodes::named(&node, "d0").unwrap_or_default(),
        sent,
        ended,
        outcome,
        phases,
        ..record(intended, &chunks)
    })
}
