//! The life of the router process: configuration, model, sockets, serve until a signal, drain, end. What it serves is
//! in the library: read `lib.rs` next.
mod allocator;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::{FutureExt, TryFutureExt};
use tandem_config::Resolved;
use tandem_ports::{
    CLIENT_STREAMS, JoinTokens, KeepAlive, Limits, NodeTls, PeerRole, Places, Port, Tls, connections_within,
    raise_descriptor_limit, serve_grpc, serve_http,
};
use tandem_router::api::{Service, Telling};
use tandem_router::config::{ClientPort, Config};
use tandem_router::intake::IDLE_THREADS;
use tandem_router::membership::{Expected, Membership};
use tandem_router::page::Page;
use tandem_router::registration::Registration;
use tandem_router::reload::{ConfigFile, Reload};
use tandem_router::text::ModelText;
use tandem_router::{check, grpc, http};
use tandem_telemetry::exposition::OPEN_METRICS;
use tandem_telemetry::{Exporter, MetricsExport};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A client whose host is gone is noticed after these.
const CLIENT_KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_secs(10), timeout: Duration::from_secs(10) };
/// Probes and scrapers are few.
const ADMIN_LIMITS: Limits = Limits { connections: 64, silence: Duration::from_secs(30) };
/// How long clients may take to take the error that ends their requests.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long open connections may keep the ending process.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// Ports that `--next-free-port` tries.
const PORTS_TRIED: u16 = 100;

