//! Every role, and every way of cutting the work up, gives the same tokens.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tandem_engine::{Engine, KvLease, SamplingParams, SequenceRequest};

use crate::support::{LIMITS, engine, generate, greedy, prompt, request, request_in, seeded};

/// What a transport does: block `i` of one lease becomes block `i` of the other.
pub fn copy_blocks(from: &Engine, source: &KvLease, to: &Engine, target: &KvLease) {
    let (read, write) = (from.arena(), to.arena());
    let words = from.spec().block_bytes / 8;
    for (&a, &b) in source.blocks().iter().zip(target.blocks()) {
        for i in 0..words {
            write[b as usize * words + i]
                .store(read[a as usize * words + i].load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// First token on `prefill`, its KV moved, the others on `decode`; `damage` may change the KV in between.
async fn disaggregated(
    [prefill, decode]: [&Engine; 2],
    tokens: &[u32],
    max_tokens: u32,
    sampling: SamplingParams,
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
    let [local, prefill, decode] = [LIMITS; 3].map(engine);
    for (len, sampling) in [1, 15, 16, 17, 130].into_iter().flat_map(|len| [(len, greedy()), (len, seeded(7))]) {
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

#[tokio::test]
async fn any_damage_to_the_kv_shows() {
    let [local, prefill, decode] = [LIMITS; 3].map(engine);
    let tokens = prompt(40, 2);
    let expected = generate(&local, request(&local, tokens.clone(), 20)).await;
    for token in [0, 16, 39] {
        let answer = disaggregated([&prefill, &decode], &tokens, 20, greedy(), |engine, lease| {
            let word = (lease.blocks()[token / 16] as usize * 16 + token % 16) * engine.spec().block_bytes / 128;
            engine.arena()[word].fetch_xor(1, Ordering::Relaxed);
        });
        assert_ne!(answer.await, expected, "damage at token {token} went unseen");
    }
}

#[tokio::test]
async fn a_sequence_that_moves_goes_on_as_it_would_have() {
    let [first, second] = [LIMITS; 2].map(engine);
    let whole = SequenceRequest { sampling: seeded(3), ..request(&first, prompt(20, 3), 30) };
    let expected = generate(&first, whole).await;
    for cut in [1, 11, 29] {
        let so_far = [&prompt(20, 3)[..], &expected[..cut]].concat();
        let rest = request(&second, so_far, 30 - cut as u32);
        let rest = SequenceRequest { prompt_len: 20, sampling: seeded(3), ..rest };
        assert_eq!(generate(&second, rest).await, expected[cut..]);
    }
}

#[tokio::test]
async fn chunked_equals_whole_and_alone_equals_batched() {
    let whole = engine(tandem_engine::SchedulerConfig { max_step_tokens: 4096, ..LIMITS });
    let chunked = engine(tandem_engine::SchedulerConfig { max_step_tokens: 8, ..LIMITS });
    let mut expected = Vec::new();
    for salt in 0..6 {
        let alone = SequenceRequest { sampling: seeded(5), ..request(&whole, prompt(61, salt), 12) };
        expected.push(generate(&whole, alone).await);
    }
    let streams: Vec<_> = (0..6)
        .map(|salt| SequenceRequest { sampling: seeded(5), ..request(&chunked, prompt(61, salt), 12) })
        .map(|request| chunked.submit(request).unwrap())
        .collect();
    for (stream, expected) in streams.into_iter().zip(expected) {
        assert_eq!(crate::support::collect(stream).await.0, expected);
    }
}
