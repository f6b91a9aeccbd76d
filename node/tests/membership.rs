//! The node's side of the membership stream against a small router.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Parser;
use tandem_engine::{Prefix, SamplingParams, SequenceRequest};
use tandem_kvtransfer::Faults;
use tandem_node::call::Events;
use tandem_node::membership::stay_joined;
use tandem_node::{Node, NodeArgs, NodeConfig};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::v1::membership_server::{Membership, MembershipServer};
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{KvEvents, NodeReport, Register, Role, RouterReport};
use tandem_proto::{Error, ErrorKind, Incarnation};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

const ENDPOINT: &str = "http://127.0.0.1:9";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// Accepts every node but the `dead` incarnation and shows what it says; each stream ends when its connection does.
struct FakeRouter {
    seen: mpsc::Sender<Report>,
    dead: Arc<AtomicU64>,
    /// It lost count of the node's cache.
    lost_count: Arc<Notify>,
}

#[tonic::async_trait]
impl Membership for FakeRouter {
    type JoinStream = ReceiverStream<Result<RouterReport, Status>>;

    async fn join(&self, request: Request<Streaming<NodeReport>>) -> Result<Response<Self::JoinStream>, Status> {
        let (seen, dead, mut reports) = (self.seen.clone(), self.dead.clone(), request.into_inner());
        let (answers, outbox) = mpsc::channel(1);
        let lost_count = self.lost_count.clone();
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
                if let Report::Register(register) = &report {
                    let accepted_incarnation = register.incarnation;
                    if accepted_incarnation == dead.load(Ordering::Relaxed) {
                        let _ = seen.send(report).await;
                        let _ = answers.send(Err(Error::new(ErrorKind::DeclaredDead, "dead").into())).await;
                        return;
                    }
                    let hello = RouterReport {
                        accepted_incarnation,
                        report_interval_ms: 10,
                        lease_ms: 1000,
                        kv_snapshot: false,
                        clock: None,
                    };
                    let _ = answers.send(Ok(hello)).await;
                }
                if seen.send(report).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(outbox)))
    }
}

async fn serve(listener: TcpListener, stop: CancellationToken) -> mpsc::Receiver<Report> {
    serve_but(listener, stop, Arc::default(), Arc::default()).await
}

async fn serve_but(
    listener: TcpListener,
    stop: CancellationToken,
    dead: Arc<AtomicU64>,
    lost_count: Arc<Notify>,
) -> mpsc::Receiver<Report> {
    let (seen, reports) = mpsc::channel(4);
    let server = Server::builder().add_service(MembershipServer::new(FakeRouter { seen, dead, lost_count }));
    tokio::spawn(async move {
        tokio::select! {
            served = server.serve_with_incoming(TcpListenerStream::new(listener)) => served.unwrap(),
            () = stop.cancelled() => {}
        }
    });
    reports
}

