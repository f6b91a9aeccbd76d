//! Starts, ends, refusals and failures: every block comes back and nothing hangs.
use std::sync::Arc;
use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::{
    Engine, EngineError, FinishReason, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest,
};

use crate::support::{
    Go, LIMITS, all_blocks_back, collect, engine, finished, gated, generate, prompt, request, request_in, seeded,
    within,
};

#[tokio::test]
async fn events_come_in_order() {
    let engine = engine(SchedulerConfig { max_step_tokens: 16, ..LIMITS });
    let mut stream = engine.submit(request(&engine, prompt(40, 0), 3)).unwrap();
    let (mut chunks, mut seen) = (Vec::new(), String::new());
    while let Some(event) = within(stream.next()).await {
        seen.push(match event {
            SequenceEvent::Started { .. } => 'S',
            SequenceEvent::ChunkDone { tokens, .. } => {
                chunks.push(tokens);
                'C'
            }
            SequenceEvent::Token { logprob, .. } => {
                assert!(logprob <= 0.0);
                'T'
            }
            SequenceEvent::Finished { .. } => 'F',
            SequenceEvent::LayersDone { .. } => panic!("nobody asked"),
            SequenceEvent::Preempted { .. } | SequenceEvent::Resumed { .. } => panic!("there is room for all"),
            SequenceEvent::Failed(error) => panic!("{error}"),
        });
    }
    assert_eq!((seen.as_str(), chunks), ("SCCCTTTF", vec![16, 32, 40]));
}

#[tokio::test]
async fn stops_where_it_should() {
    let engine = engine(LIMITS);
    let free_run = generate(&engine, request(&engine, prompt(8, 1), 20)).await;
    let end_of = async |request: SequenceRequest| {
        let (tokens, end) = collect(engine.submit(request).unwrap()).await;
        (tokens, finished(&end).expect("finished"))
    };
    assert_eq!(end_of(request(&engine, prompt(8, 1), 20)).await, (free_run.clone(), FinishReason::Length));

    let stop = SequenceRequest { stop_token_ids: vec![free_run[6]], ..request(&engine, prompt(8, 1), 20) };
    let at = free_run.iter().position(|&token| token == free_run[6]).unwrap();
    assert_eq!(end_of(stop).await, (free_run[..=at].to_vec(), FinishReason::Stop), "the stop token is emitted");

    let context = SequenceRequest { ..request(&engine, prompt(505, 1), 7) };
    let context = SequenceRequest { max_new_tokens: u32::MAX, ..context };
    let (tokens, reason) = end_of(context).await;
    assert_eq!((tokens.len(), reason), (7, FinishReason::Length), "the context ends at 512");
}

#[tokio::test]
async fn the_end_of_sequence_token_is_emitted_unless_ignored() {
    let probe = engine(LIMITS);
    let free_run = generate(&probe, request(&probe, prompt(8, 1), 5)).await;
    let config = tandem_engine::SimulatedConfig {
        blocks: 64,
        max_context_tokens: 512,
        block_bytes: 256,
        layers: 2,
        eos_token_id: free_run[2],
        ..Default::default()
    };
    let engine = Engine::start(Box::new(tandem_engine::SimulatedExecutor::new(&config).unwrap()), LIMITS);
    let heeding = SequenceRequest { ignore_eos: false, ..request(&engine, prompt(8, 1), 5) };
    assert_eq!(generate(&engine, heeding).await, free_run[..3]);
    assert_eq!(generate(&engine, request(&engine, prompt(8, 1), 5)).await, free_run);
}

