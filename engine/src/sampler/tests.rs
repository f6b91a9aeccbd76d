//! Every rule against a plain reference that sorts, copies and adds in f64.
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::sampling::uniform;

fn past(tokens: &[u32], prompt_len: usize) -> Past<'_> {
    Past { tokens, prompt_len, ..Past::default() }
}

/// The token at `position` of a sequence whose tokens do not matter.
fn at(params: &SamplingParams, position: usize, logits: &[f32]) -> u32 {
    sample(params, uniform(params.seed, position), &past(&vec![0; position], 0), logits).token
}

fn warm(temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, seed, ..SamplingParams::GREEDY }
}

/// The rules on logits, in vLLM's order (`vllm/v1/sample/sampler.py`, `model_executor/layers/utils.py`).
fn reference_logits(params: &SamplingParams, past: &Past<'_>, logits: &[f32]) -> Vec<f32> {
    let (prompt, output) = past.tokens.split_at(past.prompt_len);
    let rule = |(id, &logit): (usize, &f32)| {
        let id = id as u32;
        let mut logit = logit + params.logit_bias.iter().find(|bias| bias.0 == id).map_or(0.0, |bias| bias.1);
        if past.forbidden.contains(&id) {
            logit = f32::NEG_INFINITY;
        }
        if prompt.contains(&id) || output.contains(&id) {
            let penalty = params.repetition_penalty;
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        let times = output.iter().filter(|&&token| token == id).count();
        logit -= params.frequency_penalty * times as f32;
        if times > 0 { logit - params.presence_penalty } else { logit }
    };
    logits.iter().enumerate().map(rule).collect()
}

/// The cuts and the draw over all tokens, sorted whole.
fn reference_draw(params: &SamplingParams, position: usize, logits: &[f32]) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    if params.temperature == 0.0 {
        return order[0] as u32;
    }
    let weight = |id: usize| passes::exp((logits[id] - logits[order[0]]) * params.temperature.recip());
    let mut kept: Vec<(usize, f32)> = order.iter().map(|&id| (id, weight(id))).collect();
    kept.retain(|&(_, weight)| weight > 0.0 && weight >= params.min_p);
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let total: f64 = kept.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let (mut sum, wanted) = (0.0, f64::from(params.top_p) * total);
    let mut nucleus = Vec::new();
    for (id, weight) in kept {
        nucleus.push((id, f64::from(weight)));
        sum += f64::from(weight);
        if params.top_p < 1.0 && sum >= wanted {
            break;
        }
    }
    nucleus.sort_by_key(|&(id, _)| id);
    let mut left = uniform(params.seed, position) * nucleus.iter().map(|(_, weight)| weight).sum::<f64>();
    let hit = nucleus.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    hit.or(nucleus.last()).unwrap().0 as u32
}

fn reference_logprobs(logits: &[f32]) -> Vec<f64> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - greatest).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit) - f64::from(greatest) - total.ln()).collect()
}

/// Logits like a model's; from a grid, so that some are equal. The last is sometimes impossible.
fn any_logits(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![8 => -12.0f32..12.0, 2 => (-6i32..6).prop_map(|step| step as f32)];
    prop::collection::vec(logit, len)
}

