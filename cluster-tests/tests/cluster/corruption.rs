//! Damaged KV is refused, counted and reported, and never decoded. Over ucx, where prefill damages what it sends.
use std::time::Duration;

use anyhow::Context;
use tandem_cluster_tests::client::{ask, metric, text};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options};
use tonic::Code;

/// The router's default: with one pair of nodes every one of them hands over damaged KV.
const ATTEMPTS: usize = 4;

async fn damaged(transport: &'static str, flag: &str) -> anyhow::Result<()> {
    let options = Options { transport, prefill_args: words(flag), ..Options::default() };
    let mut cluster = Cluster::start(options).await?;
    let failure = cluster.answer(ask(text("The capital of France is"), 12)).await.expect_err("damaged KV was decoded");
    let code = failure.status.code();
    assert!(matches!(code, Code::DataLoss | Code::Aborted | Code::Unavailable), "{failure}");
    // The first token of each attempt is prefill's own; one more would be decoded from damaged KV.
    assert!(failure.tokens.len() <= ATTEMPTS, "{failure}");
    // The client hears of the refusal from whichever leg reports first, which may be before decode counted it.
    let counted = async {
        while metric(&cluster.decode, "tandem_handoff_refusals_total").await? < 1.0 {}
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(5), counted)
        .await
        .with_context(|| format!("{flag}: no refusal counted"))??;
    // Blocks of a hand-off that went wrong wait in quarantine until no writer can touch them.
    cluster.idle(Duration::from_secs(15)).await?;
    assert!(cluster.router.is_alive() && cluster.prefill.is_alive() && cluster.decode.is_alive());
    Ok(())
}

#[tokio::test]
async fn a_flipped_byte_is_refused_over_ucx() -> anyhow::Result<()> {
    damaged("ucx", "--debug-flip-byte").await
}

#[tokio::test]
async fn a_truncated_push_is_refused_over_ucx() -> anyhow::Result<()> {
    damaged("ucx", "--debug-truncate-push").await
}

#[tokio::test]
async fn a_flipped_byte_is_refused_over_tcp() -> anyhow::Result<()> {
    damaged("tcp", "--debug-flip-byte").await
}

#[tokio::test]
async fn a_truncated_push_is_refused_over_tcp() -> anyhow::Result<()> {
    damaged("tcp", "--debug-truncate-push").await
}
