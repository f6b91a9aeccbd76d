//! One socket after its greeting: the thread that writes what its queue holds, and the loop that reads frames into the
//! arena. Bytes go through a scratch buffer of 256 KiB each way, since KV memory is not a slice of bytes; the buffer
//! stays in cache, the copy is small beside the kernel's.
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::HandoffId;

use super::config::TcpConfig;
use super::frame::garbage;
use super::greeting::{self, Greeted, HelloFrame};
use super::queue::FrameQueue;
use super::reader::{Head, Reader};
use super::sealing::{Opener, Protection};
use super::writer::Writer;
use crate::arena::Arena;
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::{KEY_BYTES, Nonces, Secret};
use crate::outgoing::PendingAnswers;
use crate::registry::Registry;
use crate::terms::PeerId;
use crate::wire::{Answer, DataHeader, Header, MAX_SEAL_BYTES};

/// An open connection.
pub(crate) struct Connection {
    peer: PeerId,
    stream: TcpStream,
    queue: Arc<FrameQueue>,
    nonces: Nonces,
    protection: Protection,
}

impl Connection {
    /// Says hello for the hand-off of `secret`. Whoever reads the connection gets the other half.
    pub fn dial(
        stream: TcpStream,
        config: &TcpConfig,
        peer: PeerId,
        arena: Arc<Arena>,
        secret: &Secret,
    ) -> Result<(Self, Opener), TransferError> {
        prepare(&stream, config)?;
        let until = Instant::now() + config.connect_timeout;
        let greeted = greeting::call(&stream, &config.build_id(), secret, until)?;
        Ok(Self::start(stream, config, peer, arena, greeted)?)
    }

    /// Opens what a hello asks for, and welcomes its sender. Takes a stream that does not block, so it does not wait.
    pub fn accept(
        stream: TcpStream,
        hello: &HelloFrame,
        config: &TcpConfig,
        peer: PeerId,
        registry: &Registry,
    ) -> Result<(Self, Opener), TransferError> {
        prepare(&stream, config)?;
        let greeted = greeting::answer(&stream, hello, &config.build_id(), registry, peer)?;
        let started = stream
            .set_nonblocking(false)
            .and_then(|()| Self::start(stream, config, peer, registry.arena().clone(), greeted));
        // Its hand-off is open, and nobody else would fail it.
        Ok(started.inspect_err(|_| registry.fence(peer))?)
    }

    pub fn peer(&self) -> PeerId {
        self.peer
    }

    pub(super) fn queue(&self) -> &FrameQueue {
        &self.queue
    }

