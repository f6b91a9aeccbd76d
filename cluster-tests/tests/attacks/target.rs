//! What is attacked: a router with API keys, a join token, a port for nodes and one for operators, and a simulated node
//! of each role over tcp. Clients are `polite` (who is to notice nothing), `victim` (whose things are not for
//! others), `flooder` (who has a key, and little to spend) and `crowd` (who may have few requests at a time).
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use http::HeaderValue;
use serde_json::Value;
use tandem_cluster_tests::cluster::{free_port, words};
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};
use tandem_ports::JoinToken;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::certificates::Certificates;

/// Of each port of the router.
pub const CONNECTIONS: usize = 1024;
/// Whose requests have no rate.
pub const POLITE: &str = "sk-polite-5f0c1d2e3a4b5c6d7e8f";
/// The same.
pub const VICTIM: &str = "sk-victim-8a7b6c5d4e3f2a1b0c9d";
/// 600 requests a minute, and none before the others'.
pub const FLOODER: &str = "sk-flooder-1122334455667788";
const TOKEN: &str = "the-secret-of-the-attacked-cluster";
/// What a step of the nodes takes, as that of a small model does: beside nodes that take no time at all, a request's
/// latency is the kernel's choice of who computes next. A token of a prompt takes time as well: a cached one shows.
const STEP: &str = "--simulated-step-us 1000 --simulated-token-us 10";
/// Eight requests at a time.
pub const CROWD: &str = "sk-crowd-99aabbccddeeff00aabb";
/// Every request of any client is answered, or refused, by then.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// What an attack did is counted by then.
pub const COUNTED: Duration = Duration::from_secs(5);

/// The cluster under attack, and how long an attack lasts.
pub struct Target {
    /// All its processes.
    pub cluster: Cluster,
    /// A router without keys and without nodes, for what only such a one could be asked. Its port for nodes has TLS.
    pub open: Process,
    /// What its port for nodes is shown.
    pub certificates: Certificates,
    /// The KV doors of the prefill and of the decode node.
    pub kv: [SocketAddr; 2],
    /// The forms with ten thousand.
    pub full: bool,
    client: reqwest::Client,
    _dir: TempDir,
}

/// Who counts what an attack does.
#[derive(Clone, Copy, Debug)]
pub enum Seen {
    /// A series of the router's, by a part of its line.
    Router(&'static str),
    /// Of the router without keys.
    Open(&'static str),
    /// Of both nodes', summed.
    Nodes(&'static str),
    /// Nothing counts it; why not.
    Nowhere(&'static str),
}

impl Target {
    /// Starts all of it.
    ///
    /// # Errors
    /// A process does not start.
    pub async fn start(full: bool) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (keys, token) = (dir.path().join("keys.json"), dir.path().join("token"));
        let text = format!(
            r#"{{"keys": [{{"name": "polite", "key": "{POLITE}"}}, {{"name": "victim", "key": "{VICTIM}"}},
            {{"name": "flooder", "key": "{FLOODER}", "requests_per_minute": 600, "min_priority": 0}},
            {{"name": "crowd", "key": "{CROWD}", "max_concurrent_requests": 8}}]}}"#
        );
        std::fs::write(&keys, text)?;
        std::fs::write(&token, TOKEN)?;
        let (keys, token) = (keys.display(), token.display());
        let limits = format!("--max-connections {CONNECTIONS} --client-stall-ms 1000");
        let doors = "--nodes 127.0.0.1:0 --admin 127.0.0.1:0";
        // The long answers of the full form fit.
        let blocks = if full { 8192 } else { 1024 };
        let kv = [free_port()?, free_port()?].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let cluster = Cluster::start(Options {
            transport: "tcp",
            simulated: true,
            // The router's own default.
            local_prefill: "auto",
            router_args: words(&format!("--api-keys {keys} --join-token-file {token} {doors} {limits}")),
            node_args: words(&format!("--threads 1 --kv-blocks {blocks} {STEP} --join-token-file {token}")),
            prefill_args: words(&format!("--kv-listen {}", kv[0])),
            decode_args: words(&format!("--kv-listen {}", kv[1])),
            ..Options::default()
        })
        .await?;
        let model = tandem_cluster_tests::cluster::model()?;
        let (certificates, tls) = Certificates::new(dir.path())?;
        let doors = "--http 127.0.0.1:0 --grpc 127.0.0.1:0 --nodes 127.0.0.1:0";
        let args = format!("{doors} {tls} --model {}", model.display());
        let open = Process::start("open-router", "tandem-router", &words(&args), dir.path()).await?;
        let client = reqwest::Client::builder().timeout(PATIENCE).build()?;
        Ok(Self { cluster, open, certificates, kv, full, client, _dir: dir })
    }

    /// `few` of something, or `many` in the full form.
    pub fn count(&self, few: usize, many: usize) -> usize {
        if self.full { many } else { few }
    }

    /// A door of the router: `http`, `grpc`, `nodes`, `admin`.
    ///
    /// # Errors
    /// It has no such door.
    pub fn router(&self, door: &str) -> anyhow::Result<SocketAddr> {
        address(&self.cluster.router, door)
    }

    /// Doors of both nodes: `grpc`, `admin`.
    ///
    /// # Errors
    /// They have no such door.
    pub fn nodes(&self, door: &str) -> anyhow::Result<[SocketAddr; 2]> {
        Ok([address(&self.cluster.prefill, door)?, address(&self.cluster.decode, door)?])
    }

