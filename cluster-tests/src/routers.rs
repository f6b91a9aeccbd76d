//! Several routers with the same nodes, as real processes. A router that was killed or told to end is started again at
//! its old addresses, where nodes and clients look for it.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use tandem_proto::v1;
use tandem_proto::v1::inference_client::InferenceClient;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::client::{Answer, Failure, metric, rest};
use crate::cluster::{POLL, free_port, model, words};
use crate::process::Process;

/// From a start to the entry in each router's table, while other clusters start too.
const REGISTERED: Duration = Duration::from_secs(30);
/// A router's running answers end within this.
const DRAINED: Duration = Duration::from_secs(30);

/// Which cluster.
#[derive(Clone, Debug)]
pub struct RoutersOptions {
    /// Routers.
    pub routers: usize,
    /// What nodes have as their only `--router`; without it they have the address of each.
    pub found_by: Option<String>,
    /// Nodes of each role; they compute nothing.
    pub nodes: usize,
    /// Flags for every router.
    pub router_args: String,
    /// Flags for every node.
    pub node_args: String,
}

/// A running cluster; everything is killed and removed on drop.
pub struct Routers {
    /// All of them.
    pub routers: Vec<Process>,
    /// All nodes, prefill nodes first.
    pub nodes: Vec<Process>,
    addresses: Vec<String>,
    options: RoutersOptions,
    // Fields drop in order: processes before their directory.
    dir: TempDir,
}

