//! More requests than the nodes can take: refusals come at once and say when to come again, what was taken is answered,
//! one greedy tenant does not push another out, and afterwards all is as before.
use std::time::Duration;

use anyhow::{Context, ensure};
use tandem_cluster_tests::client::{Answer, ask, rest, token_ids};
use tandem_cluster_tests::cluster::{bearer, with_keys, words};
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

/// Each asks again as soon as it has its answer: three times what the nodes and the queue hold.
const GREEDY_CLIENTS: usize = 180;
/// As many over HTTP at one time: more than the queue has places, so one of them is refused whenever they come.
const HTTP_CLIENTS: usize = 24;
const OVERLOAD: Duration = Duration::from_secs(4);
/// A client that is refused comes again after this, whatever it was told.
const IMPATIENCE: Duration = Duration::from_millis(50);
/// Tokens of the polite tenant's answers.
const MAX_TOKENS: u32 = 24;
const LONG: Duration = Duration::from_secs(60);

/// What a client saw.
#[derive(Default)]
struct Seen {
    answers: Vec<Answer>,
    /// How long each refusal took, and the time after which to come again.
    refusals: Vec<(Duration, Option<Duration>)>,
}

impl Seen {
    fn mean_queue_ms(&self) -> f64 {
        let queued = |answer: &Answer| answer.finish.timings.as_ref().map_or(0.0, |timings| timings.queue_ms);
        self.answers.iter().map(queued).sum::<f64>() / self.answers.len().max(1) as f64
    }

    fn join(mut self, other: Self) -> Self {
        self.answers.extend(other.answers);
        self.refusals.extend(other.refusals);
        self
    }
}

#[tokio::test]
async fn overload_is_refused_at_once_and_a_greedy_tenant_pushes_nobody_out() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let keys = with_keys(dir.path(), &["polite", "greedy"])?;
    let node = "--threads 1 --kv-blocks 64 --simulated-step-us 3000 --simulated-token-us 50";
    let options = Options {
        transport: "tcp",
        simulated: true,
        node_args: words(node),
        router_args: words(&format!("--max-queue 20 --node-queue 1 {keys}")),
        ..Options::default()
    };
    let cluster = Cluster::start(options).await?;
    let client = InferenceClient::connect(cluster.router.url("grpc")).await?;
    let alone = run(client.clone(), "polite", MAX_TOKENS, Instant::now() + OVERLOAD / 4).await?;
    ensure!(alone.refusals.is_empty() && !alone.answers.is_empty(), "{} refusals alone", alone.refusals.len());

    let end = Instant::now() + OVERLOAD;
    let mut clients = JoinSet::new();
    for number in 0..GREEDY_CLIENTS {
        // Of many lengths: equal ones would end together and leave nothing to wait for in between.
        let max_tokens = 16 + (number % 17) as u32;
        clients.spawn(run(client.clone(), "greedy", max_tokens, end));
    }
    let polite = tokio::spawn(run(client.clone(), "polite", MAX_TOKENS, end));
    let over_http = refused_over_http(&cluster, end).await?;
    let mut greedy = Seen::default();
    while let Some(seen) = clients.join_next().await {
        greedy = greedy.join(seen??);
    }
    let polite = polite.await??;

    let mut took: Vec<Duration> = greedy.refusals.iter().map(|(took, _)| *took).collect();
    took.sort();
    let median = took.get(took.len() / 2).copied().context("nothing was refused")?;
    println!(
        "greedy: {} answers, {} refusals in {median:.1?}, queue {:.1} ms; polite: {} answers, {} refusals, queue {:.1} ms (alone {:.1})",
        greedy.answers.len(),
        took.len(),
        greedy.mean_queue_ms(),
        polite.answers.len(),
        polite.refusals.len(),
        polite.mean_queue_ms(),
        alone.mean_queue_ms(),
    );
    // Who is refused has not waited in the queue first, however busy the machine is. A calm one takes a twentieth.
    ensure!(median.as_secs_f64() * 4e3 < greedy.mean_queue_ms(), "refusals take {median:?}");
    ensure!(
        greedy.refusals.iter().all(|(_, retry)| retry.is_some_and(|retry| retry > Duration::ZERO)),
        "no retry-after"
    );
    ensure!((1..=60).contains(&over_http), "retry-after {over_http}");
    ensure!(polite.refusals.is_empty(), "the polite tenant was refused {} times", polite.refusals.len());
    ensure!(
        polite.mean_queue_ms() * 2.0 < greedy.mean_queue_ms(),
        "the polite tenant waited as long as the greedy one"
    );
    cluster.idle(LONG).await?;
    let after = run(client, "greedy", MAX_TOKENS, Instant::now()).await?;
    ensure!(after.answers.len() == 1 && after.mean_queue_ms() < 1000.0, "it has not recovered");
    Ok(())
}

/// One client of `tenant`, which asks for `max_tokens` until `end`, once at least.
async fn run(
    client: InferenceClient<Channel>,
    tenant: &'static str,
    max_tokens: u32,
    end: Instant,
) -> anyhow::Result<Seen> {
    let mut seen = Seen::default();
    loop {
        let start = Instant::now();
        match answer(client.clone(), tenant, max_tokens).await {
            Ok(answer) => {
                ensure!(answer.tokens.len() == max_tokens as usize, "an answer was cut off");
                seen.answers.push(answer);
            }
            Err(status) => {
                ensure!(status.code() == Code::ResourceExhausted, "{status}");
                let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
                seen.refusals.push((start.elapsed(), retry));
                sleep(IMPATIENCE).await;
            }
        }
        if Instant::now() >= end {
            return Ok(seen);
        }
    }
}

async fn answer(mut client: InferenceClient<Channel>, tenant: &'static str, max_tokens: u32) -> Result<Answer, Status> {
    let mut message = ask(token_ids(vec![300; 40]), max_tokens);
    message.ignore_eos = true;
    let mut request = Request::new(message);
    request.set_timeout(LONG);
    let key = bearer(tenant).parse().map_err(|_| Status::internal("a key that is no header"))?;
    request.metadata_mut().insert("authorization", key);
    let stream = client.generate(request).await?.into_inner();
    rest(stream).await.map_err(|failure| failure.status)
}

/// `retry-after` of the first request that is refused.
async fn refused_over_http(cluster: &Cluster, end: Instant) -> anyhow::Result<u64> {
    let client = reqwest::Client::new();
    let url = format!("{}/v1/completions", cluster.router.url("http"));
    let request = client.post(url).header("authorization", bearer("greedy"));
    let request =
        request.header("content-type", "application/json").body(r#"{"prompt": [300, 300, 300], "max_tokens": 4}"#);
    loop {
        let mut burst = JoinSet::new();
        for _ in 0..HTTP_CLIENTS {
            burst.spawn(request.try_clone().context("a body that cannot be sent twice")?.send());
        }
        while let Some(response) = burst.join_next().await {
            let response = response??;
            if response.status() == 429 {
                let retry_after = response.headers().get("retry-after").context("no retry-after")?;
                return Ok(retry_after.to_str()?.parse()?);
            }
        }
        ensure!(Instant::now() < end, "nothing was refused over HTTP");
    }
}
