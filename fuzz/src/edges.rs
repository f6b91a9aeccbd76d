//! What clients send to the router, through its real routes and services, as its two ports hand it to them. There are
//! no nodes: the best request ends as "unavailable". The bytes of HTTP itself are hyper's and h2's to read.
use std::cell::RefCell;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use http::{HeaderName, HeaderValue, Method, Request, Uri, header};
use prost::Message;
use serde_json::{Value, json};
use tandem_proto::v1;
use tandem_router::admission::keys::Keys;
use tandem_router::api::{Service, Telling};
use tandem_router::http::{admin, page, router};
use tandem_router::limits::Limits;
use tandem_router::membership::{Expected, Membership};
use tandem_router::page::Page;
use tandem_router::traces::{Form, Traces, query::Query};
use tandem_telemetry::Exporter;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::Target;
use crate::files::with_file;
use crate::text::model;

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "http_bodies", run: http_bodies, seeds: body_seeds },
    Target { name: "http_heads", run: http_heads, seeds: head_seeds },
    Target { name: "grpc", run: grpc, seeds: grpc_seeds },
    Target { name: "trace_queries", run: trace_queries, seeds: query_seeds },
];

const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"];
/// Of an answer to one request without a node.
const MAX_ANSWER: usize = 16 << 20;
const KEYS: &[u8] = br#"{"keys": [{"name": "alice", "key": "sk-alice-0123456789abcdef"}]}"#;

/// A router with everything but sockets, and the runtime that its tasks need.
struct Edge {
    runtime: Runtime,
    service: Service,
    routes: axum::Router,
    grpc: axum::Router,
}

impl Edge {
    fn new(keys: Keys) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _inside = runtime.enter();
        let expected = Expected { model_digest: model().digest, eos_token_id: model().eos };
        let membership = Membership::new(expected, Duration::from_secs(3));
        let telling = Telling { exporter: Exporter::disabled(), sample_ratio: 1.0, ring: 16 };
        let service = Service::with_keys(model(), membership, telling, Limits::default(), "fuzz".into(), keys);
        let live = page(Page::new(service.clone()), CancellationToken::new());
        let operators = axum::Router::new().nest_service("/admin", admin(service.clone()));
        let routes = router(service.clone()).merge(operators);
        // With keys the page is the operators' alone, at a port of their own.
        let routes = if service.is_reserved() { routes } else { routes.merge(live) };
        let health = tonic_health::server::HealthReporter::new();
        let grpc = tandem_router::grpc::routes(&service, health).expect("routes").prepare().into_axum_router();
        drop(_inside);
        Self { runtime, service, routes, grpc }
    }

    /// Status and body; a stream of events is left alone, it has no end.
    fn ask(&self, routes: &axum::Router, request: Request<Body>) -> (http::response::Parts, Vec<u8>) {
        let answered = self.runtime.block_on(async {
            let (head, body) = routes.clone().oneshot(request).await.expect("infallible").into_parts();
            let kind = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
            let is_stream = kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
            let body = if is_stream { Vec::new() } else { to_bytes(body, MAX_ANSWER).await.expect("bounded").to_vec() };
            (head, body)
        });
        let counts = self.service.counts();
        assert_eq!((counts.inflight, counts.queued), (0, 0), "a request that ended holds a place");
        answered
    }
}

thread_local! {
    static OPEN: Edge = Edge::new(Keys::default());
    static LOCKED: Edge = Edge::new(with_file(KEYS, |path| Keys::load(path, Instant::now()).expect("keys")));
    static TRACES: RefCell<Option<Traces>> = const { RefCell::new(None) };
}

/// The first byte is the path, the rest the body.
fn http_bodies(data: &[u8]) {
    let Some((path, body)) = data.split_first() else { return };
    let path = PATHS[usize::from(*path) % PATHS.len()];
    let request = Request::post(path).body(Body::from(body.to_vec())).expect("a request");
    let (head, answer) = OPEN.with(|edge| edge.ask(&edge.routes, request));
    let status = head.status.as_u16();
    // Without nodes the best request is unavailable.
    assert!(matches!(status, 200 | 400 | 404 | 503), "{path}: {status}");
    if status != 200 {
        let answer: Value = serde_json::from_slice(&answer).expect("an error is JSON");
        assert!(answer["error"]["message"].is_string() && answer["error"]["type"].is_string(), "{answer}");
    }
}

