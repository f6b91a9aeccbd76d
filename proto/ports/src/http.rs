//! HTTP/1.1 and HTTP/2 on a port, by hyper's own server: axum's would wait for the head of a request for ever. TLS
//! chooses by ALPN; in the clear an HTTP/2 client must know beforehand ("prior knowledge"), as the upgrade is gone.
//!
//! A client of HTTP/1.1 that closes its side for writing after a request is taken for one that went away, though RFC
//! 9112 (9.6) lets a server answer it. hyper's `half_close` would answer, but both look alike until something is
//! written: the work for a client that gave up on a whole answer would go on to its end. That is the more frequent
//! case, and the dearer one.
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::Port;
use crate::grpc::{CLIENT_STREAMS, HEADER_LIST_BYTES, resets};
use crate::held::{Exchange, Held};
use crate::places::Calls;

const NO_HOST: &str = "an HTTP/1.1 request names its host: exactly one Host header is needed\n";

/// Bytes of an answer that wait for a slow reader of an HTTP/2 stream, at most.
const STREAM_BUFFER_BYTES: usize = 64 << 10;
/// What an HTTP/1.1 connection holds at most of what came, a request's head included, and of what is to be sent. Where
/// a connection has had large bodies before, hyper reads so much at once, also of one that waits for room.
const CONNECTION_BUFFER_BYTES: usize = HEADER_LIST_BYTES as usize;

/// Serves `app` until `stop`; then nobody new is let in, idle and half-open connections close, and it returns when the
/// requests under way were answered. A response may take as long as it takes: only silence of the client is bounded.
pub async fn serve_http(port: Port, app: axum::Router, stop: CancellationToken) {
    let silence = port.limits.silence;
    let http = bounded(silence);
    let connections = GracefulShutdown::new();
    loop {
        let connection = tokio::select! {
            connection = port.accept(&["h2", "http/1.1"]) => connection.of_either_within(silence),
            () = stop.cancelled() => break,
        };
        let (calls, who, app) = (connection.calls(), connection.who(), app.clone());
        let ended = calls.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            who.enter(request.extensions_mut());
            answer(app.clone(), &calls, request)
        });
        let serving = connections.watch(http.serve_connection(TokioIo::new(connection), service).into_owned());
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                ended.failed();
                tracing::debug!(%error, "HTTP connection");
            }
        });
    }
    port.places.close();
    drop(port);
    connections.shutdown().await;
}

/// A server whose clients may be silent for so long, where a request's head or an answer to a ping is due.
fn bounded(silence: Duration) -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(silence).max_buf_size(CONNECTION_BUFFER_BYTES);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(silence)
        .keep_alive_timeout(silence)
        .max_concurrent_streams(CLIENT_STREAMS)
        .max_header_list_size(HEADER_LIST_BYTES)
        .max_pending_accept_reset_streams(resets(CLIENT_STREAMS))
        .max_send_buf_size(STREAM_BUFFER_BYTES);
    http
}

/// Its connection is busy from when the request is whole until the answer is out.
fn answer(
    app: axum::Router,
    calls: &Calls,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<Held<Body>>, Infallible>> + use<> {
    let exchange = Exchange::new(calls.clone());
    async move {
        let request = request.map(|body| exchange.asked(body));
        let response = match &request {
            request if is_grpc(request) => no_grpc(),
            request if !names_host(request) => no_host(),
            _ => app.oneshot(request.map(Body::new)).await?,
        };
        Ok(exchange.answered(response))
    }
}

/// A gRPC client at the wrong port, which speaks HTTP/2 as well.
fn is_grpc<B>(request: &Request<B>) -> bool {
    request.headers().get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// The answer that such a client understands: UNIMPLEMENTED, in headers alone.
fn no_grpc() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from_static("12"));
    headers.insert("grpc-message", HeaderValue::from_static("this port speaks HTTP, not gRPC"));
    response
}

/// RFC 9112, 3.2: whatever else it has, a request of HTTP/1.1 without exactly one `Host` is answered with 400.
fn names_host<B>(request: &Request<B>) -> bool {
    request.version() != Version::HTTP_11 || request.headers().get_all(HOST).iter().count() == 1
}

fn no_host() -> Response<Body> {
    let mut response = Response::new(Body::from(NO_HOST));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
