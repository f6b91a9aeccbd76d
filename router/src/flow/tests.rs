//! Whole requests against nodes that do what the test says, over real gRPC.
//! Long because each way in which a first attempt can end is a test; what comes after it is in the other files.
mod choices;
mod ending;
pub(crate) mod fakes;
mod figures;
mod local;
mod replans;
mod retry_budget;
mod shaping;

use futures::StreamExt;
use serde_json::Value;

use super::attempt_protocol::tests::{delivered, finished, first_token, reserved, ticket, token, verified};
use super::conclusion::STOPPED_SPANS;
use super::*;
use crate::admission::Tenant;
use crate::api::GenerationStream;
use crate::generation::Usage;
use fakes::{Cluster, DecodeCall, PrefillCall, id};
use tonic::Status;
use v1::FinishReason::{Length, Stop};

/// For a request whose bound the test waits for. One thread drives router and nodes: where it stands still for so long,
/// the request ends before the nodes have its calls.
const BOUND: Duration = Duration::from_secs(2);

/// What a single failure does to a request.
fn one_attempt() -> Limits {
    Limits { max_attempts: 1, ..Limits::default() }
}

fn request() -> GenerationRequest {
    GenerationRequest {
        request_id: "r1".into(),
        prompt_ids: vec![id('a'); 20].into(),
        max_tokens: 8,
        sampling: v1::Sampling::default(),
        ignore_eos: false,
        stop_token_ids: Vec::new(),
        stop: Vec::new(),
        priority: 0,
        cache_salt: "".into(),
        tenant: Tenant::default(),
        deadline: None,
        parent: None,
        root: None,
        received: Instant::now(),
        api: "chat",
    }
}

/// The text and the token ids up to the end, and the end.
async fn read(stream: GenerationStream) -> (String, Vec<u32>, Result<GenerationEvent, Error>) {
    let (mut text, mut ids) = (String::new(), Vec::new());
    let mut stream = std::pin::pin!(stream);
    loop {
        match stream.next().await.expect("an end") {
            Ok(GenerationEvent::Token { id, text: more, index, .. }) => {
                assert_eq!(index as usize, ids.len());
                ids.push(id);
                text += &more;
            }
            end => {
                if let Ok(GenerationEvent::Finish { text: rest, .. }) = &end {
                    text += rest;
                }
                return (text, ids, end);
            }
        }
    }
}

/// From the reservation to the verified hand-off, with the first token `first`.
async fn hand_off(prefill: &mut PrefillCall, decode: &DecodeCall, first: char) {
    decode.send(reserved()).await;
    assert_eq!(told(prefill).await, deliver("d0"));
    prefill.send(first_token(id(first), None)).await;
    decode.send(verified()).await;
}

/// The prefill call's next command.
async fn told(prefill: &mut PrefillCall) -> v1::prefill_command::Command {
    prefill.commands.message().await.unwrap().unwrap().command.unwrap()
}

fn deliver(to: &str) -> v1::prefill_command::Command {
    v1::prefill_command::Command::Deliver(v1::Deliver { ticket: ticket(to) })
}

/// The decode call's second command.
async fn stopped(decode: &mut DecodeCall) -> v1::DecodeStop {
    match decode.commands.message().await.unwrap().and_then(|command| command.command) {
        Some(v1::decode_command::Command::Stop(stop)) => stop,
        other => panic!("expected stop, got {other:?}"),
    }
}

fn node_span(traceparent: &str, name: &str) -> v1::Span {
    let parent: tandem_proto::TraceContext = traceparent.parse().unwrap();
    v1::Span {
        trace_id: parent.trace_id.to_vec(),
        span_id: vec![9; 8],
        parent_span_id: parent.span_id.to_vec(),
        name: name.into(),
        // Whenever its parent was.
        end_unix_ns: u64::MAX / 2,
        process: Some(v1::Process { service: "tandem-node".into(), instance: String::new() }),
        ..v1::Span::default()
    }
}

