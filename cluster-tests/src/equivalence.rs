//! Disaggregated output = single-node output, token for token: random prompts go both ways and are compared.
use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_proto::v1;

use crate::client::{ask, token_ids};
use crate::cluster::Cluster;

/// The vocabulary of the test model, without its 17 control tokens.
const TOKENS: std::ops::Range<u32> = 17..49_152;
/// Longest prompt in tokens.
const LONGEST: usize = 1000;
/// Enough for the KV of the prompt to be read many times.
const NEW_TOKENS: u32 = 16;
/// End of sequence of the test model; whether it is shown is the API's matter, not this comparison's.
const EOS: u32 = 2;

/// Compares `prompts` random prompts of 1 to 1,000 tokens, greedy and seeded in turn. `seed` names the whole series.
///
/// # Errors
/// The first difference, with all that is needed to repeat it.
pub async fn compare(cluster: &Cluster, prompts: usize, seed: u64) -> anyhow::Result<()> {
    for index in 0..prompts {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(index as u64));
        let length = rng.random_range(1..=LONGEST);
        let prompt: Vec<u32> = (0..length).map(|_| rng.random_range(TOKENS)).collect();
        let sampling = if index % 2 == 0 { greedy() } else { seeded(&mut rng) };
        let what = format!("prompt {index} of series {seed} ({length} tokens, {sampling:?})");
        let (apart, alone) = tokio::join!(disaggregated(cluster, &prompt, sampling), local(cluster, &prompt, sampling));
        let apart = without_eos(apart.with_context(|| format!("disaggregated, {what}"))?);
        let alone = without_eos(alone.with_context(|| format!("on one node, {what}"))?);
        ensure!(apart == alone, "{what}: disaggregated {apart:?}, on one node {alone:?}");
    }
    Ok(())
}

async fn disaggregated(cluster: &Cluster, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
    let mut request = ask(token_ids(prompt), NEW_TOKENS);
    request.sampling = Some(sampling);
    let answer = cluster.answer(request).await?;
    let timings = answer.finish.timings.context("no timings")?;
    // One token needs no hand-off; anything longer must have come over the wire.
    ensure!(answer.tokens.len() <= 1 || timings.kv_bytes > 0, "no KV travelled");
    Ok(answer.tokens)
}

async fn local(cluster: &Cluster, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
    let spec = v1::RequestSpec {
        request_id: "local".to_owned(),
        prompt: prompt.to_vec(),
        sampling: Some(sampling),
        max_tokens: NEW_TOKENS,
        ..Default::default()
    };
    cluster.local_tokens(spec).await
}

fn greedy() -> v1::Sampling {
    v1::Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
}

fn seeded(rng: &mut StdRng) -> v1::Sampling {
    v1::Sampling { temperature: 0.9, top_p: 0.95, top_k: 50, seed: rng.random() }
}

/// The tokens before the end-of-sequence token.
pub fn without_eos(mut tokens: Vec<u32>) -> Vec<u32> {
    if tokens.last() == Some(&EOS) {
        tokens.pop();
    }
    tokens
}
