//! The life of a decode node: environment, flags, ports, model, service, drain. What it serves is in `lib.rs`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use tandem_config::{DECODE, Resolved};
use tandem_decode_node::{Args, SERVICE_NAME, routes};
use tandem_kvtransfer::Faults;
use tandem_node::{Listeners, Node, Running, aside, check, prepare_environment, reload, run_process};
use tandem_proto::v1::Role;

fn main() -> ExitCode {
    prepare_environment();
    if let Some(code) = aside::done() {
        return code;
    }
    let (args, resolved) = tandem_config::load::<Args>(DECODE);
    if resolved.is_check() {
        return resolved.answer(check(args.node, Role::Decode));
    }
    let log = (args.node.log_filter.clone().unwrap_or_default(), args.node.log_format);
    run_process("tandem-decode", log, live(args, resolved))
}

async fn live(args: Args, resolved: Resolved) -> anyhow::Result<()> {
    let lease = Duration::from_millis(args.handoff_lease_ms.into());
    let config = args.node.resolve(Role::Decode)?;
    reload::at_hangup(resolved, Role::Decode, config.credentials.clone())?;
    let listeners = Listeners::bind(&config).await?;
    let node = Node::start(&config, Faults::default()).await?;
    let routes = routes(node.clone(), lease);
    let mut running = Running::start(node, &config, listeners, SERVICE_NAME, routes).await?;
    running.until_told().await?;
    running.drain().await;
    Ok(())
}
