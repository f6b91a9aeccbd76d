//! Nodes die, hang and come back; clients leave. The rest lives on and every block comes home.
use std::time::Duration;

use tandem_cluster_tests::client::{ask, metric, rest, text, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Answer, Cluster, Failure, Options};
use tandem_proto::v1;
use tandem_proto::v1::generate_response::Event;
use tokio::time::{Instant, timeout};
use tonic::Code;

type Stream = tonic::Streaming<v1::GenerateResponse>;

/// From the death of a node to the error at the client. An idle machine needs milliseconds; the bound is for cores that
/// also compile.
const TOLD: Duration = Duration::from_secs(10);
/// From the end of a request to free blocks everywhere, as the router hears of it: a step of the engine and a report
/// (half a second), on busy cores. The tests print what it took.
const BACK: Duration = Duration::from_secs(10);
/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(60);

fn long_answer() -> v1::GenerateRequest {
    let mut request = ask(text("Once upon a time"), 600);
    request.ignore_eos = true;
    request
}

fn long_prompt() -> v1::GenerateRequest {
    ask(token_ids((0..4000).map(|index| 100 + index % 7919).collect::<Vec<u32>>()), 4)
}

async fn works(cluster: &Cluster) -> anyhow::Result<Answer> {
    let answer = cluster.answer(ask(text("The capital of France is"), 8)).await?;
    assert!(answer.text.contains("Paris"), "{}", answer.text);
    Ok(answer)
}

fn typed(since: Instant, outcome: Result<Result<Answer, Failure>, tokio::time::error::Elapsed>, codes: &[Code]) {
    println!("the client was told after {:?}", since.elapsed());
    match outcome {
        Err(_) => panic!("no error within {TOLD:?}"),
        Ok(Ok(answer)) => panic!("an answer of {} tokens without its node", answer.tokens.len()),
        Ok(Err(failure)) => assert!(codes.contains(&failure.status.code()), "{failure}"),
    }
}

/// A router that gives up soon when no other node comes.
fn impatient() -> Options {
    Options { router_args: words("--replan-ms 1000"), ..Options::default() }
}

/// An answer that is long enough to be interrupted, as it is undisturbed.
async fn undisturbed(cluster: &Cluster) -> anyhow::Result<(v1::GenerateRequest, Answer)> {
    let mut request = long_answer();
    request.max_tokens = Some(64);
    let answer = cluster.answer(request.clone()).await?;
    Ok((request, answer))
}

/// The next `tokens` tokens and their text.
async fn first(stream: &mut Stream, tokens: usize) -> anyhow::Result<(Vec<u32>, String)> {
    let (mut ids, mut text) = (Vec::new(), String::new());
    while ids.len() < tokens {
        match stream.message().await?.and_then(|message| message.event) {
            Some(Event::Token(token)) => {
                assert_eq!(token.index as usize, ids.len());
                ids.push(token.token_id);
                text += &token.text;
            }
            other => anyhow::bail!("a token was expected, not {other:?}"),
        }
    }
    Ok((ids, text))
}

/// The rest of an interrupted stream is what it would have been.
async fn goes_on(stream: Stream, begun: (Vec<u32>, String), expected: &Answer) -> anyhow::Result<()> {
    let rest = timeout(LONG, rest(stream)).await??;
    assert_eq!([begun.0, rest.tokens].concat(), expected.tokens, "no token lost, none twice");
    assert_eq!(begun.1 + &rest.text, expected.text);
    let timings = rest.finish.timings.unwrap_or_default();
    assert!(timings.replans >= 1, "{timings:?}");
    println!("{} re-plans, longest pause {:.0} ms", timings.replans, timings.longest_gap_ms);
    Ok(())
}

#[tokio::test]
async fn a_stream_goes_on_when_its_decode_node_dies_and_is_restarted() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Options::default()).await?;
    let (request, expected) = undisturbed(&cluster).await?;
    let mut stream = cluster.open(request).await?;
    let begun = first(&mut stream, 4).await?;
    cluster.restart_decode().await?;
    goes_on(stream, begun, &expected).await?;
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn a_stream_goes_on_when_its_decode_node_freezes_and_wakes() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let (request, expected) = undisturbed(&cluster).await?;
    let mut stream = cluster.open(request).await?;
    let begun = first(&mut stream, 4).await?;
    cluster.decode.freeze();
    let given_up = cluster.registered(1).await;
    cluster.decode.wake();
    given_up?;
    goes_on(stream, begun, &expected).await?;
    reborn(&cluster).await?;
    cluster.idle(BACK).await?;
    Ok(())
}

