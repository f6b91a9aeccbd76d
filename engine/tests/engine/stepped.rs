//! An engine without a thread gives the same tokens as one with, at the times that its steps take.
use std::time::Duration;

use tandem_engine::{Engine, EngineError, SequenceEvent};

use crate::support::*;

const STEP: Duration = Duration::from_millis(10);

/// By an engine with a thread, which knows nothing of paused time.
fn by_a_thread(len: usize, max_new_tokens: u32) -> Vec<u32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let engine = engine(LIMITS);
    runtime.block_on(generate(&engine, request(&engine, prompt(len, 3), max_new_tokens)))
}

#[tokio::test(start_paused = true)]
async fn steps_take_virtual_time_and_give_the_same_tokens() {
    let expected = std::thread::spawn(|| by_a_thread(20, 4)).join().unwrap();
    let (stepped, stepper) = Engine::stepped(simulated(64), LIMITS, |_| STEP);
    let running = tokio::spawn(stepper.run());
    let begin = tokio::time::Instant::now();
    assert_eq!(generate(&stepped, request(&stepped, prompt(20, 3), 4)).await, expected);
    // One step for the prompt and its token, three more. Timers count whole milliseconds, and the pause began in one.
    let (took, rounding) = (begin.elapsed(), Duration::from_millis(1));
    assert!((4 * STEP..=4 * (STEP + rounding)).contains(&took), "{took:?}");
    assert!((stepped.load().step_cost.base_ms - 10.0).abs() <= 1.0, "{:?}", stepped.load().step_cost);
    drop(stepped);
    running.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stepper_that_goes_fails_its_sequences_and_returns_their_blocks() {
    let (engine, stepper) = Engine::stepped(simulated(64), LIMITS, |_| STEP);
    let running = tokio::spawn(stepper.run());
    let mut stream = engine.submit(request(&engine, prompt(20, 3), 4)).unwrap();
    assert!(matches!(stream.next().await, Some(SequenceEvent::Started { .. })));
    running.abort();
    let end = loop {
        match stream.next().await {
            Some(SequenceEvent::Failed(error)) => break error,
            Some(_) => {}
            None => panic!("no end"),
        }
    };
    assert!(matches!(end, EngineError::Stopped(_)), "{end}");
    drop(stream);
    assert_eq!(engine.pool().free(), 64);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_it_after_its_present_step() {
    let (engine, stepper) = Engine::stepped(simulated(64), LIMITS, |_| STEP);
    let running = tokio::spawn(stepper.run());
    let mut stream = engine.submit(request(&engine, prompt(20, 3), 400)).unwrap();
    stream.next().await;
    engine.shutdown();
    running.await.unwrap();
    assert_eq!(engine.stopped(), Some("it was shut down"));
    assert!(matches!(engine.submit(request(&engine, prompt(4, 1), 1)), Err(EngineError::Stopped(_))));
}