fn config(router: std::net::SocketAddr) -> NodeConfig {
    let flags = format!("node --router http://{router} --simulated --transport tcp --kv-blocks 7 --node-id d0");
    Cli::parse_from(flags.split_whitespace()).node.resolve(Role::Decode).unwrap()
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
    let joined = tokio::spawn(stay_joined(Arc::clone(&node), config.router.clone(), ENDPOINT.to_owned(), stop.clone()));

    let first = registered(&mut reports).await;
    assert_eq!((first.node_id.as_str(), first.role(), first.total_blocks), ("d0", Role::Decode, 7));
    assert_eq!((first.incarnation, first.block_tokens), (node.incarnation().0, 16));
    let lease = node.engine.pool().try_reserve(3).unwrap();
    while !matches!(reports.recv().await, Some(Report::Load(load)) if load.free_blocks == 4) {}
    drop(lease);

    // The router restarts on the same port.
    router_dies.cancel();
    drop(reports);
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let mut reports = serve(listener, CancellationToken::new()).await;
    assert_eq!(registered(&mut reports).await.incarnation, first.incarnation);

    node.work.drain();
    while !matches!(reports.recv().await, Some(Report::Draining(_))) {}
    stop.cancel();
    joined.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incarnation_that_was_declared_dead_ends_its_calls_and_comes_back_as_another() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(listener.local_addr().unwrap());
    let node = Node::start(&config, Faults::default()).await.unwrap();
    let first = node.incarnation();
    let (stop, dead) = (CancellationToken::new(), Arc::new(AtomicU64::new(first.0)));
    let mut reports = serve_but(listener, CancellationToken::new(), dead, Arc::default()).await;
    let lease = Arc::new(node.engine.pool().try_reserve(3).unwrap());
    let held = Arc::downgrade(&lease);
    let started = std::future::ready(Ok(()));
    let mut call = tandem_node::call::spawn(&node.work, started, |(), _events: Events<()>| async move {
        let _held = lease;
        std::future::pending().await
    })
    .unwrap();
    let joined = tokio::spawn(stay_joined(Arc::clone(&node), config.router.clone(), ENDPOINT.to_owned(), stop.clone()));

    assert_eq!(registered(&mut reports).await.incarnation, first.0);
    let second = registered(&mut reports).await;
    assert_eq!((second.node_id.as_str(), Incarnation(second.incarnation)), ("d0", node.incarnation()));
    assert_ne!(second.incarnation, first.0);
    let ended = call.next().await.unwrap().unwrap_err();
    assert_eq!(Error::from(ended).kind, ErrorKind::DeclaredDead);
    assert!(held.upgrade().is_none(), "what the call held is back");
    assert_eq!(node.lives(), 2);
    while !matches!(reports.recv().await, Some(Report::Load(load)) if load.free_blocks == 7 && load.waiting == 0) {}
    stop.cancel();
    joined.await.unwrap();
}

/// Has the engine read a prompt of `blocks` full blocks that begins with `start`; the hashes of these.
async fn read_prompt(node: &Node, start: u32, blocks: usize) -> Vec<u64> {
    let (pool, spec) = (node.engine.pool(), node.engine.spec());
    let tokens: Vec<u32> = (0..=blocks as u32 * 16).map(|i| start + i % 3).collect();
    let hashes = sequence_hashes(spec.model_digest, &tokens, spec.block_tokens);
    let prefix = Prefix { hashes: &hashes, tokens: tokens.len() };
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
    let mut reports = serve_but(listener, CancellationToken::new(), Arc::default(), lost_count.clone()).await;
    let joined = tokio::spawn(stay_joined(Arc::clone(&node), config.router.clone(), ENDPOINT.to_owned(), stop.clone()));

    registered(&mut reports).await;
    let Some(Report::KvEvents(mut snapshot)) = reports.recv().await else { panic!("before the first load") };
    snapshot.hashes.sort_unstable();
    let mut expected = before.clone();
    expected.sort_unstable();
    assert_eq!((snapshot.first, snapshot.snapshot, &snapshot.hashes), (0, true, &expected));
    assert!(matches!(reports.recv().await, Some(Report::Load(_))));

    let more = read_prompt(&node, 9, 2).await;
    let events = kv_events(&mut reports).await;
    assert_eq!((events.first, events.snapshot, events.hashes), (2, false, more.clone()));
    assert!(events.removed.is_empty());

    // Seven blocks in all: what is cached has to go.
    drop(node.engine.pool().try_reserve(7).unwrap());
    let events = kv_events(&mut reports).await;
    assert_eq!((events.first, events.hashes.len(), events.removed), (4, 4, vec![0b1111]));

    let last = read_prompt(&node, 20, 1).await;
    assert_eq!(kv_events(&mut reports).await.hashes, last);
    lost_count.notify_one();
    let again = kv_events(&mut reports).await;
    assert_eq!((again.first, again.snapshot, again.hashes), (9, true, last));
    stop.cancel();
    joined.await.unwrap();
}
