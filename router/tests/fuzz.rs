//! Whatever comes in, the router answers with a refusal of the right kind and holds no more than it may: HTTP bodies
//! through the real routes, gRPC requests through the real services, messages of `tandem.v1` by their bytes, and what
//! nodes report into the membership table. Short here; for longer runs:
//! `TANDEM_FUZZ_SECONDS=600 cargo test -p tandem-router --release --test fuzz -- --ignored`.
//!
//! Long because each way in has its generators beside its check, and all share one service.
mod model;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use http::Request;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use prost::Message;
use serde_json::{Value, json};
use tandem_proto::SequenceHash;
use tandem_proto::v1::{self, node_report::Report, transport_info::Reach};
use tandem_router::api::Service;
use tandem_router::limits::Limits;
use tandem_router::membership::{Expected, MAX_NODES, Membership};
use tandem_router::text::ModelText;
use tandem_router::traces::Traces;
use tandem_telemetry::Exporter;
use tower::{Service as _, ServiceExt};

/// How long the ignored tests go on.
const SECONDS: &str = "TANDEM_FUZZ_SECONDS";
const SHORT: Duration = Duration::from_secs(2);
/// Bytes of an answer to a request that is refused.
const MAX_ANSWER: usize = 1 << 20;

fn long() -> Duration {
    let seconds = std::env::var_os(SECONDS).and_then(|seconds| seconds.to_str()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(60))
}

fn service() -> Service {
    let text = ModelText::load(&model::path()).expect("model file");
    let expected = Expected { model_digest: text.digest, eos_token_id: text.eos };
    let membership = Membership::new(expected, Duration::from_secs(3));
    Service::new(Arc::new(text), membership, Exporter::disabled(), Limits::default(), "router-fuzz".into())
}

/// Values of `strategy` for so long; a seed of the run is printed, so that it can be run again.
fn each<S: Strategy>(strategy: S, time: Duration, mut check: impl FnMut(S::Value)) {
    let seed: [u8; 32] = std::array::from_fn(|_| rand::random());
    println!("seed {seed:?}");
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (start, mut cases) = (Instant::now(), 0_u64);
    while start.elapsed() < time {
        check(strategy.new_tree(&mut runner).expect("a value").current());
        cases += 1;
    }
    println!("{cases} cases");
    assert!(cases > 0);
}

const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"];
const FIELDS: [&str; 34] = [
    "model",
    "prompt",
    "messages",
    "tokens",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "stream",
    "stream_options",
    "ignore_eos",
    "min_tokens",
    "return_token_ids",
    "tools",
    "tool_choice",
    "response_format",
    "user",
    "priority",
    "prompt_logprobs",
];

/// Any JSON: wrong types, huge numbers, all of unicode.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..40_i64).prop_map(Value::from),
        vec(any::<char>(), 0..20).prop_map(|text| Value::String(text.into_iter().collect())),
        "[a-z<|_>]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let key = prop_oneof![
            any::<u32>().prop_map(|id| id.to_string()),
            Just("role".to_owned()),
            Just("content".to_owned())
        ];
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            vec((key, inner), 0..6).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A request that is nearly right: some fields of a good one replaced.
fn nearly_right() -> impl Strategy<Value = String> {
    let changes = vec((prop::sample::select(FIELDS.to_vec()), any_json()), 0..4);
    changes.prop_map(|changes| {
        let mut body = json!({"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [1],
            "max_tokens": 4, "temperature": 0.5, "stream_options": {"include_usage": true}});
        for (name, value) in changes {
            body[name] = value;
        }
        body.to_string()
    })
}

/// Text of which a piece is cut, doubled, or overwritten.
fn damaged(text: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (text, any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4_u8, any::<u8>()).prop_map(
        |(mut bytes, from, to, how, byte)| {
            if bytes.is_empty() {
                return bytes;
            }
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            let (from, to) = (from.min(to), from.max(to));
            match how {
                0 => drop(bytes.drain(from..to)),
                1 => bytes.truncate(from),
                2 => bytes[from] = byte,
                _ => {
                    let piece = bytes[from..to].to_vec();
                    bytes.splice(from..from, piece);
                }
            }
            bytes
        },
    )
}

/// Brackets as deep as one likes: a parser that recurses without a limit overflows its stack.
fn nested() -> impl Strategy<Value = Vec<u8>> {
    let open = prop::sample::select(vec!["[", "{\"a\":", "{\"prompt\":[", "{\"messages\":[{\"content\":["]);
    (open, 1..60_000_usize).prop_map(|(open, times)| open.repeat(times).into_bytes())
}

