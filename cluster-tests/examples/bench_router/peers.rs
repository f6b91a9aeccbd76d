//! The other routers, as PyPI ships them: started, waited for, ended.
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use tandem_cluster_tests::cluster::free_port;
use tokio::time::{Instant, sleep};

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const PEERS: [(&str, &str); 2] = [("sglang-router", "sglang_router"), ("vllm-router", "vllm_router")];

/// A running one; ended on drop.
pub struct Peer {
    pub name: &'static str,
    pub url: String,
    child: Child,
}

impl Peer {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All of them in front of `worker`.
pub async fn start(python: &Path, worker: &str, logs: &Path) -> anyhow::Result<Vec<Peer>> {
    let mut peers = Vec::new();
    for (name, module) in PEERS {
        let (port, metrics) = (free_port()?, free_port()?);
        let log = logs.join(format!("{name}.log"));
        let child = Command::new(python)
            .args(["-m", &format!("{module}.launch_router"), "--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--prometheus-port", &metrics.to_string(), "--prometheus-host", "127.0.0.1"])
            .args(["--policy", "round_robin", "--log-level", "error", "--worker-urls", worker])
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::create(log.with_extension("err"))?)
            .spawn()
            .with_context(|| format!("cannot start {name} with {}", python.display()))?;
        let mut peer = Peer { name, url: format!("http://127.0.0.1:{port}"), child };
        peer.ready(&log).await?;
        peers.push(peer);
    }
    Ok(peers)
}

impl Peer {
    async fn ready(&mut self, log: &Path) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let health = reqwest::get(format!("{}/v1/models", self.url)).await;
            if health.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            if self.child.try_wait()?.is_some() || start.elapsed() > READY_TIMEOUT {
                let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
                bail!("{} is not ready:\n{}{}", self.name, read(log), read(&log.with_extension("err")));
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}
