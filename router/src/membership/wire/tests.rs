//! Calls over pipes in memory, to an HTTP/2 server whose every step the tests take; and connections that are not there.
mod unread;

use std::io;

use h2::Reason;
use http::HeaderMap;
use http_body_util::{BodyExt, StreamBody};
use tokio::io::{DuplexStream, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::ahead::FRESH;
use super::*;

type Messages = mpsc::UnboundedSender<Bytes>;
/// What each of them wrote.
type Writes = Arc<Mutex<Vec<Vec<u8>>>>;
type Server = h2::server::Connection<DuplexStream, Bytes>;

/// A connection to a server in this process, and the writes that it has made.
async fn connected() -> (Wire, Server, Writes) {
    connected_to(&h2::server::Builder::new()).await
}

async fn connected_to(server: &h2::server::Builder) -> (Wire, Server, Writes) {
    let (near, far) = tokio::io::duplex(1 << 20);
    let writes = Writes::default();
    let counted = Counted { io: near, writes: Arc::clone(&writes) };
    let (connected, server) = tokio::join!(serve(counted), server.handshake(far));
    let wire = Wire::new("node:1".parse().unwrap(), (HeaderMap::new(), None), None);
    *wire.lock() = Some(async { connected }.boxed().shared());
    (wire, server.unwrap(), writes)
}

/// Of frames (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;

/// The kinds of the frames in a write, behind the preface that a connection begins with.
fn kinds(write: &[u8]) -> Vec<u8> {
    let mut rest = write.strip_prefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap_or(write);
    let mut kinds = Vec::new();
    while let [a, b, c, kind, ..] = *rest {
        kinds.push(kind);
        rest = &rest[9 + u32::from_be_bytes([0, a, b, c]) as usize..];
    }
    kinds
}

struct Counted {
    io: DuplexStream,
    writes: Writes,
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        self.writes.lock().unwrap().push(buf[..written].to_vec());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A call whose first message is there, and what says the others.
fn request(first: &'static str) -> (Request<Body>, Messages) {
    let (request, messages) = silent_request();
    messages.send(Bytes::from(first)).unwrap();
    (request, messages)
}

/// A call, and what says its messages.
fn silent_request() -> (Request<Body>, Messages) {
    let (messages, receiver) = mpsc::unbounded_channel();
    let frames =
        futures::StreamExt::map(UnboundedReceiverStream::new(receiver), |data| Ok::<_, Status>(Frame::data(data)));
    (Request::post("/tandem.v1.Decode/Generate").body(Body::new(StreamBody::new(frames))).unwrap(), messages)
}

type Incoming = (Request<RecvStream>, h2::server::SendResponse<Bytes>);

/// The next call that the server sees.
async fn accept(server: &mut Server) -> Incoming {
    server.accept().await.unwrap().unwrap()
}

#[tokio::test]
async fn a_call_and_its_first_message_are_one_write_and_the_rest_follows() {
    let (mut wire, mut server, writes) = connected().await;
    let (request, messages) = request("start");
    let answering = tokio::spawn(async move {
        let (mut request, mut respond) = accept(&mut server).await;
        assert_eq!(request.uri(), "http://node:1/tandem.v1.Decode/Generate");
        // The server's own task, as it is on a node.
        tokio::spawn(async move { while server.accept().await.is_some() {} });
        assert_eq!(request.body_mut().data().await.unwrap().unwrap(), "start");
        let mut answer = respond.send_response(Response::new(()), false).unwrap();
        assert_eq!(request.body_mut().data().await.unwrap().unwrap(), "ticket");
        answer.send_data("token".into(), false).unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        answer.send_trailers(trailers).unwrap();
        assert!(request.body_mut().data().await.unwrap().unwrap().is_empty(), "the client's end");
    });
    let mut answer = wire.call(request).await.unwrap().into_body();
    let frames: Vec<Vec<u8>> = writes.lock().unwrap().iter().map(|write| kinds(write)).collect();
    assert!(frames.iter().any(|kinds| kinds.ends_with(&[HEADERS, DATA])), "{frames:?}");
    messages.send("ticket".into()).unwrap();
    drop(messages);
    writes.lock().unwrap().clear();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "token");
    let frames = kinds(&writes.lock().unwrap()[0]);
    assert!(
        frames.contains(&HEADERS) && frames.contains(&DATA),
        "the next call's head goes with the ticket: {frames:?}"
    );
    assert_eq!(answer.frame().await.unwrap().unwrap().into_trailers().unwrap()["grpc-status"], "0");
    assert!(answer.frame().await.is_none());
    answering.await.unwrap();
}

#[tokio::test]
async fn who_drops_an_answer_resets_the_call() {
    let (mut wire, mut server, _) = connected().await;
    let (request, _messages) = request("start");
    let (reset, was_reset) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let (_request, mut respond) = accept(&mut server).await;
        tokio::spawn(async move { while server.accept().await.is_some() {} });
        let mut answer = respond.send_response(Response::new(()), false).unwrap();
        reset.send(poll_fn(|context| answer.poll_reset(context)).await.unwrap()).unwrap();
    });
    drop(wire.call(request).await.unwrap());
    assert_eq!(was_reset.await.unwrap(), Reason::CANCEL);
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_fails_its_calls_and_an_idle_one_is_not_asked() {
    let (mut wire, mut server, writes) = connected().await;
    tokio::time::sleep(10 * KEEPALIVE_INTERVAL).await;
    assert!(!writes.lock().unwrap().iter().any(|write| kinds(write).contains(&PING)));
    let (request, _messages) = request("start");
    let (mut answer, _kept) = tokio::join!(async { wire.call(request).await.unwrap().into_body() }, async {
        let (_request, mut respond) = accept(&mut server).await;
        let answer = respond.send_response(Response::new(()), false).unwrap();
        // Writes the head, and stands still from then on.
        let _ = tokio::time::timeout(KEEPALIVE_INTERVAL / 2, server.accept()).await;
        (server, answer)
    });
    let asked = tokio::time::Instant::now();
    let error = answer.frame().await.unwrap().unwrap_err();
    assert!(asked.elapsed() <= KEEPALIVE_INTERVAL + KEEPALIVE_TIMEOUT, "{:?}", asked.elapsed());
    assert_eq!(tandem_proto::Error::from(error).kind, tandem_proto::ErrorKind::Unavailable);
}