fn bodies() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        1 => vec(any::<u8>(), 0..400),
        6 => nearly_right().prop_map(String::into_bytes),
        3 => damaged(nearly_right().prop_map(String::into_bytes)),
        1 => any_json().prop_map(|json| json.to_string().into_bytes()),
        1 => nested(),
    ]
}

fn http_bodies(time: Duration) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let service = service();
    let router = tandem_router::http::router(service.clone());
    each((prop::sample::select(PATHS.to_vec()), bodies()), time, |(path, body)| {
        let shown = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
        let (status, answer) = runtime.block_on(post(&router, path, body));
        let refused = status != 200;
        // Without nodes the best request is unavailable.
        assert!(matches!(status, 200 | 400 | 404 | 503), "{path}: {status} for {shown}");
        let error = &answer["error"];
        assert!(!refused || (error["message"].is_string() && error["type"].is_string()), "{answer} for {shown}");
        assert!(answer.to_string().len() < MAX_ANSWER, "{shown}");
    });
    let counts = service.counts();
    assert_eq!((counts.inflight, counts.queued), (0, 0), "a refused request holds a place");
}

async fn post(router: &Router, path: &str, body: Vec<u8>) -> (u16, Value) {
    let request = Request::post(path).body(Body::from(body)).expect("request");
    let response = router.clone().call(request).await.expect("infallible");
    let status = response.status().as_u16();
    let bytes = to_bytes(response.into_body(), MAX_ANSWER).await.expect("a bounded body");
    (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

#[test]
fn http_bodies_shortly() {
    http_bodies(SHORT);
}

#[test]
#[ignore = "as long as TANDEM_FUZZ_SECONDS says"]
fn http_bodies_at_length() {
    http_bodies(long());
}

/// Decoding never panics, and what was decoded is not much larger than its bytes.
fn decode<M: Message + Default>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        // Varints may be longer than they need: encoding anew only makes less of them.
        assert!(message.encoded_len() <= bytes.len().saturating_mul(12) + 64);
        let again = M::decode(&*message.encode_to_vec()).expect("what was encoded can be decoded");
        assert_eq!(again.encoded_len(), message.encoded_len());
    }
}

fn decode_all(bytes: &[u8]) {
    macro_rules! all { ($($message:ident),* $(,)?) => { $(decode::<v1::$message>(bytes);)* } }
    all!(
        NodeReport,
        Register,
        TransportInfo,
        Load,
        StepCost,
        Draining,
        KvEvents,
        RouterReport,
        RequestSpec,
        PrefillCommand,
        PrefillStop,
        Deliver,
        PrefillEvent,
        Undelivered,
        FirstToken,
        Delivered,
        DecodeCommand,
        DecodeStop,
        DecodeStart,
        DecodeEvent,
        Reserved,
        Verified,
        Token,
        Finished,
        Ticket,
        Seal,
        Span,
        SpanLink,
        Attribute,
        TextList,
        SpanEvent,
        GenerateRequest,
        TokenIds,
        ChatMessage,
        ChatMessages,
        Sampling,
        GenerateResponse,
        TokenChunk,
        TokenLogprob,
        Finish,
        Timings,
    );
}

/// Messages that say something, to be damaged.
fn messages() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        generate_requests().prop_map(|request| request.encode_to_vec()),
        reports().prop_map(|report| v1::NodeReport { report: Some(report) }.encode_to_vec()),
    ]
}

fn proto_bytes(time: Duration) {
    let bytes = prop_oneof![vec(any::<u8>(), 0..300), damaged(messages())];
    each(bytes, time, |bytes| decode_all(&bytes));
}

#[test]
fn proto_bytes_shortly() {
    proto_bytes(SHORT);
}

#[test]
#[ignore = "as long as TANDEM_FUZZ_SECONDS says"]
fn proto_bytes_at_length() {
    proto_bytes(long());
}

fn texts() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z<|_>]{0,20}", vec(any::<char>(), 0..40).prop_map(|text| text.into_iter().collect::<String>())]
}

