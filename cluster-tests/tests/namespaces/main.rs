//! Nodes in namespaces of their own, as hosts and containers have them: which ways for KV the router finds between
//! them. Takes root, `ip` and `unshare`; where these are missing the tests say so and end, and with
//! `TANDEM_REQUIRE_NAMESPACES=1` they fail.
//!
//! - [`names`]: routers behind a name in DNS, which comes and goes.
//! - [`network`]: the namespaces. Nodes of one namespace share memory, those of different ones only a network, and not
//!   their loopback addresses.

mod names;
mod network;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use network::{Inside, Network};
use serde_json::Value;
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::{Process, program};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// Registration after the ready line.
const REGISTERED: Duration = Duration::from_secs(30);

/// A router in the middle, nodes around it, and `tandem` beside the router.
struct Spread {
    // Fields drop in order: processes, their directory, their network.
    router: Process,
    nodes: Vec<Process>,
    dir: TempDir,
    network: Network,
}

impl Spread {
    /// `None`: not permitted here.
    async fn start(router_args: &str) -> anyhow::Result<Option<Self>> {
        let Some(network) = Network::set_up()? else { return Ok(None) };
        let (dir, hub) = (tempfile::tempdir()?, network.hub());
        let mut args = words(&format!("--http {hub}:0 --grpc {hub}:0 {router_args} --model"));
        args.push(model()?.display().to_string());
        let by = network.by(Inside::Hub);
        let router = Process::start_through(&strs(&by), "router", "tandem-router", &args, dir.path()).await?;
        Ok(Some(Self { router, nodes: Vec::new(), dir, network }))
    }

    /// A node `role-name` in a namespace, with no flag about addresses.
    async fn node(&mut self, role: &str, name: &str, inside: Inside, flags: &str) -> anyhow::Result<&Process> {
        let id = format!("{role}-{name}");
        let mut args = words(&format!("--simulated --threads 1 --kv-blocks 256 --node-id {id} {flags} --router"));
        args.extend([self.router.url(self.router.join_key()), "--model".to_owned(), model()?.display().to_string()]);
        let by = self.network.by(inside);
        let program = format!("tandem-{role}-node");
        let node = Process::start_through(&strs(&by), &id, &program, &args, self.dir.path()).await?;
        self.nodes.push(node);
        self.nodes.last().context("it was pushed")
    }

