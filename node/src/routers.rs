//! Which routers this node serves: each `--router`, and each address that a source of them has ([`RouterSource`]). One
//! task for each of them ([`crate::membership::Link`]); this file alone starts and ends these.
//!
//! An address that its source has no more is left when its session ends, and not before: a router that drains leaves
//! its name first, and its requests run on. One that is back by then is kept, with the secrets of its lives: another
//! task could not show that the last of them is over.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::join_all;
use tandem_etcd::HostPort;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::clock_offset::RouterKey;
use crate::credentials::Credentials;
use crate::membership::{Link, RouterWay};
use crate::node::Node;
use crate::router_address::{MAX_ROUTERS, RouterAddress, endpoint};
use crate::router_source::RouterSource;

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
                RouterAddress::Url(router) => {
                    let (_always, listed) = watch::channel(true);
                    dialling.stay(*router, (place, None), listed).await;
                }
                RouterAddress::Dns { host, port } => dialling.follow(place, RouterSource::of_name(host, port)).await,
                RouterAddress::Etcd(etcd) => dialling.follow(place, RouterSource::of_prefix(*etcd)).await,
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
    async fn stay(self, router: Endpoint, key: RouterKey, listed: watch::Receiver<bool>) {
        let way = RouterWay::Network(Box::new(router), self.credentials);
        Link::new(&self.node, way, self.endpoint, key).stay(&self.node, listed, &self.stop).await;
    }

    /// Serves the addresses that the source has.
    async fn follow(self, place: usize, mut source: RouterSource) {
        let (mut listed, mut links) = (Listed::default(), JoinSet::new());
        loop {
            let new = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                // A task that panicked has no address: that one stays listed and is not dialled again.
                Some(ended) = links.join_next() => match ended {
                    Ok(address) => {
                        tracing::info!(source = source.name(), %address, "a router has left");
                        listed.ended(&address)
                    }
                    Err(_) => continue,
                },
                addresses = source.next() => listed.resolved(addresses),
            };
            for (address, is_listed) in new {
                let url = format!("{}://{address}", self.credentials.scheme());
                let Some(router) = endpoint(&url) else { continue };
                tracing::info!(source = source.name(), %address, "a router");
                let dialling = self.clone();
                links.spawn(async move {
                    dialling.stay(router, (place, Some(address.clone())), is_listed).await;
                    address
                });
            }
        }
        while links.join_next().await.is_some() {}
    }
}

/// The addresses of a source that have a task. Pure.
#[derive(Debug, Default)]
struct Listed {
    /// What the source said last.
    wanted: BTreeSet<HostPort>,
    /// With what tells the task whether the source has this one.
    tasks: BTreeMap<HostPort, watch::Sender<bool>>,
}

type NewTasks = Vec<(HostPort, watch::Receiver<bool>)>;

impl Listed {
    /// The source has these addresses now. Returns the new ones, each with what says whether it is still listed.
    fn resolved(&mut self, addresses: BTreeSet<HostPort>) -> NewTasks {
        self.wanted = addresses;
        for (address, is_listed) in &self.tasks {
            is_listed.send_replace(self.wanted.contains(address));
        }
        self.missing()
    }

    /// A task has ended. Returns those that were waiting for this: the same address, which came back before, or one for
    /// which there was no room.
    fn ended(&mut self, address: &HostPort) -> NewTasks {
        self.tasks.remove(address);
        self.missing()
    }

    fn missing(&mut self) -> NewTasks {
        let mut new = Vec::new();
        for address in &self.wanted {
            if self.tasks.len() < MAX_ROUTERS && !self.tasks.contains_key(address) {
                let (tell, is_listed) = watch::channel(true);
                self.tasks.insert(address.clone(), tell);
                new.push((address.clone(), is_listed));
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u16) -> HostPort {
        format!("10.0.0.1:{}", 1000 + number).parse().unwrap()
    }

    #[test]
    fn an_address_has_one_task_until_that_ends() {
        let mut listed = Listed::default();
        let resolve =
            |listed: &mut Listed, numbers: &[u16]| listed.resolved(numbers.iter().copied().map(address).collect());
        let first = resolve(&mut listed, &[1, 2]);
        assert_eq!(first.iter().map(|(address, _)| address.clone()).collect::<Vec<_>>(), [address(1), address(2)]);
        assert!(resolve(&mut listed, &[1, 2]).is_empty());
        assert_eq!(resolve(&mut listed, &[2, 3]).len(), 1);
        let listed_now = || first.iter().map(|(_, is_listed)| *is_listed.borrow()).collect::<Vec<_>>();
        assert_eq!(listed_now(), [false, true]);
        // It is back, and its last session is not over: its task stays.
        assert!(resolve(&mut listed, &[1, 2, 3]).is_empty());
        assert_eq!(listed_now(), [true, true]);
        // It was just ending.
        let again = listed.ended(&address(1));
        assert!(again.len() == 1 && again[0].0 == address(1) && *again[0].1.borrow());
        assert!(resolve(&mut listed, &[1, 2, 3]).is_empty());
        let all: Vec<u16> = (1..=100).collect();
        assert_eq!(resolve(&mut listed, &all).len(), MAX_ROUTERS - 3, "bounded");
        // Whoever had no room gets that of one that is gone.
        assert!(resolve(&mut listed, &all[1..]).is_empty());
        assert_eq!(
            listed.ended(&address(1)).into_iter().map(|(address, _)| address).collect::<Vec<_>>(),
            [address(17)]
        );
    }
}