fn generate_requests() -> impl Strategy<Value = v1::GenerateRequest> {
    use v1::generate_request::Input;
    let message = (texts(), texts()).prop_map(|(role, content)| v1::ChatMessage { role, content });
    let input = prop_oneof![
        texts().prop_map(Input::Text),
        vec(any::<u32>(), 0..50).prop_map(|ids| Input::TokenIds(v1::TokenIds { ids })),
        vec(0..1000_u32, 0..50).prop_map(|ids| Input::TokenIds(v1::TokenIds { ids })),
        vec(message, 0..4).prop_map(|messages| Input::Chat(v1::ChatMessages { messages })),
    ];
    let sampling =
        (any::<(f32, f32, u32, u64, f32, f32, f32, f32)>(), vec(any::<(u32, f32)>(), 0..5), any::<(u32, u32)>());
    let sampling = sampling.prop_map(|(numbers, bias, (min_tokens, top_logprobs))| {
        let (temperature, top_p, top_k, seed, min_p, repetition_penalty, presence_penalty, frequency_penalty) = numbers;
        let logit_bias = bias.into_iter().collect();
        v1::Sampling {
            temperature,
            top_p,
            top_k,
            seed,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            min_tokens,
            top_logprobs,
        }
    });
    let small = (any::<Option<u32>>(), any::<(bool, u32, i32)>(), vec(any::<u32>(), 0..70), vec(texts(), 0..6));
    (prop::option::of(input), prop::option::of(sampling), small, texts()).prop_map(
        |(input, sampling, small, request_id)| {
            let (max_tokens, (ignore_eos, n, priority), stop_token_ids, stop) = small;
            let request = v1::GenerateRequest { input, max_tokens, sampling, stop, ..v1::GenerateRequest::default() };
            v1::GenerateRequest { ignore_eos, request_id, stop_token_ids, n, priority, ..request }
        },
    )
}

fn grpc_requests(time: Duration) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let service = service();
    let routes = tandem_router::grpc::routes(&service, tonic_health::server::HealthReporter::new()).expect("routes");
    let routes = routes.prepare();
    // Either a message of the right form, or its bytes with damage.
    let frames = prop_oneof![
        3 => generate_requests().prop_map(|request| framed(&request.encode_to_vec())),
        1 => damaged(generate_requests().prop_map(|request| framed(&request.encode_to_vec()))),
    ];
    each(frames, time, |frame| {
        let request = Request::post("/tandem.v1.Inference/Generate").header("content-type", "application/grpc");
        let request = request.body(tonic::body::Body::new(Body::from(frame))).expect("request");
        let response = runtime.block_on(routes.clone().oneshot(request)).expect("infallible");
        // A refusal has its status among the headers: nothing follows. They are those of bad input, bad frames and no
        // nodes: see the list of codes.
        let status = response.headers().get("grpc-status").and_then(|status| status.to_str().ok()).unwrap_or("none");
        assert!(["3", "5", "8", "11", "12", "13", "14"].contains(&status), "grpc-status {status}");
    });
    let counts = service.counts();
    assert_eq!((counts.inflight, counts.queued), (0, 0), "a refused request holds a place");
}

/// gRPC's frame: uncompressed, then the length.
fn framed(message: &[u8]) -> Vec<u8> {
    let len = u32::try_from(message.len()).expect("small");
    [&[0][..], &len.to_be_bytes(), message].concat()
}

#[test]
fn grpc_requests_shortly() {
    grpc_requests(SHORT);
}

#[test]
#[ignore = "as long as TANDEM_FUZZ_SECONDS says"]
fn grpc_requests_at_length() {
    grpc_requests(long());
}

fn reports() -> impl Strategy<Value = Report> {
    let load = any::<(u32, u32, u64, u32, u64, f64, f64)>().prop_map(
        |(running, waiting, queued_tokens, free_blocks, running_tokens, base_ms, token_ms)| {
            let step_cost = Some(v1::StepCost {
                base_ms,
                token_ms,
                context_ms: -base_ms,
                decode_token_ms: Some(base_ms - token_ms),
                decode_context_ms: None,
            });
            let load = v1::Load { running, waiting, queued_tokens, free_blocks, running_tokens, ..v1::Load::default() };
            Report::Load(v1::Load { step_cost, ..load })
        },
    );
    let hashes = vec(any::<u128>().prop_map(SequenceHash::from), 0..40);
    let hashes = prop_oneof![
        4 => hashes.prop_map(|hashes| SequenceHash::all_to_wire(&hashes)),
        1 => vec(any::<u8>(), 0..40),
    ];
    let events = (any::<u64>(), any::<bool>(), hashes, vec(any::<u8>(), 0..8));
    let events = events.prop_map(|(first, snapshot, hashes, removed)| {
        Report::KvEvents(v1::KvEvents { first, snapshot, hashes, removed })
    });
    prop_oneof![
        2 => registers().prop_map(Report::Register),
        2 => load,
        1 => Just(Report::Draining(v1::Draining {})),
        1 => vec(any::<u8>(), 0..200).prop_map(Report::Spans),
        2 => events,
    ]
}

