//! The HTTP/2 connection to one node, made at the first call and anew at the first one after it broke. A tower service
//! as tonic's own channel is, but straight on `h2`: a call's head and its first message leave in one write, put into
//! the connection by the task that calls. (The channel's client gives a new stream its body only once the stream is
//! open, which is a write later, and passes each call through three tasks on its way; a node is woken by each write.)
//!
//! A call is driven by whoever reads it: what is to be sent leaves when its answer is polled. Dropping it resets the
//! call. With its second message, or once the node has said more than its first word, a further call is opened, which
//! the next one to come is put on ([`ahead`]).
mod ahead;
mod outbound;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use futures::future::{BoxFuture, FutureExt, Shared};
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong, RecvStream};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Request, Response, Uri};
use http_body::Frame;
use tandem_ports::{JOIN_HEADER, JoinTokens, NodeTls, Wanted};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use ahead::{CallsAhead, Head, Opened};
use outbound::Outbound;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// While calls are open the node is asked so often whether it is there,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// and the connection is broken when it does not answer for so long.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of one answer that a node may send before they are read: some three hundred tokens, which take 70 KB here, as
/// each is a frame. What a client does not read stays with the node beyond that.
const STREAM_WINDOW: u32 = 8 * 1024;
/// Of all answers: the most there is (RFC 9113, section 6.9.1). Answers that nobody reads must not hold up the others,
/// nor make `h2` break the connection: what small frames may cost before that is half of this.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Calls at the same time before the node has said how many it takes; others wait for that.
const EARLY_CALLS: usize = 100;
/// Bytes of an answer's head at most.
const MAX_HEAD: u32 = 16 * 1024;

/// The way to one node. Clones share the connection.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    way: Arc<Way>,
}

#[derive(Debug)]
struct Way {
    node: Authority,
    /// What each call says beside its own head: whose it is.
    own: Own,
    /// Within TLS, and then with nobody but this node.
    secured: Option<Secured>,
    line: Mutex<Option<Line>>,
    ahead: CallsAhead,
}

/// What does not change, and the cluster's tokens, of which the one that is shown may.
pub(super) type Own = (HeaderMap, Option<JoinTokens>);

/// What a connection is within, and whom it is to.
pub(super) type Secured = (NodeTls, Wanted);

/// The first word of such a call is not waited for: it has none opened ahead. An extension of its request.
#[derive(Clone, Copy, Debug)]
pub struct Unhurried;

/// A connection that is there, or on its way.
type Line = Shared<BoxFuture<'static, Result<Connected, Status>>>;

/// A connection, to open calls on.
#[derive(Clone, Debug)]
struct Connected {
    sender: SendRequest<Bytes>,
    /// Held by each call that is open, and by the connection's task.
    open: Weak<()>,
}

impl Wire {
    /// To the node there, with `own` in each call's head; connects at the first one.
    pub fn new(node: Authority, own: Own, secured: Option<Secured>) -> Self {
        Self { way: Arc::new(Way { node, own, secured, line: Mutex::default(), ahead: CallsAhead::default() }) }
    }

    async fn open(self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let (mut head, body) = request.into_parts();
        let (own, tokens) = &self.way.own;
        for (name, value) in own {
            head.headers.insert(name, value.clone());
        }
        if let Some(tokens) = tokens {
            head.headers.insert(JOIN_HEADER, tokens.header());
        }
        let hurries = head.extensions.get::<Unhurried>().is_none();
        let head = Head { uri: self.target(head.uri)?, method: head.method, headers: head.headers };
        let call = match hurries.then(|| self.way.ahead.take(&head)).flatten() {
            Some(call) => call,
            None => Opened::on(self.ready().await?, Arc::new(head))?,
        };
        let Opened { head, line, mut reply, stream, .. } = call;
        let _open = line.open.upgrade();
        let mut outbound = Outbound::new(body, stream);
        let answer = poll_fn(|context| {
            outbound.push(context);
            reply.poll_unpin(context)
        });
        let next = hurries.then_some(Next { way: self.way, line, head });
        Ok(answer
            .await?
            .map(|inbound| Body::new(Answer { outbound, inbound, data_over: false, heard: false, next, _open })))
    }

    /// A connection that takes calls. One that broke while nobody used it shows that only now.
    async fn ready(&self) -> Result<Connected, Status> {
        for _ in 0..2 {
            let line = self.line();
            let Connected { sender, open } = line.clone().await.inspect_err(|_| self.forget(&line))?;
            match sender.ready().await {
                Ok(sender) => return Ok(Connected { sender, open }),
                Err(_) => self.forget(&line),
            }
        }
        Err(Status::unavailable(format!("connections to {} break at once", self.way.node)))
    }

