//! Requests that a decode node answers alone, and the ways from there to a pair and back.
use super::super::attempt_protocol::tests::local_first;
use super::fakes::{join_decode, join_prefill, router_of};
use super::replans::{breaker, ids, metric};
use super::*;
use crate::api::Service;
use crate::select::LocalPrefill::{self, Always, Auto};

fn router_with(local: LocalPrefill) -> Service {
    router_of(Limits::default(), local)
}

fn plans(service: &Service) -> [u64; 2] {
    ["pair", "local"].map(|plan| metric(service, &["tandem_plans_total", &format!("plan=\"{plan}\"")]))
}

/// The next call of a local plan: the call, its spec and the parent of its `prefill`.
async fn local_call(node: &mut fakes::Fake<DecodeCall>) -> (DecodeCall, v1::RequestSpec, String) {
    let (call, start) = node.call().await;
    assert_eq!(start.prefill_incarnation, 0);
    (call, start.spec.unwrap(), start.local.expect("a local plan").traceparent)
}

/// The client's next token.
async fn sees(stream: &mut GenerationStream, token: char) {
    let event = stream.next().await;
    assert!(matches!(event, Some(Ok(GenerationEvent::Token { id, .. })) if id == self::id(token)), "{event:?}");
}

fn finish(end: Result<GenerationEvent, Error>) -> (Usage, Box<v1::Timings>, String) {
    let Ok(GenerationEvent::Finish { usage, timings, trace_id, .. }) = end else { panic!("{end:?}") };
    (usage, timings, trace_id)
}

fn attribute<'a>(trace: &'a Value, span: &str, key: &str) -> &'a Value {
    &spans(trace).find(|of| of["name"] == span).unwrap_or_else(|| panic!("no span {span}"))["attributes"][key]
}

#[tokio::test]
async fn a_local_request_and_its_trace() {
    for local in [Always, Auto] {
        let service = router_with(local);
        assert!(!service.ready());
        let mut d0 = join_decode(&service, "d0").await;
        assert!(service.ready());
        let stream = service.generate(request()).unwrap();
        let (call, spec, prefill_parent) = local_call(&mut d0).await;
        assert_eq!((spec.prompt.len(), spec.max_tokens, spec.output_tokens), (20, 8, 0));
        call.send(local_first(id('H'), 16)).await;
        call.send(token(id('i'))).await;
        call.send(token(0)).await;
        let spans_of_node = vec![node_span(&prefill_parent, "prefill"), node_span(&spec.traceparent, "decode")];
        call.send(finished(Stop, spans_of_node)).await;

        let (text, _, end) = read(stream).await;
        assert_eq!(text, "Hi");
        let (usage, timings, trace_id) = finish(end);
        assert_eq!((usage.prompt, usage.completion, usage.cached), (20, 3, 16));
        let parts = timings.queue_ms + timings.route_ms + timings.prefill_ms;
        assert!((parts - timings.ttft_ms).abs() < 1e-6 && timings.ttft_ms > 0.0 && timings.handoff_gap_ms > 0.0);
        assert_eq!((timings.kv_bytes, timings.kv_transport.as_str(), timings.transfer_exposed_ms), (0, "", 0.0));
        assert_eq!([&*timings.prefill_instance, &*timings.decode_instance], ["d0", "d0"]);
        let trace = service.trace_json(&trace_id).unwrap();
        check_phases(&trace, &["queue", "route", "prefill", "decode"]);
        assert!(spans(&trace).all(|span| span["name"] != "transfer"));
        assert_eq!(attribute(&trace, "chat fake", "tandem.route.plan"), "local");
        for name in ["prefill", "decode"] {
            let named = |service: &str| spans(&trace).find(|s| s["service"] == service && s["name"] == name).unwrap();
            assert_eq!(named("tandem-node")["parent_span_id"], named("tandem-router")["span_id"], "{name}");
            assert_eq!(named("tandem-router")["kind"], "client");
        }
        assert_eq!(plans(&service), [0, 1]);
        assert_eq!(metric(&service, &["tandem_handoffs_total"]), 0);
    }
}

#[tokio::test]
async fn a_cluster_that_prefills_locally_needs_decode_nodes_only() {
    let service = router_with(Always);
    let _p0 = join_prefill(&service, "p0").await;
    assert!(!service.ready());
    let error = service.generate(request()).unwrap_err();
    assert_eq!((error.kind, &*error.message), (ErrorKind::Unavailable, "no decode node is available"));
}

