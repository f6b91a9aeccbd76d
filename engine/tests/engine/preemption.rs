//! Preemption as a reader of a stream sees it: the same tokens, each once, and a word of what happened.
use std::sync::Arc;

use tandem_engine::{Engine, SchedulerConfig, SequenceEvent, SequenceRequest};

use crate::support::{LIMITS, all_blocks_back, generate, prompt, request_in, seeded, simulated, within};

const NEW_TOKENS: u32 = 100;

fn job(engine: &Engine, salt: u32) -> SequenceRequest {
    let tokens = prompt(20, salt);
    let lease = engine.pool().try_reserve(engine.pool().blocks_for(tokens.len() + 1)).expect("room for the prompts");
    SequenceRequest { sampling: Arc::new(seeded(salt.into())), ..request_in(Arc::new(lease), tokens, NEW_TOKENS) }
}

/// What a stream said, in short, and its tokens.
async fn story(engine: Engine, request: SequenceRequest) -> (String, Vec<u32>) {
    let mut stream = engine.submit(request).expect("a valid request");
    let (mut story, mut tokens) = (String::new(), Vec::new());
    while let Some(event) = within(stream.next()).await {
        story.push(match event {
            SequenceEvent::Started { .. } => 'S',
            SequenceEvent::ChunkDone { .. } => 'C',
            SequenceEvent::LayersDone { .. } => 'L',
            SequenceEvent::Preempted { .. } => 'P',
            SequenceEvent::Resumed { .. } => 'R',
            SequenceEvent::Token { id, .. } => {
                tokens.push(id);
                'T'
            }
            SequenceEvent::Finished { .. } => 'F',
            SequenceEvent::Failed(error) => panic!("{error}"),
        });
    }
    (story, tokens)
}

#[tokio::test]
async fn answers_that_do_not_fit_together_are_what_they_are_alone() {
    for prefix_caching in [true, false] {
        let limits = SchedulerConfig { prefix_caching, max_step_tokens: 200, ..LIMITS };
        // Each answer comes to eight blocks of the twelve, and six prompts fit.
        let (roomy, tiny) = (Engine::start(simulated(64), limits), Engine::start(simulated(12), limits));
        let jobs: Vec<_> = (0..6).map(|salt| job(&tiny, salt)).collect();
        let readers: Vec<_> = jobs.into_iter().map(|job| tokio::spawn(story(tiny.clone(), job))).collect();
        let mut preempted = 0;
        for (salt, reader) in (0..).zip(readers) {
            let (story, tokens) = reader.await.expect("no panic");
            assert_eq!(tokens, generate(&roomy, job(&roomy, salt)).await, "{story}");
            let count = |what| story.matches(what).count();
            assert_eq!((count('S'), count('C'), count('T'), count('F')), (1, 1, NEW_TOKENS as usize, 1), "{story}");
            assert_eq!(count('P'), count('R'), "{story}");
            preempted += count('P');
        }
        let load = tiny.load();
        assert!(preempted >= 4 && load.preemptions as usize >= preempted, "{preempted} of {}", load.preemptions);
        assert_eq!((load.running, load.waiting, roomy.load().preemptions), (0, 0, 0));
        all_blocks_back(&tiny).await;
    }
}

#[tokio::test]
async fn an_answer_ends_where_the_whole_memory_does() {
    let engine = Engine::start(simulated(3), LIMITS);
    let tokens = generate(&engine, job(&engine, 7)).await;
    assert_eq!(20 + tokens.len(), 3 * 16 + 1, "the KV of the last token is not needed");
}

#[tokio::test]
async fn who_needs_a_block_that_a_transfer_holds_waits_for_it() {
    let engine = Engine::start(simulated(3), LIMITS);
    let first = job(&engine, 1);
    let transfer = engine.pool().try_reserve(1).expect("the last one");
    let mut stream = engine.submit(first).expect("a valid request");
    let mut count = 0;
    // Twelve tokens fill the two blocks; the next one's KV has no place.
    while count < 13 {
        let event = within(stream.next()).await.expect("an event");
        count += usize::from(matches!(event, SequenceEvent::Token { .. }));
    }
    let silent = tokio::time::timeout(std::time::Duration::from_millis(50), stream.next()).await;
    assert!(silent.is_err(), "{silent:?}");
    drop(transfer);
    while let Some(event) = within(stream.next()).await {
        assert!(!matches!(event, SequenceEvent::Failed(_) | SequenceEvent::Preempted { .. }), "{event:?}");
        count += usize::from(matches!(event, SequenceEvent::Token { .. }));
    }
    assert_eq!(count, 3 * 16 + 1 - 20);
}