fn body_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        (0, json!({"model": "m", "prompt": "Hello <|im_end|>", "max_tokens": 4, "n": 2, "stop": ["a", "\n"]})),
        (0, json!({"prompt": [1, 2, 3], "stream": true, "stream_options": {"include_usage": true}, "logprobs": 2})),
        (0, json!({"prompt": ["a", "b"], "echo": false, "suffix": null, "best_of": 1, "seed": 7, "user": "u"})),
        (0, json!({"prompt": [[1], [2, 3]], "logit_bias": {"5": -1.5, "6": 100}, "stop_token_ids": [4]})),
        (
            0,
            json!({"prompt": "x", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "ignore_eos": true,
            "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 1}),
        ),
        (
            1,
            json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "max_completion_tokens": 4, "logprobs": true, "top_logprobs": 3, "priority": -2}),
        ),
        (
            1,
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "tools": [],
            "tool_choice": "none", "response_format": {"type": "text"}, "n": 1}),
        ),
        (2, json!({"prompt": "Hello", "add_special_tokens": false, "return_token_strs": true})),
        (2, json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true})),
        (3, json!({"tokens": [1, 2, 3, 49151]})),
    ];
    bodies.into_iter().map(|(path, body)| [&[path][..], body.to_string().as_bytes()].concat()).collect()
}

/// `METHOD target`, then lines `name: value`, an empty one, and the body. A first line that begins with `!` is for a
/// router with API keys.
fn http_heads(data: &[u8]) {
    let (locked, data) = data.strip_prefix(b"!").map_or((false, data), |rest| (true, rest));
    let end = data.windows(2).position(|pair| pair == b"\n\n").unwrap_or(data.len());
    let mut lines = data[..end].split(|byte| *byte == b'\n');
    let Some((method, target)) = lines.next().and_then(|line| std::str::from_utf8(line).ok()?.split_once(' ')) else {
        return;
    };
    let (Ok(method), Ok(target)) = (Method::from_bytes(method.as_bytes()), target.parse::<Uri>()) else { return };
    let body = data.get(end + 2..).unwrap_or_default().to_vec();
    let mut request = Request::builder().method(method).uri(target).body(Body::from(body)).expect("parts");
    for line in lines.take(256) {
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let name = parts.next().and_then(|name| HeaderName::from_bytes(name).ok());
        let value = parts.next().and_then(|value| HeaderValue::from_bytes(value.trim_ascii()).ok());
        if let Some((name, value)) = name.zip(value) {
            request.headers_mut().append(name, value);
        }
    }
    let edge = if locked { &LOCKED } else { &OPEN };
    let (head, _) = edge.with(|edge| edge.ask(&edge.routes, request));
    assert_ne!(head.status.as_u16(), 500);
    for name in ["x-request-id", "traceparent"] {
        let lines = head.headers.get_all(name).iter().count();
        assert!(lines <= 1, "{lines} lines of {name}");
    }
}

fn head_seeds() -> Vec<Vec<u8>> {
    let parent = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let seeds = [
        format!(
            "POST /v1/completions\ncontent-type: application/json; charset=utf-8\n{parent}\ntracestate: a=1,b@c=2\n\
             x-request-id: one\nx-tandem-tenant: team\nx-request-timeout-ms: 5000\norigin: http://a.example\n\n\
             {{\"prompt\":\"hi\"}}"
        ),
        format!("!POST /v1/chat/completions\nauthorization: Bearer sk-alice-0123456789abcdef\n{parent}\n\n{{}}"),
        "GET /page/events\n".to_owned(),
        "!GET /page/events\nauthorization: Basic x\n".to_owned(),
        "GET /v1/models/SmolLM2?x=%41\naccept: application/openmetrics-text; q=0.5\n".to_owned(),
        "GET /metrics\naccept: application/openmetrics-text;version=1.0.0\nhost: localhost\n".to_owned(),
        "GET /api/traces?service=a&limit=3&tags=%7B%22a%22%3A%22b%22%7D&start=1\n".to_owned(),
        "GET /api/v3/traces?query.service_name=a&query.start_time_min=2026-01-31T23:59:59.5Z\n".to_owned(),
        "GET /api/traces/4bf92f3577b34da6a3ce929d0e0e4736\n".to_owned(),
        "GET /api/services/a%2Fb/operations\n".to_owned(),
        "GET /page/traces/last\n".to_owned(),
        "GET /../../etc/passwd\n".to_owned(),
        "GET /admin/health\n".to_owned(),
        "OPTIONS /v1/completions\naccess-control-request-method: POST\n".to_owned(),
    ];
    seeds.map(String::into_bytes).to_vec()
}

