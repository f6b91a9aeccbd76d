//! Whole requests on the decode node alone: their spans, what is cached of them, how they end early, who they stand
//! beside.

use rand::SeedableRng;
use rand::rngs::StdRng;
use tandem_kvtransfer::Faults;
use tandem_proto::spans::unpack;
use tandem_proto::v1::decode_event::Event;
use tandem_proto::v1::{DecodeEvent, FinishReason, RequestSpec};
use tonic::{Code, Streaming};

use crate::nodes::{Answer, Pair, collect, spec, stop};

async fn next(stream: &mut Streaming<DecodeEvent>) -> Option<Event> {
    stream.message().await.unwrap().and_then(|event| event.event)
}

fn endless(seed: u64, prompt_tokens: usize, max_tokens: u32) -> RequestSpec {
    RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(seed), prompt_tokens, max_tokens) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spans_are_those_of_a_prefill_and_a_decode_node() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let answer = pair.local(&endless(2, 600, 8)).await.unwrap();
    for (child, parent) in [("prefill.queue", "prefill"), ("prefill.forward", "prefill")] {
        assert_eq!(answer.span(child).parent_span_id, answer.span(parent).span_id, "{child}");
    }
    assert_eq!(answer.span("prefill").parent_span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb8]);
    assert_eq!(answer.span("decode").parent_span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
    assert!(["prefill", "decode"].iter().all(|name| answer.span(name).kind_name() == "server"));
    // One after the other, without a gap.
    let borders = [("prefill.queue", "prefill.forward"), ("prefill", "decode")];
    for (before, after) in borders {
        assert_eq!(answer.span(before).end_unix_ns, answer.span(after).start_unix_ns, "{before}");
    }
    assert_eq!(answer.span("prefill.forward").end_unix_ns, answer.span("prefill").end_unix_ns);
    assert!(answer.span("prefill.forward").events.len() >= 2, "a chunk a step");
    assert!(answer.spans.len() == 4 && answer.spans.iter().all(|span| span.error().is_empty()), "{:?}", answer.spans);
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_computed_once() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let spec = endless(3, 100, 40);
    let (cold, warm) = (pair.local(&spec).await.unwrap(), pair.local(&spec).await.unwrap());
    assert_eq!((cold.cached_tokens, warm.cached_tokens), (0, 96));
    assert_eq!(warm.tokens, cold.tokens);
    // The answer, too: the next turn finds it.
    let turn = RequestSpec { prompt: [&spec.prompt[..], &cold.tokens, &[9; 40]].concat(), ..spec };
    let second = pair.local(&turn).await.unwrap();
    assert_eq!(second.cached_tokens, 128);
    assert_eq!(second.tokens, Pair::start(Faults::default(), "").await.local(&turn).await.unwrap().tokens);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resumed_answer_goes_on_as_it_would_have() {
    let mut pair = Pair::start(Faults::default(), "").await;
    for seed in 0..6 {
        let whole = endless(seed, 90, 24);
        let tokens = pair.local(&whole).await.unwrap().tokens;
        for sent in [1, 7, 23] {
            let prompt = [&whole.prompt[..], &tokens[..sent]].concat();
            let (max_tokens, output_tokens) = (24 - sent as u32, sent as u32);
            let resumed = RequestSpec { prompt, max_tokens, output_tokens, ..whole.clone() };
            assert_eq!(pair.local(&resumed).await.unwrap().tokens, tokens[sent..], "seed {seed} after {sent}");
            // From one way to the other.
            assert_eq!(pair.run(&resumed).await.unwrap().tokens, tokens[sent..], "seed {seed} after {sent}");
        }
    }
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_ends_it_well_at_any_point() {
    let mut pair = Pair::start(Faults::default(), "--kv-blocks 64 --simulated-step-us 2000").await;
    // All blocks: whoever comes next waits for them.
    let all = pair.decode.engine.pool().try_reserve(64).unwrap();
    let (waiting, mut stream) = pair.open_local(&endless(2, 100, 900)).await.unwrap();
    waiting.send(stop(false)).await.unwrap();
    let Some(Event::Finished(finished)) = next(&mut stream).await else { panic!("it waits for blocks") };
    assert_eq!(finished.reason(), FinishReason::Stop);
    assert!(unpack(&finished.spans).all(|span| span.error().is_empty()));
    drop(all);
    let (_held, mut running) = pair.open_local(&endless(1, 100, 900)).await.unwrap();
    assert!(matches!(next(&mut running).await, Some(Event::FirstToken(_))));
    drop((running, _held));

    let (commands, mut stream) = pair.open_local(&endless(3, 100, 900)).await.unwrap();
    assert!(matches!(next(&mut stream).await, Some(Event::FirstToken(_))));
    assert!(matches!(next(&mut stream).await, Some(Event::Token(_))));
    commands.send(stop(false)).await.unwrap();
    let mut answer = Answer::default();
    collect(&mut stream, &mut answer).await.unwrap();
    assert!(answer.span("decode").events.iter().any(|event| event.name == "stopped"));
    pair.all_blocks_back().await;
    while pair.decode.work.in_flight() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(pair.decode.work.outcomes().any(|outcome| outcome == ("ok", 2)));
    assert!(pair.decode.work.outcomes().any(|outcome| outcome == ("cancelled", 1)), "closing the call is no stop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_deadline_ends_it_and_gives_the_blocks_back() {
    let mut pair = Pair::start(Faults::default(), "--simulated-step-us 5000").await;
    let spec = RequestSpec { time_left_ns: 200_000_000, ..endless(4, 50, 4000) };
    let status = pair.local(&spec).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    pair.all_blocks_back().await;
}

/// Decode steps and prefill chunks share a step: who streams loses no more than the time of a chunk to a long prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_does_not_stall_a_running_stream() {
    let flags = "--simulated-step-us 5000 --max-num-batched-tokens 64 --max-num-seqs 8 --speculate off";
    let mut pair = Pair::start(Faults::default(), flags).await;
    let decode = pair.decode.clone();
    let steps = || decode.engine.load().steps.iter().sum::<u64>();
    let before = steps();
    let (_streaming, mut stream) = pair.open_local(&endless(5, 10, 2000)).await.unwrap();
    assert!(matches!(next(&mut stream).await, Some(Event::FirstToken(_))));
    let (_reading, mut prompt) = pair.open_local(&endless(6, 1000, 1)).await.unwrap();
    let mut tokens = 1;
    loop {
        tokio::select! {
            biased;
            event = next(&mut stream) => {
                assert!(matches!(event, Some(Event::Token(_))), "{event:?}");
                tokens += 1;
            }
            event = next(&mut prompt) => {
                assert!(matches!(event, Some(Event::FirstToken(_))), "{event:?}");
                break;
            }
        }
    }
    let Some(Event::Finished(finished)) = next(&mut prompt).await else { panic!("one token is its answer") };
    let forward = unpack(&finished.spans).find(|span| span.name == "prefill.forward").unwrap();
    let chunks = forward.events.iter().filter(|event| event.name == "chunk.done").count();
    // 63 tokens a step are left beside the stream's one.
    assert_eq!(chunks, 1000_usize.div_ceil(63));
    // The engine's steps are counted, not what is here by now: a late reader catches up, a stalled stream never does.
    while steps() - before > tokens + 4 {
        let event = next(&mut stream).await;
        assert!(matches!(event, Some(Event::Token(_))), "{tokens} tokens in {} steps: {event:?}", steps() - before);
        tokens += 1;
    }
}
