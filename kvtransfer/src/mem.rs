//! A network inside one process: hand-offs between arenas by plain copies, with faults on request. The oracle that the
//! other backends are compared with; it keeps every rule, since the rules are not its own.
//!
//! Each hand-off has a connection of its own ([`link`]), whose frames travel in order on a task that belongs to the
//! network, as a NIC's work belongs to no process. What may happen to them on the way is a [`Weather`]. Or all
//! hand-offs from one node to another share a connection ([`MemNetwork::sharing`]), as they do over tcp and UCX: what
//! ends it ends them all.
mod link;
mod raw;
mod weather;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_proto::{HandoffId, PROTOCOL_VERSION, v1};

use crate::arena::Arena;
use crate::counters::Counters;
use crate::error::{Refusal, TransferError};
use crate::handshake::{Hello, Nonces, Secret, Way, Welcome};
use crate::incoming::Incoming;
use crate::mutation::Mutation;
use crate::outgoing::{Outgoing, PendingAnswers};
use crate::registry::{Claim, PeerLink, Registry};
use crate::session::DEFAULT_GRACE;
use crate::terms::{Faults, Grant, PeerId};
use crate::transport::{Transport, read_ticket};
use crate::wire::Answer;
use link::MemLink;
pub use raw::RawLink;
pub use weather::{Fate, Frame, Weather, Window};

/// Faults of one node's sending side.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemFaults {
    /// Those that every backend has.
    pub send: Faults,
    /// Seals get lost: the hand-off never ends by itself.
    pub drop_seal: bool,
    /// Before every range.
    pub delay: Duration,
    /// Writers of an aborted hand-off have so long to end at this node; `None`: [`DEFAULT_GRACE`].
    pub grace: Option<Duration>,
}

/// The nodes that can reach each other.
#[derive(Clone, Default)]
pub struct MemNetwork {
    state: Arc<Mutex<NetworkState>>,
    /// `None`: frames arrive at once and unharmed.
    weather: Option<Arc<dyn Weather>>,
    /// Hand-offs of the same two nodes share a connection.
    shares: bool,
    mutation: Mutation,
}

#[derive(Default)]
struct NetworkState {
    nodes: BTreeMap<u64, Weak<Node>>,
    /// Ordered: who is told first of a death is the same in each run.
    links: BTreeMap<PeerId, Link>,
    last_id: u64,
}

/// An open connection.
#[derive(Clone)]
struct Link {
    sender: Arc<Node>,
    receiver: Arc<Node>,
    /// Hand-offs on it.
    users: usize,
    /// Held while bytes are written; once it is set, none are any more.
    cut: Arc<Mutex<bool>>,
}

impl Link {
    /// Writes a piece, unless the connection was cut.
    fn write(&self, claim: &Claim, at: usize, bytes: &[u8]) -> Result<(), TransferError> {
        let cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        if *cut {
            return Err(gone());
        }
        claim.arena().write(at, bytes);
        Ok(())
    }

    /// Both ends learn that the other one is gone, after the last write.
    fn end(&self, peer: PeerId) {
        *self.cut.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.receiver.registry.fence(peer);
        self.sender.pending.peer_gone(peer, &gone());
    }
}

struct Node {
    address: u64,
    registry: Arc<Registry>,
    pending: Arc<PendingAnswers>,
    dead: AtomicBool,
}

/// A node of a [`MemNetwork`].
pub struct MemTransport {
    network: MemNetwork,
    node: Arc<Node>,
    faults: MemFaults,
}

impl MemTransport {
    /// Joins `network` with an arena.
    pub fn new(network: &MemNetwork, arena: Arc<Arena>, faults: MemFaults) -> Arc<Self> {
        let grace = faults.grace.unwrap_or(DEFAULT_GRACE);
        let mut state = network.lock();
        state.last_id += 1;
        let address = state.last_id;
        let node = Arc::new(Node {
            address,
            registry: Registry::mutated(arena, Arc::default(), Box::new(network.clone()), grace, network.mutation),
            pending: Arc::default(),
            dead: AtomicBool::new(false),
        });
        state.nodes.insert(address, Arc::downgrade(&node));
        drop(state);
        Arc::new(Self { network: network.clone(), node, faults })
    }

