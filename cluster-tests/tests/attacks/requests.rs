//! What one can ask for with a good key: too much, too deep, too long, or what is not there.
use std::time::{Duration, Instant};

use anyhow::ensure;
use futures::FutureExt;
use serde_json::{Value, json};

use crate::Attack;
use crate::target::{CROWD, Seen, Target, VICTIM, refusal};

const INVALID: Seen = Seen::Router("outcome=\"invalid_argument\"");
/// What the polite client's own request may hold of a node at most.
const POLITE_BLOCKS: u64 = 16;
const COMPLETIONS: &str = "/v1/completions";

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, run| Attack { name, door: "client HTTP", seen: INVALID, run };
    vec![
        attack("deep JSON", |target| deep_json(target).boxed_local()),
        attack("invalid UTF-8", |target| invalid_utf8(target).boxed_local()),
        attack("n x prompts, best_of", |target| many_answers(target).boxed_local()),
        attack("max_tokens, min_tokens without end", |target| endless(target).boxed_local()),
        attack("10,000 stop strings, and long ones", |target| stops(target).boxed_local()),
        attack("logit_bias flood", |target| biases(target).boxed_local()),
        attack("token ids out of the vocabulary", |target| ids(target).boxed_local()),
        attack("regex and schema bombs", |target| bombs(target).boxed_local()),
        attack("100,000 fields", |target| fields(target).boxed_local()),
        attack("a body of 100 MB", |target| oversize(target).boxed_local()),
        attack("bodies of 8 MB at once", |target| large(target).boxed_local()),
        attack("gzip and zstd bombs in bodies", |target| packed(target).boxed_local()),
        attack("tokenize flood", |target| tokenize(target).boxed_local()),
        attack("detokenize flood", |target| detokenize(target).boxed_local()),
        Attack {
            seen: Seen::Router("reason=\"concurrency\""),
            ..attack("cancelled requests", |t| cancelled(t).boxed_local())
        },
        Attack {
            seen: Seen::Router("=\"deadline"),
            ..attack("deadlines of 1 ms", |target| deadlines(target).boxed_local())
        },
    ]
}

/// Each of these bodies is refused with a 400; says how the last one was.
async fn all_refused(target: &Target, bodies: impl IntoIterator<Item = Value>) -> anyhow::Result<String> {
    let mut told = String::new();
    for body in bodies {
        told = target.refused(VICTIM, COMPLETIONS, body, 400).await?;
    }
    Ok(told)
}

async fn deep_json(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    for open in ["[", "{\"a\":", "{\"prompt\":[", "{\"messages\":[{\"content\":["] {
        let (status, body) = target.post(VICTIM, COMPLETIONS, open.repeat(100_000)).await?;
        told = refusal(status, &body, 400)?;
    }
    Ok(told)
}

async fn invalid_utf8(target: &Target) -> anyhow::Result<String> {
    let mut told = String::new();
    for body in [&b"{\"prompt\":\"\xff\xfe\"}"[..], b"{\"prompt\":\"\xed\xa0\x80\"}", b"\"\\ud800\"", b"\xc0\xaf"] {
        let (status, body) = target.post(VICTIM, COMPLETIONS, body).await?;
        told = refusal(status, &body, 400)?;
    }
    Ok(told)
}

async fn many_answers(target: &Target) -> anyhow::Result<String> {
    let prompts = vec!["x"; 10_000];
    all_refused(
        target,
        [
            json!({"prompt": "x", "n": 100_000}),
            json!({"prompt": "x", "n": u64::MAX}),
            json!({"prompt": "x", "best_of": 1000}),
            json!({"prompt": prompts}),
            json!({"prompt": vec!["x"; 60], "n": 128}),
        ],
    )
    .await
}

