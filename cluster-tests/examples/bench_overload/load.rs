//! Requests at a rate, whatever becomes of those before, and what each of them saw.
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tandem_cluster_tests::client::{ask, token_ids};
use tandem_cluster_tests::cluster::bearer;
use tandem_cluster_tests::open_loop::until_next;
use tandem_proto::v1;
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

/// Tokens of a prompt, none of which begins as another.
pub const PROMPT: u64 = 128;
/// Tokens of an answer; who asks for more takes some more.
pub const ANSWER: u32 = 16;
/// A simulated node says one of the first 4,096 tokens. As many of them as a request may name end the answer of who
/// asks for more than it takes: after 64 further tokens in the mean.
const ENDS: u32 = 64;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Who asks, and how often.
#[derive(Clone)]
pub struct Load {
    /// Connected to the router.
    pub client: InferenceClient<Channel>,
    /// In whose name.
    pub tenant: &'static str,
    /// Requests a second, at random moments.
    pub rate: f64,
    /// Its `max_tokens`: [`ANSWER`], or far more than it takes.
    pub asks: u32,
    /// Names the prompts and the moments.
    pub seed: u64,
}

/// What one request saw.
pub struct Seen {
    /// When it was to be sent, since the load began.
    pub at: f64,
    /// Since then.
    pub outcome: Outcome,
}

pub enum Outcome {
    /// All tokens came, so many, the first after so many milliseconds.
    Answered { ttft_ms: f64, tokens: u32 },
    /// `RESOURCE_EXHAUSTED` after so many milliseconds, with or without a time to come again.
    Refused { after_ms: f64, retry_after: bool, why: String },
    /// Anything else.
    Failed(Status),
}

impl Load {
    /// All requests of so many seconds, in the order in which they were to be sent.
    pub async fn run(self, seconds: f64) -> anyhow::Result<Vec<Seen>> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let (start, mut at, mut requests) = (Instant::now(), 0.0, JoinSet::new());
        for number in 0.. {
            at += until_next(&mut rng, self.rate);
            if at > seconds {
                break;
            }
            let intended = start + Duration::from_secs_f64(at);
            sleep_until(intended).await;
            let load = self.clone();
            requests.spawn(async move { Seen { at, outcome: load.one(number, intended).await } });
        }
        let mut seen = requests.join_all().await;
        seen.sort_by(|a, b| a.at.total_cmp(&b.at));
        Ok(seen)
    }

    async fn one(mut self, number: u64, intended: Instant) -> Outcome {
        match self.answer(number, intended).await {
            Ok((ttft_ms, tokens)) => Outcome::Answered { ttft_ms, tokens },
            Err(status) if status.code() == Code::ResourceExhausted => {
                let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
                let retry_after = retry.is_some_and(|delay| !delay.is_zero());
                Outcome::Refused { after_ms: ms(intended), retry_after, why: status.message().to_owned() }
            }
            Err(status) => Outcome::Failed(status),
        }
    }

    /// When the first token came, and how many.
    async fn answer(&mut self, number: u64, intended: Instant) -> Result<(f64, u32), Status> {
        let word = |position: u64| 300 + (self.seed * 7919 + number * 131 + position * (number % 97 + 1)) % 30_000;
        let prompt: Vec<u32> = (0..PROMPT).map(|position| word(position) as u32).collect();
        let mut message = ask(token_ids(prompt), self.asks);
        message.ignore_eos = true;
        if self.asks > ANSWER {
            message.stop_token_ids = (0..ENDS).collect();
            message.sampling = Some(v1::Sampling { min_tokens: ANSWER, ..message.sampling.unwrap_or_default() });
        }
        let mut request = Request::new(message);
        request.set_timeout(TIMEOUT);
        let key = bearer(self.tenant).parse().map_err(|_| Status::internal("a key that is no header"))?;
        request.metadata_mut().insert("authorization", key);
        let mut stream = self.client.generate(request).await?.into_inner();
        let (mut ttft_ms, mut came) = (None, 0);
        while let Some(message) = stream.message().await? {
            match message.event {
                Some(Event::Token(_)) => {
                    ttft_ms.get_or_insert_with(|| ms(intended));
                    came += 1;
                }
                Some(Event::Finish(finish)) => {
                    // The one that ended it is generated, and not told.
                    let tokens = finish.completion_tokens;
                    let all_came = tokens == came || tokens == came + 1 && self.asks > ANSWER;
                    return ttft_ms
                        .filter(|_| all_came && (ANSWER..=self.asks).contains(&tokens))
                        .map(|ttft_ms| (ttft_ms, tokens))
                        .ok_or_else(|| Status::unknown(format!("the answer ended after {came} of {tokens} tokens")));
                }
                _ => {}
            }
        }
        Err(Status::unknown("the answer has no end"))
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
