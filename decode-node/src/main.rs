//! The life of a decode node: environment, flags, ports, model, service, drain. What it serves is in `lib.rs`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tandem_decode_node::{SERVICE_NAME, routes};
use tandem_kvtransfer::Faults;
use tandem_node::facts::FactsArgs;
use tandem_node::{Listeners, Node, NodeArgs, Running, prepare_environment, run_process};
use tandem_proto::v1::Role;

/// Receives the KV of prompts, verifies it, and generates the answers.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    node: NodeArgs,
    /// Milliseconds without a frame of the prefill node after which a hand-off is over. Its keep-alives while it
    /// computes are frames.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(1..))]
    handoff_lease_ms: u32,
}

fn main() -> ExitCode {
    prepare_environment();
    if let Some(facts) = FactsArgs::asked() {
        return facts.print();
    }
    let args = Args::parse();
    run_process("tandem-decode", args.node.log_format, live(args))
}

async fn live(args: Args) -> anyhow::Result<()> {
    let lease = Duration::from_millis(args.handoff_lease_ms.into());
    let config = args.node.resolve(Role::Decode)?;
    let listeners = Listeners::bind(&config).await?;
    let node = Node::start(&config, Faults::default()).await?;
    let routes = routes(node.clone(), lease);
    let mut running = Running::start(node, &config, listeners, SERVICE_NAME, routes).await?;
    running.until_told().await?;
    running.drain().await;
    Ok(())
}