impl Routers {
    /// All nodes registered with all routers.
    ///
    /// # Errors
    /// A program does not start, or is not registered in time; with the logs.
    pub async fn start(options: RoutersOptions) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (mut routers, mut addresses) = (Vec::new(), Vec::new());
        for number in 0..options.routers {
            let address = free_address()?;
            routers.push(start_router(number, &address, &options, dir.path()).await?);
            addresses.push(address);
        }
        let mut nodes = Vec::new();
        for role in ["prefill", "decode"] {
            for number in 0..options.nodes {
                nodes.push(start_node(role, number, &routers, &options, dir.path()).await?);
            }
        }
        let cluster = Self { routers, nodes, addresses, options, dir };
        for number in 0..cluster.routers.len() {
            cluster.registered(number).await?;
        }
        Ok(cluster)
    }

    /// One more, that nodes find by themselves.
    ///
    /// # Errors
    /// It does not start, or has not all nodes in time.
    pub async fn add_router(&mut self) -> anyhow::Result<()> {
        let (number, address) = (self.routers.len(), free_address()?);
        self.routers.push(start_router(number, &address, &self.options, self.dir.path()).await?);
        self.addresses.push(address);
        self.registered(number).await
    }

    /// Where clients of gRPC connect to each router.
    pub fn urls(&self) -> Vec<String> {
        self.routers.iter().map(|router| router.url("grpc")).collect()
    }

    /// kill −9, and another process at the same addresses. Says how long the nodes took to notice the death.
    ///
    /// # Errors
    /// They do not in time, or the new process does not start, or has not all nodes in time.
    pub async fn replace_killed(&mut self, number: usize) -> anyhow::Result<Duration> {
        self.routers[number].kill();
        let noticed = self.sessions(self.routers.len() - 1).await?;
        self.start_again(number).await?;
        Ok(noticed)
    }

    /// SIGTERM, the end by itself, and another process at the same addresses.
    ///
    /// # Errors
    /// It does not end well, or as [`Self::replace_killed`].
    pub async fn replace_drained(&mut self, number: usize) -> anyhow::Result<()> {
        let router = &mut self.routers[number];
        router.terminate();
        let status = router.ended(DRAINED).await?;
        ensure!(status.success(), "router {number} ended with {status}\n{}", router.log());
        self.start_again(number).await
    }

    async fn start_again(&mut self, number: usize) -> anyhow::Result<()> {
        let (address, dir) = (&self.addresses[number], self.dir.path());
        self.routers[number] = start_router(number, address, &self.options, dir).await?;
        self.registered(number).await
    }

    /// Waits until every node is in so many sessions, and says how long that took.
    ///
    /// # Errors
    /// It is not in time.
    pub async fn sessions(&self, count: usize) -> anyhow::Result<Duration> {
        sessions(&self.nodes, count, REGISTERED).await
    }

    /// Waits until every node is idle, by its own word, and says how long that took.
    ///
    /// # Errors
    /// A block is still away when the time is over.
    pub async fn settled(&self, within: Duration) -> anyhow::Result<Duration> {
        let all = async || {
            for node in &self.nodes {
                let free = metric(node, "state=\"free\"").await?;
                if free != metric(node, "state=\"total\"").await? || calls_of(node).await? != 0.0 {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        until(within, "all blocks are back", all).await
    }

    /// Waits until the nodes have so many calls.
    ///
    /// # Errors
    /// They have fewer when the time is over, or one does not answer.
    pub async fn busy(&self, calls: usize, within: Duration) -> anyhow::Result<()> {
        let enough = async || Ok(self.calls().await? >= calls as f64);
        until(within, &format!("the nodes have {calls} calls"), enough).await.map(drop)
    }

    /// Waits until the nodes have no more than so many calls, and says how long that took.
    ///
    /// # Errors
    /// They have more when the time is over, or one does not answer.
    pub async fn calls_at_most(&self, calls: usize, within: Duration) -> anyhow::Result<Duration> {
        let few = async || Ok(self.calls().await? <= calls as f64);
        until(within, &format!("the nodes have {calls} calls at most"), few).await
    }

    async fn calls(&self) -> anyhow::Result<f64> {
        let mut calls = 0.0;
        for node in &self.nodes {
            calls += calls_of(node).await?;
        }
        Ok(calls)
    }

    /// Of a router, each node's name and how many of its blocks the router knows to be cached.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn indexed(&self, number: usize) -> anyhow::Result<Vec<(String, u64)>> {
        let nodes = nodes_of(&self.routers[number]).await?;
        let of = |node: &Value| Some((node["id"].as_str()?.to_owned(), node["indexed_blocks"].as_u64()?));
        nodes.iter().map(|node| of(node).context("a node without its index")).collect()
    }

    async fn registered(&self, number: usize) -> anyhow::Result<()> {
        registered(&self.routers[number], self.nodes.len(), REGISTERED).await
    }
}

/// Waits until so many nodes are in a router's table. A node counts its session a moment before that.
///
/// # Errors
/// They are not in time.
pub async fn registered(router: &Process, nodes: usize, within: Duration) -> anyhow::Result<()> {
    let all = async || Ok(nodes_of(router).await.is_ok_and(|seen| seen.len() == nodes));
    until(within, &format!("{nodes} nodes registered with {}", router.name), all).await.map(drop)
}

async fn nodes_of(router: &Process) -> anyhow::Result<Vec<Value>> {
    let mut cluster: Value = reqwest::get(format!("{}/debug/cluster", router.url("http"))).await?.json().await?;
    match cluster["nodes"].take() {
        Value::Array(nodes) => Ok(nodes),
        other => bail!("a router's nodes are {other}"),
    }
}

/// Asks routers in turn, from `first` on, until one of them answers, `tries` of them at most. Each attempt is another
/// request, and what a failed one had said is forgotten. Returns the answer and the failures before it.
///
/// # Errors
/// The last failure.
pub async fn ask_in_turn(
    urls: &[String],
    first: usize,
    tries: usize,
    request: &v1::GenerateRequest,
) -> Result<(Answer, Vec<Failure>), Failure> {
    let mut failures = Vec::new();
    for number in first.. {
        let failure = match ask_one(&urls[number % urls.len()], request.clone()).await {
            Ok(answer) => return Ok((answer, failures)),
            Err(failure) => failure,
        };
        if failures.len() + 1 == tries {
            return Err(failure);
        }
        failures.push(failure);
    }
    unreachable!("there is no last number")
}

async fn ask_one(url: &str, request: v1::GenerateRequest) -> Result<Answer, Failure> {
    let failed = |status| Failure { tokens: Vec::new(), status };
    let connected = InferenceClient::connect(url.to_owned()).await;
    let mut client = connected.map_err(|error| failed(tonic::Status::unavailable(error.to_string())))?;
    rest(client.generate(request).await.map_err(failed)?.into_inner()).await
}

/// Waits until each of these nodes is in so many sessions, by its own word, and says how long that took. The router may
/// have it in its table a moment later: [`registered`].
///
/// # Errors
/// It is not in time.
pub async fn sessions(nodes: &[Process], count: usize, within: Duration) -> anyhow::Result<Duration> {
    let all = async || {
        for node in nodes {
            if metric(node, "tandem_router_sessions{").await? != count as f64 {
                return Ok(false);
            }
        }
        Ok(true)
    };
    until(within, &format!("{count} sessions of every node"), all).await
}

/// Waits until each of these nodes has logged a text, and says how long that took.
///
/// # Errors
/// One has not in time.
pub async fn logged(nodes: &[Process], text: &str, within: Duration) -> anyhow::Result<Duration> {
    let all = async || Ok(nodes.iter().all(|node| node.log().contains(text)));
    until(within, &format!("every node has logged {text:?}"), all).await
}

/// Waits for a condition, and says how long that took.
///
/// # Errors
/// It does not hold in time, or cannot be asked.
pub async fn until(
    within: Duration,
    what: &str,
    holds: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<Duration> {
    let start = Instant::now();
    while !holds().await? {
        ensure!(start.elapsed() < within, "not within {within:?}: {what}");
        sleep(POLL).await;
    }
    Ok(start.elapsed())
}

fn free_address() -> std::io::Result<String> {
    Ok(format!("--http 127.0.0.1:{} --grpc 127.0.0.1:{}", free_port()?, free_port()?))
}

async fn calls_of(node: &Process) -> anyhow::Result<f64> {
    Ok(metric(node, "tandem_requests_running{").await? + metric(node, "tandem_requests_waiting{").await?)
}

async fn start_router(number: usize, address: &str, options: &RoutersOptions, dir: &Path) -> anyhow::Result<Process> {
    let mut args = words(&format!("{address} --local-prefill never {} --model", options.router_args));
    args.push(model()?.display().to_string());
    Process::start(&format!("router-{number}"), "tandem-router", &args, dir).await
}

async fn start_node(
    role: &str,
    number: usize,
    routers: &[Process],
    options: &RoutersOptions,
    dir: &Path,
) -> anyhow::Result<Process> {
    let name = format!("{role}-{number}");
    let mut args = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --threads 1");
    args.extend(words(&format!("--node-id {name} {} --model", options.node_args)));
    args.push(model()?.display().to_string());
    let found_by = match &options.found_by {
        Some(found_by) => vec![found_by.clone()],
        None => routers.iter().map(|router| router.url(router.join_key())).collect(),
    };
    args.extend(found_by.into_iter().flat_map(|router| ["--router".to_owned(), router]));
    Process::start(&name, &format!("tandem-{role}-node"), &args, dir).await
}
