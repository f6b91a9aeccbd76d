//! Steps that overlap: an executor that may have two of them under way gives the answers of one that may not, and no
//! block is free while a step writes it.
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::{
    Engine, EngineError, FinishReason, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, SequenceStream,
    SimulatedConfig, Speculate,
};

use crate::support::{
    Go, LIMITS, all_blocks_back, collect, finished, gated, gated_under_way, generate, prompt, request, request_in,
    seeded, simulated_by, small_model, within,
};

fn overlapping(blocks: usize, under_way: usize, limits: SchedulerConfig) -> Engine {
    Engine::start(simulated_by(SimulatedConfig { blocks, under_way, eos_token_id: 3, ..small_model() }), limits)
}

/// The rules of the `n`th of many requests: most are a device's, some the host's.
fn sampling(n: u32, rng: &mut StdRng) -> SamplingParams {
    let seeded = seeded(n.into());
    match rng.random_range(0..12) {
        0 => SamplingParams { repetition_penalty: 1.3, ..seeded },
        1 => SamplingParams { min_tokens: rng.random_range(1..6), ..seeded },
        2 => SamplingParams { logit_bias: vec![(7, 2.0)], top_logprobs: 1, ..seeded },
        3 | 4 => SamplingParams::GREEDY,
        _ => seeded,
    }
}

/// Reads up to `patience` events of a stream, and leaves then; tokens and the end, if it came.
async fn read(mut stream: SequenceStream, patience: usize) -> (Vec<u32>, Option<SequenceEvent>) {
    let mut tokens = Vec::new();
    for _ in 0..patience {
        match within(stream.next()).await.expect("an end") {
            SequenceEvent::Token { id, .. } => tokens.push(id),
            event if event.is_last() => return (tokens, Some(event)),
            _ => {}
        }
    }
    (tokens, None)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_the_same_over_stops_cancels_and_preemptions() {
    for (seed, speculate) in (0..6).zip([Speculate::Off, Speculate::Ngram].into_iter().cycle()) {
        let limits = SchedulerConfig { max_running: 6, max_step_tokens: 24, inbox: 256, speculate, ..LIMITS };
        let plain = overlapping(64, 1, SchedulerConfig { speculate: Speculate::Off, ..limits });
        // Answers come to seven blocks each.
        let engine = overlapping(14, 2, limits);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut tasks = Vec::new();
        for n in 0..80 {
            let (tokens, new) = (prompt(rng.random_range(1..40), n), rng.random_range(1..70));
            let (rules, stop) = (Arc::new(sampling(n, &mut rng)), rng.random_range(0..1024));
            let patience = if rng.random_bool(0.2) { rng.random_range(0..40) } else { usize::MAX };
            let ignore_eos = rng.random_bool(0.5);
            let (engine, plain) = (engine.clone(), plain.clone());
            tasks.push(tokio::spawn(async move {
                let job = async |engine: &Engine| {
                    let blocks = engine.pool().blocks_for(tokens.len() + 1);
                    let lease = Arc::new(engine.pool().reserve(blocks).await.expect("fits"));
                    let (stop_token_ids, sampling) = ((stop..stop + 12).collect(), Arc::clone(&rules));
                    let request = request_in(lease, tokens.clone(), new);
                    engine.submit(SequenceRequest { sampling, ignore_eos, stop_token_ids, ..request }).expect("valid")
                };
                let (answer, end) = read(job(&engine).await, patience).await;
                let (whole, whole_end) = read(job(&plain).await, usize::MAX).await;
                match end {
                    Some(end) => {
                        assert_eq!((&answer, finished(&end)), (&whole, whole_end.as_ref().and_then(finished)));
                    }
                    None => assert!(whole.starts_with(&answer)),
                }
                finished(&whole_end.expect("read to the end")) == Some(FinishReason::Stop)
            }));
        }
        let mut stopped = 0;
        for task in tasks {
            stopped += usize::from(within(task).await.expect("equal"));
        }
        all_blocks_back(&engine).await;
        let (load, alone) = (engine.load(), plain.load());
        assert!(stopped > 10 && load.preemptions > 0 && load.steps_ahead > 20, "{stopped} {load:?}");
        assert!(load.steps_ahead < load.steps[0] && alone.steps_ahead == 0, "{load:?} {alone:?}");
    }
}

/// The `n`th token of a prompt's answer.
async fn nth_token(tokens: Vec<u32>, n: usize) -> u32 {
    let engine = overlapping(64, 1, LIMITS);
    let answer = generate(&engine, request(&engine, tokens, n as u32 + 1)).await;
    assert!(!answer[..n].contains(&answer[n]), "it stops earlier");
    answer[n]
}

#[tokio::test]
async fn a_stop_leaves_its_blocks_to_the_step_behind() {
    let stop = nth_token(prompt(8, 1), 2).await;
    let (engine, mut gate) = gated_under_way(LIMITS, 2);
    let stopping = SequenceRequest { stop_token_ids: vec![stop], ..request(&engine, prompt(8, 1), 20) };
    let stream = engine.submit(stopping).unwrap();
    assert_eq!((gate.step().await, gate.step().await), (vec![0], vec![0]));
    for _ in 0..2 {
        assert!(gate.is_quiet(), "two are under way");
        gate.go(Go::Run);
        assert_eq!(gate.step().await, [0]);
    }
    gate.go(Go::Run);
    let (tokens, end) = collect(stream).await;
    assert_eq!((tokens.len(), finished(&end)), (3, Some(FinishReason::Stop)));
    let load = engine.load();
    assert_eq!((load.running, load.free_blocks, load.steps_ahead), (0, 62, 3), "a step still writes there");
    gate.go(Go::Run);
    all_blocks_back(&engine).await;
    assert!(gate.is_quiet());
    // The next one is as any other.
    drop(gate);
    assert_eq!(generate(&engine, request(&engine, prompt(8, 1), 3)).await, tokens);
}

#[tokio::test]
async fn who_leaves_keeps_its_blocks_until_the_last_step_ends() {
    let (engine, mut gate) = gated_under_way(LIMITS, 2);
    let leaving = engine.submit(request(&engine, prompt(8, 0), 50)).unwrap();
    assert_eq!((gate.step().await, gate.step().await), (vec![0], vec![0]));
    let staying = engine.submit(request(&engine, prompt(8, 1), 4)).unwrap();
    drop(leaving);
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [1], "it is out of the next step to begin");
    assert_eq!(engine.pool().free(), 64 - 1 - 4, "its second step is under way");
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [1]);
    assert_eq!(engine.pool().free(), 64 - 1);
    drop(gate);
    assert_eq!(collect(staying).await.0.len(), 4);
    all_blocks_back(&engine).await;
}

