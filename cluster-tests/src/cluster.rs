//! A router with its nodes. One cluster at a time in a test process: the tests measure times, and cores are few.
use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep};

use crate::process::Process;

static TURN: Mutex<()> = Mutex::const_new(());

/// A look at the cluster is repeated so often while something is awaited.
pub(crate) const POLL: Duration = Duration::from_millis(20);
/// Registration after the ready line.
const REGISTERED: Duration = Duration::from_secs(20);

/// Which cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// `ucx`, `tcp` or `auto`.
    pub transport: &'static str,
    /// Nodes without a model: for tests in which the tokens do not matter.
    pub simulated: bool,
    /// The router's `--local-prefill`. `never` unless the test is about it: every request is handed off.
    pub local_prefill: &'static str,
    /// Whether nodes with a model measure their steps before they serve: for tests of what the router predicts. It is
    /// most of such a node's start.
    pub warm_up: bool,
    /// Another model than that of `make setup`.
    pub model: Option<PathBuf>,
    /// Flags for the nodes.
    pub node_args: Vec<String>,
    /// What nodes have in their environment beside this process's.
    pub node_environment: Vec<(String, String)>,
    /// Flags for prefill nodes.
    pub prefill_args: Vec<String>,
    /// Flags for decode nodes.
    pub decode_args: Vec<String>,
    /// Flags for the router.
    pub router_args: Vec<String>,
    /// The router: the name of a program of this build, or the path of another one.
    pub router_program: String,
    /// `RUST_LOG` of the router; empty: this process's.
    pub router_log: &'static str,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            transport: "ucx",
            simulated: false,
            local_prefill: "never",
            warm_up: false,
            model: None,
            node_environment: Vec::new(),
            node_args: words("--threads 1 --kv-blocks 1024"),
            prefill_args: Vec::new(),
            decode_args: Vec::new(),
            router_args: Vec::new(),
            router_program: "tandem-router".to_owned(),
            router_log: "",
        }
    }
}

impl Options {
    fn model(&self) -> anyhow::Result<PathBuf> {
        self.model.clone().map_or_else(model, Ok)
    }
}

