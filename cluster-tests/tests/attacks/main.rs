//! Strangers at every door of a cluster, one attack after the other beside a polite client:
//! `cargo test --release -p tandem-cluster-tests --test attacks`; with `-- --full` the forms with ten thousand
//! connections, and longer ones. Each attack must be refused or bounded, and counted where an operator looks. The
//! polite client must get its tokens meanwhile; its latencies are printed, and no test of anything. The router's memory
//! is to stay within twice that of an idle one, which has served before: its recent traces are all there. A run that
//! takes more says so; one fails at two and a half times, as pages that the allocator holds vary from run to run.
//!
//! - [`target`]: what is attacked. [`polite`]: the client that is to notice nothing. [`cores`]: who computes where.
//! - [`sockets`]: bytes on sockets, HTTP/2 frame by frame.
//! - [`requests`], [`tenants`]: what one can ask for, and as whom. [`http1`], [`http2`], [`grpc`]: how one can ask.
//! - [`connections`]: sockets alone. [`membership`]: nodes that are none. [`certificates`]: such ones within TLS.
//!   [`nodes`]: the nodes' own doors.
mod certificates;
mod connections;
mod cores;
mod grpc;
mod http1;
mod http2;
mod membership;
mod nodes;
mod polite;
mod requests;
mod sockets;
mod target;
mod tenants;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use cores::Cores;
use futures::future::LocalBoxFuture;
use polite::{Latency, Polite, Watch};
use target::{COUNTED, Seen, Target};

/// Answers before the router's memory is taken for that of an idle one: more than the traces that it keeps.
const SERVED_BEFORE: usize = 1_500;
/// Times an idle router's memory: what is aimed at, and what fails.
const AIM: f64 = 2.0;
const MOST: f64 = 2.5;
/// Idle pages go back to the system within this.
const AFTERWARDS: Duration = Duration::from_secs(40);
/// What freed memory gets to go back before an idle router's is read.
const BETWEEN: Duration = Duration::from_secs(3);
/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Parser)]
struct Args {
    /// Ten thousand connections, and longer attacks
    #[arg(long)]
    full: bool,
    /// Attacks go on, each again from its start, until the polite client had so many answers beside it: a p99 of a
    /// handful is the slowest of them
    #[arg(long, default_value_t = 1)]
    answers: usize,
    /// Only attacks whose name contains this
    #[arg(default_value = "")]
    only: String,
    /// The test runner's own flags, which mean nothing here
    #[arg(long, hide = true)]
    nocapture: bool,
}

/// One of them.
pub struct Attack {
    /// What a stranger does.
    pub name: &'static str,
    /// Where.
    pub door: &'static str,
    /// Who counts it.
    pub seen: Seen,
    /// Does it, and says how it was refused.
    pub run: for<'a> fn(&'a Target) -> LocalBoxFuture<'a, anyhow::Result<String>>,
}

struct Report {
    attack: Attack,
    refused: String,
    counted: f64,
    latency: Latency,
    memory_mb: [f64; 2],
}

