//! Who causes many errors is served less often; over real sockets. Times are lower bounds.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use h2::client::{ResponseFuture, SendRequest};
use tandem_ports::{CLIENT_STREAMS, KeepAlive, Limits, Places, Port, serve_grpc, serve_http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// Much patience with a busy machine.
const BOUND: Duration = Duration::from_secs(20);
const ERRORS: usize = 200;
/// One thread serves here, which answers two errors a millisecond after the first 40.
const THEY_TAKE: Duration = Duration::from_millis((200 - 40) / 2);

async fn bind(connections: usize) -> (Port, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    (Port::new(listener, Limits { connections, silence: BOUND }), address)
}

/// `/stays` is not answered; `/grpc` is gRPC's way to refuse.
fn routes() -> Router {
    let refused = || async { [("grpc-status", "3")] };
    Router::new()
        .route("/", get(|| async { "well" }))
        .route("/stays", get(std::future::pending::<String>))
        .route("/grpc", get(refused))
}

fn http(port: Port) -> Places {
    let places = port.places();
    tokio::spawn(serve_http(port, routes(), CancellationToken::new()));
    places
}

fn request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

/// So many requests over HTTP/1.1 in one write, each answered with that status.
async fn ask(stream: &mut TcpStream, path: &str, times: usize, status: &str) {
    stream.write_all(request(path).repeat(times).as_bytes()).await.expect("written");
    let mut said = String::new();
    while said.matches("HTTP/1.1 ").count() < times
        || !said.ends_with(if status == "200" { "well" } else { "\r\n\r\n" })
    {
        let mut piece = [0; 4096];
        let read = tokio::time::timeout(BOUND, stream.read(&mut piece)).await.expect("in time").expect("open");
        assert_ne!(read, 0, "{said}");
        said += str::from_utf8(&piece[..read]).expect("text");
    }
    assert_eq!(said.matches(&format!("HTTP/1.1 {status}")).count(), times, "{said}");
}

#[tokio::test]
async fn who_causes_many_errors_waits_before_it_is_served_again() {
    let (port, address) = bind(8).await;
    let places = http(port.throttling_errors());
    let mut client = TcpStream::connect(address).await.expect("connect");
    for _ in 0..3 {
        ask(&mut client, "/", ERRORS, "200").await;
    }
    assert_eq!(places.occupancy().throttled, 0, "nothing was wrong");
    let start = Instant::now();
    ask(&mut client, "/nonsense", ERRORS, "404").await;
    ask(&mut client, "/", 1, "200").await;
    assert!(start.elapsed() >= THEY_TAKE, "{:?}", start.elapsed());
    assert!(places.occupancy().throttled > 0);
}

#[tokio::test]
async fn only_ports_that_say_so_are_throttled() {
    let (port, address) = bind(8).await;
    let places = http(port);
    let mut client = TcpStream::connect(address).await.expect("connect");
    ask(&mut client, "/nonsense", ERRORS, "404").await;
    ask(&mut client, "/", 1, "200").await;
    assert_eq!(places.occupancy().throttled, 0);
}

#[tokio::test]
async fn who_waits_for_its_errors_makes_room_for_others() {
    let (port, address) = bind(1).await;
    let places = http(port.throttling_errors());
    // All in one write.
    let mut waits = TcpStream::connect(address).await.expect("connect");
    waits.write_all(request("/nonsense").repeat(10 * ERRORS).as_bytes()).await.expect("written");
    let start = Instant::now();
    while places.occupancy().throttled == 0 {
        assert!(start.elapsed() < BOUND);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    ask(&mut TcpStream::connect(address).await.expect("connect"), "/", 1, "200").await;
    assert_eq!(places.occupancy().evicted, 1);
    // It ends with a reset where not all was read.
    let _ = tokio::time::timeout(BOUND, waits.read_to_end(&mut Vec::new())).await.expect("it was closed");
}

type Client = SendRequest<Bytes>;

async fn send(client: Client, path: &str) -> (Client, ResponseFuture) {
    let mut client = tokio::time::timeout(BOUND, client.ready()).await.expect("in time").expect("open");
    let request = http::Request::get(format!("http://test{path}")).body(()).expect("a request");
    let answer = client.send_request(request, true).expect("sent").0;
    (client, answer)
}

async fn refused(mut client: Client) -> Client {
    for _ in 0..ERRORS {
        let (again, answer) = send(client, "/grpc").await;
        let answer = tokio::time::timeout(BOUND, answer).await.expect("in time").expect("an answer");
        assert_eq!((answer.status().as_u16(), answer.headers()["grpc-status"].as_bytes()), (200, &b"3"[..]));
        client = again;
    }
    client
}

#[tokio::test]
async fn a_connection_with_a_call_under_way_is_not_throttled() {
    let (port, address) = bind(8).await;
    let port = port.throttling_errors();
    let places = port.places();
    let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
    tokio::spawn(serve_grpc(port, Routes::from(routes()), CLIENT_STREAMS, keep_alive, CancellationToken::new()));
    let stream = TcpStream::connect(address).await.expect("connect");
    let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let (client, under_way) = send(client, "/stays").await;
    let client = refused(client).await;
    assert_eq!(places.occupancy().throttled, 0, "another client's, behind the same proxy");
    drop(under_way);
    let start = Instant::now();
    // After the first one its connection has nothing under way.
    refused(client).await;
    assert!(places.occupancy().throttled > 0);
    assert!(start.elapsed() >= THEY_TAKE, "{:?}", start.elapsed());
}
