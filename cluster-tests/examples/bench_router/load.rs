//! Requests at a rate, and streams at once.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::try_join_all;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tandem_cluster_tests::open_loop::{percentile, until_next};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::sleep;

use crate::way::{Way, named, prompt};

/// Tokens of a request whose latency counts.
const SHORT: u32 = 8;
/// Tokens of a stream.
const LONG: u32 = 400;
/// Streams get under way before they count.
const WARM_UP: Duration = Duration::from_millis(500);

/// Linux counts in these towards programs, whatever its own clock does (proc(5), USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

/// One turn of single requests.
pub struct Latencies {
    /// Milliseconds to the first token, sorted.
    first_token_ms: Vec<f64>,
    /// Processor time of the router for a request, in microseconds.
    pub processor_us: Option<f64>,
}

impl Latencies {
    /// The time to the first token that a share of the requests stays below.
    pub fn percentile(&self, share: f64) -> f64 {
        percentile(&self.first_token_ms, share)
    }
}

/// What came through in one turn.
pub struct Streamed {
    /// All streams together.
    pub tokens_per_second: f64,
    /// By processor time of the router.
    pub tokens_per_cpu_second: f64,
}

/// Requests at random moments, each of which counts from when it was to be sent.
pub async fn open_loop(
    way: &Way,
    rate: f64,
    seconds: f64,
    seed: u64,
    router: Option<u32>,
) -> anyhow::Result<Latencies> {
    let cpu = || router.map(cpu_seconds).transpose();
    let before = cpu()?;
    let mut moments = moments(rate, seconds, seed)?;
    let (mut running, mut number) = (Vec::new(), seed << 32);
    while let Some(intended) = moments.recv().await {
        number += 1;
        let way = way.clone();
        running.push(tokio::spawn(async move {
            let mut first = None;
            let asked = way.ask(prompt(number), SHORT, || {
                first.get_or_insert_with(|| intended.elapsed());
            });
            named(asked.await, &way)?;
            first.context("no token")
        }));
    }
    let mut latencies = Vec::new();
    for request in running {
        latencies.push(request.await??.as_secs_f64() * 1e3);
    }
    latencies.sort_by(f64::total_cmp);
    let spent = before.zip(cpu()?).map(|(before, after)| after - before);
    let processor_us = spent.map(|seconds| seconds * 1e6 / latencies.len().max(1) as f64);
    Ok(Latencies { first_token_ms: latencies, processor_us })
}

/// Each moment of a Poisson process, when it has come: a thread waits for it, because tokio's timers are up to a
/// millisecond late, which is more than what is measured here. The channel has room for all.
fn moments(rate: f64, seconds: f64, seed: u64) -> anyhow::Result<UnboundedReceiver<Instant>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (tell, told) = unbounded_channel();
    let wait = move || {
        let (start, mut at) = (Instant::now(), 0.0);
        loop {
            at += until_next(&mut rng, rate);
            if at > seconds {
                break;
            }
            let intended = start + Duration::from_secs_f64(at);
            while let Some(left) = intended.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                std::thread::park_timeout(left);
            }
            // Nobody listens any more when a request failed.
            if tell.send(intended).is_err() {
                break;
            }
        }
    };
    std::thread::Builder::new().name("moments".to_owned()).spawn(wait).context("no thread to keep time")?;
    Ok(told)
}

/// So many streams, one after another each, and the processor time of `router` meanwhile.
pub async fn streams(way: &Way, streams: usize, seconds: f64, router: u32) -> anyhow::Result<Streamed> {
    let (tokens, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let all = (0..streams).map(|stream| {
        let (way, tokens, over) = (way.clone(), Arc::clone(&tokens), Arc::clone(&over));
        tokio::spawn(async move {
            let mut number = (stream as u64) << 40;
            while !over.load(Ordering::Relaxed) {
                number += 1;
                let asked = way.ask(prompt(number), LONG, || {
                    tokens.fetch_add(1, Ordering::Relaxed);
                });
                named(asked.await, &way)?;
            }
            anyhow::Ok(())
        })
    });
    let all: Vec<_> = all.collect();
    sleep(WARM_UP).await;
    let look = || anyhow::Ok((Instant::now(), tokens.load(Ordering::Relaxed), cpu_seconds(router)?));
    let (start, tokens_before, cpu_before) = look()?;
    sleep(Duration::from_secs_f64(seconds)).await;
    let (end, tokens_after, cpu_after) = look()?;
    over.store(true, Ordering::Relaxed);
    for stream in try_join_all(all).await? {
        stream?;
    }
    let tokens = (tokens_after - tokens_before) as f64;
    Ok(Streamed {
        tokens_per_second: tokens / (end - start).as_secs_f64(),
        tokens_per_cpu_second: tokens / (cpu_after - cpu_before),
    })
}

/// User and system time of all threads of a process.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in brackets, may hold anything: what follows it is counted.
    let after_name = stat.rsplit_once(')').context("no name in stat")?.1;
    let mut fields = after_name.split_whitespace().skip(11);
    let mut next = || anyhow::Ok(fields.next().context("too few fields in stat")?.parse::<f64>()?);
    Ok((next()? + next()?) / TICKS_PER_SECOND)
}