#[tokio::test]
async fn wrong_requests_are_refused() {
    let (engine, other) = (engine(LIMITS), engine(LIMITS));
    let good = || request(&engine, prompt(16, 0), 16);
    assert!(engine.submit(SequenceRequest { max_new_tokens: u32::MAX, ..good() }).is_ok(), "it grows as far as it can");
    let small = Arc::new(engine.pool().try_reserve(1).unwrap());
    let wrong = [
        SequenceRequest { tokens: Vec::new(), prompt_len: 0, ..good() },
        SequenceRequest { prompt_len: 17, ..good() },
        SequenceRequest { computed: 16, ..good() },
        SequenceRequest { max_new_tokens: 0, ..good() },
        SequenceRequest { tokens: prompt(512, 0), ..good() },
        SequenceRequest { sampling: SamplingParams { temperature: f32::NAN, ..seeded(0) }.into(), ..good() },
        SequenceRequest { sampling: SamplingParams { top_p: 1.5, ..seeded(0) }.into(), ..good() },
        SequenceRequest { sampling: SamplingParams { repetition_penalty: 0.0, ..seeded(0) }.into(), ..good() },
        SequenceRequest { sampling: SamplingParams { logit_bias: vec![(1024, 1.0)], ..seeded(0) }.into(), ..good() },
        SequenceRequest { tokens: [vec![1024], prompt(15, 0)].concat(), ..good() },
        request_in(Arc::clone(&small), prompt(17, 0), 2),
        request(&other, prompt(16, 0), 16),
    ];
    for (i, wrong) in wrong.into_iter().enumerate() {
        assert!(matches!(engine.submit(wrong), Err(EngineError::InvalidArgument(_))), "request {i}");
    }
    // The last token's KV is never read, so that a full prompt block and one token fit one block.
    assert_eq!(generate(&engine, request_in(small, prompt(16, 0), 1)).await.len(), 1);
    all_blocks_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_with_random_cancels_return_all_blocks() {
    let engine = engine(SchedulerConfig { max_running: 6, max_step_tokens: 24, inbox: 512, ..LIMITS });
    let mut rng = StdRng::seed_from_u64(11);
    let mut tasks = Vec::new();
    for i in 0..500 {
        let (len, max_new, patience) = (rng.random_range(1..120), rng.random_range(1..24), rng.random_range(0..40));
        let (engine, expired) = (engine.clone(), rng.random_bool(0.05));
        tasks.push(tokio::spawn(async move {
            let tokens = prompt(len, i);
            let lease = engine.pool().reserve(engine.pool().blocks_for(len + max_new as usize)).await.unwrap();
            let deadline = expired.then(Instant::now);
            let mut stream =
                engine.submit(SequenceRequest { deadline, ..request_in(Arc::new(lease), tokens, max_new) }).unwrap();
            // Those with little patience leave in the queue, within the prompt, or among the tokens.
            for _ in 0..patience {
                match stream.next().await {
                    Some(SequenceEvent::Failed(error)) => {
                        assert_eq!((error, expired), (EngineError::DeadlineExceeded, true))
                    }
                    Some(_) => {}
                    None => return,
                }
            }
        }));
    }
    for task in tasks {
        within(task).await.unwrap();
    }
    all_blocks_back(&engine).await;
    assert_eq!(generate(&engine, request(&engine, prompt(9, 9), 4)).await.len(), 4, "it still serves");
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.free_blocks), (0, 0, 64));
}

#[tokio::test]
async fn a_dropped_stream_is_out_of_the_next_step() {
    let (engine, mut gate) = gated(LIMITS);
    let leaving = engine.submit(request(&engine, prompt(8, 0), 50)).unwrap();
    assert_eq!(gate.step().await, [0]);
    let staying = engine.submit(request(&engine, prompt(8, 1), 2)).unwrap();
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [0, 1]);
    drop(leaving);
    gate.go(Go::Run);
    assert_eq!(gate.step().await, [1]);
    assert_eq!(engine.pool().free(), 63, "only the other one's block is out");
    drop(gate);
    assert_eq!(collect(staying).await.0.len(), 2);
}

#[tokio::test]
async fn a_deadline_ends_a_waiting_sequence() {
    let (engine, mut gate) = gated(SchedulerConfig { max_running: 1, ..LIMITS });
    let running = engine.submit(request(&engine, prompt(8, 0), 5)).unwrap();
    assert_eq!(gate.step().await, [0]);
    let deadline = Some(Instant::now());
    let waiting = engine.submit(SequenceRequest { deadline, ..request(&engine, prompt(8, 1), 50) }).unwrap();
    gate.go(Go::Run);
    assert_eq!(collect(waiting).await.1, SequenceEvent::Failed(EngineError::DeadlineExceeded));
    drop(gate);
    assert_eq!(collect(running).await.0.len(), 5);
    all_blocks_back(&engine).await;
}

