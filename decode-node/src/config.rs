//! The command line of a decode node: what every node can be told, and its own.
use clap::Parser;
use tandem_node::NodeArgs;

/// Receives the KV of prompts, verifies it, and generates the answers.
#[derive(Parser)]
#[command(version)]
pub struct Args {
    /// What every node can be told.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Milliseconds without a frame of the prefill node after which a hand-off is over. Its keep-alives while it
    /// computes are frames.
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub handoff_lease_ms: u32,
}