    /// The grants that are out, and the hand-offs in quarantine, for tests.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.node.registry
    }

    /// A connection to the node at `address` on which a test says what it likes.
    ///
    /// # Errors
    /// `PeerGone` when nobody is there.
    pub fn raw_link(&self, address: &[u8]) -> Result<RawLink, TransferError> {
        Ok(RawLink { network: self.network.clone(), peer: self.network.connect(&self.node, address)? })
    }

    /// One that has said the ticket's hello, and was welcomed.
    ///
    /// # Errors
    /// As [`Transport::open`].
    pub fn opened_link(&self, ticket: &v1::Ticket) -> Result<RawLink, TransferError> {
        let link = self.raw_link(&ticket.address)?;
        self.network.introduce(link.peer, &Secret::of(ticket)?)?;
        Ok(link)
    }

    /// The process dies: nothing of it is heard again.
    pub fn kill(&self) {
        self.node.dead.store(true, Ordering::SeqCst);
        let mut state = self.network.lock();
        state.nodes.remove(&self.node.address);
        let touches = |link: &Link| Arc::ptr_eq(&link.sender, &self.node) || Arc::ptr_eq(&link.receiver, &self.node);
        let cut: Vec<_> = state.links.iter().filter(|(_, link)| touches(link)).map(|(peer, _)| *peer).collect();
        drop(state);
        for peer in cut {
            self.network.lose(peer);
        }
    }
}

impl Drop for MemTransport {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Transport for MemTransport {
    fn info(&self) -> v1::TransportInfo {
        let build_id = format!("mem/{PROTOCOL_VERSION}");
        v1::TransportInfo { backend: "mem".into(), name: "mem".into(), build_id, reach: None }
    }

    fn address(&self) -> Vec<u8> {
        self.node.address.to_le_bytes().to_vec()
    }

    fn failed(&self) -> Option<String> {
        self.node.dead.load(Ordering::SeqCst).then(|| "the node was killed".to_owned())
    }

    fn counters(&self) -> Arc<Counters> {
        self.node.registry.counters().clone()
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        Incoming::accept(&self.node.registry, grant, self.info(), self.address())
    }

    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        async move {
            let arena = self.node.registry.arena();
            let address = |bytes: &[u8]| Ok(bytes.to_vec());
            let (checked, secret, address) = read_ticket(ticket, &self.info(), arena, &self.counters(), address)?;
            let peer = self.network.connect(&self.node, &address)?;
            // From here on the link's end disconnects.
            let link = MemLink::open(self.network.clone(), peer, checked.handoff, arena.clone(), self.faults);
            self.network.introduce(peer, &secret)?;
            let answer = self.node.pending.register(peer, checked.handoff)?;
            Ok(Outgoing::new(Box::new(link), arena.clone(), self.counters(), checked, answer))
        }
        .boxed()
    }
}

impl MemNetwork {
    /// A network whose frames live through `weather`.
    pub fn under(weather: Arc<dyn Weather>) -> Self {
        Self { weather: Some(weather), ..Self::default() }
    }

    /// The same with a bug in each of its receivers.
    #[doc(hidden)]
    pub fn mutated(self, mutation: Mutation) -> Self {
        Self { mutation, ..self }
    }

    /// The same where all hand-offs from one node to another share a connection.
    pub fn sharing(self, shares: bool) -> Self {
        Self { shares, ..self }
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.lock().links.len()
    }

