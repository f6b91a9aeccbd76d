//! A port whose places are taken: who goes, who stays, who is refused; over real sockets.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use futures::stream::unfold;
use tandem_ports::{
    CLIENT_STREAMS, KeepAlive, Limits, Occupancy, Places, Port, raise_descriptor_limit, serve_grpc, serve_http,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// Nothing here ends by silence.
const SILENCE: Duration = Duration::from_secs(60);
/// Much patience with a busy machine, and less than silence.
const BOUND: Duration = Duration::from_secs(20);

/// What the routes of a test wait for.
type Gate = watch::Sender<bool>;

/// A port with `/` and `/busy`, whose answer begins at once and ends when the gate opens.
struct Served {
    address: SocketAddr,
    places: Places,
    gate: Gate,
}

async fn bind(connections: usize) -> (Port, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    (Port::new(listener, Limits { connections, silence: SILENCE }), address)
}

fn routes(gate: &Gate) -> axum::Router {
    let gate = gate.subscribe();
    let busy = move || async move {
        Body::from_stream(unfold((gate, 0), |(mut gate, sent)| async move {
            if sent == 1 {
                gate.wait_for(|open| *open).await.ok()?;
            }
            (sent < 2).then_some((Ok::<_, Infallible>("piece"), (gate, sent + 1)))
        }))
    };
    let whole = |body: Bytes| async move { format!("well {}", body.len()) };
    axum::Router::new()
        .route("/", get(|| async { "well" }))
        .route("/busy", get(busy.clone()).post(busy))
        .route("/whole", post(whole))
}

async fn http(connections: usize) -> Served {
    let ((port, address), gate) = (bind(connections).await, Gate::new(false));
    let places = port.places();
    tokio::spawn(serve_http(port, routes(&gate), CancellationToken::new()));
    Served { address, places, gate }
}

async fn grpc(connections: usize) -> Served {
    let ((port, address), gate) = (bind(connections).await, Gate::new(false));
    let places = port.places();
    let keep_alive = KeepAlive { interval: SILENCE, timeout: SILENCE };
    tokio::spawn(serve_grpc(port, Routes::from(routes(&gate)), CLIENT_STREAMS, keep_alive, CancellationToken::new()));
    Served { address, places, gate }
}

async fn connect(address: SocketAddr, bytes: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.write_all(bytes.as_bytes()).await.expect("write");
    stream
}

/// Everything until the other end closes.
async fn rest(mut stream: TcpStream) -> String {
    let mut said = Vec::new();
    // A reset is an end too.
    let _ = tokio::time::timeout(BOUND, stream.read_to_end(&mut said)).await.expect("closed in time");
    String::from_utf8(said).expect("text")
}

/// Until `said` contains `what`.
async fn heard(stream: &mut TcpStream, what: &str) {
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains(what) {
        let byte = tokio::time::timeout(BOUND, stream.read_u8()).await.expect("in time").expect("not closed");
        said.push(byte);
    }
}

fn request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
}

