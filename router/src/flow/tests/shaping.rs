//! Admission as whole requests see it: room on the nodes, order, priorities, keys and rates over both APIs.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use axum::body::{Body, Bytes};
use http::{Request, StatusCode};
use tonic::transport::server::TcpIncoming;
use tonic_types::StatusExt;
use tower::ServiceExt;

use super::*;
use crate::admission::keys::Keys;
use crate::api::Service;

/// Much patience with a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// 16 blocks of the decode node's 64.
fn quarter(request_id: &str) -> GenerationRequest {
    GenerationRequest { request_id: request_id.into(), max_tokens: 236, ..request() }
}

fn no_node_queue() -> Limits {
    Limits { node_queue: 0, ..Limits::default() }
}

#[tokio::test]
async fn what_has_no_room_on_a_node_waits_in_the_queue() {
    let mut cluster = Cluster::start(no_node_queue()).await;
    let mut running = Vec::new();
    for index in 0..4 {
        let stream = cluster.service.generate(quarter(&index.to_string())).unwrap();
        running.push((stream, cluster.legs().await));
    }
    let _fifth = cluster.service.generate(quarter("fifth")).unwrap();
    let _sixth = cluster.service.generate(quarter("sixth")).unwrap();
    let counts = cluster.service.counts();
    assert_eq!((counts.inflight, counts.queued), (4, 2));
    assert!(cluster.decode.is_left_alone() && cluster.prefill.is_left_alone());
    // One that ends makes room, long before the node's next report.
    let (stream, (_, _, decode, _)) = running.remove(0);
    drop(stream);
    decode.cancelled().await;
    let (_, spec, ..) = cluster.legs().await;
    assert_eq!((spec.request_id.as_str(), cluster.service.counts().queued), ("fifth", 1));
    // So does a report of blocks that requests share.
    let load = v1::Load { running: 4, free_blocks: 32, ..v1::Load::default() };
    cluster.service.membership().report(cluster.decode.node.session, &load, Instant::now());
    let (_, spec, ..) = cluster.legs().await;
    assert_eq!((spec.request_id.as_str(), cluster.service.counts().queued), ("sixth", 0));
}

#[tokio::test]
async fn a_prefill_node_gets_the_next_prompt_when_it_has_computed_one() {
    let mut cluster = Cluster::start(no_node_queue()).await;
    let long = |id: &str| GenerationRequest {
        request_id: id.into(),
        prompt_ids: vec![fakes::id('a'); 200].into(),
        max_tokens: 2,
        ..request()
    };
    let mut streams = Vec::new();
    let mut legs = Vec::new();
    for id in ["1", "2", "3"] {
        streams.push(cluster.service.generate(long(id)).unwrap());
        legs.push(cluster.legs().await);
    }
    streams.push(cluster.service.generate(long("4")).unwrap());
    assert_eq!(cluster.service.counts().queued, 1, "600 tokens are before it");
    let (prefill, ..) = &legs[0];
    prefill.send(first_token(fakes::id('x'), None)).await;
    assert_eq!(cluster.legs().await.1.request_id, "4");
}

#[tokio::test]
async fn urgent_requests_start_first_and_nodes_are_told() {
    let mut cluster = Cluster::start(Limits { max_inflight: 1, ..Limits::default() }).await;
    let with = |id: &str, priority| GenerationRequest { request_id: id.into(), priority, ..request() };
    let asked = [("first", 0), ("usual", 0), ("late", -2), ("urgent", 7)];
    let mut streams: std::collections::BTreeMap<_, _> =
        asked.into_iter().map(|(id, priority)| (id, cluster.service.generate(with(id, priority)).unwrap())).collect();
    let mut order = Vec::new();
    for _ in asked {
        let (_prefill, spec, decode, start) = cluster.legs().await;
        assert_eq!(start.spec.unwrap().priority, spec.priority);
        // Its client leaves, and its slot goes to the next one.
        drop(streams.remove(spec.request_id.as_str()));
        decode.cancelled().await;
        order.push((spec.request_id, spec.priority));
    }
    let order: Vec<(&str, i32)> = order.iter().map(|(id, priority)| (id.as_str(), *priority)).collect();
    assert_eq!(order, [("first", 0), ("urgent", 7), ("usual", 0), ("late", -2)]);
    let text = cluster.service.metrics_text(None).1;
    assert!(
        text.contains("tandem_queue_wait_seconds_count{role=\"router\",instance=\"router-test\",priority=\"-7\"} 1"),
        "{text}"
    );
}