/// The first byte says how the message is packed, the second whether the frame's length is true.
fn grpc(data: &[u8]) {
    let Some(([packed, length], message)) = data.split_first_chunk() else { return };
    let bytes = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let bytes = if length % 16 == 1 { bytes.wrapping_mul(7) } else { bytes };
    let frame = [&[packed % 3][..], &bytes.to_be_bytes(), message].concat();
    let mut request = Request::post("/tandem.v1.Inference/Generate").header(header::CONTENT_TYPE, "application/grpc");
    request = match packed / 3 % 3 {
        0 => request,
        1 => request.header("grpc-encoding", "gzip"),
        _ => request.header("grpc-encoding", "zstd"),
    };
    let request = request.body(Body::from(frame)).expect("a request");
    let (head, _) = OPEN.with(|edge| edge.ask(&edge.grpc, request));
    // A refusal has its status among the headers: nothing follows. 13 is tonic's word for a frame that is none.
    let status = head.headers.get("grpc-status").and_then(|status| status.to_str().ok()).unwrap_or("none");
    assert!(["3", "5", "8", "11", "12", "13", "14"].contains(&status), "grpc-status {status}");
}

fn grpc_seeds() -> Vec<Vec<u8>> {
    use v1::generate_request::Input;
    let message = |role: &str, content: &str| v1::ChatMessage { role: role.into(), content: content.into() };
    let inputs = [
        Input::Text("Hello".into()),
        Input::TokenIds(v1::TokenIds { ids: vec![1, 2, 49_151, u32::MAX] }),
        Input::Chat(v1::ChatMessages { messages: vec![message("system", "a"), message("user", "b")] }),
    ];
    let request = |input| v1::GenerateRequest {
        input: Some(input),
        max_tokens: Some(4),
        sampling: Some(v1::Sampling { temperature: 0.5, logit_bias: [(5, 1.0)].into(), ..v1::Sampling::default() }),
        stop: vec!["a".into()],
        stop_token_ids: vec![3],
        request_id: "one".into(),
        n: 2,
        ..v1::GenerateRequest::default()
    };
    inputs.map(|input| [&[0, 0][..], &request(input).encode_to_vec()].concat()).to_vec()
}

/// Lines `key=value`.
fn trace_queries(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let pairs: Vec<(String, String)> =
        text.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.into(), value.into())).collect();
    let Ok(query) = Query::parse(&pairs) else { return };
    TRACES.with_borrow_mut(|traces| {
        let traces = traces.get_or_insert_with(crate::cluster::some_traces);
        for form in [Form::Classic, Form::Otlp, Form::Summary] {
            traces.find(&query, form);
        }
    });
}

fn query_seeds() -> Vec<Vec<u8>> {
    [
        "service=a\noperation=b\nlimit=5\nstart=1700000000000000\nend=1700000001500000\nminDuration=1.5ms\n\
         maxDuration=1h2m3s4us\ntags={\"error\":\"true\",\"n\":2}\ntag=a:b:c",
        "query.service_name=a\nquery.num_traces=5\nquery.start_time_min=2023-11-14T22:13:20Z\n\
         query.start_time_max=2023-11-14T23:13:21.5+01:00\nquery.duration_min=1500µs\nquery.attributes={\"a\":true}",
    ]
    .map(|seed| seed.as_bytes().to_vec())
    .to_vec()
}