    /// The one there, or a new one. It is made by a task of its own: whoever waits for it may leave.
    fn line(&self) -> Line {
        let connect = || {
            let wire = self.clone();
            let connecting = tokio::spawn(async move {
                let made = connect(&wire.way.node, wire.way.secured.as_ref()).await;
                if made.is_err() {
                    // Also where nobody waits for it any more.
                    *wire.lock() = None;
                }
                made
            });
            let gone = |error| Status::unavailable(format!("connecting failed: {error}"));
            connecting.map(move |made| made.map_err(gone).flatten()).boxed().shared()
        };
        self.lock().get_or_insert_with(connect).clone()
    }

    fn forget(&self, line: &Line) {
        let mut current = self.lock();
        if current.as_ref().is_some_and(|current| current.ptr_eq(line)) {
            *current = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Line>> {
        self.way.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `path` on the node.
    fn target(&self, path: Uri) -> Result<Uri, Status> {
        let path = path.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let scheme = if self.way.secured.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
        let whole = Uri::builder().scheme(scheme).authority(self.way.node.clone()).path_and_query(path);
        whole.build().map_err(|error| Status::internal(error.to_string()))
    }
}

impl Service<Request<Body>> for Wire {
    type Response = Response<Body>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Response<Body>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.clone().open(request).boxed()
    }
}

async fn connect(node: &Authority, secured: Option<&Secured>) -> Result<Connected, Status> {
    let failed = |why: &dyn std::fmt::Display| Status::unavailable(format!("cannot connect to {node}: {why}"));
    let address = (node.host().trim_matches(['[', ']']), node.port_u16().unwrap_or(80));
    let made = async {
        let stream = TcpStream::connect(address).await.map_err(|error| failed(&error))?;
        stream.set_nodelay(true).map_err(|error| failed(&error))?;
        match secured {
            None => serve(stream).await,
            Some((tls, wanted)) => serve(tls.dial(stream, wanted.clone()).await.map_err(|error| failed(&error))?).await,
        }
    };
    tokio::time::timeout(CONNECT_TIMEOUT, made).await.unwrap_or_else(|_| Err(failed(&"it takes too long")))
}

/// Starts the connection's own task over `stream`. It ends when nobody can call any more.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Connected, Status> {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    builder.initial_max_send_streams(EARLY_CALLS);
    let (sender, connection) = builder.max_header_list_size(MAX_HEAD).enable_push(false).handshake(stream).await?;
    let open = Arc::new(());
    let connected = Connected { sender, open: Arc::downgrade(&open) };
    tokio::spawn(drive(connection, open));
    Ok(connected)
}

/// Reads and writes until the connection is over or the node is silent. Dropped, a connection fails the calls on it.
async fn drive<T: AsyncRead + AsyncWrite + Unpin>(mut connection: Connection<T, Bytes>, open: Arc<()>) {
    let pings = connection.ping_pong();
    tokio::select! {
        // First: after a standstill of this process the answer to a ping is there when its time is over.
        biased;
        ended = connection => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to a node broke");
            }
        }
        () = silence(pings, &open) => tracing::debug!("a node answers no ping"),
    }
}

/// Ends when a ping has no answer.
async fn silence(pings: Option<PingPong>, open: &Arc<()>) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        tokio::time::sleep(KEEPALIVE_INTERVAL).await;
        // This one is its own.
        if Arc::strong_count(open) == 1 {
            continue;
        }
        match tokio::time::timeout(KEEPALIVE_TIMEOUT, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection says it as well.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

/// What a node answers; reading it sends the rest of the call.
struct Answer {
    outbound: Outbound,
    inbound: RecvStream,
    data_over: bool,
    heard: bool,
    /// Until it is opened.
    next: Option<Next>,
    _open: Option<Arc<()>>,
}

/// A call like this one, to be opened.
struct Next {
    way: Arc<Way>,
    line: Connected,
    head: Arc<Head>,
}

impl Next {
    /// A connection that takes none shows that to the call that needs it.
    fn open(self) {
        let Self { way, line, head } = self;
        way.ahead.keep(|| Opened::on(line, head).ok());
    }
}

impl Answer {
    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let data = ready!(self.inbound.poll_data(context));
        if let Some(Ok(data)) = &data {
            // Fails only where more is given back than was taken.
            let _ = self.inbound.flow_control().release_capacity(data.len());
        }
        // A client waits for the first word, and opening takes both sides' time.
        if std::mem::replace(&mut self.heard, true) {
            self.open_next();
        }
        Poll::Ready(data)
    }

    fn open_next(&mut self) {
        self.next.take().into_iter().for_each(Next::open);
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let answer = self.get_mut();
        // The first message has left before. The node is woken for the next one anyhow.
        if answer.outbound.push(context) {
            answer.open_next();
        }
        if !answer.data_over {
            if let Some(data) = ready!(answer.poll_data(context)) {
                return Poll::Ready(Some(data.map(Frame::data).map_err(Status::from)));
            }
            answer.data_over = true;
        }
        let trailers = ready!(answer.inbound.poll_trailers(context)).transpose();
        Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers).map_err(Status::from)))
    }
}

#[cfg(test)]
mod tests;
