//! Which routers this node serves: each `--router`, and each address that a name has in DNS. One task for each of them
//! ([`crate::membership::Link`]); this file alone starts and ends these.
//!
//! A name is asked again every few seconds. An address that it has no more is left when its session ends, and not
//! before: a router that drains leaves its name first, and its requests run on. A name that cannot be resolved changes
//! nothing.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::clock_offset::RouterKey;
use crate::credentials::Credentials;
use crate::membership::{Link, RouterWay};
use crate::node::Node;
use crate::router_address::{MAX_ROUTERS, RouterAddress, endpoint};

/// Between two questions for a name.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(2);
/// Keeps the node registered with all `routers` until `stop`; `endpoint` is the URL of its own gRPC services.
pub async fn stay_joined(
    node: Arc<Node>,
    routers: Vec<RouterAddress>,
    credentials: Credentials,
    endpoint: String,
    stop: CancellationToken,
) {
    let routers = routers.into_iter().enumerate().map(|(place, router)| {
        let (node, credentials) = (node.clone(), credentials.clone());
        let dialling = Dialling { node, credentials, endpoint: endpoint.clone(), stop: stop.clone() };
        async move {
            match router {
                RouterAddress::Url(router) => dialling.stay(*router, (place, None), CancellationToken::new()).await,
                RouterAddress::Dns { host, port } => dialling.watch(place, &host, port).await,
            }
        }
    });
    join_all(routers).await;
}

/// What a stream to any router takes.
#[derive(Clone)]
struct Dialling {
    node: Arc<Node>,
    credentials: Credentials,
    endpoint: String,
    stop: CancellationToken,
}

impl Dialling {
    async fn stay(self, router: Endpoint, key: RouterKey, unlisted: CancellationToken) {
        let way = RouterWay::Network(Box::new(router), self.credentials);
        Link::new(&self.node, way, self.endpoint, key).stay(&self.node, &unlisted, &self.stop).await;
    }

    /// Serves the addresses that the name has. The question is asked by one thread at a time, however long it takes.
    async fn watch(self, place: usize, host: &str, port: u16) {
        let (mut listed, mut links, mut failing) = (Listed::default(), JoinSet::new(), false);
        let mut ticks = interval(RESOLVE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let resolved = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                Some(ended) = links.join_next() => {
                    // A task that panicked has no address: that one stays listed and is not dialled again.
                    ended.iter().for_each(|address| listed.ended(address));
                    continue;
                }
                resolved = async { ticks.tick().await; tokio::net::lookup_host((host, port)).await } => resolved,
            };
            match resolved {
                Ok(addresses) => {
                    failing = false;
                    for (address, unlisted) in listed.resolved(addresses.collect()) {
                        let url = format!("{}://{address}", self.credentials.scheme());
                        let Some(router) = endpoint(&url) else { continue };
                        tracing::info!(host, %address, "a router");
                        let dialling = self.clone();
                        links.spawn(async move {
                            dialling.stay(router, (place, Some(address)), unlisted).await;
                            address
                        });
                    }
                }
                Err(error) if !std::mem::replace(&mut failing, true) => {
                    tracing::warn!(host, %error, "the routers' name cannot be resolved: those that are known stay");
                }
                Err(_) => {}
            }
        }
        while links.join_next().await.is_some() {}
    }
}

/// The addresses of a name that have a task. Pure.
#[derive(Debug, Default)]
struct Listed {
    /// With what tells the task that the name has this one no more.
    tasks: BTreeMap<SocketAddr, CancellationToken>,
}

impl Listed {
    /// The name has these addresses now. Returns the new ones, each with its token.
    fn resolved(&mut self, addresses: BTreeSet<SocketAddr>) -> Vec<(SocketAddr, CancellationToken)> {
        for (address, unlisted) in &self.tasks {
            if !addresses.contains(address) {
                unlisted.cancel();
            }
        }
        let mut new = Vec::new();
        for address in addresses {
            // One that comes back before its task has ended gets another one when that has.
            if self.tasks.len() < MAX_ROUTERS && !self.tasks.contains_key(&address) {
                let unlisted = CancellationToken::new();
                self.tasks.insert(address, unlisted.clone());
                new.push((address, unlisted));
            }
        }
        new
    }

    /// Its task has ended.
    fn ended(&mut self, address: &SocketAddr) {
        self.tasks.remove(address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(numbers: &[u8]) -> BTreeSet<SocketAddr> {
        numbers.iter().map(|number| SocketAddr::from(([10, 0, 0, *number], 1))).collect()
    }

    #[test]
    fn an_address_has_one_task_until_that_ends() {
        let mut listed = Listed::default();
        let resolve = |listed: &mut Listed, numbers: &[u8]| {
            let new = listed.resolved(addresses(numbers));
            new.into_iter().map(|(address, token)| (address.to_string(), token)).collect::<Vec<_>>()
        };
        let first = resolve(&mut listed, &[1, 2]);
        assert_eq!(first.iter().map(|(address, _)| address.as_str()).collect::<Vec<_>>(), ["10.0.0.1:1", "10.0.0.2:1"]);
        assert!(resolve(&mut listed, &[1, 2]).is_empty());
        assert_eq!(resolve(&mut listed, &[2, 3]).len(), 1);
        assert_eq!(first.iter().map(|(_, unlisted)| unlisted.is_cancelled()).collect::<Vec<_>>(), [true, false]);
        // It is back, and its last session is not over.
        assert!(resolve(&mut listed, &[1, 2, 3]).is_empty());
        listed.ended(&SocketAddr::from(([10, 0, 0, 1], 1)));
        let again = resolve(&mut listed, &[1, 2, 3]);
        assert!(again.len() == 1 && !again[0].1.is_cancelled());
        assert_eq!(resolve(&mut listed, &(0..=255).collect::<Vec<_>>()).len(), MAX_ROUTERS - 3, "bounded");
    }
}
