//! gRPC on a port, by tonic's server, with the bounds that all of Tandem's ports have.
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use hyper::{Request, Response};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::{Error, Server};
use tower::{Layer, Service};

use crate::Port;
use crate::connection::Peer;
use crate::held::Exchange;

/// Concurrent calls of one client connection. Calls beyond them wait in the client. It bounds the half-read messages
/// that one connection can hold.
pub const CLIENT_STREAMS: u32 = 256;
/// Concurrent calls of one connection to a node: the router has one connection for all its calls.
pub const NODE_STREAMS: u32 = 4096;
/// The prefix of health checks and reflection. They need no key and a call may stay open for ever, so they do not count
/// as busy: their connection can be evicted.
const PUBLIC: &str = "/grpc.";
/// Calls that may be reset before the server has looked at them, of so many at once. More end the connection ("enhance
/// your calm"), and all calls with it: those of h2's default, 20, are given up in a second of standstill with many
/// clients. A router gives up a thousand of a node's in the seconds until it takes it for dead.
pub(crate) const fn resets(streams: u32) -> usize {
    streams as usize / 4
}
/// Bytes of a call's metadata, names and values, at most; more are refused with 431.
pub(crate) const HEADER_LIST_BYTES: u32 = 32 << 10;

/// How the dead are found: a ping so often, and an answer to it so soon.
#[derive(Clone, Copy, Debug)]
pub struct KeepAlive {
    /// Between two pings.
    pub interval: Duration,
    /// For the answer; without one the connection ends.
    pub timeout: Duration,
}

/// Serves `routes` until `stop`, at most `streams` concurrent calls a connection. After `stop` it accepts no new
/// connections and returns when the running calls have ended.
///
/// # Errors
/// The server cannot go on.
pub async fn serve_grpc(
    port: Port,
    routes: Routes,
    streams: u32,
    keep_alive: KeepAlive,
    stop: CancellationToken,
) -> Result<(), Error> {
    Server::builder()
        .max_concurrent_streams(streams)
        .http2_max_pending_accept_reset_streams(Some(resets(streams)))
        .http2_max_header_list_size(HEADER_LIST_BYTES)
        .http2_keepalive_interval(Some(keep_alive.interval))
        .http2_keepalive_timeout(Some(keep_alive.timeout))
        .layer(Noted)
        .add_routes(routes)
        .serve_with_incoming_shutdown(port.incoming(), stop.cancelled_owned())
        .await
}

/// Notes the calls of a connection at its place: while one is being answered, the connection is busy.
#[derive(Clone, Copy)]
struct Noted;

#[derive(Clone)]
struct NotedService<S>(S);

impl<S> Layer<S> for Noted {
    type Service = NotedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        NotedService(inner)
    }
}

impl<S> Service<Request<Body>> for NotedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let peer = request.extensions_mut().remove::<Peer>();
        let calls = peer.map(|Peer { address, who, calls }| {
            // What tonic's `remote_addr` looks for.
            request.extensions_mut().insert(address);
            // What a guard looks for.
            who.enter(request.extensions_mut());
            calls
        });
        let Some(calls) = calls else { return Box::pin(self.0.call(request)) };
        if request.uri().path().starts_with(PUBLIC) {
            let answered = self.0.call(request);
            return Box::pin(async move { answered.await.inspect(|response| calls.note(response)) });
        }
        let exchange = Exchange::new(calls);
        let answered = self.0.call(request.map(|body| Body::new(exchange.asked(body))));
        Box::pin(async move { Ok(exchange.answered(answered.await?).map(Body::new)) })
    }
}