fn any_transport(build: impl Strategy<Value = String>) -> impl Strategy<Value = v1::TransportInfo> {
    let host = (0..3_u64, 0..2_u32).prop_map(|(ipc_namespace, uid)| {
        Reach::Host(v1::HostReach { boot_id: "a".into(), ipc_namespace, pid_namespace: 1, net_namespace: 1, uid })
    });
    let network = (any::<bool>(), texts(), 0..3_u64).prop_map(|(loopback, address, net_namespace)| {
        Reach::Network(v1::NetworkReach { loopback, boot_id: "a".into(), net_namespace, address })
    });
    let subnets = vec(prop_oneof![Just("ib:1".to_owned()), texts()], 0..70);
    let fabric = subnets.prop_map(|subnets| Reach::Fabric(v1::FabricReach { subnets }));
    let reach = prop::option::of(prop_oneof![host, network, fabric]);
    (build, reach).prop_map(|(build, reach)| v1::TransportInfo {
        backend: "tcp".into(),
        name: build.clone(),
        build_id: format!("b{build}"),
        reach,
    })
}

fn registers() -> impl Strategy<Value = v1::Register> {
    let processor = (0..3_u64, 0..4_u32, any::<u32>());
    let processor = prop::option::of(processor.prop_map(|(id, cores, threads)| v1::Processor { id, cores, threads }));
    let numbers = (0..3_i32, 0..50_u64, any::<u64>(), 0..3_u32, any::<u32>(), processor);
    let transports = prop_oneof![9 => vec(any_transport((0..9_u32).prop_map(|n| n.to_string())), 1..3), 1 => vec(any_transport(texts()), 0..10)];
    let texts = (0..2000_u32, prop_oneof![Just("http://127.0.0.1:1".to_owned()), texts()], transports);
    // Most nodes of one arithmetic: a table that refuses all but the first would test little.
    let arithmetic = prop_oneof![8 => Just(0_usize), 1 => Just(1), 1 => Just(2)];
    (numbers, texts, prop::bool::weighted(0.9), arithmetic).prop_map(
        |((role, incarnation, digest, block, blocks, processor), (name, endpoint, transports), ours, arithmetic)| {
            v1::Register {
                node_id: format!("n{name}"),
                role,
                incarnation,
                compatibility_digest: digest,
                protocol: tandem_proto::PROTOCOL_VERSION,
                model_digest: if ours { OURS } else { digest },
                endpoint,
                transports,
                total_blocks: blocks,
                block_tokens: [16, 32, 7][block as usize],
                max_context_tokens: blocks,
                max_running: blocks,
                eos_token_id: 2,
                processor,
                arithmetic: ["f32", "bf16-dots", ""][arithmetic].into(),
                kv_order: "bf16-pairs".into(),
                life: incarnation,
                link: u64::from(digest == 1),
                ..v1::Register::default()
            }
        },
    )
}

/// Digest that the table of the test expects.
const OURS: u64 = 7;

/// What nodes say, in any order and with any figures, leaves a table within its bounds that still routes or says why
/// not.
fn node_reports(time: Duration) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let _inside = runtime.enter();
    let membership = Membership::new(Expected { model_digest: OURS, eos_token_id: 2 }, Duration::from_secs(3));
    let (start, mut sessions, traces) = (Instant::now(), Vec::new(), Traces::default());
    let step = (reports(), any::<prop::sample::Index>(), 0..20_u8, 0..200_u64);
    let mut now = start;
    each(step, time, |(report, which, what, later_ms)| {
        now += Duration::from_millis(later_ms);
        let session = if sessions.is_empty() { 0 } else { sessions[which.index(sessions.len())] };
        match report {
            Report::Register(info) => sessions.extend(membership.register(info, now).ok().map(|node| node.session)),
            Report::Load(load) => membership.report(session, &load, now),
            Report::Draining(_) => membership.draining(session, now),
            Report::KvEvents(events) => decode_all(&events.encode_to_vec()),
            Report::ClockProbe(probe) => decode_all(&probe.encode_to_vec()),
            Report::Spans(packed) => drop(traces.stray(&packed)),
        }
        match what {
            0 => membership.leave(session, "fuzz"),
            1 => membership.expire(now),
            _ => {}
        }
        let routed = membership.has_pair();
        let totals = membership.totals();
        let nodes = (totals.prefill_nodes + totals.decode_nodes) as usize;
        assert!(nodes <= MAX_NODES && (!routed || nodes >= 2), "{totals:?}");
        assert!(totals.free_blocks <= totals.total_blocks, "{totals:?}");
        assert!(membership.json()["nodes"].as_array().is_some_and(|listed| listed.len() == nodes));
        sessions.truncate(4096);
    });
    membership.close();
}

#[test]
fn node_reports_shortly() {
    node_reports(SHORT);
}

#[test]
#[ignore = "as long as TANDEM_FUZZ_SECONDS says"]
fn node_reports_at_length() {
    node_reports(long());
}
