//! What a prefill node can be told beside what every node can.
use std::time::Duration;

use clap::ValueEnum;

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