async fn endless(target: &Target) -> anyhow::Result<String> {
    // More than the context has is as much as the context has: bounded, not refused.
    let body =
        json!({"prompt": "x", "max_tokens": u32::MAX, "stop": "a", "stop_token_ids": (0..60).collect::<Vec<_>>()});
    let (status, _) = target.post(VICTIM, COMPLETIONS, body.to_string()).await?;
    ensure!(status == 200 || status == 400, "max_tokens of 2^32: {status}");
    all_refused(
        target,
        [
            json!({"prompt": "x", "max_tokens": 1e30}),
            json!({"prompt": "x", "max_tokens": -1}),
            json!({"prompt": "x", "max_tokens": u64::MAX}),
            json!({"prompt": "x", "max_tokens": 4, "min_tokens": u32::MAX}),
        ],
    )
    .await
}

async fn stops(target: &Target) -> anyhow::Result<String> {
    let many: Vec<String> = (0..10_000).map(|number| number.to_string()).collect();
    let ids: Vec<u32> = (0..40_000).collect();
    all_refused(
        target,
        [
            json!({"prompt": "x", "stop": many}),
            json!({"prompt": "x", "stop": "a".repeat(100_000)}),
            json!({"prompt": "x", "stop_token_ids": ids}),
        ],
    )
    .await
}

async fn biases(target: &Target) -> anyhow::Result<String> {
    let biases = |count: u32| (0..count).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    all_refused(
        target,
        [
            json!({"prompt": "x", "logit_bias": biases(40_000)}),
            json!({"prompt": "x", "logit_bias": {"5": 1e300}}),
            json!({"prompt": "x", "logit_bias": {"-1": 1, "4294967296": 1}}),
        ],
    )
    .await
}

async fn ids(target: &Target) -> anyhow::Result<String> {
    all_refused(
        target,
        [
            json!({"prompt": [49_152]}),
            json!({"prompt": [u32::MAX]}),
            json!({"prompt": [-1]}),
            json!({"prompt": [u64::MAX]}),
            json!({"prompt": vec![7; 100_000]}),
        ],
    )
    .await
}

async fn bombs(target: &Target) -> anyhow::Result<String> {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}});
    all_refused(
        target,
        [
            json!({"prompt": "x", "response_format": schema}),
            json!({"prompt": "x", "guided_regex": "(a+)+$"}),
            json!({"prompt": "x", "guided_grammar": "root ::= root root"}),
            json!({"prompt": "x", "structured_outputs": {"regex": "(a*)*b"}}),
        ],
    )
    .await
}

async fn fields(target: &Target) -> anyhow::Result<String> {
    let many: serde_json::Map<_, _> = (0..100_000).map(|number| (format!("f{number}"), json!(1))).collect();
    let same = format!("{{{}\"prompt\":\"x\"}}", "\"prompt\":\"x\",".repeat(100_000));
    let (status, body) = target.post(VICTIM, COMPLETIONS, same).await?;
    // One field, whose last value counts.
    ensure!(status == 200, "{status}: {body}");
    target.refused(VICTIM, COMPLETIONS, Value::Object(many), 400).await
}

/// The connection may also be closed before all of it was sent.
async fn oversize(target: &Target) -> anyhow::Result<String> {
    match target.post(VICTIM, COMPLETIONS, vec![b'a'; 100 << 20]).await {
        Ok((status, body)) => refusal(status, &body, 413),
        Err(_) => Ok("closed".to_owned()),
    }
}