/// Flags as one types them.
pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Flags of a router with an API key for each of these tenants; nodes and operators have ports of their own. The file
/// is in `dir`.
///
/// # Errors
/// It cannot be written.
pub fn with_keys(dir: &Path, tenants: &[&str]) -> std::io::Result<String> {
    let key = |name: &&str| format!(r#"{{"name": "{name}", "key": "sk-{name}-0123456789abcdefgh"}}"#);
    let keys: Vec<String> = tenants.iter().map(key).collect();
    let path = dir.join("keys.json");
    std::fs::write(&path, format!(r#"{{"keys": [{}]}}"#, keys.join(", ")))?;
    Ok(format!("--api-keys {} --nodes 127.0.0.1:0 --admin 127.0.0.1:0", path.display()))
}

/// The `authorization` header of such a tenant.
pub fn bearer(tenant: &str) -> String {
    format!("Bearer sk-{tenant}-0123456789abcdefgh")
}

/// A running cluster; everything is killed and removed on drop.
pub struct Cluster {
    /// The only router.
    pub router: Process,
    /// The only prefill node.
    pub prefill: Process,
    /// The only decode node.
    pub decode: Process,
    /// How it was started.
    pub options: Options,
    // Fields drop in order: processes, their directory, the turn.
    dir: TempDir,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Cluster {
    /// One prefill and one decode node, registered.
    ///
    /// # Errors
    /// A program does not start, or is not registered in time; with the logs.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        Self::start_in_turn(options, Some(TURN.lock().await)).await
    }

    /// Another one beside this, in the same turn: for those who compare two, and keep one of them idle.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn beside(&self, options: Options) -> anyhow::Result<Self> {
        Self::start_in_turn(options, None).await
    }

    async fn start_in_turn(options: Options, turn: Option<MutexGuard<'static, ()>>) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut args = words("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --model");
        args.push(options.model()?.display().to_string());
        args.extend(["--local-prefill".to_owned(), options.local_prefill.to_owned()]);
        args.extend(options.router_args.iter().cloned());
        let environment: &[_] = if options.router_log.is_empty() { &[] } else { &[("RUST_LOG", options.router_log)] };
        let router =
            Process::start_in_environment(environment, "router", &options.router_program, &args, dir.path()).await?;
        let (prefill, decode) = futures::try_join!(
            start_node(&router, "prefill", &options, dir.path()),
            start_node(&router, "decode", &options, dir.path()),
        )?;
        let cluster = Self { router, prefill, decode, options, dir, _turn: turn };
        cluster.registered(2).await?;
        Ok(cluster)
    }

    /// A new prefill node in place of the old one, which is killed; registered.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn restart_prefill(&mut self) -> anyhow::Result<()> {
        self.prefill.kill();
        self.prefill = start_node(&self.router, "prefill", &self.options, self.dir.path()).await?;
        self.holds_only(self.prefill_id()).await
    }

    /// A new decode node in place of the old one, which is killed; registered.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn restart_decode(&mut self) -> anyhow::Result<()> {
        self.decode.kill();
        self.decode = start_node(&self.router, "decode", &self.options, self.dir.path()).await?;
        self.holds_only(self.decode_id()).await
    }

    /// Files of this cluster alone.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Waits until the router lists exactly `nodes` nodes.
    ///
    /// # Errors
    /// It does not in time.
    pub async fn registered(&self, nodes: usize) -> anyhow::Result<()> {
        let listed = async |_: &Self| self.nodes().await.is_ok_and(|listed| listed.len() == nodes);
        self.wait_until(REGISTERED, &format!("{nodes} nodes registered"), listed).await.map(drop)
    }

    /// Waits for a condition.
    ///
    /// # Errors
    /// The condition does not hold in time.
    pub async fn wait_until(
        &self,
        within: Duration,
        what: &str,
        holds: impl AsyncFn(&Self) -> bool,
    ) -> anyhow::Result<Duration> {
        let start = Instant::now();
        loop {
            if holds(self).await {
                return Ok(start.elapsed());
            }
            if start.elapsed() > within {
                let nodes = self.nodes().await;
                bail!("not within {within:?}: {what}; nodes: {nodes:#?}");
            }
            sleep(POLL).await;
        }
    }

    fn prefill_id(&self) -> &str {
        self.prefill.ready("incarnation")
    }

    fn decode_id(&self) -> &str {
        self.decode.ready("incarnation")
    }

    /// Waits until a new incarnation is listed and the old one is not.
    async fn holds_only(&self, incarnation: &str) -> anyhow::Result<()> {
        let listed = async |_: &Self| {
            self.nodes().await.is_ok_and(|nodes| {
                nodes.len() == 2 && nodes.iter().any(|node| node.incarnation.trim_start_matches("0x") == incarnation)
            })
        };
        self.wait_until(REGISTERED, &format!("incarnation {incarnation} registered"), listed).await.map(drop)
    }
}

async fn start_node(router: &Process, role: &str, options: &Options, dir: &Path) -> anyhow::Result<Process> {
    let mut args = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0");
    args.extend(["--router".to_owned(), router.url(router.join_key()), "--node-id".to_owned(), format!("{role}-0")]);
    args.extend(["--transport".to_owned(), options.transport.to_owned()]);
    // A simulated node has the model's name and digest: the router takes no other.
    args.extend(["--model".to_owned(), options.model()?.display().to_string()]);
    if options.simulated {
        args.push("--simulated".to_owned());
    } else if !options.warm_up {
        args.push("--skip-warm-up".to_owned());
    }
    let own = if role == "prefill" { &options.prefill_args } else { &options.decode_args };
    args.extend(options.node_args.iter().chain(own).cloned());
    let environment = options.node_environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let environment: Vec<_> = environment.collect();
    Process::start_in_environment(&environment, role, &format!("tandem-{role}-node"), &args, dir).await
}

/// The model of `make setup`.
///
/// # Errors
/// It is not there.
pub fn model() -> anyhow::Result<PathBuf> {
    let cache = match std::env::var_os("TANDEM_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => std::env::home_dir().context("no home directory")?.join(".cache/tandem"),
    };
    let model = cache.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.is_file() {
        bail!("no model at {}: run `make setup`", model.display());
    }
    Ok(model)
}

/// Below those that the system gives to outgoing connections (32,768 and up): such a connection cannot take one before
/// its user listens there.
const PORTS: Range<u16> = 12_000..32_000;

/// A port that is free now and is not given out again soon.
///
/// # Errors
/// Nobody can listen on any of many.
pub fn free_port() -> std::io::Result<u16> {
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| rand::random::<u16>().into());
    let mut last = None;
    for _ in 0..100 {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + number % (PORTS.end - PORTS.start);
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into()))
}
