//! `/metrics` of every role: the names that dashboards read are there with their types, and requests move the numbers.
use std::collections::BTreeMap;

use tandem_cluster_tests::client::{ask, text};
use tandem_cluster_tests::{Cluster, Options};

/// Of the router and of decode nodes.
const SERVING: [(&str, &str); 23] = [
    ("vllm:num_requests_running", "gauge"),
    ("vllm:num_requests_waiting", "gauge"),
    ("vllm:kv_cache_usage_perc", "gauge"),
    ("vllm:cache_config_info", "gauge"),
    ("vllm:num_preemptions_total", "counter"),
    ("vllm:prefix_cache_queries_total", "counter"),
    ("vllm:prefix_cache_hits_total", "counter"),
    ("vllm:external_prefix_cache_queries_total", "counter"),
    ("vllm:external_prefix_cache_hits_total", "counter"),
    ("vllm:prompt_tokens_total", "counter"),
    ("vllm:generation_tokens_total", "counter"),
    ("vllm:inter_token_latency_seconds", "histogram"),
    ("vllm:request_decode_time_seconds", "histogram"),
    ("vllm:nixl_xfer_time_seconds", "histogram"),
    ("vllm:nixl_bytes_transferred", "histogram"),
    ("vllm:nixl_num_descriptors", "histogram"),
    ("vllm:nixl_num_failed_transfers_total", "counter"),
    ("vllm:request_success_total", "counter"),
    ("vllm:request_time_per_output_token_seconds", "histogram"),
    ("vllm:e2e_request_latency_seconds", "histogram"),
    ("vllm:request_queue_time_seconds", "histogram"),
    ("vllm:request_prompt_tokens", "histogram"),
    ("vllm:request_generation_tokens", "histogram"),
];
/// Of the router alone.
const REQUESTS: [(&str, &str); 4] = [
    ("vllm:time_to_first_token_seconds", "histogram"),
    ("vllm:request_prefill_time_seconds", "histogram"),
    ("vllm:request_inference_time_seconds", "histogram"),
    ("tandem_ttft_seconds", "histogram"),
];
/// What a first request moves wherever it is shown.
const MOVED: [&str; 15] = [
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_count",
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_descriptors_count",
];

struct Scrape {
    types: BTreeMap<String, String>,
    /// Sums over labels.
    values: BTreeMap<String, f64>,
}

async fn scrape(url: &str) -> anyhow::Result<Scrape> {
    let response = reqwest::get(format!("{url}/metrics")).await?.error_for_status()?;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let (mut types, mut values) = (BTreeMap::new(), BTreeMap::new());
    for line in response.text().await?.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} is declared twice");
        } else if let Some((series, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) {
            let name = series.split('{').next().unwrap_or(series).to_owned();
            *values.entry(name).or_default() += value.parse::<f64>()?;
        }
    }
    Ok(Scrape { types, values })
}

#[tokio::test]
async fn every_role_has_its_metrics_and_requests_move_them() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { simulated: false, ..Options::default() }).await?;
    let [router, decode, prefill] =
        [cluster.router.url("http"), cluster.decode.url("admin"), cluster.prefill.url("admin")];
    let (router_before, decode_before) = (scrape(&router).await?, scrape(&decode).await?);
    let prompt =
        "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".repeat(3);
    cluster.answer(ask(text(&prompt), 8)).await?;
    cluster.answer(ask(text(&prompt), 8)).await?;
    for (name, url, before, listed) in [
        ("router", &router, router_before, [&SERVING[..], &REQUESTS].concat()),
        ("decode", &decode, decode_before, SERVING.to_vec()),
    ] {
        let after = scrape(url).await?;
        for (metric, kind) in listed {
            assert_eq!(after.types.get(metric).map(String::as_str), Some(kind), "{metric} of {name}");
        }
        for metric in MOVED {
            let value = |scrape: &Scrape| scrape.values.get(metric).copied().unwrap_or(0.0);
            assert!(value(&after) > value(&before), "{metric} of {name} did not move");
        }
        assert!(after.values["vllm:prefix_cache_hits_total"] > 0.0, "{name}: the second prompt was there");
    }
    let prefill = scrape(&prefill).await?;
    for metric in ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "tandem_kv_bytes_total"] {
        assert!(prefill.values[metric] > 0.0, "{metric} of prefill");
    }
    Ok(())
}

#[tokio::test]
async fn histograms_point_to_traces() -> anyhow::Result<()> {
    let cluster = Cluster::start(Options { simulated: true, ..Options::default() }).await?;
    let answer = cluster.answer(ask(text("Hello"), 4)).await?;
    let request = reqwest::Client::new().get(format!("{}/metrics", cluster.router.url("http")));
    let response = request.header("accept", "application/openmetrics-text; version=1.0.0").send().await?;
    assert!(response.headers()["content-type"].to_str()?.starts_with("application/openmetrics-text"));
    let text = response.text().await?;
    let exemplar = format!("# {{trace_id=\"{}\"}}", answer.finish.trace_id);
    for metric in ["tandem_ttft_seconds_bucket", "vllm:time_to_first_token_seconds_bucket", "tandem_itl_seconds_bucket"]
    {
        assert!(text.lines().any(|line| line.starts_with(metric) && line.contains(&exemplar)), "{metric}");
    }
    assert!(text.ends_with("# EOF\n"));
    let request = reqwest::Client::new().get(format!("{}/metrics", cluster.decode.url("admin")));
    let text = request.header("accept", "application/openmetrics-text").send().await?.text().await?;
    assert!(text.contains("# TYPE vllm:request_success counter\n") && text.ends_with("# EOF\n"), "{text}");
    for metric in [
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:nixl_xfer_time_seconds_bucket",
    ] {
        let points = text.lines().any(|line| line.starts_with(metric) && line.contains(&exemplar));
        assert!(points, "{metric} of the decode node\n{text}");
    }
    Ok(())
}
