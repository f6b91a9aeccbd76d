//! A network inside one process: hand-offs between arenas by plain copies, with faults on request. The oracle that the
//! other backends are compared with; it keeps every rule, since the rules are not its own.
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_proto::{HandoffId, PROTOCOL_VERSION, v1};

use crate::arena::{Arena, Run};
use crate::counters::Counters;
use crate::error::TransferError;
use crate::outgoing::{PendingAnswers, SendLink};
use crate::registry::{PeerLink, Registry};
use crate::session::{DEFAULT_GRACE, PeerId};
use crate::transport::{BlockOwner, Faults, Grant, Incoming, Outgoing, Transport, check_ticket};
use crate::wire::{Answer, DataHeader, Header};

const SCRATCH_BYTES: usize = 64 << 10;

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
}

#[derive(Default)]
struct NetworkState {
    nodes: HashMap<u64, Weak<Node>>,
    links: HashMap<PeerId, Link>,
    last_id: u64,
}

/// One open hand-off: a "connection" of its own.
#[derive(Clone)]
struct Link {
    sender: Arc<Node>,
    receiver: Arc<Node>,
    /// Held while bytes are written; once it is set, none are any more.
    cut: Arc<Mutex<bool>>,
}

impl Link {
    /// Both ends learn that the other one is gone, after the last write.
    fn end(&self, peer: PeerId) {
        *self.cut.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.receiver.registry.fence(peer);
        self.sender.pending.peer_gone(peer, &gone());
    }
}

struct Node {
    registry: Arc<Registry>,
    pending: Arc<PendingAnswers>,
    dead: AtomicBool,
}

/// A node of a [`MemNetwork`].
pub struct MemTransport {
    network: MemNetwork,
    address: u64,
    node: Arc<Node>,
    faults: MemFaults,
}

impl MemTransport {
    /// Joins `network` with an arena.
    pub fn new(network: &MemNetwork, arena: Arc<Arena>, faults: MemFaults) -> Arc<Self> {
        let link = Box::new(network.clone());
        let node = Arc::new(Node {
            registry: Registry::new(arena, Arc::default(), link, faults.grace.unwrap_or(DEFAULT_GRACE)),
            pending: Arc::default(),
            dead: AtomicBool::new(false),
        });
        let mut state = network.lock();
        state.last_id += 1;
        let address = state.last_id;
        state.nodes.insert(address, Arc::downgrade(&node));
        drop(state);
        Arc::new(Self { network: network.clone(), address, node, faults })
    }

    /// A connection to the node at `address` on which a test says what it likes.
    ///
    /// # Errors
    /// `PeerGone` when nobody is there.
    pub fn raw_link(&self, address: &[u8]) -> Result<RawLink, TransferError> {
        Ok(RawLink { network: self.network.clone(), peer: self.network.connect(&self.node, address)? })
    }

    /// The process dies: nothing of it is heard again.
    pub fn kill(&self) {
        self.node.dead.store(true, Ordering::SeqCst);
        let mut state = self.network.lock();
        state.nodes.remove(&self.address);
        let touches = |link: &Link| Arc::ptr_eq(&link.sender, &self.node) || Arc::ptr_eq(&link.receiver, &self.node);
        let cut: Vec<_> = state.links.extract_if(|_, link| touches(link)).collect();
        drop(state);
        for (peer, link) in cut {
            link.receiver.registry.counters().lost_peers.fetch_add(1, Ordering::Relaxed);
            link.end(peer);
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
        v1::TransportInfo { backend: "mem".into(), name: "mem".into(), build_id }
    }

    fn address(&self) -> Vec<u8> {
        self.address.to_le_bytes().to_vec()
    }

    fn failed(&self) -> Option<String> {
        self.node.dead.load(Ordering::SeqCst).then(|| "the node was killed".to_owned())
    }

    fn counters(&self) -> Arc<Counters> {
        self.node.registry.counters().clone()
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        self.node.registry.accept(grant, self.info(), self.address())
    }

    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        async move {
            let arena = self.node.registry.arena();
            let checked = check_ticket(ticket, &self.info(), arena)?;
            let peer = self.network.connect(&self.node, &ticket.address)?;
            let link = MemLink { network: self.network.clone(), peer, arena: arena.clone(), faults: self.faults };
            // From here on the link's Drop disconnects.
            let answer = self.node.pending.register(peer, checked.handoff)?;
            Ok(Outgoing::new(Box::new(link), arena.clone(), self.counters(), checked, answer))
        }
        .boxed()
    }
}

impl MemNetwork {
    fn connect(&self, sender: &Arc<Node>, address: &[u8]) -> Result<PeerId, TransferError> {
        let gone = || TransferError::peer_gone("no KV node has this address");
        let address = u64::from_le_bytes(address.try_into().map_err(|_| gone())?);
        let mut state = self.lock();
        let receiver = state.nodes.get(&address).and_then(Weak::upgrade).ok_or_else(gone)?;
        if sender.dead.load(Ordering::SeqCst) {
            return Err(gone());
        }
        state.last_id += 1;
        let peer = PeerId(state.last_id);
        state.links.insert(peer, Link { sender: sender.clone(), receiver, cut: Arc::default() });
        Ok(peer)
    }