/// Nodes reuse KV among requests with one salt alone.
#[tokio::test]
async fn a_tenant_s_requests_have_a_cache_salt_of_their_own() {
    let mut cluster = Cluster::with_tenants(Limits::default(), &["alice", "bobby"]).await;
    let mut salts = Vec::new();
    for (name, own) in [("alice", ""), ("bobby", ""), ("alice", "x"), ("bobby", "x"), ("alice", ""), ("alice", "x")] {
        let tenant = cluster.service.tenant(Some(&*format!("Bearer sk-{name}-0123456789abcdefgh")), None).unwrap();
        let asked = GenerationRequest { tenant, cache_salt: own.into(), ..request() };
        let _running = cluster.service.generate(asked).unwrap();
        let (_prefill, spec, _decode, start) = cluster.legs().await;
        assert_eq!(spec.cache_salt, start.spec.unwrap().cache_salt, "both nodes name the blocks alike");
        salts.push(spec.cache_salt);
    }
    assert_eq!(salts[0], salts[4], "one tenant, one salt");
    assert_eq!(salts[2], salts[5], "and one for each of its own");
    salts.truncate(4);
    salts.push(Vec::new());
    assert_eq!(salts.iter().collect::<std::collections::BTreeSet<_>>().len(), 5, "{salts:?}");

    // Names that clients give themselves prove nothing, and keep nothing apart.
    let mut open = Cluster::start(Limits::default()).await;
    for (name, own, salted) in [("default", "", false), ("team", "", false), ("team", "x", true)] {
        let asked = GenerationRequest { tenant: Tenant::named(name).unwrap(), cache_salt: own.into(), ..request() };
        let _running = open.service.generate(asked).unwrap();
        let (_prefill, spec, _decode, _start) = open.legs().await;
        assert_eq!(!spec.cache_salt.is_empty(), salted, "{name} {own:?}");
    }
    let long = GenerationRequest { cache_salt: "x".repeat(257).into(), ..request() };
    assert_eq!(open.service.generate(long).unwrap_err().param, Some("cache_salt"));
}

#[tokio::test]
async fn a_greedy_tenant_waits_behind_its_own_requests() {
    let limits = Limits { max_inflight: 1, ..Limits::default() };
    let mut cluster = Cluster::with_tenants(limits, &["greedy", "polite"]).await;
    let service = cluster.service.clone();
    let of = move |name: &str, id: String| GenerationRequest {
        request_id: id,
        tenant: service.tenant(Some(&*format!("Bearer sk-{name}-0123456789abcdefgh")), None).unwrap(),
        ..request()
    };
    let running = cluster.service.generate(of("greedy", "0".into())).unwrap();
    let _greedy: Vec<_> =
        (1..50).map(|index| cluster.service.generate(of("greedy", index.to_string())).unwrap()).collect();
    let _polite = cluster.service.generate(of("polite", "polite".into())).unwrap();
    let text = cluster.service.metrics_text(None).1;
    assert!(
        text.contains("tandem_queue_depth{role=\"router\",instance=\"router-test\",tenant=\"greedy\"} 49"),
        "{text}"
    );
    let _legs = cluster.legs().await;
    drop(running);
    assert_eq!(cluster.legs().await.1.request_id, "polite", "49 of the other one came before it");
}

