//! Requests whose nodes fail: another pair goes on, and the client sees each token once.
//! Long because each moment at which a node can fail is a test: who goes on differs from one to the next.
use super::super::attempt_protocol::tests::{delivered_to, reserved_by, undelivered};
use super::fakes::{join_decode, join_decode_of, join_prefill, join_prefill_of};
use super::*;
use crate::api::Service;

const SOON: Duration = Duration::from_secs(10);

/// What `/metrics` says of the series whose lines contain all of `parts`, in sum.
pub fn metric(service: &Service, parts: &[&str]) -> u64 {
    let text = service.metrics_text(None).1;
    let lines = text.lines().filter(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

pub fn breaker(service: &Service, id: &str) -> String {
    let cluster = service.cluster_json();
    let node = cluster["nodes"].as_array().unwrap().iter().find(|node| node["id"] == id).unwrap();
    node["breaker"].as_str().unwrap().to_owned()
}

pub fn ids(text: &str) -> Vec<u32> {
    text.chars().map(id).collect()
}

/// Timings and trace of an answer that went on after one failure.
fn check_replanned(cluster: &Cluster, end: Result<GenerationEvent, Error>, cause: &str, pair: [&str; 2]) {
    let Ok(GenerationEvent::Finish { timings, trace_id, .. }) = end else { panic!("{end:?}") };
    assert_eq!((timings.replans, timings.longest_gap_ms > 0.0), (1, true));
    assert_eq!([&*timings.prefill_instance, &*timings.decode_instance], pair);
    let parts = timings.queue_ms + timings.route_ms + timings.prefill_ms;
    assert!((parts - timings.ttft_ms).abs() < 1e-6);
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    check_contiguous(&trace);
    let root = spans(&trace).find(|span| span["name"] == "chat fake").unwrap();
    assert_eq!(root["attributes"]["tandem.replans"], 1);
    let event = &root["events"][0];
    assert_eq!((&event["name"], &event["attributes"]["tandem.replan.cause"]), (&"replan".into(), &cause.into()));
    assert_eq!(event["attributes"]["tandem.decode.instance"], pair[1]);
    let route = spans(&trace).find(|span| span["name"] == "route").unwrap();
    assert!(route["events"].as_array().unwrap().iter().any(|event| event["name"] == "candidate"));
}

#[tokio::test]
async fn a_decode_that_fails_before_it_verified_costs_prefill_nothing() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, spec, decode, _) = cluster.legs().await;
    decode.send(reserved()).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    let mut d1 = join_decode(&cluster.service, "d1").await;
    decode.fail(Status::unavailable("killed")).await;
    let (decode, start) = d1.call().await;
    let again = start.spec.unwrap();
    assert_eq!((&again.prompt, again.output_tokens, again.max_tokens), (&spec.prompt, 0, 8));
    assert_eq!(start.prefill_incarnation, cluster.prefill.node.info.incarnation);
    // The same call gets the new ticket; what it still says of the old one is no news.
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    prefill.send(undelivered("d0", ErrorKind::Unavailable)).await;
    prefill.send(first_token(id('a'), None)).await;
    decode.send(verified()).await;
    prefill.send(delivered_to("d1", vec![])).await;
    decode.send(token(id('b'))).await;
    decode.send(finished(Length, vec![])).await;
    let (text, tokens, end) = read(stream).await;
    assert_eq!((text.as_str(), tokens), ("ab", ids("ab")));
    check_replanned(&cluster, end, "failed", ["p0", "d1"]);
    assert!(cluster.prefill.is_left_alone());
    assert_eq!(metric(&cluster.service, &["tandem_replans_total", "node_role=\"decode\",cause=\"failed\""]), 1);
}

#[tokio::test]
async fn a_node_that_has_ended_its_session_is_asked_no_more() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    decode.send(reserved()).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    let mut d1 = join_decode(&cluster.service, "d1").await;
    // Its stream is still open, as if nothing came through there.
    decode.fail(Error::new(ErrorKind::DeclaredDead, "the session with the router is over").into()).await;
    let (decode, _) = d1.call().await;
    let here = cluster.service.cluster_json();
    let mut names: Vec<_> = here["nodes"].as_array().unwrap().iter().map(|node| node["id"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["d1", "p0"]);
    drop((stream, prefill, decode));
}

