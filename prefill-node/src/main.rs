//! The life of a prefill node: environment, flags, ports, model, service, drain. What it serves is in `lib.rs`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use tandem_config::{PREFILL, Resolved};
use tandem_kvtransfer::Faults;
use tandem_node::{Listeners, Node, Running, aside, check, prepare_environment, reload, run_process};
use tandem_prefill_node::{Args, SERVICE_NAME, Settings, routes_with};
use tandem_proto::v1::Role;

fn main() -> ExitCode {
    prepare_environment();
    if let Some(code) = aside::done() {
        return code;
    }
    let (args, resolved) = tandem_config::load::<Args>(PREFILL);
    if resolved.is_check() {
        return resolved.answer(check(args.node, Role::Prefill));
    }
    let log = (args.node.log_filter.clone().unwrap_or_default(), args.node.log_format);
    run_process("tandem-prefill", log, live(args, resolved))
}

async fn live(args: Args, resolved: Resolved) -> anyhow::Result<()> {
    let faults = Faults { flip_byte: args.debug_flip_byte, truncate_push: args.debug_truncate_push };
    let ms = |ms: u32| Duration::from_millis(ms.into());
    let settings = Settings {
        push: args.push,
        redeliver_wait: ms(args.redeliver_wait_ms),
        push_delay: ms(args.debug_push_delay_ms),
    };
    let config = args.node.resolve(Role::Prefill)?;
    reload::at_hangup(resolved, Role::Prefill, config.credentials.clone())?;
    let listeners = Listeners::bind(&config).await?;
    let node = Node::start(&config, faults).await?;
    let routes = routes_with(node.clone(), settings);
    let mut running = Running::start(node, &config, listeners, SERVICE_NAME, routes).await?;
    running.until_told().await?;
    running.drain().await;
    Ok(())
}