#[tokio::test]
async fn shares_count_what_was_generated() {
    let limits = Limits { max_inflight: 1, ..Limits::default() };
    let mut cluster = Cluster::with_tenants(limits, &["alice", "bobby"]).await;
    let service = cluster.service.clone();
    let ask = |name: &str, index: u32| {
        let tenant = service.tenant(Some(&*format!("Bearer sk-{name}-0123456789abcdefgh")), None).unwrap();
        let request_id = format!("{name} {index}");
        service.generate(GenerationRequest { request_id, tenant, max_tokens: 100, ..request() }).unwrap()
    };
    let first = ask("alice", 0);
    let others = (1..4).flat_map(|index| [("alice", index), ("bobby", index)]);
    let others: Vec<GenerationStream> = others.map(|(name, index)| ask(name, index)).collect();
    let (mut order, mut open) = (Vec::new(), Vec::new());
    // As much is expected of each of them; alice's answers are one token, bobby's are forty.
    for _ in 0..7 {
        let (mut prefill, spec, decode, _) = cluster.legs().await;
        order.push(spec.request_id.clone());
        if spec.request_id.starts_with("alice") {
            prefill.send(first_token(id('a'), Some(Stop))).await;
        } else {
            hand_off(&mut prefill, &decode, 'b').await;
            for _ in 1..40 {
                decode.send(token(id('b'))).await;
            }
            decode.send(finished(Stop, vec![])).await;
        }
        open.push((prefill, decode));
    }
    assert_eq!(order, ["alice 0", "bobby 1", "alice 1", "alice 2", "alice 3", "bobby 2", "bobby 3"]);
    for stream in others.into_iter().chain([first]) {
        assert!(read(stream).await.2.is_ok());
    }
    let tokens = |tenant: &str, of: &str| {
        let series = format!(
            "tandem_tenant_tokens_total{{role=\"router\",instance=\"router-test\",tenant=\"{tenant}\",of=\"{of}\"}}"
        );
        replans::metric(&cluster.service, &[&series])
    };
    let all = |tenant| (tokens(tenant, "prompt"), tokens(tenant, "answer"));
    replans::until("all are counted", || all("bobby") == (60, 120)).await;
    assert_eq!(all("alice"), (80, 4));
}

#[tokio::test]
async fn nodes_hear_of_no_priorities_where_tenants_have_keys() {
    let limits = Limits { max_inflight: 1, ..Limits::default() };
    let mut cluster = Cluster::with_tenants(limits, &["alice", "bobby"]).await;
    let service = cluster.service.clone();
    let of = move |name: &str, id: &str, priority| GenerationRequest {
        request_id: id.into(),
        tenant: service.tenant(Some(&*format!("Bearer sk-{name}-0123456789abcdefgh")), None).unwrap(),
        priority,
        ..request()
    };
    let running = cluster.service.generate(of("alice", "first", 3)).unwrap();
    let (_prefill, spec, _decode, start) = cluster.legs().await;
    assert_eq!((spec.priority, start.spec.unwrap().priority), (0, 0));
    let _waiting =
        [("usual", 0), ("urgent", 7)].map(|(id, priority)| cluster.service.generate(of("bobby", id, priority)));
    drop(running);
    let (_prefill, spec, _decode, start) = cluster.legs().await;
    assert_eq!((spec.request_id.as_str(), spec.priority, start.spec.unwrap().priority), ("urgent", 0, 0));
}

#[tokio::test]
async fn a_stranger_s_name_does_not_switch_priorities_off() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let of = |name: &str, priority| GenerationRequest { tenant: Tenant::named(name).unwrap(), priority, ..request() };
    for (name, priority) in [("default", 3), ("a-stranger", 0), ("default", 5)] {
        let _running = cluster.service.generate(of(name, priority)).unwrap();
        let (_prefill, spec, _decode, start) = cluster.legs().await;
        assert_eq!((spec.priority, start.spec.unwrap().priority), (priority, priority), "{name}");
    }
}

