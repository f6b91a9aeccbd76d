//! Whose request it is: keys, other clients' names, requests and traces, and web pages that a browser has open.
use anyhow::{Context, ensure};
use futures::FutureExt;
use serde_json::{Value, json};
use tandem_cluster_tests::open_loop::percentile;
use tokio::time::Instant;

use crate::Attack;
use crate::target::{FLOODER, POLITE, Seen, Target, VICTIM, refusal, told};

const UNKNOWN: Seen = Seen::Router("outcome=\"unauthenticated\"");
const INVALID: Seen = Seen::Router("outcome=\"invalid_argument\"");
const NOT_FOUND: Seen = Seen::Router("outcome=\"not_found\"");
const HELLO: &str = r#"{"prompt": "Hello", "max_tokens": 2}"#;

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, seen, run| Attack { name, door: "client HTTP", seen, run };
    vec![
        attack("no key", UNKNOWN, |target| no_key(target).boxed_local()),
        attack("wrong keys, a flood", UNKNOWN, |target| wrong_keys(target).boxed_local()),
        attack("another tenant by header", Seen::Router("tandem_tenant_tokens_total{role=\"router\""), |target| {
            tenant_header(target).boxed_local()
        }),
        Attack {
            door: "client HTTP, no keys",
            ..attack("tenants made up by header", Seen::Open("outcome=\"invalid_argument\""), |target| {
                made_up_tenants(target).boxed_local()
            })
        },
        attack("priority that the key has not", INVALID, |target| priority(target).boxed_local()),
        attack("a rate used up", Seen::Router("reason=\"rate_limit\""), |target| rate(target).boxed_local()),
        attack("another client's request id", Seen::Router("outcome=\"ok\""), |target| {
            request_id(target).boxed_local()
        }),
        attack("another client's trace", NOT_FOUND, |target| traces(target).boxed_local()),
        attack("the cluster's state without a key", UNKNOWN, |target| state(target).boxed_local()),
        attack("cache probing", Seen::Router("vllm:prefix_cache_queries_total"), |target| cache(target).boxed_local()),
        attack("metric labels by names", NOT_FOUND, |target| labels(target).boxed_local()),
        attack("log injection", NOT_FOUND, |target| log_lines(target).boxed_local()),
        attack("a stranger's web page", INVALID, |target| cors(target).boxed_local()),
        attack("DNS rebinding", UNKNOWN, |target| rebinding(target).boxed_local()),
        Attack {
            door: "client HTTP, admin",
            ..attack("path traversal", NOT_FOUND, |target| traversal(target).boxed_local())
        },
    ]
}

async fn no_key(target: &Target) -> anyhow::Result<String> {
    let url = target.cluster.router.url("http");
    let mut how = String::new();
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        let request = target.client().post(format!("{url}{path}")).header("content-type", "application/json");
        let (status, body) = told(request.body(HELLO).send().await?).await?;
        how = refusal(status, &body, 401)?;
    }
    for path in ["/v1/models", "/api/traces/last", "/api/services", "/page/events"] {
        let (status, _) = told(target.client().get(format!("{url}{path}")).send().await?).await?;
        // The page is on the operators' port alone.
        ensure!(status == 401 || path == "/page/events" && status == 404, "{path}: {status}");
    }
    Ok(how)
}

/// Compared with all keys, over all bytes, as digests: how long a refusal takes says nothing of them.
async fn wrong_keys(target: &Target) -> anyhow::Result<String> {
    let count = target.count(300, 10_000);
    let mut how = String::new();
    for number in 0..count {
        let key = format!("{}{number}", &VICTIM[..VICTIM.len() - 4]);
        let (status, body) = target.post(&key, "/v1/completions", HELLO).await?;
        how = refusal(status, &body, 401)?;
    }
    Ok(format!("{count} times {how}"))
}

