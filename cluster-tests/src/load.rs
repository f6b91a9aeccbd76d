//! A load on several routers: clients that ask all the time, compare each answer with the undisturbed one, and count
//! what took a second try.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::ensure;
use tandem_proto::v1;
use tokio::task::JoinSet;

use crate::client::{ask, token_ids};
use crate::reference::Reference;
use crate::routers::{ask_in_turn, until};

/// That ask at the same time.
pub const CLIENTS: u32 = 9;
const NEW_TOKENS: u32 = 60;

/// Clients that ask all the time, each router in turn, and once more when it fails.
pub struct Load {
    clients: JoinSet<anyhow::Result<(u32, u32)>>,
    answers: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    /// An answer failed that had begun.
    cut: Arc<AtomicBool>,
}

impl Load {
    /// Of routers at these addresses.
    ///
    /// # Errors
    /// The model is not there.
    pub fn start(urls: Vec<String>) -> anyhow::Result<Self> {
        let (answers, over, cut) = (Arc::default(), Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (reference, mut clients) = (Arc::new(Reference::start()?), JoinSet::new());
        for number in 0..CLIENTS as usize {
            let client = Client {
                number,
                urls: urls.clone(),
                reference: Arc::clone(&reference),
                answers: Arc::clone(&answers),
                over: Arc::clone(&over),
                cut: Arc::clone(&cut),
            };
            clients.spawn(client.run());
        }
        Ok(Self { clients, answers, over, cut })
    }

    /// Waits until so many further requests were answered.
    ///
    /// # Errors
    /// They are not in time.
    pub async fn answers_more(&self, count: u32) -> anyhow::Result<()> {
        let wanted = self.answers.load(Ordering::Relaxed) + count;
        let there = async || Ok(self.answers.load(Ordering::Relaxed) >= wanted);
        until(Duration::from_secs(60), "further answers", there).await.map(drop)
    }

    /// Whether an answer failed that had begun.
    pub fn has_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// Answers, and those that took a second try.
    ///
    /// # Errors
    /// A request failed twice, or its answer is not the undisturbed one.
    pub async fn end(mut self) -> anyhow::Result<(u32, u32)> {
        self.over.store(true, Ordering::Relaxed);
        let mut sum = (0, 0);
        while let Some(ended) = self.clients.join_next().await {
            let (answers, again) = ended??;
            sum = (sum.0 + answers, sum.1 + again);
        }
        Ok(sum)
    }
}

struct Client {
    number: usize,
    urls: Vec<String>,
    reference: Arc<Reference>,
    answers: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    cut: Arc<AtomicBool>,
}

impl Client {
    async fn run(self) -> anyhow::Result<(u32, u32)> {
        let (mut answers, mut again) = (0, 0);
        while !self.over.load(Ordering::Relaxed) {
            let seed = 300 + self.number as u32 * 1000 + answers;
            let prompt: Vec<u32> = (0..40 + 5 * self.number as u32).map(|at| (seed + at) % 30_000).collect();
            let first = self.number + answers as usize;
            let asked = ask_in_turn(&self.urls, first, 2, &request(&prompt, NEW_TOKENS)).await;
            let what = format!("answer {answers} of client {}", self.number);
            let (answer, failures) = asked.map_err(|failure| anyhow::anyhow!("{what}: {failure}"))?;
            if failures.iter().any(|failure| !failure.tokens.is_empty()) {
                self.cut.store(true, Ordering::Relaxed);
            }
            let expected = self.reference.tokens(&prompt, NEW_TOKENS).await?;
            ensure!(answer.tokens == expected, "{what} is not the undisturbed one");
            (answers, again) = (answers + 1, again + failures.len() as u32);
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        Ok((answers, again))
    }
}

/// For so many tokens, whatever they are.
pub fn request(prompt: &[u32], tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest { ignore_eos: true, ..ask(token_ids(prompt), tokens) }
}
