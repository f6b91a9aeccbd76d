//! The reason of the whole: prompts are read on one process and answered by another.
use std::time::Duration;

use anyhow::Context;
use futures::future::try_join_all;
use tandem_cluster_tests::client::{ask, chat, text, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options, Pair, equivalence};

/// Raised by the example `equivalence` where there is time.
const PROMPTS: usize = 8;

#[tokio::test]
async fn a_prompt_crosses_the_cluster() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let transport = cluster.decode.ready("transport");
    assert!(transport.contains("posix") || transport.contains("sysv"), "no shared memory: {transport}");
    let answer = cluster.answer(ask(text("The capital of France is"), 12)).await?;
    assert!(answer.text.contains("Paris"), "{}", answer.text);
    let (finish, timings) = (&answer.finish, answer.finish.timings.clone().unwrap_or_default());
    assert_eq!(finish.completion_tokens as usize, answer.tokens.len());
    assert!(timings.kv_bytes > 0 && timings.kv_blocks >= 1 && timings.kv_gbps > 0.0, "{timings:?}");
    assert!(timings.kv_transport.starts_with("ucx/"), "{timings:?}");
    assert!(!finish.trace_id.is_empty() && timings.ttft_ms > 0.0);
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}

#[tokio::test]
async fn the_http_api_gives_the_same_answer() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let over_grpc = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    let body =
        r#"{"model":"","prompt":"The capital of France is","max_tokens":8,"temperature":0,"return_token_ids":true}"#;
    let models: serde_json::Value = cluster.get("/v1/models").await?.json().await?;
    let name = models["data"][0]["id"].as_str().unwrap_or_default().to_owned();
    let body = body.replace(r#""model":"""#, &format!(r#""model":"{name}""#));
    let response = cluster.post("/v1/completions", body).await?;
    let (status, body) = (response.status(), response.text().await?);
    assert_eq!(status, 200, "{body}");
    let answer: serde_json::Value = serde_json::from_str(&body)?;
    assert_eq!(answer["choices"][0]["text"], over_grpc.text, "{body}");
    let ids = serde_json::from_value::<Vec<u32>>(answer["choices"][0]["token_ids"].clone())?;
    assert_eq!(equivalence::without_eos(ids), equivalence::without_eos(over_grpc.tokens));
    Ok(())
}

#[tokio::test]
async fn disaggregated_equals_one_node_over_ucx() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    equivalence::compare(&cluster, PROMPTS, 1).await?;
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}

#[tokio::test]
async fn disaggregated_equals_one_node_in_one_process() -> anyhow::Result<()> {
    equivalence::compare(&Pair::start("--threads 1 --kv-blocks 1024 --skip-warm-up").await?, PROMPTS, 3).await
}

#[tokio::test]
async fn disaggregated_equals_one_node_over_tcp() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { transport: "tcp", ..Options::default() }).await?;
    assert!(cluster.decode.ready("transport").starts_with("tcp"), "{}", cluster.decode.ready("transport"));
    equivalence::compare(&cluster, PROMPTS, 2).await?;
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}

#[tokio::test]
async fn the_size_of_a_block_changes_no_token() -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for size in [16_u32, 64] {
        let node_args = words(&format!("--threads 1 --block-size {size} --kv-blocks {}", 4096 / size));
        let cluster = Cluster::start(Options { node_args, ..Options::default() }).await?;
        for length in [1, 63, 64, 65, 500] {
            // None begins as another one: everything travels.
            let prompt: Vec<u32> = (0..length).map(|i| 1000 + length + i * 37).collect();
            let answer = cluster.answer(ask(token_ids(prompt), 16)).await?;
            let blocks = answer.finish.timings.context("no timings")?.kv_blocks;
            assert_eq!(blocks, length.div_ceil(size), "a prompt of {length} in blocks of {size}");
            answers.push(answer.tokens);
        }
        cluster.idle(Duration::from_secs(2)).await?;
    }
    let (small, large) = answers.split_at(answers.len() / 2);
    assert_eq!(small, large);
    Ok(())
}

#[tokio::test]
async fn sixty_four_at_once_are_not_mixed_up() -> anyhow::Result<()> {
    let mut options = Options::default();
    options.node_args.extend(words("--max-num-seqs 16"));
    let cluster = Cluster::start(options).await?;
    let request = |number: u32| ask(chat(&format!("Repeat the number {number}.")), 8);
    let numbers: Vec<u32> = (0..64).map(|index| 1000 + index * 137).collect();
    let mut alone = Vec::new();
    for &number in &numbers {
        alone.push(cluster.answer(request(number)).await?.tokens);
    }
    let together = try_join_all(numbers.iter().map(|&number| cluster.answer(request(number)))).await?;
    for ((number, alone), together) in numbers.iter().zip(&alone).zip(&together) {
        assert_eq!(alone, &together.tokens, "number {number} got {:?}", together.text);
    }
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}