/// A header says nothing where keys do.
async fn tenant_header(target: &Target) -> anyhow::Result<String> {
    let of = |tenant: &'static str| async move {
        let url = format!("{}/metrics", target.cluster.router.url("admin"));
        let text = target.metrics(&url).await?;
        let lines = text.lines().filter(|line| line.starts_with("tandem_tenant_tokens_total"));
        let lines = lines.filter(|line| line.contains(&format!("tenant=\"{tenant}\"")));
        anyhow::Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>())
    };
    let (victim, flooder) = (of("victim").await?, of("flooder").await?);
    let url = format!("{}/v1/completions", target.cluster.router.url("http"));
    let request = target.client().post(url).bearer_auth(FLOODER).header("content-type", "application/json");
    let (status, body) = told(request.header("x-tandem-tenant", "victim").body(HELLO).send().await?).await?;
    ensure!(status == 200, "{status}: {body}");
    ensure!(of("victim").await? == victim, "the victim pays");
    ensure!(of("flooder").await? > flooder, "the flooder does not pay");
    Ok("ignored: the key's tenant pays".to_owned())
}

/// Names that are none are refused; those that are make no series of their own.
async fn made_up_tenants(target: &Target) -> anyhow::Result<String> {
    let url = target.open.url("http");
    let lines = async || anyhow::Ok(target.metrics(&format!("{url}/metrics")).await?.lines().count());
    let ask = async |tenant: String| {
        let request = target.client().post(format!("{url}/v1/completions")).header("content-type", "application/json");
        told(request.header("x-tandem-tenant", tenant).body(HELLO).send().await?).await
    };
    let (status, body) = ask("a b".to_owned()).await?;
    let how = refusal(status, &body, 400)?;
    let before = lines().await?;
    for number in 0..target.count(300, 5000) {
        ask(format!("made-up-{number}")).await?;
    }
    ensure!(lines().await? <= before + 8, "{before} lines of metrics became {}", lines().await?);
    Ok(how)
}

async fn priority(target: &Target) -> anyhow::Result<String> {
    let body = json!({"prompt": "Hello", "max_tokens": 2, "priority": -10});
    target.refused(FLOODER, "/v1/completions", body, 400).await
}

async fn rate(target: &Target) -> anyhow::Result<String> {
    for _ in 0..2000 {
        let (status, body) = target.post(FLOODER, "/tokenize", r#"{"prompt": "x"}"#).await?;
        if status == 429 {
            return refusal(status, &body, 429);
        }
    }
    anyhow::bail!("2,000 requests at 600 a minute")
}

/// Ids are labels: two requests with the same one are two requests.
async fn request_id(target: &Target) -> anyhow::Result<String> {
    let url = format!("{}/v1/completions", target.cluster.router.url("http"));
    let ask = async |key: &'static str| {
        let request = target.client().post(&url).bearer_auth(key).header("content-type", "application/json");
        let body = json!({"prompt": key, "max_tokens": 16, "ignore_eos": true}).to_string();
        told(request.header("x-request-id", "the-same").body(body).send().await?).await
    };
    let (one, other) = tokio::join!(ask(VICTIM), ask(crate::target::POLITE));
    let ((one, told_one), (other, told_other)) = (one?, other?);
    ensure!((one, other) == (200, 200), "{told_one} {told_other}");
    let text = |told: &str| serde_json::from_str::<Value>(told).ok()?["choices"][0]["text"].as_str().map(str::to_owned);
    ensure!(text(&told_one).is_some() && text(&told_one) != text(&told_other), "each has its own answer");
    Ok("means nothing: each has its own answer".to_owned())
}