    fn link(&self, peer: PeerId) -> Result<Link, TransferError> {
        self.lock().links.get(&peer).cloned().ok_or_else(gone)
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerLink for MemNetwork {
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer) {
        if let Ok(link) = self.link(peer) {
            link.sender.pending.answer(peer, handoff, answer);
        }
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

struct MemLink {
    network: MemNetwork,
    peer: PeerId,
    arena: Arc<Arena>,
    faults: MemFaults,
}

impl MemLink {
    async fn copy(&mut self, range: DataHeader, runs: &[Run]) -> Result<(), TransferError> {
        if !self.faults.delay.is_zero() {
            tokio::time::sleep(self.faults.delay).await;
        }
        let Link { receiver, cut, .. } = self.network.link(self.peer)?;
        let faults = std::mem::take(&mut self.faults.send);
        let bytes: usize = runs.iter().map(|run| run.bytes).sum();
        let len = bytes - if faults.truncate_push { 8 } else { 0 };
        // A refusal reaches this hand-off through its answer.
        let Ok(claim) = receiver.registry.claim(self.peer, range, len as u64) else { return Ok(()) };
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut sent = 0;
        for to in claim.runs() {
            let mut offset = 0;
            while offset < to.bytes {
                let chunk = &mut scratch[..SCRATCH_BYTES.min(to.bytes - offset)];
                self.arena.gather(runs, sent, chunk);
                chunk[0] ^= u8::from(faults.flip_byte && sent == 0);
                let cut = cut.lock().unwrap_or_else(PoisonError::into_inner);
                if *cut {
                    return Err(gone());
                }
                claim.arena().write(to.at + offset, chunk);
                drop(cut);
                offset += chunk.len();
                sent += chunk.len();
            }
            tokio::task::yield_now().await;
        }
        claim.written();
        Ok(())
    }
}

impl SendLink for MemLink {
    fn max_range_bytes(&self) -> usize {
        1 << 20
    }

    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            let copied = self.copy(range, &runs).await;
            drop(owner);
            copied
        }
        .boxed()
    }

    fn keep_alive(&mut self, handoff: HandoffId) -> BoxFuture<'_, Result<(), TransferError>> {
        let link = self.network.link(self.peer);
        async move {
            link?.receiver.registry.keep_alive(self.peer, handoff);
            Ok(())
        }
        .boxed()
    }

    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            let receiver = self.network.link(self.peer)?.receiver;
            if !self.faults.drop_seal {
                receiver.registry.seal(self.peer, handoff, &payload);
            }
            Ok(())
        }
        .boxed()
    }

    fn cancel(&mut self, handoff: HandoffId) {
        if let Ok(link) = self.network.link(self.peer) {
            link.receiver.registry.cancelled_by(self.peer, handoff);
        }
    }
}

/// Frames as bytes, unchecked; closed when dropped. What cannot be read closes it too.
pub struct RawLink {
    network: MemNetwork,
    peer: PeerId,
}

impl RawLink {
    /// The receiver reads a frame.
    ///
    /// # Errors
    /// `PeerGone` when the link is closed.
    pub fn send(&self, header: &[u8], payload: &[u8]) -> Result<(), TransferError> {
        let Link { receiver, cut, .. } = self.network.link(self.peer)?;
        let registry = &receiver.registry;
        match Header::parse(header) {
            Some(Header::Data(range)) => {
                // A refusal needs no more: there is nothing to discard.
                let Ok(claim) = registry.claim(self.peer, range, payload.len() as u64) else { return Ok(()) };
                let (mut rest, cut) = (payload, cut.lock().unwrap_or_else(PoisonError::into_inner));
                for run in claim.runs().iter().take_while(|_| !*cut) {
                    let (now, later) = rest.split_at(run.bytes);
                    claim.arena().write(run.at, now);
                    rest = later;
                }
                claim.written();
            }
            Some(Header::Seal(handoff)) => registry.seal(self.peer, handoff, payload),
            Some(Header::Cancel(handoff)) if payload.is_empty() => registry.cancelled_by(self.peer, handoff),
            Some(Header::KeepAlive(handoff)) if payload.is_empty() => registry.keep_alive(self.peer, handoff),
            _ => {
                registry.violation();
                self.network.cut_off(self.peer);
            }
        }
        Ok(())
    }
}

impl Drop for RawLink {
    fn drop(&mut self) {
        self.network.cut_off(self.peer);
    }
}

impl Drop for MemLink {
    fn drop(&mut self) {
        self.network.cut_off(self.peer);
    }
}
