//! The end of a router in the middle of answers: every client gets a whole reply that says so, at the edges it asked
//! at.
use std::net::SocketAddr;

use tandem_ports::{KeepAlive, Limits as PortLimits, Port, serve_grpc, serve_http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use v1::generate_request::Input;
use v1::inference_client::InferenceClient;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

/// Both ports of a router, and what ends them.
struct Edges {
    http: SocketAddr,
    grpc: SocketAddr,
    stop: CancellationToken,
}

async fn edges(cluster: &Cluster) -> Edges {
    let bind = async || {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (Port::new(listener, PortLimits::default()), address)
    };
    let ((http_port, http), (grpc_port, grpc)) = (bind().await, bind().await);
    let stop = CancellationToken::new();
    tokio::spawn(serve_http(http_port, crate::http::router(cluster.service.clone()), stop.clone()));
    let health = tonic_health::server::HealthReporter::new();
    let routes = crate::grpc::client_routes(&cluster.service, health).unwrap();
    let keep_alive = KeepAlive { interval: MINUTE, timeout: MINUTE };
    tokio::spawn(serve_grpc(grpc_port, routes, tandem_ports::CLIENT_STREAMS, keep_alive, stop.clone()));
    Edges { http, grpc, stop }
}

async fn ask(http: SocketAddr, stream: bool) -> TcpStream {
    let body = serde_json::json!({"prompt": vec![id('a'); 20], "max_tokens": 8, "stream": stream}).to_string();
    let mut client = TcpStream::connect(http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    client.write_all(request.as_bytes()).await.unwrap();
    client
}

async fn rest(client: &mut TcpStream) -> String {
    let mut said = String::new();
    tokio::time::timeout(MINUTE, client.read_to_string(&mut said)).await.expect("closed").unwrap();
    said
}

#[tokio::test]
async fn running_answers_end_with_a_word_and_without_a_retry() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let edges = edges(&cluster).await;

    // Three over HTTP: a stream with a token, one without, and a whole answer. Each has its nodes.
    let mut streamed = ask(edges.http, true).await;
    let (mut prefill, _, decode, _) = cluster.legs().await;
    hand_off(&mut prefill, &decode, 'H').await;
    let mut said = String::new();
    while !said.contains("\"text\":\"H\"") {
        said.push(char::from(streamed.read_u8().await.unwrap()));
    }
    let mut silent = ask(edges.http, true).await;
    let _silent_legs = cluster.legs().await;
    let mut whole = ask(edges.http, false).await;
    let (mut whole_prefill, _, whole_decode, _) = cluster.legs().await;
    hand_off(&mut whole_prefill, &whole_decode, 'H').await;
    // And one over gRPC.
    let mut client = InferenceClient::connect(format!("http://{}", edges.grpc)).await.unwrap();
    let input = Some(Input::TokenIds(v1::TokenIds { ids: vec![id('a'); 20] }));
    let asked = v1::GenerateRequest { input, max_tokens: Some(8), ..v1::GenerateRequest::default() };
    let (answer, (mut grpc_prefill, _, grpc_decode, _)) = tokio::join!(client.generate(asked), cluster.legs());
    hand_off(&mut grpc_prefill, &grpc_decode, 'H').await;
    let mut messages = answer.unwrap().into_inner();
    assert!(messages.message().await.unwrap().unwrap().event.is_some());

    // As the process does it: the grace is over, then the words, then nodes and ports go.
    cluster.service.drain(Duration::ZERO).await;
    let start = Instant::now();
    cluster.service.end(MINUTE).await;
    assert_eq!(cluster.service.counts(), crate::admission::Counts::default(), "{:?}", start.elapsed());
    cluster.service.membership().close();
    edges.stop.cancel();

    let error = r#""message":"the router is shutting down""#;
    let streamed = rest(&mut streamed).await;
    assert!(streamed.contains("data: {\"error\"") && streamed.contains(error), "{streamed}");
    assert!(
        !streamed.contains("[DONE]") && streamed.ends_with("\r\n0\r\n\r\n"),
        "whole, without a good end: {streamed}"
    );
    for client in [&mut silent, &mut whole] {
        let said = rest(client).await;
        assert!(said.starts_with("HTTP/1.1 503 ") && said.contains(error), "{said}");
    }
    let status = messages.message().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (tonic::Code::Unavailable, "the router is shutting down"));

    for call in [decode, whole_decode, grpc_decode] {
        call.cancelled().await;
    }
    assert!(cluster.prefill.is_left_alone() && cluster.decode.is_left_alone(), "another attempt was made");
    let metrics = cluster.service.metrics_text(None).1;
    let replanned = metrics.lines().any(|line| line.starts_with("tandem_replans_total{") && !line.ends_with(" 0"));
    assert!(metrics.contains("outcome=\"unavailable\"} 4") && !replanned, "{metrics}");
}

#[tokio::test]
async fn who_waits_in_the_queue_is_told_too() {
    let mut cluster = Cluster::start(Limits { max_inflight: 1, ..Limits::default() }).await;
    let running = cluster.service.generate(request()).unwrap();
    let _legs = cluster.legs().await;
    let waiting = cluster.service.generate(request()).unwrap();
    cluster.service.end(MINUTE).await;
    let late = cluster.service.generate(request()).unwrap_err();
    for error in [read(running).await.2.unwrap_err(), read(waiting).await.2.unwrap_err(), late] {
        assert_eq!((error.kind, &*error.message), (ErrorKind::Unavailable, ENDING));
    }
}