#[tokio::test]
async fn first_tokens_that_would_come_too_late_are_refused_before_they_start() {
    let max_ttft = Some(Duration::from_millis(50));
    let mut cluster = Cluster::start(Limits { max_ttft, ..Limits::default() }).await;
    let of = |tokens, deadline| GenerationRequest {
        prompt_ids: vec![id('a'); tokens].into(),
        deadline,
        received: clock::now(),
        ..request()
    };
    let _unmeasured = cluster.service.generate(of(100, None)).unwrap();
    let _legs = cluster.legs().await;
    let step_cost = Some(v1::StepCost { base_ms: 10.0, token_ms: 1.0, ..v1::StepCost::default() });
    let load = v1::Load { free_blocks: 64, step_cost, ..v1::Load::default() };
    for node in [&cluster.prefill.node, &cluster.decode.node] {
        cluster.service.membership().report(node.session, &load, clock::now());
    }
    let refused = cluster.service.generate(of(100, None)).unwrap_err();
    assert!(refused.kind == ErrorKind::Overloaded && refused.message.contains("in 110 ms"), "{refused:?}");
    let soon = clock::now() + Duration::from_millis(20);
    let refused = cluster.service.generate(of(20, Some(soon))).unwrap_err();
    assert!(refused.kind == ErrorKind::Overloaded && refused.message.contains("deadline"), "{refused:?}");
    let text = cluster.service.metrics_text(None).1;
    for reason in ["objective", "deadline"] {
        let line = format!("tandem_refused_total{{role=\"router\",instance=\"router-test\",reason=\"{reason}\"}} 1");
        assert!(text.contains(&line), "{text}");
    }
    let _in_time = cluster.service.generate(of(20, None)).unwrap();
    let _legs = cluster.legs().await;
}

#[tokio::test]
async fn answers_of_one_call_start_together_or_not_at_all() {
    let mut cluster = Cluster::start(Limits { max_inflight: 2, max_queue: 1, ..Limits::default() }).await;
    let call = |n: u32| request().choices(n);
    let never = cluster.service.generate_all(call(4)).unwrap_err();
    assert_eq!((never.kind, never.param), (ErrorKind::InvalidArgument, Some("n")), "{never:?}");
    let _running = cluster.service.generate(request()).unwrap();
    let _legs = cluster.legs().await;
    let later = cluster.service.generate_all(call(3)).unwrap_err();
    assert_eq!(later.kind, ErrorKind::Overloaded, "{later:?}");
    let counts = cluster.service.counts();
    assert_eq!((counts.inflight, counts.queued), (1, 0));
    assert!(cluster.decode.is_left_alone() && cluster.prefill.is_left_alone());
    let _both = cluster.service.generate_all(call(2)).unwrap();
    assert_eq!(cluster.service.counts().queued, 1);
}

/// A router whose only key, of tenant `a`, is `sk-a-0123456789abcdefgh`: so many requests a minute.
async fn with_key(requests_per_minute: u32) -> (Service, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    std::fs::write(
        &path,
        format!(
            r#"{{"keys": [{{"name": "a", "key": "sk-a-0123456789abcdefgh", "requests_per_minute": {requests_per_minute}, "min_priority": -1}}]}}"#
        ),
    )
    .unwrap();
    let keys = Keys::load(&path, clock::now()).unwrap();
    (fakes::router_with_keys(Limits::default(), keys), dir)
}

/// A body that notes whether anybody read it, and never ends.
fn unread() -> (Body, Arc<AtomicBool>) {
    let read = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&read);
    let pieces = futures::stream::poll_fn(move |_| {
        noted.store(true, Ordering::SeqCst);
        Poll::<Option<Result<Bytes, std::io::Error>>>::Pending
    });
    (Body::from_stream(pieces), read)
}