#[tokio::test]
async fn a_full_inbox_refuses_and_recovers() {
    let (engine, mut gate) = gated(SchedulerConfig { max_running: 1, max_step_tokens: 64, inbox: 3, ..LIMITS });
    let mut streams = vec![engine.submit(request(&engine, prompt(8, 0), 2)).unwrap()];
    assert_eq!(gate.step().await, [0]);
    for i in 1..=3 {
        streams.push(engine.submit(request(&engine, prompt(8, i), 2)).unwrap());
    }
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.free_blocks), (1, 3, 60));
    assert!(load.queued_tokens >= 24, "{load:?}");
    let refused = engine.submit(request(&engine, prompt(8, 4), 2));
    assert!(matches!(refused, Err(EngineError::Overloaded(_))));
    drop(gate);
    for stream in streams {
        assert_eq!(collect(stream).await.0.len(), 2);
    }
    assert_eq!(generate(&engine, request(&engine, prompt(8, 4), 2)).await.len(), 2);
}

#[tokio::test]
async fn a_failed_step_fails_its_sequences_only() {
    let (engine, mut gate) = gated(SchedulerConfig { max_running: 1, ..LIMITS });
    let first = engine.submit(request(&engine, prompt(8, 0), 4)).unwrap();
    assert_eq!(gate.step().await, [0]);
    let second = engine.submit(request(&engine, prompt(8, 1), 4)).unwrap();
    gate.go(Go::Fail);
    assert_eq!(collect(first).await.1, SequenceEvent::Failed(EngineError::Executor("told to fail".into())));
    drop(gate);
    assert_eq!(collect(second).await.0.len(), 4);
    all_blocks_back(&engine).await;
}

#[tokio::test]
async fn a_lost_device_ends_the_engine_and_says_why() {
    let (engine, mut gate) = gated(SchedulerConfig { max_running: 1, ..LIMITS });
    let first = engine.submit(request(&engine, prompt(8, 0), 4)).unwrap();
    gate.step().await;
    let second = engine.submit(request(&engine, prompt(8, 1), 4)).unwrap();
    gate.go(Go::Lose);
    let (_, end) = collect(first).await;
    assert_eq!(end, SequenceEvent::Failed(EngineError::DeviceLost("told to be gone".into())));
    let (_, end) = collect(second).await;
    assert!(matches!(&end, SequenceEvent::Failed(EngineError::Stopped(why)) if why.contains("told to be gone")));
    all_blocks_back(&engine).await;
    assert!(engine.stopped().is_some_and(|why| why.contains("the device is lost")), "{:?}", engine.stopped());
}

#[tokio::test]
async fn a_panic_ends_every_stream_and_the_engine_says_so() {
    let (engine, mut gate) = gated(SchedulerConfig { max_running: 1, ..LIMITS });
    let streams = [0, 1, 2].map(|i| engine.submit(request(&engine, prompt(8, i), 4)).unwrap());
    gate.step().await;
    gate.go(Go::Panic);
    for stream in streams {
        let (_, end) = collect(stream).await;
        assert!(matches!(&end, SequenceEvent::Failed(EngineError::Stopped(why)) if why.contains("told to panic")));
    }
    all_blocks_back(&engine).await;
    let refused = engine.submit(request(&engine, prompt(8, 0), 4)).err();
    assert!(matches!(refused, Some(EngineError::Stopped(_))), "{refused:?}");
    assert!(engine.stopped().is_some());
    engine.shutdown();
}

#[tokio::test]
async fn shutdown_and_drop_end_streams_and_join() {
    for drop_it in [true, false] {
        let engine = engine(LIMITS);
        let stream = engine.submit(request(&engine, prompt(8, 0), 500)).unwrap();
        let pool = engine.pool().clone();
        if drop_it {
            drop(engine)
        } else {
            engine.shutdown()
        }
        assert_eq!(pool.free(), pool.total(), "the thread has ended");
        assert!(collect(stream).await.1.is_last());
    }
}
