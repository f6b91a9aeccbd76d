//! Choices beside the engine's own sampler.
use tandem_cuda::kernels::choose::{Choice, Choose, Outcome, choose};
use tandem_engine::SamplingParams;
use tandem_engine::sampler::{self, Past};

use crate::gpu::{Gpu, Random};

/// A row of logits and what is asked of it.
struct Case {
    params: SamplingParams,
    uniform: f64,
    logits: Vec<f32>,
}

/// Rows of a step in these tests; some are unsound.
const UNSOUND: [u32; 8] = [0, 0, 1, 0, 0, 0, 0, 1];

fn outcomes(gpu: &Gpu, vocabulary: usize, logits: &[f32], choices: &[Choice]) -> Vec<Outcome> {
    let (logits_memory, unsound) = (gpu.holding(logits), gpu.holding(&UNSOUND));
    let (choice_memory, out) = (gpu.holding(choices), gpu.space::<Outcome>(choices.len()));
    gpu.launch(choose(&Choose {
        outcomes: out.mem(),
        choices: choice_memory.mem(),
        count: choices.len(),
        logits: logits_memory.mem(),
        logits_rows: logits.len() / vocabulary,
        vocabulary,
        unsound: unsound.mem(),
        rows: UNSOUND.len(),
    }));
    gpu.read(&out)
}

/// Chooses for all cases, of one vocabulary, and compares.
fn compare(gpu: &Gpu, cases: &[Case]) {
    let vocabulary = cases[0].logits.len();
    let logits: Vec<f32> = cases.iter().flat_map(|case| &case.logits).copied().collect();
    let choices: Vec<Choice> = (0..)
        .zip(cases)
        .map(|(row, case)| Choice::new(&case.params, case.uniform, row, 0, 2).expect("a choice for the device"))
        .collect();
    for (got, Case { params, uniform, logits }) in outcomes(gpu, vocabulary, &logits, &choices).into_iter().zip(cases) {
        let what = || format!("{params:?}, uniform {uniform}, {vocabulary} tokens");
        let want = sampler::sample(params, *uniform, &Past::default(), logits);
        assert_eq!((got.token, got.status), (want.token, Outcome::CHOSEN), "{}", what());
        let close =
            got.logprob == want.logprob || (got.logprob - want.logprob).abs() <= 2e-6 * want.logprob.abs().max(1.0);
        assert!(close, "{} {}: {}", got.logprob, want.logprob, what());
    }
}

fn params(random: &mut Random, vocabulary: usize) -> SamplingParams {
    let one_of = |random: &mut Random, values: &[f32]| values[random.below(values.len())];
    let top_k = [0, 1, 2, 5, 40, random.below(vocabulary + 5)][random.below(6)] as u32;
    let near = random.share() as f32;
    SamplingParams {
        temperature: one_of(random, &[0.0, 1e-6, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0]),
        top_p: one_of(random, &[1.0, 1.0, 0.95, 0.9, 0.5, 0.1, 0.0, near]),
        min_p: one_of(random, &[0.0, 0.0, 0.0, 0.05, 0.5, 1.0, near]),
        top_k,
        ..SamplingParams::GREEDY
    }
}

/// Peaked and flat rows, rows with few different values, rows with impossible tokens.
fn logits(random: &mut Random, vocabulary: usize) -> Vec<f32> {
    let (spread, kind) = ([0.0, 0.5, 3.0, 8.0, 200.0][random.below(5)], random.below(5));
    let mut row: Vec<f32> = random.normals(vocabulary).into_iter().map(|logit| logit * spread).collect();
    match kind {
        0 => row.iter_mut().for_each(|logit| *logit = logit.round()),
        1 => row.iter_mut().for_each(|logit| *logit = if random.below(3) == 0 { f32::NEG_INFINITY } else { *logit }),
        2 => row.iter_mut().for_each(|logit| *logit = logit.signum() * 0.0),
        _ => {}
    }
    row
}

#[test]
fn thousands_of_random_rows_come_to_the_samplers_tokens() {
    let Some(gpu) = Gpu::get() else { return };
    let mut random = Random(50);
    for (vocabulary, count) in [(1, 20), (7, 400), (33, 600), (320, 1200), (1000, 400), (8200, 24)] {
        let mut cases = Vec::new();
        for _ in (0..count).step_by(Gpu::stride()) {
            let (params, uniform) = (params(&mut random, vocabulary), random.share());
            cases.push(Case { params, uniform, logits: logits(&mut random, vocabulary) });
        }
        compare(&gpu, &cases);
    }
}

#[test]
fn ends_of_ranges_come_to_the_samplers_tokens() {
    let Some(gpu) = Gpu::get() else { return };
    let (inf, most) = (f32::INFINITY, f32::MAX);
    let rows = [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [-inf, -inf, -inf, -inf, -inf, -inf],
        [0.0, inf, most, inf, -inf, 3.0],
        [-most, -most, -inf, -most, -most, -most],
        [-0.0, 0.0, -0.0, 0.0, -1.0, -2.0],
        [-200.0, -100.0, 0.0, -86.0, -88.0, -50.0],
    ];
    let mut cases = Vec::new();
    for logits in rows {
        for uniform in [0.0, 0.25, 0.5, 1.0 - f64::EPSILON / 2.0] {
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (1, 1.0, 0.0),
                (3, 1.0, 0.0),
                (0, 0.5, 0.0),
                (0, 0.0, 0.0),
                (4, 0.5, 1.0),
                (9, 0.75, 0.1),
            ] {
                let params = SamplingParams { temperature: 1.0, top_k, top_p, min_p, ..SamplingParams::GREEDY };
                cases.push(Case { params, uniform, logits: logits.to_vec() });
            }
        }
    }
    compare(&gpu, &cases);
}

#[test]
fn rows_that_are_no_numbers_choose_nothing() {
    let Some(gpu) = Gpu::get() else { return };
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
    let logits = [0.0, 3.0, 1.0, 0.0, f32::NAN, 1.0];
    let of = |row, first_row, rows| Choice::new(&sampling, 0.5, row, first_row, rows).expect("a choice");
    let choices = [
        of(0, 0, 2),
        of(0, 3, 5),
        of(1, 0, 2),
        of(0, 2, 1),
        Choice::soundness(3, 4),
        Choice::soundness(0, 8),
        Choice::soundness(2, 0),
    ];
    let got: Vec<(u32, u32)> =
        outcomes(&gpu, 3, &logits, &choices).iter().map(|outcome| (outcome.status, outcome.token)).collect();
    let (sound, chosen, wrong) = ((Outcome::SOUND, 0), (Outcome::CHOSEN, 1), (Outcome::NOT_NUMBERS, 0));
    assert_eq!(got, [chosen, wrong, wrong, wrong, sound, wrong, sound]);
}
