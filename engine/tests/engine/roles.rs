//! Every role, and every way of cutting the work up, gives the same tokens.
use std::sync::Arc;

use tandem_engine::{Engine, KvLease, SamplingParams, SequenceRequest};

use crate::support::{LIMITS, engine, generate, greedy, prompt, request, request_in, seeded, simulated_blocks_of};

/// What a transport does: block `i` of one lease becomes block `i` of the other.
pub fn copy_blocks(from: &Engine, source: &KvLease, to: &Engine, target: &KvLease) {
    let mut bytes = vec![0; from.spec().block_bytes];
    for (&a, &b) in source.blocks().iter().zip(target.blocks()) {
        from.memory().read(a as usize * bytes.len(), &mut bytes);
        to.memory().write(b as usize * bytes.len(), &bytes);
    }
}

/// First token on `prefill`, its KV moved, the others on `decode`; `damage` may change the KV in between.
async fn disaggregated(
    [prefill, decode]: [&Engine; 2],
    tokens: &[u32],
    max_tokens: u32,
    sampling: Arc<SamplingParams>,
    damage: impl FnOnce(&Engine, &KvLease),
) -> Vec<u32> {
    let pool = prefill.pool();
    let source = Arc::new(pool.try_reserve(pool.blocks_for(tokens.len())).expect("room"));
    let first = request_in(Arc::clone(&source), tokens.to_vec(), 1);
    let mut answer = generate(prefill, SequenceRequest { sampling: sampling.clone(), ..first }).await;
    assert_eq!(answer.len(), 1);

    // Another request takes the first blocks of `decode`, so that the ids differ between the nodes.
    let _other = decode.pool().try_reserve(3).expect("room");
    let rest = request(decode, [tokens, &answer[..]].concat(), max_tokens - 1);
    copy_blocks(prefill, &source, decode, &rest.lease);
    damage(decode, &rest.lease);
    let rest = SequenceRequest { prompt_len: tokens.len(), computed: tokens.len(), sampling, ..rest };
    answer.extend(generate(decode, rest).await);
    answer
}

#[tokio::test]
async fn disaggregated_equals_local() {
    for block_tokens in [16, 32] {
        disaggregated_equals_local_in_blocks_of(block_tokens).await;
    }
}

async fn disaggregated_equals_local_in_blocks_of(block_tokens: usize) {
    let local = engine(LIMITS);
    let [prefill, decode] = [64, 64].map(|blocks| Engine::start(simulated_blocks_of(block_tokens, blocks), LIMITS));
    for (len, sampling) in
        [1, 15, 16, 17, 130].into_iter().flat_map(|len| [(len, Arc::new(greedy())), (len, Arc::new(seeded(7)))])
    {
        let tokens = prompt(len, 1);
        let whole = SequenceRequest { sampling: sampling.clone(), ..request(&local, tokens.clone(), 40) };
        let expected = generate(&local, whole).await;
        assert_eq!(expected.len(), 40);
        let answer = disaggregated([&prefill, &decode], &tokens, 40, sampling, |_, _| {}).await;
        assert_eq!(answer, expected, "prompt of {len}");
    }
    for engine in [&local, &prefill, &decode] {
        assert_eq!(engine.pool().free(), engine.pool().total());
    }
}

/// Penalties so strong that forgetting one token would show, and ends that are forbidden for a while.
fn penalized(temperature: f32, min_tokens: u32) -> Arc<SamplingParams> {
    Arc::new(SamplingParams {
        temperature,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: 1.5,
        logit_bias: vec![(17, 3.0), (40, 6.0)],
        min_tokens,
        top_logprobs: 2,
        ..seeded(9)
    })
}

#[tokio::test]
async fn penalties_and_min_tokens_count_across_the_hand_off() {
    let [local, prefill, decode] = [LIMITS; 3].map(engine);
    for (len, temperature, min_tokens) in [(1, 0.0, 1), (15, 0.7, 2), (16, 0.0, 5), (40, 1.0, 9), (100, 0.3, 30)] {
        let tokens = prompt(len, 4);
        // Every other token ends the answer: the first moment that may end it does so soon.
        let ends = |request| SequenceRequest { stop_token_ids: (0..1024).step_by(2).collect(), ..request };
        let sampling = penalized(temperature, min_tokens);
        let whole = SequenceRequest { sampling: sampling.clone(), ..ends(request(&local, tokens.clone(), 40)) };
        let expected = generate(&local, whole).await;
        let (last, before) = expected.split_last().unwrap();
        assert!(expected.len() > min_tokens as usize && before.iter().all(|token| token % 2 == 1), "{expected:?}");
        assert!(last % 2 == 0 || expected.len() == 40);

        let pool = prefill.pool();
        let lease = Arc::new(pool.try_reserve(pool.blocks_for(len)).expect("room"));
        let first = ends(request_in(Arc::clone(&lease), tokens.clone(), 1));
        let first = generate(&prefill, SequenceRequest { sampling: sampling.clone(), ..first }).await;
        assert_eq!(first, expected[..1], "the prefill node's token");
        let rest = ends(request(&decode, [&tokens[..], &first].concat(), 39));
        copy_blocks(&prefill, &lease, &decode, &rest.lease);
        let rest = SequenceRequest { prompt_len: len, computed: len, sampling, ..rest };
        assert_eq!(generate(&decode, rest).await, expected[1..], "prompt of {len}");
    }
}

