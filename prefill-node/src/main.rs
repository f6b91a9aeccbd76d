//! The life of a prefill node: environment, flags, ports, model, service, drain. What it serves is in `lib.rs`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tandem_kvtransfer::transport::Faults;
use tandem_node::{Listeners, Node, NodeArgs, Running, prepare_environment, run_process};
use tandem_prefill_node::{SERVICE_NAME, routes};
use tandem_proto::v1::Role;

/// Reads prompts, builds their KV and hands it to decode nodes.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    node: NodeArgs,
    /// Demonstration: flip one bit of every hand-off. Decode nodes must refuse it.
    #[arg(long)]
    debug_flip_byte: bool,
    /// Demonstration: send 8 bytes too few of every hand-off. Decode nodes must refuse it.
    #[arg(long)]
    debug_truncate_push: bool,
}

fn main() -> ExitCode {
    prepare_environment();
    let args = Args::parse();
    run_process("tandem-prefill", live(args))
}

async fn live(args: Args) -> anyhow::Result<()> {
    let faults = Faults { flip_byte: args.debug_flip_byte, truncate_push: args.debug_truncate_push };
    let config = args.node.resolve(Role::Prefill)?;
    let listeners = Listeners::bind(&config).await?;
    let node = Node::start(&config, faults).await?;
    let routes = routes(node.clone());
    let mut running = Running::start(node, &config, listeners, SERVICE_NAME, routes).await?;
    running.until_told().await?;
    running.drain().await;
    Ok(())
}