/// A server of calls that answers each head at once, and each call's first message with the number of the call. Those
/// beyond `patience` it ends before they have said anything. Says which calls it has seen, and which it has answered.
fn counting(mut server: Server, patience: u32) -> mpsc::UnboundedReceiver<(u32, bool)> {
    let (told, seen) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut number = 0;
        while let Some(Ok((mut request, mut respond))) = server.accept().await {
            number += 1;
            let (number, told) = (number, told.clone());
            let _ = told.send((number, false));
            tokio::spawn(async move {
                let mut answer = respond.send_response(Response::new(()), number > patience).unwrap();
                if number <= patience && request.body_mut().data().await.is_some_and(|first| first.is_ok()) {
                    let _ = told.send((number, true));
                    answer.send_data(number.to_string().into(), true).unwrap();
                }
            });
        }
    });
    seen
}

/// The number of the call that this one became. It is read to its end.
async fn number(wire: &mut Wire) -> String {
    let (request, _messages) = request("start");
    let answer = wire.call(request).await.unwrap().into_body();
    String::from_utf8(answer.collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn the_next_call_is_open_before_it_comes() {
    let (mut wire, server, writes) = connected().await;
    let mut seen = counting(server, u32::MAX);
    assert_eq!(number(&mut wire).await, "1");
    for (event, then) in [((1, false), (1, true)), ((2, false), (2, true)), ((3, false), (3, true))] {
        assert_eq!(seen.recv().await.unwrap(), event);
        if event.0 > 1 {
            writes.lock().unwrap().clear();
            assert_eq!(number(&mut wire).await, event.0.to_string());
            let first = kinds(&writes.lock().unwrap()[0]);
            assert_eq!(first[0], DATA, "its head was there: {first:?}");
        }
        assert_eq!(seen.recv().await.unwrap(), then);
    }
}

#[tokio::test]
async fn the_next_call_does_not_stand_in_the_way_of_the_first_word() {
    let (mut wire, mut server, writes) = connected().await;
    let (go_on, second) = tokio::sync::oneshot::channel();
    let serving = tokio::spawn(async move {
        let (_request, mut respond) = accept(&mut server).await;
        let mut answer = respond.send_response(Response::new(()), false).unwrap();
        answer.send_data("token".into(), false).unwrap();
        let next = tokio::spawn(async move { accept(&mut server).await });
        second.await.unwrap();
        answer.send_data("delivered".into(), false).unwrap();
        next.await.unwrap();
    });
    let (request, _messages) = request("start");
    let mut answer = wire.call(request).await.unwrap().into_body();
    writes.lock().unwrap().clear();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "token");
    // Looks for more, as the flow does before the client's task runs.
    assert!(answer.frame().now_or_never().is_none());
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    assert!(!writes.lock().unwrap().iter().any(|write| kinds(write).contains(&HEADERS)));
    go_on.send(()).unwrap();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "delivered");
    serving.await.unwrap();
}