#[tokio::test]
async fn what_could_not_be_delivered_goes_to_another_decode() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    decode.send(reserved()).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    prefill.send(first_token(id('a'), None)).await;
    let mut d1 = join_decode(&cluster.service, "d1").await;
    prefill.send(undelivered("d0", ErrorKind::Unavailable)).await;
    decode.cancelled().await;
    let (decode, start) = d1.call().await;
    // The KV is that of the same prompt, whatever the client has by now.
    let spec = start.spec.unwrap();
    assert_eq!((spec.prompt.len(), spec.output_tokens, spec.max_tokens), (20, 0, 8));
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    decode.send(verified()).await;
    decode.send(token(id('b'))).await;
    decode.send(finished(Length, vec![])).await;
    prefill.send(delivered_to("d1", vec![])).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("ab"));
    check_replanned(&cluster, end, "undelivered", ["p0", "d1"]);
    assert_eq!((breaker(&cluster.service, "p0"), breaker(&cluster.service, "d0")), ("closed".into(), "closed".into()));
}

#[tokio::test]
async fn what_one_way_did_not_deliver_goes_by_the_next() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, start) = cluster.legs().await;
    assert_eq!(start.transport, "fast/1");
    decode.send(reserved()).await;
    assert_eq!(told(&mut prefill).await, deliver("d0"));
    prefill.send(first_token(id('a'), None)).await;
    prefill.send(undelivered("d0", ErrorKind::Unavailable)).await;
    decode.cancelled().await;
    // The same two nodes, as there are no others.
    let (decode, start) = cluster.decode.call().await;
    assert_eq!(start.transport, "slow/1");
    decode.send(reserved_by("again")).await;
    assert_eq!(told(&mut prefill).await, deliver("again"));
    decode.send(verified()).await;
    decode.send(token(id('b'))).await;
    decode.send(finished(Length, vec![])).await;
    prefill.send(delivered_to("again", vec![])).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("ab"));
    check_replanned(&cluster, end, "undelivered", ["p0", "d0"]);
    let counted = ["tandem_kv_way_fallbacks_total", "from=\"fast\",to=\"slow\""];
    assert_eq!(metric(&cluster.service, &counted), 1);
    // The next request knows it from the beginning, and says so.
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, start) = cluster.legs().await;
    assert_eq!(start.transport, "slow/1");
    prefill.send(first_token(id('a'), Some(Stop))).await;
    let (_, _, end) = read(stream).await;
    drop((prefill, decode));
    let Ok(GenerationEvent::Finish { trace_id, .. }) = end else { panic!("{end:?}") };
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    let route = spans(&trace).find(|span| span["name"] == "route").unwrap();
    let candidate = &route["events"][0]["attributes"];
    assert_eq!(
        (&candidate["tandem.route.way"], &candidate["tandem.route.way_instead_of"]),
        (&"slow".into(), &"fast".into())
    );
}

#[tokio::test]
async fn a_refused_seal_takes_another_pair_even_if_only_prefill_can_be_another() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off_to(&mut prefill, &decode, 'a').await;
    let mut p1 = join_prefill(&cluster.service, "p1").await;
    decode.fail(Status::data_loss("checksum of block 3")).await;
    let (second, spec) = p1.call().await;
    prefill.cancelled().await;
    assert_eq!((spec.prompt[20..].to_vec(), spec.output_tokens), (ids("a"), 1));
    second.send(first_token(id('b'), Some(Stop))).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("ab"));
    let Ok(GenerationEvent::Finish { timings, .. }) = end else { panic!("{end:?}") };
    assert_eq!((timings.replans, &*timings.prefill_instance), (1, "p1"));
    assert_eq!(metric(&cluster.service, &["tandem_replans_total", "cause=\"refused\""]), 1);
}