#[tokio::test]
async fn a_good_request_and_its_trace() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, spec, decode, start) = cluster.legs().await;
    assert_eq!((spec.prompt.len(), spec.max_tokens), (20, 8));
    assert_eq!(start.prefill_incarnation, cluster.prefill.node.info.incarnation);
    hand_off(&mut prefill, &decode, 'H').await;
    prefill.send(delivered(vec![node_span(&spec.traceparent, "prefill")])).await;
    decode.send(token(id('i'))).await;
    decode.send(token(0)).await;
    let decode_parent = start.spec.unwrap().traceparent;
    decode.send(finished(Stop, vec![node_span(&decode_parent, "decode")])).await;

    let (text, ids, end) = read(stream).await;
    assert_eq!((text.as_str(), ids), ("Hi", vec![id('H'), id('i'), 0]));
    let Ok(GenerationEvent::Finish { reason, usage, timings, trace_id, .. }) = end else { panic!("{end:?}") };
    assert_eq!((reason, usage.prompt, usage.completion), (Stop, 20, 3));
    let parts = timings.queue_ms + timings.route_ms + timings.prefill_ms;
    assert!((parts - timings.ttft_ms).abs() < 1e-6 && timings.ttft_ms > 0.0);
    assert_eq!((timings.kv_bytes, &*timings.prefill_instance, &*timings.decode_instance), (4096, "p0", "d0"));

    let trace = cluster.service.trace_json(&trace_id).unwrap();
    check_contiguous(&trace);
    let root = spans(&trace).find(|span| span["name"] == "chat fake").unwrap();
    assert_eq!(root["attributes"]["gen_ai.response.finish_reasons"], serde_json::json!(["stop"]));
    let transfer = spans(&trace).find(|span| span["name"] == "transfer").unwrap();
    assert_eq!(transfer["links"], serde_json::json!([{ "trace_id": trace_id, "span_id": "08".repeat(8) }]));
    for (name, parent) in [("prefill", &spec.traceparent), ("decode", &decode_parent)] {
        let of_node = spans(&trace).find(|s| s["service"] == "tandem-node" && s["name"] == name).unwrap();
        assert_eq!(of_node["parent_span_id"], parent[36..52], "{name}");
        assert!(spans(&trace).any(|s| s["span_id"] == of_node["parent_span_id"] && s["name"] == name));
    }
}

fn spans(trace: &Value) -> impl Iterator<Item = &Value> {
    trace["spans"].as_array().unwrap().iter()
}

fn check_contiguous(trace: &Value) {
    check_phases(trace, &["queue", "route", "prefill", "transfer", "decode"]);
}

/// The phases tile the root span, and the first three of them TTFT.
fn check_phases(trace: &Value, names: &[&str]) {
    let of_router = |name: &str| {
        let is_it = |span: &&Value| span["service"] == "tandem-router" && span["name"] == name;
        let span = spans(trace).find(is_it).unwrap_or_else(|| panic!("no span {name}"));
        (span["start_unix_ns"].as_u64().unwrap(), span["end_unix_ns"].as_u64().unwrap(), span)
    };
    let root = of_router("chat fake");
    let phases: Vec<_> = names.iter().copied().map(of_router).collect();
    assert!(phases.windows(2).all(|pair| pair[1].0 - pair[0].1 == 1_000), "one microsecond apart");
    assert!(phases.iter().all(|(start, end, span)| start <= end && span["parent_span_id"] == root.2["span_id"]));
    let end = phases[phases.len() - 1].1;
    assert_eq!((phases[0].0, end), (root.0, root.1.min(end)));
    let ttft_ms = root.2["attributes"]["tandem.ttft_ms"].as_f64().unwrap();
    let parts_ms: f64 = phases[..3].iter().map(|(start, end, _)| (end - start) as f64 / 1e6).sum();
    assert!((ttft_ms - parts_ms).abs() <= (ttft_ms * 0.01).max(0.003), "{ttft_ms} {parts_ms}");
}

