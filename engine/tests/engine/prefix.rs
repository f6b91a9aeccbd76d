//! The prefix cache as callers see it: the same tokens with and without, and no way to write a shared block.
use std::sync::Arc;

use proptest::prelude::*;
use tandem_engine::{Engine, EngineError, KvLease, Prefix, SchedulerConfig, SequenceRequest};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceKey};

use crate::support::{
    LIMITS, all_blocks_back, engine, generate, prompt, request, request_in, seeded, simulated_blocks_of,
};

/// As a node reserves for a prompt.
fn lease(engine: &Engine, cache_salt: CacheSalt, tokens: &[u32], max_new_tokens: u32) -> Arc<KvLease> {
    let (spec, pool) = (engine.spec(), engine.pool());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, cache_salt), tokens, spec.block_tokens);
    let blocks = pool.blocks_for(tokens.len() + max_new_tokens as usize);
    let prefix = Prefix { cache_salt, hashes: &hashes, tokens: tokens.len() };
    Arc::new(pool.try_reserve_prefix(blocks, prefix).expect("room"))
}

fn cached(engine: &Engine, tokens: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    salted(engine, CacheSalt::NONE, tokens, max_new_tokens)
}

fn salted(engine: &Engine, cache_salt: CacheSalt, tokens: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    let lease = lease(engine, cache_salt, &tokens, max_new_tokens);
    SequenceRequest { computed: lease.cached_tokens(), ..request_in(lease, tokens, max_new_tokens) }
}

const SALTS: [CacheSalt; 3] = [CacheSalt::NONE, CacheSalt::new([5; 16]), CacheSalt::new([6; 16])];

#[tokio::test]
async fn each_salt_has_a_cache_of_its_own() {
    let caching = engine(LIMITS);
    let answer = generate(&caching, cached(&caching, prompt(40, 1), 20)).await;
    for salt in [SALTS[1], SALTS[2]] {
        let first = salted(&caching, salt, prompt(40, 1), 20);
        assert_eq!(first.computed, 0, "what others have computed is not found");
        assert_eq!(generate(&caching, first).await, answer, "the salt changes no token");
    }
    let turn = [prompt(40, 1), answer].concat();
    for salt in SALTS {
        assert_eq!(salted(&caching, salt, turn.clone(), 1).computed, 48, "the answer is cached under {salt:?}, too");
    }
    assert_eq!(salted(&caching, CacheSalt::new([7; 16]), turn, 1).computed, 0);
    all_blocks_back(&caching).await;
}

#[tokio::test]
async fn a_conversation_computes_only_its_last_turn() {
    let (plain, caching) = (engine(SchedulerConfig { prefix_caching: false, ..LIMITS }), engine(LIMITS));
    let mut history = prompt(40, 1);
    let mut reused = Vec::new();
    for turn in 0..4 {
        let again = cached(&caching, history.clone(), 20);
        reused.push(again.computed);
        let (want, got) =
            (generate(&plain, request(&plain, history.clone(), 20)).await, generate(&caching, again).await);
        assert_eq!(got, want, "turn {turn}");
        history.extend(got);
        history.extend(prompt(9, turn));
    }
    // All full blocks of prompt and answer; the answer's last token was never computed.
    assert_eq!(reused, [0, 48, 80, 112]);
    let load = caching.load();
    assert_eq!((load.free_blocks, load.running_tokens), (64, 0));
    assert!(load.cached_blocks >= 9, "{load:?}");
    assert_eq!(plain.load().cached_blocks, 0);
    all_blocks_back(&caching).await;
}

#[tokio::test]
async fn larger_blocks_are_shared_whole() {
    let caching = Engine::start(simulated_blocks_of(32, 32), LIMITS);
    let answer = generate(&caching, request(&caching, prompt(100, 1), 20)).await;
    let again = cached(&caching, prompt(100, 1), 20);
    assert_eq!(again.computed, 96);
    assert_eq!(generate(&caching, again).await, answer);
    let mut other = prompt(100, 1);
    other[60] += 1;
    assert_eq!(cached(&caching, other, 20).computed, 32, "the second block differs");
    all_blocks_back(&caching).await;
}

#[tokio::test]
async fn kv_that_moved_here_is_reused_once_it_was_decoded_with() {
    let [prefill, decode] = [LIMITS; 2].map(engine);
    let tokens = prompt(50, 2);
    let source = lease(&prefill, CacheSalt::NONE, &tokens, 1);
    let first = generate(&prefill, request_in(Arc::clone(&source), tokens.clone(), 1)).await;
    let rest = request(&decode, [&tokens[..], &first].concat(), 9);
    crate::roles::copy_blocks(&prefill, &source, &decode, &rest.lease);
    let rest = SequenceRequest { prompt_len: 50, computed: 50, ..rest };
    let answer = [first, generate(&decode, rest).await].concat();
    let again = cached(&decode, tokens, 10);
    assert_eq!(again.computed, 48);
    assert_eq!(generate(&decode, again).await, answer);
}

#[tokio::test]
async fn shared_blocks_cannot_be_written_or_taken_for_others() {
    let engine = engine(LIMITS);
    let answer = generate(&engine, request(&engine, prompt(40, 3), 5)).await;
    let refused = |request| match engine.submit(request) {
        Err(EngineError::InvalidArgument(why)) => why,
        other => panic!("{other:?}"),
    };
    let good = || cached(&engine, prompt(40, 3), 5);
    assert_eq!(good().computed, 32);
    assert!(refused(SequenceRequest { computed: 0, ..good() }).contains("shared"));
    assert!(refused(SequenceRequest { computed: 31, ..good() }).contains("shared"));
    let mut other = prompt(40, 3);
    other[31] += 1;
    assert!(refused(SequenceRequest { tokens: other, ..good() }).contains("another prompt"));
    assert!(refused(SequenceRequest { priority: 11, ..good() }).contains("priority"));
    // A lease whose blocks were cached meanwhile is not written a second time either.
    let again = request(&engine, prompt(33, 4), 1);
    generate(&engine, again.clone()).await;
    assert!(refused(again).contains("shared"));
    assert_eq!(generate(&engine, good()).await, answer);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Prompts that begin alike, one after the other, on memory that holds two or three of them.
    #[test]
    fn cached_equals_uncached(
        requests in prop::collection::vec((0u32..3, 0usize..100, 1usize..40, 1u32..20, 0u64..3), 1..12),
        max_step_tokens in 5usize..80, block_tokens in prop::sample::select(vec![16, 32]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let start = |block_tokens, kv_tokens, prefix_caching| {
                let config = SchedulerConfig { max_step_tokens, max_running: 4, prefix_caching, ..LIMITS };
                Engine::start(simulated_blocks_of(block_tokens, kv_tokens / block_tokens), config)
            };
            let (plain, caching) = (start(16, 1024, false), start(block_tokens, 320, true));
            for (family, shared, own, max_new_tokens, seed) in requests {
                let tokens = [prompt(shared, family), prompt(own, family + own as u32)].concat();
                let sampled = |request| SequenceRequest { sampling: seeded(seed).into(), ..request };
                let want = generate(&plain, sampled(request(&plain, tokens.clone(), max_new_tokens))).await;
                let got = generate(&caching, sampled(cached(&caching, tokens, max_new_tokens))).await;
                assert_eq!(got, want);
            }
            all_blocks_back(&caching).await;
        });
    }
}
