//! From a started node to a serving one, and its orderly end. Ports are bound first, so that a taken port is an error
//! before a model is loaded for nothing.
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tandem_ports::{
    KeepAlive, Limits, NODE_STREAMS, Port, connections_within, raise_descriptor_limit, reactor_threads, serve_grpc,
    serve_http,
};
use tandem_telemetry::exposition::OPEN_METRICS;
use tandem_telemetry::{LogFilter, LogFormat, MetricsExport};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::config::NodeConfig;
use crate::node::{Node, role_name, service_name};
use crate::{admin, routers};

/// Longest wait for connections to close after that.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// A router that vanished without a word frees its calls after at most the sum of the two.
const KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_secs(2), timeout: Duration::from_secs(3) };
/// Supervisors and scrapers are few.
const ADMIN_LIMITS: Limits = Limits { connections: 64, silence: Duration::from_secs(30) };
const FAILURE_CHECK: Duration = Duration::from_millis(200);

/// Must be the first thing in `main`, before any thread: UCX reads its environment when it is loaded.
pub fn prepare_environment() {
    if let Err(error) = tandem_kvtransfer::ucx::prepare_environment() {
        // No log is no reason to end: `eprintln!` would panic.
        let _ = writeln!(std::io::stderr(), "warning: {error}");
    }
}