    /// What the cluster's own processes show each other.
    ///
    /// # Errors
    /// None: the token is one.
    pub fn token(&self) -> anyhow::Result<HeaderValue> {
        Ok(JoinToken::of(TOKEN).map_err(anyhow::Error::msg)?.header())
    }

    /// Asks the router's HTTP port with somebody's key; status and body.
    ///
    /// # Errors
    /// No answer.
    pub async fn post(&self, key: &str, path: &str, body: impl Into<reqwest::Body>) -> anyhow::Result<(u16, String)> {
        let url = format!("{}{path}", self.cluster.router.url("http"));
        let request = self.client.post(url).header("content-type", "application/json");
        told(request.bearer_auth(key).body(body).send().await?).await
    }

    /// The same for a completion; an error's message is required.
    ///
    /// # Errors
    /// It is answered otherwise.
    pub async fn refused(&self, key: &str, path: &str, body: Value, wanted: u16) -> anyhow::Result<String> {
        let shown: String = body.to_string().chars().take(80).collect();
        let (status, body) = self.post(key, path, body.to_string()).await?;
        refusal(status, &body, wanted).with_context(|| shown)
    }

    /// A request as built by the caller, without a key.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// How much of it was seen so far.
    ///
    /// # Errors
    /// An admin port does not answer.
    pub async fn seen(&self, seen: Seen) -> anyhow::Result<f64> {
        let Cluster { router, prefill, decode, .. } = &self.cluster;
        match seen {
            Seen::Router(part) => sum(&self.metrics(&format!("{}/metrics", router.url("admin"))).await?, part),
            Seen::Open(part) => sum(&self.metrics(&format!("{}/metrics", self.open.url("http"))).await?, part),
            Seen::Nodes(part) => {
                let [one, other] = [prefill, decode].map(|node| format!("{}/metrics", node.url("admin")));
                Ok(sum(&self.metrics(&one).await?, part)? + sum(&self.metrics(&other).await?, part)?)
            }
            Seen::Nowhere(_) => Ok(0.0),
        }
    }

    /// The text of a process's metrics.
    ///
    /// # Errors
    /// No answer.
    pub async fn metrics(&self, url: &str) -> anyhow::Result<String> {
        Ok(self.client.get(url).send().await?.error_for_status()?.text().await?)
    }

    /// Waits until something was seen more often than `before`.
    ///
    /// # Errors
    /// It was not in time.
    pub async fn until_seen(&self, seen: Seen, before: f64, within: Duration) -> anyhow::Result<f64> {
        let start = Instant::now();
        loop {
            let now = self.seen(seen).await?;
            if now > before || matches!(seen, Seen::Nowhere(_)) {
                return Ok(now - before);
            }
            ensure!(start.elapsed() < within, "{seen:?} counts nothing of it: {now}");
            // Rarely where it takes long: who looks is a client beside the polite one.
            tokio::time::sleep(within / 100).await;
        }
    }

    /// Everybody lives, and nobody panicked or let a stranger write into its log.
    ///
    /// # Errors
    /// Who does not.
    pub fn is_sound(&mut self) -> anyhow::Result<()> {
        let Cluster { router, prefill, decode, .. } = &mut self.cluster;
        for process in [router, prefill, decode, &mut self.open] {
            ensure!(process.is_alive(), "{} is dead\n{}", process.name, process.log());
            let log = process.log();
            ensure!(!log.contains("panicked"), "{} panicked\n{log}", process.name);
            ensure!(!log.contains('\u{1b}'), "an escape sequence in the log of {}", process.name);
            ensure!(!log.lines().any(|line| line.starts_with("INJECTED")), "a stranger's line of {}", process.name);
        }
        Ok(())
    }

    /// Resident memory of the router, in MB.
    ///
    /// # Errors
    /// It is dead.
    pub fn memory(&self) -> anyhow::Result<f64> {
        self.cluster.router.resident_mb().context("the router is dead")
    }
}

/// Where a process listens.
///
/// # Errors
/// Its ready line is none.
pub fn address(process: &Process, door: &str) -> anyhow::Result<SocketAddr> {
    Ok(process.ready(door).parse()?)
}

/// Status and body.
///
/// # Errors
/// The body does not come.
pub async fn told(response: reqwest::Response) -> anyhow::Result<(u16, String)> {
    Ok((response.status().as_u16(), response.text().await?))
}

/// An error's status and code, as people read them.
///
/// # Errors
/// Another status, or no error in OpenAI's form.
pub fn refusal(status: u16, body: &str, wanted: u16) -> anyhow::Result<String> {
    let shown: String = body.chars().take(300).collect();
    ensure!(status == wanted, "answered with {status}, not {wanted}: {shown}");
    let error: Value = serde_json::from_str(body).with_context(|| shown.clone())?;
    let Some(message) = error["error"]["message"].as_str() else { bail!("no message in {shown}") };
    let message: String = message.chars().take(60).collect();
    Ok(format!("{status} {message}"))
}

fn sum(metrics: &str, part: &str) -> anyhow::Result<f64> {
    let lines = metrics.lines().filter(|line| !line.starts_with('#') && line.contains(part));
    Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}
