//! More requests than a cluster can answer, for two minutes: `make bench-overload`.
//!
//! Two prefill and two decode nodes, simulated. First the rate at which most answers begin within the objective (the
//! peak), then three times that rate: how much of the peak is still answered in time in every ten seconds, how quickly
//! the rest is refused and whether it is told when to come again, what the router holds, and when a newcomer is served
//! as before. Then one tenant at a small rate, alone and beside one that asks for three times what there is. Last, two
//! tenants that ask for more than there is, of whom one sets `max_tokens` to far more than it takes: shares are charged
//! by what was generated, so that this costs it nothing.
mod load;

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use load::{ANSWER, Load, Outcome, PROMPT, Seen};
use tandem_cluster_tests::cluster::with_keys;
use tandem_cluster_tests::open_loop::percentile;
use tandem_cluster_tests::{Fleet, FleetOptions};
use tandem_proto::v1::inference_client::InferenceClient;
use tandem_router::admission::queue::ANSWER_WEIGHT;
use tokio::time::{Instant, sleep};

/// Where the throughput of an interval is looked for: shares of the first guess.
const RATES: [f64; 5] = [0.7, 0.8, 0.9, 1.0, 1.1];
/// Seconds of overload that count as one.
const WINDOW: f64 = 10.0;
/// The first seconds of a load fill queues.
const WARM_UP: f64 = 2.0;
/// After the overload, until a request is served in time again.
const RECOVERED: Duration = Duration::from_secs(60);
/// The polite tenant's share of the peak.
const POLITE: f64 = 0.1;
/// What the careless tenant asks for: about six times what it takes.
const CARELESS: u32 = 512;

const NODE: &str = "--threads 1 --kv-blocks 1024 --simulated-step-us 3000";

#[derive(Parser)]
struct Args {
    /// Of the overload
    #[arg(long, default_value_t = 120.0)]
    seconds: f64,
    /// Of each rate that the peak is looked for with, and of the tenants' part
    #[arg(long, default_value_t = 15.0)]
    short_seconds: f64,
    /// Times the peak
    #[arg(long, default_value_t = 3.0)]
    overload: f64,
    /// First guess at the peak, in requests a second
    #[arg(long, default_value_t = 100.0)]
    guess: f64,
    /// An answer that begins within this is a good one
    #[arg(long, default_value_t = 500.0)]
    ttft_ms: f64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let dir = tempfile::tempdir()?;
    let keys = with_keys(dir.path(), &["usual", "polite", "greedy", "exact", "careless"])?;
    let fleet = Fleet::start(FleetOptions {
        transport: "tcp",
        router_args: format!("--ttft-objective-ms {0} --max-ttft-ms {0} {keys}", args.ttft_ms),
        prefill_args: format!("{NODE} --simulated-token-us 125"),
        decode_args: format!("{NODE} --simulated-token-us 50"),
        ..FleetOptions::default()
    })
    .await?;
    let client = InferenceClient::connect(fleet.entrance_url()).await?;
    let load = |tenant, rate, seed| Load { client: client.clone(), tenant, rate, asks: ANSWER, seed };

    println!("| offered/s | answered in {} ms/s | answered/s | refused/s | failed | p50, p99 TTFT ms |", args.ttft_ms);
    println!("|---|---|---|---|---|---|");
    let mut peak: f64 = 0.0;
    for (seed, share) in RATES.into_iter().enumerate() {
        let rate = args.guess * share;
        let seen = load("usual", rate, seed as u64).run(args.short_seconds).await?;
        let sum = Summary::of(&seen, WARM_UP, args.short_seconds, args.ttft_ms);
        sum.print(rate);
        peak = peak.max(sum.good);
    }

    let offered = peak * args.overload;
    let resident_mb = || fleet.router.resident_mb().context("the router has ended");
    println!("\nPeak {peak:.1}/s; {offered:.0}/s for {} s:\n", args.seconds);
    let overload = tokio::spawn(load("usual", offered, 100).run(args.seconds));
    sleep(Duration::from_secs_f64(WINDOW)).await;
    let warm = resident_mb()?;
    let seen = overload.await??;
    let full = resident_mb()?;
    let served = newcomer_served(&load("usual", 1.0, 101), args.ttft_ms).await?;
    println!("The first request afterwards that began within {} ms: {served:.1?} later", args.ttft_ms);
    report_overload(&seen, peak, args.seconds, args.ttft_ms)?;
    println!("Resident memory of the router: {warm:.1} MB after {WINDOW} s, {full:.1} MB at the end");

    let rate = peak * POLITE;
    let alone = load("polite", rate, 200).run(args.short_seconds * 2.0).await?;
    let greedy = tokio::spawn(load("greedy", offered, 201).run(args.short_seconds * 2.0 + WARM_UP));
    sleep(Duration::from_secs_f64(WARM_UP)).await;
    let beside = load("polite", rate, 202).run(args.short_seconds * 2.0).await?;
    greedy.await??;
    println!("\nA tenant at {rate:.1}/s, alone and beside one at {offered:.0}/s:\n");
    for (name, seen) in [("alone", &alone), ("beside the greedy one", &beside)] {
        let sum = Summary::of(seen, 0.0, args.short_seconds * 2.0, args.ttft_ms);
        println!(
            "- {name}: {} requests, p50 {:.1} ms, p99 {:.1} ms, {:.2}/s refused",
            seen.len(),
            sum.p50,
            sum.p99,
            sum.refused
        );
    }
    let why = |one: &Seen| match &one.outcome {
        Outcome::Refused { why, .. } => Some(why.clone()),
        _ => None,
    };
    if let Some(why) = beside.iter().find_map(why) {
        println!("- the first of its refusals: {why}");
    }