/// The statuses over HTTP and over gRPC of a request whose body nobody may read.
async fn refused_unread(service: &Service, key: Option<&str>) -> (StatusCode, Option<tonic::Code>) {
    let with_key = |request: http::request::Builder| {
        key.iter().fold(request, |request, key| request.header("authorization", *key))
    };
    let (body, read) = unread();
    let request = with_key(Request::post("/v1/completions")).body(body).unwrap();
    let answer = tokio::time::timeout(SOON, crate::http::router(service.clone()).oneshot(request));
    let http = answer.await.expect("an answer without the body").unwrap().status();
    assert!(!read.load(Ordering::SeqCst), "HTTP: the body was read");
    let (body, read) = unread();
    let request = with_key(Request::post("/tandem.v1.Inference/Generate").header("content-type", "application/grpc"));
    let health = tonic_health::server::HealthReporter::new();
    let routes = crate::grpc::client_routes(service, health).unwrap();
    let request = request.body(tonic::body::Body::new(body)).unwrap();
    let answer = tokio::time::timeout(SOON, routes.into_axum_router().oneshot(request));
    let answer = answer.await.expect("an answer without the message").unwrap();
    assert!(!read.load(Ordering::SeqCst), "gRPC: the message was read");
    (http, tonic::Status::from_header_map(answer.headers()).map(|status| status.code()))
}

#[tokio::test]
async fn a_rate_that_is_used_up_refuses_before_the_body_is_read() {
    let (service, _dir) = with_key(1).await;
    let _nodes = (fakes::join_prefill(&service, "p0").await, fakes::join_decode(&service, "d0").await);
    let key = Some("Bearer sk-a-0123456789abcdefgh");
    let tenant = service.tenant(key, None).unwrap();
    let _running = service.generate(GenerationRequest { tenant, ..request() }).unwrap();
    let refused = (StatusCode::TOO_MANY_REQUESTS, Some(tonic::Code::ResourceExhausted));
    assert_eq!(refused_unread(&service, key).await, refused);
}

#[tokio::test]
async fn a_full_queue_refuses_before_the_body_is_read() {
    let mut cluster = Cluster::start(Limits { max_inflight: 1, max_queue: 1, ..Limits::default() }).await;
    let _running = cluster.service.generate(request()).unwrap();
    let _legs = cluster.legs().await;
    let _waiting = cluster.service.generate(request()).unwrap();
    let refused = (StatusCode::TOO_MANY_REQUESTS, Some(tonic::Code::ResourceExhausted));
    assert_eq!(refused_unread(&cluster.service, None).await, refused);
}

