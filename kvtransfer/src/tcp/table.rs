//! All connections of a node: who may come, who was dialled, and what must happen when one ends. `connection.rs` moves
//! the frames.
use std::collections::HashMap;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tandem_proto::HandoffId;

use super::TcpConfig;
use super::connection::Connection;
use crate::arena::Arena;
use crate::error::{TransferError, TransferErrorKind};
use crate::outgoing::PendingAnswers;
use crate::registry::{PeerLink, Registry};
use crate::terms::PeerId;
use crate::wire::{Answer, Header};

/// Accepted connections at once, those without a hello included.
const MAX_CONNECTIONS: usize = 256;

/// What the threads share.
pub(super) struct Table {
    pub(super) config: TcpConfig,
    pub(super) registry: Arc<Registry>,
    pub(super) pending: Arc<PendingAnswers>,
    pub(super) peers: Peers,
    /// Dialled connections by address.
    pub(super) dialled: Mutex<HashMap<String, Arc<Connection>>>,
    accepted: AtomicUsize,
    last_peer: AtomicU64,
    pub(super) closing: AtomicBool,
}

#[derive(Clone, Default)]
pub(super) struct Peers(pub(super) Arc<Mutex<HashMap<PeerId, Arc<Connection>>>>);

impl Table {
    pub(super) fn new(arena: Arc<Arena>, config: TcpConfig) -> Arc<Self> {
        let peers = Peers::default();
        let registry = Registry::new(arena, Arc::default(), Box::new(peers.clone()), config.grace);
        Arc::new(Self {
            config,
            registry,
            pending: Arc::default(),
            peers,
            dialled: Mutex::default(),
            accepted: AtomicUsize::new(0),
            last_peer: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        })
    }

    /// At the end of the transport; those that come later see that it is closing.
    pub(super) fn close_all(&self) {
        lock(&self.peers.0).values().for_each(|connection| connection.close());
    }

    pub(super) fn accept_loop(self: Arc<Self>, listener: &TcpListener) {
        while !self.closing.load(Ordering::SeqCst) {
            let Ok((stream, _)) = listener.accept() else {
                // Out of descriptors, or shut down: the loop's condition tells; do not spin on the former.
                std::thread::park_timeout(Duration::from_millis(10));
                continue;
            };
            if self.accepted.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
                self.accepted.fetch_sub(1, Ordering::SeqCst);
                self.registry.violation();
                continue;
            }
            let place = Place(self.clone());
            // No thread: the socket closes and the place is free, as both are dropped.
            let _ = std::thread::Builder::new().name("kv-tcp-read".into()).spawn(move || place.0.serve(stream));
        }
    }

    /// Hello, then reads until the connection ends.
    fn serve(self: &Arc<Self>, stream: TcpStream) {
        match Connection::accept(stream, &self.config, self.new_peer(), self.registry.arena().clone()) {
            Ok(connection) => self.attach(Arc::new(connection)).read(),
            Err(error) => {
                tracing::warn!("KV connection refused: {error}");
                self.registry.violation();
            }
        }
    }

    pub(super) fn attach(self: &Arc<Self>, connection: Arc<Connection>) -> Attached {
        lock(&self.peers.0).insert(connection.peer(), connection.clone());
        if self.closing.load(Ordering::SeqCst) {
            connection.close();
        }
        Attached { table: self.clone(), connection, ended: None }
    }

    pub(super) async fn connection_to(self: &Arc<Self>, address: String) -> Result<Arc<Connection>, TransferError> {
        if let Some(connection) = lock(&self.dialled).get(&address).filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let (table, to) = (self.clone(), address.clone());
        let dialled = tokio::task::spawn_blocking(move || table.dial(&to)).await;
        let connection = dialled.unwrap_or_else(|_| Err(TransferError::peer_gone("connecting was interrupted")))?;
        // Two hand-offs may have dialled at once: both connections work, later ones use the last.
        lock(&self.dialled).insert(address, connection.clone());
        Ok(connection)
    }

    pub(super) fn dial(self: &Arc<Self>, address: &str) -> Result<Arc<Connection>, TransferError> {
        let peer = self.new_peer();
        let resolved = address.to_socket_addrs()?.next();
        let resolved = resolved.ok_or_else(|| TransferError::new(TransferErrorKind::Io, "no such KV address"))?;
        let stream = TcpStream::connect_timeout(&resolved, self.config.connect_timeout)?;
        let connection = Arc::new(Connection::dial(stream, &self.config, peer, self.registry.arena().clone())?);
        let attached = self.attach(connection.clone());
        std::thread::Builder::new().name("kv-tcp-read".into()).spawn(move || attached.read())?;
        Ok(connection)
    }

    fn new_peer(&self) -> PeerId {
        PeerId(self.last_peer.fetch_add(1, Ordering::Relaxed))
    }
}

/// One of the places for accepted connections.
struct Place(Arc<Table>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.accepted.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A connection that hand-offs may use, and what must happen when it ends, however its reading thread does: by the end
/// of the connection, by a panic, or by never having started. Else hand-offs would go on using it, until their leases
/// end.
pub(super) struct Attached {
    table: Arc<Table>,
    connection: Arc<Connection>,
    ended: Option<TransferError>,
}

impl Attached {
    /// Reads until the connection ends.
    fn read(mut self) {
        self.ended = Some(self.connection.read_loop(&self.table.registry, &self.table.pending));
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let (table, peer) = (&self.table, self.connection.peer());
        self.connection.close();
        lock(&table.peers.0).remove(&peer);
        lock(&table.dialled).retain(|_, dialled| dialled.peer() != peer);
        table.registry.counters().lost_peers.fetch_add(1, Ordering::Relaxed);
        // The reading thread alone writes for this peer, and it is done.
        table.registry.fence(peer);
        let why = self.ended.as_ref().map_or("its reading thread has ended", |ended| &ended.message);
        table.pending.peer_gone(peer, &TransferError::peer_gone(format!("the KV peer is gone: {why}")));
    }
}

impl PeerLink for Peers {
    fn answer(&self, peer: PeerId, handoff: HandoffId, answer: Answer) {
        let connection = lock(&self.0).get(&peer).cloned();
        if let Some(connection) = connection {
            connection.queue().send_now(Header::Answer(handoff, answer));
        }
    }

    /// Its reading thread, which alone writes for it, ends at once: `Attached` fences.
    fn cut_off(&self, peer: PeerId) {
        let connection = lock(&self.0).get(&peer).cloned();
        if let Some(connection) = connection {
            connection.close();
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