fn main() -> ExitCode {
    let args = Args::parse();
    tandem_ports::raise_descriptor_limit();
    let run = || {
        let cores = Cores::of_this_thread()?;
        // Its threads are of that half, too.
        cores.for_attackers()?;
        tokio::runtime::Runtime::new()?.block_on(run(&args, cores))
    };
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            println!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn attacks() -> Vec<Attack> {
    [
        membership::attacks(),
        certificates::attacks(),
        requests::attacks(),
        tenants::attacks(),
        grpc::attacks(),
        http1::attacks(),
        http2::attacks(),
        connections::attacks(),
        nodes::attacks(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// All that were chosen. Returns how many failed.
async fn run(args: &Args, cores: Cores) -> anyhow::Result<usize> {
    let start = Instant::now();
    let polite = Arc::new(Polite::new(cores).await?);
    cores.for_cluster()?;
    let mut target = Target::start(args.full).await?;
    cores.for_attackers()?;
    println!("{cores}");
    let without = alone(&target, &polite).await?;
    tokio::time::sleep(BETWEEN).await;
    let idle = target.memory()?;
    let (mut reports, mut failed) = (Vec::new(), Vec::new());
    for attack in attacks().into_iter().filter(|attack| attack.name.contains(&args.only)) {
        let name = attack.name;
        match one(&mut target, &polite, attack, (args.answers, idle)).await {
            Ok(report) => {
                println!("{report}");
                if report.latency.p99 > AIM * without.p99 {
                    println!(
                        "  the p99 is above {AIM} times that alone; the phases of that answer: {}",
                        report.latency.phases
                    );
                }
                reports.push(report);
            }
            Err(error) => {
                println!("FAILED {name}: {error:#}");
                failed.push(name);
                target.is_sound().context("after an attack that was not refused")?;
            }
        }
    }
    target.cluster.idle(Duration::from_secs(40)).await.context("after all attacks")?;
    let again = alone(&target, &polite).await?;
    let memory = target.memory()?;
    println!(
        "\npolite client alone: {without} before, {again} after; router: {idle:.0} MB idle, {memory:.0} MB after\n"
    );
    print_table(&reports, &without);
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    let (passed, failed, seconds) = (reports.len(), failed.len(), start.elapsed().as_secs_f64());
    println!("test result: {verdict}. {passed} passed; {failed} failed; 0 ignored; finished in {seconds:.2}s\n");
    Ok(failed)
}

/// The polite client without an attack.
async fn alone(target: &Target, polite: &Arc<Polite>) -> anyhow::Result<Latency> {
    let watch = Arc::new(Watch::default());
    watch.over.store(true, Ordering::Relaxed);
    polite.ask(target.cluster.router.url("http"), SERVED_BEFORE, &watch).await
}

/// One of them, until so many answers, beside what an idle router takes.
async fn one(
    target: &mut Target,
    polite: &Arc<Polite>,
    attack: Attack,
    (answers, idle_mb): (usize, f64),
) -> anyhow::Result<Report> {
    let before = target.seen(attack.seen).await?;
    let memory_before = target.memory()?;
    let watch = Arc::new(Watch::default());
    let url = target.cluster.router.url("http");
    let attacking = async {
        let refused = loop {
            let refused = (attack.run)(target).await;
            if refused.is_err() || watch.answers.load(Ordering::Relaxed) >= answers {
                break refused;
            }
        };
        watch.over.store(true, Ordering::Relaxed);
        refused
    };
    let looking = async {
        let mut most = memory_before;
        while !watch.over.load(Ordering::Relaxed) {
            most = most.max(target.memory()?);
            tokio::time::sleep(LOOK).await;
        }
        anyhow::Ok(most)
    };
    let (refused, latency, most) = tokio::join!(attacking, polite.ask(url, 1, &watch), looking);
    let (refused, latency, most) = (refused?, latency?, most?);
    let counted = target.until_seen(attack.seen, before, COUNTED).await?;
    target.is_sound()?;
    let took = format!("the router took {most:.0} MB, of {idle_mb:.0} MB idle");
    ensure!(most <= MOST * idle_mb, "{took}");
    if most > AIM * idle_mb {
        println!("above the aim of {AIM} times: {took}");
    }
    let left = Instant::now();
    while target.memory()? > AIM * idle_mb {
        ensure!(left.elapsed() < AFTERWARDS, "the router keeps {:.0} MB, of {idle_mb:.0} MB idle", target.memory()?);
        tokio::time::sleep(LOOK).await;
    }
    Ok(Report { attack, refused, counted, latency, memory_mb: [memory_before, most] })
}

fn print_table(reports: &[Report], without: &Latency) {
    println!(
        "| attack | door | refused | counted by | polite p50, p99 ms (alone {without}) | router MB before, at most |"
    );
    println!("|---|---|---|---|---|---|");
    for Report { attack, refused, counted, latency, memory_mb: [before, most] } in reports {
        let seen = match attack.seen {
            Seen::Router(part) | Seen::Open(part) | Seen::Nodes(part) => format!("`{part}` +{counted}"),
            Seen::Nowhere(why) => format!("nothing: {why}"),
        };
        let (name, door, refused) = (attack.name, attack.door, refused.replace('|', "/"));
        println!("| {name} | {door} | {refused} | {seen} | {latency} | {before:.0}, {most:.0} |");
    }
    println!();
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1}, {:.1}", self.p50, self.p99)
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { attack, refused, counted, latency, memory_mb: [_, most] } = self;
        write!(
            f,
            "{} ({}): {refused}; counted {counted}; {} polite answers {latency} ms; {most:.0} MB",
            attack.name, attack.door, latency.answers
        )
    }
}