#[tokio::test]
async fn keys_and_rates_over_http() {
    let (service, _dir) = with_key(2).await;
    let _nodes = (fakes::join_prefill(&service, "p0").await, fakes::join_decode(&service, "d0").await);
    let router = crate::http::router(service.clone());
    let ask = |path: &'static str, key: Option<&'static str>, body: &'static str| {
        let request = Request::post(path).header("x-tandem-tenant", "a");
        let request = key.into_iter().fold(request, |request, key| request.header("authorization", key));
        let response = router.clone().oneshot(request.body(Body::from(body)).unwrap());
        async move {
            let (parts, body) = response.await.unwrap().into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            (parts.status, parts.headers, serde_json::from_slice::<Value>(&body).unwrap())
        }
    };
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        for key in [None, Some("Bearer sk-b-0123456789abcdefgh"), Some("sk-a-0123456789abcdefgh")] {
            let (status, headers, body) = ask(path, key, "{").await;
            assert_eq!((status, &headers["www-authenticate"]), (StatusCode::UNAUTHORIZED, &"Bearer".parse().unwrap()));
            assert_eq!((&body["error"]["code"], &body["error"]["param"]), (&"invalid_api_key".into(), &Value::Null));
            assert!(headers.contains_key("x-request-id"));
        }
    }
    for (path, status) in [("/health", 200), ("/metrics", 404), ("/v1/models", 401), ("/debug/cluster", 401)] {
        let response = router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{path}");
    }
    let key = Some("Bearer sk-a-0123456789abcdefgh");
    assert_eq!(ask("/tokenize", key, r#"{"prompt": "a"}"#).await.0, StatusCode::OK);
    let (status, _, body) = ask("/v1/completions", key, r#"{"prompt": "a", "max_tokens": 4, "priority": -2}"#).await;
    assert_eq!((status, &body["error"]["param"]), (StatusCode::BAD_REQUEST, &"priority".into()), "{body}");
    // The second request of this minute; it runs on. The first one was tokenized.
    let tenant = service.tenant(key, None).unwrap();
    let _running = service.generate(GenerationRequest { tenant, ..request() }).unwrap();
    let (status, headers, body) = ask("/v1/completions", key, r#"{"prompt": "a", "max_tokens": 4}"#).await;
    assert_eq!((status, &body["error"]["type"]), (StatusCode::TOO_MANY_REQUESTS, &"rate_limit_error".into()));
    let seconds: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((20..=30).contains(&seconds), "{seconds}");
    for path in ["/tokenize", "/detokenize"] {
        assert_eq!(
            ask(path, key, r#"{"prompt": "a"}"#).await.0,
            StatusCode::TOO_MANY_REQUESTS,
            "{path} is a request, too"
        );
    }
    let text = service.metrics_text(None).1;
    assert!(
        text.contains("tandem_refused_total{role=\"router\",instance=\"router-test\",reason=\"rate_limit\"} 3"),
        "{text}"
    );
}

/// A gRPC server of this router's.
async fn over_grpc(service: &Service) -> v1::inference_client::InferenceClient<tonic::transport::Channel> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let routes = crate::grpc::routes(service, tonic_health::server::HealthReporter::new()).unwrap();
    tokio::spawn(
        tonic::transport::Server::builder().add_routes(routes).serve_with_incoming(TcpIncoming::from(listener)),
    );
    v1::inference_client::InferenceClient::connect(address).await.unwrap()
}

#[tokio::test]
async fn both_apis_count_priorities_alike() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let mut client = over_grpc(&cluster.service).await;
    let input = v1::generate_request::Input::TokenIds(v1::TokenIds { ids: vec![id('a'); 3] });
    let message = v1::GenerateRequest { input: Some(input), max_tokens: Some(4), priority: -7, ..Default::default() };
    let grpc = tokio::spawn(async move { client.generate(message).await.map(|_| ()) });
    let (_prefill, of_grpc, _decode, _start) = cluster.legs().await;
    let router = crate::http::router(cluster.service.clone());
    let body = Body::from(r#"{"prompt": "a", "max_tokens": 4, "priority": -7, "stream": true}"#);
    let request = Request::post("/v1/completions").header("content-type", "application/json").body(body).unwrap();
    let http = tokio::spawn(async move { router.oneshot(request).await.map(|_| ()) });
    let (_prefill, of_http, _decode, _start) = cluster.legs().await;
    assert_eq!((of_grpc.priority, of_http.priority), (7, 7), "nodes count the other way round");
    grpc.abort();
    http.abort();
}

#[tokio::test]
async fn keys_and_rates_over_grpc() {
    let (service, _dir) = with_key(1).await;
    let _nodes = (fakes::join_prefill(&service, "p0").await, fakes::join_decode(&service, "d0").await);
    let client = over_grpc(&service).await;
    let ask = |key: Option<&str>, priority| {
        let input = v1::generate_request::Input::TokenIds(v1::TokenIds { ids: vec![id('a'); 3] });
        let message = v1::GenerateRequest { input: Some(input), max_tokens: Some(4), priority, ..Default::default() };
        let mut request = tonic::Request::new(message);
        key.into_iter().for_each(|key| drop(request.metadata_mut().insert("authorization", key.parse().unwrap())));
        let mut client = client.clone();
        async move { client.generate(request).await }
    };
    for key in [None, Some("Bearer wrong-key")] {
        assert_eq!(ask(key, 0).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    }
    let key = Some("Bearer sk-a-0123456789abcdefgh");
    for beyond in [-2, 11, i32::MIN] {
        let refused = ask(key, beyond).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("must be -1 to 10 for tenant \"a\", lower ones first"), "{refused}");
    }
    let _running = ask(key, -1).await.unwrap();
    let refused = ask(key, 0).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    let delay = refused.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert!(delay > Duration::from_secs(50) && delay <= Duration::from_secs(60), "{delay:?}");
}
