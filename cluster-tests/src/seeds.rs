//! What tests that run seeds have in common: flags of their command lines, and whether a planted bug shows.
use std::fmt::{Debug, Display};
use std::ops::Range;

use clap::Args;

/// Which seeds.
#[derive(Args, Debug)]
pub struct Seeds {
    /// Runs: seeds from --first on [default: as many as a plain `cargo test` runs]
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Run this seed alone, and print what happened.
    #[arg(long)]
    pub seed: Option<u64>,
    /// The test runner's own, which mean nothing here.
    #[arg(hide = true)]
    _filter: Vec<String>,
    #[arg(long, hide = true)]
    nocapture: bool,
}

impl Seeds {
    /// Those that were asked for, else `few`.
    pub fn range(&self, few: u64) -> Range<u64> {
        self.first..self.first + self.seeds.unwrap_or(few)
    }
}

/// Whether a planted bug shows within so many runs, and in which first; `violation` runs a seed with it.
pub fn is_caught<V: Display>(bug: impl Debug, runs: u64, violation: impl Fn(u64) -> Option<V>) -> bool {
    match (0..runs).find_map(|seed| Some((seed, violation(seed)?))) {
        Some((seed, violation)) => println!("{bug:?} is caught by seed {seed}: {violation}"),
        None => {
            println!("{bug:?} is NOT caught within {runs} runs");
            return false;
        }
    }
    true
}
