//! The backend for hosts without UCX: one TCP connection per pair of nodes, shared by all their hand-offs, with two
//! blocking threads each (`connection.rs`). Blocking threads, because a KV stream is a long copy: a reactor would add a
//! wake-up to every buffer.
//!
//! On the socket a frame is its head, the head's tag (16 bytes) and the payload. The head is the 32-byte header of
//! `wire.rs` and the payload's length (u64, little endian). The first frames are the hello and the welcome, without
//! tags (`greeting`): they prove that both ends have the key of the hand-off that the connection is dialled for. Keys
//! for the tags come from it, and other hand-offs join by a proof of their own. So each frame is bound to its
//! connection, and each hand-off to a holder of its key (`sealing`); with [`Protection::Encrypted`] nothing but heads
//! can be read on the way. Whatever cannot be read closes the connection and is counted.
//!
//! `acceptor` lets newcomers in, `table` has all connections, `connection` is one socket, `reader` and `writer` are its
//! halves, `queue` is what waits to leave, `stranger` speaks for tests.
mod acceptor;
mod config;
mod connection;
mod frame;
mod greeting;
mod queue;
mod reader;
mod sealing;
#[doc(hidden)]
pub mod stranger;
mod table;
mod writer;

use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_proto::{HandoffId, v1};

pub use self::config::TcpConfig;
use self::connection::Connection;
pub use self::sealing::Protection;
use self::table::Table;
use crate::arena::{Arena, Run};
use crate::counters::Counters;
use crate::error::{AddressError, TransferError, TransferErrorKind};
use crate::incoming::Incoming;
use crate::outgoing::{Outgoing, SendLink};
use crate::terms::{BlockOwner, Faults, Grant};
use crate::transport::{Transport, read_ticket};
use crate::wire::{DataHeader, Header};

/// Of `host:port`: a name has up to 253 bytes.
const MAX_ADDRESS_BYTES: usize = 260;
/// Longer pushes are cut, so that hand-offs on one connection take turns.
const MAX_RANGE_BYTES: usize = 4 << 20;

/// A listening node.
pub struct TcpTransport {
    table: Arc<Table>,
    listener: TcpListener,
    accepting: JoinHandle<()>,
    address: SocketAddr,
}

impl TcpTransport {
    /// Listens on `address` (port 0: a free one), which peers must be able to reach as it is unless the configuration
    /// advertises another one.
    ///
    /// # Errors
    /// `Io` when the address is taken, not ours, or stands for all addresses.
    pub fn bind(address: SocketAddr, arena: Arc<Arena>, config: TcpConfig) -> Result<Arc<Self>, TransferError> {
        let io = |message| TransferError::new(TransferErrorKind::Io, message);
        if address.ip().is_unspecified() && config.advertise.is_none() {
            return Err(io(format!("KV over TCP cannot listen on {address}: name the address that peers connect to")));
        }
        let listener = TcpListener::bind(address)
            .map_err(|error| io(format!("KV over TCP cannot listen on {address}: {error}")))?;
        let address = listener.local_addr()?;
        let table = Table::new(arena, config);
        let (accepting, listening) = (table.clone(), listener.try_clone()?);
        let accepting = std::thread::Builder::new().name("kv-tcp-accept".into()).spawn(move || {
            if let Err(error) = acceptor::run(accepting, listening) {
                tracing::error!(%error, "cannot accept KV connections over TCP");
            }
        })?;
        Ok(Arc::new(Self { table, listener, accepting, address }))
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.table.closing.store(true, Ordering::SeqCst);
        // Wakes the accepting thread (Linux: accept returns EINVAL).
        let _ = socket2::SockRef::from(&self.listener).shutdown(Shutdown::Both);
        self.table.close_all();
    }
}

impl Transport for TcpTransport {
    fn info(&self) -> v1::TransportInfo {
        let build_id = self.table.config.build_id();
        v1::TransportInfo { backend: "tcp".into(), name: "tcp".into(), build_id, reach: None }
    }

    fn address(&self) -> Vec<u8> {
        self.table.config.advertise.clone().unwrap_or_else(|| self.address.to_string()).into_bytes()
    }

    fn counters(&self) -> Arc<Counters> {
        self.table.registry.counters().clone()
    }

    fn failed(&self) -> Option<String> {
        self.accepting.is_finished().then(|| "TCP: the accepting thread has ended".to_owned())
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        Incoming::accept(&self.table.registry, grant, self.info(), self.address())
    }

    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        async move {
            let (arena, counters) = (self.table.registry.arena(), self.counters());
            let (checked, secret, address) = read_ticket(ticket, &self.info(), arena, &counters, socket_address)?;
            let secret = Arc::new(secret);
            let (connection, is_dialled) = self.table.connection_to(address, &secret).await?;
            let answer = self.table.pending.register(connection.peer(), checked.handoff)?;
            if !is_dialled {
                connection.join(checked.handoff, &secret);
            }
            // Lost between connecting and registering: nobody would tell this hand-off.
            if connection.is_closed() {
                return Err(TransferError::peer_gone("the KV receiver hung up"));
            }
            let link = TcpLink { connection, faults: self.table.config.faults };
            Ok(Outgoing::new(Box::new(link), arena.clone(), self.counters(), checked, answer))
        }
        .boxed()
    }
}

