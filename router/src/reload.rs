//! What a router reads again at SIGHUP: API keys, join tokens, certificates, and the configuration file. Of its flags
//! those in [`Limits`] but the pools and the log's filter hold from then on, and the others are named in the log: they
//! take a restart. A file that is wrong changes nothing, and is in the log.
use std::sync::{Mutex, PoisonError};

use tandem_config::Resolved;
use tandem_ports::{JoinTokens, NodeTls, Tls};
use tandem_telemetry::clock;

use crate::admission::keys::Keys;
use crate::api::Service;
use crate::config::Config;
use crate::limits::Limits;
use crate::registration::Registration;

/// Flags whose new values hold without a restart.
const AT_ONCE: [&str; 12] = [
    "client-stall-ms",
    "log-filter",
    "max-attempts",
    "max-inflight",
    "max-queue",
    "max-request-ms",
    "max-tokens-default",
    "max-ttft-ms",
    "node-queue",
    "replan-ms",
    "retry-budget-percent",
    "silence-ms",
];

/// Owner of what can change while the process runs.
pub struct Reload {
    /// Those that clients need, if any.
    pub keys: Keys,
    /// Of the cluster, if it has such.
    pub join: Option<JoinTokens>,
    /// Of the ports for clients.
    pub tls: Option<Tls>,
    /// Between this router and its nodes.
    pub node_tls: Option<NodeTls>,
    /// The configuration file.
    pub file: ConfigFile,
}

/// The configuration file, and whom its limits are for.
pub struct ConfigFile {
    service: Service,
    /// What the process was started with.
    started: (Resolved, Limits),
    /// What the file made of it last.
    last: Mutex<Resolved>,
}

impl Reload {
    /// Reads all of it. Requests that run keep what they have: a tenant its terms, a connection its certificate.
    pub fn read(&self) {
        if self.keys.required() {
            match self.keys.reload(clock::now()) {
                Ok(count) => tracing::info!(count, "API keys read again"),
                Err(error) => tracing::error!(%error, "API keys not read: the old API keys stay"),
            }
        }
        self.join.iter().for_each(JoinTokens::read_again);
        self.tls.iter().for_each(Tls::read_again);
        self.node_tls.iter().for_each(NodeTls::read_again);
        self.file.read();
    }
}

impl ConfigFile {
    /// Of a process that was started with these, for this service.
    pub fn new(service: Service, started: Resolved, limits: Limits) -> Self {
        Self { service, last: Mutex::new(started.clone()), started: (started, limits) }
    }

    fn read(&self) {
        let (started, limits) = &self.started;
        if started.path().is_none() {
            return tracing::info!("SIGHUP: there is no configuration file to read again");
        }
        let wrong = "the configuration file would not start a router";
        let (now, next) = match again(started) {
            Ok(read) => read,
            Err(error) => return tracing::error!(error = format!("{error:#}"), "{wrong}"),
        };
        // A line that says so is chosen by it.
        next.log_filter.set();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        for change in last.changes(&now).iter().filter(|change| AT_ONCE.contains(&&*change.flag)) {
            let (flag, before, file) = (&change.flag, &change.from, &change.to);
            tracing::info!(flag, before, file, "the configuration file has changed: this holds from now on");
        }
        for change in started.changes(&now).iter().filter(|change| !AT_ONCE.contains(&&*change.flag)) {
            let (flag, running, file) = (&change.flag, &change.from, &change.to);
            tracing::warn!(flag, running, file, "the configuration file has changed: this takes a restart");
        }
        self.service.set_limits(changed(limits, next.limits));
        *last = now;
    }
}

/// What the file makes of the flags now, if they go together.
fn again(started: &Resolved) -> anyhow::Result<(Resolved, Config)> {
    let now = started.again()?;
    let next = Config::of(&now)?;
    Registration::read(&next)?;
    Ok((now, next))
}

/// The next limits with those of the start that take a restart.
fn changed(started: &Limits, next: Limits) -> Limits {
    Limits { pools: started.pools.clone(), ..next }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::Path;
    use std::time::Duration;

    use tandem_config::ROUTER;

    use super::*;
    use crate::config;
    use crate::flow::tests::fakes;
    use crate::limits::pools::Pools;

    fn resolved(path: &Path) -> Resolved {
        let words = ["tandem-router", "--model", "m.gguf", "--config", path.to_str().unwrap()].map(OsString::from);
        Resolved::of(ROUTER, config::command(), words.into(), std::collections::BTreeMap::new()).unwrap()
    }

    /// Of each flag of [`Limits`] another value than its default, but of the pools, which take a restart.
    #[tokio::test]
    async fn all_limits_change_but_the_pools() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tandem.toml");
        std::fs::write(&path, "[router]\n").unwrap();
        let started = resolved(&path);
        let limits = Config::of(&started).unwrap().limits;
        let file = ConfigFile::new(fakes::router(limits.clone()), started, limits);
        let text = "[router]\npools = 'a=0-9:3,b=10-:1'\nclient-stall-ms = 11\nmax-attempts = 2\nmax-inflight = 13\n\
            max-queue = 14\nmax-request-ms = 15\nmax-tokens-default = 16\nmax-ttft-ms = 17\nnode-queue = 18\n\
            replan-ms = 19\nretry-budget-percent = 21\nsilence-ms = 22\n";
        assert!(AT_ONCE.iter().all(|flag| *flag == "log-filter" || text.contains(&format!("\n{flag} = "))));
        std::fs::write(&path, text).unwrap();
        file.read();
        // All of them: a new one is asked about here.
        let Limits {
            max_inflight,
            max_queue,
            node_queue,
            max_ttft,
            ref pools,
            max_tokens_default,
            max_request,
            silence,
            max_attempts,
            replan,
            retry_budget_percent,
            client_stall,
        } = *file.service.limits();
        assert_eq!((max_inflight, max_queue, node_queue, max_tokens_default), (13, 14, 18, 16));
        assert_eq!((max_attempts, retry_budget_percent), (2, 21));
        let times = [17, 15, 22, 19, 11].map(Duration::from_millis);
        assert_eq!([max_ttft.unwrap(), max_request, silence, replan, client_stall], times);
        assert_eq!(*pools, Pools::default(), "they take a restart");
        assert_eq!(file.service.max_queue(), 14, "admission has them, too");
    }

    #[tokio::test]
    async fn a_file_that_changes_changes_the_limits_and_a_wrong_one_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tandem.toml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("[router]\nmax-queue = 7\n");
        let started = resolved(&path);
        let limits = Config::of(&started).unwrap().limits;
        assert_eq!(limits.max_queue, 7);
        let file = ConfigFile::new(fakes::router(limits.clone()), started, limits);
        let max_queue = |file: &ConfigFile| file.service.max_queue();
        for (text, expected) in [
            ("[router]\nmax-queue = 9\nlease-ms = 1000\n", 9),
            ("[router\n", 9),
            ("[router]\nmax-queue = \"many\"\n", 9),
            ("[router]\nmax-queue = 5\nregister = 'etcd://h/p'\ngrpc = '0.0.0.0:1'\n", 9),
            ("[router]\nmax-queue = 0\n", 0),
            ("[router]\nmax-queue = 8\nlog-filter = 'tandem=loud'\n", 0),
            ("[router]\nmax-queue = 8\n", 8),
        ] {
            write(text);
            file.read();
            assert_eq!(max_queue(&file), expected, "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        file.read();
        assert_eq!(max_queue(&file), 8, "a file that is gone");
    }
}
