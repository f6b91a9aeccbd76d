//! Nodes of one machine lend each other cores. One that is stopped or killed meanwhile takes nothing with it but speed.
use std::time::Duration;

use tandem_cluster_tests::client::{ask, metric, rest, text, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Answer, Cluster, Options};
use tandem_proto::v1::generate_response::Event;
use tokio::time::timeout;

/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(60);

type Stream = tonic::Streaming<tandem_proto::v1::GenerateResponse>;

async fn borrowed_steps(node: &Process) -> anyhow::Result<f64> {
    metric(node, r#"cores="borrowed""#).await
}

/// A stream of `request` that has given some tokens.
async fn begun(cluster: &Cluster, request: &tandem_proto::v1::GenerateRequest) -> anyhow::Result<(Stream, Vec<u32>)> {
    let (mut stream, mut tokens) = (cluster.open(request.clone()).await?, Vec::new());
    while tokens.len() < 8 {
        match stream.message().await?.and_then(|message| message.event) {
            Some(Event::Token(token)) => tokens.push(token.token_id),
            other => anyhow::bail!("a token was expected, not {other:?}"),
        }
    }
    Ok((stream, tokens))
}

async fn goes_on((stream, mut tokens): (Stream, Vec<u32>), expected: &Answer) -> anyhow::Result<()> {
    tokens.extend(timeout(LONG, rest(stream)).await??.tokens);
    assert_eq!(tokens, expected.tokens);
    Ok(())
}

#[tokio::test]
async fn cores_are_borrowed_and_their_owners_may_stop_or_die() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let lending = |core: usize| words(&format!("--cpus {core} --lend-cores {}", folder.path().join("cores").display()));
    let (prefill_args, decode_args) = (lending(0), lending(1));
    // A node that starts again warms up, which takes its time beside other clusters.
    let router_args = words("--replan-ms 120000");
    let options = Options { prefill_args, decode_args, router_args, warm_up: true, ..Options::default() };
    let mut cluster = Cluster::start(options).await?;

    let prompt: Vec<u32> = (0..1500).map(|index| 100 + index % 7919).collect();
    cluster.answer(ask(token_ids(prompt), 4)).await?;
    let mut request = ask(text("Once upon a time"), 64);
    request.ignore_eos = true;
    let expected = cluster.answer(request.clone()).await?;
    if std::thread::available_parallelism()?.get() > 1 {
        assert!(borrowed_steps(&cluster.prefill).await? > 0.0, "by the prefill node");
        assert!(borrowed_steps(&cluster.decode).await? > 0.0, "by the decode node");
    }

    // The lender is stopped, in the middle of an answer that its core helps with.
    let stream = begun(&cluster, &request).await?;
    cluster.prefill.freeze();
    goes_on(stream, &expected).await?;
    cluster.prefill.wake();
    // It is killed, and comes back.
    let stream = begun(&cluster, &request).await?;
    cluster.restart_prefill().await?;
    goes_on(stream, &expected).await?;
    // The borrower is killed while its thread is on the other's core, which has a prompt to compute next.
    let stream = begun(&cluster, &request).await?;
    cluster.restart_decode().await?;
    goes_on(stream, &expected).await?;
    assert_eq!(cluster.answer(request).await?.tokens, expected.tokens);
    Ok(())
}
