//! What a router reads again at SIGHUP: API keys, certificates, and the configuration file, of which it says what would
//! take a restart. A file that is wrong changes nothing, and is in the log.
use tandem_config::Resolved;
use tandem_ports::{NodeTls, Tls};
use tandem_telemetry::clock;

use crate::admission::keys::Keys;

/// Owner of what can change while the process runs.
pub struct Reload {
    /// Those that clients need, if any.
    pub keys: Keys,
    /// Of the ports for clients.
    pub tls: Option<Tls>,
    /// Between this router and its nodes.
    pub node_tls: Option<NodeTls>,
    /// What the process was started with.
    pub started: Resolved,
}

impl Reload {
    /// Whether there is anything to read. If not, the signal ends the process, as it does with most.
    pub fn has_files(&self) -> bool {
        self.keys.required() || self.tls.is_some() || self.node_tls.is_some() || self.started.path().is_some()
    }

    /// Reads all of it. Requests that run keep what they have: a tenant its terms, a connection its certificate.
    pub fn read(&self) {
        if self.keys.required() {
            match self.keys.reload(clock::now()) {
                Ok(count) => tracing::info!(count, "API keys read again"),
                Err(error) => tracing::error!(%error, "API keys not read: the old API keys stay"),
            }
        }
        self.tls.iter().for_each(Tls::read_again);
        self.node_tls.iter().for_each(NodeTls::read_again);
        if self.started.path().is_some() {
            self.compare();
        }
    }

    fn compare(&self) {
        let now = match self.started.again() {
            Ok(now) => now,
            Err(error) => return tracing::error!(%error, "the configuration file would not start a router"),
        };
        for change in self.started.changes(&now) {
            let (flag, running, file) = (change.flag, change.from, change.to);
            tracing::warn!(flag, running, file, "the configuration file has changed: this takes a restart");
        }
    }
}