#[tokio::test]
async fn a_stop_string_ends_a_local_answer_as_it_ends_others() {
    for (stop, before, text) in [("a", "", ""), ("cd", "bcd", "ab")] {
        let service = router_with(Always);
        let mut d0 = join_decode(&service, "d0").await;
        let stream = service.generate(GenerationRequest { stop: vec![stop.into()], ..request() }).unwrap();
        let (mut call, spec, _) = local_call(&mut d0).await;
        call.send(local_first(id('a'), 16)).await;
        for character in before.chars() {
            call.send(token(id(character))).await;
        }
        stopped(&mut call).await;
        let (answer, _, end) = read(stream).await;
        assert_eq!(answer, text);
        let (usage, _, trace_id) = finish(end);
        assert_eq!(usage.cached, 16);
        // The client has its end; the node's report comes behind it.
        call.send(token(id('e'))).await;
        call.send(finished(Stop, vec![node_span(&spec.traceparent, "decode")])).await;
        call.cancelled().await;
        let shown = || service.trace_json(&trace_id).unwrap();
        replans::until("the node's span", || spans(&shown()).any(|span| span["service"] == "tandem-node")).await;
        assert!(spans(&shown()).all(|span| span["error"] == ""));
        check_phases(&shown(), &["queue", "route", "prefill", "decode"]);
    }
}

#[tokio::test]
async fn one_token_is_a_whole_local_answer() {
    let service = router_with(Always);
    let mut d0 = join_decode(&service, "d0").await;
    let stream = service.generate(GenerationRequest { max_tokens: 1, ..request() }).unwrap();
    let (call, ..) = local_call(&mut d0).await;
    call.send(local_first(id('a'), 0)).await;
    call.send(finished(Length, vec![])).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("a"));
    let (_, timings, trace_id) = finish(end);
    assert_eq!(timings.handoff_gap_ms, 0.0);
    check_phases(&service.trace_json(&trace_id).unwrap(), &["queue", "route", "prefill", "decode"]);
}

#[tokio::test]
async fn a_local_answer_goes_on_at_another_node() {
    for begun in ["", "a", "abc"] {
        let service = router_with(Always);
        let mut d0 = join_decode(&service, "d0").await;
        let mut stream = service.generate(request()).unwrap();
        let (call, ..) = local_call(&mut d0).await;
        for (index, character) in begun.chars().enumerate() {
            call.send(if index == 0 { local_first(id('a'), 0) } else { token(id(character)) }).await;
            sees(&mut stream, character).await;
        }
        let mut d1 = join_decode(&service, "d1").await;
        service.membership().leave(d0.node.session, "killed");
        call.cancelled().await;
        let (call, spec, _) = local_call(&mut d1).await;
        assert_eq!((&spec.prompt[20..], spec.output_tokens as usize), (&*ids(begun), begun.len()));
        assert_eq!(spec.max_tokens as usize, 8 - begun.len());
        call.send(local_first(id('x'), 16)).await;
        call.send(finished(Stop, vec![])).await;
        sees(&mut stream, 'x').await;
        let (usage, timings, trace_id) = finish(stream.next().await.unwrap());
        // What the node of the first token had cached.
        assert_eq!((usage.cached, timings.replans), (if begun.is_empty() { 16 } else { 0 }, 1));
        assert_eq!([&*timings.prefill_instance, &*timings.decode_instance], ["d1", "d1"]);
        check_phases(&service.trace_json(&trace_id).unwrap(), &["queue", "route", "prefill", "decode"]);
        assert_eq!(plans(&service), [0, 2]);
    }
}

#[tokio::test]
async fn without_its_prefill_node_a_request_goes_on_locally() {
    let service = router_with(Auto);
    let (mut p0, mut d0) = (join_prefill(&service, "p0").await, join_decode(&service, "d0").await);
    let stream = service.generate(request()).unwrap();
    let (prefill, _) = p0.call().await;
    let (decode, start) = d0.call().await;
    assert!(start.local.is_none(), "a pair is there");
    service.membership().leave(p0.node.session, "killed");
    prefill.cancelled().await;
    decode.cancelled().await;
    let (call, spec, _) = local_call(&mut d0).await;
    assert_eq!((spec.prompt.len(), spec.output_tokens), (20, 0));
    call.send(local_first(id('a'), 0)).await;
    call.send(finished(Stop, vec![])).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("a"));
    let (_, timings, trace_id) = finish(end);
    assert_eq!((timings.replans, &*timings.prefill_instance), (1, "d0"));
    let trace = service.trace_json(&trace_id).unwrap();
    let root = spans(&trace).find(|span| span["name"] == "chat fake").unwrap();
    assert_eq!(root["attributes"]["tandem.route.plan"], "local");
    assert_eq!(root["events"][0]["attributes"]["tandem.route.plan"], "local");
    assert_eq!(plans(&service), [1, 1]);
    // And the next one does not wait for a prefill node either.
    assert!(service.ready());
    let _stream = service.generate(request()).unwrap();
    local_call(&mut d0).await;
}

