//! Whole clusters in one thread and in virtual time: the real router, nodes and KV registry, random work, random
//! faults, one seed a run. `cargo test --release -p tandem-cluster-tests --test simulation -- --seeds 10000`.
//!
//! [`schedule`] draws a run, [`world`] lives it, [`invariants`] judges it, [`tally`] counts. [`process`], [`channel`]
//! and [`data_plane`] are what a machine and its networks are here; [`node`], [`router`] and [`client`] are who lives
//! there; [`oracle`] knows every answer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed expectation is the failure message of a test")]
mod channel;
mod client;
mod data_plane;
mod invariants;
mod log;
mod model;
mod node;
mod oracle;
mod process;
mod router;
mod schedule;
mod tally;
mod world;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use tandem_cluster_tests::seeds::{Seeds, is_caught};
use tandem_kvtransfer::mem::MemNetwork;
use tandem_kvtransfer::mutation::Mutation;
use tandem_router::text::ModelText;

use schedule::Schedule;
use tally::Tally;
use world::Report;

/// Runs of a plain `cargo test`.
const FEW_SEEDS: u64 = 20;
/// Runs within which every planted bug must have shown.
const MUTATION_SEEDS: u64 = 200;
/// The planted bugs.
const MUTATIONS: [Mutation; 3] = [Mutation::FreeEarly, Mutation::SkipChecksum, Mutation::ForgetFence];
/// Seeds that failed once, of the code or of a planted bug: they always run.
const REGRESSIONS: [u64; 6] = [13, 16, 18, 52, 1700, 9699];

/// Simulated runs of whole clusters.
#[derive(Parser)]
struct Args {
    /// A seed alone is run twice.
    #[command(flatten)]
    seeds: Seeds,
    /// Runs at the same time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Go on after a failing seed.
    #[arg(long)]
    keep_going: bool,
    /// Look for planted bugs only: how many of the runs each of them shows in.
    #[arg(long)]
    mutations: bool,
    /// Run every seed twice, and count those that do the same both times.
    #[arg(long)]
    twice: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let text = model::text();
    if let Some(seed) = args.seeds.seed {
        return show(seed, &text);
    }
    if args.mutations {
        return count_mutants(&args, &text);
    }
    let seeds = REGRESSIONS.into_iter().chain(args.seeds.range(FEW_SEEDS));
    let sums = run_all(&seeds.collect::<Vec<_>>(), &args, &text);
    sums.print();
    let caught = MUTATIONS.into_iter().all(|mutation| shows(mutation, &text));
    if sums.failed.is_empty() && caught { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether a planted bug shows, and in which run first.
fn shows(mutation: Mutation, text: &Arc<ModelText>) -> bool {
    is_caught(mutation, MUTATION_SEEDS, |seed| simulate(seed, text, mutation).violations.into_iter().next())
}

fn count_mutants(args: &Args, text: &Arc<ModelText>) -> ExitCode {
    let mut all = true;
    for mutation in MUTATIONS {
        let seeds = args.seeds.range(FEW_SEEDS);
        let caught = seeds
            .clone()
            .filter_map(|seed| Some((seed, simulate(seed, text, mutation).violations.first()?.invariant)))
            .collect::<Vec<_>>();
        println!("{mutation:?}: caught by {} of {} runs: {caught:?}", caught.len(), seeds.count());
        all &= !caught.is_empty();
    }
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What many runs came to.
#[derive(Default)]
struct Sums {
    runs: u64,
    failed: Vec<u64>,
    same: u64,
    tally: Tally,
    virtual_time: Duration,
    took: Duration,
}

fn run_all(seeds: &[u64], args: &Args, text: &Arc<ModelText>) -> Sums {
    let begin = Instant::now();
    let (next, stop, sums) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(Sums::default()));
    std::thread::scope(|scope| {
        for _ in 0..args.threads.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed)
                    && let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize)
                {
                    let report = simulate(*seed, text, Mutation::None);
                    let same = args.twice && simulate(*seed, text, Mutation::None).log.digest() == report.log.digest();
                    if !report.violations.is_empty() {
                        explain(*seed, &report);
                        stop.fetch_or(!args.keep_going, Ordering::Relaxed);
                    }
                    let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
                    sums.same += u64::from(same);
                    sums.add(*seed, &report);
                }
            });
        }
    });
    let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
    Sums { took: begin.elapsed(), ..sums }
}

/// One run, on this thread.
fn simulate(seed: u64, text: &Arc<ModelText>, mutation: Mutation) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    // Every other run with connections that hand-offs share: what ends one ends several.
    let network = |data_plane| MemNetwork::under(Arc::new(data_plane)).mutated(mutation).sharing(seed % 2 == 1);
    runtime.expect("a runtime").block_on(world::run(Schedule::draw(seed), text.clone(), network))
}

fn show(seed: u64, text: &Arc<ModelText>) -> ExitCode {
    let report = simulate(seed, text, Mutation::None);
    println!("seed {seed}\n{}", Schedule::draw(seed));
    report.log.lines().iter().for_each(|line| println!("{line}"));
    for outcome in &report.outcomes {
        if let client::End::Failed(error) = &outcome.end {
            println!("request {}: {:?} {}", outcome.request, error.kind, error.message);
        }
    }
    print!("{}", report.tally);
    let again = simulate(seed, text, Mutation::None);
    println!("digest {:016x}, again {:016x}", report.log.digest(), again.log.digest());
    let (first, second) = (report.log.lines(), again.log.lines());
    if let Some((one, other)) = first.iter().zip(&second).find(|(one, other)| one != other) {
        println!("the second run differs first where it says `{other}` instead of `{one}`");
    }
    if report.violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    explain(seed, &report);
    ExitCode::FAILURE
}

fn explain(seed: u64, report: &Report) {
    let mut text = format!("\nseed {seed} FAILED\n{}", Schedule::draw(seed));
    report.violations.iter().for_each(|violation| text += &format!("  {violation}\n"));
    text += &format!(
        "  replay: cargo test --release -p tandem-cluster-tests --test simulation -- --seed {seed}\n  \
         then put {seed} into REGRESSIONS in cluster-tests/tests/simulation/main.rs"
    );
    println!("{text}");
}

impl Sums {
    fn add(&mut self, seed: u64, report: &Report) {
        self.runs += 1;
        self.virtual_time += report.lasted;
        if !report.violations.is_empty() {
            self.failed.push(seed);
        }
        self.tally.add(&report.tally);
    }

    fn print(&self) {
        let per_run = self.took.as_secs_f64() * 1e3 / self.runs.max(1) as f64;
        let (failed, minutes) = (self.failed.len(), self.virtual_time.as_secs_f64() / 60.0);
        let took = self.took.as_secs_f64();
        println!(
            "\n{} runs, {failed} failed; {minutes:.1} virtual minutes in {took:.1} s, {per_run:.1} ms a run",
            self.runs
        );
        print!("{}", self.tally);
        if self.same > 0 {
            println!("{} of {} runs did the same when run twice", self.same, self.runs);
        }
        if !self.failed.is_empty() {
            println!("failed seeds: {:?}", self.failed);
        }
    }
}
