//! The transports of one node, the fastest first. They share an arena and know nothing of each other: a grant is made
//! by one of them, and its ticket names it. Which one it is, the router says for each pair of nodes.
use std::sync::Arc;

use tandem_proto::v1::{self, transport_info::Reach};

use crate::counters::Counters;
use crate::error::{TransferError, TransferErrorKind};
use crate::incoming::Incoming;
use crate::outgoing::Outgoing;
use crate::terms::Grant;
use crate::transport::Transport;

/// See the head of this file. Never empty.
pub struct Transports {
    first: Offered,
    others: Vec<Offered>,
}

/// A transport, and where it reaches.
struct Offered {
    transport: Arc<dyn Transport>,
    info: v1::TransportInfo,
}

impl Offered {
    fn new(transport: Arc<dyn Transport>, reach: Option<Reach>) -> Self {
        let info = v1::TransportInfo { reach, ..transport.info() };
        Self { transport, info }
    }
}

impl Transports {
    /// The fastest first, each with what it reaches; `None`: all of its build.
    pub fn new(first: (Arc<dyn Transport>, Option<Reach>), others: Vec<(Arc<dyn Transport>, Option<Reach>)>) -> Self {
        let offered = |(transport, reach)| Offered::new(transport, reach);
        Self { first: offered(first), others: others.into_iter().map(offered).collect() }
    }

    /// What the router is told.
    pub fn infos(&self) -> Vec<v1::TransportInfo> {
        self.all().map(|offered| offered.info.clone()).collect()
    }

    /// Their names, for people.
    pub fn names(&self) -> String {
        self.all().map(|offered| offered.info.name.as_str()).collect::<Vec<_>>().join(",")
    }

    /// What all of them counted; of several the sums as they are now.
    pub fn counters(&self) -> Arc<Counters> {
        if self.others.is_empty() {
            return self.first.transport.counters();
        }
        let each: Vec<_> = self.all().map(|offered| offered.transport.counters()).collect();
        Arc::new(Counters::sum(each.iter().map(|counters| &**counters)))
    }

    /// Why one of them cannot move KV any more: the node must leave, since peers count on all that it has offered.
    pub fn failed(&self) -> Option<String> {
        self.all().find_map(|offered| offered.transport.failed())
    }

    /// Lets one sender fill the grant's blocks by the transport with this build id; empty: by the first.
    ///
    /// # Errors
    /// `Incompatible` for a build that this node does not have; those of [`Transport::accept`].
    pub fn accept(&self, build_id: &str, grant: Grant) -> Result<Incoming, TransferError> {
        let wanted = |offered: &&Offered| build_id.is_empty() || offered.info.build_id == build_id;
        let Some(offered) = self.all().find(wanted) else {
            let message = format!("this node has no KV transport {build_id:?}, but {}", self.builds());
            return Err(TransferError::new(TransferErrorKind::Incompatible, message));
        };
        offered.transport.accept(grant)
    }

    /// Connects to the ticket's receiver by the transport that the ticket names.
    ///
    /// # Errors
    /// Those of [`Transport::open`]: `Incompatible` where this node has no such transport.
    pub async fn open(&self, ticket: &v1::Ticket) -> Result<Outgoing, TransferError> {
        let theirs = ticket.transport.as_ref();
        let same = |offered: &&Offered| {
            theirs
                .is_some_and(|info| (&info.backend, &info.build_id) == (&offered.info.backend, &offered.info.build_id))
        };
        let kin = |offered: &&Offered| theirs.is_some_and(|info| info.backend == offered.info.backend);
        // The one of the same kind finds the words for a ticket that none of them can use, or else the first.
        let offered = self.all().find(same).or_else(|| self.all().find(kin)).unwrap_or(&self.first);
        offered.transport.open(ticket).await
    }

    fn all(&self) -> impl Iterator<Item = &Offered> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn builds(&self) -> String {
        self.all().map(|offered| offered.info.build_id.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// One that reaches all of its build.
impl<T: Transport + 'static> From<Arc<T>> for Transports {
    fn from(transport: Arc<T>) -> Self {
        Self::new((transport, None), Vec::new())
    }
}

impl From<Arc<dyn Transport>> for Transports {
    fn from(transport: Arc<dyn Transport>) -> Self {
        Self::new((transport, None), Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    use tandem_memory::HostMemory;
    use tandem_proto::{HandoffId, Incarnation};

    use super::*;
    use crate::arena::Arena;
    use crate::mem::{MemFaults, MemNetwork, MemTransport};
    use crate::tcp::{TcpConfig, TcpTransport};
    use crate::terms::Held;

    fn grant(id: u8) -> Grant {
        Grant {
            handoff: HandoffId([id; 16]),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: vec![0],
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: Duration::from_secs(60),
        }
    }

    fn both(network: &MemNetwork) -> Transports {
        let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
        let mem: Arc<dyn Transport> = MemTransport::new(network, arena.clone(), MemFaults::default());
        let tcp = TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena, TcpConfig::default()).expect("bind");
        Transports::new((mem, None), vec![(tcp, None)])
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_grant_is_of_the_transport_that_was_named_and_its_ticket_opens_that_one() {
        let network = MemNetwork::default();
        let (sender, receiver) = (both(&network), both(&network));
        assert_eq!(receiver.names(), "mem,tcp");
        let builds: Vec<String> = receiver.infos().into_iter().map(|info| info.build_id).collect();
        for (id, build) in (1..).zip(["", builds[0].as_str(), builds[1].as_str()]) {
            let incoming = receiver.accept(build, grant(id)).expect("accept");
            let ticket = incoming.ticket();
            let named = ticket.transport.clone().map(|info| info.build_id).unwrap_or_default();
            assert_eq!(named, if build.is_empty() { &builds[0] } else { build });
            let mut outgoing = sender.open(&ticket).await.expect("open");
            outgoing.push(0, &[0], Arc::new(())).await.expect("push");
            drop((outgoing, incoming));
        }
        assert_eq!(sender.counters().sent_bytes.load(Relaxed), 3 * 64, "of both");
    }

    #[tokio::test]
    async fn a_transport_that_is_not_there_is_refused_with_words() {
        let network = MemNetwork::default();
        let node = both(&network);
        let refused = node.accept("ucx-9/shm", grant(1)).map(|_| ()).expect_err("no such transport");
        assert_eq!(refused.kind, TransferErrorKind::Incompatible);
        assert!(refused.message.contains("ucx-9/shm") && refused.message.contains("tcp/"), "{refused}");
        let incoming = node.accept("", grant(2)).expect("accept");
        let mut ticket = incoming.ticket();
        ticket.transport.iter_mut().for_each(|info| info.build_id.push('x'));
        let refused = node.open(&ticket).await.map(|_| ()).expect_err("no such transport");
        assert_eq!(refused.kind, TransferErrorKind::Incompatible);
    }
}
