//! What a collector gets beside one tree of spans: traces as they are sampled, log lines with their traces, metrics.
//! And a log that nobody reads, which holds nobody.
use std::collections::BTreeSet;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, HistogramDataPoint, Metric, metric, number_data_point,
};
use reqwest::StatusCode;
use serde_json::json;
use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::program;
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1::GenerateRequest;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::time::{Instant, sleep};
use tonic::Code;

use crate::collector::{Attributes, Collector, Got, Line, Scrape, Value, attributes};

const LAZY: &str = "--ttft-objective-ms 3600000 --tpot-objective-ms 3600000";
const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

/// A cluster of simulated nodes that reports to `collector`.
async fn reporting(collector: &Collector, router_flags: &str) -> anyhow::Result<Cluster> {
    let router_args = [collector.flags(), words(router_flags)].concat();
    let mut options = Options { transport: "tcp", simulated: true, router_args, ..Options::default() };
    options.node_args.extend([collector.flags(), words("--simulated-step-us 2000")].concat());
    Cluster::start(options).await
}

/// One request over HTTP.
struct Asked<'a> {
    max_tokens: u32,
    timeout_ms: Option<u32>,
    /// `traceparent`'s last part, where the client has a trace.
    flags: Option<&'a str>,
}

const USUAL: Asked<'_> = Asked { max_tokens: 4, timeout_ms: None, flags: None };

/// Its trace, and how it ended.
async fn asked(cluster: &Cluster, request: Asked<'_>) -> anyhow::Result<(String, StatusCode)> {
    let url = format!("{}/v1/completions", cluster.router.url("http"));
    let body = json!({"prompt": "Hello", "max_tokens": request.max_tokens, "ignore_eos": true});
    let mut call = reqwest::Client::new().post(url).json(&body);
    if let Some(flags) = request.flags {
        let (trace, span) = (rand::random::<u128>() | 1, rand::random::<u64>() | 1);
        call = call.header("traceparent", format!("00-{trace:032x}-{span:016x}-{flags}"));
    }
    if let Some(ms) = request.timeout_ms {
        call = call.header("x-request-timeout-ms", ms.to_string());
    }
    let answer = call.send().await?;
    let own = answer.headers().get("traceparent").context("no traceparent")?.to_str()?.to_owned();
    let trace = own.split('-').nth(1).context("no trace id")?.to_owned();
    Ok((trace, answer.status()))
}

/// The traces whose roots came.
fn exported(got: &Got) -> BTreeSet<String> {
    let roots = got.spans.iter().filter(|span| span.attributes.contains_key("tandem.request_id"));
    roots.filter(|span| span.service == "tandem-router").map(|span| span.trace.clone()).collect()
}

/// Waits for the root of a request that is sampled for sure: the router's spans come in the order of their requests'
/// ends, so what did not come before it does not come.
async fn all_exported(cluster: &Cluster, collector: &Collector) -> anyhow::Result<BTreeSet<String>> {
    let (last, _) = asked(cluster, Asked { flags: Some("01"), ..USUAL }).await?;
    let mut came =
        collector.until("the last trace", |got| Some(exported(got)).filter(|came| came.contains(&last))).await;
    came.remove(&last);
    Ok(came)
}

#[tokio::test]
async fn the_client_or_else_the_ratio_says_what_is_sampled_and_failures_always_are() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let cluster = reporting(&collector, &format!("--trace-sample-ratio 0 {LAZY}")).await?;
    let good = |flags| Asked { flags, ..USUAL };
    let refused = |flags| Asked { max_tokens: 0, ..good(flags) };
    // The nodes take longer for so many tokens.
    let late = |flags| Asked { max_tokens: 8_000, timeout_ms: Some(300), ..good(flags) };
    let mut expected = BTreeSet::new();
    for (request, status, is_exported) in [
        (good(None), StatusCode::OK, false),
        (good(Some("00")), StatusCode::OK, false),
        (good(Some("01")), StatusCode::OK, true),
        (refused(None), StatusCode::BAD_REQUEST, false),
        (refused(Some("00")), StatusCode::BAD_REQUEST, false),
        (refused(Some("01")), StatusCode::BAD_REQUEST, true),
        (late(None), StatusCode::GATEWAY_TIMEOUT, true),
        (late(Some("00")), StatusCode::GATEWAY_TIMEOUT, true),
    ] {
        let (trace, came) = asked(&cluster, request).await?;
        assert_eq!(came, status, "{trace}");
        if is_exported {
            // One after the other: what nodes that were stopped report is awaited before a failure's trace goes out.
            collector.until("an expected trace", |got| exported(got).contains(&trace).then_some(())).await;
            expected.insert(trace);
        }
    }
    assert_eq!(all_exported(&cluster, &collector).await?, expected);
    Ok(())
}

