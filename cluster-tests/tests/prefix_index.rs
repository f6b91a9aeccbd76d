//! The nodes' caches as the router knows them: real nodes and the router's real membership service, over gRPC.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tandem_engine::{Prefix, SamplingParams, SequenceRequest};
use tandem_kvtransfer::Faults;
use tandem_node::credentials::Credentials;
use tandem_node::routers::stay_joined;
use tandem_node::{Node, NodeArgs, NodeConfig};
use tandem_proto::hash::sequence_hashes;
use tandem_proto::v1::membership_client::MembershipClient;
use tandem_proto::v1::membership_server::MembershipServer;
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{self, KvEvents, NodeReport, Role};
use tandem_proto::{CacheSalt, SequenceHash, SequenceKey};
use tandem_router::membership::{Expected, JoinService, Membership};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

/// The router's view has no signal for a test.
const POLL: Duration = Duration::from_millis(5);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// A router's membership, and where it is served.
async fn serve(model_digest: u64, eos_token_id: u32) -> (Membership, String) {
    let membership = Membership::new(Expected { model_digest, eos_token_id }, Duration::from_secs(3));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = Server::builder().add_service(MembershipServer::new(JoinService::new(membership.clone(), |_| ())));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (membership, url)
}

async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut is: impl FnMut() -> F) -> T {
    let wait = async {
        loop {
            if let Some(found) = is().await {
                return found;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

fn blocks(membership: &Membership) -> usize {
    membership.index().blocks
}

fn config(router: &str, name: &str) -> NodeConfig {
    let flags = format!("node --router {router} --simulated --transport tcp --kv-blocks 40 --node-id {name}");
    Cli::parse_from(flags.split_whitespace()).node.resolve(Role::Decode).unwrap()
}

async fn read_prompt(node: &Node, tokens: Vec<u32>) {
    let (pool, spec) = (node.engine.pool(), node.engine.spec());
    let hashes = sequence_hashes(SequenceKey::new(spec.model_digest, CacheSalt::NONE), &tokens, spec.block_tokens);
    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: tokens.len() };
    let lease = pool.reserve_prefix(pool.blocks_for(tokens.len() + 1), prefix).await.unwrap();
    let request = SequenceRequest {
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
    };
    let mut stream = node.engine.submit(request).unwrap();
    while stream.next().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_router_follows_its_nodes_caches() {
    let probe = Node::start(&config("http://127.0.0.1:9", "probe"), Faults::default()).await.unwrap();
    let spec = probe.engine.spec();
    let (membership, url) = serve(spec.model_digest, spec.eos_token_id).await;
    let mut nodes = Vec::new();
    for name in ["d0", "d1"] {
        let config = config(&url, name);
        let node = Node::start(&config, Faults::default()).await.unwrap();
        let stop = CancellationToken::new();
        let endpoint = "http://127.0.0.1:9".to_owned();
        let joined = tokio::spawn(stay_joined(
            Arc::clone(&node),
            config.routers.clone(),
            Credentials::default(),
            endpoint,
            stop.clone(),
        ));
        nodes.push((node, stop, joined));
    }
    let prompt = |start: u32, blocks: u32| -> Vec<u32> { (0..=blocks * 16).map(|i| start + i % 5).collect() };
    read_prompt(&nodes[0].0, prompt(3, 10)).await;
    until("ten blocks of d0", || async { (blocks(&membership) == 10).then_some(()) }).await;
    // Four of them are the same.
    read_prompt(&nodes[1].0, [&prompt(3, 10)[..64], &[1; 33]].concat()).await;
    until("two more of d1", || async { (blocks(&membership) == 12).then_some(()) }).await;
    let of_nodes = |membership: &Membership| {
        let shown = membership.json();
        let nodes = shown["nodes"].as_array().unwrap().clone();
        nodes.iter().map(|node| node["indexed_blocks"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(of_nodes(&membership), [10, 6]);

    // Room is made for something else; the router hears of it with the next report at the latest.
    drop(nodes[0].0.engine.pool().try_reserve(35).unwrap());
    until("d0 has five left", || async { (of_nodes(&membership) == [5, 6]).then_some(()) }).await;

    let (_, stop, joined) = nodes.remove(0);
    stop.cancel();
    joined.await.unwrap();
    until("what d0 had is gone with it", || async { (blocks(&membership) == 6).then_some(()) }).await;
    assert_eq!((of_nodes(&membership), membership.index().gaps), (vec![6], 0));
    for (_, stop, joined) in nodes {
        stop.cancel();
        joined.await.unwrap();
    }
}

/// A node that is not there.
fn register() -> v1::Register {
    v1::Register {
        node_id: "p".into(),
        role: Role::Prefill.into(),
        incarnation: 1,
        compatibility_digest: 5,
        protocol: tandem_proto::PROTOCOL_VERSION,
        model_digest: 9,
        model_name: "m".into(),
        endpoint: "http://127.0.0.1:9".into(),
        transports: vec![v1::TransportInfo {
            backend: "mem".into(),
            name: "mem".into(),
            build_id: "1".into(),
            reach: None,
        }],
        total_blocks: 64,
        block_tokens: 16,
        max_context_tokens: 1024,
        max_running: 8,
        max_batched_tokens: 512,
        eos_token_id: 2,
        processor: None,
        arithmetic: "f32".into(),
        kv_order: "bf16-pairs".into(),
        life: 1,
        link: 1,
        ..v1::Register::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_loses_messages_is_asked_for_a_snapshot_once() {
    let (membership, url) = serve(9, 2).await;
    let (reports, outbox) = mpsc::channel(8);
    let send = async |report| reports.send(NodeReport { report: Some(report) }).await.unwrap();
    let stored = |first, snapshot, hashes: &[u128]| {
        let hashes = hashes.iter().flat_map(|hash| SequenceHash::from(*hash).to_wire()).collect();
        Report::KvEvents(KvEvents { first, snapshot, hashes, removed: Vec::new() })
    };
    send(Report::Register(register())).await;
    let mut client = MembershipClient::connect(url).await.unwrap();
    let mut answers = client.join(ReceiverStream::new(outbox)).await.unwrap().into_inner();
    assert!(!answers.message().await.unwrap().unwrap().kv_snapshot);

    send(stored(0, true, &[1, 2])).await;
    send(stored(3, false, &[4])).await;
    let asked = answers.message().await.unwrap().unwrap();
    assert_eq!((asked.kv_snapshot, asked.accepted_incarnation, asked.lease_ms), (true, 1, 3000));
    // Still on the way when the router asked.
    send(stored(4, false, &[5])).await;
    send(stored(5, true, &[1, 2, 4, 5])).await;
    until("the snapshot", || async { (blocks(&membership) == 4).then_some(()) }).await;
    assert_eq!(membership.index().gaps, 1);
    // It would be asked again for another gap, and not before.
    send(stored(100, false, &[6])).await;
    assert!(answers.message().await.unwrap().unwrap().kv_snapshot);
    assert_eq!((membership.index().gaps, blocks(&membership)), (2, 4));
    drop(reports);
    assert!(answers.message().await.unwrap().is_none());
    until("the node left", || async { (blocks(&membership) == 0).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_names_have_another_length_is_refused_and_counted() {
    let (membership, url) = serve(9, 2).await;
    let refused = || membership.refusals().counts().iter().map(|(_, count)| count).sum::<u64>();
    for (times, bytes) in (1..).zip([8, 17]) {
        let (reports, outbox) = mpsc::channel(8);
        let events = KvEvents { first: 0, snapshot: true, hashes: vec![1; bytes], removed: Vec::new() };
        let register = v1::Register { incarnation: times, life: times, ..register() };
        for report in [Report::Register(register), Report::KvEvents(events)] {
            reports.send(NodeReport { report: Some(report) }).await.unwrap();
        }
        let mut client = MembershipClient::connect(url.clone()).await.unwrap();
        let mut answers = client.join(ReceiverStream::new(outbox)).await.unwrap().into_inner();
        assert!(answers.message().await.unwrap().is_some(), "it was accepted");
        let status = answers.message().await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert_eq!(status.message(), format!("sequence hashes have 16 bytes each, not {bytes}"));
        assert_eq!((refused(), blocks(&membership)), (times, 0));
        until("the node is out", || async { (membership.totals().prefill_nodes == 0).then_some(()) }).await;
    }
}
