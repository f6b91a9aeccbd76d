//! All connections of a node: how many may come, who was dialled, and what must happen when one ends. `acceptor` lets
//! newcomers in, `connection` moves the frames.
use std::collections::HashMap;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tandem_proto::HandoffId;

use super::config::TcpConfig;
use super::connection::Connection;
use super::sealing::Opener;
use crate::arena::Arena;
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::Secret;
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
    /// Connections by the address that was, or is being, dialled.
    pub(super) dialled: Mutex<HashMap<String, Dial>>,
    accepted: AtomicUsize,
    last_peer: AtomicU64,
    pub(super) closing: AtomicBool,
}

/// One for all who want the same address meanwhile.
pub(super) type Dial = Shared<BoxFuture<'static, Result<Arc<Connection>, TransferError>>>;

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

    pub(super) fn attach(self: &Arc<Self>, connection: Arc<Connection>) -> Attached {
        lock(&self.peers.0).insert(connection.peer(), connection.clone());
        if self.closing.load(Ordering::SeqCst) {
            connection.close();
        }
        Attached { table: self.clone(), connection, ended: None }
    }

    /// A connection on which the hand-off of `secret` may be opened; whether it was dialled for it, and so is its own.
    /// Whoever comes while another hand-off dials waits for that connection.
    pub(super) async fn connection_to(
        self: &Arc<Self>,
        address: String,
        secret: &Arc<Secret>,
    ) -> Result<(Arc<Connection>, bool), TransferError> {
        loop {
            let (dial, is_ours) = self.dial_of(&address, secret);
            match dial.await {
                // A refusal is of the hand-off that dialled, and says nothing of this one.
                Err(error) if !is_ours && error.refusal.is_some() => {}
                outcome => return Ok((outcome?, is_ours)),
            }
        }
    }

    /// What there is for an address, or is on its way; else dials. Whether it does.
    fn dial_of(self: &Arc<Self>, address: &str, secret: &Arc<Secret>) -> (Dial, bool) {
        let mut dialled = lock(&self.dialled);
        dialled.retain(|_, dial| match dial.peek() {
            Some(Ok(connection)) => !connection.is_closed(),
            Some(Err(_)) => false,
            None => true,
        });
        if let Some(dial) = dialled.get(address) {
            return (dial.clone(), false);
        }
        let (table, to, secret) = (self.clone(), address.to_owned(), secret.clone());
        let dialling = tokio::task::spawn_blocking(move || table.dial(&to, &secret));
        let dial = dialling
            .map(|dialled| dialled.unwrap_or_else(|_| Err(TransferError::peer_gone("connecting was interrupted"))))
            .boxed()
            .shared();
        dialled.insert(address.to_owned(), dial.clone());
        drop(dialled);
        // To its end, though all who wait for it should leave.
        tokio::spawn(dial.clone());
        (dial, true)
    }

    pub(super) fn dial(self: &Arc<Self>, address: &str, secret: &Secret) -> Result<Arc<Connection>, TransferError> {
        let resolved = address.to_socket_addrs()?.next();
        let resolved = resolved.ok_or_else(|| TransferError::new(TransferErrorKind::Io, "no such KV address"))?;
        let stream = TcpStream::connect_timeout(&resolved, self.config.connect_timeout)?;
        let arena = self.registry.arena().clone();
        let (connection, opener) = Connection::dial(stream, &self.config, self.new_peer(), arena, secret)?;
        let attached = self.attach(Arc::new(connection));
        let connection = attached.connection.clone();
        attached.start_reading(opener, None)?;
        Ok(connection)
    }

    pub(super) fn new_peer(&self) -> PeerId {
        PeerId(self.last_peer.fetch_add(1, Ordering::Relaxed))
    }
}

/// One of the places for accepted connections.
pub(super) struct Place(Arc<Table>);

impl Place {
    /// `None`: all are taken.
    pub(super) fn take(table: &Arc<Table>) -> Option<Self> {
        let place = Self(table.clone());
        (table.accepted.fetch_add(1, Ordering::SeqCst) < MAX_CONNECTIONS).then_some(place)
    }
}

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
    /// Reads in a thread of its own until the connection ends. The place of an accepted one is free from then on.
    ///
    /// # Errors
    /// Without a thread the connection ends at once.
    pub(super) fn start_reading(self, opener: Opener, place: Option<Place>) -> io::Result<()> {
        let read = move || {
            let _place = place;
            self.read(opener);
        };
        std::thread::Builder::new().name("kv-tcp-read".into()).spawn(read).map(|_| ())
    }

    /// Of its own, so that the thread's closure takes all of `self`: a copy of `ended` would not reach `drop`.
    fn read(mut self, opener: Opener) {
        self.ended = Some(self.connection.read_loop(opener, &self.table.registry, &self.table.pending));
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let (table, peer) = (&self.table, self.connection.peer());
        self.connection.close();
        lock(&table.peers.0).remove(&peer);
        let leads_here =
            |dial: &Dial| dial.peek().is_some_and(|dialled| matches!(dialled, Ok(it) if it.peer() == peer));
        lock(&table.dialled).retain(|_, dial| !leads_here(dial));
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