    /// Before any frame of another hand-off than the one that this connection was dialled for.
    pub(super) fn join(&self, handoff: HandoffId, secret: &Secret) {
        self.queue.join(handoff, secret.join(self.nonces));
    }

    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// Both threads end soon. Never blocks.
    pub fn close(&self) {
        self.queue.close();
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Reads frames until the connection ends; returns why.
    pub fn read_loop(&self, opener: Opener, registry: &Arc<Registry>, pending: &PendingAnswers) -> TransferError {
        let mut reader = Reader::new(&self.stream, opener, self.protection);
        loop {
            if let Err(error) = self.read_frame(&mut reader, registry, pending) {
                if error.kind == TransferErrorKind::Corrupt {
                    tracing::warn!("KV connection closed: {error}");
                    registry.violation();
                }
                return error;
            }
        }
    }

    fn start(
        stream: TcpStream,
        config: &TcpConfig,
        peer: PeerId,
        arena: Arc<Arena>,
        greeted: Greeted,
    ) -> io::Result<(Self, Opener)> {
        stream.set_read_timeout(Some(config.stall_timeout))?;
        stream.set_write_timeout(Some(config.stall_timeout))?;
        let Greeted { nonces, sealer, opener } = greeted;
        let queue = Arc::new(FrameQueue::new());
        let mut writer = Writer::new(stream.try_clone()?, arena, sealer, config.protection);
        let ending = WriterEnding { socket: stream.try_clone()?, queue: queue.clone() };
        std::thread::Builder::new().name("kv-tcp-write".into()).spawn(move || {
            if let Err(error) = writer.run(&ending.queue) {
                tracing::debug!("KV connection: {error}");
            }
        })?;
        Ok((Self { peer, stream, queue, nonces, protection: config.protection }, opener))
    }

    fn read_frame(
        &self,
        reader: &mut Reader<'_>,
        registry: &Arc<Registry>,
        pending: &PendingAnswers,
    ) -> Result<(), TransferError> {
        let head = reader.head()?;
        match head.header {
            Header::Data(range) => read_data(self.peer, reader, range, &head, registry),
            Header::Seal(handoff) if head.len <= MAX_SEAL_BYTES as u64 => {
                let payload = reader.payload(&head)?;
                registry.seal(self.peer, handoff, &payload);
                Ok(())
            }
            Header::Join(handoff) if head.len == KEY_BYTES as u64 => {
                let proof = reader.payload(&head)?.try_into().map_err(|_| garbage())?;
                let joined = registry.authenticate_join(handoff, &proof, self.nonces);
                if let Err(refusal) = joined.and_then(|authenticated| registry.open(self.peer, &authenticated)) {
                    self.queue.send_now(Header::Answer(handoff, Answer::Refused(refusal)));
                }
                Ok(())
            }
            Header::Cancel(handoff) if head.len == 0 => {
                registry.cancelled_by(self.peer, handoff);
                Ok(())
            }
            Header::KeepAlive(handoff) if head.len == 0 => {
                registry.keep_alive(self.peer, handoff);
                Ok(())
            }
            Header::Answer(handoff, answer) if head.len == 0 => {
                pending.answer(self.peer, handoff, answer);
                Ok(())
            }
            _ => Err(garbage()),
        }
    }
}

/// The end of the writing thread. However it comes, by a panic too, the connection ends with it: nobody would write
/// what is queued, and its senders would wait for their leases.
struct WriterEnding {
    socket: TcpStream,
    queue: Arc<FrameQueue>,
}

impl Drop for WriterEnding {
    fn drop(&mut self) {
        self.queue.close();
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn read_data(
    peer: PeerId,
    reader: &mut Reader<'_>,
    range: DataHeader,
    head: &Head,
    registry: &Arc<Registry>,
) -> Result<(), TransferError> {
    if head.len > registry.arena().bytes() as u64 {
        return Err(garbage());
    }
    let Ok(claim) = registry.claim(peer, range, head.len) else { return reader.discard(head) };
    let mut offset = 0;
    while offset < claim.bytes() {
        let part = reader.part(head, claim.bytes() - offset)?;
        claim.arena().scatter(claim.runs(), offset as usize, part);
        offset += part.len() as u64;
    }
    claim.written();
    Ok(())
}

fn prepare(stream: &TcpStream, config: &TcpConfig) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    // Buffers stay as the kernel tunes them: fixed ones of megabytes were slower, they do not fit the cache.
    if stream.peer_addr()?.ip().is_loopback() {
        without_pacing(&socket);
    }
    // A host that vanished without a word.
    let keepalive =
        socket2::TcpKeepalive::new().with_time(Duration::from_secs(2)).with_interval(Duration::from_secs(1));
    socket.set_tcp_keepalive(&keepalive.with_retries(3))?;
    socket.set_tcp_user_timeout(Some(config.stall_timeout))?;
    stream.set_write_timeout(Some(config.connect_timeout))
}

/// Nothing congests a loopback, but BBR paces there too, by a bandwidth that it estimated in the pauses between two
/// hand-offs: a third of the speed. Hosts that allow neither keep what they have.
fn without_pacing(socket: &socket2::SockRef<'_>) {
    let chosen = [b"cubic".as_slice(), b"reno"].into_iter().find(|name| socket.set_tcp_congestion(name).is_ok());
    tracing::debug!(congestion_control = ?chosen.map(String::from_utf8_lossy), "KV connection over the loopback");
}