#[tokio::test]
async fn the_trace_id_decides_within_the_ratio() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let cluster = reporting(&collector, &format!("--trace-sample-ratio 0.5 {LAZY}")).await?;
    let mut expected = BTreeSet::new();
    for _ in 0..40 {
        let (trace, status) = asked(&cluster, USUAL).await?;
        assert_eq!(status, StatusCode::OK);
        // The lower half of what the random part can be.
        if trace.as_bytes()[18] < b'8' {
            expected.insert(trace);
        }
    }
    assert!((1..40).contains(&expected.len()), "{expected:?}");
    assert_eq!(all_exported(&cluster, &collector).await?, expected);
    Ok(())
}

#[tokio::test]
async fn slow_requests_are_kept_whatever_the_ratio() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let slow = words("--simulated-step-us 5000");
    let mut options = Options { transport: "tcp", simulated: true, ..Options::default() };
    options.router_args = [collector.flags(), words("--trace-sample-ratio 0 --ttft-objective-ms 1")].concat();
    options.node_args.extend([collector.flags(), slow].concat());
    let cluster = Cluster::start(options).await?;
    let (trace, _) = asked(&cluster, Asked { flags: Some("00"), ..USUAL }).await?;
    let whole = |got: &Got| {
        let of_trace = got.spans.iter().filter(|span| span.trace == trace);
        let services: BTreeSet<_> = of_trace.map(|span| span.service.as_str()).collect();
        (services.len() == 3).then_some(())
    };
    collector.until("the spans of all three services", whole).await;
    Ok(())
}

#[tokio::test]
async fn log_lines_come_with_their_traces() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let router_args = [collector.flags(), words("--max-attempts 1")].concat();
    let mut options = Options { router_args, prefill_args: words("--debug-flip-byte"), ..Options::default() };
    options.node_args.extend(collector.flags());
    let cluster = Cluster::start(options).await?;
    let (trace, status) = asked(&cluster, Asked { max_tokens: 12, ..USUAL }).await?;
    assert_ne!(status, StatusCode::OK, "damaged KV was decoded");
    let line = |got: &Got, service: &str, text: &str| -> Option<Line> {
        got.lines.iter().find(|line| line.service == service && line.text == text && line.trace == trace).cloned()
    };
    let told = collector.until("the line of the request", |got| line(got, "tandem-router", "request failed")).await;
    assert_eq!(told.severity, "INFO");
    for key in ["request", "error", "phase", "prefill", "decode"] {
        assert!(
            matches!(told.attributes.get(key), Some(Value::StringValue(text)) if !text.is_empty()),
            "{key}: {told:?}"
        );
    }
    // The span that it is about: the root.
    let root = |got: &Got| got.spans.iter().find(|span| span.id == told.span && span.trace == trace).cloned();
    assert_eq!(collector.until("the root", root).await.service, "tandem-router");
    let of_node = collector.until("the line of the node", |got| line(got, "tandem-decode", "call failed")).await;
    assert!(!of_node.span.is_empty() && of_node.span != told.span, "{of_node:?}");
    let nobodys = |got: &Got| got.lines.iter().any(|line| line.service == "tandem-prefill" && line.trace.is_empty());
    collector.until("a line of no request", |got| nobodys(got).then_some(())).await;
    Ok(())
}

