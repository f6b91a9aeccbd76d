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
use tandem_cluster_tests::seeds::{Seeds, is_caught};

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
struct CommandLine {
    #[command(flatten)]
    seeds: Seeds,
}

fn main() -> ExitCode {
    let CommandLine { seeds } = CommandLine::parse();
    if let Some(seed) = seeds.seed {
        let report = World::run(seed, Bug::None);
        report.log.iter().for_each(|line| println!("{line}"));
        println!("{:?}", report.counts);
        return verdict(seed, &report);
    }
    let begin = Instant::now();
    let mut sums = world::Counts::default();
    let seeds = seeds.range(FEW_SEEDS);
    for seed in seeds.clone() {
        let report = World::run(seed, Bug::None);
        if !report.violations.is_empty() {
            return verdict(seed, &report);
        }
        sums.add(&report.counts);
    }
    let took = begin.elapsed();
    println!("{} runs in {:.1} s, none failed", seeds.count(), took.as_secs_f64());
    println!("{sums:#?}");
    let all = BUGS.into_iter().filter(|bug| shows(*bug)).count() == BUGS.len();
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn shows(bug: Bug) -> bool {
    is_caught(bug, BUG_SEEDS, |seed| World::run(seed, bug).violations.into_iter().next())
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
