//! TCP ports that anybody may connect to, with bounds: so many connections at once, so long without a word. A silent
//! socket costs a descriptor, and a process without descriptors serves nobody. Knows no route and no message.
//!
//! - [`Port`]: a listener within its limits. [`Places`]: who of its connections goes when there are too many.
//! - [`serve_http`]: HTTP/1.1 and HTTP/2 on a port. [`serve_grpc`]: gRPC on one.
//! - [`JoinToken`], [`JoinGuard`]: the secret of a cluster's own processes, and who asks for it; [`JoinTokens`]: as its
//!   file is read again.
//! - [`Tls`]: certificates of a port for clients; a handshake is part of a connection's first bytes. [`ClientName`]:
//!   whom a client's own certificate is for.
//! - [`NodeTls`]: certificates among the cluster's own processes, who know each other by [`PeerName`].
//! - [`pem`]: what the files of all of them hold.
#![forbid(unsafe_code)]

mod client_name;
mod connection;
mod expiry;
mod followed;
mod gathering;
mod grpc;
mod held;
mod http;
mod join;
mod join_token;
mod join_tokens;
mod life_secret;
mod node_tls;
mod node_tls_files;
mod peer_name;
pub mod pem;
mod places;
mod refusals;
mod socket;
mod stream;
mod throttle;
mod tls;
mod verify;
mod who;

use std::io;
use std::time::Duration;

use futures::stream::unfold;
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::Connected;

use crate::client_name::Client;
pub use crate::client_name::ClientName;
use crate::connection::Connection;
pub use crate::grpc::{CLIENT_STREAMS, KeepAlive, NODE_STREAMS, serve_grpc};
pub use crate::http::serve_http;
pub use crate::join::{JOIN_HEADER, JoinGuard, Joined};
pub use crate::join_token::{JoinToken, JoinTokenError};
pub use crate::join_tokens::JoinTokens;
pub use crate::life_secret::{LIFE_SECRET_BYTES, MAX_ENDED_LIVES, is_life_secret, life_digest};
use crate::node_tls::Caller;
pub use crate::node_tls::NodeTls;
pub use crate::node_tls_files::NodeTlsFiles;
pub use crate::peer_name::{PeerName, PeerRole, Wanted};
pub use crate::pem::TlsError;
pub use crate::places::{Occupancy, Places};
use crate::socket::Socket;
use crate::stream::Stream;
use crate::throttle::Throttle;
pub use crate::tls::{Tls, TlsFiles};
use crate::who::Who;

/// Wait after an `accept` that failed for a reason of ours, such as no descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Kept from the ports of a process.
const KEPT_DESCRIPTORS: u64 = 512;
/// The system's usual soft limit, where it does not say which one it has.
const USUAL_DESCRIPTORS: u64 = 1024;
/// A host that vanished is noticed after the first and three times the second.
const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// A client that takes nothing of what it asked for, where all of that is with the system; see [`Limits::patience`].
const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// What waits in the system for a client to take it. A write goes on when half of that has gone: with the system's own
/// 4 MB, a slow reader of a long answer would seem to take nothing for minutes.
const UNSENT_BYTES: u32 = 128 << 10;

/// Bounds of one port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open at once, at least 1. Who comes later takes the place of one that is idle or half-open; see [`Places`].
    pub connections: usize,
    /// For the first bytes of a connection, for the head of every HTTP/1.1 request, between two of them, and for the
    /// answer to a ping over HTTP/2.
    pub silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 4096, silence: Duration::from_secs(30) }
    }
}

impl Limits {
    /// How long a client may take nothing of what waits to be written. Twice its silence: a router's answer that is not
    /// read ends before that by default, and is counted as such.
    fn patience(&self) -> Duration {
        2 * self.silence
    }
}

/// A listener within its limits.
pub struct Port {
    listener: TcpListener,
    limits: Limits,
    places: Places,
    within: Within,
    joins_frames: bool,
}

/// What the bytes of a port's connections are within.
#[derive(Clone, Default)]
enum Within {
    #[default]
    Nothing,
    Tls(Tls),
    ClusterTls(NodeTls),
}

impl Within {
    /// A connection's other end, of which the handshake will tell.
    fn who(&self) -> Who {
        match self {
            Self::Nothing => Who::Anybody,
            Self::Tls(tls) if tls.asks_clients() => Who::Client(Client::default()),
            Self::Tls(_) => Who::Anybody,
            Self::ClusterTls(_) => Who::Process(Caller::default()),
        }
    }

    /// The Unix second at which the port's certificate ends, if it has one.
    fn not_after(&self) -> Option<u64> {
        match self {
            Self::Nothing => None,
            Self::Tls(tls) => tls.not_after(),
            Self::ClusterTls(tls) => tls.not_after(),
        }
    }
}

impl Port {
    /// Of a bound listener.
    pub fn new(listener: TcpListener, limits: Limits) -> Self {
        Self { listener, limits, places: Places::new(limits.connections), within: Within::Nothing, joins_frames: false }
    }

    /// The same, within TLS if there is one.
    pub fn secured(self, tls: Option<Tls>) -> Self {
        Self { within: tls.map_or(Within::Nothing, Within::Tls), ..self }
    }

