//! The log that people read: stderr, filtered by `RUST_LOG`.
use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// The HTTP/2 stack below us logs every frame at debug; nobody asks for that with `RUST_LOG=debug`.
const QUIET: &str = "info,h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,opentelemetry=warn";

/// Starts logging for this process. What cannot be written (a full disk) is lost, and the process goes on. A second
/// call keeps the first set-up, which is what tests want.
pub fn init_logging(service: &'static str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(QUIET));
    let started = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // It would say on standard error that nothing can be written there, and panic because that fails.
        .log_internal_errors(false)
        .try_init();
    if started.is_ok() {
        tracing::debug!(service, "logging started");
    }
}
