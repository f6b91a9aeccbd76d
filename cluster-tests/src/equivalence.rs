//! Disaggregated output = single-node output, token for token: random prompts go both ways and are compared. Over UCX
//! and tcp through a cluster of processes, over the in-process transport through [`Pair`].
use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_proto::v1;

use crate::client::{ask, token_ids};
use crate::cluster::Cluster;
use crate::pair::Pair;

/// The vocabulary of the test model, without its 17 control tokens.
const TOKENS: std::ops::Range<u32> = 17..49_152;
/// Longest prompt in tokens.
const LONGEST: usize = 1000;
/// Enough for the KV of the prompt to be read many times.
const NEW_TOKENS: u32 = 16;
/// End of sequence of the test model; whether it is shown is the API's matter, not this comparison's.
const EOS: u32 = 2;

/// What answers a prompt in two ways.
#[allow(async_fn_in_trait, reason = "used in this crate alone")]
pub trait Subject {
    /// On two nodes; the KV must have travelled.
    async fn disaggregated(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>>;
    /// On one.
    async fn alone(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>>;
}

/// Compares `prompts` random prompts of 1 to 1,000 tokens, greedy and seeded in turn. `seed` names the whole series.
///
/// # Errors
/// The first difference, with all that is needed to repeat it.
pub async fn compare(subject: &impl Subject, prompts: usize, seed: u64) -> anyhow::Result<()> {
    for index in 0..prompts {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(index as u64));
        let length = rng.random_range(1..=LONGEST);
        let prompt: Vec<u32> = (0..length).map(|_| rng.random_range(TOKENS)).collect();
        let sampling = if index % 2 == 0 { greedy() } else { seeded(&mut rng) };
        let what = format!("prompt {index} of series {seed} ({length} tokens, {sampling:?})");
        let (apart, alone) =
            tokio::join!(subject.disaggregated(&prompt, sampling.clone()), subject.alone(&prompt, sampling));
        let apart = without_eos(apart.with_context(|| format!("disaggregated, {what}"))?);
        let alone = without_eos(alone.with_context(|| format!("on one node, {what}"))?);
        ensure!(apart == alone, "{what}: disaggregated {apart:?}, on one node {alone:?}");
    }
    Ok(())
}

impl Subject for Cluster {
    async fn disaggregated(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
        let mut request = ask(token_ids(prompt), NEW_TOKENS);
        request.sampling = Some(sampling);
        let answer = self.answer(request).await?;
        let timings = answer.finish.timings.context("no timings")?;
        // One token needs no hand-off; anything longer must have come over the wire.
        ensure!(answer.tokens.len() <= 1 || timings.kv_bytes > 0, "no KV travelled");
        Ok(answer.tokens)
    }

    async fn alone(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
        self.local_tokens(spec(prompt, sampling)).await
    }
}

impl Subject for Pair {
    async fn disaggregated(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
        let (tokens, kv_bytes) = self.answer(spec(prompt, sampling)).await?;
        ensure!(tokens.len() <= 1 || kv_bytes > 0, "no KV travelled");
        Ok(tokens)
    }

    async fn alone(&self, prompt: &[u32], sampling: v1::Sampling) -> anyhow::Result<Vec<u32>> {
        self.local_tokens(spec(prompt, sampling)).await
    }
}

fn spec(prompt: &[u32], sampling: v1::Sampling) -> v1::RequestSpec {
    v1::RequestSpec {
        request_id: "equivalence".to_owned(),
        prompt: prompt.to_vec(),
        sampling: Some(sampling),
        max_tokens: NEW_TOKENS,
        ..Default::default()
    }
}

fn greedy() -> v1::Sampling {
    v1::Sampling::default()
}

fn seeded(rng: &mut StdRng) -> v1::Sampling {
    v1::Sampling { temperature: 0.9, top_p: 0.95, top_k: 50, seed: rng.random(), ..v1::Sampling::default() }
}

/// The tokens before the end-of-sequence token.
pub fn without_eos(mut tokens: Vec<u32>) -> Vec<u32> {
    if tokens.last() == Some(&EOS) {
        tokens.pop();
    }
    tokens
}