    fn connect(&self, sender: &Arc<Node>, address: &[u8]) -> Result<PeerId, TransferError> {
        let gone = || TransferError::peer_gone("no KV node has this address");
        let address = u64::from_le_bytes(address.try_into().map_err(|_| gone())?);
        let mut state = self.lock();
        let receiver = state.nodes.get(&address).and_then(Weak::upgrade).ok_or_else(gone)?;
        if sender.dead.load(Ordering::SeqCst) {
            return Err(gone());
        }
        let same = |link: &Link| link.sender.address == sender.address && link.receiver.address == address;
        if let Some((peer, link)) = state.links.iter_mut().find(|(_, link)| self.shares && same(link)) {
            link.users += 1;
            return Ok(*peer);
        }
        state.last_id += 1;
        let peer = PeerId(state.last_id);
        state.links.insert(peer, Link { sender: sender.clone(), receiver, users: 1, cut: Arc::default() });
        Ok(peer)
    }

    /// A hand-off is over at its sender; the last one of a connection closes it.
    fn leave(&self, peer: PeerId, handoff: HandoffId) {
        let mut state = self.lock();
        let Some(link) = state.links.get_mut(&peer) else { return };
        link.users -= 1;
        if link.users == 0 {
            drop(state);
            return self.cut_off(peer);
        }
        let registry = link.receiver.registry.clone();
        drop(state);
        // What the end of its connection would say, had it one of its own.
        registry.cancelled_by(peer, handoff);
    }

    /// Hello and welcome over a new connection; they are subject to no weather.
    fn introduce(&self, peer: PeerId, secret: &Secret) -> Result<(), TransferError> {
        let nonce = rand::random();
        let welcome = self.hello(peer, &secret.hello(nonce, &[]))?;
        let welcome = Welcome::parse(&welcome).filter(|welcome| secret.welcomed(Way::Sent, welcome, nonce, &[]));
        welcome.map(|_| ()).ok_or_else(|| Refusal::Unauthenticated.into())
    }

    /// The receiver's half: reads a hello, and answers with the welcome.
    fn hello(&self, peer: PeerId, payload: &[u8]) -> Result<Vec<u8>, Refusal> {
        let registry = self.link(peer).map_err(|_| Refusal::PeerLost)?.receiver.registry.clone();
        let Some(hello) = Hello::parse(payload) else {
            registry.violation();
            return Err(Refusal::Malformed);
        };
        let authenticated = registry.authenticate(&hello)?;
        registry.open(peer, &authenticated)?;
        let nonces = Nonces { sender: hello.nonce, receiver: rand::random() };
        Ok(authenticated.secret().welcome(Way::Sent, nonces, hello.about, &[]))
    }

    fn link(&self, peer: PeerId) -> Result<Link, TransferError> {
        self.lock().links.get(&peer).cloned().ok_or_else(gone)
    }

    /// The connection is lost for both ends, by nobody's wish.
    fn lose(&self, peer: PeerId) {
        let link = self.lock().links.remove(&peer);
        if let Some(link) = link {
            link.receiver.registry.counters().lost_peers.fetch_add(1, Ordering::Relaxed);
            link.end(peer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerLink for MemNetwork {
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer) {
        let Ok(link) = self.link(peer) else { return };
        let Some(weather) = self.weather.clone() else {
            link.sender.pending.answer(peer, handoff, answer);
            return;
        };
        let (network, from, to) = (self.clone(), link.receiver.address, link.sender.address);
        tokio::spawn(async move {
            match weather.travel(from, to, Frame::Answer).await {
                Fate::Lost => {}
                Fate::Severed => network.lose(peer),
                // A connection that ended meanwhile carries no answer.
                Fate::Arrived { .. } => {
                    if network.link(peer).is_ok() {
                        link.sender.pending.answer(peer, handoff, answer);
                    }
                }
            }
        });
    }

    fn cut_off(&self, peer: PeerId) {
        let link = self.lock().links.remove(&peer);
        if let Some(link) = link {
            link.end(peer);
        }
    }
}

fn gone() -> TransferError {
    TransferError::peer_gone("the KV peer is gone")
}
