//! What a node reads again at SIGHUP: its join token, its certificate, and the configuration file. Of its flags the
//! log's filter holds from then on, and the others are named in the log: they take a restart. A file that is wrong
//! changes nothing, and is in the log. The signal ends no node.
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use clap::FromArgMatches;
use tandem_config::Resolved;
use tandem_proto::v1::Role;
use tandem_telemetry::LogFilter;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::NodeArgs;
use crate::credentials::Credentials;

/// What holds from its change on.
const AT_ONCE: &str = "log-filter";

/// Reads all of it at each signal, until the process ends, for a node of this role; the credentials' files also when
/// they change.
///
/// # Errors
/// The system refuses the signal's handler.
pub fn at_hangup(started: Resolved, role: Role, credentials: Credentials) -> anyhow::Result<()> {
    let mut hangups = signal(SignalKind::hangup()).context("cannot handle signals")?;
    credentials.clone().follow_files();
    let reload = Arc::new(Reload { credentials, role, last: Mutex::new(started.clone()), started });
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            let reload = Arc::clone(&reload);
            // Files may lie on slow disks, and a panic there is in the log.
            let _ = tokio::task::spawn_blocking(move || reload.read()).await;
        }
    });
    Ok(())
}

struct Reload {
    credentials: Credentials,
    role: Role,
    started: Resolved,
    /// What the file made of it last.
    last: Mutex<Resolved>,
}

impl Reload {
    fn read(&self) {
        self.credentials.read_again();
        if self.started.path().is_none() {
            return tracing::info!("SIGHUP: there is no configuration file to read again");
        }
        let now = match self.again() {
            Ok(now) => now,
            Err(error) => {
                let error = format!("{error:#}");
                return tracing::error!(error, "the configuration file would not start a node");
            }
        };
        // A line that says so is chosen by it.
        log_filter(&now).set();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        for change in last.changes(&now).iter().filter(|change| change.flag == AT_ONCE) {
            let (flag, before, file) = (&change.flag, &change.from, &change.to);
            tracing::info!(flag, before, file, "the configuration file has changed: this holds from now on");
        }
        for change in self.started.changes(&now).iter().filter(|change| change.flag != AT_ONCE) {
            let (flag, running, file) = (&change.flag, &change.from, &change.to);
            tracing::warn!(flag, running, file, "the configuration file has changed: this takes a restart");
        }
        *last = now;
    }

    /// What the file makes of it now, if a node could start with that.
    fn again(&self) -> anyhow::Result<Resolved> {
        let now = self.started.again()?;
        NodeArgs::from_arg_matches(now.matches())?.resolve(self.role)?;
        Ok(now)
    }
}

fn log_filter(resolved: &Resolved) -> LogFilter {
    resolved.matches().get_one::<LogFilter>("log_filter").cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ffi::OsString;

    use clap::{CommandFactory, Parser};
    use tandem_config::DECODE;

    use super::*;
    use crate::NodeArgs;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        node: NodeArgs,
    }

    #[test]
    fn the_logs_filter_is_read_again_and_a_wrong_file_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tandem.toml");
        let write = |text: &str| std::fs::write(&path, text).expect("written");
        write("[node]\nrouter = ['http://127.0.0.1:1']\nsimulated = true\nlog-filter = 'warn'\n");
        let words = ["tandem-decode-node", "--config", path.to_str().expect("text")].map(OsString::from);
        let started = Resolved::of(DECODE, Cli::command(), words.into(), BTreeMap::new()).expect("resolved");
        let last = Mutex::new(started.clone());
        let reload = Reload { credentials: Credentials::default(), role: Role::Decode, started, last };
        let filter = || log_filter(&reload.last.lock().expect("whole")).to_string();
        assert_eq!(filter(), "warn");
        for (router, text, expected) in [
            ("http://127.0.0.1:1", "'debug'\nkv-blocks = 7", "debug"),
            ("http://127.0.0.1:1", "'tandem=loud'", "debug"),
            ("nonsense", "'error'", "debug"),
            ("http://127.0.0.1:1", "'error'\nlisten = '0.0.0.0:1'", "debug"),
            ("http://127.0.0.1:1", "'error'\njoin-token-file = '/no/such/file'", "debug"),
            ("http://127.0.0.1:1", "'info'", "info"),
        ] {
            write(&format!("[node]\nrouter = ['{router}']\nsimulated = true\nlog-filter = {text}\n"));
            reload.read();
            assert_eq!(filter(), expected, "{router} {text}");
        }
    }
}