/// Reservation, ticket and first token; not verified.
async fn hand_off_to(prefill: &mut PrefillCall, decode: &DecodeCall, first: char) {
    decode.send(reserved()).await;
    assert_eq!(told(prefill).await, deliver("d0"));
    prefill.send(first_token(id(first), None)).await;
}

/// The client has "abc" of at most 8 tokens from p0 and d0; then d0 dies, and p0 and d1 have the rest.
async fn cut_after_three(cluster: &mut Cluster, stop: &[&str]) -> (GenerationStream, PrefillCall, DecodeCall) {
    let stop = stop.iter().map(|text| (*text).to_owned()).collect();
    let mut stream = cluster.service.generate(GenerationRequest { stop, ..request() }).unwrap();
    let (mut prefill, first, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    decode.send(token(id('b'))).await;
    decode.send(token(id('c'))).await;
    for expected in ids("abc") {
        let event = stream.next().await;
        assert!(matches!(event, Some(Ok(GenerationEvent::Token { id, .. })) if id == expected), "{event:?}");
    }
    let mut d1 = join_decode(&cluster.service, "d1").await;
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    decode.cancelled().await;
    prefill.cancelled().await;
    let (mut prefill, spec) = cluster.prefill.call().await;
    let (decode, start) = d1.call().await;
    assert_eq!(spec.prompt, [vec![id('a'); 20], ids("abc")].concat());
    assert_eq!((spec.output_tokens, spec.max_tokens, &spec.sampling), (3, 5, &first.sampling));
    let of_decode = start.spec.unwrap();
    assert_eq!((&of_decode.prompt, of_decode.output_tokens, of_decode.max_tokens), (&spec.prompt, 3, 5));
    // The pause is part of the phase that was running.
    assert_eq!(spec.traceparent, of_decode.traceparent);
    let (request, phase) = (&start.request_traceparent, &of_decode.traceparent);
    assert!(request[..35] == phase[..35] && request != phase, "of one trace: {request} {phase}");
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    (stream, prefill, decode)
}

#[tokio::test]
async fn a_decode_that_dies_after_tokens_is_replaced_and_no_token_is_lost_or_doubled() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let (stream, prefill, decode) = cut_after_three(&mut cluster, &[]).await;
    prefill.send(first_token(id('d'), None)).await;
    decode.send(verified()).await;
    decode.send(token(id('e'))).await;
    decode.send(finished(Length, vec![])).await;
    let mut stream = std::pin::pin!(stream);
    let (mut indexes, mut text) = (Vec::new(), String::new());
    let end = loop {
        match stream.next().await.unwrap() {
            Ok(GenerationEvent::Token { index, text: more, .. }) => {
                indexes.push(index);
                text += &more;
            }
            end => break end,
        }
    };
    assert_eq!((indexes, text.as_str()), (vec![3, 4], "de"));
    let Ok(GenerationEvent::Finish { usage, .. }) = &end else { panic!("{end:?}") };
    assert_eq!((usage.prompt, usage.completion), (20, 5));
    check_replanned(&cluster, end, "died", ["p0", "d1"]);
    assert_eq!(metric(&cluster.service, &["tandem_handoffs_total", "state=\"verified\""]), 2);
}

#[tokio::test]
async fn a_stop_string_goes_across_the_border_of_two_attempts() {
    let mut cluster = Cluster::start(Limits::default()).await;
    // "bc" is held back when the node dies.
    let (mut stream, prefill, mut decode) = cut_after_three(&mut cluster, &["bcd"]).await;
    prefill.send(first_token(id('d'), None)).await;
    assert_eq!(stopped(&mut decode).await, v1::DecodeStop { no_handoff: false });
    let last = stream.next().await.unwrap().unwrap();
    assert!(matches!(&last, GenerationEvent::Token { text, index: 3, .. } if text.is_empty()), "{last:?}");
    let end = stream.next().await.unwrap().unwrap();
    assert!(matches!(&end, GenerationEvent::Finish { reason: Stop, text, .. } if text.is_empty()), "{end:?}");
}

