//! The HTTP edge over a router without nodes: every refusal has OpenAI's shape and the right status, and hostile input
//! is answered. Answers themselves are tested beside the code, from scripted events.
mod model;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1;
use tandem_router::admission::keys::Keys;
use tandem_router::api::Service;
use tandem_router::limits::Limits;
use tandem_router::membership::{Expected, Membership};
use tandem_router::page::Page;
use tandem_router::text::ModelText;
use tandem_telemetry::{Exporter, clock};
use tokio_util::sync::CancellationToken;
use tower::Service as _;

fn router() -> Router {
    router_with(Keys::default())
}

fn router_with(keys: Keys) -> Router {
    tandem_router::http::router(service_with(keys))
}

fn service_with(keys: Keys) -> Service {
    let mut text = ModelText::load(&model::path()).expect("model file");
    text.model_name = "org/tiny".into();
    let expected = Expected { model_digest: text.digest, eos_token_id: text.eos };
    let membership = Membership::new(expected, Duration::from_secs(3));
    let instance = "router-test".to_owned();
    let (exporter, limits) = (Exporter::disabled(), Limits::default());
    Service::with_keys(Arc::new(text), membership, exporter, limits, instance, keys)
}

async fn send(router: &Router, request: Request<Body>) -> (StatusCode, HeaderMap, Value) {
    let response = router.clone().call(request).await.expect("infallible");
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, 1 << 20).await.expect("body");
    (parts.status, parts.headers, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

async fn get(router: &Router, path: &str) -> (StatusCode, Value) {
    let (status, _, body) = send(router, Request::get(path).body(Body::empty()).expect("request")).await;
    (status, body)
}

async fn post(router: &Router, path: &str, body: impl Into<Body>) -> (StatusCode, Value) {
    let (status, _, body) = send(router, Request::post(path).body(body.into()).expect("request")).await;
    (status, body)
}

#[tokio::test]
async fn routes_without_nodes() {
    let router = router();
    let (status, body) = get(&router, "/v1/models").await;
    assert_eq!((status, &body["data"][0]["id"]), (StatusCode::OK, &json!("org/tiny")));
    assert_eq!(get(&router, "/v1/models/org/tiny").await.0, StatusCode::OK);
    assert_eq!(get(&router, "/debug/cluster").await.0, StatusCode::OK);
    assert_eq!(get(&router, "/metrics").await.0, StatusCode::OK);
    for (path, status, code) in [
        ("/health", StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        ("/v1/models/other", StatusCode::NOT_FOUND, "model_not_found"),
        ("/api/traces/last", StatusCode::NOT_FOUND, "not_found"),
        ("/v2/nothing", StatusCode::NOT_FOUND, "not_found"),
        ("/v1/completions", StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
    ] {
        let (got, body) = get(&router, path).await;
        assert_eq!((got, &body["error"]["code"]), (status, &json!(code)), "{path}");
        assert!(body["error"]["message"].is_string() && body["error"].get("param").is_some(), "{path}");
    }
}

#[tokio::test]
async fn probes_have_routes_of_their_own() {
    let admin = tandem_router::http::admin(service_with(Keys::default()));
    for (path, status) in [("/live", 200), ("/ready", 503), ("/metrics", 200), ("/v1/models", 404)] {
        assert_eq!(get(&admin, path).await.0, status, "{path}");
    }
    let clients = tandem_router::http::router(service_with(Keys::default()).with_grpc_port(7));
    for port in [&admin, &clients] {
        for (path, status) in [("/health/live", 200), ("/health/ready", 503), ("/health", 503)] {
            assert_eq!(get(port, path).await.0, status, "{path}");
        }
    }
    assert_eq!(get(&clients, "/health/live").await.1, json!({"status": "ok", "grpc_port": 7}));
    assert_eq!(post(&admin, "/live", "").await.0, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn a_model_is_as_old_as_its_router() {
    let router = router();
    let created = async || {
        let (list, one) = (get(&router, "/v1/models").await.1, get(&router, "/v1/models/org/tiny").await.1);
        assert_eq!(list["data"][0]["created"], one["created"]);
        one["created"].as_u64().expect("seconds")
    };
    let first = created().await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(created().await, first);
}

#[tokio::test]
async fn a_body_that_is_not_said_to_be_json_is_refused() {
    let router = router();
    let page = ("origin", "https://a.example");
    for (headers, status) in [
        (vec![], 503),
        (vec![("content-type", "application/json")], 503),
        (vec![page, ("content-type", "application/json; charset=utf-8")], 503),
        (vec![page, ("content-type", "application/vnd.api+json")], 503),
        (vec![page], 415),
        (vec![page, ("content-type", "text/plain")], 415),
        (vec![("content-type", "application/x-www-form-urlencoded")], 415),
        (vec![("content-type", "application/json"), ("content-encoding", "gzip")], 415),
    ] {
        let mut request = Request::post("/v1/completions");
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        let (got, _, body) = send(&router, request.body(r#"{"prompt": "hi"}"#.into()).expect("request")).await;
        assert_eq!(got, status, "{headers:?} {body}");
        if status == 415 {
            assert_eq!(body["error"]["code"], "unsupported_media_type", "{body}");
        }
    }
    for path in ["/v1/chat/completions", "/tokenize", "/detokenize"] {
        let request = Request::post(path).header("content-type", "text/plain").body(Body::empty()).expect("request");
        assert_eq!(send(&router, request).await.0, 415, "{path}");
    }
}

#[tokio::test]
async fn jaeger_s_questions_are_answered_before_there_is_a_trace() {
    let router = router();
    for (path, field, value) in [
        ("/api/services", "data", json!([])),
        ("/api/services/tandem-router/operations", "data", json!([])),
        ("/api/traces?service=tandem-router&limit=5", "data", json!([])),
        ("/api/v3/services", "services", json!([])),
        ("/api/v3/operations?service=tandem-router", "operations", json!([])),
        (
            "/api/v3/traces?query.service_name=tandem-router&query.search_depth=5",
            "result",
            json!({"resourceSpans": []}),
        ),
        ("/api/v3/trace-summaries", "summaries", json!([])),
    ] {
        let (status, body) = get(&router, path).await;
        assert_eq!((status, &body[field]), (StatusCode::OK, &value), "{path}");
    }
    for (path, status) in [("/api/traces?limit=many", 400), ("/api/v3/traces/0123", 404), ("/api/v3/traces/%ff", 400)] {
        let (got, body) = get(&router, path).await;
        assert_eq!(got, status, "{path}");
        assert!(body["error"]["message"].is_string(), "{path}");
    }
}

#[tokio::test]
async fn a_refused_request_leaves_a_trace() {
    let router = router();
    let (trace_id, parent_id) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    for (body, refused) in [
        (r#"{"prompt": "hi", "max_tokens": -1}"#, StatusCode::BAD_REQUEST),
        (r#"{"prompt": "hi", "max_tokens": 1}"#, StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let parent = format!("00-{trace_id}-{parent_id}-01");
        let request = Request::post("/v1/completions").header("traceparent", parent).header("x-request-id", "mine");
        let (status, headers, answer) = send(&router, request.body(body.into()).expect("request")).await;
        assert_eq!(status, refused);
        let own = headers["traceparent"].to_str().expect("text");
        let trace = get(&router, &format!("/api/traces/{trace_id}")).await.1;
        let spans = trace["spans"].as_array().expect("spans");
        let span = spans.iter().find(|span| span["span_id"] == own[36..52]).expect("its span");
        assert_eq!((&span["parent_span_id"], &span["name"]), (&json!(parent_id), &json!("text_completion org/tiny")));
        assert_eq!(span["error"], answer["error"]["message"]);
        assert_eq!(span["attributes"]["tandem.request_id"], "mine");
    }
    let (_, headers, _) = send(&router, Request::get("/health").body(Body::empty()).expect("request")).await;
    assert!(!headers.contains_key("traceparent"), "a probe is no request for tokens");
    let found = get(&router, "/api/traces?service=tandem-router&tag=tandem.refused:true&minDuration=0s").await.1;
    assert_eq!(found["data"].as_array().map(Vec::len), Some(1), "two requests of one trace");
    let none = get(&router, "/api/v3/traces?query.start_time_max=2020-01-01T00:00:00Z").await.1;
    assert_eq!(none["result"]["resourceSpans"], json!([]));
}

#[tokio::test]
async fn bad_requests_name_what_is_wrong() {
    let router = router();
    for (path, body, param) in [
        ("/v1/completions", r#"{"prompt": "hi", "max_tokens": -1}"#, json!("max_tokens")),
        ("/v1/completions", r#"{"prompt": "hi", "max_tokens": 9000}"#, json!("max_tokens")),
        ("/v1/completions", r#"{"prompt": ""}"#, json!("prompt")),
        ("/v1/completions", r#"{"prompt": [49152]}"#, json!("prompt")),
        ("/v1/completions", r#"{"prompt": "hi", "n": 129}"#, json!("n")),
        ("/v1/completions", r#"{"prompt": ["a", "b", "c"], "n": 50}"#, json!("n")),
        ("/v1/completions", r#"{"prompt": "hi", "best_of": 3}"#, json!("best_of")),
        ("/v1/completions", r#"{"prompt": "hi", "logit_bias": {"49152": 1}}"#, json!("logit_bias")),
        ("/v1/completions", r#"{"prompt": "hi", "max_tokens": 4, "min_tokens": 5}"#, json!("min_tokens")),
        ("/v1/completions", r#"{"prompt": "hi", "logprobs": 21}"#, json!("logprobs")),
        ("/v1/completions", r#"{"prompt": "hi", "echo": true, "logprobs": 1}"#, json!("echo")),
        (
            "/v1/chat/completions",
            r#"{"messages": [{"role": "user", "content": "hi"}], "logprobs": 5}"#,
            json!("logprobs"),
        ),
        ("/v1/completions", r#"{"prompt": "hi""#, Value::Null),
        ("/v1/completions", "", Value::Null),
        ("/v1/chat/completions", r#"{"messages": []}"#, json!("messages")),
        ("/v1/chat/completions", r#"{"messages": [{"role": "<|im_end|>", "content": ""}]}"#, json!("messages")),
        ("/tokenize", "{}", json!("prompt")),
        ("/detokenize", r#"{"tokens": [99999]}"#, json!("tokens")),
    ] {
        let (status, answer) = post(&router, path, body).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &param), "{body}");
        assert_eq!(answer["error"]["type"], "invalid_request_error", "{body}");
    }
    assert_eq!(post(&router, "/v1/completions", vec![0xff, 0xfe]).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(post(&router, "/v1/completions", vec![b' '; 9 << 20]).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    let long = format!(r#"{{"prompt": "{}"}}"#, "word ".repeat(1 << 20));
    assert_eq!(post(&router, "/v1/completions", long).await.0, StatusCode::BAD_REQUEST);
    let (status, body) = post(&router, "/v1/completions", r#"{"prompt": "hi", "model": "gpt"}"#).await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
}

#[tokio::test]
async fn without_a_pair_generation_is_unavailable_streamed_or_not() {
    let router = router();
    for stream in [false, true] {
        let body = json!({"prompt": "hi", "stream": stream}).to_string();
        let (status, headers, body) = send(
            &router,
            Request::post("/v1/completions").header("x-request-id", "mine").body(body.into()).expect("request"),
        )
        .await;
        assert_eq!((status, &headers["x-request-id"]), (StatusCode::SERVICE_UNAVAILABLE, &"mine".parse().expect("ok")));
        assert!(headers.contains_key("retry-after") && body["error"]["message"].is_string());
    }
}

#[tokio::test]
async fn what_the_edge_refuses_is_counted_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys.json");
    std::fs::write(&file, r#"{"keys": [{"name": "a", "key": "secret-secret-secret-secret"}]}"#).expect("written");
    let service = service_with(Keys::load(&file, clock::now()).expect("good keys"));
    let (router, admin) = (tandem_router::http::router(service.clone()), tandem_router::http::admin(service));
    let counted = async || {
        let request = Request::get("/metrics").body(Body::empty()).expect("request");
        let body = admin.clone().call(request).await.expect("infallible").into_body();
        let text = String::from_utf8(to_bytes(body, 1 << 20).await.expect("body").to_vec()).expect("text");
        let of = |line: &str| {
            let (outcome, count) =
                line.strip_prefix("tandem_requests_total{")?.split_once("outcome=\"")?.1.split_once("\"} ")?;
            // Every outcome is there from the start, at zero.
            (count != "0").then(|| (outcome.to_owned(), count.to_owned()))
        };
        let mut counts: Vec<(String, String)> = text.lines().filter_map(of).collect();
        counts.sort();
        counts.into_iter().map(|(outcome, count)| format!("{outcome} {count}")).collect::<Vec<_>>().join(", ")
    };
    for (key, timeout, body, counts) in [
        ("none", "1000", r#"{"prompt": "hi"}"#, "unauthenticated 1"),
        ("secret-secret-secret-secret", "1000", r#"{"prompt""#, "invalid_argument 1, unauthenticated 1"),
        ("secret-secret-secret-secret", "soon", r#"{"prompt": "hi"}"#, "invalid_argument 2, unauthenticated 1"),
        (
            "secret-secret-secret-secret",
            "1000",
            r#"{"prompt": "hi", "n": 129}"#,
            "invalid_argument 3, unauthenticated 1",
        ),
        (
            "secret-secret-secret-secret",
            "1000",
            r#"{"prompt": "hi", "model": "gpt"}"#,
            "invalid_argument 3, not_found 1, unauthenticated 1",
        ),
        // Refused by the flow, which counts it itself.
        (
            "secret-secret-secret-secret",
            "1000",
            r#"{"prompt": "hi"}"#,
            "invalid_argument 3, not_found 1, unauthenticated 1, unavailable 1",
        ),
    ] {
        let request = Request::post("/v1/completions").header("authorization", format!("Bearer {key}"));
        let request = request.header("x-request-timeout-ms", timeout).body(Body::from(body)).expect("request");
        send(&router, request).await;
        assert_eq!(counted().await, counts, "{body}");
    }
}

#[tokio::test]
async fn text_to_tokens_and_back() {
    let router = router();
    let (_, tokens) = post(&router, "/tokenize", r#"{"prompt": "Hello<|im_end|>"}"#).await;
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([19556, 2]), &json!(2)));
    let (_, text) = post(&router, "/detokenize", r#"{"tokens": [19556, 2]}"#).await;
    assert_eq!(text["prompt"], "Hello");
}

#[tokio::test]
async fn the_text_of_each_token_on_request() {
    let router = router();
    let (_, body) = post(&router, "/tokenize", r#"{"prompt": "Hello", "return_token_strs": true}"#).await;
    assert_eq!((&body["tokens"], &body["token_strs"]), (&json!([19556]), &json!(["Hello"])), "{body}");
    let (_, body) = post(&router, "/tokenize", r#"{"prompt": "Hello"}"#).await;
    assert!(body.get("token_strs").is_none(), "{body}");
}

#[tokio::test]
async fn more_tokens_than_a_context_have_no_text() {
    let router = router();
    let ids = |count: usize| format!(r#"{{"tokens": [{}]}}"#, vec!["2"; count].join(","));
    let (_, limits) = post(&router, "/tokenize", r#"{"prompt": ""}"#).await;
    let context = usize::try_from(limits["max_model_len"].as_u64().expect("a length")).expect("short");
    assert_eq!(post(&router, "/detokenize", ids(context)).await.0, StatusCode::OK);
    let (status, body) = post(&router, "/detokenize", ids(context + 1)).await;
    assert_eq!((status, &body["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("tokens")));
}

/// Fields that would change the rendering or the tokens are refused by name, in each form of the request.
#[tokio::test]
async fn tokenize_ignores_nothing_that_would_change_the_tokens() {
    let router = router();
    for (field, value) in [
        ("add_special_tokens", "true"),
        ("add_generation_prompt", "false"),
        ("tools", r#"[{"type": "function"}]"#),
        ("chat_template", r#""{{ 1 }}""#),
    ] {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "{field}": {value}}}"#);
        let (status, answer) = post(&router, "/tokenize", body).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(field)));
    }
    let (status, answer) = post(&router, "/tokenize", r#"{"prompt": "a", "add_special_tokens": false}"#).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("add_special_tokens")));
}

/// The page's routes, beside those of clients.
fn with_page(service: Service) -> (Router, CancellationToken) {
    let (page, stop) = (Page::new(service.clone()), CancellationToken::new());
    let routes = tandem_router::http::router(service).merge(tandem_router::http::page(page, stop.clone()));
    (routes, stop)
}

async fn next_event(
    body: &mut (impl futures::Stream<Item = Result<axum::body::Bytes, axum::Error>> + Unpin),
) -> String {
    let bytes = futures::StreamExt::next(body).await.expect("an event").expect("no error");
    String::from_utf8(bytes.to_vec()).expect("text")
}

#[tokio::test]
async fn the_page_is_whole_talks_to_nobody_else_and_streams() {
    let (router, stop) = with_page(service_with(Keys::default()));
    let (status, headers, _) = send(&router, Request::get("/").body(Body::empty()).expect("request")).await;
    assert_eq!((status, &headers["content-type"]), (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap()));
    let policy = headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'") && !policy.contains("unsafe"), "{policy}");
    // Whatever a file names is there.
    let mut wanted = vec!["/".to_owned()];
    let mut seen = std::collections::BTreeSet::new();
    while let Some(path) = wanted.pop() {
        let response = router.clone().call(Request::get(&path).body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let text = String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap();
        assert!(!text.contains("innerHTML") && !text.contains("https://"), "{path}");
        let quoted = text.split('"').filter_map(|part| part.strip_prefix("page/").or(part.strip_prefix("./")));
        let files = quoted.filter(|name| name.contains('.')).map(|name| format!("/page/{name}"));
        wanted.extend(files.filter(|file| seen.insert(file.clone())));
    }
    assert!(seen.len() >= 7, "{seen:?}");

    let events = |router: &Router| router.clone().call(Request::get("/page/events").body(Body::empty()).unwrap());
    let response = events(&router).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["cache-control"], "no-cache");
    let mut body = response.into_body().into_data_stream();
    let whole = next_event(&mut body).await;
    assert!(whole.starts_with("data: {") && whole.ends_with("}\n\n"), "{whole}");
    let whole: Value = serde_json::from_str(whole.trim_end().split_once("data: ").unwrap().1).unwrap();
    assert_eq!(
        (&whole["about"]["model"], &whole["nodes"], &whole["cluster"]["ready"]),
        (&json!("org/tiny"), &json!([]), &json!(false))
    );

    // So many, and no more. What they begin with is written once, if no look comes between.
    let (mut others, mut written) = (Vec::new(), std::collections::BTreeSet::new());
    for _ in 1..tandem_router::page::MAX_SUBSCRIBERS {
        let mut body = events(&router).await.unwrap().into_body().into_data_stream();
        others.push((futures::StreamExt::next(&mut body).await.unwrap().unwrap(), body));
        written.extend(others.last().map(|(whole, _)| whole.as_ptr()));
    }
    assert!(written.len() < 4, "{} times", written.len());
    let refused = events(&router).await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"5".parse().unwrap()));
    drop(others.pop());
    assert_eq!(events(&router).await.unwrap().status(), StatusCode::OK);
    stop.cancel();
    assert!(futures::StreamExt::next(&mut body).await.is_none(), "the router's end ends the stream");
}

/// A prefill node, as it registers.
fn node(model: &ModelText) -> v1::Register {
    let transport = v1::TransportInfo { backend: "mem".into(), name: "mem".into(), build_id: "1".into(), reach: None };
    v1::Register {
        node_id: "p0".into(),
        role: v1::Role::Prefill.into(),
        incarnation: 1,
        compatibility_digest: 5,
        protocol: tandem_proto::PROTOCOL_VERSION,
        model_digest: model.digest,
        endpoint: "http://127.0.0.1:1".into(),
        transports: vec![transport],
        total_blocks: 64,
        block_tokens: 16,
        max_context_tokens: 1024,
        max_running: 8,
        eos_token_id: model.eos,
        max_batched_tokens: 512,
        arithmetic: "f32".into(),
        kv_order: "bf16-pairs".into(),
        life: 1,
        ..v1::Register::default()
    }
}

#[tokio::test]
async fn the_page_follows_who_comes_and_goes() {
    let service = service_with(Keys::default());
    let live = Page::new(service.clone());
    let router = tandem_router::http::page(live.clone(), CancellationToken::new());
    tokio::spawn(live.watch());
    let response = router.clone().call(Request::get("/page/events").body(Body::empty()).unwrap()).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    assert!(next_event(&mut body).await.contains("\"kind\":\"whole\""));
    // Nothing changes: a sign of life.
    assert!(next_event(&mut body).await.contains("\"kind\":\"delta\""));
    let came = service.membership().register(node(service.model()), clock::now()).unwrap();
    while !next_event(&mut body).await.contains("\"id\":\"p0\"") {}
    service.membership().leave(came.session, "its stream was cut");
    loop {
        let update = next_event(&mut body).await;
        if update.contains("\"gone\":[\"p0\"]") {
            assert!(update.contains("\"why\":\"its stream was cut\""), "{update}");
            return;
        }
    }
}

#[tokio::test]
async fn what_the_page_shows_wants_a_key_where_there_are_keys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    std::fs::write(&path, r#"{"keys": [{"name": "a", "key": "sk-a-0123456789abcdefgh"}]}"#).unwrap();
    let service = service_with(Keys::load(&path, clock::now()).unwrap());
    let jaeger = "http://jaeger.example:16686".parse().ok();
    let service = service.with_jaeger_ui(jaeger);
    let page = tandem_router::http::page(Page::new(service.clone()), CancellationToken::new());
    let router = tandem_router::http::admin(service).merge(page);
    for (path, key, status) in [
        ("/", None, 200),
        ("/page/page.js", None, 200),
        ("/page/events", None, 401),
        ("/page/events", Some("Bearer sk-other-0123456789abcdef"), 401),
        ("/page/events", Some("Bearer sk-a-0123456789abcdefgh"), 200),
        ("/page/traces/last", None, 401),
        ("/page/traces/last", Some("Bearer sk-a-0123456789abcdefgh"), 404),
        ("/page/nothing.js", None, 404),
    ] {
        let request = key.into_iter().fold(Request::get(path), |request, key| request.header("authorization", key));
        let response = router.clone().call(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{path} {key:?}");
    }
}

#[tokio::test]
async fn with_keys_the_clients_port_tells_nothing_of_the_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    std::fs::write(&path, r#"{"keys": [{"name": "a", "key": "sk-a-0123456789abcdefgh"}]}"#).unwrap();
    let router = router_with(Keys::load(&path, clock::now()).unwrap());
    for path in ["/", "/metrics", "/page/events", "/page/page.js", "/debug/cluster", "/debug/anything"] {
        for key in [None, Some("Bearer sk-a-0123456789abcdefgh")] {
            let request = key.into_iter().fold(Request::get(path), |request, key| request.header("authorization", key));
            let (status, _, body) = send(&router, request.body(Body::empty()).unwrap()).await;
            // Who has no key is not told what there is to debug.
            let expected =
                if key.is_none() && path.starts_with("/debug") { (401, "API key") } else { (404, "--admin") };
            assert!(status == expected.0 && body.to_string().contains(expected.1), "{path}: {status} {body}");
        }
    }
    assert_eq!(get(&router, "/health/live").await.0, StatusCode::OK);
}