#[tokio::test]
async fn a_pair_that_breaks_in_the_hand_off_goes_on_locally() {
    let service = router_with(Auto);
    let (mut p0, mut d0) = (join_prefill(&service, "p0").await, join_decode(&service, "d0").await);
    let mut stream = service.generate(request()).unwrap();
    let (mut prefill, _) = p0.call().await;
    let (decode, _) = d0.call().await;
    decode.send(reserved()).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    prefill.send(first_token(id('a'), None)).await;
    sees(&mut stream, 'a').await;
    decode.fail(Status::data_loss("checksum of block 3")).await;
    // The pair is avoided, and decode alone is no pair.
    let (call, spec, _) = local_call(&mut d0).await;
    prefill.cancelled().await;
    assert_eq!((&spec.prompt[20..], spec.output_tokens), (&*ids("a"), 1));
    call.send(local_first(id('b'), 0)).await;
    call.send(token(id('c'))).await;
    call.send(finished(Stop, vec![])).await;
    sees(&mut stream, 'b').await;
    sees(&mut stream, 'c').await;
    let (_, timings, trace_id) = finish(stream.next().await.unwrap());
    // The client did wait for KV, and none was verified.
    assert!(timings.transfer_exposed_ms > 0.0 && timings.kv_bytes == 0 && timings.decode_ms > 0.0, "{timings:?}");
    check_contiguous(&service.trace_json(&trace_id).unwrap());
}

#[tokio::test]
async fn a_local_answer_goes_on_with_a_pair() {
    let service = router_with(Auto);
    let mut d0 = join_decode(&service, "d0").await;
    let mut stream = service.generate(request()).unwrap();
    let (call, ..) = local_call(&mut d0).await;
    call.send(local_first(id('a'), 0)).await;
    sees(&mut stream, 'a').await;
    let (mut p0, mut d1) = (join_prefill(&service, "p0").await, join_decode(&service, "d1").await);
    service.membership().leave(d0.node.session, "killed");
    call.cancelled().await;
    let (mut prefill, spec) = p0.call().await;
    let (decode, start) = d1.call().await;
    assert_eq!((start.prefill_incarnation, start.local), (p0.node.info.incarnation, None));
    assert_eq!((&spec.prompt[20..], spec.output_tokens), (&*ids("a"), 1));
    hand_off(&mut prefill, &decode, 'b').await;
    decode.send(token(id('c'))).await;
    decode.send(finished(Stop, vec![])).await;
    sees(&mut stream, 'b').await;
    sees(&mut stream, 'c').await;
    let (_, timings, trace_id) = finish(stream.next().await.unwrap());
    assert_eq!((timings.replans, &*timings.prefill_instance, &*timings.decode_instance), (1, "p0", "d1"));
    let trace = service.trace_json(&trace_id).unwrap();
    assert_eq!(attribute(&trace, "chat fake", "tandem.route.plan"), "pair");
    // The prompt's phase was the local node's.
    assert_eq!(attribute(&trace, "prefill", "tandem.prefill.instance"), "d0");
    check_phases(&trace, &["queue", "route", "prefill", "decode"]);
}

#[tokio::test]
async fn what_fails_alone_is_blamed_alone_and_tried_a_bounded_number_of_times() {
    let service = router_of(Limits { max_attempts: 3, ..Limits::default() }, Always);
    let mut d0 = join_decode(&service, "d0").await;
    let stream = service.generate(request()).unwrap();
    // Of a pair the first two would be either's fault.
    for status in [Status::cancelled("x"), Status::data_loss("x"), Status::internal("out of luck")] {
        let (call, ..) = local_call(&mut d0).await;
        call.fail(status).await;
    }
    let error = read(stream).await.2.unwrap_err();
    let told = "decode node d0 failed during prefill: out of luck (attempt 3 of 3)";
    assert_eq!((error.kind, &*error.message), (ErrorKind::Unavailable, told));
    assert_eq!(breaker(&service, "d0"), "open");
    // It is the only one: it is asked all the same, and an answer closes the breaker.
    let stream = service.generate(request()).unwrap();
    let (call, ..) = local_call(&mut d0).await;
    call.send(local_first(id('a'), 0)).await;
    call.send(finished(Stop, vec![])).await;
    assert!(read(stream).await.2.is_ok());
    assert_eq!(breaker(&service, "d0"), "closed");
}

#[tokio::test]
async fn a_silent_local_node_is_given_up() {
    let service = router_of(Limits { silence: BOUND, ..one_attempt() }, Always);
    let mut d0 = join_decode(&service, "d0").await;
    let stream = service.generate(request()).unwrap();
    let (call, ..) = local_call(&mut d0).await;
    let error = read(stream).await.2.unwrap_err();
    assert!(error.message.starts_with("decode node d0 failed during prefill: it said nothing"), "{}", error.message);
    call.cancelled().await;
}