#[tokio::test]
async fn a_penalized_sequence_that_moves_goes_on_as_it_would_have() {
    let [first, second] = [LIMITS; 2].map(engine);
    let sampling = penalized(0.8, 20);
    let whole = SequenceRequest { sampling: sampling.clone(), ..request(&first, prompt(20, 3), 30) };
    let expected = generate(&first, whole).await;
    for cut in [1, 11, 29] {
        let so_far = [&prompt(20, 3)[..], &expected[..cut]].concat();
        let rest =
            SequenceRequest { prompt_len: 20, sampling: sampling.clone(), ..request(&second, so_far, 30 - cut as u32) };
        assert_eq!(generate(&second, rest).await, expected[cut..]);
    }
    // This would show if the output were taken for a part of the prompt.
    let so_far = [&prompt(20, 3)[..], &expected[..11]].concat();
    let wrong = SequenceRequest { sampling, ..request(&second, so_far, 19) };
    assert_ne!(generate(&second, wrong).await, expected[11..]);
}

#[tokio::test]
async fn any_damage_to_the_kv_shows() {
    let [local, prefill, decode] = [LIMITS; 3].map(engine);
    let tokens = prompt(40, 2);
    let expected = generate(&local, request(&local, tokens.clone(), 20)).await;
    let layers = decode.spec().layers;
    for (token, layer) in [0, 16, 39].into_iter().flat_map(|token| (0..layers).map(move |layer| (token, layer))) {
        let answer = disaggregated([&prefill, &decode], &tokens, 20, greedy().into(), |engine, lease| {
            let slot = (lease.blocks()[token / 16] as usize * layers + layer) * 16 + token % 16;
            let word = slot * engine.spec().block_bytes / 8 / 16 / layers;
            let mut bytes = [0; 8];
            engine.memory().read(word * 8, &mut bytes);
            bytes[0] ^= 1;
            engine.memory().write(word * 8, &bytes);
        });
        assert_ne!(answer.await, expected, "damage at token {token} in layer {layer} went unseen");
    }
}

#[tokio::test]
async fn a_sequence_that_moves_goes_on_as_it_would_have() {
    let [first, second] = [LIMITS; 2].map(engine);
    let whole = SequenceRequest { sampling: seeded(3).into(), ..request(&first, prompt(20, 3), 30) };
    let expected = generate(&first, whole).await;
    for cut in [1, 11, 29] {
        let so_far = [&prompt(20, 3)[..], &expected[..cut]].concat();
        let rest = request(&second, so_far, 30 - cut as u32);
        let rest = SequenceRequest { prompt_len: 20, sampling: seeded(3).into(), ..rest };
        assert_eq!(generate(&second, rest).await, expected[cut..]);
    }
}

#[tokio::test]
async fn chunked_equals_whole_and_alone_equals_batched() {
    let whole = engine(tandem_engine::SchedulerConfig { max_step_tokens: 4096, ..LIMITS });
    let chunked = engine(tandem_engine::SchedulerConfig { max_step_tokens: 8, ..LIMITS });
    let mut expected = Vec::new();
    for salt in 0..6 {
        let alone = SequenceRequest { sampling: seeded(5).into(), ..request(&whole, prompt(61, salt), 12) };
        expected.push(generate(&whole, alone).await);
    }
    let streams: Vec<_> = (0..6)
        .map(|salt| SequenceRequest { sampling: seeded(5).into(), ..request(&chunked, prompt(61, salt), 12) })
        .map(|request| chunked.submit(request).unwrap())
        .collect();
    for (stream, expected) in streams.into_iter().zip(expected) {
        assert_eq!(crate::support::collect(stream).await.0, expected);
    }
}