fn kept_alive(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

async fn until(places: &Places, what: impl Fn(Occupancy) -> bool) -> Occupancy {
    let start = Instant::now();
    loop {
        let now = places.occupancy();
        if what(now) {
            return now;
        }
        assert!(start.elapsed() < BOUND, "{now:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn thousands_of_half_open_connections_do_not_keep_a_polite_client_out() {
    const PLACES: usize = 256;
    let half_open = usize::try_from(raise_descriptor_limit() / 2).expect("few").min(5000);
    let served = http(PLACES).await;
    // Some say nothing, some a part of a head.
    let silent = |number: usize| connect(served.address, ["", "GET / HT"][number % 2]);
    let mut held = Vec::new();
    for number in 0..half_open {
        held.push(silent(number).await);
    }
    let evicted = half_open - PLACES;
    assert_eq!(until(&served.places, |now| now.evicted as usize >= evicted).await.open, PLACES);
    // They go on coming, a thousand a second.
    let coming = async {
        for number in 0.. {
            held.push(silent(number).await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let asking = async {
        for question in 0..50 {
            let answer = rest(connect(served.address, &request("/")).await).await;
            assert!(answer.ends_with("well"), "question {question}: {answer:?}");
        }
    };
    tokio::select! {
        () = coming => {}
        () = asking => {}
    }
    assert_eq!(served.places.occupancy().refused, 0);
}

#[tokio::test]
async fn a_connection_whose_request_is_being_answered_is_never_evicted() {
    let served = http(4).await;
    let mut busy = JoinSet::new();
    for _ in 0..2 {
        let mut stream = connect(served.address, &request("/busy")).await;
        heard(&mut stream, "piece").await;
        busy.spawn(rest(stream));
    }
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(connect(served.address, "GET / HT").await);
    }
    until(&served.places, |now| now.evicted >= 38).await;
    served.gate.send_replace(true);
    while let Some(answer) = busy.join_next().await {
        assert_eq!(answer.expect("no panic").matches("piece").count(), 1, "the second one");
    }
}

const UPLOAD: &str =
    "POST /whole HTTP/1.1\r\nhost: test\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n";

/// A request whose head was read and whose body is still to come.
async fn uploading(address: SocketAddr) -> TcpStream {
    let mut stream = connect(address, UPLOAD).await;
    heard(&mut stream, "100 Continue\r\n\r\n").await;
    stream
}

#[tokio::test]
async fn an_upload_is_served_where_there_is_room() {
    let served = http(4).await;
    let mut sending = uploading(served.address).await;
    sending.write_all(b"body").await.expect("open");
    assert!(rest(sending).await.ends_with("well 4"));
}

#[tokio::test]
async fn heads_whose_bodies_never_come_do_not_keep_a_polite_client_out() {
    let served = http(8).await;
    let mut held = Vec::new();
    for _ in 0..40 {
        held.push(uploading(served.address).await);
    }
    assert!(rest(connect(served.address, &request("/")).await).await.ends_with("well"));
    assert_eq!(served.places.occupancy().refused, 0);
    let evicted = rest(held.remove(0)).await;
    assert!(!evicted.contains("well"), "the oldest upload ends unserved: {evicted:?}");
}

#[tokio::test]
async fn a_client_that_sends_a_body_nobody_reads_still_gets_its_answer() {
    const BODY: usize = 8 << 20;
    let served = http(4).await;
    let head = format!("POST /busy HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {BODY}\r\n\r\n");
    served.gate.send_replace(true);
    let mut stream = connect(served.address, &head).await;
    // All of it is sent before the answer is read, as simple clients do.
    stream.write_all(&vec![b'x'; BODY]).await.expect("not reset while sending");
    let answer = rest(stream).await;
    assert_eq!(answer.matches("piece").count(), 2, "{answer:?}");
}

#[tokio::test]
async fn newcomers_at_a_busy_port_are_refused_and_counted() {
    let served = http(2).await;
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(served.address, &kept_alive("/busy")).await;
        heard(&mut stream, "piece").await;
        busy.push(stream);
    }
    for _ in 0..3 {
        assert_eq!(rest(TcpStream::connect(served.address).await.expect("accepted by the system")).await, "");
    }
    assert_eq!(
        served.places.occupancy(),
        Occupancy { open: 2, evicted: 0, refused: 3, failed: 0, ..Occupancy::default() }
    );
    // Their answers end, and one of them makes room.
    served.gate.send_replace(true);
    for stream in &mut busy {
        heard(stream, "0\r\n\r\n").await;
    }
    assert!(rest(connect(served.address, &request("/")).await).await.ends_with("well"));
    assert_eq!(until(&served.places, |now| now.evicted == 1).await.refused, 3);
}

#[tokio::test]
async fn the_connection_that_was_idle_longest_makes_room() {
    let served = http(3).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        let mut stream = connect(served.address, &kept_alive("/")).await;
        heard(&mut stream, "well").await;
        idle.push(stream);
    }
    // The first one asks again, so that the second one is idle longest.
    idle[0].write_all(kept_alive("/").as_bytes()).await.expect("open");
    heard(&mut idle[0], "well").await;
    let mut newcomer = connect(served.address, &kept_alive("/")).await;
    heard(&mut newcomer, "well").await;
    assert_eq!(rest(idle.remove(1)).await, "", "the second one is closed");
    for stream in &mut idle {
        stream.write_all(kept_alive("/").as_bytes()).await.expect("open");
        heard(stream, "well").await;
    }
}

#[tokio::test]
async fn an_admin_port_answers_while_the_main_port_is_full_of_the_busy() {
    let (main, admin) = (http(2).await, http(2).await);
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(main.address, &kept_alive("/busy")).await;
        heard(&mut stream, "piece").await;
        busy.push(stream);
    }
    assert_eq!(rest(connect(main.address, &request("/")).await).await, "", "the main port is full");
    assert!(rest(connect(admin.address, &request("/")).await).await.ends_with("well"));
}

#[tokio::test]
async fn an_http_1_1_request_names_its_host_once() {
    let served = http(4).await;
    for (head, status) in [
        ("GET / HTTP/1.1\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost: a\r\n", "200"),
        ("GET / HTTP/1.1\r\nhost:\r\n", "200"),
        ("GET / HTTP/1.0\r\n", "200"),
    ] {
        let answer = rest(connect(served.address, &format!("{head}connection: close\r\n\r\n")).await).await;
        assert_eq!(answer.split(' ').nth(1), Some(status), "{head:?}: {answer}");
    }
}

/// The status of a call, and the connection that it was made on.
async fn call(
    address: SocketAddr,
    path: &str,
    metadata: usize,
) -> (h2::client::SendRequest<Bytes>, http::Response<h2::RecvStream>) {
    let stream = TcpStream::connect(address).await.expect("connect");
    let (send, connection) = h2::client::handshake(stream).await.expect("handshake");
    tokio::spawn(connection);
    let mut send = send.ready().await.expect("open");
    let request = http::Request::post(format!("http://test{path}")).header("x-long", "x".repeat(metadata));
    let (response, _) = send.send_request(request.body(()).expect("request"), true).expect("sent");
    (send, tokio::time::timeout(BOUND, response).await.expect("in time").expect("an answer"))
}

#[tokio::test]
async fn a_running_call_keeps_its_connection_and_an_idle_one_makes_room() {
    let served = grpc(2).await;
    let (_busy, mut running) = call(served.address, "/busy", 0).await;
    assert_eq!(running.body_mut().data().await.expect("a piece").expect("open"), "piece");
    let (idle, answered) = call(served.address, "/", 0).await;
    drop(answered);
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(connect(served.address, "PRI * HTTP").await);
    }
    until(&served.places, |now| now.evicted >= 20).await;
    tokio::time::timeout(BOUND, async { while idle.clone().ready().await.is_ok() {} })
        .await
        .expect("the idle one ends");
    served.gate.send_replace(true);
    assert_eq!(running.body_mut().data().await.expect("its end").expect("open"), "piece");
}

#[tokio::test]
async fn calls_given_up_before_they_were_looked_at_do_not_end_the_others() {
    let served = grpc(4).await;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = vec![0, 0, u8::try_from(payload.len()).expect("short"), kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    // `POST http /busy`, with HPACK's static table.
    let head = [&[0x83, 0x86, 0x04, 5][..], b"/busy", &[0x01, 1], b"t"].concat();
    // Twice as many as h2's own limit, all in one write.
    for call in 0..40 {
        bytes.extend(frame(1, 0x5, 2 * call + 1, &head));
        bytes.extend(frame(3, 0, 2 * call + 1, &[0, 0, 0, 8]));
    }
    bytes.extend(frame(1, 0x5, 81, &head));
    let mut stream = TcpStream::connect(served.address).await.expect("connect");
    stream.write_all(&bytes).await.expect("sent");
    loop {
        let mut head = [0; 9];
        tokio::time::timeout(BOUND, stream.read_exact(&mut head)).await.expect("in time").expect("open");
        let length = usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.expect("its payload");
        let of = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        assert_ne!(head[3], 7, "GOAWAY: {}", String::from_utf8_lossy(&payload));
        if (head[3], of) == (0, 81) {
            assert_eq!(payload, b"piece");
            return;
        }
    }
}

#[tokio::test]
async fn metadata_is_bounded() {
    let served = grpc(4).await;
    assert_eq!(call(served.address, "/", 24 << 10).await.1.status(), 405, "the route was reached");
    assert_eq!(call(served.address, "/", 40 << 10).await.1.status(), 431);
}

#[tokio::test]
async fn calls_of_one_connection_are_bounded() {
    let served = grpc(4).await;
    let (mut send, _) = call(served.address, "/", 0).await;
    assert_eq!(send.current_max_send_streams(), CLIENT_STREAMS as usize);
    // So many run at the same time.
    let mut running = Vec::new();
    for _ in 0..CLIENT_STREAMS {
        let request = http::Request::get("http://test/busy").body(()).expect("request");
        send = send.ready().await.expect("open");
        running.push(send.send_request(request, true).expect("sent").0);
    }
    served.gate.send_replace(true);
    for answer in running {
        let answer = tokio::time::timeout(BOUND, answer).await.expect("in time").expect("an answer");
        assert_eq!(answer.status(), 200);
    }
}