#[tokio::test]
async fn a_prefill_that_fails_before_its_first_token_is_replaced_with_its_decode_call() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, _) = cluster.legs().await;
    let mut p1 = join_prefill(&cluster.service, "p1").await;
    cluster.service.membership().leave(cluster.prefill.node.session, "killed");
    decode.cancelled().await;
    let (mut second, spec) = p1.call().await;
    let (decode, start) = cluster.decode.call().await;
    assert_eq!((spec.prompt.len(), spec.output_tokens), (20, 0));
    assert_eq!(start.prefill_incarnation, p1.node.info.incarnation);
    hand_off(&mut second, &decode, 'a').await;
    decode.send(finished(Stop, vec![])).await;
    second.send(delivered(vec![])).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("a"));
    assert_eq!(metric(&cluster.service, &["tandem_replans_total", "node_role=\"prefill\",cause=\"died\""]), 1);
    let Ok(GenerationEvent::Finish { timings, .. }) = end else { panic!("{end:?}") };
    assert_eq!((timings.replans, &*timings.prefill_instance), (1, "p1"));
    drop(prefill);
}

#[tokio::test]
async fn a_prefill_that_fails_after_its_first_token_is_replaced_and_the_next_one_is_the_second_token() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off_to(&mut prefill, &decode, 'a').await;
    let mut p1 = join_prefill(&cluster.service, "p1").await;
    prefill.fail(Status::internal("out of luck")).await;
    decode.cancelled().await;
    let (mut second, spec) = p1.call().await;
    assert_eq!((spec.prompt.len(), spec.output_tokens, spec.max_tokens), (21, 1, 7));
    let (decode, _) = cluster.decode.call().await;
    hand_off(&mut second, &decode, 'b').await;
    decode.send(token(id('c'))).await;
    decode.send(finished(Length, vec![])).await;
    second.send(delivered(vec![])).await;
    let (text, tokens, end) = read(stream).await;
    assert_eq!((text.as_str(), tokens), ("abc", ids("abc")));
    check_replanned(&cluster, end, "failed", ["p1", "d0"]);
}

#[tokio::test]
async fn kv_that_went_to_a_dead_decode_is_computed_again() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, spec, decode, _) = cluster.legs().await;
    hand_off_to(&mut prefill, &decode, 'a').await;
    let mut d1 = join_decode(&cluster.service, "d1").await;
    // Acknowledged by a node that did not live to say so to the router.
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    let (second, _) = d1.call().await;
    prefill.send(delivered_to("d0", vec![node_span(&spec.traceparent, "prefill")])).await;
    second.cancelled().await;
    let (prefill, spec) = cluster.prefill.call().await;
    assert_eq!((spec.prompt.len(), spec.output_tokens), (21, 1));
    prefill.send(first_token(id('b'), Some(Length))).await;
    let (_, tokens, end) = read(stream).await;
    assert_eq!(tokens, ids("ab"));
    let Ok(GenerationEvent::Finish { timings, trace_id, .. }) = end else { panic!("{end:?}") };
    assert_eq!(timings.replans, 2);
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    assert!(spans(&trace).any(|span| span["service"] == "tandem-node"), "spans of a failed attempt are kept");
    assert_eq!(metric(&cluster.service, &["tandem_replans_total", "cause=\"spent\""]), 1);
}

#[tokio::test]
async fn waits_for_a_node_and_says_meanwhile_what_prefill_says() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let mut stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    decode.cancelled().await;
    let waiting = || metric(&cluster.service, &["tandem_waiting_for_node_requests"]);
    until("the request waits", || waiting() == 1).await;
    prefill.send(first_token(id('a'), None)).await;
    assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Token { index: 0, .. }))));
    let mut d1 = join_decode(&cluster.service, "d1").await;
    let (decode, _) = d1.call().await;
    assert_eq!(waiting(), 0);
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    decode.send(verified()).await;
    decode.send(finished(Stop, vec![])).await;
    assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Finish { reason: Stop, .. }))));
}

