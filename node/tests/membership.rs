//! The node's side of the membership stream against a small router.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use clap::Parser;
use tandem_engine::{KvLease, Prefix, SamplingParams, SequenceRequest};
use tandem_kvtransfer::Faults;
use tandem_node::call::{EventStream, Events};
use tandem_node::credentials::Credentials;
use tandem_node::membership::Link;
use tandem_node::routers::stay_joined;
use tandem_node::{Node, NodeArgs, NodeConfig};
use tandem_ports::is_life_secret;
use tandem_proto::hash::sequence_hashes;
use tandem_proto::v1::membership_server::{Membership, MembershipServer};
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{ClockReading, KvEvents, Load, NodeReport, Register, Role, RouterReport};
use tandem_proto::{CacheSalt, Error, ErrorKind, Life, SequenceHash, SequenceKey};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

const ENDPOINT: &str = "http://127.0.0.1:9";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// Accepts every node and shows what it says; each stream ends when its connection does.
struct FakeRouter {
    seen: mpsc::Sender<Report>,
    manner: Manner,
    /// It lost count of the node's cache.
    lost_count: Arc<Notify>,
}

/// How it answers.
#[derive(Clone, Copy)]
struct Manner {
    lease_ms: u32,
    /// It does not answer probes.
    mute: bool,
    /// It accepts a node so late.
    late: Duration,
    /// It refuses a node that cannot show a secret, for so long.
    wait: Option<Duration>,
}

const WELL: Manner = Manner { lease_ms: 60_000, mute: false, late: Duration::ZERO, wait: None };

#[tonic::async_trait]
impl Membership for FakeRouter {
    type JoinStream = ReceiverStream<Result<RouterReport, Status>>;