prop_compose! {
    fn any_params()(
        temperature in prop_oneof![1 => Just(0.0), 4 => 0.05f32..3.0], top_p in prop_oneof![Just(1.0), 0.01f32..1.0],
        top_k in prop_oneof![Just(0), 1u32..40], min_p in prop_oneof![Just(0.0), 0.0f32..1.0],
        repetition_penalty in prop_oneof![Just(1.0), 0.5f32..2.0],
        presence_penalty in prop_oneof![Just(0.0), -2f32..2.0], frequency_penalty in prop_oneof![Just(0.0), -2f32..2.0],
        logit_bias in prop::collection::btree_map(0u32..30, -20f32..20.0, 0..4),
        top_logprobs in 0u32..6, seed in any::<u64>(),
    ) -> SamplingParams {
        let logit_bias = logit_bias.into_iter().collect();
        SamplingParams {
            temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
            min_tokens: 0, top_logprobs, seed,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_rule_together_is_the_reference(
        params in any_params(), logits in any_logits(30..400),
        tokens in prop::collection::vec(0u32..40, 1..40), prompt in 1usize..40,
        forbidden in prop::collection::vec(0u32..60, 0..4),
    ) {
        let past = Past { tokens: &tokens, prompt_len: prompt.min(tokens.len()), forbidden: &forbidden };
        let uniform = uniform(params.seed, tokens.len());
        let sampled = sample(&params, uniform, &past, &logits);
        let adjusted = reference_logits(&params, &past, &logits);
        prop_assert_eq!(sampled.token, reference_draw(&params, tokens.len(), &adjusted));
        prop_assert_eq!(&sampled, &sample(&params, uniform, &past, &logits), "a second call finds clean memory");

        let logprobs = reference_logprobs(&logits);
        prop_assert!((f64::from(sampled.logprob) - logprobs[sampled.token as usize]).abs() < 2e-5);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
        let top: Vec<u32> = sampled.top.iter().map(|top| top.token).collect();
        prop_assert_eq!(&top[..], &order[..params.top_logprobs as usize]);
        for top in sampled.top {
            prop_assert!((f64::from(top.logprob) - logprobs[top.token as usize]).abs() < 2e-5);
        }
    }

    #[test]
    fn a_pure_function_into_the_vocabulary(
        logits in prop::collection::vec(prop::num::f32::ANY, 1..50), tokens in prop::collection::vec(any::<u32>(), 0..9),
        temperature in prop::num::f32::ANY, top_p in prop::num::f32::ANY, min_p in prop::num::f32::ANY,
        penalty in prop::num::f32::ANY, bias in prop::num::f32::ANY, top_k in 0u32..60, seed in any::<u64>(),
    ) {
        let params = SamplingParams {
            temperature, top_p, min_p, repetition_penalty: penalty, presence_penalty: penalty,
            logit_bias: vec![(u32::MAX, bias), (3, bias)], top_k, seed, top_logprobs: 3, ..SamplingParams::GREEDY
        };
        let uniform = uniform(seed, tokens.len());
        let sampled = sample(&params, uniform, &past(&tokens, 1), &logits);
        prop_assert!((sampled.token as usize) < logits.len());
        prop_assert!(!sampled.logprob.is_nan() && sampled.logprob <= 0.0);
        prop_assert_eq!(&sampled, &sample(&params, uniform, &past(&tokens, 1), &logits));
    }

    #[test]
    fn the_likeliest_of_many(logits in any_logits(1..3000), count in 0usize..300) {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
        prop_assert_eq!(passes::likeliest(&logits), order[0] as usize);
        let mut kept = Vec::new();
        passes::likeliest_of(&logits, count, &mut kept);
        let kept: Vec<u32> = kept.iter().map(|candidate| candidate.id).collect();
        prop_assert_eq!(&kept[..], &order[..count.min(order.len())]);
    }

    #[test]
    fn the_exponential(x in -87f32..=0.0) {
        let exact = f64::from(x).exp();
        prop_assert!((f64::from(passes::exp(x)) - exact).abs() <= exact * 3e-7, "{}", x);
    }
}

#[test]
fn greedy_takes_the_greatest_and_tells_its_probability() {
    let sampled = sample(&SamplingParams::GREEDY, 0.5, &past(&[0; 3], 3), &[1.0, 3.0, 2.0, 3.0]);
    let total = 1f64.exp() + 2.0 * 3f64.exp() + 2f64.exp();
    assert_eq!((sampled.token, sampled.top.len()), (1, 0));
    assert!((f64::from(sampled.logprob) - (3.0 - total.ln())).abs() < 1e-6);
    assert_eq!([passes::exp(0.0), passes::exp(-88.0), passes::exp(f32::NAN)], [1.0, 0.0, 0.0]);
}

#[test]
fn frequencies_follow_the_probabilities() {
    // Beyond one run of the passes, so that the walk crosses runs.
    let logits: Vec<f32> = (0..2000).map(|id| if id % 700 == 3 { (id / 700) as f32 + 20.0 } else { -20.0 }).collect();
    let likely = [3usize, 703, 1403];
    let mut counts = [0u32; 3];
    for position in 0..20_000 {
        let token = at(&warm(1.0, 7), position, &logits) as usize;
        counts[likely.iter().position(|&id| id == token).unwrap()] += 1;
    }
    let total: f64 = (0..3).map(|step| f64::from(step).exp()).sum();
    for (count, step) in counts.into_iter().zip(0..3) {
        assert!((f64::from(count) / 20_000.0 - f64::from(step).exp() / total).abs() < 0.015, "{counts:?}");
    }
}

#[test]
fn edges_of_the_cuts() {
    let logits = [0.0, 5.0, 4.9, -3.0];
    let hot = warm(9.0, 1);
    for position in 0..200 {
        for top_p in [0.0, -1.0, 1e-9] {
            assert_eq!(at(&SamplingParams { top_p, ..warm(1.0, 1) }, position, &logits), 1);
        }
        assert_eq!(at(&SamplingParams { top_k: 1, ..hot.clone() }, position, &logits), 1);
        assert_eq!(at(&SamplingParams { min_p: 1.0, ..hot.clone() }, position, &logits), 1);
        assert!([1, 2].contains(&at(&SamplingParams { top_k: 2, ..hot.clone() }, position, &logits)));
        // At temperature 9 token 0 has 0.57 of the likeliest one's probability, token 3 has 0.41.
        assert_ne!(at(&SamplingParams { min_p: 0.5, ..hot.clone() }, position, &logits), 3);
        // The best has 0.52: 0.6 needs the second, too, and no more.
        assert!([1, 2].contains(&at(&SamplingParams { top_p: 0.6, ..warm(1.0, 1) }, position, &logits)));
    }
    let off = SamplingParams { top_p: f32::NAN, min_p: f32::NAN, top_k: 99, ..hot };
    assert_eq!((0..2000).map(|position| at(&off, position, &logits)).collect::<BTreeSet<_>>().len(), 4);
}

#[test]
fn a_wide_nucleus_is_found_in_steps() {
    // Equal tokens: a share of the probability is the same share of the tokens, the lowest ids first.
    let logits = vec![1.5; 5000];
    let params = SamplingParams { top_p: 0.25, ..warm(1.0, 3) };
    let seen: BTreeSet<u32> = (0..3000).map(|position| at(&params, position, &logits)).collect();
    assert!(seen.iter().all(|&token| token < 1250) && seen.last().is_some_and(|&token| token > 1200));
}

#[test]
fn impossible_tokens_are_never_chosen() {
    let logits = [f32::NAN, f32::NEG_INFINITY, 0.5, f32::NAN];
    for temperature in [0.0, 1e-9, 1.0, f32::NAN, f32::INFINITY, -1.0] {
        let params = SamplingParams { top_p: 0.9, top_k: 3, ..warm(temperature, 4) };
        let sampled = sample(&params, 0.5, &Past::default(), &logits);
        assert_eq!((sampled.token, sampled.logprob), (2, 0.0));
    }
    assert_eq!(at(&warm(1.0, 0), 0, &[f32::NAN, f32::NEG_INFINITY]), 0);
    assert_eq!(at(&warm(1.0, 0), 0, &[]), 0);
    assert_eq!(at(&warm(1.0, 0), 0, &[0.0, f32::INFINITY]), 1);
}

#[test]
fn prompt_and_output_are_told_apart() {
    let (tokens, logits) = ([1, 1, 2, 2, 3], [0.0, 2.0, 2.0, 2.0, 1.9]);
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::GREEDY;
        change(&mut params);
        sample(&params, 0.5, &past(&tokens, 2), &logits).token
    };
    assert_eq!(with(|_| ()), 1);
    assert_eq!(with(|params| params.repetition_penalty = 1.2), 4, "prompt and output");
    assert_eq!(with(|params| params.presence_penalty = 0.5), 1, "the output alone");
    assert_eq!(with(|params| (params.logit_bias, params.frequency_penalty) = (vec![(1, -9.0)], 0.08)), 3, "by count");
}
