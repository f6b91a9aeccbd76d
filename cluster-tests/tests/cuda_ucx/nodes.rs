//! A cluster on two emulated GPUs.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use tandem_cluster_tests::client::{ask, metric, rest, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1;
use tokio::time::timeout;

use super::{Machine, is_zero_copy};

/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(120);
/// From the end of a request to free blocks everywhere.
const BACK: Duration = Duration::from_secs(10);
/// The model's vocabulary, without its control tokens.
const TOKENS: std::ops::Range<u32> = 3..320;

/// A prefill node on the first GPU, a decode node on the second, and the tiny model.
async fn cluster(machine: &Machine, transport: &'static str, ucx: &Path) -> anyhow::Result<Cluster> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/families/data/llama").canonicalize()?;
    let flags = "--threads 1 --kv-blocks 128 --max-num-batched-tokens 32 --max-num-seqs 8";
    Cluster::start(Options {
        model: Some(model),
        transport,
        node_args: words(&format!("{flags} --ucx-lib-dir {}", ucx.display())),
        node_environment: machine.environment.clone(),
        prefill_args: words("--device cuda:0"),
        decode_args: words("--device cuda:1"),
        ..Options::default()
    })
    .await
}

fn request(tokens: u32, answer: u32) -> v1::GenerateRequest {
    let prompt: Vec<u32> = (0..tokens).map(|at| TOKENS.start + at * 7 % (TOKENS.end - TOKENS.start)).collect();
    let mut request = ask(token_ids(prompt), answer);
    request.ignore_eos = true;
    request
}

/// The same tokens as over tcp, over the death of either node, and KV that went from GPU to GPU.
#[tokio::test]
async fn nodes_hand_over_by_cuda_ipc_what_they_would_have_staged() -> anyhow::Result<()> {
    let Some(machine) = Machine::with_two() else { return Ok(()) };
    let lengths = [40, 200, 480];
    let mut staged = Vec::new();
    let cluster_over_tcp = cluster(&machine, "tcp", &machine.ucx).await?;
    for length in lengths {
        staged.push(cluster_over_tcp.answer(request(length, 12)).await?.tokens);
    }
    drop(cluster_over_tcp);

    let mut cluster = cluster(&machine, "ucx", &machine.ucx).await?;
    for node in [&cluster.prefill, &cluster.decode] {
        let transport = node.ready("transport");
        ensure!(transport.starts_with("ucx/shm(") && transport.contains("cuda_ipc"), "{transport}");
    }
    for (length, staged) in lengths.into_iter().zip(&staged) {
        let answer = cluster.answer(request(length, 12)).await?;
        let timings = answer.finish.timings.unwrap_or_default();
        ensure!(timings.kv_bytes > 0 && answer.tokens == *staged, "{length}: {timings:?} {:?}", answer.tokens);
    }
    let log = cluster.decode.log();
    ensure!(log.lines().any(is_zero_copy), "the decode node's UCX took another way:\n{log}");

    cluster.restart_prefill().await?;
    ensure!(over_death_of_prefill(&mut cluster, request(480, 12)).await? == staged[2]);
    let expected = cluster.answer(request(40, 64)).await?.tokens;
    ensure!(over_death_of_decode(&mut cluster, request(40, 64)).await? == expected);
    cluster.idle(BACK).await?;
    Ok(())
}

/// With `auto` a UCX without CUDA is no obstacle: KV is staged, and the node says why.
#[tokio::test]
async fn without_cuda_in_ucx_kv_is_staged_and_the_node_says_why() -> anyhow::Result<()> {
    let Some(machine) = Machine::with_two() else { return Ok(()) };
    let nowhere = tempfile::tempdir()?;
    let cluster = cluster(&machine, "auto", nowhere.path()).await?;
    ensure!(cluster.decode.ready("transport").starts_with("tcp"), "{}", cluster.decode.ready("transport"));
    let log = cluster.decode.log();
    let said = log.lines().find(|line| line.contains("staged through main memory")).context("no word about it")?;
    ensure!(said.contains("ucx/shm does not work here") && said.contains("libucs.so.0"), "{said}");
    ensure!(cluster.answer(request(40, 4)).await?.tokens.len() == 4);
    Ok(())
}

/// The tokens of an answer whose decode node is killed once the client has the first of them.
async fn over_death_of_decode(cluster: &mut Cluster, request: v1::GenerateRequest) -> anyhow::Result<Vec<u32>> {
    let mut stream = cluster.open(request).await?;
    let first = stream.message().await?.context("no first token")?;
    cluster.restart_decode().await?;
    let after = timeout(LONG, rest(stream)).await??;
    let Some(v1::generate_response::Event::Token(first)) = first.event else { panic!("the first message is no token") };
    ensure!(after.finish.timings.unwrap_or_default().replans >= 1, "the answer was complete before");
    Ok([vec![first.token_id], after.tokens].concat())
}

/// The tokens of an answer whose prefill node is killed while layers of the prompt are on their way.
async fn over_death_of_prefill(cluster: &mut Cluster, request: v1::GenerateRequest) -> anyhow::Result<Vec<u32>> {
    let stream = cluster.open(request).await?;
    // Asked of the node itself: its reports to the router come too late.
    let begun = async |cluster: &Cluster| {
        let running = metric(&cluster.prefill, "vllm:num_requests_running").await;
        running.is_ok_and(|running| running == 1.0)
    };
    cluster.wait_until(LONG, "the prompt is in a step", begun).await?;
    cluster.restart_prefill().await?;
    let answer = timeout(LONG, rest(stream)).await??;
    ensure!(answer.finish.timings.unwrap_or_default().replans >= 1, "the prompt was computed before");
    Ok(answer.tokens)
}