#[tokio::test]
async fn a_step_that_fails_takes_its_own_sequences_along() {
    let (engine, mut gate) = gated_under_way(LIMITS, 2);
    let failing = engine.submit(request(&engine, prompt(8, 0), 50)).unwrap();
    assert_eq!((gate.step().await, gate.step().await), (vec![0], vec![0]));
    let other = engine.submit(request(&engine, prompt(8, 1), 4)).unwrap();
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [0, 1]);
    gate.go(Go::Fail);
    let (tokens, end) = collect(failing).await;
    assert_eq!((tokens.len(), end), (1, SequenceEvent::Failed(EngineError::Executor("told to fail".into()))));
    assert_eq!(gate.step().await, [1], "the step behind goes on for who has not failed");
    drop(gate);
    assert_eq!(collect(other).await.0, generate(&engine, request(&engine, prompt(8, 1), 4)).await);
    all_blocks_back(&engine).await;
}

#[tokio::test]
async fn a_step_that_cannot_begin_fails_behind_the_one_under_way() {
    let (engine, mut gate) = gated_under_way(LIMITS, 2);
    let failing = engine.submit(request(&engine, prompt(8, 0), 50)).unwrap();
    assert_eq!((gate.step().await, gate.step().await), (vec![0], vec![0]));
    gate.refuse_next();
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [0], "refused");
    assert_eq!(engine.pool().free(), 64 - 4, "the step before is under way");
    gate.go(Go::Run);
    let (tokens, end) = collect(failing).await;
    assert_eq!((tokens.len(), end), (2, SequenceEvent::Failed(EngineError::Executor("told not to begin".into()))));
    all_blocks_back(&engine).await;
    assert!(gate.is_quiet());
    // The next one is as any other.
    drop(gate);
    assert!(generate(&engine, request(&engine, prompt(8, 0), 50)).await.starts_with(&tokens));
}

#[tokio::test]
async fn a_lost_device_and_a_panic_end_the_engine_with_a_step_under_way() {
    for (go, why) in [(Go::Lose, "told to be gone"), (Go::Panic, "told to panic")] {
        let (engine, mut gate) = gated_under_way(LIMITS, 2);
        let streams = [0, 1].map(|n| engine.submit(request(&engine, prompt(8, n), 9)).unwrap());
        gate.step().await;
        gate.step().await;
        gate.go(go);
        for stream in streams {
            let (_, end) = collect(stream).await;
            assert!(matches!(&end, SequenceEvent::Failed(error) if error.to_string().contains(why)), "{end:?}");
        }
        all_blocks_back(&engine).await;
    }
}

#[tokio::test]
async fn a_warm_up_waits_for_steps_under_way() {
    let (engine, mut gate) = gated_under_way(LIMITS, 2);
    let stream = engine.submit(request(&engine, prompt(8, 1), 100)).unwrap();
    assert_eq!((gate.step().await, gate.step().await), (vec![0], vec![0]));
    // It is asked for before the first of the two ends, and so taken with the second under way.
    let (warm, ()) = within(async { tokio::join!(engine.warm_up(64), async { drop(gate) }) }).await;
    warm.expect("warm");
    let (alone, _) = gated(LIMITS);
    assert_eq!(collect(stream).await.0, generate(&alone, request(&alone, prompt(8, 1), 100)).await);
}

#[tokio::test]
async fn shutdown_ends_streams_and_returns_blocks_with_steps_under_way() {
    let engine = overlapping(64, 2, LIMITS);
    let stream = engine.submit(request(&engine, prompt(8, 0), 500)).unwrap();
    engine.shutdown();
    assert_eq!(engine.pool().free(), 64, "the thread has ended");
    assert!(collect(stream).await.1.is_last());
}
