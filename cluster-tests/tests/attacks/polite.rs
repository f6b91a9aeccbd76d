//! The polite client: one request after the other, each with the tokens that it must have.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tandem_cluster_tests::open_loop::percentile;
use tandem_cluster_tests::reference::Reference;

use crate::target::{POLITE, Target};

const NEW_TOKENS: u32 = 8;

/// Prompts, and what simulated nodes answer to them.
pub struct Polite {
    questions: Vec<(String, Vec<u32>)>,
}

/// Milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    /// Answers.
    pub answers: usize,
    /// Half took less.
    pub p50: f64,
    /// One of a hundred took longer.
    pub p99: f64,
}

impl Polite {
    /// Works out the answers.
    ///
    /// # Errors
    /// The model is not there.
    pub async fn new() -> anyhow::Result<Self> {
        let reference = Reference::start()?;
        let mut questions = Vec::new();
        for number in 0..16_u32 {
            let prompt: Vec<u32> = (0..40).map(|at| 100 + (number * 977 + at * 31) % 40_000).collect();
            let expected = reference.tokens(&prompt, NEW_TOKENS).await?;
            let body = json!({"prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": true,
                "temperature": 0, "return_token_ids": true});
            questions.push((body.to_string(), expected));
        }
        Ok(Self { questions })
    }

    /// Asks until it is `over`, and at least once.
    ///
    /// # Errors
    /// An answer is not the right one, or does not come.
    pub async fn ask(&self, target: &Target, over: &AtomicBool) -> anyhow::Result<Latency> {
        let mut times = Vec::new();
        for (body, expected) in self.questions.iter().cycle() {
            let asked = Instant::now();
            let (status, answer) =
                target.post(POLITE, "/v1/completions", body.clone()).await.context("the polite client")?;
            times.push(asked.elapsed().as_secs_f64() * 1e3);
            ensure!(status == 200, "the polite client got {status}: {answer}");
            let answer: Value = serde_json::from_str(&answer)?;
            let tokens: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone())?;
            ensure!(tokens == *expected, "the polite client got {tokens:?}, not {expected:?}");
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(Latency { answers: times.len(), p50: percentile(&times, 0.5), p99: percentile(&times, 0.99) })
    }
}