/// The victim sees its trace, and so do operators. Another client does not, by its id, among the newest or in a search;
/// nor by a request of its own under the same trace id.
async fn traces(target: &Target) -> anyhow::Result<String> {
    let (url, admin) = (target.cluster.router.url("http"), target.cluster.router.url("admin"));
    let request = target.client().post(format!("{url}/v1/completions")).bearer_auth(VICTIM);
    let answer = request.header("content-type", "application/json").body(HELLO).send().await?;
    let parent = answer.headers().get("traceparent").context("no traceparent")?.to_str()?.to_owned();
    answer.text().await?;
    let id = parent.split('-').nth(1).context("a trace id")?.to_owned();
    let look = async |key: &'static str, path: String| {
        told(target.client().get(format!("{url}{path}")).bearer_auth(key).send().await?).await
    };
    ensure!(look(VICTIM, format!("/api/traces/{id}")).await?.0 == 200, "its own");
    ensure!(target.client().get(format!("{admin}/api/traces/{id}")).send().await?.status() == 200, "the operator's");
    let mut how = String::new();
    for path in [format!("/api/traces/{id}"), format!("/api/v3/traces/{id}")] {
        let (status, body) = look(FLOODER, path).await?;
        how = refusal(status, &body, 404)?;
    }
    for path in ["/api/traces/last", "/api/traces?limit=100", "/api/v3/traces", "/api/v3/trace-summaries"] {
        let (_, body) = look(FLOODER, path.to_owned()).await?;
        ensure!(!body.contains(&id), "{path} shows the victim's trace");
    }
    let request = target.client().post(format!("{url}/tokenize")).bearer_auth(FLOODER).header("traceparent", parent);
    request.header("content-type", "application/json").body("{}").send().await?;
    ensure!(look(FLOODER, format!("/api/traces/{id}")).await?.0 == 404, "by a request under the same id");
    Ok(how)
}

async fn state(target: &Target) -> anyhow::Result<String> {
    let url = target.cluster.router.url("http");
    let metrics = target.client().get(format!("{url}/metrics")).send().await?;
    ensure!(metrics.status() == 404, "/metrics on the clients' port: {}", metrics.status());
    let (status, body) = told(target.client().get(format!("{url}/debug/cluster")).send().await?).await?;
    refusal(status, &body, 401)
}

/// What a client can tell of another's prompts by how much of its own was cached, and by its clock: beside the time for
/// the other's prompt stand those for a new one and for one of its own. The clock is printed; the full form, which
/// looks often enough, fails when it tells.
async fn cache(target: &Target) -> anyhow::Result<String> {
    let asked = async |key: &'static str, prompt: &[u32]| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "ignore_eos": true}).to_string();
        let start = Instant::now();
        let (status, body) = target.post(key, "/v1/completions", body).await?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        ensure!(status == 200, "{status}: {body}");
        let body: Value = serde_json::from_str(&body)?;
        Ok((body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default(), ms))
    };
    let mut times = [(); 3].map(|()| Vec::new());
    for _ in 0..target.count(5, 100) {
        let [theirs, own] = [(); 2].map(|()| prompt());
        ensure!(asked(VICTIM, &theirs).await?.0 == 0, "a new prompt");
        let (new, probed) = (asked(POLITE, &own).await?, asked(POLITE, &theirs).await?);
        ensure!(new.0 == 0, "a new prompt");
        ensure!(probed.0 == 0, "{} of {PROBED} tokens found in the cache of another tenant", probed.0);
        let again = asked(VICTIM, &theirs).await?;
        ensure!(again.0 > 0, "nothing is cached at all");
        times.iter_mut().zip([probed.1, new.1, again.1]).for_each(|(times, ms)| times.push(ms));
    }
    let [probed, new, again] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        percentile(&times, 0.5)
    });
    ensure!(!target.full || probed > (new + again) / 2.0, "another's prompt takes {probed:.1} ms, a new one {new:.1}");
    Ok(format!("nothing found: {probed:.1} ms for another's prompt, {new:.1} for a new one, {again:.1} for one's own"))
}

/// Tokens of a prompt that is asked for by two tenants.
const PROBED: u32 = 1024;

fn prompt() -> Vec<u32> {
    (0..PROBED).map(|at| 3000 + at * 7 + rand::random::<u32>() % 7).collect()
}

async fn labels(target: &Target) -> anyhow::Result<String> {
    let admin = format!("{}/metrics", target.cluster.router.url("admin"));
    let before = target.metrics(&admin).await?.lines().count();
    let mut how = String::new();
    for number in 0..target.count(300, 5000) {
        let body = json!({"model": format!("model-{number}"), "prompt": "x", "user": format!("user-{number}")});
        how = target.refused(VICTIM, "/v1/completions", body, 404).await?;
    }
    let after = target.metrics(&admin).await?.lines().count();
    ensure!(after <= before + 16, "{before} lines of metrics became {after}");
    Ok(how)
}

