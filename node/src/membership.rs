//! The node's side of the one stream to the router: register, report load, say when draining. The stream may be lost
//! and opened again any number of times; to a router that has not declared it dead (a new one) the node is the same
//! incarnation as before. A router that has refuses that incarnation: then the node's life is over and it joins as another
//! one, without its running work ([`Node::begin_new_life`]).
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_proto::v1::membership_client::MembershipClient;
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{Draining, NodeReport, RouterReport};
use tandem_proto::{Error, ErrorKind};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

use crate::node::Node;

/// Reports that may wait for a slow connection; more means that it is stuck.
const REPORTS: usize = 8;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(1);

/// Carries calls to the router.
pub type Calls = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// How the router is reached.
#[derive(Clone)]
pub enum RouterWay {
    /// Over the network.
    Network(Box<Endpoint>),
    /// In this process, for simulations and tests: what connects.
    InProcess(Arc<dyn Fn() -> BoxFuture<'static, Result<Calls, Status>> + Send + Sync>),
}

impl RouterWay {
    async fn connect(&self) -> Result<Calls, Error> {
        let lost = |error: &dyn std::error::Error| unavailable(with_causes(error));
        match self {
            Self::Network(endpoint) => {
                let channel = endpoint.connect().await.map_err(|error| lost(&error))?;
                Ok(Calls::new(channel.map_err(|error| Status::from_error(Box::new(error)))))
            }
            Self::InProcess(connect) => connect().await.map_err(|error| lost(&error)),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Network(endpoint) => endpoint.uri().to_string(),
            Self::InProcess(_) => "in this process".to_owned(),
        }
    }
}

impl From<Endpoint> for RouterWay {
    fn from(endpoint: Endpoint) -> Self {
        Self::Network(Box::new(endpoint))
    }
}

/// Keeps the node registered until `stop`; `endpoint` is the URL of its own gRPC services. Ends never by itself: a router
/// may come back at any time.
pub async fn stay_joined(node: Arc<Node>, router: impl Into<RouterWay>, endpoint: String, stop: CancellationToken) {
    let mut link = Link { router: router.into(), endpoint, state: State::New, backoff: FIRST_BACKOFF };
    // Nodes that lost the router at one time come back at different ones, in a simulation the same ones in each run.
    let mut jitter = StdRng::seed_from_u64(node.incarnation().0);
    loop {
        let lost = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            error = link.session(&node) => error,
        };
        link.lost(&lost);
        let pause = jitter.random_range(link.backoff / 2..=link.backoff);
        link.backoff = (link.backoff * 2).min(LONGEST_BACKOFF);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

struct Link {
    router: RouterWay,
    endpoint: String,
    state: State,
    backoff: Duration,
}

/// What was last logged: each change is one line, not each attempt.
#[derive(PartialEq)]
enum State {
    New,
    Joined,
    Lost(ErrorKind),
}

impl Link {
    /// One stream, from connect to loss.
    async fn session(&mut self, node: &Node) -> Error {
        let joined = match self.join(node).await {
            Err(error) if error.kind == ErrorKind::DeclaredDead => {
                node.begin_new_life();
                self.join(node).await
            }
            joined => joined,
        };
        match joined {
            Ok((reports, inbound, hello)) => {
                self.joined();
                report(node, reports, inbound, period(&hello)).await
            }
            Err(error) => error,
        }
    }

    async fn join(&self, node: &Node) -> Result<(Reports, Streaming<RouterReport>, RouterReport), Error> {
        let register = node.registration(self.endpoint.clone());
        let incarnation = register.incarnation;
        let channel = self.router.connect().await?;
        let (reports, outbox) = mpsc::channel(REPORTS);
        send(&reports, Report::Register(register))?;
        let answer = async {
            let mut client = MembershipClient::new(channel);
            let mut inbound = client.join(ReceiverStream::new(outbox)).await?.into_inner();
            let hello = inbound.message().await?;
            Ok::<_, Status>((inbound, hello))
        };
        let answered = timeout(ANSWER_TIMEOUT, answer).await.map_err(|_| unavailable("it does not answer"))?;
        let (inbound, hello) = answered?;
        match hello {
            Some(hello) if hello.accepted_incarnation == incarnation => Ok((reports, inbound, hello)),
            _ => Err(unavailable("it closed the stream without accepting this node")),
        }
    }

    fn joined(&mut self) {
        tracing::info!(router = self.router.name(), "joined the router");
        self.state = State::Joined;
        self.backoff = FIRST_BACKOFF;
    }

    fn lost(&mut self, error: &Error) {
        let state = State::Lost(error.kind);
        if self.state != state {
            tracing::warn!(router = self.router.name(), "no router, trying again: {error}");
            self.state = state;
        }
    }
}

type Reports = mpsc::Sender<NodeReport>;

/// Reports until the stream is lost.
async fn report(node: &Node, reports: Reports, mut inbound: Streaming<RouterReport>, period: Duration) -> Error {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut told = false;
    loop {
        let sent = tokio::select! {
            biased;
            () = node.work.draining(), if !told => {
                told = true;
                send(&reports, Report::Draining(Draining {}))
            }
            message = inbound.message() => match message {
                Ok(Some(_)) => Ok(()),
                Ok(None) => Err(unavailable("it closed the stream")),
                Err(status) => Err(status.into()),
            },
            _ = ticks.tick() => send(&reports, Report::Load(node.load())),
        };
        if let Err(error) = sent {
            return error;
        }
    }
}

fn send(reports: &Reports, report: Report) -> Result<(), Error> {
    reports.try_send(NodeReport { report: Some(report) }).map_err(|_| unavailable("the stream is stuck"))
}

fn period(hello: &RouterReport) -> Duration {
    Duration::from_millis(hello.report_interval_ms.into()).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
}

fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

/// tonic says "transport error" and keeps what happened in the source.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}
