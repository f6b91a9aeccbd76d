//! A cluster under load for a long time, with something killed all the while: `make soak`.
//!
//! Two prefill and two decode nodes (simulated: their tokens are a hash of the KV that they read) take requests at a
//! steady rate; every few seconds a node is killed, frozen or drained, and started again. At the end: no request lost,
//! no token wrong, every block back, and descriptors and memory of the processes as they were. Exit code 1 otherwise.
mod load;
mod plot;
mod trouble;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use load::{Load, Tally};
use plot::Samples;
use tandem_cluster_tests::reference::Reference;
use tandem_cluster_tests::{Fleet, FleetOptions};
use tokio::time::{Instant, interval, sleep};
use trouble::Trouble;

/// Requests that were under way at the end have this long.
const LAST: Duration = Duration::from_secs(60);
const BACK: Duration = Duration::from_secs(15);
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

#[derive(Parser)]
struct Args {
    /// How long
    #[arg(long, default_value_t = 1200)]
    seconds: u64,
    /// Requests a second; 8 are about 80 % of what two simulated prefill nodes take
    #[arg(long, default_value_t = 8.0)]
    rate: f64,
    /// Between one trouble and the next
    #[arg(long, default_value_t = 10)]
    trouble_every_s: u64,
    /// KV transport
    #[arg(long, default_value = "ucx", value_parser = ["ucx", "tcp"])]
    transport: String,
    /// Names the run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the plot goes
    #[arg(long, default_value = "docs/benchmarks/soak.svg")]
    plot: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut fleet = Fleet::start(FleetOptions {
        transport: if args.transport == "tcp" { "tcp" } else { "ucx" },
        router_args: "--lease-ms 1000".to_owned(),
        prefill_args: "--simulated-token-us 500 --max-num-batched-tokens 256".to_owned(),
        decode_args: "--simulated-step-us 10000".to_owned(),
        ..FleetOptions::default()
    })
    .await?;
    let load = Load::new(fleet.entrance_url(), Reference::start()?, args.rate, args.seed);
    let load = Arc::new(load);
    let mut trouble = Trouble::new(args.seed);
    let mut samples = Samples::default();
    let start = Instant::now();
    let end = start + Duration::from_secs(args.seconds);
    let requests = tokio::spawn(load.clone().run_until(end));
    let (mut looks, mut troubles) = (interval(SAMPLE_EVERY), interval(Duration::from_secs(args.trouble_every_s)));
    troubles.reset();
    loop {
        tokio::select! {
            biased;
            () = sleep(end - Instant::now().min(end)) => break,
            _ = troubles.tick() => trouble.strikes(&mut fleet).await?,
            _ = looks.tick() => samples.take(start.elapsed(), &fleet, load.tally()),
        }
    }
    fleet.restart_dead().await?;
    tokio::time::timeout(LAST, requests).await.context("requests without an end")??;
    let back = fleet.settled(BACK).await;
    samples.take(start.elapsed(), &fleet, load.tally());
    let tally = load.tally();
    println!("{tally}");
    println!("troubles: {trouble}");
    println!("{samples}");
    println!("blocks: {}", back.as_ref().map_or_else(ToString::to_string, |back| format!("all back after {back:?}")));
    std::fs::write(&args.plot, samples.svg()).with_context(|| args.plot.display().to_string())?;
    let good = back.is_ok() && matches!(tally, Tally { lost: 0, wrong: 0, .. }) && samples.are_flat();
    println!("{}", if good { "soak: passed" } else { "soak: FAILED" });
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
