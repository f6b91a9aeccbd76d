//! Every way to choose tokens, through both nodes and both APIs.
use std::time::Duration;

use serde_json::{Value, json};
use tandem_cluster_tests::client::{ask, text};
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1;

const PROMPT: &str = "Tell me a story. Once upon a time";

async fn complete(cluster: &Cluster, fields: Value) -> anyhow::Result<Value> {
    let mut body = json!({"prompt": PROMPT, "max_tokens": 12, "ignore_eos": true, "return_token_ids": true});
    for (name, value) in fields.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    let response = cluster.post("/v1/completions", body.to_string()).await?;
    let (status, answer) = (response.status(), response.text().await?);
    anyhow::ensure!(status == 200, "{status}: {answer}");
    Ok(serde_json::from_str(&answer)?)
}

#[tokio::test]
async fn several_answers_are_those_of_their_seeds() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let both = complete(&cluster, json!({"n": 2, "seed": 5, "temperature": 1.0})).await?;
    for (choice, seed) in [(0, 5), (1, 6)] {
        let alone = complete(&cluster, json!({"seed": seed, "temperature": 1.0})).await?;
        assert_eq!(both["choices"][choice]["index"], choice);
        assert_eq!(both["choices"][choice]["token_ids"], alone["choices"][0]["token_ids"], "seed {seed}");
        assert_eq!(both["usage"]["prompt_tokens"], alone["usage"]["prompt_tokens"]);
    }
    assert_ne!(both["choices"][0]["token_ids"], both["choices"][1]["token_ids"]);
    assert_eq!(both["usage"]["completion_tokens"], 24);
    cluster.idle(Duration::from_secs(2)).await?;
    Ok(())
}

#[tokio::test]
async fn logprobs_of_both_nodes_tokens() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let answer = complete(&cluster, json!({"logprobs": 3, "temperature": 0})).await?;
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().cloned().unwrap_or_default();
    let (tokens, chosen) = (list("tokens"), list("token_logprobs"));
    assert_eq!((tokens.len(), chosen.len(), list("text_offset").len()), (12, 12, 12));
    for ((token, chosen), top) in tokens.iter().zip(&chosen).zip(list("top_logprobs")) {
        let top = top.as_object().cloned().unwrap_or_default();
        let best = top.values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
        assert_eq!((top.len(), chosen.as_f64()), (3, Some(best)), "greedy takes the likeliest of {top:?}");
        assert_eq!(&top[token.as_str().unwrap_or_default()], chosen);
    }
    let text: String = tokens.iter().filter_map(Value::as_str).collect();
    assert_eq!(answer["choices"][0]["text"], text);
    Ok(())
}

#[tokio::test]
async fn penalties_are_the_same_on_two_nodes_and_on_one() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    for temperature in [0.0, 0.9] {
        let sampling = v1::Sampling {
            temperature,
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            frequency_penalty: 0.7,
            min_p: 0.02,
            logit_bias: [(260, 2.0)].into(),
            min_tokens: 6,
            seed: 11,
            ..v1::Sampling::default()
        };
        let request = v1::GenerateRequest { sampling: Some(sampling.clone()), ..ask(text(PROMPT), 24) };
        let apart = cluster.answer(request).await?;
        assert!(apart.finish.timings.is_some_and(|timings| timings.kv_bytes > 0), "the KV travelled");
        let tokens = json!({"prompt": PROMPT}).to_string();
        let tokens: Value = cluster.post("/tokenize", tokens).await?.json().await?;
        let spec = v1::RequestSpec {
            request_id: "alone".into(),
            prompt: serde_json::from_value(tokens["tokens"].clone())?,
            sampling: Some(sampling),
            max_tokens: 24,
            ..v1::RequestSpec::default()
        };
        assert_eq!(apart.tokens, cluster.local_tokens(spec).await?, "temperature {temperature}");
    }
    Ok(())
}