#[tokio::test]
async fn what_was_predicted_stands_beside_what_came() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let step_cost = Some(v1::StepCost { base_ms: 4.0, token_ms: 0.5, ..v1::StepCost::default() });
    let load = v1::Load { free_blocks: 64, step_cost, ..v1::Load::default() };
    for node in [&cluster.prefill.node, &cluster.decode.node] {
        cluster.service.membership().report(node.session, &load, clock::now());
    }
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'H').await;
    decode.send(finished(Length, vec![])).await;
    let (_, _, end) = read(stream).await;
    let Ok(GenerationEvent::Finish { timings, trace_id, .. }) = end else { panic!("{end:?}") };
    // Twenty tokens in one step.
    assert!((timings.predicted_ttft_ms - 14.0).abs() < 1e-9, "{timings:?}");
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    let route = spans(&trace).find(|span| span["name"] == "route").unwrap();
    assert_eq!(route["attributes"]["tandem.route.policy"], "joint");
    let told = &route["events"].as_array().unwrap()[0]["attributes"];
    assert_eq!((&told["tandem.route.chosen"], &told["tandem.route.prefill_ms"]), (&true.into(), &14.0.into()));
    assert_eq!((&told["tandem.route.measured"], &told["tandem.route.cached_tokens"]), (&true.into(), &0.into()));
    // 4.5 ms a step, at ten times its length.
    assert_eq!((&told["tandem.route.step_ms"], &told["tandem.route.total_ms"]), (&4.5.into(), &59.0.into()));
    let root = spans(&trace).find(|span| span["name"] == "chat fake").unwrap();
    assert_eq!(root["attributes"]["tandem.predicted_ttft_ms"], 14.0);
    let metrics = cluster.service.metrics_text(None).1;
    for name in ["tandem_prediction_error_ms_count", "tandem_prediction_error_ratio_count"] {
        let of_pair = |line: &&str| line.starts_with(name) && line.contains("plan=\"pair\"");
        let line = metrics.lines().find(of_pair).unwrap_or_else(|| panic!("{metrics}"));
        assert!(line.ends_with(" 1"), "{line}");
    }
}

#[tokio::test]
async fn one_token_needs_no_hand_off() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(GenerationRequest { max_tokens: 1, ..request() }).unwrap();
    let (prefill, _, mut decode, start) = cluster.legs().await;
    prefill.send(first_token(id('x'), Some(Length))).await;
    prefill.send(delivered(vec![])).await;
    assert_eq!(stopped(&mut decode).await, v1::DecodeStop { no_handoff: true });
    // The client does not wait for decode's report.
    let (text, _, end) = read(stream).await;
    assert_eq!(text, "x");
    let Ok(GenerationEvent::Finish { reason: Length, trace_id, .. }) = end else { panic!("{end:?}") };
    decode.send(finished(Stop, vec![node_span(&start.request_traceparent, "kv.reserve")])).await;
    decode.cancelled().await;
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    assert!(spans(&trace).any(|span| span["name"] == "kv.reserve") && spans(&trace).all(|span| span["error"] == ""));
}

#[tokio::test]
async fn prefill_failure_cancels_decode_and_is_safe_to_retry() {
    let mut cluster = Cluster::start(one_attempt()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, _) = cluster.legs().await;
    prefill.fail(Status::internal("out of luck")).await;
    decode.cancelled().await;
    let error = read(stream).await.2.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert_eq!(error.message, "prefill node p0 failed during prefill: out of luck (attempt 1 of 1)");
    let trace = cluster.service.trace_json("last").unwrap();
    assert_eq!(spans(&trace).filter(|span| span["error"] != "").count(), 2, "prefill and root");
}

#[tokio::test]
async fn decode_failure_after_a_token_cancels_prefill_and_aborts() {
    let mut cluster = Cluster::start(one_attempt()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, _) = cluster.legs().await;
    let mut stream = Box::pin(stream);
    prefill.send(first_token(id('x'), None)).await;
    assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Token { index: 0, .. }))));
    decode.fail(Status::data_loss("checksum of block 3")).await;
    prefill.cancelled().await;
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Aborted);
    assert_eq!(error.message, "decode node d0 failed during transfer: checksum of block 3 (attempt 1 of 1)");
}

