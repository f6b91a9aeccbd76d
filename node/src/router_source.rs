//! Where the addresses of several routers come from: a name in DNS, or a prefix of etcd. A source that cannot be asked
//! has nothing to say: who waits for it keeps what was there. What is done with the addresses is
//! [`crate::routers`]'s matter.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tandem_etcd::watch::{Entries, Watched};
use tandem_etcd::{Etcd, HostPort};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::router_address::MAX_ROUTERS;

/// Between two questions for a name.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(2);

/// One of them.
#[derive(Debug)]
pub enum RouterSource {
    /// A name that is asked for again and again.
    Dns(Name),
    /// A prefix that is watched.
    Etcd(Prefix),
}

impl RouterSource {
    /// All addresses of a name, with this port.
    pub fn of_name(host: String, port: u16) -> Self {
        Self::Dns(Name::new(host, port))
    }

    /// What stands there. Begins to read at once.
    pub fn of_prefix(etcd: Etcd) -> Self {
        Self::Etcd(Prefix { name: etcd.address.to_string(), watched: Watched::start(etcd), odd: BTreeSet::new() })
    }

    /// For people.
    pub fn name(&self) -> &str {
        match self {
            Self::Dns(name) => &name.host,
            Self::Etcd(prefix) => &prefix.name,
        }
    }

    /// Waits for the next answer: all addresses that are there. A wait that is dropped misses nothing.
    pub async fn next(&mut self) -> BTreeSet<HostPort> {
        match self {
            Self::Dns(name) => name.next().await,
            Self::Etcd(prefix) => prefix.next().await,
        }
    }
}

/// A name in DNS.
#[derive(Debug)]
pub struct Name {
    host: String,
    port: u16,
    ticks: Interval,
    failing: bool,
}

impl Name {
    fn new(host: String, port: u16) -> Self {
        let mut ticks = interval(RESOLVE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { host, port, ticks, failing: false }
    }

    /// The question is asked by one thread at a time, however long it takes.
    async fn next(&mut self) -> BTreeSet<HostPort> {
        loop {
            self.ticks.tick().await;
            let host = self.host.as_str();
            match tokio::net::lookup_host((host, self.port)).await {
                Ok(addresses) => {
                    self.failing = false;
                    return addresses.map(HostPort::from).collect();
                }
                Err(error) if !std::mem::replace(&mut self.failing, true) => {
                    tracing::warn!(host, %error, "the routers' name cannot be resolved: those that are known stay");
                }
                Err(_) => {}
            }
        }
    }
}

/// A prefix of etcd. What stands there has been read by a task of its own, which logs its troubles.
#[derive(Debug)]
pub struct Prefix {
    name: String,
    watched: Watched,
    /// What was wrong in the last answer: it is logged once.
    odd: BTreeSet<String>,
}

impl Prefix {
    async fn next(&mut self) -> BTreeSet<HostPort> {
        let entries: Arc<Entries> = self.watched.changed().await;
        let (addresses, odd) = addresses(&entries);
        for what in odd.difference(&self.odd) {
            tracing::warn!(etcd = self.name, "{what}");
        }
        self.odd = odd;
        addresses
    }
}

/// The addresses that stand in these entries, and what is odd about the others. Pure.
fn addresses(entries: &Entries) -> (BTreeSet<HostPort>, BTreeSet<String>) {
    let (mut addresses, mut odd) = (BTreeSet::new(), BTreeSet::new());
    for (key, value) in entries {
        match value.trim().parse::<HostPort>() {
            Ok(address) => drop(addresses.insert(address)),
            Err(error) => drop(odd.insert(format!("{key:?} is no router's address, {error}: it is skipped"))),
        }
    }
    if addresses.len() > MAX_ROUTERS {
        odd.insert(format!("{} routers: a node has {MAX_ROUTERS} at most", addresses.len()));
    }
    (addresses, odd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_addresses_and_others_are_skipped() {
        let entries =
            [("a", "10.0.0.2:8002"), ("b", "router-1.example:8002\n"), ("c", "http://h:1"), ("d", "10.0.0.2:8002")];
        let entries: Entries = entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let (found, odd) = addresses(&entries);
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["10.0.0.2:8002", "router-1.example:8002"]
        );
        assert!(odd.len() == 1 && odd.first().unwrap().contains("\"c\""), "{odd:?}");
        let many: Entries = (1..=17).map(|number| (number.to_string(), format!("h:{number}"))).collect();
        assert!(addresses(&many).1.first().unwrap().contains("16 at most"));
    }
}
