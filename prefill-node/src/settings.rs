//! What a prefill node can be told: its command line, and what of it the service gets.
use std::time::Duration;

use clap::{Parser, ValueEnum};
use tandem_node::NodeArgs;

/// Reads prompts, builds their KV and hands it to decode nodes.
#[derive(Parser)]
#[command(version)]
pub struct Args {
    /// What every node can be told.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Demonstration: flip one bit of every hand-off. Decode nodes must refuse it.
    #[arg(long)]
    pub debug_flip_byte: bool,
    /// Demonstration: send 8 bytes too few of every hand-off. Decode nodes must refuse it.
    #[arg(long)]
    pub debug_truncate_push: bool,
    /// Demonstration: wait so many milliseconds before every 64 KiB of KV (a block at least).
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub debug_push_delay_ms: u32,
    /// When KV leaves: while the rest is computed, or (to measure what that is worth) all after the forward pass.
    #[arg(long, value_enum, default_value_t = Push::Overlap)]
    pub push: Push,
    /// Milliseconds that a computed prompt waits for another ticket after its hand-off failed.
    #[arg(long, value_name = "MS", default_value_t = REDELIVER_WAIT_MS, value_parser = clap::value_parser!(u32).range(1..))]
    pub redeliver_wait_ms: u32,
}

/// Settings of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// When blocks leave.
    pub push: Push,
    /// How long a computed prompt waits for another ticket after a hand-off failed.
    pub redeliver_wait: Duration,
    /// Before every piece, which are small then; a fault, for tests.
    pub push_delay: Duration,
}

/// `--redeliver-wait-ms`.
pub const REDELIVER_WAIT_MS: u32 = 30_000;

impl Default for Settings {
    fn default() -> Self {
        Self {
            push: Push::Overlap,
            redeliver_wait: Duration::from_millis(REDELIVER_WAIT_MS.into()),
            push_delay: Duration::ZERO,
        }
    }
}

/// `--push`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Push {
    /// Chunks and groups of layers while the next ones are computed.
    Overlap,
    /// All blocks after the forward pass: for measuring what overlap is worth.
    Whole,
}