#[tokio::test]
async fn unverified_tokens_never_reach_the_client() {
    let mut cluster = Cluster::start(one_attempt()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (_prefill, _, decode, _) = cluster.legs().await;
    decode.send(token(id('x'))).await;
    let (text, _, end) = read(stream).await;
    assert_eq!((text.as_str(), end.unwrap_err().kind), ("", ErrorKind::Unavailable));
}

#[tokio::test]
async fn a_client_that_leaves_cancels_both_legs() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'x').await;
    drop(stream);
    prefill.cancelled().await;
    decode.cancelled().await;
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_the_nodes_still_report() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(GenerationRequest { stop: vec!["cd".into()], ..request() }).unwrap();
    let (mut prefill, spec, mut decode, start) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    for character in ['b', 'c', 'd'] {
        decode.send(token(id(character))).await;
    }
    assert_eq!(stopped(&mut decode).await, v1::DecodeStop { no_handoff: false });
    let (text, ids, end) = read(stream).await;
    assert_eq!((text.as_str(), ids.len()), ("ab", 4));
    let Ok(GenerationEvent::Finish { reason: Stop, trace_id, .. }) = end else { panic!("{end:?}") };
    // Tokens that were under way are nobody's any more.
    decode.send(token(id('e'))).await;
    decode.send(finished(Stop, vec![node_span(&start.spec.unwrap().traceparent, "decode")])).await;
    prefill.send(delivered(vec![node_span(&spec.traceparent, "prefill")])).await;
    decode.cancelled().await;
    prefill.cancelled().await;
    let names = ["decode", "prefill"];
    let is_there = |trace: &Value, name: &str| {
        spans(trace).any(|span| span["service"] == "tandem-node" && span["name"] == name && span["error"] == "")
    };
    let shown = async {
        while !names.iter().all(|name| is_there(&cluster.service.trace_json(&trace_id).unwrap(), name)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), shown).await.expect("both nodes' spans");
    let trace = cluster.service.trace_json(&trace_id).unwrap();
    assert!(spans(&trace).all(|span| span["error"] == ""), "{trace}");
}

#[tokio::test]
async fn a_stop_at_the_first_token_is_no_hand_off_if_none_was_reserved() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(GenerationRequest { stop: vec!["a".into()], ..request() }).unwrap();
    let (mut prefill, spec, mut decode, _) = cluster.legs().await;
    prefill.send(first_token(id('a'), None)).await;
    assert_eq!(stopped(&mut decode).await, v1::DecodeStop { no_handoff: true });
    let command = prefill.commands.message().await.unwrap().unwrap().command;
    assert_eq!(command, Some(v1::prefill_command::Command::Stop(v1::PrefillStop {})));
    assert!(read(stream).await.2.is_ok());
    prefill.send(delivered(vec![node_span(&spec.traceparent, "prefill")])).await;
    decode.send(finished(Stop, vec![])).await;
    prefill.cancelled().await;
    let trace = cluster.service.trace_json("last").unwrap();
    assert!(spans(&trace).all(|span| span["error"] == ""), "{trace}");
}

#[tokio::test]
async fn a_stopped_node_that_says_nothing_is_cancelled() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let stream = cluster.service.generate(GenerationRequest { stop: vec!["b".into()], ..request() }).unwrap();
    let (mut prefill, _, mut decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    decode.send(token(id('b'))).await;
    stopped(&mut decode).await;
    let told = Instant::now();
    assert!(read(stream).await.2.is_ok());
    assert!(told.elapsed() < STOPPED_SPANS, "the client waited for nothing");
    decode.cancelled().await;
    prefill.cancelled().await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_does_not_keep_the_stop_from_its_node() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let asked = GenerationRequest { stop: vec!["c".into()], max_tokens: 100, ..request() };
    let stream = cluster.service.generate(asked).unwrap();
    let (mut prefill, _, mut decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'a').await;
    // With the last token its queue is full: the end has to wait. The node is some tokens ahead by then, and an event
    // that is there already keeps the stop from being written with the next look.
    for _ in 0..CLIENT_QUEUE_EVENTS - 2 {
        decode.send(token(id('b'))).await;
    }
    decode.sent().await;
    for next in "cbbb".chars() {
        decode.send(token(id(next))).await;
    }
    let stop = tokio::time::timeout(Duration::from_secs(10), stopped(&mut decode)).await;
    assert_eq!(stop.expect("at once"), v1::DecodeStop { no_handoff: false });
    drop(stream);
}

#[tokio::test]
async fn the_deadline_ends_both_legs() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let deadline = Some(Instant::now() + BOUND);
    let stream = cluster.service.generate(GenerationRequest { deadline, ..request() }).unwrap();
    let (prefill, spec, decode, _) = cluster.legs().await;
    assert!(spec.time_left_ns > 0 && spec.time_left_ns <= Limits::default().max_request.as_nanos() as u64);
    prefill.cancelled().await;
    decode.cancelled().await;
    let error = read(stream).await.2.unwrap_err();
    assert_eq!((error.kind, &*error.message), (ErrorKind::DeadlineExceeded, "the deadline passed during prefill"));
}

