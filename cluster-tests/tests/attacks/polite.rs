//! The polite client: one request after the other, each with the tokens that it must have. It has a thread of its own,
//! so that no attacker of this process is in its way.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tandem_cluster_tests::open_loop::percentile;
use tandem_cluster_tests::reference::Reference;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::cores::Cores;
use crate::target::{PATIENCE, POLITE, told};

const NEW_TOKENS: u32 = 8;

/// Prompts, and what simulated nodes answer to them.
pub struct Polite {
    questions: Vec<(String, Vec<u32>)>,
    cores: Cores,
}

/// What the client and those beside it tell each other.
#[derive(Debug, Default)]
pub struct Watch {
    /// The client may end.
    pub over: AtomicBool,
    /// It has had so many answers.
    pub answers: AtomicUsize,
}

/// Milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    /// Answers.
    pub answers: usize,
    /// Half took less.
    pub p50: f64,
    /// One of a hundred took longer.
    pub p99: f64,
    /// Where that one's time went, as the answer says it.
    pub phases: Value,
}

impl Polite {
    /// Works out the answers.
    ///
    /// # Errors
    /// The model is not there.
    pub async fn new(cores: Cores) -> anyhow::Result<Self> {
        let reference = Reference::start()?;
        let mut questions = Vec::new();
        for number in 0..16_u32 {
            let prompt: Vec<u32> = (0..40).map(|at| 100 + (number * 977 + at * 31) % 40_000).collect();
            let expected = reference.tokens(&prompt, NEW_TOKENS).await?;
            let body = json!({"prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": true,
                "temperature": 0, "return_token_ids": true, "stream_options": {"include_timings": true}});
            questions.push((body.to_string(), expected));
        }
        Ok(Self { questions, cores })
    }

    /// Asks the router at this URL until it is over, and so often at least.
    ///
    /// # Errors
    /// An answer is not the right one, or does not come.
    pub async fn ask(self: &Arc<Self>, url: String, least: usize, watch: &Arc<Watch>) -> anyhow::Result<Latency> {
        let (polite, watch, (tell, asked)) = (Arc::clone(self), Arc::clone(watch), oneshot::channel());
        std::thread::spawn(move || {
            let asking = polite.cores.for_cluster().and_then(|()| {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(polite.ask_here(&url, least.max(1), &watch))
            });
            let _ = tell.send(asking);
        });
        asked.await.context("the polite client panicked")?
    }

    async fn ask_here(&self, url: &str, least: usize, watch: &Watch) -> anyhow::Result<Latency> {
        let client = reqwest::Client::builder().timeout(PATIENCE).build()?;
        let url = format!("{url}/v1/completions");
        let mut times = Vec::new();
        for (body, expected) in self.questions.iter().cycle() {
            let asked = Instant::now();
            let request = client.post(&url).header("content-type", "application/json").bearer_auth(POLITE);
            let answer = async { told(request.body(body.clone()).send().await?).await };
            let (status, answer) = answer.await.context("the polite client")?;
            let took = asked.elapsed().as_secs_f64() * 1e3;
            ensure!(status == 200, "the polite client got {status}: {answer}");
            let mut answer: Value = serde_json::from_str(&answer)?;
            times.push((took, answer["tandem"].take()));
            let tokens: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone())?;
            ensure!(tokens == *expected, "the polite client got {tokens:?}, not {expected:?}");
            watch.answers.store(times.len(), Ordering::Relaxed);
            if watch.over.load(Ordering::Relaxed) && times.len() >= least {
                break;
            }
        }
        times.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let took: Vec<f64> = times.iter().map(|(took, _)| *took).collect();
        let (p50, p99) = (percentile(&took, 0.5), percentile(&took, 0.99));
        let slow = times.into_iter().find(|(took, _)| *took >= p99);
        Ok(Latency { answers: took.len(), p50, p99, phases: slow.map(|(_, phases)| phases).unwrap_or_default() })
    }
}