/// Line ends and escape sequences, wherever text of a client may come into a line; `Target::is_sound` reads the log.
async fn log_lines(target: &Target) -> anyhow::Result<String> {
    const TEXT: &str = "\r\nINJECTED line\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}31m";
    let bodies = [json!({"model": TEXT, "prompt": "x"}), json!({"model": format!("x{TEXT}"), "prompt": [1]})];
    target.refused(VICTIM, "/v1/completions", json!({"prompt": "x", "n": 0, "user": TEXT}), 400).await?;
    target
        .refused(VICTIM, "/v1/chat/completions", json!({"messages": [{"role": TEXT, "content": TEXT}]}), 400)
        .await
        .ok();
    let mut how = String::new();
    for body in bodies {
        how = target.refused(VICTIM, "/v1/completions", body, 404).await?;
    }
    // Header values may have bytes above 127, and none of the controls.
    let url = format!("{}/v1/completions", target.cluster.router.url("http"));
    let id = http::HeaderValue::from_bytes(b"\x9b31m\xff")?;
    let request = target.client().post(url).bearer_auth(VICTIM).header("x-request-id", id).body(HELLO);
    let answer = request.header("content-type", "application/json").send().await?;
    let given = answer.headers().get("x-request-id").context("an id")?.to_str()?.to_owned();
    ensure!(given.starts_with("req-"), "another id in its place: {given}");
    Ok(how.replace(|c: char| c.is_control(), ""))
}

/// A page may send what a form could, and reads nothing: no answer names its origin.
async fn cors(target: &Target) -> anyhow::Result<String> {
    let url = format!("{}/v1/completions", target.cluster.router.url("http"));
    let mut how = String::new();
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let request = target.client().post(&url).header("origin", "https://evil.example").bearer_auth(VICTIM);
        let answer = request.header("content-type", kind).body(HELLO).send().await?;
        ensure!(!answer.headers().contains_key("access-control-allow-origin"), "the page may read it");
        let (status, body) = told(answer).await?;
        how = refusal(status, &body, 415)?;
    }
    let asks = target.client().request(http::Method::OPTIONS, &url).header("origin", "https://evil.example");
    let answer = asks.header("access-control-request-method", "POST").send().await?;
    ensure!(!answer.headers().contains_key("access-control-allow-origin"), "the page is let in");
    Ok(format!("{how}; no CORS header"))
}

/// A page whose name comes to mean this host is of the same origin for a browser: what it lacks is a key.
async fn rebinding(target: &Target) -> anyhow::Result<String> {
    let url = target.cluster.router.url("http");
    let request = target.client().post(format!("{url}/v1/completions")).header("host", "evil.example");
    let (status, body) = told(request.header("content-type", "application/json").body(HELLO).send().await?).await?;
    refusal(status, &body, 401)?;
    let request = target.client().get(format!("{url}/api/traces/last")).header("host", "evil.example");
    let (status, body) = told(request.send().await?).await?;
    refusal(status, &body, 401)
}

async fn traversal(target: &Target) -> anyhow::Result<String> {
    let mut how = String::new();
    for door in ["http", "admin"] {
        for path in [
            "/page/../../etc/passwd",
            "/page/%2e%2e/%2e%2e/etc/passwd",
            "/page/..%2f..%2fetc%2fpasswd",
            "//etc/passwd",
            "/page/page.js%00.css",
            "/.git/config",
        ] {
            let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {VICTIM}\r\n\r\n");
            let answer = crate::sockets::say(target.router(door)?, request.as_bytes()).await?;
            ensure!(answer.statuses() == [404], "{door} {path}: {}", answer.text());
            ensure!(!answer.text().contains("root:"), "{door} {path}");
            how = "404 no such route".to_owned();
        }
    }
    Ok(how)
}
