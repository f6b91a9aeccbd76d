//! Whole requests over tcp: the answers, their traces, and their ends.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tandem_kvtransfer::{Faults, Refusal};
use tandem_node::admin::Metrics;
use tandem_proto::spans::unpack;
use tandem_proto::v1::prefill_command::Command as PrefillCommandKind;
use tandem_proto::v1::prefill_event::Event as PrefillEventKind;
use tandem_proto::v1::{self, PrefillCommand, RequestSpec};
use tonic::Code;

use crate::nodes::{Answer, Pair, collect, deliver, first_token, spec, stop, ticket, undelivered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disaggregated_is_local_token_for_token() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let mut rng = StdRng::seed_from_u64(1);
    let mut counted = (0, 0);
    for prompt_tokens in [1, 15, 16, 17, 100, 700, 1000] {
        for max_tokens in [1, 2, 40] {
            let spec = spec(&mut rng, prompt_tokens, max_tokens);
            let (apart, alone) = (pair.run(&spec).await.unwrap(), pair.local(&spec).await.unwrap());
            assert_eq!(apart.tokens, alone.tokens, "{prompt_tokens} + {max_tokens}");
            // What ends with its first token never comes to the decode node.
            let came = if apart.verified.is_some() { 2 } else { 1 };
            counted = (counted.0 + came * prompt_tokens as u64, counted.1 + came * alone.tokens.len() as u64);
        }
    }
    assert_eq!(pair.decode.work.tokens(), counted);
    // As whole answers they are the same.
    let text = Metrics::new(&pair.decode).text(None).1;
    let sum = |name: &str| {
        let series = text.lines().filter(|line| line.split_once('{').is_some_and(|(of, _)| of == name));
        series.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>()
    };
    let told = ["vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_sum"].map(|name| sum(name) as u64);
    assert_eq!((told[0], told[1]), counted);
    assert_eq!(sum("vllm:e2e_request_latency_seconds_count"), sum("vllm:request_success_total"));
    assert!(sum("vllm:e2e_request_latency_seconds_sum") > sum("vllm:request_decode_time_seconds_sum"));
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spans_are_one_tree() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let spec = spec(&mut StdRng::seed_from_u64(2), 600, 8);
    let answer = pair.run(&spec).await.unwrap();
    for (child, parent) in [
        ("prefill.queue", "prefill"),
        ("prefill.forward", "prefill"),
        ("kv.post", "prefill.forward"),
        ("kv.transfer", "kv.post"),
        ("decode.queue", "decode"),
    ] {
        assert_eq!(answer.span(child).parent_span_id, answer.span(parent).span_id, "{child}");
    }
    for root in ["kv.reserve", "prefill", "decode"] {
        assert_eq!(answer.span(root).parent_span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7], "{root}");
    }
    assert!(answer.spans.iter().all(|span| span.error().is_empty() && span.start_unix_ns <= span.end_unix_ns));
    let transfer: Vec<_> = answer.span("kv.transfer").attributes.iter().map(|a| a.key.as_str()).collect();
    for key in ["bytes", "blocks", "gbps", "transport", "verify_ms"] {
        assert!(transfer.contains(&format!("tandem.kv.{key}").as_str()), "{transfer:?}");
    }
    let count = |event: &v1::SpanEvent, key: &str| {
        let attribute = event.attributes.iter().find(|attribute| attribute.key == key).and_then(|a| a.said().cloned());
        let Some(v1::any_value::Value::Integer(count)) = attribute else { panic!("{key} of {event:?}") };
        count
    };
    let events = &answer.span("kv.transfer").events;
    assert!(events.iter().all(|event| event.name == "layer_group.landed"), "{events:?}");
    assert_eq!(events.iter().map(|landed| count(landed, "tandem.kv.bytes")).sum::<i64>(), 38 * 4096);
    assert!(events.windows(2).all(|pair| pair[0].unix_ns <= pair[1].unix_ns));
    let posted = |event: &&v1::SpanEvent| event.name == "layer_group.posted";
    let groups = |event: &v1::SpanEvent| (count(event, "tandem.kv.first_unit"), count(event, "tandem.kv.units"));
    let sent: std::collections::BTreeSet<_> = answer.span("kv.post").events.iter().filter(posted).map(groups).collect();
    assert_eq!(events.iter().map(groups).collect::<std::collections::BTreeSet<_>>(), sent, "group by group");
    assert_eq!(answer.span("prefill.queue").end_unix_ns, answer.span("prefill.forward").start_unix_ns);
    assert!(answer.span("prefill.forward").events.len() >= 2, "a chunk a step");
    let transfer_id = answer.span("kv.transfer").span_id.clone();
    let verified = answer.verified.unwrap();
    assert_eq!((verified.blocks, verified.bytes), (38, 38 * 4096));
    assert_eq!(verified.span_id, transfer_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_that_a_reader_notices_is_in_the_trace() {
    let mut pair = Pair::start(Faults::default(), "--simulated-step-us 120000").await;
    let spec = RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(9), 20, 3) };
    let answer = pair.run(&spec).await.unwrap();
    let stalls: Vec<_> = answer.span("decode").events.iter().filter(|event| event.name == "stall").collect();
    assert_eq!(stalls.len(), 2, "each of the two tokens after the first");
    for stall in stalls {
        let of = |key: &str| stall.attributes.iter().find(|a| a.key == key).and_then(|a| a.said().cloned());
        assert!(matches!(of("gap_ms"), Some(v1::any_value::Value::Number(ms)) if ms > 100.0), "{stall:?}");
        assert_eq!(of("cause"), Some(v1::any_value::Value::Text("engine".into())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_kv_is_refused_and_never_decoded() {
    let flip = Faults { flip_byte: true, ..Faults::default() };
    let truncate = Faults { truncate_push: true, ..Faults::default() };
    for (faults, refusal) in [(flip, Refusal::Corrupt(0)), (truncate, Refusal::Length)] {
        let mut pair = Pair::start(faults, "").await;
        let spec = spec(&mut StdRng::seed_from_u64(3), 100, 8);
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
        first_token(&mut prefill).await.unwrap();
        let refused = collect(&mut decode, &mut Answer::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::DataLoss, "{refused:?}");
        let undelivered = undelivered(&mut prefill).await.unwrap();
        assert_eq!(undelivered.code, i32::from(Code::DataLoss), "{undelivered:?}");
        // The router does not try again.
        drop((commands, prefill));
        assert_eq!(pair.decode.transport.counters().refused_for(refusal), 1);
        assert!(pair.decode.work.outcomes().any(|outcome| outcome == ("corrupt", 1)));
        pair.all_blocks_back().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_leaves_nothing_behind() {
    let mut pair = Pair::start(Faults::default(), "--simulated-step-us 2000").await;
    let spec = RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(4), 600, 2000) };
    for phase in ["granted", "computing", "computed", "decoding"] {
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let ticket = ticket(&mut decode).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        if phase == "computed" || phase == "decoding" {
            first_token(&mut prefill).await.unwrap();
        }
        if phase == "decoding" {
            commands.send(deliver(ticket)).await.unwrap();
            for _ in 0..5 {
                assert!(decode.message().await.unwrap().is_some());
            }
        }
        // HTTP/2 resets a stream when both directions are let go.
        drop(commands);
        if phase == "granted" {
            drop(prefill);
            drop(decode);
        } else {
            drop(decode);
            drop(prefill);
        }
        pair.all_blocks_back().await;
    }
    // And the pair still works.
    let short = RequestSpec { max_tokens: 5, ..spec.clone() };
    assert_eq!(pair.run(&short).await.unwrap().tokens, pair.local(&short).await.unwrap().tokens);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_answer_ends_well_at_any_point() {
    let mut pair = Pair::start(Faults::default(), "--simulated-step-us 2000").await;
    let spec = RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(7), 600, 2000) };
    for tokens in [0, 1, 5] {
        let (stopping, mut decode) = pair.open_stoppable_decode(&spec).await.unwrap();
        let ticket = ticket(&mut decode).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        commands.send(deliver(ticket)).await.unwrap();
        first_token(&mut prefill).await.unwrap();
        if tokens > 0 {
            // The first one is the verification.
            for _ in 0..=tokens {
                assert!(decode.message().await.unwrap().is_some());
            }
        }
        stopping.send(stop(false)).await.unwrap();
        let mut answer = Answer::default();
        tokio::time::timeout(Duration::from_secs(5), collect(&mut decode, &mut answer)).await.unwrap().unwrap();
        assert_eq!(answer.reason, i32::from(v1::FinishReason::Stop));
        assert!(answer.tokens.len() < 500, "{} more tokens", answer.tokens.len());
        for name in ["kv.reserve", "kv.transfer", "decode"] {
            assert_eq!(answer.span(name).error(), "", "{name}");
        }
        assert!(matches!(
            prefill.message().await.unwrap().and_then(|event| event.event),
            Some(PrefillEventKind::Delivered(_))
        ));
        pair.all_blocks_back().await;
    }
    pair.every_call_ended_well(3).await;
    let counters = pair.decode.transport.counters();
    assert_eq!(counters.verified_handoffs.load(Relaxed), 3);
    assert_eq!(counters.aborted_handoffs.load(Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_that_nobody_needs_is_let_go() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let spec = spec(&mut StdRng::seed_from_u64(8), 600, 1);
    // Nothing was delivered to a prefill node whose token was the last one for the router alone.
    let longer = RequestSpec { max_tokens: 5, ignore_eos: true, ..spec.clone() };
    let (stopping, mut decode) = pair.open_stoppable_decode(&longer).await.unwrap();
    let (commands, mut prefill) = pair.open_prefill(&longer).await.unwrap();
    ticket(&mut decode).await.unwrap();
    first_token(&mut prefill).await.unwrap();
    commands.send(PrefillCommand { command: Some(PrefillCommandKind::Stop(v1::PrefillStop {})) }).await.unwrap();
    stopping.send(stop(true)).await.unwrap();
    collect(&mut decode, &mut Answer::default()).await.unwrap();
    match prefill.message().await.unwrap().and_then(|event| event.event) {
        Some(PrefillEventKind::Delivered(delivered)) => {
            assert!(unpack(&delivered.spans).all(|s| s.error().is_empty()))
        }
        other => panic!("expected delivered, got {other:?}"),
    }
    // With a ticket the prefill node cancels the hand-off itself, before or after the router's word.
    for (ticket_is_delivered, word_is_late) in [(false, false), (true, false), (true, true)] {
        let (stopping, mut decode) = pair.open_stoppable_decode(&spec).await.unwrap();
        let ticket = ticket(&mut decode).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        if ticket_is_delivered {
            // A call whose first token is its last may be over already, without the ticket.
            let _ = commands.send(deliver(ticket)).await;
        }
        assert!(first_token(&mut prefill).await.unwrap().finished.is_some());
        if word_is_late {
            while prefill.message().await.unwrap().is_some() {}
            let released = || pair.decode.transport.counters().released_handoffs.load(Relaxed);
            let seen = async {
                while released() < 4 {
                    tokio::task::yield_now().await;
                }
            };
            let _ = tokio::time::timeout(Duration::from_millis(200), seen).await;
        }
        stopping.send(stop(true)).await.unwrap();
        let mut answer = Answer::default();
        collect(&mut decode, &mut answer).await.unwrap();
        let names: Vec<_> = answer.spans.iter().map(|span| (span.name.as_str(), span.error())).collect();
        assert_eq!(names, [("kv.reserve", "")], "there was no transfer");
        pair.all_blocks_back().await;
    }
    pair.every_call_ended_well(4).await;
    let counters = pair.decode.transport.counters();
    assert_eq!((counters.released_handoffs.load(Relaxed), counters.aborted_handoffs.load(Relaxed)), (4, 0));
    assert!(counters.refused().all(|(_, count)| count == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_are_bounded_by_the_deadline() {
    let mut pair = Pair::start(Faults::default(), "").await;
    // A busy machine needs some of it for the ticket and the first token.
    let late =
        RequestSpec { time_left_ns: 2_000_000_000, ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(5), 50, 8) };
    let mut decode = pair.open_decode(&late).await.unwrap();
    let (_commands, mut prefill) = pair.open_prefill(&late).await.unwrap();
    ticket(&mut decode).await.unwrap();
    first_token(&mut prefill).await.unwrap();
    // No ticket ever reaches the prefill node.
    let codes = [prefill.message().await.unwrap_err().code(), decode.message().await.unwrap_err().code()];
    assert_eq!(codes[0], Code::DeadlineExceeded);
    // The lease ends with the deadline: whichever timer fires first names it.
    assert!(matches!(codes[1], Code::DeadlineExceeded | Code::Unavailable), "{codes:?}");
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_are_refused_at_once() {
    let mut pair = Pair::start(Faults::default(), "--kv-blocks 8").await;
    let mut rng = StdRng::seed_from_u64(6);
    let refused = pair.run(&RequestSpec { prompt: Vec::new(), ..spec(&mut rng, 1, 1) }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let too_large = spec(&mut rng, 300, 4);
    assert_eq!(pair.run(&too_large).await.unwrap_err().code(), Code::InvalidArgument);
    let (_commands, mut prefill) = pair.open_prefill(&too_large).await.unwrap();
    assert_eq!(prefill.message().await.unwrap_err().code(), Code::InvalidArgument);
    let fine = RequestSpec { ignore_eos: true, ..spec(&mut rng, 40, 4) };
    let (commands, mut prefill) = pair.open_prefill(&fine).await.unwrap();
    commands.send(deliver(vec![0xff; 9])).await.unwrap();
    let code = loop {
        match prefill.message().await {
            Ok(Some(_)) => {}
            other => break other.unwrap_err().code(),
        }
    };
    assert_eq!(code, Code::InvalidArgument);
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_prompt_is_not_computed_again_and_does_not_travel_again() {
    let mut pair = Pair::start(Faults::default(), "").await;
    let spec = RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(7), 100, 8) };
    let (cold, warm) = (pair.run(&spec).await.unwrap(), pair.run(&spec).await.unwrap());
    assert_eq!((cold.cached_tokens, warm.cached_tokens), (0, 96));
    assert_eq!(warm.tokens, cold.tokens);
    let (cold_kv, warm_kv) = (cold.verified.unwrap(), warm.verified.unwrap());
    assert_eq!((cold_kv.blocks, cold_kv.held_blocks), (7, 0));
    assert_eq!((warm_kv.blocks, warm_kv.held_blocks, warm_kv.bytes), (1, 6, 4096));
    let longer = RequestSpec { prompt: [&spec.prompt[..], &[9; 40]].concat(), ..spec.clone() };
    assert_eq!(pair.run(&longer).await.unwrap().cached_tokens, 96);
    // What decode was handed and has decoded with serves its own prompts too.
    let local = pair.local(&spec).await.unwrap();
    assert_eq!((local.tokens, local.cached_tokens), (cold.tokens, 96));

    let mut off = Pair::start(Faults::default(), "--no-prefix-caching").await;
    for _ in 0..2 {
        assert_eq!(off.run(&spec).await.unwrap().cached_tokens, 0);
    }
    pair.all_blocks_back().await;
    off.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_share_few_blocks() {
    let pair = Pair::start(Faults::default(), "--kv-blocks 16").await;
    let pair = Arc::new(pair);
    let mut running = tokio::task::JoinSet::new();
    for seed in 0..32 {
        let mut pair = Pair {
            prefill: pair.prefill.clone(),
            decode: pair.decode.clone(),
            to_prefill: pair.to_prefill.clone(),
            to_decode: pair.to_decode.clone(),
        };
        running.spawn(async move {
            let spec = spec(&mut StdRng::seed_from_u64(seed), 60, 30);
            assert_eq!(pair.run(&spec).await.unwrap().tokens, pair.local(&spec).await.unwrap().tokens);
        });
    }
    running.join_all().await;
    pair.all_blocks_back().await;
}
