//! What the largest requests cost the others and the router: `make bench-large-requests`.
//!
//! A hundred bodies of 8 MB (millions of token ids, `n` 128) come from 16 connections, and all are refused. A polite
//! client asks for a short answer all the time, before, meanwhile and after: its latencies stand beside each other, and
//! so does the router's resident memory. The nodes are simulated, with steps of 5 ms: what changes is the router's
//! doing.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::open_loop::percentile;
use tandem_cluster_tests::{Cluster, Options};

/// What the router gets for its memory to go back.
const AFTERWARDS: Duration = Duration::from_secs(10);
/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Parser)]
struct Args {
    /// Large requests
    #[arg(long, default_value_t = 100)]
    requests: usize,
    /// Connections that they come from
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Seconds of the polite client alone, before and after
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Another build's router, to compare with
    #[arg(long, default_value = "tandem-router")]
    router: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let node_args = words("--threads 1 --kv-blocks 1024 --simulated-step-us 5000");
    let router_program = args.router.clone();
    let cluster = Cluster::start(Options { simulated: true, node_args, router_program, ..Options::default() }).await?;
    println!("| while | polite answers | p50 ms | p99 ms | failed | router MB, at most |");
    println!("|---|---|---|---|---|---|");
    let seconds = Duration::from_secs(args.seconds);
    measure(&cluster, "it is alone", async { tokio::time::sleep(seconds).await }).await?;
    let idle = cluster.router.resident_mb().unwrap_or_default();
    // Made before the clock runs: both take this process a tenth of a second, for which the polite client would wait.
    let (body, clients) = (large_body(), (0..args.connections).map(|_| reqwest::Client::new()).collect());
    let began = Instant::now();
    let codes = measure(&cluster, "the large requests come", storm(&cluster, args.requests, clients, body)).await?;
    let took = began.elapsed();
    let mut back = None;
    let left = Instant::now();
    while left.elapsed() < AFTERWARDS && back.is_none() {
        tokio::time::sleep(LOOK).await;
        back = cluster.router.resident_mb().filter(|mb| *mb <= 2.0 * idle).map(|_| left.elapsed());
    }
    measure(&cluster, "it is alone again", async { tokio::time::sleep(seconds).await }).await?;
    println!("\nlarge requests: {} in {took:.1?}, by status: {codes:?}", args.requests);
    match back {
        Some(after) => println!("memory: {idle:.0} MB idle; back at twice of it after {after:.1?}"),
        None => println!("memory: {idle:.0} MB idle; not back at twice of it after {AFTERWARDS:?}"),
    }
    println!("memory at the end: {:.0} MB", cluster.router.resident_mb().unwrap_or_default());
    Ok(())
}

/// The polite client, and the router's memory, for as long as `meanwhile` takes.
async fn measure<T>(cluster: &Cluster, what: &str, meanwhile: impl Future<Output = T>) -> anyhow::Result<T> {
    let (over, failed) = (AtomicBool::new(false), AtomicUsize::new(0));
    let polite = async {
        let (client, url) = (reqwest::Client::new(), format!("{}/v1/completions", cluster.router.url("http")));
        let mut latencies = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let asked = Instant::now();
            let request = client.post(&url).header("content-type", "application/json");
            let request = request.body(r#"{"prompt": "Hello", "max_tokens": 8, "ignore_eos": true}"#);
            let whole = async { request.send().await?.error_for_status()?.bytes().await };
            match whole.await {
                Ok(_) => latencies.push(asked.elapsed().as_secs_f64() * 1e3),
                Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
            }
        }
        latencies
    };
    let memory = async {
        let mut most = 0.0_f64;
        while !over.load(Ordering::Relaxed) {
            most = most.max(cluster.router.resident_mb().unwrap_or_default());
            tokio::time::sleep(LOOK).await;
        }
        most
    };
    let meanwhile = async {
        let result = meanwhile.await;
        over.store(true, Ordering::Relaxed);
        result
    };
    let (result, mut latencies, most) = tokio::join!(meanwhile, polite, memory);
    latencies.sort_by(f64::total_cmp);
    let (p50, p99) = (percentile(&latencies, 0.5), percentile(&latencies, 0.99));
    println!("| {what} | {} | {p50:.1} | {p99:.1} | {} | {most:.0} |", latencies.len(), failed.load(Ordering::Relaxed));
    Ok(result)
}

/// Four million token ids, 8 MB. It lives as long as the program, so that no request copies it.
fn large_body() -> &'static str {
    let ids = vec!["7"; 4_000_000].join(",");
    format!(r#"{{"n": 128, "max_tokens": 1, "prompt": [{ids}]}}"#).leak()
}

/// Status codes with their counts.
async fn storm(
    cluster: &Cluster,
    requests: usize,
    clients: Vec<reqwest::Client>,
    body: &'static str,
) -> std::collections::BTreeMap<u16, usize> {
    let url = format!("{}/v1/completions", cluster.router.url("http"));
    let left = Arc::new(AtomicUsize::new(requests));
    let connections = clients.into_iter().map(|client| {
        let (url, left) = (url.clone(), Arc::clone(&left));
        tokio::spawn(async move {
            let mut codes = Vec::new();
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                let request = client.post(&url).header("content-type", "application/json").body(body);
                codes.push(request.send().await.map_or(0, |answer| answer.status().as_u16()));
            }
            codes
        })
    });
    let mut codes = std::collections::BTreeMap::new();
    for connection in connections.collect::<Vec<_>>() {
        for code in connection.await.unwrap_or_default() {
            *codes.entry(code).or_default() += 1;
        }
    }
    codes
}
