//! A node that lost one of its parts leaves: it must not stay in rotation and fail every request.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use futures::future::BoxFuture;
use tandem_kvtransfer::error::TransferError;
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_kvtransfer::{Counters, Grant, Incoming, Outgoing, Transport};
use tandem_node::{Listeners, Node, NodeArgs, Running};
use tandem_proto::v1::{self, Role};
use tonic::service::Routes;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// Works until it is told to have failed.
struct Failing {
    transport: Arc<MemTransport>,
    failed: Arc<AtomicBool>,
}

impl Transport for Failing {
    fn info(&self) -> v1::TransportInfo {
        self.transport.info()
    }

    fn address(&self) -> Vec<u8> {
        self.transport.address()
    }

    fn counters(&self) -> Arc<Counters> {
        self.transport.counters()
    }

    fn failed(&self) -> Option<String> {
        self.failed.load(Ordering::SeqCst).then(|| "UCX: its thread panicked".to_owned())
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        self.transport.accept(grant)
    }

    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        self.transport.open(ticket)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_its_kv_transport_leaves() {
    let flags = "node --router http://127.0.0.1:1 --simulated --kv-blocks 7 --listen 127.0.0.1:0 --admin 127.0.0.1:0";
    let config = Cli::parse_from(flags.split_whitespace()).node.resolve(Role::Decode).unwrap();
    let failed = Arc::new(AtomicBool::new(false));
    let told = failed.clone();
    let node = Node::start_with(&config, |arena| {
        let transport = MemTransport::new(&MemNetwork::default(), arena, MemFaults::default());
        Ok(Arc::new(Failing { transport, failed: told }))
    });
    let node = node.await.unwrap();
    let listeners = Listeners::bind(&config).await.unwrap();
    let mut running = Running::start(node, &config, listeners, "test", Routes::default()).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(500), running.until_told()).await.is_err(), "all is well");
    failed.store(true, Ordering::SeqCst);
    let left = tokio::time::timeout(Duration::from_secs(10), running.until_told()).await.unwrap();
    assert_eq!(left.unwrap_err().to_string(), "the KV transport has failed: UCX: its thread panicked");
}