/// Runs the life of the process; its error is one line on stderr and exit code 1. (Wrong flags are clap's: code 2.)
pub fn run_process(
    service: &'static str,
    (filter, format): (LogFilter, LogFormat),
    life: impl Future<Output = anyhow::Result<()>>,
) -> ExitCode {
    let mut log = tandem_telemetry::init_logging(service, &filter, format);
    raise_descriptor_limit();
    // The engine has its own threads, and UCX has; these, two at most, only wait for sockets.
    let runtime = Builder::new_multi_thread().worker_threads(reactor_threads().min(2)).enable_all().build();
    let result = runtime.context("cannot start the runtime").and_then(|runtime| {
        let result = runtime.block_on(life);
        runtime.shutdown_timeout(CLOSE_TIMEOUT);
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Some libraries append backtraces to their messages.
            let text = format!("{error:#}");
            log.fatal(text.lines().next().unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// The bound ports of a node.
pub struct Listeners {
    grpc: TcpListener,
    admin: TcpListener,
}

impl Listeners {
    /// Binds them.
    ///
    /// # Errors
    /// A port is taken or not ours to take.
    pub async fn bind(config: &NodeConfig) -> anyhow::Result<Self> {
        let grpc = bind(config.listen, "--listen").await?;
        Ok(Self { grpc, admin: bind(config.admin, "--admin").await? })
    }
}

async fn bind(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address} ({flag})"))
}

/// A node that serves.
pub struct Running {
    node: Arc<Node>,
    service: &'static str,
    health: HealthReporter,
    signals: Signals,
    stop: CancellationToken,
    /// Longest wait for running work at drain.
    drain: Duration,
    grpc: JoinHandle<Result<(), tonic::transport::Error>>,
    metrics: MetricsExport,
}

impl Running {
    /// Serves `routes` (the gRPC service named `service`) and health, opens the admin port, joins the router, and
    /// prints the `ready` line.
    ///
    /// # Errors
    /// The system refuses an address or a signal handler.
    pub async fn start(
        node: Arc<Node>,
        config: &NodeConfig,
        listeners: Listeners,
        service: &'static str,
        routes: Routes,
    ) -> anyhow::Result<Self> {
        let signals = Signals::install()?;
        let (grpc, admin_address) = (listeners.grpc.local_addr()?, listeners.admin.local_addr()?);
        let (health, health_service) = health_reporter();
        health.set_service_status(service, ServingStatus::Serving).await;
        let stop = CancellationToken::new();
        let limits = Limits::default();
        let connections = connections_within(raise_descriptor_limit(), 1, limits.connections);
        let credentials = config.credentials.clone();
        let port = Port::new(listeners.grpc, Limits { connections, ..limits }).of_cluster(credentials.tls.clone());
        let admin = Port::new(listeners.admin, ADMIN_LIMITS);
        // This is the only place that sets it.
        let _ = node.ports.set([("grpc", port.places()), ("admin", admin.places())]);
        let server = serve_grpc(port, routes.add_service(health_service), NODE_STREAMS, KEEP_ALIVE, stop.clone());
        let (drain, grpc_task) = (config.drain_timeout, tokio::spawn(server));
        let scraped = admin::Metrics::new(&node);
        let text = Arc::new(move || scraped.text(Some(OPEN_METRICS)).1);
        let metrics = MetricsExport::start(service_name(node.role), &node.node_id, &config.collector, text)?;
        let (node_of, stop_of) = (node.clone(), stop.clone());
        let running = Self { node: node_of, service, health, signals, stop: stop_of, drain, grpc: grpc_task, metrics };
        tokio::spawn(serve_http(admin, admin::routes(node.clone()), stop.clone()));
        let endpoint = endpoint(config, grpc.port());
        tokio::spawn(routers::stay_joined(node.clone(), config.routers.clone(), credentials, endpoint, stop));
        let ready = format!(
            "ready role={} grpc={grpc} admin={admin_address} transport={} device={} incarnation={}",
            role_name(node.role),
            // Who reads the line parts it at blanks.
            node.transport.names().replace(", ", "+").replace(' ', "-"),
            node.target,
            node.incarnation()
        );
        tandem_telemetry::say_ready(&ready).context("cannot write to stdout")?;
        Ok(running)
    }

    /// Waits until the process is told to end, or cannot go on.
    ///
    /// # Errors
    /// Engine, KV transport or gRPC server stopped by itself.
    pub async fn until_told(&mut self) -> anyhow::Result<()> {
        let mut ticks = interval(FAILURE_CHECK);
        loop {
            tokio::select! {
                () = self.signals.next() => return Ok(()),
                ended = &mut self.grpc => bail!("the gRPC server ended: {ended:?}"),
                _ = ticks.tick() => {
                    if let Some(reason) = self.node.failed() {
                        bail!(reason);
                    }
                }
            }
        }
    }

    /// No new work, running work finishes, then everything ends. A second signal ends the wait.
    pub async fn drain(mut self) {
        let node = self.node;
        tracing::info!(in_flight = node.work.in_flight(), "draining");
        self.health.set_service_status(self.service, ServingStatus::NotServing).await;
        self.health.set_service_status("", ServingStatus::NotServing).await;
        node.work.drain();
        tokio::select! {
            waited = timeout(self.drain, node.work.drained()) => if waited.is_err() {
                tracing::warn!(in_flight = node.work.in_flight(), "drain took too long: cancelling what still runs");
            },
            () = self.signals.next() => tracing::warn!("second signal: cancelling what still runs"),
        }
        self.stop.cancel();
        if timeout(CLOSE_TIMEOUT, &mut self.grpc).await.is_err() {
            self.grpc.abort();
        }
        node.spans.give_up();
        tokio::join!(self.metrics.shutdown(), node.spans.exporter.shutdown());
        let engine = node.engine.clone();
        // Waits for the present step, which has no bound of its own.
        let _ = timeout(CLOSE_TIMEOUT, tokio::task::spawn_blocking(move || engine.shutdown())).await;
    }
}

fn endpoint(config: &NodeConfig, port: u16) -> String {
    let authority = match &config.advertise_host {
        Some(host) if has_port(host) => host.clone(),
        Some(host) => format!("{host}:{port}"),
        None => SocketAddr::new(config.listen.ip(), port).to_string(),
    };
    format!("{}://{authority}", config.credentials.scheme())
}

/// Whether an authority names its port: `[::1]` does not, `[::1]:50` does.
fn has_port(authority: &str) -> bool {
    authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("cannot handle signals");
        Ok(Self { terminate: install(SignalKind::terminate())?, interrupt: install(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
