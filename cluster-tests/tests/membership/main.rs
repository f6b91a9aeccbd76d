//! Routers × nodes × partitions, as state machines in virtual time: the real node table, prefix index, lives, leases
//! and cache feeds, without sockets and tasks. One seed a run, milliseconds each, so that ten thousand are nothing.
//! `cargo test --release -p tandem-cluster-tests --test membership -- --seeds 10000`. The simulation beside this one
//! (`tests/simulation`) runs the whole product, with one router.
//!
//! [`network`] carries messages, late or not at all; [`router`] and [`node`] are what the shells of the product do with
//! the machines above; [`world`] draws a run, lives it and judges it by [`ledger`].
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed expectation is the failure message of a test")]
mod ledger;
mod network;
mod node;
mod router;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use world::{Report, World};

/// Runs of a plain `cargo test`.
const FEW_SEEDS: u64 = 500;
/// Runs within which every planted bug must have shown.
const BUG_SEEDS: u64 = 500;

/// What a node of this simulation does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Nothing.
    None,
    /// It lets go of nothing when a session ends.
    KeepsCalls,
    /// It takes calls of lives that are over.
    TakesOldCalls,
    /// It never doubts that a router that says nothing counts on it.
    HasNoLease,
    /// It counts its lease from the answer to a probe, not from the probe.
    CountsFromTheAnswer,
    /// It goes on with its cache's events where the last session ended, whatever the router asks.
    TellsNoSnapshot,
}

const BUGS: [Bug; 5] =
    [Bug::KeepsCalls, Bug::TakesOldCalls, Bug::HasNoLease, Bug::CountsFromTheAnswer, Bug::TellsNoSnapshot];

/// Simulated memberships.
#[derive(Parser)]
struct Args {
    /// Runs: seeds from --first on.
    #[arg(long, default_value_t = FEW_SEEDS)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Run this seed alone, and print what happened.
    #[arg(long)]
    seed: Option<u64>,
    /// The test runner's own, which mean nothing here.
    #[arg(hide = true)]
    _filter: Vec<String>,
    #[arg(long, hide = true)]
    nocapture: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(seed) = args.seed {
        let report = World::run(seed, Bug::None);
        report.log.iter().for_each(|line| println!("{line}"));
        println!("{:?}", report.counts);
        return verdict(seed, &report);
    }
    let begin = Instant::now();
    let mut sums = world::Counts::default();
    for seed in args.first..args.first + args.seeds {
        let report = World::run(seed, Bug::None);
        if !report.violations.is_empty() {
            return verdict(seed, &report);
        }
        sums.add(&report.counts);
    }
    let took = begin.elapsed();
    println!("{} runs in {:.1} s, none failed", args.seeds, took.as_secs_f64());
    println!("{sums:#?}");
    let all = BUGS.into_iter().filter(|bug| is_caught(*bug)).count() == BUGS.len();
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn is_caught(bug: Bug) -> bool {
    for seed in 0..BUG_SEEDS {
        if let Some(violation) = World::run(seed, bug).violations.first() {
            println!("{bug:?} is caught by seed {seed}: {violation}");
            return true;
        }
    }
    println!("{bug:?} is NOT caught within {BUG_SEEDS} runs");
    false
}

fn verdict(seed: u64, report: &Report) -> ExitCode {
    for violation in &report.violations {
        println!("seed {seed}: {violation}");
    }
    if report.violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("replay: cargo test --release -p tandem-cluster-tests --test membership -- --seed {seed}");
    ExitCode::FAILURE
}