fn main() -> ExitCode {
    let (config, resolved) = Config::load();
    if resolved.is_check() {
        return resolved.answer(check::check(&config));
    }
    let mut log = tandem_telemetry::init_logging("tandem-router", &config.log_filter, config.log_format);
    without_huge_pages();
    allocator::give_back_at_once();
    let config = within_descriptors(config, raise_descriptor_limit());
    let served = reactor(config.threads)
        .context("cannot start threads")
        .and_then(|reactor| reactor.block_on(run(config, resolved)));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.fatal(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// A page of 2 MiB stays whole as long as anything in it is in use, and is filled with zeros at the first byte: of 64
/// bodies of which one byte each had come, the router took 44 MB. It gains nothing from huge pages
/// (docs/benchmarks/router.md).
fn without_huge_pages() {
    if let Err(error) = nix::sys::prctl::set_thp_disable(true) {
        tracing::warn!(%error, "transparent huge pages stay on: more memory is taken");
    }
}

fn within_descriptors(config: Config, descriptors: u64) -> Config {
    let ports = 2 + usize::from(config.nodes.is_some());
    Config { max_connections: connections_within(descriptors, ports, config.max_connections), ..config }
}

fn reactor(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(threads).thread_keep_alive(IDLE_THREADS).enable_all().build()
}

async fn run(config: Config, started: Resolved) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    // From here on it does not end the process.
    let hangups = signal(SignalKind::hangup())?;
    let keys = check::keys(&config)?;
    let join = config.join_token_file.as_deref().map(JoinTokens::load).transpose()?;
    if keys.required() && join.is_none() {
        tracing::warn!("API keys without --join-token-file: the names of KV blocks have no secret key");
    }
    let tls = config.tls.as_ref().map(Tls::read).transpose()?;
    let node_tls = config.node_tls.as_ref().map(|files| NodeTls::read(files, PeerRole::Router)).transpose()?;
    let registration = Registration::read(&config)?;
    let ports = Ports::bind(&config, tls.clone(), node_tls.clone()).await?;
    let instance = config.router_id.clone().unwrap_or_else(|| format!("router-{}", ports.grpc_address.port()));
    let exporter = Exporter::start("tandem-router", &instance, &config.collector)?;
    let model = load_model(&config).await?;
    let expected = Expected { model_digest: model.digest, eos_token_id: model.eos };
    let membership = Membership::new(expected, config.lease)
        .with_join_tokens(join.as_ref())
        .with_node_tls(node_tls.as_ref())
        .with_endpoints(config.node_endpoints)
        .with_breakers(config.breakers)
        .with_choice(config.choice)
        .with_index_blocks(config.index_blocks)
        .drawing_from(rand::random());
    let limits = config.limits.clone();
    let (sample_ratio, ring) = (config.trace_sample_ratio, config.trace_ring);
    let telling = Telling { exporter: exporter.clone(), sample_ratio, ring };
    let service = Service::with_keys(model, membership.clone(), telling, limits, instance.clone(), keys.clone());
    let service = service.at_ports(ports.places()).with_grpc_port(ports.grpc_address.port());
    let service = service.with_jaeger_ui(config.jaeger_ui.clone());
    let service = service.with_standing(registration.as_ref().map(Registration::standing));
    let scraped = service.clone();
    let text = Arc::new(move || scraped.metrics_text(Some(OPEN_METRICS)).1);
    let metrics = MetricsExport::start("tandem-router", &instance, &config.collector, text)?;
    let health = tonic_health::server::HealthReporter::new();

    let stop = CancellationToken::new();
    let mut servers = JoinSet::new();
    let (ready, nodes_address) = (ports.ready(), ports.nodes_address());
    let routes = match ports.nodes {
        None => grpc::routes(&service, health.clone())?,
        Some((port, _)) => {
            servers.spawn(grpc_server(port, grpc::node_routes(&service), stop.clone()));
            grpc::client_routes(&service, health.clone())?
        }
    };
    servers.spawn(grpc_server(ports.grpc, routes, stop.clone()));
    let clients = http::with_cors(http::router(service.clone()), &config.cors_origins);
    let live = Page::new(service.clone());
    let page = http::page(live.clone(), stop.clone());
    let clients = match ports.admin {
        None if service.is_reserved() => {
            tracing::info!(
                "clients have API keys, so their port has no /metrics, /debug and page: --admin ADDR has them"
            );
            clients
        }
        None => clients.merge(page),
        Some((port, _)) => {
            servers.spawn(serve_http(port, http::admin(service.clone()).merge(page), stop.clone()).map(Ok));
            clients
        }
    };
    servers.spawn(serve_http(ports.http, clients, stop.clone()).map(Ok));
    // These end with the process.
    if let Some(tls) = tls.clone() {
        tokio::spawn(tls.follow_files());
    }
    if let Some(tls) = node_tls.clone() {
        tokio::spawn(tls.follow_files());
    }
    if let Some(join) = join.clone() {
        tokio::spawn(join.follow_file());
    }
    let file = ConfigFile::new(service.clone(), started, config.limits.clone());
    tokio::spawn(reload_at_hangup(Reload { keys, join, tls, node_tls, file }, hangups));
    tokio::spawn(membership.clone().watch());
    tokio::spawn(live.watch());
    tokio::spawn(grpc::follow_health(service.clone(), health));
    let registered = registration.map(|registration| registration.start(nodes_address)).transpose()?;
    let served = async {
        tandem_telemetry::say_ready(&ready).context("cannot write to stdout")?;
        tokio::select! {
            () = signals.first() => Ok(()),
            ended = servers.join_next() => ended.context("no server runs")?.context("a server panicked")?,
        }
    };
    let served = served.await;
    // No node is to come any more. Those that are here stay until its requests have ended.
    let left = registered.map(|registered| tokio::spawn(registered.leave()));
    if served.is_err() {
        if let Some(left) = left {
            let _ = left.await;
        }
        return served;
    }
    tracing::info!("draining");
    tokio::select! {
        () = service.drain(config.drain) => {}
        () = signals.first() => tracing::warn!("second signal: ending at once"),
    }
    // Before the nodes go: that would be a failure to recover from.
    service.end(LAST_WORDS).await;
    // The last bytes of the last answers go out; nodes see their streams end.
    membership.close();
    stop.cancel();
    if tokio::time::timeout(LAST_BYTES, async { while servers.join_next().await.is_some() {} }).await.is_err() {
        tracing::debug!("connections were still open at the end");
    }
    tokio::join!(metrics.shutdown(), exporter.shutdown());
    if let Some(left) = left {
        // It has a bound of its own, and began with the drain.
        let _ = left.await;
    }
    Ok(())
}

/// The bound ports.
struct Ports {
    http: Port,
    http_address: SocketAddr,
    grpc: Port,
    grpc_address: SocketAddr,
    /// Where nodes join, if not at gRPC's.
    nodes: Option<(Port, SocketAddr)>,
    /// Where probes and scrapers ask.
    admin: Option<(Port, SocketAddr)>,
    scheme: &'static str,
    nodes_scheme: &'static str,
}

impl Ports {
    async fn bind(config: &Config, tls: Option<Tls>, node_tls: Option<NodeTls>) -> anyhow::Result<Self> {
        let scheme = |secured| if secured { "https://" } else { "" };
        let (scheme, nodes_scheme) = (scheme(tls.is_some()), scheme(node_tls.is_some()));
        let limits = Limits { connections: config.max_connections, ..Limits::default() };
        let client = async |which: ClientPort, name: &'static str, address: SocketAddr| match config
            .next_free_port
            .contains(&which)
        {
            true => bind_next_free(name, address, limits).await,
            false => bind(name, address, limits).await,
        };
        let (http, http_address) = client(ClientPort::Http, "http", config.http).await?;
        let (grpc, grpc_address) = client(ClientPort::Grpc, "grpc", config.grpc).await?;
        let nodes = bind_if("nodes", config.nodes, limits).await?;
        let admin = bind_if("admin", config.admin, ADMIN_LIMITS).await?;
        let [http, grpc] = [http, grpc].map(|port| port.secured(tls.clone()).throttling_errors());
        let nodes = nodes.map(|(port, address)| (port.of_cluster(node_tls), address));
        Ok(Self { http, http_address, grpc, grpc_address, nodes, admin, scheme, nodes_scheme })
    }

    /// Where nodes join.
    fn nodes_address(&self) -> SocketAddr {
        self.nodes.as_ref().map_or(self.grpc_address, |(_, address)| *address)
    }

    /// All of them, by name.
    fn places(&self) -> Vec<(&'static str, Places)> {
        let own = |name, port: &Option<(Port, SocketAddr)>| port.as_ref().map(|(port, _)| (name, port.places()));
        let both = [("http", self.http.places()), ("grpc", self.grpc.places())];
        both.into_iter().chain(own("nodes", &self.nodes)).chain(own("admin", &self.admin)).collect()
    }

    /// The line that supervisors wait for.
    fn ready(&self) -> String {
        let Self { http_address, grpc_address, scheme, .. } = self;
        let own = |name, scheme, port: &Option<(Port, SocketAddr)>| {
            port.as_ref().map(|(_, address)| format!(" {name}={scheme}{address}")).unwrap_or_default()
        };
        let (nodes, admin) = (own("nodes", self.nodes_scheme, &self.nodes), own("admin", "", &self.admin));
        format!("ready http={scheme}{http_address} grpc={scheme}{grpc_address}{nodes}{admin}")
    }
}

async fn bind_if(
    name: &str,
    address: Option<SocketAddr>,
    limits: Limits,
) -> anyhow::Result<Option<(Port, SocketAddr)>> {
    match address {
        Some(address) => Ok(Some(bind(name, address, limits).await?)),
        None => Ok(None),
    }
}

/// The first of this and the next ports that nobody listens on.
async fn bind_next_free(name: &str, address: SocketAddr, limits: Limits) -> anyhow::Result<(Port, SocketAddr)> {
    let ports = address.port()..=address.port().saturating_add(PORTS_TRIED - 1);
    for port in ports {
        let bound = bind(name, SocketAddr::new(address.ip(), port), limits).await;
        let taken = |error: &anyhow::Error| {
            error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
        };
        if !bound.as_ref().is_err_and(taken) {
            return bound;
        }
    }
    anyhow::bail!("--{name} {address}: this port and the next {} are in use", PORTS_TRIED - 1)
}

async fn bind(name: &str, address: SocketAddr, limits: Limits) -> anyhow::Result<(Port, SocketAddr)> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on --{name} {address}"))?;
    let address = listener.local_addr()?;
    Ok((Port::new(listener, limits), address))
}