#[tokio::test]
async fn a_node_that_membership_gives_up_fails_its_requests() {
    let mut cluster = Cluster::start(one_attempt()).await;
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'x').await;
    cluster.service.membership().expire(Instant::now() + Duration::from_secs(4));
    let (_, _, end) = read(stream).await;
    let error = end.unwrap_err();
    assert!(error.message.contains("silent for 3000 ms"), "{}", error.message);
    prefill.cancelled().await;
    decode.cancelled().await;
    let none = cluster.service.generate(request()).err().unwrap();
    assert_eq!((none.kind, &*none.message), (ErrorKind::Unavailable, "no prefill node is available"));
}

#[tokio::test]
async fn a_dead_prefill_node_does_not_matter_once_decode_has_the_kv() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let mut stream = Box::pin(cluster.service.generate(request()).unwrap());
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'x').await;
    decode.send(token(id('y'))).await;
    for _ in 0..2 {
        assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Token { .. }))));
    }
    cluster.service.membership().leave(cluster.prefill.node.session, "killed");
    drop(prefill);
    decode.send(finished(Length, vec![])).await;
    assert!(matches!(stream.next().await, Some(Ok(GenerationEvent::Finish { reason: Length, .. }))));
    assert!(stream.next().await.is_none());
    assert_eq!(cluster.decode.node.info.node_id, "d0");
}

#[tokio::test]
async fn silence_of_both_legs_is_bounded() {
    let limits = Limits { silence: BOUND, ..one_attempt() };
    let mut cluster = Cluster::start(limits).await;
    let stream = cluster.service.generate(request()).unwrap();
    let _legs = cluster.legs().await;
    let error = read(stream).await.2.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.message.contains("p0") && error.message.contains("said nothing for 2s"), "{}", error.message);
}

#[tokio::test]
async fn overload_is_told_at_admission() {
    let limits = Limits { max_inflight: 1, max_queue: 0, ..Limits::default() };
    let mut cluster = Cluster::start(limits).await;
    let first = cluster.service.generate(request()).unwrap();
    let (_prefill, _, decode, _) = cluster.legs().await;
    assert_eq!(cluster.service.generate(request()).err().unwrap().kind, ErrorKind::Overloaded);
    drop(first);
    decode.cancelled().await;
    let text = cluster.service.metrics_text(None).1;
    let refused = "tandem_requests_total{role=\"router\",instance=\"router-test\",outcome=\"overloaded\"} 1";
    assert!(text.contains(refused), "{text}");
}

#[tokio::test]
async fn wrong_requests_are_refused_by_field() {
    let service = fakes::router(Limits::default());
    type Change = fn(&mut GenerationRequest);
    let cases: [(Change, &str); 14] = [
        (|r| r.prompt_ids = [].into(), "prompt"),
        (|r| r.prompt_ids = [1; 256].into(), "prompt"),
        (|r| r.prompt_ids = [96].into(), "prompt"),
        (|r| r.max_tokens = 0, "max_tokens"),
        (|r| r.max_tokens = 237, "max_tokens"),
        (|r| r.sampling.temperature = f32::NAN, "temperature"),
        (|r| r.sampling.top_p = -0.5, "top_p"),
        (|r| r.sampling.min_p = 1.5, "min_p"),
        (|r| r.sampling.frequency_penalty = 3.0, "frequency_penalty"),
        (|r| r.sampling.logit_bias = [(96, 1.0)].into(), "logit_bias"),
        (|r| r.sampling.top_logprobs = 21, "top_logprobs"),
        (|r| r.sampling.min_tokens = 9, "min_tokens"),
        (|r| r.stop = vec![String::new()], "stop"),
        (|r| r.priority = 11, "priority"),
    ];
    for (change, param) in cases {
        let mut wrong = request();
        change(&mut wrong);
        let error = service.generate(wrong).err().unwrap();
        assert_eq!((error.kind, error.param), (ErrorKind::InvalidArgument, Some(param)), "{}", error.message);
    }
}

