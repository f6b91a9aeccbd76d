//! Newcomers at the listening socket. One thread reads all their hellos, so that whoever says nothing costs a socket
//! and no thread. A thread for the connection starts when its hello has opened a hand-off.
//!
//! Owns those whose hello has not been received; `table` has all others, `greeting` the words.
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::connection::Connection;
use super::greeting::{HelloFrame, read_hello};
use super::table::{Place, Table};
use crate::error::TransferError;

/// Connections without a hello: a newcomer ends the oldest one. A hello takes a round trip, so this many flood no
/// honest one out unless they come within it.
const MAX_HALF_OPEN: usize = 64;

/// Accepts until the table is closing and the listener shut down.
///
/// # Errors
/// Out of descriptors or memory, at the start.
pub(super) fn run(table: Arc<Table>, listener: std::net::TcpListener) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    listener.set_nonblocking(true)?;
    runtime.block_on(async {
        let newcomers = Newcomers { table, hellos: JoinSet::new(), oldest_first: VecDeque::new() };
        newcomers.accept(&TcpListener::from_std(listener)?).await;
        Ok(())
    })
}

/// A newcomer whose hello was received.
struct Caller {
    stream: TcpStream,
    hello: HelloFrame,
    place: Place,
}

/// Accepted, and without a hello.
struct Newcomers {
    table: Arc<Table>,
    hellos: JoinSet<Result<Caller, TransferError>>,
    /// Those whose hello was received meanwhile are among them until the next newcomer.
    oldest_first: VecDeque<AbortHandle>,
}

impl Newcomers {
    async fn accept(mut self, listener: &TcpListener) {
        while !self.table.closing.load(Ordering::SeqCst) {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        self.enter(stream);
                        // However many wait behind it: what it has sent already is read before they take its place.
                        tokio::task::yield_now().await;
                    }
                    // Out of descriptors, or shut down: the loop's condition tells; do not spin on the former.
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                },
                Some(received) = self.hellos.join_next() => self.leave(received),
            }
        }
    }

    /// The oldest one makes room.
    fn enter(&mut self, mut stream: TcpStream) {
        let Some(place) = Place::take(&self.table) else { return self.table.registry.violation() };
        self.oldest_first.retain(|hello| !hello.is_finished());
        if self.oldest_first.len() >= MAX_HALF_OPEN
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            oldest.abort();
        }
        let patience = self.table.config.connect_timeout;
        self.oldest_first.push_back(self.hellos.spawn(async move {
            let hello = tokio::time::timeout(patience, read_hello(&mut stream)).await;
            let hello = hello.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            Ok(Caller { stream, hello, place })
        }));
    }

    fn leave(&self, received: Result<Result<Caller, TransferError>, JoinError>) {
        let registry = &self.table.registry;
        match received {
            Ok(Ok(caller)) => self.open(caller),
            // No line for each, as they cost a stranger nothing: the counter tells.
            Ok(Err(error)) => {
                tracing::debug!("KV connection without a hello: {error}");
                registry.violation();
            }
            // Made room.
            Err(_) => registry.violation(),
        }
    }

    fn open(&self, caller: Caller) {
        let Caller { stream, hello, place } = caller;
        let (table, peer) = (&self.table, self.table.new_peer());
        let opened = stream
            .into_std()
            .map_err(TransferError::from)
            .and_then(|stream| Connection::accept(stream, &hello, &table.config, peer, &table.registry));
        match opened {
            Ok((connection, opener)) => {
                let attached = table.attach(Arc::new(connection));
                if let Err(error) = attached.start_reading(opener, Some(place)) {
                    tracing::warn!(%error, "no thread for a KV connection");
                }
            }
            Err(error) => {
                tracing::warn!("KV connection refused: {error}");
                // A refusal was counted by its reason.
                if error.refusal.is_none() {
                    table.registry.violation();
                }
            }
        }
    }
}