#[tokio::test]
async fn where_nobody_waits_for_the_first_word_no_call_is_opened_ahead() {
    let (mut wire, server, _) = connected().await;
    let mut seen = counting(server, u32::MAX);
    for call in 1..4 {
        let (mut request, _messages) = request("start");
        request.extensions_mut().insert(Unhurried);
        let answer = wire.call(request).await.unwrap().into_body();
        assert_eq!(answer.collect().await.unwrap().to_bytes(), call.to_string());
        assert_eq!([seen.recv().await.unwrap(), seen.recv().await.unwrap()], [(call, false), (call, true)]);
    }
}

#[tokio::test]
async fn a_call_of_another_kind_is_opened_for_itself() {
    let (mut wire, server, _) = connected().await;
    let mut seen = counting(server, u32::MAX);
    assert_eq!(number(&mut wire).await, "1");
    let (mut other, _messages) = request("start");
    other.headers_mut().insert("grpc-timeout", "1S".parse().unwrap());
    let mut answer = wire.call(other).await.unwrap().into_body();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "3", "2 was open");
    for event in [(1, false), (1, true), (2, false), (3, false), (3, true)] {
        assert_eq!(seen.recv().await.unwrap(), event);
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_the_node_will_end_are_not_used() {
    let (mut wire, server, _) = connected().await;
    let _seen = counting(server, u32::MAX);
    assert_eq!(number(&mut wire).await, "1");
    tokio::time::advance(FRESH).await;
    assert_eq!(number(&mut wire).await, "3");
    tokio::time::advance(FRESH - Duration::from_millis(1)).await;
    assert_eq!(number(&mut wire).await, "4");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_open_ahead_is_not_asked_after_until_it_is_used() {
    let (mut wire, server, writes) = connected().await;
    let mut seen = counting(server, u32::MAX);
    assert_eq!(number(&mut wire).await, "1");
    let asked = || writes.lock().unwrap().iter().any(|write| kinds(write).contains(&PING));
    tokio::time::sleep(3 * KEEPALIVE_INTERVAL).await;
    assert!(!asked());
    let (request, _messages) = silent_request();
    let _answer = wire.call(request).await.unwrap();
    tokio::time::sleep(2 * KEEPALIVE_INTERVAL).await;
    assert!(asked());
    for event in [(1, false), (1, true), (2, false)] {
        assert_eq!(seen.recv().await.unwrap(), event);
    }
    assert!(seen.is_empty(), "it is the call that was open");
}

#[tokio::test]
async fn a_call_that_the_node_has_ended_is_not_used() {
    let (mut wire, server, _) = connected().await;
    let mut seen = counting(server, 1);
    assert_eq!(number(&mut wire).await, "1");
    for event in [(1, false), (1, true), (2, false)] {
        assert_eq!(seen.recv().await.unwrap(), event);
    }
    // Its end has arrived.
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    let (request, _messages) = request("start");
    drop(wire.call(request).await.unwrap());
    assert_eq!(seen.recv().await.unwrap(), (3, false), "a call of its own");
}

#[tokio::test]
async fn calls_that_come_together_leave_as_many_open_and_no_more() {
    let (mut wire, server, _) = connected().await;
    let mut seen = counting(server, u32::MAX);
    let mut answers = Vec::new();
    for _ in 0..10 {
        let (request, messages) = request("start");
        answers.push((wire.call(request).await.unwrap().into_body(), messages));
    }
    for (answer, _messages) in answers {
        answer.collect().await.unwrap();
    }
    let mut opened = 0;
    while opened < 14 {
        opened += u32::from(!seen.recv().await.unwrap().1);
    }
    for _ in 0..4 {
        let (request, _messages) = request("start");
        drop(wire.call(request).await.unwrap());
    }
    assert_eq!(
        number(&mut wire).await,
        "15",
        "none is left, and none was put in the place of a call without an answer"
    );
}

#[tokio::test]
async fn a_broken_connection_is_made_anew() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut wire =
        Wire::new(listener.local_addr().unwrap().to_string().parse().unwrap(), (HeaderMap::new(), None), None);
    for _ in 0..3 {
        let (request, _messages) = request("start");
        let (answer, _) = tokio::join!(wire.call(request), async {
            let mut server = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            let (_, mut respond) = server.accept().await.unwrap().unwrap();
            respond.send_response(Response::builder().status(204).body(()).unwrap(), true).unwrap();
            // To the end of the answer; then the connection is gone.
            let _ = tokio::time::timeout(Duration::from_millis(100), server.accept()).await;
        });
        let mut answer = answer.unwrap();
        assert_eq!(answer.status(), 204);
        assert!(answer.body_mut().frame().await.is_none());
        // This side has seen the end.
        let line = wire.line().await.unwrap();
        while line.sender.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn calls_that_are_open_end_with_their_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut wire =
        Wire::new(listener.local_addr().unwrap().to_string().parse().unwrap(), (HeaderMap::new(), None), None);
    for drains in [true, false, true, false] {
        let (request, _messages) = request("start");
        let answering = async {
            let mut server = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            let (_, mut respond) = server.accept().await.unwrap().unwrap();
            let mut answer = respond.send_response(Response::new(()), false).unwrap();
            answer.send_data("token".into(), false).unwrap();
            answer.send_data("delivered".into(), true).unwrap();
            let open = server.accept().await.unwrap().unwrap();
            if drains {
                server.graceful_shutdown();
                drop(open);
                while server.accept().await.is_some() {}
            }
        };
        let (answer, ()) =
            tokio::join!(async { wire.call(request).await.unwrap().into_body().collect().await }, answering);
        assert_eq!(answer.unwrap().to_bytes(), "tokendelivered", "on a connection of its own");
        // This side has seen the end.
        let line = wire.line().await.unwrap();
        while line.sender.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn who_leaves_before_the_node_has_room_says_nothing() {
    let (mut wire, mut server, _) = connected_to(h2::server::Builder::new().max_concurrent_streams(1)).await;
    let serving = tokio::spawn(async move {
        let (_first, mut respond) = accept(&mut server).await;
        let _answer = respond.send_response(Response::new(()), false).unwrap();
        let mut said = Vec::new();
        while said.is_empty() || said.last().is_some_and(Result::is_err) {
            let (mut request, _respond) = accept(&mut server).await;
            said.push(request.body_mut().data().now_or_never().unwrap().unwrap());
        }
        said.into_iter().map(|said| said.map_err(|error| error.reason())).collect::<Vec<_>>()
    });
    let (first, _messages) = request("first");
    let first = wire.call(first).await.unwrap();
    for message in ["second", "third"] {
        let (request, _messages) = request(message);
        assert!(wire.call(request).now_or_never().is_none(), "the node takes one call at a time");
    }
    drop(first);
    let (last, _messages) = request("last");
    let (_, said) = tokio::join!(wire.call(last), serving);
    let cancelled = Err(Some(Reason::CANCEL));
    assert_eq!(said.unwrap(), [cancelled.clone(), cancelled, Ok("last".into())]);
}

#[tokio::test]
async fn nobody_there_is_said_by_name() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut wire = Wire::new(free.to_string().parse().unwrap(), (HeaderMap::new(), None), None);
    let status = wire.call(request("start").0).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(status.message().starts_with(&format!("cannot connect to {free}: ")), "{}", status.message());
    // The next call tries again.
    assert!(wire.lock().is_none());
}
