//! A chat's second turn: what the decode node holds of its history does not travel again.
use std::time::Duration;

use anyhow::Context;
use tandem_cluster_tests::client::{Answer, ask, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options};

const BLOCK_TOKENS: usize = 16;
/// Of SmolLM2-135M in bf16: K and V of 3 heads of 64 in 30 layers, for the tokens of a block.
const BLOCK_BYTES: u64 = 2 * 3 * 64 * 30 * 2 * BLOCK_TOKENS as u64;
const FIRST_PROMPT: usize = 100;
const ANSWER: u32 = 40;
const NEW: usize = 50;

#[tokio::test]
async fn only_missing_blocks_travel_over_ucx() -> anyhow::Result<()> {
    only_missing_blocks_travel("ucx").await
}

#[tokio::test]
async fn only_missing_blocks_travel_over_tcp() -> anyhow::Result<()> {
    only_missing_blocks_travel("tcp").await
}

async fn only_missing_blocks_travel(transport: &'static str) -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { transport, ..Options::default() }).await?;
    let first = turn(&cluster, some_tokens(FIRST_PROMPT, 0)).await?;
    assert_eq!(moved(&first)?, (FIRST_PROMPT.div_ceil(BLOCK_TOKENS) as u32, 7 * BLOCK_BYTES));

    let history = [some_tokens(FIRST_PROMPT, 0), first.tokens].concat();
    let prompt = [history.clone(), some_tokens(NEW, 7)].concat();
    let second = turn(&cluster, prompt.clone()).await?;
    // The last token of an answer is never computed; of the rest, decode holds the full blocks.
    let held = (history.len() - 1) / BLOCK_TOKENS;
    let missing = prompt.len().div_ceil(BLOCK_TOKENS) - held;
    assert_eq!((held, missing), (8, 4));
    assert_eq!(moved(&second)?, (missing as u32, missing as u64 * BLOCK_BYTES), "blocks and bytes on the wire");
    let trace: serde_json::Value =
        cluster.get(&format!("/api/traces/{}", second.finish.trace_id)).await?.json().await?;
    assert!(trace.to_string().contains("tandem.kv.blocks_reused"), "{trace}");
    cluster.idle(Duration::from_secs(2)).await?;
    // The other cluster waits for its end.
    drop(cluster);

    let node_args = [Options::default().node_args, words("--no-prefix-caching")].concat();
    let uncached = Cluster::start(Options { transport, node_args, ..Options::default() }).await?;
    let whole = turn(&uncached, prompt).await?;
    assert_eq!(moved(&whole)?.0, 12, "without a cache all of it travels");
    assert_eq!(whole.tokens, second.tokens);
    Ok(())
}

async fn turn(cluster: &Cluster, prompt: Vec<u32>) -> anyhow::Result<Answer> {
    let mut request = ask(token_ids(prompt), ANSWER);
    request.ignore_eos = true;
    Ok(cluster.answer(request).await?)
}

/// Blocks and bytes of the hand-off.
fn moved(answer: &Answer) -> anyhow::Result<(u32, u64)> {
    let timings = answer.finish.timings.as_ref().context("no timings")?;
    Ok((timings.kv_blocks, timings.kv_bytes))
}

fn some_tokens(count: usize, kind: u32) -> Vec<u32> {
    (0..count as u32).map(|index| 1000 + kind * 613 + index * 37).collect()
}