    /// Waits until the router lists all of them.
    async fn registered(&self) -> anyhow::Result<()> {
        let until = Instant::now() + REGISTERED;
        loop {
            let listed = self.get("/debug/cluster")?["nodes"].as_array().map_or(0, Vec::len);
            if listed == self.nodes.len() {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{listed} of {} nodes: {}", self.nodes.len(), self.router.log());
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// From the router, where it listens.
    fn get(&self, path: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.text(path)?)?)
    }

    fn text(&self, path: &str) -> anyhow::Result<String> {
        let url = format!("{}{path}", self.router.url("http"));
        let (ok, out, errors) = self.network.run("curl", &["-sS", "--max-time", "20", &url])?;
        ensure!(ok, "{url}: {errors}");
        Ok(out)
    }

    /// `tandem` with these arguments; whether it succeeded, and both outputs.
    fn tandem(&self, args: &[&str]) -> anyhow::Result<(bool, String, String)> {
        self.network.run(&program("tandem")?.display().to_string(), args)
    }

    /// An answer of a few tokens: the figures below it.
    fn generate(&self, prompt: &str) -> anyhow::Result<(bool, String)> {
        let url = self.router.url("http");
        let (ok, _, figures) =
            self.tandem(&["generate", "--url", &url, "--max-tokens", "4", "--ignore-eos", prompt])?;
        Ok((ok, figures))
    }

    /// Why the last request went where it went, with single spaces.
    fn explain(&self) -> anyhow::Result<String> {
        let (ok, out, errors) = self.tandem(&["explain", "last", "--url", &self.router.url("http")])?;
        ensure!(ok, "{errors}");
        let lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }
}

fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Whether this node has UCX over shared memory; without UCX on the machine there is nothing to prefer.
fn has_shm(node: &Process) -> anyhow::Result<bool> {
    let has = node.ready("transport").contains("ucx/shm");
    let required = std::env::var_os("TANDEM_REQUIRE_UCX").is_some_and(|value| value == "1");
    ensure!(has || !required, "TANDEM_REQUIRE_UCX=1, and the node has {}", node.ready("transport"));
    if !has {
        eprintln!("SKIPPED: no UCX on this machine, so no node has shared memory to offer");
    }
    Ok(has)
}

/// Two hosts: no flag says how KV travels, and it travels.
#[tokio::test]
async fn two_namespaces_without_memory_in_common_use_tcp() -> anyhow::Result<()> {
    let Some(mut spread) = Spread::start("--local-prefill never").await? else { return Ok(()) };
    spread.node("prefill", "a", Inside::Host(0), "").await?;
    spread.node("decode", "b", Inside::Host(1), "").await?;
    spread.registered().await?;
    let (ok, figures) = spread.generate("The capital of France is")?;
    assert!(ok && figures.contains("over tcp"), "{figures}");
    let explained = spread.explain()?;
    assert!(explained.contains("* prefill-a → decode-b tcp "), "{explained}");
    assert!(!explained.contains("not a pair"), "{explained}");
    let metrics = spread.text("/metrics")?;
    let mut fallbacks = metrics.lines().filter(|line| line.starts_with("tandem_kv_way_fallbacks_total{"));
    assert!(fallbacks.all(|line| line.ends_with(" 0")), "nothing had to fail for it: {metrics}");
    Ok(())
}

/// Three hosts with different ways: each pair on its best.
#[tokio::test]
async fn three_namespaces_with_mixed_ways_pair_each_on_its_best() -> anyhow::Result<()> {
    let Some(mut spread) = Spread::start("--local-prefill never").await? else { return Ok(()) };
    if !has_shm(spread.node("prefill", "a", Inside::Host(0), "").await?)? {
        return Ok(());
    }
    spread.node("decode", "a", Inside::Host(0), "").await?;
    spread.node("decode", "b", Inside::Host(1), "").await?;
    spread.node("prefill", "c", Inside::Host(2), "--transport ucx/shm").await?;
    spread.node("decode", "c", Inside::Host(2), "--transport ucx/shm,tcp").await?;
    spread.registered().await?;
    for number in 0..12 {
        let (ok, figures) = spread.generate(&format!("{number} little pigs went to the market"))?;
        assert!(ok, "{figures}");
        let explained = spread.explain()?;
        for (pair, way) in [
            ("prefill-a → decode-a", "ucx/shm"),
            ("prefill-a → decode-b", "tcp"),
            ("prefill-a → decode-c", "tcp"),
            ("prefill-c → decode-c", "ucx/shm"),
        ] {
            assert!(explained.contains(&format!("{pair} {way} ")), "{pair}: {explained}");
        }
        for (pair, offers) in [
            ("prefill-c → decode-a", "prefill-c offers ucx/shm on host"),
            ("prefill-c → decode-b", "prefill-c offers ucx/shm on host"),
        ] {
            assert!(explained.contains(&format!("not a pair: {pair}: no common way: {offers}")), "{pair}: {explained}");
            assert!(!explained.contains(&format!("{pair} tcp")), "{pair}: {explained}");
        }
        let chosen = explained.lines().find(|line| line.starts_with("* ")).context("a choice")?;
        let on_one_host = chosen.contains("a → decode-a") || chosen.contains("c → decode-c");
        assert!(figures.contains(if on_one_host { "over ucx/shm" } else { "over tcp" }), "{chosen}: {figures}");
    }
    Ok(())
}

/// Nodes that share nothing: a clear error, or the decode node does it alone.
#[tokio::test]
async fn pairs_that_share_nothing_are_never_planned() -> anyhow::Result<()> {
    for (local, serves) in [("never", false), ("auto", true)] {
        let router = format!("--local-prefill {local}");
        let Some(mut spread) = Spread::start(&router).await? else { return Ok(()) };
        let loopback = "--transport tcp --kv-listen 127.0.0.1:0";
        spread.node("prefill", "a", Inside::Host(0), loopback).await?;
        spread.node("decode", "b", Inside::Host(1), loopback).await?;
        spread.registered().await?;
        let (ok, figures) = spread.generate("The capital of France is")?;
        assert_eq!(ok, serves, "{figures}");
        if serves {
            let explained = spread.explain()?;
            assert!(explained.contains("* decode-b alone"), "{explained}");
            assert!(explained.contains("not a pair: prefill-a → decode-b: no common way"), "{explained}");
        } else {
            let wanted =
                ["no common way: prefill-a offers tcp on the loopback of host", "decode-b takes tcp", "--kv-listen"];
            assert!(wanted.iter().all(|word| figures.contains(word)), "{figures}");
        }
        assert!(spread.router.log().contains("no node of the other role can share a request with it"));
    }
    Ok(())
}

/// `tandem up` as one types it; its nodes are put into namespaces by the programs that it finds beside itself.
#[tokio::test]
async fn up_works_across_network_and_ipc_namespaces_without_a_flag() -> anyhow::Result<()> {
    let Some(network) = Network::set_up()? else { return Ok(()) };
    let dir = tempfile::tempdir()?;
    let beside = dir.path().join("bin");
    std::fs::create_dir(&beside)?;
    for name in ["tandem", "tandem-router"] {
        std::fs::copy(program(name)?, beside.join(name))?;
    }
    for (name, host) in [("tandem-prefill-node", 0), ("tandem-decode-node", 1)] {
        wrapper(&beside.join(name), &network.by(Inside::Host(host)), &program(name)?)?;
    }
    let state = dir.path().join("state.json").display().to_string();
    let logs = dir.path().join("logs").display().to_string();
    let mut args =
        words(&format!("--state {state} up --simulated --log-dir {logs} --router-arg=--local-prefill=never"));
    args.extend(words(&format!("--grpc {}:0", network.hub())));
    let up = beside.join("tandem").display().to_string();
    let tandem = Process::start_through(&strs(&network.by(Inside::Hub)), "tandem", &up, &args, dir.path()).await?;
    assert!(
        !tandem.log().contains("UCX is not in use") || !tandem.log().contains("transport=ucx/"),
        "{}",
        tandem.log()
    );
    let (ok, _, figures) = network.run(&up, &["--state", &state, "generate", "--max-tokens", "4", "Hello there"])?;
    assert!(ok && figures.contains("over tcp"), "{figures}\n{}", tandem.log());
    let (ok, explained, errors) = network.run(&up, &["--state", &state, "explain", "last"])?;
    let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(ok && explained.contains("* prefill-0 → decode-0 tcp "), "{explained}{errors}");
    Ok(())
}

/// A program that is another one in a namespace.
fn wrapper(path: &Path, by: &[String], program: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, format!("#!/bin/sh\nexec {} {} \"$@\"\n", by.join(" "), program.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    let known = Command::new("sh").arg("-n").arg(path).status()?;
    ensure!(known.success(), "{} is no script", path.display());
    Ok(())
}