    let (rate, seconds) = (offered / 2.0, args.short_seconds * 2.0 + WARM_UP);
    let careless = Load { asks: CARELESS, ..load("careless", rate, 300) };
    let (exact, careless) = tokio::try_join!(load("exact", rate, 301).run(seconds), careless.run(seconds))?;
    println!("\nTwo tenants at {rate:.0}/s each:\n");
    let share =
        |name, asks, seen: &[Seen]| printed_share(name, asks, &Summary::of(seen, WARM_UP, seconds, args.ttft_ms));
    let (exact, careless) = (share("exact", ANSWER, &exact)?, share("careless", CARELESS, &careless)?);
    println!("- the careless one had {:.2} times what the other had", careless / exact);
    Ok(())
}

/// Says what a tenant had, and returns its tokens a second as shares count them: one of an answer is worth two.
fn printed_share(name: &str, asks: u32, sum: &Summary) -> anyhow::Result<f64> {
    let Summary { answered, generated, refused, failed, .. } = sum;
    ensure!(*answered > 0.0, "{name} had no answer");
    let had = answered * PROMPT as f64 + ANSWER_WEIGHT as f64 * generated;
    println!(
        "- {name}: max_tokens {asks}, answers of {:.1} tokens, {answered:.1} a second: {had:.0} tokens a second; \
         {refused:.1} a second refused, {failed} failed",
        generated / answered
    );
    Ok(had)
}

/// What became of the requests of an interval, in requests a second.
struct Summary {
    good: f64,
    answered: f64,
    /// Tokens of answers.
    generated: f64,
    refused: f64,
    failed: usize,
    p50: f64,
    p99: f64,
}

impl Summary {
    fn of(seen: &[Seen], from: f64, to: f64, objective_ms: f64) -> Self {
        let (mut times, mut generated, mut refused, mut failed) = (Vec::new(), 0, 0, 0);
        for one in seen.iter().filter(|one| (from..to).contains(&one.at)) {
            match &one.outcome {
                Outcome::Answered { ttft_ms, tokens } => {
                    times.push(*ttft_ms);
                    generated += tokens;
                }
                Outcome::Refused { .. } => refused += 1,
                Outcome::Failed(status) => {
                    eprintln!("failed: {status}");
                    failed += 1;
                }
            }
        }
        times.sort_by(f64::total_cmp);
        let (each, good) = (to - from, times.iter().filter(|ms| **ms <= objective_ms).count());
        Self {
            good: good as f64 / each,
            answered: times.len() as f64 / each,
            generated: f64::from(generated) / each,
            refused: f64::from(refused) / each,
            failed,
            p50: percentile(&times, 0.5),
            p99: percentile(&times, 0.99),
        }
    }

    fn print(&self, offered: f64) {
        println!(
            "| {offered:.0} | {:.1} | {:.1} | {:.1} | {} | {:.0}, {:.0} |",
            self.good, self.answered, self.refused, self.failed, self.p50, self.p99
        );
    }
}

fn report_overload(seen: &[Seen], peak: f64, seconds: f64, objective_ms: f64) -> anyhow::Result<()> {
    let windows = (seconds / WINDOW) as usize;
    let sums: Vec<_> = (0..windows)
        .map(|index| Summary::of(seen, index as f64 * WINDOW, (index + 1) as f64 * WINDOW, objective_ms))
        .collect();
    let good: Vec<String> = sums.iter().map(|sum| format!("{:.0}", 100.0 * sum.good / peak)).collect();
    println!("Answered in time, in percent of the peak, each {WINDOW} s: {}", good.join(", "));
    let whole = Summary::of(seen, 0.0, seconds, objective_ms);
    println!(
        "Of all: {:.1}/s in time ({:.0} %), {:.1}/s answered, {:.1}/s refused, {} failed; TTFT p50 {:.0} ms, p99 {:.0} ms",
        whole.good,
        100.0 * whole.good / peak,
        whole.answered,
        whole.refused,
        whole.failed,
        whole.p50,
        whole.p99
    );
    let mut refusals: Vec<(f64, bool)> = Vec::new();
    for one in seen {
        if let Outcome::Refused { after_ms, retry_after, .. } = one.outcome {
            refusals.push((after_ms, retry_after));
        }
    }
    let mut times: Vec<f64> = refusals.iter().map(|(after_ms, _)| *after_ms).collect();
    times.sort_by(f64::total_cmp);
    let (p50, p99) = (percentile(&times, 0.5), percentile(&times, 0.99));
    let told = refusals.iter().filter(|(_, retry_after)| *retry_after).count();
    let worst = times.last().context("nothing was refused")?;
    println!(
        "Refusals after p50 {p50:.1} ms, p99 {p99:.1} ms, at most {worst:.1} ms; {told} of {} were told when to come again",
        refusals.len()
    );
    Ok(())
}

/// Asks until an answer begins in time, and says how long that took.
async fn newcomer_served(load: &Load, objective_ms: f64) -> anyhow::Result<Duration> {
    let start = Instant::now();
    for seed in 0.. {
        if start.elapsed() > RECOVERED {
            bail!("not recovered after {RECOVERED:?}");
        }
        let one = Load { rate: 20.0, seed: load.seed + seed, ..load.clone() };
        let seen = one.run(0.2).await?;
        let in_time = |one: &Seen| matches!(one.outcome, Outcome::Answered { ttft_ms, .. } if ttft_ms <= objective_ms);
        if seen.iter().any(in_time) {
            break;
        }
    }
    Ok(start.elapsed())
}