/// New keys work and old ones do not from the signal on.
async fn reload_at_hangup(reload: Reload, mut hangups: Signal) {
    let reload = Arc::new(reload);
    while hangups.recv().await.is_some() {
        let reload = Arc::clone(&reload);
        // Files may lie on slow disks, and a panic there is in the log.
        let _ = tokio::task::spawn_blocking(move || reload.read()).await;
    }
}

async fn load_model(config: &Config) -> anyhow::Result<Arc<ModelText>> {
    let path = config.model.clone();
    // The error's own text names its cause: a chain would say it twice.
    let loaded = tokio::task::spawn_blocking(move || ModelText::load(&path).map_err(|error| error.to_string()));
    let mut model = loaded.await?.map_err(anyhow::Error::msg)?;
    if let Some(name) = &config.served_model_name {
        model.model_name.clone_from(name);
    }
    tracing::info!(name = model.model_name, digest = format!("{:016x}", model.digest), "model file read");
    Ok(Arc::new(model))
}

fn grpc_server(
    port: Port,
    routes: tonic::service::Routes,
    stop: CancellationToken,
) -> impl Future<Output = anyhow::Result<()>> {
    serve_grpc(port.of_short_frames(), routes, CLIENT_STREAMS, CLIENT_KEEP_ALIVE, stop)
        .map_err(|error| anyhow::Error::new(error).context("the gRPC server ended"))
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn first(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