#[tokio::test]
async fn a_prefill_that_fails_while_decode_is_sought_is_replaced_with_it() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, _) = cluster.legs().await;
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    decode.cancelled().await;
    prefill.fail(Status::internal("waited for too long")).await;
    let mut p1 = join_prefill(&cluster.service, "p1").await;
    let mut d1 = join_decode(&cluster.service, "d1").await;
    let (prefill, _) = p1.call().await;
    d1.call().await;
    prefill.send(first_token(id('a'), Some(Stop))).await;
    assert_eq!(read(stream).await.1, ids("a"));
}

#[tokio::test]
async fn no_node_within_the_time_is_a_typed_error() {
    let limits = Limits { replan: Duration::from_millis(100), ..Limits::default() };
    for (first, kind) in [(None, ErrorKind::Unavailable), (Some('a'), ErrorKind::Aborted)] {
        let mut cluster = Cluster::start(limits.clone()).await;
        let mut stream = cluster.service.generate(request()).unwrap();
        let (mut prefill, _, decode, _) = cluster.legs().await;
        if let Some(first) = first {
            hand_off_to(&mut prefill, &decode, first).await;
            // Before the search: its time may be over before the router has read the token.
            assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Token { index: 0, .. }))));
        }
        cluster.service.membership().leave(cluster.decode.node.session, "killed");
        let (_, tokens, end) = read(stream).await;
        let error = end.unwrap_err();
        assert_eq!((error.kind, tokens.len()), (kind, 0));
        let words = "the node was lost, killed; no decode node is available (gave up after 100ms without progress)";
        assert!(error.message.ends_with(words), "{}", error.message);
        prefill.cancelled().await;
        assert_eq!(metric(&cluster.service, &["tandem_replan_exhausted_total", "bound=\"time\""]), 1);
        assert_eq!(metric(&cluster.service, &["tandem_waiting_for_node_requests"]), 0);
    }
}

#[tokio::test]
async fn an_answer_does_not_go_on_in_another_arithmetic() {
    for (first, goes_on) in [(None, true), (Some('a'), false)] {
        let mut cluster = Cluster::start(Limits { replan: BOUND, ..Limits::default() }).await;
        let mut stream = cluster.service.generate(request()).unwrap();
        let (mut prefill, _, decode, _) = cluster.legs().await;
        if let Some(first) = first {
            hand_off_to(&mut prefill, &decode, first).await;
            assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Token { index: 0, .. }))));
        }
        let membership = cluster.service.membership().clone();
        let [old_prefill, old_decode] = [cluster.prefill.node.session, cluster.decode.node.session];
        membership.leave(old_prefill, "replaced");
        membership.leave(old_decode, "replaced");
        // Within the time for another attempt: beside the old nodes they would be refused.
        let mut p1 = join_prefill_of(&cluster.service, "p1", "bf16-dots").await;
        let mut d1 = join_decode_of(&cluster.service, "d1", "bf16-dots").await;
        if goes_on {
            // The client has nothing yet: the answer may begin anew.
            let (prefill, _) = p1.call().await;
            d1.call().await;
            prefill.send(first_token(id('b'), Some(Stop))).await;
            assert_eq!(read(stream).await.1, ids("b"));
        } else {
            let error = read(stream).await.2.unwrap_err();
            let words = "the answer began in `f32` over KV `bf16-pairs`, the available nodes compute in `bf16-dots`";
            assert!(error.kind == ErrorKind::Aborted && error.message.contains(words), "{}", error.message);
            assert!(p1.is_left_alone() && d1.is_left_alone());
        }
    }
}

