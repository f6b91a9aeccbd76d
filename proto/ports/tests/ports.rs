//! What silent, slow and many clients can do to a port: not much.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::routing::get;
use tandem_ports::{CLIENT_STREAMS, KeepAlive, Limits, NODE_STREAMS, Places, Port, serve_grpc, serve_http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

const SILENCE: Duration = Duration::from_millis(300);
/// Much patience with a busy machine.
const BOUND: Duration = Duration::from_secs(10);
const PIECES: usize = 4;

async fn bind(connections: usize) -> (Port, SocketAddr) {
    bind_within(Limits { connections, silence: SILENCE }).await
}

async fn bind_within(limits: Limits) -> (Port, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    (Port::new(listener, limits), address)
}

/// `/` answers at once; `/slow` sends pieces further apart than a client may be silent; `/endless` does not end.
async fn http(connections: usize) -> (SocketAddr, CancellationToken, JoinHandle<()>) {
    let ((port, address), stop) = (bind(connections).await, CancellationToken::new());
    (address, stop.clone(), tokio::spawn(serve_http(port, app(), stop)))
}

fn app() -> axum::Router {
    let pieces = || async {
        Body::from_stream(futures::stream::unfold(0, |sent| async move {
            tokio::time::sleep(SILENCE.mul_f32(1.5)).await;
            (sent < PIECES).then_some((Ok::<_, Infallible>("piece"), sent + 1))
        }))
    };
    let endless =
        || async { Body::from_stream(futures::stream::repeat_with(|| Ok::<_, Infallible>(vec![0; 1 << 16]))) };
    axum::Router::new().route("/", get(|| async { "well" })).route("/slow", get(pieces)).route("/endless", get(endless))
}

async fn connect(address: SocketAddr, bytes: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.write_all(bytes.as_bytes()).await.expect("write");
    stream
}

/// Everything until the other end closes.
async fn rest(mut stream: TcpStream) -> String {
    let mut said = Vec::new();
    let read = tokio::time::timeout(BOUND, stream.read_to_end(&mut said)).await.expect("not closed");
    // A reset is an end too.
    let _ = read;
    String::from_utf8_lossy(&said).into_owned()
}

fn request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn silence_ends_a_connection_wherever_it_begins() {
    let (address, ..) = http(8).await;
    for (said, answers) in [("", 0), ("GET / HT", 0), ("GET / HTTP/1.1\r\nhost: test\r\n\r\n", 1)] {
        let start = Instant::now();
        let answer = rest(connect(address, said).await).await;
        assert_eq!(answer.matches("200 OK").count(), answers, "{said:?}: {answer}");
        assert!(start.elapsed() >= SILENCE, "{said:?}");
    }
}

#[tokio::test]
async fn silence_within_http2_s_preface_ends_a_connection() {
    let (address, ..) = http(8).await;
    for said in ["P", "PRI * HTTP/2.0\r\n\r\nSM"] {
        let start = Instant::now();
        assert_eq!(rest(connect(address, said).await).await, "", "{said:?}");
        assert!(start.elapsed() >= SILENCE, "{said:?}");
    }
    // Not HTTP/2's after all.
    let answer = rest(connect(address, "PRI * HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await).await;
    assert!(answer.starts_with("HTTP/1.1 404") || answer.starts_with("HTTP/1.1 405"), "{answer}");
}

#[tokio::test]
async fn http2_answers_a_request_while_another_one_of_its_connection_is_slow() {
    let (address, stop, server) = http(8).await;
    let stream = TcpStream::connect(address).await.expect("connect");
    let (mut client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    let mut ask = |path: &str| {
        let request = http::Request::get(format!("http://test{path}")).body(()).expect("a request");
        client.send_request(request, true).expect("sent").0
    };
    let (slow, quick) = (ask("/slow"), ask("/"));
    let slow = tokio::spawn(body(slow));
    assert_eq!(body(quick).await, "well");
    assert!(!slow.is_finished());
    let call = http::Request::post("http://test/x").header("content-type", "application/grpc").body(());
    let call = client.send_request(call.expect("a request"), true).expect("sent").0.await.expect("an answer");
    assert_eq!((call.status().as_u16(), &call.headers()["grpc-status"]), (200, &http::HeaderValue::from_static("12")));
    // The end waits for it.
    stop.cancel();
    assert_eq!(slow.await.expect("no panic").matches("piece").count(), PIECES);
    drop(client);
    tokio::time::timeout(BOUND, connection).await.expect("closed").expect("no panic").expect("in order");
    tokio::time::timeout(BOUND, server).await.expect("ended").expect("no panic");
}

async fn body(response: h2::client::ResponseFuture) -> String {
    let mut body = response.await.expect("an answer").into_body();
    let mut said = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.expect("data");
        body.flow_control().release_capacity(data.len()).expect("capacity");
        said.extend_from_slice(&data);
    }
    String::from_utf8(said).expect("text")
}

#[tokio::test]
async fn a_slow_answer_is_not_silence_of_its_client() {
    let (address, ..) = http(8).await;
    let answer = rest(connect(address, &request("/slow")).await).await;
    assert_eq!(answer.matches("piece").count(), PIECES, "{answer}");
}

const PREFACE_AND_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Says `first`, and then `more` again and again, reads nothing, and waits until that is a failed connection.
async fn fails(places: &Places, address: SocketAddr, first: &[u8], more: &[u8]) {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.write_all(first).await.expect("write");
    let begun = Instant::now();
    while places.occupancy().failed == 0 {
        assert!(begun.elapsed() < BOUND, "it is still there");
        // Until no more is read of it, either.
        let _ = tokio::time::timeout(SILENCE, stream.write_all(more)).await;
        tokio::time::sleep(SILENCE / 10).await;
    }
    assert!(begun.elapsed() >= 2 * SILENCE);
    assert_eq!(places.occupancy().open, 0);
}

#[tokio::test]
async fn who_takes_nothing_of_what_it_is_sent_is_ended_and_counted() {
    let pings = [0, 0, 8, 6, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7].repeat(4096);
    let endless = b"GET /endless HTTP/1.1\r\nhost: test\r\n\r\n";
    for (first, more) in [(&endless[..], &[][..]), (PREFACE_AND_SETTINGS, &pings)] {
        let (port, address) = bind(8).await;
        let places = port.places();
        tokio::spawn(serve_http(port, app(), CancellationToken::new()));
        fails(&places, address, first, more).await;
    }
    let (port, address) = bind(8).await;
    let places = port.places();
    let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
    tokio::spawn(serve_grpc(port, Routes::default(), CLIENT_STREAMS, keep_alive, CancellationToken::new()));
    fails(&places, address, PREFACE_AND_SETTINGS, &pings).await;
}

#[tokio::test]
async fn who_reads_slowly_stays() {
    // The server's patience is twice that: less than all the reads take. One of them takes a twentieth of it, so that a
    // busy machine does not use it up.
    let silence = Duration::from_secs(2);
    let (port, address) = bind_within(Limits { connections: 8, silence }).await;
    tokio::spawn(serve_http(port, app(), CancellationToken::new()));
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    // So that the system tells soon of each part that was read.
    socket.set_recv_buffer_size(64 << 10).expect("small");
    let mut stream = socket.connect(address).await.expect("connect");
    stream.write_all(b"GET /endless HTTP/1.1\r\nhost: test\r\n\r\n").await.expect("write");
    for _ in 0..30 {
        tokio::time::sleep(silence / 10).await;
        stream.read_exact(&mut [0; 64 << 10]).await.expect("it goes on");
    }
}

#[tokio::test]
async fn a_port_full_of_silent_connections_serves_the_next_client_and_the_present_ones() {
    let (address, ..) = http(4).await;
    let slow = tokio::spawn(rest(connect(address, &request("/slow")).await));
    tokio::time::sleep(SILENCE / 3).await;
    let mut silent = Vec::new();
    for _ in 0..12 {
        silent.push(TcpStream::connect(address).await.expect("the system's queue"));
    }
    assert!(rest(connect(address, &request("/")).await).await.contains("well"));
    assert_eq!(slow.await.expect("no panic").matches("piece").count(), PIECES);
}

#[tokio::test]
async fn the_end_waits_for_answers_and_not_for_the_idle() {
    let (address, stop, served) = http(8).await;
    let idle = connect(address, "GET / HTTP/1.1\r\nhost: test\r\n\r\n").await;
    let slow = tokio::spawn(rest(connect(address, &request("/slow")).await));
    tokio::time::sleep(SILENCE / 3).await;
    stop.cancel();
    tokio::time::timeout(BOUND, served).await.expect("bounded").expect("no panic");
    assert_eq!(slow.await.expect("no panic").matches("piece").count(), PIECES);
    assert!(rest(idle).await.contains("well"));
    assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn grpc_connections_begin_with_the_preface_in_time() {
    let (port, address) = bind(2).await;
    let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
    tokio::spawn(serve_grpc(port, Routes::default(), CLIENT_STREAMS, keep_alive, CancellationToken::new()));
    let mut all = Vec::new();
    for said in ["", "PRI * HTTP/2.0", "", "PRI * HTTP/2.0"] {
        let stream = connect(address, said).await;
        all.push(tokio::spawn(rest(stream)));
    }
    for closed in all {
        closed.await.expect("closed in time");
    }
    // Whoever greets stays, however long it is quiet.
    let mut stream = connect(address, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("settings");
    let quiet = tokio::time::timeout(SILENCE * 3, async { while stream.read_u8().await.is_ok() {} });
    assert!(quiet.await.is_err(), "it was closed");
}

/// A node's port on a thread of its own, and what runs there.
async fn node() -> (SocketAddr, tokio::runtime::Handle) {
    let (tell, told) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (port, address) = bind(8).await;
            tell.send((address, tokio::runtime::Handle::current())).expect("the test runs");
            let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
            serve_grpc(port, Routes::from(app()), NODE_STREAMS, keep_alive, CancellationToken::new()).await
        })
    });
    told.await.expect("it listens")
}

#[tokio::test]
async fn calls_given_up_while_a_node_stands_still_end_no_other() {
    let (address, node) = node().await;
    let stream = TcpStream::connect(address).await.expect("connect");
    let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let mut client = client.ready().await.expect("open");
    let get = |path| http::Request::get(format!("http://node{path}")).body(()).expect("a request");
    let (running, _) = client.send_request(get("/slow"), true).expect("sent");
    let mut running = running.await.expect("answered").into_body();

    let (go_on, still) = std::sync::mpsc::channel::<()>();
    node.spawn(async move { still.recv() });
    for _ in 0..1000 {
        let (answer, mut call) = client.send_request(get("/"), true).expect("sent");
        // It is on its way before it is given up.
        tokio::task::yield_now().await;
        call.send_reset(h2::Reason::CANCEL);
        drop(answer);
    }
    tokio::time::sleep(SILENCE).await;
    go_on.send(()).expect("the node stood still");

    let mut said = Vec::new();
    while let Some(piece) = running.data().await {
        said.extend_from_slice(&piece.expect("the call that was not given up lives"));
    }
    assert_eq!(said, "piece".repeat(PIECES).as_bytes());
}
