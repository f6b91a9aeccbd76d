//! The life of a prefill node: environment, flags, ports, model, service, drain. What it serves is in `lib.rs`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tandem_kvtransfer::Faults;
use tandem_node::facts::FactsArgs;
use tandem_node::{Listeners, Node, NodeArgs, Running, prepare_environment, run_process};
use tandem_prefill_node::settings::REDELIVER_WAIT_MS;
use tandem_prefill_node::{Push, SERVICE_NAME, Settings, routes_with};
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
    /// Demonstration: wait so many milliseconds before every 64 KiB of KV (a block at least).
    #[arg(long, value_name = "MS", default_value_t = 0)]
    debug_push_delay_ms: u32,
    /// When KV leaves: while the rest is computed, or (to measure what that is worth) all after the forward pass.
    #[arg(long, value_enum, default_value_t = Push::Overlap)]
    push: Push,
    /// Milliseconds that a computed prompt waits for another ticket after its hand-off failed.
    #[arg(long, value_name = "MS", default_value_t = REDELIVER_WAIT_MS, value_parser = clap::value_parser!(u32).range(1..))]
    redeliver_wait_ms: u32,
}

fn main() -> ExitCode {
    prepare_environment();
    if let Some(facts) = FactsArgs::asked() {
        return facts.print();
    }
    let args = Args::parse();
    run_process("tandem-prefill", args.node.log_format, live(args))
}

async fn live(args: Args) -> anyhow::Result<()> {
    let faults = Faults { flip_byte: args.debug_flip_byte, truncate_push: args.debug_truncate_push };
    let ms = |ms: u32| Duration::from_millis(ms.into());
    let settings = Settings {
        push: args.push,
        redeliver_wait: ms(args.redeliver_wait_ms),
        push_delay: ms(args.debug_push_delay_ms),
    };
    let config = args.node.resolve(Role::Prefill)?;
    let listeners = Listeners::bind(&config).await?;
    let node = Node::start(&config, faults).await?;
    let routes = routes_with(node.clone(), settings);
    let mut running = Running::start(node, &config, listeners, SERVICE_NAME, routes).await?;
    running.until_told().await?;
    running.drain().await;
    Ok(())
}