#[tokio::test]
async fn a_node_that_is_alone_is_tried_again_until_the_attempts_are_used_up() {
    let mut cluster = Cluster::start(Limits { max_attempts: 3, ..Limits::default() }).await;
    let stream = cluster.service.generate(request()).unwrap();
    for _ in 0..3 {
        let (prefill, _, decode, _) = cluster.legs().await;
        prefill.fail(Status::internal("out of luck")).await;
        decode.cancelled().await;
    }
    let error = read(stream).await.2.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.message.ends_with("out of luck (attempt 3 of 3)"), "{}", error.message);
    assert_eq!(metric(&cluster.service, &["tandem_replan_exhausted_total", "bound=\"attempts\""]), 1);
    // Three in a row: it is tried last, which is still better than not at all.
    assert_eq!((breaker(&cluster.service, "p0"), breaker(&cluster.service, "d0")), ("open".into(), "closed".into()));
    assert_eq!(metric(&cluster.service, &["tandem_breaker_state", "\"p0\""]), 2);
    assert_eq!(metric(&cluster.service, &["tandem_breaker_opened_total", "node_role=\"prefill\""]), 1);
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, _decode, _) = cluster.legs().await;
    prefill.send(first_token(id('a'), Some(Stop))).await;
    assert!(read(stream).await.2.is_ok());
    assert_eq!(breaker(&cluster.service, "p0"), "closed");
}

#[tokio::test]
async fn a_clients_error_is_told_at_once_and_counts_against_nobody() {
    let mut cluster = Cluster::start(Limits::default()).await;
    for _ in 0..4 {
        let stream = cluster.service.generate(request()).unwrap();
        let (prefill, _, decode, _) = cluster.legs().await;
        prefill.fail(Status::invalid_argument("no such token")).await;
        decode.cancelled().await;
        assert_eq!(read(stream).await.2.unwrap_err().kind, ErrorKind::InvalidArgument);
    }
    assert!(cluster.prefill.is_left_alone());
    assert_eq!(breaker(&cluster.service, "p0"), "closed");
}

#[tokio::test]
async fn a_full_node_is_left_for_another_and_not_blamed() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    let mut d1 = join_decode(&cluster.service, "d1").await;
    decode.fail(Status::resource_exhausted("full")).await;
    let (decode, _) = d1.call().await;
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    prefill.send(first_token(id('a'), Some(Stop))).await;
    assert!(read(stream).await.2.is_ok());
    assert_eq!(metric(&cluster.service, &["tandem_replans_total", "cause=\"overloaded\""]), 1);
}

#[tokio::test]
async fn an_answer_that_is_complete_needs_no_other_node() {
    for (last, reason) in [(id('b'), Length), (0, Stop)] {
        let mut cluster = Cluster::start(Limits::default()).await;
        let stream = cluster.service.generate(GenerationRequest { max_tokens: 2, ..request() }).unwrap();
        let (mut prefill, _, decode, _) = cluster.legs().await;
        hand_off(&mut prefill, &decode, 'a').await;
        decode.send(token(last)).await;
        decode.fail(Status::unavailable("killed before it could say so")).await;
        let (_, tokens, end) = read(stream).await;
        let Ok(GenerationEvent::Finish { reason: told, timings, .. }) = end else { panic!("{end:?}") };
        assert_eq!((tokens, told, timings.replans), (vec![id('a'), last], reason, 0));
    }
}

#[tokio::test]
async fn the_deadline_and_the_client_end_a_search_too() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let deadline = Some(Instant::now() + BOUND);
    let stream = cluster.service.generate(GenerationRequest { deadline, ..request() }).unwrap();
    let (prefill, _, _decode, _) = cluster.legs().await;
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    let error = read(stream).await.2.unwrap_err();
    assert_eq!((error.kind, &*error.message), (ErrorKind::DeadlineExceeded, "the deadline passed during prefill"));
    prefill.cancelled().await;
    cluster.decode = join_decode(&cluster.service, "d0").await;
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, _decode, _) = cluster.legs().await;
    cluster.service.membership().leave(cluster.decode.node.session, "killed");
    until("the request waits", || metric(&cluster.service, &["tandem_waiting_for_node_requests"]) == 1).await;
    drop(stream);
    prefill.cancelled().await;
    until("nobody waits", || metric(&cluster.service, &["tandem_waiting_for_node_requests"]) == 0).await;
}
