//! Requests at a steady rate, whatever becomes of those before, each compared with the answer of one engine alone.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_cluster_tests::client::{ask, rest, token_ids};
use tandem_cluster_tests::reference::Reference;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Endpoint;

/// Prompts that others continue.
const SHARED: usize = 8;
const SHARED_TOKENS: usize = 128;

/// What became of the requests so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub sent: u32,
    pub whole: u32,
    /// Ended with an error.
    pub lost: u32,
    /// Other tokens than those of one engine alone.
    pub wrong: u32,
    /// Sum of the re-plans that the router tells.
    pub replans: u32,
    pub longest: Duration,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, whole, lost, wrong, replans, longest } = self;
        write!(
            f,
            "{sent} requests: {whole} whole, {lost} lost, {wrong} wrong; {replans} re-plans, longest {longest:.1?}"
        )
    }
}

pub struct Load {
    url: String,
    reference: Reference,
    rate: f64,
    seed: u64,
    shared: Vec<Vec<u32>>,
    tally: Mutex<Tally>,
}

impl Load {
    pub fn new(url: String, reference: Reference, rate: f64, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shared = (0..SHARED).map(|_| tokens(&mut rng, SHARED_TOKENS)).collect();
        Self { url, reference, rate, seed, shared, tally: Mutex::default() }
    }

    pub fn tally(&self) -> Tally {
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends until `end`, then waits for the last answer.
    pub async fn run_until(self: Arc<Self>, end: Instant) {
        let mut rng = StdRng::seed_from_u64(self.seed + 1);
        let (mut requests, mut at) = (JoinSet::new(), Instant::now());
        while at < end {
            sleep_until(at).await;
            requests.spawn(self.clone().one(self.prompt(&mut rng), rng.random_range(8..48)));
            // Exponential gaps: arrivals that know nothing of each other.
            at += Duration::from_secs_f64(-rng.random::<f64>().max(1e-9).ln() / self.rate);
            while requests.try_join_next().is_some() {}
        }
        while requests.join_next().await.is_some() {}
    }

    /// Half of them continue a prompt that others continue, too.
    fn prompt(&self, rng: &mut StdRng) -> Vec<u32> {
        let own = rng.random_range(16..700);
        let head = if rng.random() { self.shared[rng.random_range(0..SHARED)].clone() } else { Vec::new() };
        [head, tokens(rng, own)].concat()
    }

    async fn one(self: Arc<Self>, prompt: Vec<u32>, new_tokens: u32) {
        self.count(|tally| tally.sent += 1);
        let start = Instant::now();
        let answer = self.answer(&prompt, new_tokens).await;
        let expected = self.reference.tokens(&prompt, new_tokens).await;
        match (answer, expected) {
            (Ok((tokens, replans)), Ok(expected)) => self.count(|tally| {
                tally.whole += u32::from(tokens == expected);
                tally.wrong += u32::from(tokens != expected);
                tally.replans += replans;
                tally.longest = tally.longest.max(start.elapsed());
            }),
            (answer, expected) => {
                eprintln!("lost: {:?} {:?}", answer.err(), expected.err());
                self.count(|tally| tally.lost += 1);
            }
        }
    }

    async fn answer(&self, prompt: &[u32], new_tokens: u32) -> anyhow::Result<(Vec<u32>, u32)> {
        let channel = Endpoint::from_shared(self.url.clone())?.connect().await?;
        let mut request = ask(token_ids(prompt.to_vec()), new_tokens);
        request.ignore_eos = true;
        let answer = rest(InferenceClient::new(channel).generate(request).await?.into_inner()).await?;
        let replans = answer.finish.timings.map_or(0, |timings| timings.replans);
        Ok((answer.tokens, replans))
    }

    fn count(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn tokens(rng: &mut StdRng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.random_range(100..40_000)).collect()
}