    /// The same, for the cluster's own processes alone, if they have certificates.
    pub fn of_cluster(self, tls: Option<NodeTls>) -> Self {
        Self { within: tls.map_or(Within::Nothing, Within::ClusterTls), ..self }
    }

    /// The same, for gRPC messages that nearly all have less than 1,000 bytes. Such frames are copied together, and the
    /// last message of a call leaves with its trailers in one write. Larger ones take two writes.
    pub fn of_short_frames(self) -> Self {
        Self { joins_frames: true, ..self }
    }

    /// The same, where anybody may ask: connections that cause many errors are served one after the other, so that the
    /// others are served meanwhile. Called within the runtime that serves it.
    pub fn throttling_errors(self) -> Self {
        let threads = tokio::runtime::Handle::current().metrics().num_workers();
        Self { places: self.places.throttling(Throttle::new(threads)), ..self }
    }

    /// Who has a place, and until when its certificate is good, for metrics.
    pub fn places(&self) -> Places {
        self.places.within(self.within.clone())
    }

    /// What a tonic server accepts from: every connection must begin with HTTP/2's preface in time. After that the
    /// server's own keep-alive pings find the dead.
    fn incoming(self) -> impl futures::Stream<Item = io::Result<Connection>> {
        unfold(self, |port| async move {
            let connection = port.accept(&["h2"]).await.greeted_within(port.limits.silence);
            Some((Ok(connection), port))
        })
    }

    /// The next connection that gets a place; within TLS it speaks one of `protocols`.
    async fn accept(&self, protocols: &[&str]) -> Connection {
        loop {
            // Who came before reads its first bytes before others come, who may take its place.
            tokio::task::yield_now().await;
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                // The client's, gone before it was accepted.
                Err(error) if is_of_the_peer(&error) => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // Refused: dropping the socket closes it, which costs less than a word about it.
            let Some(place) = self.places.enter() else { continue };
            if let Err(error) = configure(&stream) {
                tracing::debug!(%error, "socket options");
            }
            let peer = stream.connect_info();
            let who = self.within.who();
            let socket = Socket::new(stream, self.limits.patience());
            let connection = Connection::new(self.secure(socket, protocols, &who), peer, place);
            return connection.called_by(who).joining_frames(self.joins_frames);
        }
    }

    fn secure(&self, socket: Socket, protocols: &[&str], who: &Who) -> Stream {
        match &self.within {
            Within::Nothing => Stream::Plain(socket),
            Within::Tls(tls) => Stream::secured(socket, tls.speaking(protocols), who.clone()),
            Within::ClusterTls(tls) => Stream::of_cluster(socket, tls.clone(), who.clone()),
        }
    }
}

/// Threads of a reactor that does nothing but wait for sockets: one for four cores. On few cores a second one is woken
/// to look for work that the first is at already.
pub fn reactor_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 4).max(1)
}

/// Lets the process open as many descriptors as the system allows it: the usual soft limit of 1,024 is less than one
/// full port. Returns how many it may open now.
pub fn raise_descriptor_limit() -> u64 {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raise = || {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    };
    if let Err(error) = raise() {
        tracing::warn!(%error, "the limit of open descriptors stays as it is");
    }
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL_DESCRIPTORS, |(soft, _)| soft)
}

/// The connections that each of `ports` may have of the `wanted` ones where the process may open so many `descriptors`:
/// a part of these is kept for files and for connections of its own. Says so in the log if they are fewer.
pub fn connections_within(descriptors: u64, ports: usize, wanted: usize) -> usize {
    let kept = KEPT_DESCRIPTORS.min(descriptors / 2);
    let most = usize::try_from(descriptors - kept).unwrap_or(usize::MAX) / ports.max(1);
    if wanted > most {
        tracing::warn!(
            wanted,
            most,
            descriptors,
            "fewer connections a port than wanted: the process may open no more descriptors"
        );
    }
    wanted.min(most).max(1)
}

fn configure(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive.with_retries(3))?;
    socket.set_tcp_user_timeout(Some(STALL_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(UNSENT_BYTES)
}

fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::io::AsyncWrite;

    use super::*;

    /// h2 asks for no more than that to copy frames together, and hyper and tonic hand it on.
    #[tokio::test]
    async fn only_ports_of_short_frames_write_no_vectors() {
        for short in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let port = Port::new(listener, Limits::default());
            let port = if short { port.of_short_frames() } else { port };
            let mut incoming = Box::pin(port.incoming());
            let (client, connection) = tokio::join!(TcpStream::connect(address), incoming.next());
            assert_eq!(connection.unwrap().unwrap().is_write_vectored(), !short);
            drop(client);
        }
    }

    #[test]
    fn ports_share_the_descriptors() {
        for (descriptors, ports, wanted, gets) in [
            (1 << 20, 2, 4096, 4096),
            (9000, 2, 4096, 4096),
            (8192, 2, 4096, 3840),
            (1024, 2, 4096, 256),
            (100, 2, 4096, 25),
            (1, 2, 4096, 1),
            (u64::MAX, 1, 4096, 4096),
        ] {
            assert_eq!(connections_within(descriptors, ports, wanted), gets, "{descriptors}");
        }
    }
}
