//! The node's side of the membership stream against a small router.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tandem_kvtransfer::transport::Faults;
use tandem_node::membership::stay_joined;
use tandem_node::{Node, NodeArgs, NodeConfig};
use tandem_proto::v1::membership_server::{Membership, MembershipServer};
use tandem_proto::v1::node_report::Report;
use tandem_proto::v1::{NodeReport, Register, Role, RouterReport};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// Accepts every node and shows what it says; each stream ends when its connection does.
struct FakeRouter(mpsc::Sender<Report>);

#[tonic::async_trait]
impl Membership for FakeRouter {
    type JoinStream = ReceiverStream<Result<RouterReport, Status>>;

    async fn join(&self, request: Request<Streaming<NodeReport>>) -> Result<Response<Self::JoinStream>, Status> {
        let (seen, mut reports) = (self.0.clone(), request.into_inner());
        let (answers, outbox) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Ok(Some(NodeReport { report: Some(report) })) = reports.message().await {
                if let Report::Register(register) = &report {
                    let accepted_incarnation = register.incarnation;
                    let hello = RouterReport { accepted_incarnation, report_interval_ms: 10, lease_ms: 1000 };
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
    let (seen, reports) = mpsc::channel(4);
    let server = Server::builder().add_service(MembershipServer::new(FakeRouter(seen)));
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
    let register = node.registration("http://127.0.0.1:9".to_owned());
    let joined = tokio::spawn(stay_joined(Arc::clone(&node), config.router.clone(), register, stop.clone()));

    let first = registered(&mut reports).await;
    assert_eq!((first.node_id.as_str(), first.role(), first.total_blocks), ("d0", Role::Decode, 7));
    assert_eq!((first.incarnation, first.block_tokens), (node.incarnation.0, 16));
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
