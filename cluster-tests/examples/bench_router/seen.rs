//! What it costs to be seen: two more routers with their nodes, which take turns with the others. One is *unseen*: it
//! logs nothing, and its flags turn traces off as far as they can be. The other one is *seen*: it logs, it exports its
//! spans, and somebody may watch its page.
use anyhow::Context;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options, Process};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;

use crate::Args;

/// The flag that makes this program a collector.
pub const COLLECTOR: &str = "--collector";

/// Both clusters, and what the seen one is seen by.
pub struct Compared {
    pub unseen: Cluster,
    pub seen: Cluster,
    _collector: Process,
    _watcher: Option<tokio::task::JoinHandle<()>>,
}

impl Compared {
    /// Beside `cluster`, with its options.
    ///
    /// # Errors
    /// A program does not start.
    pub async fn start(cluster: &Cluster, args: &Args) -> anyhow::Result<Self> {
        let own = std::env::current_exe()?;
        let own = own.to_str().context("this program's path is not UTF-8")?;
        let collector = Process::start("collector", own, &[COLLECTOR.to_owned()], cluster.dir()).await?;
        let with = |more: &str, router_log| {
            let options = cluster.options.clone();
            Options { router_args: [options.router_args.clone(), words(more)].concat(), router_log, ..options }
        };
        let unseen = cluster.beside(with(&args.unseen_args, "off")).await?;
        let export = format!("--otlp-endpoint {} {}", collector.url("collector"), args.seen_args);
        let seen = cluster.beside(with(&export, "info")).await?;
        let watcher = args.watch.as_ref().map(|path| tokio::spawn(watch(format!("{}{path}", seen.router.url("http")))));
        Ok(Self { unseen, seen, _collector: collector, _watcher: watcher })
    }
}

/// Reads whatever comes, as the page in a browser does.
async fn watch(url: String) {
    let watched = async {
        let mut answer = reqwest::get(&url).await?.error_for_status()?;
        while answer.chunk().await?.is_some() {}
        anyhow::Ok(())
    };
    eprintln!("nobody watches {url} any more: {:?}", watched.await);
}

/// Takes spans and forgets them.
struct Forgetful;

#[tonic::async_trait]
impl TraceService for Forgetful {
    async fn export(
        &self,
        _: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

/// The collector's process: prints a ready line and runs until it is killed.
pub async fn collect() -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("ready collector={}", listener.local_addr()?);
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Forgetful));
    Ok(server.serve_with_incoming(TcpListenerStream::new(listener)).await?)
}
