//! A prefill and a decode node with a GPU each behind a router: requests as clients make them, KV by `cuda_ipc`.
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use serde_json::Value;
use tandem_cluster_tests::client::{ask, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1;
use tempfile::TempDir;

use super::{Machine, is_zero_copy};

/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(120);
/// From the end of a request to free blocks everywhere.
const BACK: Duration = Duration::from_secs(10);
/// The model's vocabulary, without its control tokens.
const TOKENS: std::ops::Range<u32> = 3..320;
/// Of an answer.
const ANSWER: u32 = 12;

/// Two layers, 512 positions.
fn tiny_model() -> anyhow::Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/families/data/llama");
    Ok(path.canonicalize()?)
}

/// Nodes on the first and the second GPU.
async fn cluster(machine: &Machine, dir: &TempDir) -> anyhow::Result<Cluster> {
    let mut node_environment = machine.environment.clone();
    // Compiled kernels are kept here, and not in the user's cache.
    node_environment.push(("XDG_CACHE_HOME".to_owned(), dir.path().join("cache").display().to_string()));
    let mut node_args = words("--threads 1 --kv-blocks 128 --max-num-batched-tokens 32 --max-num-seqs 8");
    node_args.extend(words("--ucx-profile shm --ucx-lib-dir"));
    node_args.push(machine.ucx.display().to_string());
    Cluster::start(Options {
        transport: "ucx",
        model: Some(tiny_model()?),
        node_args,
        node_environment,
        prefill_args: words("--device cuda:0"),
        decode_args: words(&format!("--device cuda:{}", machine.second)),
        ..Options::default()
    })
    .await
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| TOKENS.start + at * 7 % (TOKENS.end - TOKENS.start)).collect()
}

/// What one node alone answers, which takes no KV from anybody.
async fn alone(cluster: &Cluster, prompt: Vec<u32>) -> anyhow::Result<Vec<u32>> {
    let spec = v1::RequestSpec {
        request_id: "alone".to_owned(),
        prompt,
        max_tokens: ANSWER,
        ignore_eos: true,
        ..Default::default()
    };
    cluster.local_tokens(spec).await
}

#[tokio::test]
async fn an_answer_over_two_gpus_is_that_of_one_and_its_kv_went_by_cuda_ipc() -> anyhow::Result<()> {
    let Some(machine) = Machine::for_two() else { return Ok(()) };
    let dir = tempfile::tempdir()?;
    let cluster = cluster(&machine, &dir).await?;
    for (node, device) in
        [(&cluster.prefill, "cuda:0".to_owned()), (&cluster.decode, format!("cuda:{}", machine.second))]
    {
        assert_eq!(node.ready("device"), device);
        let transport = node.ready("transport");
        assert!(transport.starts_with("ucx/shm(") && transport.contains("cuda_ipc"), "{transport}");
    }
    for length in [2, 40, 200] {
        let mut request = ask(token_ids(prompt(length)), ANSWER);
        request.ignore_eos = true;
        let answer = cluster.answer(request).await?;
        let timings = answer.finish.timings.unwrap_or_default();
        ensure!(timings.kv_bytes > 0 && timings.replans == 0, "{length}: {timings:?}");
        assert_eq!(answer.tokens, alone(&cluster, prompt(length)).await?, "a prompt of {length} tokens");
    }
    let said = cluster.decode.log();
    assert!(said.lines().any(is_zero_copy), "the decode node's UCX took another way:\n{said}");
    cluster.idle(BACK).await?;
    Ok(())
}

/// Nodes on processors add, and keep KV, in another order than those on GPUs: who comes second is refused, and told
/// why.
#[tokio::test]
async fn nodes_on_gpus_and_on_processors_refuse_each_other_with_words() -> anyhow::Result<()> {
    let Some(machine) = Machine::for_two() else { return Ok(()) };
    let dir = tempfile::tempdir()?;
    let gpus = cluster(&machine, &dir).await?;
    let node_args = words("--threads 1 --kv-blocks 128 --kv-dtype bf16");
    let processors = gpus.beside(Options { model: Some(tiny_model()?), node_args, ..Options::default() }).await?;
    let on_gpu = format!("--device cuda:{} --ucx-profile shm --ucx-lib-dir {}", machine.second, machine.ucx.display());
    for (cluster, order, stranger, flags) in
        [(&gpus, "bf16-tokens", "on-processor", ""), (&processors, "bf16-pairs", "on-gpu", on_gpu.as_str())]
    {
        let mut args = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --threads 1 --kv-blocks 128 --kv-dtype bf16");
        args.extend(words(&format!("--node-id {stranger}")));
        args.extend(words(&format!("--model {} --router {}", tiny_model()?.display(), cluster.router.url("grpc"))));
        args.extend(words(flags));
        let environment = &cluster_environment(&gpus);
        let stranger =
            Process::start_in_environment(environment, stranger, "tandem-decode-node", &args, dir.path()).await?;
        let told = || stranger.log().lines().find(|line| line.contains("no router, trying again")).map(str::to_owned);
        cluster.wait_until(LONG, "the stranger is refused", async |_: &Cluster| told().is_some()).await?;
        let said = told().unwrap_or_default();
        assert!(["computes in arithmetic", "`mma-k4096`", "--device"].iter().all(|word| said.contains(word)), "{said}");
        let view: Value = cluster.get("/debug/cluster").await?.json().await?;
        let nodes = view["nodes"].as_array().cloned().unwrap_or_default();
        assert!(nodes.len() == 2 && nodes.iter().all(|node| node["kv_order"] == order), "{view}");
    }
    Ok(())
}

fn cluster_environment(cluster: &Cluster) -> Vec<(&str, &str)> {
    cluster.options.node_environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}
