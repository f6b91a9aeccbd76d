//! Requests without a prefill node: an aggregated cluster, and one that has lost its prefill node.
use std::time::Duration;

use tandem_cluster_tests::client::{ask, text, token_ids};
use tandem_cluster_tests::{Answer, Cluster, Options};
use tandem_proto::v1;
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(60);

fn of(local_prefill: &'static str) -> Options {
    Options { local_prefill, warm_up: true, ..Options::default() }
}

/// Prompts of every length between a token and some chunks, greedy and drawn.
fn requests() -> Vec<v1::GenerateRequest> {
    let prompts = [1_u32, 15, 16, 17, 200, 700].map(|length| (0..length).map(|i| 500 + length + i * 31).collect());
    let drawn = |seed| v1::Sampling { temperature: 0.8, top_p: 0.95, seed, ..v1::Sampling::default() };
    let request = |prompt: Vec<u32>| {
        [None, Some(drawn(prompt.len() as u64))]
            .map(|sampling| v1::GenerateRequest { sampling, ..ask(token_ids(prompt.clone()), 24) })
    };
    prompts.into_iter().flat_map(request).chain([ask(text("The capital of France is"), 24)]).collect()
}

fn timings(answer: &Answer) -> v1::Timings {
    answer.finish.timings.clone().unwrap_or_default()
}

#[tokio::test]
async fn an_aggregated_cluster_answers_token_for_token_as_a_disaggregated_one() -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for local_prefill in ["never", "always"] {
        let cluster = Cluster::start(of(local_prefill)).await?;
        for request in requests() {
            let answer = cluster.answer(request).await?;
            let timings = timings(&answer);
            let local = timings.prefill_instance == timings.decode_instance;
            assert_eq!(local, local_prefill == "always", "{timings:?}");
            assert_eq!(timings.kv_bytes == 0, local || answer.tokens.len() == 1, "{timings:?}");
            let parts = timings.queue_ms + timings.route_ms + timings.prefill_ms;
            assert!((parts - timings.ttft_ms).abs() < 0.01, "{timings:?}");
            answers.push((answer.tokens, answer.text, answer.finish.reason));
        }
        cluster.idle(Duration::from_secs(10)).await?;
    }
    let (apart, aggregated) = answers.split_at(answers.len() / 2);
    assert_eq!(apart, aggregated);
    Ok(())
}

#[tokio::test]
async fn a_cluster_that_loses_its_prefill_node_goes_on() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(of("auto")).await?;
    let long = || ask(token_ids((0..4000).map(|index| 100 + index % 7919).collect::<Vec<u32>>()), 4);
    let stream = cluster.open(long()).await?;
    let nodes = cluster.nodes().await?;
    assert!(nodes.iter().all(|node| !node.processor.is_empty() && node.processor == nodes[0].processor), "{nodes:?}");
    // Each has a core for its thread, so that nothing speaks for the decode node.
    cluster.busy("prefill", LONG).await?;
    cluster.prefill.kill();
    let answer = timeout(LONG * 2, tandem_cluster_tests::client::rest(stream)).await??;
    assert_eq!(timings(&answer).prefill_instance, timings(&answer).decode_instance);
    cluster.registered(1).await?;
    let health = cluster.get("/health").await?.status();
    assert!(health.is_success(), "{health}");
    let paris = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert!(paris.text.contains("Paris"), "{}", paris.text);
    assert_eq!(timings(&paris).replans, 0);
    // With a prefill node again, the same answer.
    cluster.restart_prefill().await?;
    assert_eq!(cluster.answer(long()).await?.tokens, answer.tokens);
    cluster.idle(Duration::from_secs(10)).await?;
    Ok(())
}