struct TcpLink {
    connection: Arc<Connection>,
    /// Not made yet.
    faults: Faults,
}

impl SendLink for TcpLink {
    fn max_range_bytes(&self) -> usize {
        MAX_RANGE_BYTES
    }

    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            self.connection.queue().send_data(range, runs, owner, self.faults).await?;
            self.faults = Faults::default();
            Ok(())
        }
        .boxed()
    }

    /// A connection that has ended says so by its answer.
    fn keep_alive(&mut self, handoff: HandoffId) -> BoxFuture<'_, Result<(), TransferError>> {
        self.connection.queue().send_now(Header::KeepAlive(handoff));
        std::future::ready(Ok(())).boxed()
    }

    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>> {
        self.connection.queue().send_seal(handoff, payload).boxed()
    }

    fn cancel(&mut self, handoff: HandoffId) {
        self.connection.queue().cancel(handoff);
    }
}

/// Host and port of a ticket. Names are looked up, so nothing else is.
fn socket_address(bytes: &[u8]) -> Result<String, TransferError> {
    let most = MAX_ADDRESS_BYTES;
    let refused = match std::str::from_utf8(bytes) {
        Ok("") => AddressError::Empty,
        _ if bytes.len() > most => AddressError::TooLong { bytes: bytes.len(), most },
        Ok(text) if text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) => {
            return Ok(text.to_owned());
        }
        _ => AddressError::Magic,
    };
    Err(refused.into())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};

    use tandem_memory::HostMemory;
    use tandem_proto::Incarnation;

    use super::table::lock;
    use super::*;
    use crate::handshake::Secret;
    use crate::terms::Held;
    use crate::wire::Units;

    const LEASE: Duration = Duration::from_secs(60);
    const PROMPT: Duration = Duration::from_secs(10);

    fn bind() -> Arc<TcpTransport> {
        let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
        TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena, TcpConfig::default()).expect("bind")
    }

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
            lease: LEASE,
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_panic_of_the_writing_thread_ends_its_connection_and_nothing_else() {
        let (sender, receiver) = (bind(), bind());
        let incoming = receiver.accept(grant(1)).expect("accept");
        let ticket = incoming.ticket();
        let outgoing = sender.open(&ticket).await.expect("open");
        let connection = lock(&sender.table.peers.0).values().next().cloned().expect("dialled");
        // Blocks that are not in the arena: the common code checks them before a backend sees them.
        let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::ALL };
        let run = Run { at: 99 * 64, bytes: 64 };
        let queued = connection.queue().send_data(range, vec![run], Arc::new(()), Faults::default()).await;
        assert_eq!(queued, Ok(()));
        let start = Instant::now();
        let seal = crate::seal_for(&sender.table.registry.arena().clone(), &[0], &ticket, 1, vec![5.into()]);
        let told = tokio::time::timeout(PROMPT, outgoing.seal(seal)).await.expect("before its lease");
        assert_eq!(told.map(|_| ()).map_err(|error| error.kind), Err(TransferErrorKind::PeerGone));
        assert!(connection.is_closed() && start.elapsed() < PROMPT);
        // The next hand-off dials anew.
        let incoming = receiver.accept(grant(2)).expect("accept");
        let ticket = incoming.ticket();
        let mut outgoing = sender.open(&ticket).await.expect("open");
        outgoing.push(0, &[0], Arc::new(())).await.expect("push");
        let seal = crate::seal_for(&sender.table.registry.arena().clone(), &[0], &ticket, 1, vec![5.into()]);
        let expected = crate::Expected { prompt_tokens: 1, sequence_hashes: vec![5.into()] };
        let (receipt, verified) = tokio::join!(outgoing.seal(seal), incoming.verified(expected));
        assert_eq!(receipt.expect("receipt").blocks, verified.expect("verified").blocks);
    }

    #[tokio::test]
    async fn a_connection_that_nobody_reads_is_forgotten() {
        let (sender, receiver) = (bind(), bind());
        let incoming = receiver.accept(grant(1)).expect("accept");
        let secret = Secret::of(&incoming.ticket()).expect("key");
        let connection = sender.table.dial(&receiver.address.to_string(), &secret).expect("dial");
        let attached = sender.table.attach(connection.clone());
        drop(attached);
        assert!(connection.is_closed());
        assert!(!lock(&sender.table.peers.0).contains_key(&connection.peer()));
    }
}
