//! A node that computes in another arithmetic is refused, with words, and nobody else is harmed.
use std::time::Duration;

use anyhow::ensure;
use tandem_cluster_tests::client::{ask, text};
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// From a node's start to its refusal, while other programs start too.
const REFUSED: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_node_of_another_arithmetic_is_refused_and_harms_nobody() -> anyhow::Result<()> {
    // In f32, so that machines with bf16 kernels have another arithmetic to refuse.
    let node_args = words("--threads 1 --kv-blocks 1024 --arithmetic f32");
    let cluster = Cluster::start(Options { node_args, ..Options::default() }).await?;
    let before = cluster.answer(ask(text("The capital of France is"), 12)).await?;
    let view = cluster_view(&cluster).await?;
    let nodes = view["nodes"].as_array().cloned().unwrap_or_default();
    ensure!(nodes.iter().all(|node| node["arithmetic"] == "f32" && node["kv_order"] == "bf16-pairs"), "{view}");

    // Both roles: neither may join. On a machine without bf16 kernels only the KV's number format can differ.
    let logs = TempDir::new()?;
    let (_prefill, said) = refused(&cluster, "prefill", "--arithmetic f32 --kv-dtype int8", logs.path()).await?;
    ensure!(said.contains("--kv-dtype") && said.contains("`int8-pairs`") && said.contains("`bf16-pairs`"), "{said}");
    let (decode, said) = refused(&cluster, "decode", "--arithmetic auto", logs.path()).await?;
    let other = said.contains("computes in arithmetic");
    // One of the same arithmetic is no stranger, and leaves.
    let _decode = other.then_some(decode);
    if other {
        ensure!(said.contains("--arithmetic f32") && said.contains("--isa") && said.contains("in `f32`"), "{said}");
        let logged = async |cluster: &Cluster| {
            let log = cluster.router.log();
            log.contains("refused a node") && log.contains("--arithmetic f32")
        };
        cluster.wait_until(REFUSED, "the router has logged it, too", logged).await?;
    } else {
        eprintln!("skipped: this machine has one arithmetic; {said}");
    }

    for prompt in ["The capital of France is", "Water boils at"] {
        let answer = cluster.answer(ask(text(prompt), 12)).await?;
        let timings = answer.finish.timings.clone().unwrap_or_default();
        ensure!(!timings.prefill_instance.contains("stranger") && !timings.decode_instance.contains("stranger"));
        ensure!(prompt != "The capital of France is" || answer.tokens == before.tokens, "{}", answer.text);
    }
    let listed = cluster_view(&cluster).await?;
    ensure!(listed["nodes"].as_array().is_some_and(|nodes| nodes.len() == 2), "{listed}");
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}

async fn cluster_view(cluster: &Cluster) -> anyhow::Result<serde_json::Value> {
    Ok(cluster.get("/debug/cluster").await?.json().await?)
}

/// A node with these flags that wants to join, and what it logs of its refusal, or that it joined.
async fn refused(
    cluster: &Cluster,
    role: &str,
    flags: &str,
    logs: &std::path::Path,
) -> anyhow::Result<(Process, String)> {
    let mut args = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --threads 1 --kv-blocks 256 --transport tcp");
    args.extend(words(&format!("--node-id stranger-{role} --model {}", model()?.display())));
    args.extend(words(&format!("--router {} {flags}", cluster.router.url(cluster.router.join_key()))));
    let node = Process::start(&format!("stranger-{role}"), &format!("tandem-{role}-node"), &args, logs).await?;
    let start = Instant::now();
    loop {
        let log = node.log();
        let told =
            log.lines().find(|line| line.contains("no router, trying again") || line.contains("joined the router"));
        if let Some(line) = told {
            return Ok((node, line.to_owned()));
        }
        ensure!(start.elapsed() < REFUSED, "neither refused nor taken\n{log}");
        sleep(Duration::from_millis(20)).await;
    }
}