/// The decode node is back: the same process, in another session than the one that was declared dead.
async fn reborn(cluster: &Cluster) -> anyhow::Result<()> {
    cluster.registered(2).await?;
    let incarnation = cluster.decode.ready("incarnation");
    let nodes = cluster.nodes().await?;
    assert!(nodes.iter().any(|node| node.incarnation == incarnation), "{incarnation} is not there: {nodes:#?}");
    assert!(metric(&cluster.decode, "tandem_router_sessions_total{").await? >= 2.0);
    assert!(metric(&cluster.decode, "tandem_router_sessions{").await? == 1.0);
    Ok(())
}

#[tokio::test]
async fn decode_dies_while_streaming_and_nobody_comes() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(impatient()).await?;
    let mut stream = cluster.open(long_answer()).await?;
    first(&mut stream, 4).await?;
    let killed = Instant::now();
    cluster.decode.kill();
    // Tokens were sent: the client must not take the same request for safe to repeat.
    typed(killed, timeout(TOLD, rest(stream)).await, &[Code::Aborted]);
    assert!(cluster.router.is_alive() && cluster.prefill.is_alive());
    cluster.registered(1).await?;
    let refused = cluster.answer(ask(text("Hello"), 4)).await.expect_err("there is no decode node");
    assert_eq!(refused.status.code(), Code::Unavailable, "{refused}");
    cluster.restart_decode().await?;
    works(&cluster).await?;
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn prefill_dies_while_computing_and_is_restarted() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Options::default()).await?;
    let stream = cluster.open(long_prompt()).await?;
    cluster.busy("prefill", LONG).await?;
    cluster.restart_prefill().await?;
    let answer = timeout(LONG * 2, rest(stream)).await??;
    assert!(answer.finish.timings.unwrap_or_default().replans >= 1);
    assert_eq!(answer.tokens, cluster.answer(long_prompt()).await?.tokens);
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn prefill_dies_while_computing_and_nobody_comes() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(impatient()).await?;
    let stream = cluster.open(long_prompt()).await?;
    cluster.busy("prefill", LONG).await?;
    let killed = Instant::now();
    cluster.prefill.kill();
    typed(killed, timeout(TOLD, rest(stream)).await, &[Code::Unavailable]);
    assert!(cluster.router.is_alive() && cluster.decode.is_alive());
    cluster.restart_prefill().await?;
    works(&cluster).await?;
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn prefill_dies_while_decode_streams() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Options::default()).await?;
    let mut request = long_answer();
    request.max_tokens = Some(48);
    let mut stream = cluster.open(request).await?;
    for _ in 0..4 {
        stream.message().await?;
    }
    cluster.prefill.kill();
    let answer = timeout(LONG, rest(stream)).await??;
    assert_eq!(answer.finish.completion_tokens, 48);
    cluster.restart_prefill().await?;
    works(&cluster).await?;
    Ok(())
}

#[tokio::test]
async fn a_frozen_decode_node_is_given_up() -> anyhow::Result<()> {
    const LEASE_AND_MORE: Duration = Duration::from_secs(15);
    let cluster = Cluster::start(impatient()).await?;
    let mut stream = cluster.open(long_answer()).await?;
    first(&mut stream, 4).await?;
    let frozen = Instant::now();
    cluster.decode.freeze();
    let outcome = timeout(LEASE_AND_MORE, rest(stream)).await;
    cluster.decode.wake();
    typed(frozen, outcome, &[Code::Aborted, Code::Unavailable]);
    // It says that it is back, and is used again.
    reborn(&cluster).await?;
    cluster.idle(LONG).await?;
    works(&cluster).await?;
    Ok(())
}

#[tokio::test]
async fn clients_that_leave_free_their_blocks() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    cluster.idle(BACK).await?;
    {
        let answer = cluster.answer(long_prompt());
        tokio::select! {
            early = answer => panic!("the prompt was too short for this test: {early:?}"),
            busy = cluster.busy("prefill", LONG) => { busy?; }
        }
    }
    println!("left while the prompt was computed: blocks back after {:?}", cluster.idle(BACK).await?);
    for tokens in [1, 2, 10] {
        let mut stream = cluster.open(long_answer()).await?;
        for _ in 0..tokens {
            stream.message().await?;
        }
        // Without this look a report from before the request would pass for one from after it.
        cluster.busy("decode", LONG).await?;
        println!("at {tokens} tokens: {}", cluster.blocks().await?);
        drop(stream);
        println!("left: blocks back after {:?}: {}", cluster.idle(BACK).await?, cluster.blocks().await?);
    }
    works(&cluster).await?;
    Ok(())
}