#[tokio::test]
async fn metrics_are_those_of_the_scrape() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let cluster = reporting(&collector, "--router-id east").await?;
    let mut traces = Vec::new();
    for _ in 0..3 {
        traces.push(asked(&cluster, USUAL).await?.0);
    }
    let answered = |got: &Got| {
        let scrape = got.metrics.get("tandem-router")?;
        (number(scrape, "tandem_requests_total", &[("outcome", "ok")]) == Some(3.0)).then(|| scrape.clone())
    };
    let router = collector.until("three answers", answered).await;
    let decoded = |got: &Got| {
        let scrape = got.metrics.get("tandem-decode")?;
        (number(scrape, "tandem_requests_total", &[("outcome", "ok")]) == Some(3.0)).then(|| scrape.clone())
    };
    let decode = collector.until("the decode node's", decoded).await;
    let prefill = collector.until("the prefill node's", |got| got.metrics.get("tandem-prefill").cloned()).await;
    for (scrape, url) in [
        (&router, cluster.router.url("http")),
        (&decode, cluster.decode.url("admin")),
        (&prefill, cluster.prefill.url("admin")),
    ] {
        assert!(scrape.resource.contains_key("service.instance.id") && scrape.resource.contains_key("service.version"));
        same_families(scrape, &reqwest::get(format!("{url}/metrics")).await?.text().await?)?;
    }
    let named = router.resource.get("service.instance.id");
    assert!(matches!(named, Some(Value::StringValue(name)) if name == "east"), "{named:?}");
    let ttft = distribution(&router, "tandem_ttft_seconds").context("no TTFT")?;
    assert_eq!((ttft.count, ttft.bucket_counts.iter().sum::<u64>()), (3, 3));
    assert_eq!(ttft.bucket_counts.len(), ttft.explicit_bounds.len() + 1);
    assert!(ttft.sum.is_some_and(|sum| sum > 0.0) && ttft.start_time_unix_nano < ttft.time_unix_nano);
    assert!(!ttft.exemplars.is_empty(), "{ttft:?}");
    for exemplar in &ttft.exemplars {
        let trace: String = exemplar.trace_id.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(traces.contains(&trace), "{trace} is none of {traces:?}");
    }
    assert_eq!(router.metrics["tandem_ttft_seconds"].unit, "s");
    let times = |got: &Got| got.metrics["tandem-router"].times;
    let before = collector.so_far(times);
    collector.until("another export", |got| (times(got) > before).then_some(())).await;
    Ok(())
}

/// The last figures of a process that ends are sent, however long the interval is.
#[tokio::test]
async fn a_process_sends_its_metrics_when_it_ends() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let flags = collector.flags_with_metrics_every(3_600_000);
    let options = Options { transport: "tcp", simulated: true, router_args: flags, ..Options::default() };
    let mut cluster = Cluster::start(options).await?;
    asked(&cluster, USUAL).await?;
    cluster.router.terminate();
    ensure!(cluster.router.ended(Duration::from_secs(20)).await?.success(), "{}", cluster.router.log());
    let last = collector.so_far(|got| got.metrics["tandem-router"].clone());
    assert_eq!(last.times, 1, "the only export");
    assert_eq!(number(&last, "tandem_requests_total", &[("outcome", "ok")]), Some(1.0));
    Ok(())
}

/// Whatever the text has, the export has, as the same kind.
fn same_families(scrape: &Scrape, text: &str) -> anyhow::Result<()> {
    let mut families = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').context("a type without a kind")?;
        // A family without series has nothing to send.
        if !text.lines().any(|line| line.starts_with(name)) {
            continue;
        }
        let metric = scrape.metrics.get(name).with_context(|| format!("{name} is not exported"))?;
        let fits = match (kind, &metric.data) {
            ("counter", Some(metric::Data::Sum(sum))) => {
                sum.is_monotonic && sum.aggregation_temporality == CUMULATIVE && !sum.data_points.is_empty()
            }
            ("gauge", Some(metric::Data::Gauge(gauge))) => !gauge.data_points.is_empty(),
            ("histogram", Some(metric::Data::Histogram(histogram))) => histogram.aggregation_temporality == CUMULATIVE,
            _ => false,
        };
        ensure!(fits && !metric.description.is_empty(), "{name}, a {kind}: {metric:?}");
        families += 1;
    }
    ensure!(families > 20 && families == scrape.metrics.len(), "{families} of {:?}", scrape.metrics.keys());
    Ok(())
}

fn has(labels: &Attributes, wanted: &[(&str, &str)]) -> bool {
    wanted.iter().all(|(key, value)| labels.get(*key) == Some(&Value::StringValue((*value).to_owned())))
}

