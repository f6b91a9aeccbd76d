//! TCP ports that anybody may connect to, with bounds: so many connections at once, so long without a word. A silent
//! socket costs a descriptor, and a process without descriptors serves nobody. Knows no route and no message.
//!
//! - [`Port`]: a listener that counts its connections, and what gRPC servers accept from ([`Port::incoming`]).
//! - [`Connection`]: one of them; it ends when its first bytes are late.
//! - [`serve_http`]: HTTP/1.1 on a port.
//! - [`JoinToken`], [`JoinGuard`]: the secret of a cluster's own processes, and who asks for it.
//! - [`Tls`]: certificates of a port; a handshake is part of a connection's first bytes.
#![forbid(unsafe_code)]

mod connection;
mod gathering;
mod http;
mod join;
mod stream;
mod tls;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{Stream, unfold};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::rustls::ServerConfig;
use tonic::transport::server::Connected;

pub use crate::connection::Connection;
pub use crate::http::serve_http;
pub use crate::join::{JOIN_HEADER, JoinGuard, JoinToken, JoinTokenError, Joined};
pub use crate::tls::{Tls, TlsError, TlsFiles};

/// Wait after an `accept` that failed for a reason of ours, such as no descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A host that vanished is noticed after the first and three times the second.
const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// A peer that is alive and takes nothing of what it asked for.
const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Bounds of one port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open at once. Who comes later waits in the system's queue until one ends.
    pub connections: usize,
    /// For the first bytes of a gRPC connection, for the head of every HTTP request, and between two of them.
    pub silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 1024, silence: Duration::from_secs(30) }
    }
}

/// A listener within its limits.
pub struct Port {
    listener: TcpListener,
    limits: Limits,
    room: Arc<Semaphore>,
    tls: Option<Tls>,
}

type Secured = Option<Arc<ServerConfig>>;

impl Port {
    /// Of a bound listener.
    pub fn new(listener: TcpListener, limits: Limits) -> Self {
        Self { listener, limits, room: Arc::new(Semaphore::new(limits.connections)), tls: None }
    }

    /// The same, within TLS if there is one.
    pub fn secured(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }

    /// What a tonic server accepts from: every connection must begin with HTTP/2's preface in time. After that the
    /// server's own keep-alive pings find the dead.
    pub fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        let tls = self.speaking("h2");
        unfold((self, tls), |(port, tls)| async move {
            let connection = port.accept(&tls).await.greeted_within(port.limits.silence);
            Some((Ok(connection), (port, tls)))
        })
    }

    /// What its connections are secured with.
    fn speaking(&self, protocol: &str) -> Secured {
        self.tls.clone().map(|tls| tls.speaking(protocol))
    }

    /// The next connection, when there is room for it.
    async fn accept(&self, tls: &Secured) -> Connection {
        // Nobody closes the semaphore: without a permit there would be no bound.
        let room = self.room.clone().acquire_owned().await.ok();
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    if let Err(error) = configure(&stream) {
                        tracing::debug!(%error, "socket options");
                    }
                    let peer = stream.connect_info();
                    return Connection::new(stream::Stream::new(stream, tls.clone()), peer, room);
                }
                // The client's, gone before it was accepted.
                Err(error) if is_of_the_peer(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Threads of a reactor that does nothing but wait for sockets: one for four cores. On few cores a second one is woken to
/// look for work that the first is at already.
pub fn reactor_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 4).max(1)
}

/// Lets the process open as many descriptors as the system allows it: the usual soft limit of 1,024 is less than two
/// full ports.
pub fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open descriptors stays as it is");
    }
}

fn configure(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive.with_retries(3))?;
    socket.set_tcp_user_timeout(Some(STALL_TIMEOUT))
}

fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