    async fn join(&self, request: Request<Streaming<NodeReport>>) -> Result<Response<Self::JoinStream>, Status> {
        let (seen, mut reports) = (self.seen.clone(), request.into_inner());
        let (answers, outbox) = mpsc::channel(4);
        let (lost_count, Manner { lease_ms, mute, late, wait }) = (self.lost_count.clone(), self.manner);
        tokio::spawn(async move {
            loop {
                let report = tokio::select! {
                    report = reports.message() => match report {
                        Ok(Some(NodeReport { report: Some(report) })) => report,
                        _ => return,
                    },
                    () = lost_count.notified() => {
                        let _ = answers.send(Ok(RouterReport { kv_snapshot: true, ..RouterReport::default() })).await;
                        continue;
                    }
                };
                let answer = match &report {
                    Report::Register(Register { ended, .. }) if wait.is_some() && ended.is_empty() => {
                        let refusal = Error::new(ErrorKind::Unavailable, "another process has the name");
                        let _ = answers.send(Err(Error { retry_after: wait, ..refusal }.into())).await;
                        let _ = seen.send(report).await;
                        return;
                    }
                    Report::Register(Register { incarnation, .. }) => {
                        sleep(late).await;
                        let accepted_incarnation = *incarnation;
                        Some(RouterReport {
                            accepted_incarnation,
                            report_interval_ms: 10,
                            lease_ms,
                            ..RouterReport::default()
                        })
                    }
                    Report::ClockProbe(probe) if !mute => {
                        let sent_unix_ns = probe.sent_unix_ns;
                        let clock = ClockReading {
                            sent_unix_ns,
                            received_unix_ns: sent_unix_ns,
                            answered_unix_ns: sent_unix_ns,
                        };
                        Some(RouterReport { clock: Some(clock), ..RouterReport::default() })
                    }
                    _ => None,
                };
                if let Some(answer) = answer {
                    let _ = answers.send(Ok(answer)).await;
                }
                // What is said of the clock is of no interest.
                if !matches!(report, Report::ClockProbe(_)) && seen.send(report).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(outbox)))
    }
}

async fn serve(listener: TcpListener, stop: CancellationToken) -> mpsc::Receiver<Report> {
    serve_as(listener, stop, Arc::default(), WELL).await
}

async fn serve_as(
    listener: TcpListener,
    stop: CancellationToken,
    lost_count: Arc<Notify>,
    manner: Manner,
) -> mpsc::Receiver<Report> {
    let (seen, reports) = mpsc::channel(4);
    let server = Server::builder().add_service(MembershipServer::new(FakeRouter { seen, manner, lost_count }));
    tokio::spawn(async move {
        tokio::select! {
            served = server.serve_with_incoming(TcpListenerStream::new(listener)) => served.unwrap(),
            () = stop.cancelled() => {}
        }
    });
    reports
}

fn config(router: SocketAddr) -> NodeConfig {
    config_of(&[router])
}

fn config_of(routers: &[SocketAddr]) -> NodeConfig {
    let routers: String = routers.iter().map(|router| format!(" --router http://{router}")).collect();
    let flags = format!("node{routers} --simulated --transport tcp --kv-blocks 7 --node-id d0");
    Cli::parse_from(flags.split_whitespace()).node.resolve(Role::Decode).unwrap()
}

/// Keeps the node joined to the routers of its configuration, until `stop`.
fn joins(node: &Arc<Node>, config: &NodeConfig, stop: &CancellationToken) -> JoinHandle<()> {
    let (routers, endpoint) = (config.routers.clone(), ENDPOINT.to_owned());
    tokio::spawn(stay_joined(Arc::clone(node), routers, Credentials::default(), endpoint, stop.clone()))
}

async fn registered(reports: &mut mpsc::Receiver<Report>) -> Register {
    match reports.recv().await {
        Some(Report::Register(register)) => register,
        other => panic!("expected to be registered with first, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registers_reports_and_comes_back_as_the_same_incarnation() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = config(address);
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let (stop, router_dies) = (CancellationToken::new(), CancellationToken::new());
    let mut reports = serve(listener, router_dies.clone()).await;
    let joined = joins(&node, &config, &stop);

    let first = registered(&mut reports).await;
    assert_eq!((first.node_id.as_str(), first.role(), first.total_blocks), ("d0", Role::Decode, 7));
    assert_eq!((first.incarnation, first.block_tokens), (node.incarnation().0, 16));
    let lease = node.engine.pool().try_reserve(3).unwrap();
    while !matches!(reports.recv().await, Some(Report::Load(load)) if load.free_blocks == 4) {}
    drop(lease);

    // The router restarts on the same port.
    router_dies.cancel();
    drop(reports);
    let mut reports = serve(bound(address).await, CancellationToken::new()).await;
    assert_eq!(registered(&mut reports).await.incarnation, first.incarnation);

    node.work.drain();
    while !matches!(reports.recv().await, Some(Report::Draining(_))) {}
    stop.cancel();
    joined.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_was_unlisted_for_a_while_is_shown_that_the_last_life_is_over() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let node = Node::start(&config(address), Faults::default()).await.unwrap();
    let stop = CancellationToken::new();
    let (list, listed) = watch::channel(true);
    let router = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let link = Link::new(&node, router.into(), ENDPOINT.to_owned(), (0, None));
    let staying = tokio::spawn({
        let (node, stop) = (Arc::clone(&node), stop.clone());
        async move { link.stay(&node, listed, &stop).await }
    });
    let dies = CancellationToken::new();
    let mut reports = serve(listener, dies.clone()).await;
    let first = registered(&mut reports).await;
    while !matches!(reports.recv().await, Some(Report::Load(_))) {}
    list.send_replace(false);
    while !matches!(reports.recv().await, Some(Report::Load(_))) {}
    list.send_replace(true);
    dies.cancel();
    drop(reports);
    let dies = CancellationToken::new();
    let mut reports = serve(bound(address).await, dies.clone()).await;
    let second = registered(&mut reports).await;
    assert!(second.ended.iter().any(|life| is_life_secret(&life.secret, &first.secret_digest)));
    // Unlisted for good, it ends with its stream.
    list.send_replace(false);
    assert!(!staying.is_finished());
    dies.cancel();
    drop(reports);
    staying.await.unwrap();
}

/// At an address that somebody else had just now.
async fn bound(address: SocketAddr) -> TcpListener {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => sleep(Duration::from_millis(5)).await,
        }
    }
}

/// A call of this life that holds blocks until it is cancelled.
fn call(node: &Node, life: u64, blocks: usize) -> (EventStream<()>, Weak<KvLease>) {
    let lease = Arc::new(node.engine.pool().try_reserve(blocks).unwrap());
    let held = Arc::downgrade(&lease);
    let started = std::future::ready(Ok(()));
    let call = tandem_node::call::spawn(&node.work, Some(Life(life)), started, |(), _events: Events<()>| async move {
        let _held = lease;
        std::future::pending().await
    });
    (call.unwrap(), held)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_lost_takes_its_calls_along_and_no_others() {
    let listeners = [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let [one, other] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let config = config_of(&[one, other]);
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let [first, second] = listeners;
    let (stop, dies) = (CancellationToken::new(), CancellationToken::new());
    let (mut of_one, mut of_other) = (serve(first, dies.clone()).await, serve(second, CancellationToken::new()).await);
    let joined = joins(&node, &config, &stop);
    let (a, b) = (registered(&mut of_one).await, registered(&mut of_other).await);
    assert_eq!((a.incarnation, b.incarnation), (node.incarnation().0, node.incarnation().0));
    assert!(a.life != b.life && a.link != b.link && a.life != 0);

    let ((mut lost, held), (kept, still_held)) = (call(&node, a.life, 3), call(&node, b.life, 2));
    // The other router is told soon what it cannot know itself.
    let sees = |own: u32, others: u32, load: &Load| {
        (load.own.unwrap_or_default().requests, load.others.unwrap_or_default().requests) == (own, others)
    };
    while !matches!(of_other.recv().await, Some(Report::Load(load)) if sees(1, 1, &load) && load.free_blocks == 2) {}
    dies.cancel();
    drop(of_one);
    let ended = lost.next().await.unwrap().unwrap_err();
    assert_eq!(Error::from(ended).kind, ErrorKind::DeclaredDead);
    while !matches!(of_other.recv().await, Some(Report::Load(load)) if sees(1, 0, &load) && load.free_blocks == 5) {}
    assert!(held.upgrade().is_none() && still_held.upgrade().is_some());

    // It is back at its address, and gets the same node with another life.
    let mut of_one = serve(bound(one).await, CancellationToken::new()).await;
    let again = registered(&mut of_one).await;
    assert_eq!((again.incarnation, again.link), (a.incarnation, a.link));
    assert_ne!(again.life, a.life);
    while !matches!(of_one.recv().await, Some(Report::Load(load)) if sees(0, 1, &load)) {}
    drop(kept);
    stop.cancel();
    joined.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_answers_nothing_for_its_lease_is_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(listener.local_addr().unwrap());
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let stop = CancellationToken::new();
    let mute = Manner { lease_ms: 300, mute: true, ..WELL };
    let mut reports = serve_as(listener, CancellationToken::new(), Arc::default(), mute).await;
    let joined = joins(&node, &config, &stop);
    let first = registered(&mut reports).await;
    let (mut lost, held) = call(&node, first.life, 3);
    let second = loop {
        if let Some(Report::Register(register)) = reports.recv().await {
            break register;
        }
    };
    assert_eq!((second.incarnation, second.link), (first.incarnation, first.link));
    assert_ne!(second.life, first.life);
    let ended = lost.next().await.unwrap().unwrap_err();
    assert_eq!(Error::from(ended).kind, ErrorKind::DeclaredDead);
    assert!(held.upgrade().is_none(), "what the call held is back");
    stop.cancel();
    joined.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_that_is_accepted_too_late_is_not_used() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(listener.local_addr().unwrap());
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let stop = CancellationToken::new();
    // The rest of the lease would do for a report; an answer to it would come behind the end.
    let late = Manner { lease_ms: 900, late: Duration::from_millis(600), ..WELL };
    let mut reports = serve_as(listener, CancellationToken::new(), Arc::default(), late).await;
    let joined = joins(&node, &config, &stop);
    // The first time it learns the lease, the second time it does not wait so long.
    let mut lives = Vec::new();
    for _ in 0..3 {
        lives.push(registered(&mut reports).await.life);
    }
    lives.dedup();
    assert_eq!((lives.len(), node.work.lives().counts()), (3, (0, 0)), "no life began, and no load was told");
    stop.cancel();
    joined.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_told_to_wait_comes_again_then_and_shows_that_its_last_life_is_over() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(listener.local_addr().unwrap());
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let stop = CancellationToken::new();
    let wait = Duration::from_millis(400);
    let manner = Manner { wait: Some(wait), ..WELL };
    let mut reports = serve_as(listener, CancellationToken::new(), Arc::default(), manner).await;
    // Before the refusal: this test may see that late, and would measure too little.
    let start = Instant::now();
    let joined = joins(&node, &config, &stop);
    let first = registered(&mut reports).await;
    let refused = Instant::now();
    let second = registered(&mut reports).await;
    assert!(start.elapsed() >= wait, "{:?}", start.elapsed());
    assert!(refused.elapsed() < wait + Duration::from_secs(2), "{:?}", refused.elapsed());
    let shown = second.ended.iter().any(|life| is_life_secret(&life.secret, &first.secret_digest));
    assert!(shown && first.secret_digest != second.secret_digest && first.ended.is_empty());
    while !matches!(reports.recv().await, Some(Report::Load(_))) {}
    stop.cancel();
    joined.await.unwrap();
}

/// Has the engine read a prompt of `blocks` full blocks that begins with `start`; the hashes of these.
async fn read_prompt(node: &Node, start: u32, blocks: usize) -> Vec<SequenceHash> {
    let (pool, spec) = (node.engine.pool(), node.engine.spec());
    let tokens: Vec<u32> = (0..=blocks as u32 * 16).map(|i| start + i % 3).collect();
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), &tokens, spec.block_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: tokens.len() };
    let lease = pool.reserve_prefix(pool.blocks_for(tokens.len() + 1), prefix).await.unwrap();
    let mut stream = node
        .engine
        .submit(SequenceRequest {
            id: "a prompt".to_owned(),
            prompt_len: tokens.len(),
            tokens,
            computed: lease.cached_tokens(),
            lease: Arc::new(lease),
            max_new_tokens: 1,
            sampling: SamplingParams::GREEDY.into(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
            deadline: None,
            priority: 0,
            report_layers: Vec::new(),
        })
        .unwrap();
    while stream.next().await.is_some() {}
    hashes[..blocks].to_vec()
}

fn hashes(events: &KvEvents) -> Vec<SequenceHash> {
    SequenceHash::all_from_wire(&events.hashes).unwrap()
}

async fn kv_events(reports: &mut mpsc::Receiver<Report>) -> KvEvents {
    loop {
        if let Report::KvEvents(events) = reports.recv().await.unwrap() {
            return events;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tells_what_its_cache_holds_from_a_snapshot_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(listener.local_addr().unwrap());
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let before = read_prompt(&node, 5, 2).await;
    let (stop, lost_count) = (CancellationToken::new(), Arc::new(Notify::new()));
    let mut reports = serve_as(listener, CancellationToken::new(), lost_count.clone(), WELL).await;
    let joined = joins(&node, &config, &stop);

    registered(&mut reports).await;
    let Some(Report::KvEvents(snapshot)) = reports.recv().await else { panic!("before the first load") };
    let mut cached = hashes(&snapshot);
    cached.sort_unstable();
    let mut expected = before.clone();
    expected.sort_unstable();
    assert_eq!((snapshot.first, snapshot.snapshot, cached), (0, true, expected));
    assert!(matches!(reports.recv().await, Some(Report::Load(_))));

    let more = read_prompt(&node, 9, 2).await;
    let events = kv_events(&mut reports).await;
    assert_eq!((events.first, events.snapshot, hashes(&events)), (2, false, more.clone()));
    assert!(events.removed.is_empty());

    // Seven blocks in all: what is cached has to go.
    drop(node.engine.pool().try_reserve(7).unwrap());
    let events = kv_events(&mut reports).await;
    assert_eq!((events.first, hashes(&events).len(), events.removed), (4, 4, vec![0b1111]));

    let last = read_prompt(&node, 20, 1).await;
    assert_eq!(hashes(&kv_events(&mut reports).await), last);
    lost_count.notify_one();
    let again = kv_events(&mut reports).await;
    assert_eq!((again.first, again.snapshot, hashes(&again)), (9, true, last));
    stop.cancel();
    joined.await.unwrap();
}