/// Moments between the first byte of a request and the middle of its answer: the queue, the reservation, the prompt's
/// steps, the transfer, the hand-over, decoding. Every second client uses HTTP.
#[tokio::test]
async fn clients_that_leave_at_any_moment_free_their_blocks() -> anyhow::Result<()> {
    const CLIENTS: u64 = 48;
    const LAST_MOMENT_MS: u64 = 1500;
    let cluster = Cluster::start(Options { router_args: words("--max-inflight 3"), ..Options::default() }).await?;
    let prompt: Vec<u32> = (0..592).map(|index| 100 + index % 7919).collect();
    let body =
        serde_json::json!({ "prompt": prompt, "max_tokens": 200, "stream": true, "ignore_eos": true }).to_string();
    let leave = async |client: u64| {
        let moment = Duration::from_millis(client * LAST_MOMENT_MS / CLIENTS);
        if client.is_multiple_of(2) {
            let mut request = ask(token_ids(prompt.clone()), 200);
            request.ignore_eos = true;
            let _ = timeout(moment, cluster.answer(request)).await;
        } else {
            let reading = async { cluster.post("/v1/completions", body.clone().into_bytes()).await?.bytes().await };
            let _ = timeout(moment, reading).await;
        }
    };
    futures::future::join_all((0..CLIENTS).map(leave)).await;
    println!("{CLIENTS} left: blocks back after {:?}: {}", cluster.idle(LONG).await?, cluster.blocks().await?);
    works(&cluster).await?;
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn a_deadline_ends_both_legs() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options::default()).await?;
    let url = cluster.router.url("grpc");
    let mut client = v1::inference_client::InferenceClient::connect(url).await?;
    // A fast machine has 600 tokens within the second.
    let mut request = tonic::Request::new(v1::GenerateRequest { max_tokens: Some(6000), ..long_answer() });
    request.set_timeout(Duration::from_secs(1));
    let asked = Instant::now();
    let failure = match client.generate(request).await {
        Ok(stream) => rest(stream.into_inner()).await.expect_err("6,000 tokens take longer than a second").status,
        Err(status) => status,
    };
    assert!(matches!(failure.code(), Code::DeadlineExceeded | Code::Cancelled), "{failure}");
    assert!(asked.elapsed() < TOLD, "{:?}", asked.elapsed());
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn nodes_drain_on_sigterm() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Options::default()).await?;
    let mut request = long_answer();
    request.max_tokens = Some(32);
    let mut stream = cluster.open(request).await?;
    stream.message().await?;
    stream.message().await?;
    cluster.decode.terminate();
    // The running answer is finished first.
    let answer = timeout(LONG, rest(stream)).await??;
    assert_eq!(answer.finish.completion_tokens, 32);
    let status = cluster.decode.ended(LONG).await?;
    assert!(status.success(), "{status}");
    cluster.prefill.terminate();
    assert!(cluster.prefill.ended(LONG).await?.success());
    cluster.router.terminate();
    assert!(cluster.router.ended(LONG).await?.success());
    Ok(())
}

/// A prompt that nobody waits for any more holds the next one up no longer than the chunk at hand.
#[tokio::test]
async fn a_prompt_whose_client_left_delays_the_next_by_one_chunk_at_most() -> anyhow::Result<()> {
    const CHUNK: Duration = Duration::from_millis(256);
    const CHUNKS_LEFT: u32 = 22;
    const MOST: u32 = 5;
    // 256 tokens of a millisecond: simulated, so that the times are the same on busy cores.
    let prefill_args = words("--simulated-token-us 1000 --max-num-batched-tokens 256");
    let node_args = words("--kv-blocks 1024");
    let cluster = Cluster::start(Options { simulated: true, node_args, prefill_args, ..Options::default() }).await?;
    let prompt =
        |tokens: u32, salt: u32| token_ids((0..tokens).map(|index| 100 + salt + index % 7919).collect::<Vec<_>>());
    let ttft =
        |answer: Answer| Duration::from_secs_f64(answer.finish.timings.map_or(0.0, |timings| timings.ttft_ms) / 1e3);
    let alone = ttft(cluster.answer(ask(prompt(16, 1), 2)).await?);
    {
        let left = cluster.answer(ask(prompt(6000, 2), 2));
        tokio::select! {
            early = left => panic!("the prompt was too short for this test: {early:?}"),
            busy = cluster.busy("prefill", LONG) => { busy?; }
        }
    }
    let next = ttft(cluster.answer(ask(prompt(16, 3), 2)).await?);
    let delay = next.saturating_sub(alone);
    println!(
        "TTFT alone {alone:.1?}, after a client left its 6000 tokens {next:.1?}: {delay:.1?} more, a chunk takes {CHUNK:.1?}"
    );
    // What is more than the chunk at hand is the machine's.
    assert!(delay < CHUNK * MOST, "{delay:?}, and {CHUNKS_LEFT} chunks were left");
    Ok(())
}
