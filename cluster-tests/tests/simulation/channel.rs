//! Calls between two processes of the simulated cluster, without sockets: an HTTP request goes to the real service of
//! the other process, and the frames of both bodies take their time on a link that may be slow or cut. Everything above
//! (gRPC framing, status, the services' own code) is what the real cluster runs.
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use http_body::{Body as _, Frame};
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::util::BoxCloneSyncService;
use tower::{Service, service_fn};

use crate::process::Process;

/// What the router and the nodes call through.
pub type Calls = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// A connection whose other end is silent for so long is given up by HTTP/2's own signs of life, on either side.
pub const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Frames under way at once in one direction of a call.
const WINDOW_FRAMES: usize = 16;

/// The way between two processes.
#[derive(Clone)]
pub struct Link {
    state: Arc<Mutex<LinkState>>,
}

#[derive(Default)]
struct LinkState {
    latency: Duration,
    cut: bool,
    /// What waits for the cut to heal, by its coming. (A `watch` would wake it in an order of its own choice.)
    stuck: Vec<Waker>,
    /// Of calls that were dropped: how late the other side hears of it, besides the latency.
    late_cancels: VecDeque<Duration>,
}

impl Link {
    pub fn new(latency: Duration) -> Self {
        Self { state: Arc::new(Mutex::new(LinkState { latency, ..LinkState::default() })) }
    }

    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    pub fn set_cut(&self, cut: bool) {
        let mut state = self.lock();
        state.cut = cut;
        state.stuck.drain(..).for_each(Waker::wake);
    }

    /// The next call that is dropped is heard of so late.
    pub fn delay_cancel(&self, by: Duration) {
        self.lock().late_cancels.push_back(by);
    }

    fn arrival(&self) -> Instant {
        Instant::now() + self.lock().latency
    }

    /// Ready when what arrives `at` has arrived.
    async fn carried(self, at: Instant) -> Result<(), Status> {
        if at > Instant::now() {
            tokio::time::sleep_until(at).await;
        }
        let whole = std::future::poll_fn(|context| {
            let mut state = self.lock();
            if !state.cut {
                return Poll::Ready(());
            }
            state.stuck.push(context.waker().clone());
            Poll::Pending
        });
        let timed_out = |_| Status::unavailable("the connection timed out");
        tokio::time::timeout(KEEP_ALIVE, whole).await.map_err(timed_out)
    }

    fn cancel_delay(&self) -> Duration {
        self.lock().late_cancels.pop_front().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls from `client` to the services `routes` of `server`.
pub fn calls(client: Process, server: Process, link: Link, routes: Routes) -> Calls {
    Calls::new(service_fn(move |request: http::Request<Body>| {
        let (client, server, link, mut routes) = (client.clone(), server.clone(), link.clone(), routes.clone());
        async move {
            let refused = || Status::unavailable("connection refused");
            if server.is_dead() {
                return Err(refused());
            }
            link.clone().carried(link.arrival()).await?;
            if !server.runs().await {
                return Err(refused());
            }
            let (parts, body) = request.into_parts();
            let body = Carried::body(body, link.clone(), &client, &server);
            let request = http::Request::from_parts(parts, body);
            let response = routes.call(request).await.map_err(|error| Status::from_error(error.into()))?;
            link.clone().carried(link.arrival()).await?;
            if server.is_dead() {
                return Err(refused());
            }
            let (parts, body) = response.into_parts();
            Ok(http::Response::from_parts(parts, Carried::body(body, link, &client, &server)))
        }
    }))
}

type Chunk = <Body as http_body::Body>::Data;
type Gone = Pin<Box<WaitForCancellationFutureOwned>>;

/// A body as its receiver sees it.
struct Carried {
    inner: Option<Body>,
    link: Link,
    ended: bool,
    /// Under way, by arrival.
    frames: VecDeque<(Instant, Frame<Chunk>)>,
    first: Option<BoxFuture<'static, Result<(), Status>>>,
    gone: [Gone; 2],
}

impl Carried {
    fn body(inner: Body, link: Link, client: &Process, server: &Process) -> Body {
        let gone = [Box::pin(client.died()), Box::pin(server.died())];
        Body::new(Self { inner: Some(inner), link, ended: false, frames: VecDeque::new(), first: None, gone })
    }

    fn take_in(&mut self, context: &mut Context<'_>) -> Result<(), Status> {
        while !self.ended && self.frames.len() < WINDOW_FRAMES {
            let Some(inner) = &mut self.inner else { break };
            match Pin::new(inner).poll_frame(context) {
                Poll::Ready(Some(frame)) => self.frames.push_back((self.link.arrival(), frame?)),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }
}

impl http_body::Body for Carried {
    type Data = Chunk;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Chunk>, Status>>> {
        if self.gone.iter_mut().any(|gone| gone.as_mut().poll(context).is_ready()) {
            self.ended = true;
            self.frames.clear();
            return Poll::Ready(Some(Err(Status::unavailable("the connection was reset"))));
        }
        if let Err(status) = self.take_in(context) {
            self.ended = true;
            return Poll::Ready(Some(Err(status)));
        }
        let Some((at, _)) = self.frames.front() else {
            return if self.ended { Poll::Ready(None) } else { Poll::Pending };
        };
        let (at, link) = (*at, self.link.clone());
        let first = self.first.get_or_insert_with(|| Box::pin(link.carried(at)));
        let Poll::Ready(carried) = first.as_mut().poll(context) else { return Poll::Pending };
        self.first = None;
        let frame = self.frames.pop_front().map(|(_, frame)| frame);
        Poll::Ready(match carried {
            Ok(()) => frame.map(Ok),
            Err(status) => {
                self.ended = true;
                Some(Err(status))
            }
        })
    }
}

impl Drop for Carried {
    /// The other side hears of it as it hears of everything: later, over a cut link not before its own timeout.
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (link, late) = (self.link.clone(), self.link.cancel_delay());
        runtime.spawn(async move {
            let _ = link.clone().carried(link.arrival() + late).await;
            drop(inner);
        });
    }
}