#[tokio::test]
async fn joining_and_leaving_over_grpc() {
    use tonic::transport::server::TcpIncoming;
    let service = fakes::router(Limits::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let routes = crate::grpc::routes(&service, tonic_health::server::HealthReporter::new()).unwrap();
    let server = tonic::transport::Server::builder().add_routes(routes);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let mut client = v1::membership_client::MembershipClient::connect(address).await.unwrap();

    let report = |info| v1::NodeReport { report: Some(v1::node_report::Report::Register(info)) };
    let load = || v1::NodeReport { report: Some(v1::node_report::Report::Load(v1::Load::default())) };
    let nodes = || service.cluster_json()["nodes"].as_array().unwrap().len();
    let secret = vec![7; 32];
    let secret_digest = tandem_ports::life_digest(&secret).to_vec();
    let info = v1::Register { secret_digest, ..fakes::register("p0", v1::Role::Prefill, "http://127.0.0.1:1") };
    let stranger = v1::Register { model_digest: 1, ..info.clone() };
    let refusal = client.join(tokio_stream::once(report(stranger))).await.unwrap_err();
    assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
    assert!(refusal.message().contains("--model"), "{}", refusal.message());

    let (reports, outbound) = mpsc::channel(2);
    reports.send(report(info.clone())).await.unwrap();
    let outbound = tokio_stream::wrappers::ReceiverStream::new(outbound);
    let mut replies = client.join(outbound).await.unwrap().into_inner();
    let accepted = replies.message().await.unwrap().unwrap();
    assert_eq!((accepted.accepted_incarnation, accepted.lease_ms), (1, 3000));
    assert_eq!(nodes(), 0, "it may have registered long ago, and be gone");
    let mut joined = Box::pin(service.membership().changed());
    reports.send(load()).await.unwrap();
    (&mut joined).await;
    assert_eq!(service.cluster_json()["nodes"][0]["id"], "p0");

    // Who only knows what travels is told when to come again, and counted.
    let namesake = client.join(tokio_stream::once(report(v1::Register { life: 8, ..info.clone() }))).await.unwrap_err();
    let namesake = tandem_proto::Error::from(namesake);
    assert_eq!(namesake.kind, tandem_proto::ErrorKind::Unavailable);
    assert!(namesake.retry_after.is_some_and(|wait| wait <= Duration::from_millis(1501)), "{namesake:?}");
    let counts = service.membership().refusals().counts();
    assert!(counts.contains(&(tandem_proto::ErrorKind::Unavailable, 1)), "{counts:?}");
    // Of another session with it, delivered late: the one that lives is not ended.
    let late = v1::Register { life: 7, ended: vec![v1::LifeSecret { secret }], ..info };
    let mut answer = client.join(tokio_stream::once(report(late))).await.unwrap().into_inner();
    while answer.message().await.is_ok_and(|reply| reply.is_some()) {}
    assert_eq!(service.cluster_json()["nodes"][0]["id"], "p0");
    assert!(!reports.is_closed());

    drop(reports);
    while replies.message().await.is_ok_and(|reply| reply.is_some()) {}
    assert_eq!(nodes(), 0);

    // That life is over; another one is welcome.
    let again = fakes::register("p0", v1::Role::Prefill, "http://127.0.0.1:1");
    let refusal = client.join(tokio_stream::once(report(again.clone()))).await.unwrap_err();
    assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
    assert!(refusal.message().contains("this life (0000000000000001) was declared dead"), "{refusal}");
    assert_eq!(Error::from(refusal).kind, ErrorKind::DeclaredDead);
    let another = v1::Register { life: 2, ..again };
    assert!(client.join(tokio_stream::once(report(another))).await.is_ok());
}

#[tokio::test]
async fn an_answer_without_a_limit_is_as_long_as_there_is_room_for() {
    let service = fakes::router(Limits { max_tokens_default: 200, ..Limits::default() });
    let resolved = |asked, prompt| service.resolve_max_tokens(asked, prompt).map_err(|error| error.param);
    // The context holds 256.
    assert_eq!((resolved(None, 20), resolved(None, 100)), (Ok(200), Ok(156)));
    assert_eq!((resolved(Some(236), 20), resolved(Some(237), 20)), (Ok(236), Err(Some("max_tokens"))));
    assert_eq!((resolved(Some(1), 256), resolved(Some(0), 1)), (Err(Some("max_tokens")), Err(Some("max_tokens"))));
    let small = v1::Register { total_blocks: 5, ..fakes::register("d0", v1::Role::Decode, "http://127.0.0.1:1") };
    let _node = service.membership().register(small, clock::now()).unwrap();
    assert_eq!(resolved(None, 20), Ok(60), "five blocks of 16 tokens");
    assert_eq!(resolved(None, 100), Ok(1), "whose refusal is the flow's");
    assert_eq!(resolved(Some(200), 20), Ok(200), "who asks for more is told why not, later");
}