/// All refused, whatever they would cost otherwise.
async fn large(target: &Target) -> anyhow::Result<String> {
    let body: &'static str =
        format!(r#"{{"n": 128, "max_tokens": 1, "prompt": [{}]}}"#, vec!["7"; 4_000_000].join(",")).leak();
    let ask = async |_| target.post(VICTIM, COMPLETIONS, body).await;
    let mut told = String::new();
    for outcome in futures::future::join_all((0..target.count(8, 64)).map(ask)).await {
        let (status, body) = outcome?;
        // Those that wait too long for room are told to come later.
        told = refusal(status, &body, if status == 429 { 429 } else { 400 })?;
    }
    Ok(told)
}

async fn packed(target: &Target) -> anyhow::Result<String> {
    let url = format!("{}{COMPLETIONS}", target.cluster.router.url("http"));
    let mut told = String::new();
    for encoding in ["gzip", "zstd", "br", "deflate", "gzip, gzip"] {
        let request = target.client().post(&url).bearer_auth(VICTIM).header("content-type", "application/json");
        let answer = request.header("content-encoding", encoding).body(vec![0x1f, 0x8b, 8, 0]).send().await?;
        let (status, body) = crate::target::told(answer).await?;
        told = refusal(status, &body, 415)?;
    }
    Ok(told)
}

async fn tokenize(target: &Target) -> anyhow::Result<String> {
    let body: &'static str = json!({"prompt": "lorem ipsum ".repeat(600_000)}).to_string().leak();
    let ask = async |_| target.post(VICTIM, "/tokenize", body).await;
    let mut told = String::new();
    for outcome in futures::future::join_all((0..target.count(16, 128)).map(ask)).await {
        let (status, body) = outcome?;
        told = refusal(status, &body, if status == 429 { 429 } else { 400 })?;
    }
    Ok(told)
}

async fn detokenize(target: &Target) -> anyhow::Result<String> {
    let ids = vec!["7"; 2_000_000].join(",");
    let body: &'static str = format!(r#"{{"tokens": [{ids}]}}"#).leak();
    let ask = async |_| target.post(VICTIM, "/detokenize", body).await;
    let mut told = String::new();
    for outcome in futures::future::join_all((0..target.count(16, 128)).map(ask)).await {
        let (status, body) = outcome?;
        told = refusal(status, &body, if status == 429 { 429 } else { 400 })?;
    }
    Ok(told)
}

/// Clients that leave as soon as their request is there: nothing of theirs goes on. More at a time than the key may
/// have are refused.
async fn cancelled(target: &Target) -> anyhow::Result<String> {
    let body = json!({"prompt": "x", "max_tokens": 2000, "ignore_eos": true}).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {CROWD}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let count = target.count(200, 5000);
    for _ in 0..count / 50 {
        drop(crate::sockets::hold(target.router("http")?, 50, head.as_bytes()).await?);
    }
    let left = Instant::now();
    while target.cluster.nodes().await?.iter().any(|node| node.total_blocks - node.free_blocks > POLITE_BLOCKS) {
        ensure!(left.elapsed() < Duration::from_secs(30), "{}", target.cluster.blocks().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let after = left.elapsed().as_secs_f64();
    Ok(format!("more than 8 at a time refused; all {count} left, their blocks back after {after:.1} s"))
}

/// Whether a connection was closed before its answer, in contrast to an answer that does not come.
fn is_closed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<reqwest::Error>().is_some_and(|error| error.is_request() && !error.is_timeout())
}

/// Ended as late, or refused at once where the router foresees it.
async fn deadlines(target: &Target) -> anyhow::Result<String> {
    let url = format!("{}{COMPLETIONS}", target.cluster.router.url("http"));
    let body = json!({"prompt": "x", "max_tokens": 1000, "ignore_eos": true}).to_string();
    let ask = async |_| {
        let request = target.client().post(&url).bearer_auth(VICTIM).header("content-type", "application/json");
        crate::target::told(request.header("x-request-timeout-ms", "1").body(body.clone()).send().await?).await
    };
    let outcomes = futures::future::join_all((0..target.count(50, 1000)).map(ask)).await;
    let all = outcomes.len();
    let (mut answered, mut told) = (0, String::new());
    for outcome in outcomes {
        let (status, body) = match outcome {
            // A throttled connection is idle, and was closed for another one at a full port.
            Err(error) if target.full && is_closed(&error) => continue,
            outcome => outcome?,
        };
        answered += 1;
        told = refusal(status, &body, if status == 429 { 429 } else { 504 })?;
    }
    ensure!(answered > all / 2, "{answered} of {all} were answered");
    Ok(told)
}
