//! The node's side of the stream to one router: register, report load and what the prefix cache holds ([`KvFeed`]),
//! spans of calls that were cut off ([`crate::trace`]), say when draining. Each stream is a life of the node
//! ([`crate::lives`]): what the router books here ends with it, for whatever reason it ends, before the next one
//! begins. A router that does not answer for its lease is as good as gone ([`Lease`]). Streams to other routers
//! ([`crate::routers`]) go on.
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_engine::prefix_cache::CacheUpdate;
use tandem_proto::v1::membership_client::MembershipClient;
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{self, ClockProbe, ClockReading, Draining, NodeReport, RouterReport};
use tandem_proto::{Error, ErrorKind, Life};
use tandem_telemetry::clock::{self, clock};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status, Streaming};
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;
use xxhash_rust::xxh3::xxh3_64;

use crate::clock_offset::RouterKey;
use crate::credentials::Credentials;
use crate::kv_feed::KvFeed;
use crate::lease::Lease;
use crate::life_secrets::LifeSecrets;
use crate::lives::Session;
use crate::node::Node;
use crate::trace::StrayQueue;

/// Reports that may wait for a slow connection; more means that it is stuck.
const REPORTS: usize = 8;
/// Messages about the cache that may wait beside them. More are not sent before there is room: that the connection is
/// slow for them is no reason to take it for stuck.
const KV_MESSAGES: usize = 8;
/// The cache's changes are collected for so long: the router hears of a block about then. They go with each report,
/// too.
const KV_INTERVAL: Duration = Duration::from_millis(20);
/// A change that other routers made is told so soon, and not more often: what a router believes of others' work is no
/// older.
const LOAD_INTERVAL: Duration = Duration::from_millis(20);
/// What a call held is let go of a moment after it has ended.
const SETTLES: Duration = Duration::from_millis(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Of a router that has not said its lease yet.
const FIRST_LEASE: Duration = Duration::from_secs(4);
/// Part of the lease in which a registration is accepted, or given up: the lease runs from the registration on, and its
/// rest is for the first answer to a report. Requests that came meanwhile would be lost.
const ACCEPTED_PART: u32 = 2;
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(1);

/// Carries calls to the router.
pub type Calls = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// How the router is reached.
#[derive(Clone)]
pub enum RouterWay {
    /// Over the network, with what processes of this cluster show each other.
    Network(Box<Endpoint>, Credentials),
    /// In this process, for simulations and tests: what connects.
    InProcess(Arc<dyn Fn() -> BoxFuture<'static, Result<Calls, Status>> + Send + Sync>),
}

impl RouterWay {
    async fn connect(&self) -> Result<Calls, Error> {
        let lost = |error: &dyn std::error::Error| unavailable(with_causes(error));
        match self {
            Self::Network(endpoint, credentials) => {
                let channel = credentials.connect(endpoint).await.map_err(|error| lost(&error))?;
                Ok(Calls::new(channel.map_err(|error| Status::from_error(Box::new(error)))))
            }
            Self::InProcess(connect) => connect().await.map_err(|error| lost(&error)),
        }
    }

    /// A call to it with these messages.
    fn call<T>(&self, messages: T) -> Request<T> {
        match self {
            Self::Network(_, credentials) => credentials.call(messages),
            Self::InProcess(_) => Request::new(messages),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Network(endpoint, _) => endpoint.uri().to_string(),
            Self::InProcess(_) => "in this process".to_owned(),
        }
    }
}

impl From<Endpoint> for RouterWay {
    fn from(endpoint: Endpoint) -> Self {
        Self::Network(Box::new(endpoint), Credentials::default())
    }
}

/// Keeps the node registered with one router until `stop`; `endpoint` is the URL of its own gRPC services. Ends never
/// by itself: a router may come back at any time.
pub async fn stay_joined(node: Arc<Node>, router: impl Into<RouterWay>, endpoint: String, stop: CancellationToken) {
    let (_always, listed) = watch::channel(true);
    Link::new(&node, router.into(), endpoint, (0, None)).stay(&node, listed, &stop).await;
}

/// The node's side of its streams to one router, one after the other.
pub struct Link {
    router: RouterWay,
    endpoint: String,
    key: RouterKey,
    strays: StrayQueue,
    secrets: LifeSecrets,
    state: State,
    backoff: Duration,
    /// The router's, as it said when it was joined last.
    lease: Option<Duration>,
}

impl Link {
    /// To this router, whose place among them is `key`.
    pub fn new(node: &Node, router: RouterWay, endpoint: String, key: RouterKey) -> Self {
        let strays = node.spans.strays.queue();
        let (secrets, state) = (LifeSecrets::default(), State::New);
        Self { router, endpoint, key, strays, secrets, state, backoff: FIRST_BACKOFF, lease: None }
    }

    /// Opens a stream whenever there is none; until `stop`, or until there is none while the router is not `listed`.
    pub async fn stay(mut self, node: &Node, mut listed: watch::Receiver<bool>, stop: &CancellationToken) {
        // Nodes that lost the router at one time come back at different ones, in a simulation the same ones in each
        // run.
        let mut jitter = StdRng::seed_from_u64(node.incarnation().0);
        loop {
            let lost = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                error = self.session(node) => error,
            };
            self.lost(&lost);
            let pause = match lost.retry_after {
                // The same for all that wait for one thing.
                Some(worth) => {
                    let spread = jitter.random_range(Duration::ZERO..=FIRST_BACKOFF);
                    worth.clamp(SHORTEST_INTERVAL, LONGEST_BACKOFF) + spread
                }
                None => jitter.random_range(self.backoff / 2..=self.backoff),
            };
            self.backoff = (self.backoff * 2).min(LONGEST_BACKOFF);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = listed.wait_for(|listed| !listed) => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One stream, from connect to loss, and with it one life.
    async fn session(&mut self, node: &Node) -> Error {
        let calls = match self.router.connect().await {
            Ok(calls) => calls,
            Err(error) => return error,
        };
        // From the registration on the router may book here, and give this node up.
        let registered = clock::now();
        let patience = (self.lease.unwrap_or(FIRST_LEASE) / ACCEPTED_PART).min(ANSWER_TIMEOUT);
        let session = node.work.lives().open(Life::random(&mut rand::rng()), registered + patience);
        let (reports, inbound, hello) = match self.join(node, calls, session.life(), patience).await {
            Ok(joined) => joined,
            Err(error) => return error,
        };
        let period = period(&hello);
        let length = Duration::from_millis(hello.lease_ms.into()).max(3 * period);
        self.lease = Some(length);
        if clock::now().saturating_duration_since(registered) > length / ACCEPTED_PART {
            return unavailable("it answered too late");
        }
        self.joined();
        let reporting = Reporting {
            node,
            session,
            reports,
            key: self.key.clone(),
            lease: Lease::new(length, registered),
            load_sent: registered,
        };
        reporting.session.joined();
        reporting.session.lasts_until(reporting.lease.ends());
        let _joined = Joined::new(node, self.key.clone());
        reporting.run(inbound, period, &self.strays).await
    }

    async fn join(
        &mut self,
        node: &Node,
        calls: Calls,
        life: Life,
        patience: Duration,
    ) -> Result<(Reports, Streaming<RouterReport>, RouterReport), Error> {
        let link = xxh3_64(self.router.name().as_bytes());
        let register = v1::Register { life: life.0, link, ..node.registration(self.endpoint.clone()) };
        let register = self.secrets.begin(rand::rng().random(), register);
        let incarnation = register.incarnation;
        let (reports, outbox) = mpsc::channel(REPORTS + KV_MESSAGES);
        send(&reports, Report::Register(register))?;
        let answer = async {
            let mut client = MembershipClient::new(calls);
            let mut inbound = client.join(self.router.call(ReceiverStream::new(outbox))).await?.into_inner();
            let hello = inbound.message().await?;
            Ok::<_, Status>((inbound, hello))
        };
        let answered = timeout(patience, answer).await.map_err(|_| unavailable("it does not answer"))?;
        let (inbound, hello) = answered.map_err(refused)?;
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

/// What was last logged: each change is one line, not each attempt.
#[derive(PartialEq)]
enum State {
    New,
    Joined,
    Lost(ErrorKind),
}

type Reports = mpsc::Sender<NodeReport>;

/// While this is there, the router's clock may be the one that counts.
struct Joined<'a> {
    node: &'a Node,
    key: RouterKey,
}

impl<'a> Joined<'a> {
    fn new(node: &'a Node, key: RouterKey) -> Self {
        node.reference().joined(&key);
        Self { node, key }
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        self.node.reference().left(&self.key);
    }
}

/// An open stream.
struct Reporting<'a> {
    node: &'a Node,
    session: Session,
    reports: Reports,
    key: RouterKey,
    lease: Lease,
    load_sent: Instant,
}

impl Reporting<'_> {
    /// Reports until the stream is lost, or the lease is over.
    async fn run(mut self, mut inbound: Streaming<RouterReport>, period: Duration, strays: &StrayQueue) -> Error {
        let node = self.node;
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut told = false;
        let mut kv = KvFeed::default();
        // When the cache's changes are to be told, and the load, if there is something.
        let (mut kv_due, mut load_due) = (None, None);
        let read = |from| node.engine.pool().cache_events(from);
        let mut cache_growth = node.engine.pool().cache_growth();
        loop {
            let sent = tokio::select! {
                biased;
                () = node.work.draining(), if !told => {
                    told = true;
                    send(&self.reports, Report::Draining(Draining {}))
                }
                message = inbound.message() => match message {
                    Ok(Some(message)) => {
                        message.clock.iter().for_each(|reading| self.relate(reading));
                        if message.kv_snapshot {
                            kv.start_over();
                            kv_due = Some(in_kv_interval());
                        }
                        Ok(())
                    }
                    Ok(None) => Err(unavailable("it closed the stream")),
                    Err(status) => Err(refused(status)),
                },
                // Behind what it has answered: that is read first.
                () = until(Some(self.lease.ends())) => Err(unavailable("it has answered nothing for its lease")),
                _ = ticks.tick() => {
                    load_due = None;
                    tell_cache(&self.reports, &mut kv, read).and_then(|rest| {
                        kv_due = rest.then(in_kv_interval);
                        self.report()
                    })
                }
                () = until(kv_due) => {
                    tell_cache(&self.reports, &mut kv, read).map(|rest| kv_due = rest.then(in_kv_interval))
                }
                () = until(load_due) => {
                    load_due = None;
                    // On a slow stream the next report is soon enough.
                    if self.reports.capacity() > REPORTS { self.send_load() } else { Ok(()) }
                }
                _ = cache_growth.changed(), if kv_due.is_none() => {
                    kv_due = Some(in_kv_interval());
                    Ok(())
                }
                () = self.session.others_changed(), if load_due.is_none() => {
                    load_due = Some((clock::now() + SETTLES).max(self.load_sent + LOAD_INTERVAL));
                    Ok(())
                }
                // On a slow stream the room is for reports; it is looked at again with the next one.
                spans = strays.next(), if self.reports.capacity() > REPORTS => {
                    send(&self.reports, Report::Spans(spans))
                }
            };
            if let Err(error) = sent {
                return error;
            }
        }
    }

    /// The load, and the question what time it is.
    fn report(&mut self) -> Result<(), Error> {
        self.send_load()?;
        // The next one is as good: on a slow stream the room is for reports.
        if self.reports.capacity() <= REPORTS / 2 {
            return Ok(());
        }
        let now = clock::now();
        let sent_unix_ns = clock().own_unix_ns(now);
        self.lease.sent(sent_unix_ns, now);
        send(&self.reports, Report::ClockProbe(ClockProbe { sent_unix_ns }))
    }

    fn send_load(&mut self) -> Result<(), Error> {
        self.load_sent = clock::now();
        let (own, others) = self.session.calls();
        let load = v1::Load { own: Some(own), others: Some(others), ..self.node.load() };
        send(&self.reports, Report::Load(load))
    }

    /// The router was there; puts this process's Unix times on its time line, if that is the one that counts.
    fn relate(&mut self, reading: &ClockReading) {
        self.lease.answered(reading.sent_unix_ns);
        self.session.lasts_until(self.lease.ends());
        let now = clock().own_unix_ns(clock::now());
        let mut reference = self.node.reference();
        if let Some(behind_ns) = reference.read(&self.key, reading, now) {
            clock::relate(behind_ns);
            drop(reference);
            let behind_ms = behind_ns as f64 / 1e6;
            tracing::info!(behind_ms, "this host's clock is not the router's: times are reported by the router's");
        }
    }
}

/// Sends what has changed in the cache, as far as there is room; whether some of it may be left.
fn tell_cache(reports: &Reports, kv: &mut KvFeed, read: impl Fn(u64) -> CacheUpdate) -> Result<bool, Error> {
    while reports.capacity() > REPORTS {
        let Some(events) = kv.next(&read) else { return Ok(false) };
        send(reports, Report::KvEvents(events))?;
    }
    Ok(true)
}

fn in_kv_interval() -> Instant {
    clock::now() + KV_INTERVAL
}

/// Ready then; never, if that is never.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due.into()).await,
        None => std::future::pending().await,
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

/// The router's answer with a reason in any case: a server without the service sends none, tonic has it beneath.
fn refused(status: Status) -> Error {
    let mut message = match (status.code(), status.message()) {
        (Code::Unimplemented, "") => {
            "nodes cannot join at this address: a router with --nodes has another one for them"
        }
        (code, "") => code.description(),
        (_, message) => message,
    }
    .to_owned();
    add_causes(&mut message, &status);
    Error { message, ..status.into() }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    add_causes(&mut text, error);
    text
}

/// tonic says "transport error" and keeps what happened in the source, which may begin with the same words.
fn add_causes(text: &mut String, error: &dyn std::error::Error) {
    let mut cause = error.source();
    while let Some(source) = cause {
        let said = source.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = source.source();
    }
}

#[cfg(test)]
mod tests {
    use tandem_engine::prefix_cache::PrefixCache;

    use super::*;
    use crate::kv_feed::MOST_HASHES;

    #[test]
    fn a_refusal_always_has_a_reason() {
        let unimplemented = refused(Status::unimplemented(""));
        assert!(unimplemented.message.contains("--nodes"), "{unimplemented}");
        assert_eq!(unimplemented.kind, ErrorKind::Internal);
        assert!(!refused(Status::unknown("")).message.is_empty());
        assert_eq!(refused(Status::unavailable("full")).message, "full");
        let beneath = std::io::Error::other(std::io::Error::other("connection refused"));
        let transport = refused(Status::from_error(Box::new(std::io::Error::other(beneath))));
        assert!(transport.message.ends_with("connection refused"), "{transport}");
    }

    #[test]
    fn a_large_cache_does_not_make_a_slow_stream_a_stuck_one() {
        let mut cache = PrefixCache::default();
        for block in 0..12 * MOST_HASHES as u32 {
            cache.insert((u128::from(block) + 1).into(), block);
        }
        let (reports, mut stream) = mpsc::channel(REPORTS + KV_MESSAGES);
        let mut kv = KvFeed::default();
        let mut tell = || tell_cache(&reports, &mut kv, |from| cache.events_since(from)).unwrap();
        // Nobody reads: the cache leaves all the room to the reports that they had.
        assert!(tell() && tell());
        for _ in 0..REPORTS {
            send(&reports, Report::Draining(Draining {})).unwrap();
        }
        assert!(tell());
        let stuck = send(&reports, Report::Draining(Draining {})).unwrap_err();
        assert!(stuck.message.contains("stuck"), "{stuck}");
        let mut seen = Vec::new();
        let mut read = |stream: &mut mpsc::Receiver<NodeReport>| {
            while let Ok(NodeReport { report: Some(report) }) = stream.try_recv() {
                if let Report::KvEvents(events) = report {
                    seen.push((events.snapshot, events.first as usize, events.hashes.len() / 16));
                }
            }
        };
        read(&mut stream);
        assert!(!tell(), "now there is room for the rest");
        read(&mut stream);
        let parts: Vec<_> = (0..12).map(|part| (part == 0, part * MOST_HASHES, MOST_HASHES)).collect();
        assert_eq!(seen, parts);
    }
}