/// The value of the one series of a counter or gauge that has these labels.
fn number(scrape: &Scrape, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let points = match &scrape.metrics.get(name)?.data {
        Some(metric::Data::Sum(sum)) => &sum.data_points,
        Some(metric::Data::Gauge(gauge)) => &gauge.data_points,
        _ => return None,
    };
    let point = points.iter().find(|point| has(&attributes(point.attributes.clone()), labels))?;
    match point.value {
        Some(number_data_point::Value::AsDouble(value)) => Some(value),
        _ => None,
    }
}

fn distribution<'a>(scrape: &'a Scrape, name: &str) -> Option<&'a HistogramDataPoint> {
    match scrape.metrics.get(name) {
        Some(Metric { data: Some(metric::Data::Histogram(histogram)), .. }) => histogram.data_points.first(),
        _ => None,
    }
}

/// A router whose standard error is a pipe that is not read, and says so much that the pipe is full soon.
struct Talkative {
    process: Child,
    http: String,
    grpc: String,
}

impl Drop for Talkative {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Talkative {
    fn start() -> anyhow::Result<Self> {
        let mut process = Command::new(program("tandem-router")?)
            .args(words("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --threads 1 --model"))
            .arg(model()?)
            .env("RUST_LOG", "trace")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (mut stdout, mut line) = (process.stdout.take().context("piped")?, Vec::new());
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            ensure!(stdout.read(&mut byte)? == 1, "it ended: {}", String::from_utf8_lossy(&line));
            line.extend(byte);
        }
        let line = String::from_utf8(line)?;
        let url =
            |key: &str| line.split_whitespace().find_map(|word| Some(format!("http://{}", word.strip_prefix(key)?)));
        let (http, grpc) = (url("http=").context("no http=")?, url("grpc=").context("no grpc=")?);
        Ok(Self { process, http, grpc })
    }

    /// Lines that it could not write. It answers at once whatever becomes of them.
    async fn lost(&self) -> anyhow::Result<f64> {
        let answer = async { reqwest::get(format!("{}/metrics", self.http)).await?.text().await };
        let text = tokio::time::timeout(Duration::from_secs(5), answer).await.context("no answer: it is held up")??;
        let line =
            text.lines().find(|line| line.starts_with("tandem_log_lines_lost_total")).context("no such series")?;
        Ok(line.rsplit_once(' ').context("no value")?.1.parse()?)
    }

    /// Makes it say more than there is room for: HTTP/2 tells each frame of a call.
    async fn until_lost(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut client = InferenceClient::connect(self.grpc.clone()).await?;
        while self.lost().await? == 0.0 {
            for _ in 0..50 {
                let refused =
                    client.generate(GenerateRequest::default()).await.err().context("a request of nothing")?;
                assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            }
            ensure!(Instant::now() < deadline, "everything is written: is RUST_LOG heeded?");
        }
        Ok(())
    }

    async fn terminated(&mut self) -> anyhow::Result<()> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.process.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.process.try_wait()? {
                ensure!(status.success(), "{status}");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it does not end");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn a_log_that_nobody_reads_holds_nobody_not_even_at_the_end() -> anyhow::Result<()> {
    let mut router = Talkative::start()?;
    router.until_lost().await?;
    for _ in 0..50 {
        router.lost().await?;
    }
    router.terminated().await
}

#[tokio::test]
async fn a_reader_that_is_back_learns_what_it_missed_and_gets_the_last_lines() -> anyhow::Result<()> {
    let mut router = Talkative::start()?;
    router.until_lost().await?;
    let (mut stderr, read) = (router.process.stderr.take().context("piped")?, Arc::new(Mutex::new(Vec::new())));
    let into = Arc::clone(&read);
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 1 << 16];
        while let Ok(count @ 1..) = stderr.read(&mut bytes) {
            into.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&bytes[..count]);
        }
    });
    let has = |text: &str| String::from_utf8_lossy(&read.lock().unwrap_or_else(PoisonError::into_inner)).contains(text);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !has("lines of the log were lost") {
        ensure!(Instant::now() < deadline, "nothing is said of the lost lines");
        sleep(Duration::from_millis(20)).await;
    }
    router.terminated().await?;
    let _ = reader.join();
    assert!(has("draining"), "the last lines are written");
    Ok(())
}
