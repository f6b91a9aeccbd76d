//! One socket: the hello, the thread that writes what its queue holds, and the loop that reads frames into the arena.
//! Bytes go through a scratch buffer of 1 MiB each way, since KV memory is not a slice of bytes; the buffer stays in
//! cache, the copy is small beside the kernel's.
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::PROTOCOL_VERSION;

use super::queue::{DataFrame, Frame, FrameQueue};
use super::{TcpConfig, build_id};
use crate::arena::{Arena, Run};
use crate::error::{TransferError, TransferErrorKind};
use crate::outgoing::PendingAnswers;
use crate::registry::Registry;
use crate::terms::PeerId;
use crate::wire::{DataHeader, HEADER_BYTES, Header, MAX_HELLO_BYTES, MAX_SEAL_BYTES};

const SCRATCH_BYTES: usize = 1 << 20;
/// Header and payload length.
const PRELUDE_BYTES: usize = HEADER_BYTES + 8;
/// Where data starts in the writer's scratch, aligned; the prelude stands just before.
const DATA_AT: usize = 64;

/// An open connection after its hello.
pub(crate) struct Connection {
    peer: PeerId,
    stream: TcpStream,
    queue: Arc<FrameQueue>,
}

impl Connection {
    /// Hello first, then expects one.
    pub fn dial(stream: TcpStream, config: &TcpConfig, peer: PeerId, arena: Arc<Arena>) -> Result<Self, TransferError> {
        prepare(&stream, config)?;
        send_hello(&stream)?;
        expect_hello(&stream, Instant::now() + config.connect_timeout)?;
        Ok(Self::start(stream, config, peer, arena)?)
    }

    /// Expects a hello, then says one.
    pub fn accept(
        stream: TcpStream,
        config: &TcpConfig,
        peer: PeerId,
        arena: Arc<Arena>,
    ) -> Result<Self, TransferError> {
        prepare(&stream, config)?;
        expect_hello(&stream, Instant::now() + config.connect_timeout)?;
        send_hello(&stream)?;
        Ok(Self::start(stream, config, peer, arena)?)
    }

    pub fn peer(&self) -> PeerId {
        self.peer
    }

    pub(super) fn queue(&self) -> &FrameQueue {
        &self.queue
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
    pub fn read_loop(&self, registry: &Arc<Registry>, pending: &PendingAnswers) -> TransferError {
        let mut reader = Reader::new(&self.stream);
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

    fn start(stream: TcpStream, config: &TcpConfig, peer: PeerId, arena: Arc<Arena>) -> io::Result<Self> {
        stream.set_read_timeout(Some(config.stall_timeout))?;
        stream.set_write_timeout(Some(config.stall_timeout))?;
        let queue = Arc::new(FrameQueue::new());
        let writer = Writer { socket: stream.try_clone()?, queue: queue.clone() };
        std::thread::Builder::new().name("kv-tcp-write".into()).spawn(move || {
            if let Err(error) = write_loop(&writer.socket, &writer.queue, &arena) {
                tracing::debug!("KV connection: {error}");
            }
        })?;
        Ok(Self { peer, stream, queue })
    }

    fn read_frame(
        &self,
        reader: &mut Reader<'_>,
        registry: &Arc<Registry>,
        pending: &PendingAnswers,
    ) -> Result<(), TransferError> {
        let (header, len) = reader.prelude()?;
        match header {
            Header::Data(range) => read_data(self.peer, reader, range, len, registry),
            Header::Seal(handoff) if len <= MAX_SEAL_BYTES as u64 => {
                let payload = reader.payload(len as usize)?;
                registry.seal(self.peer, handoff, &payload);
                Ok(())
            }
            Header::Cancel(handoff) if len == 0 => {
                registry.cancelled_by(self.peer, handoff);
                Ok(())
            }
            Header::KeepAlive(handoff) if len == 0 => {
                registry.keep_alive(self.peer, handoff);
                Ok(())
            }
            Header::Answer(handoff, answer) if len == 0 => {
                pending.answer(self.peer, handoff, answer);
                Ok(())
            }
            _ => Err(garbage()),
        }
    }
}

/// The writing thread's half. However that thread ends, by a panic too, the connection ends with it: nobody would write
/// what is queued, and its senders would wait for their leases.
struct Writer {
    socket: TcpStream,
    queue: Arc<FrameQueue>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.queue.close();
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn read_data(
    peer: PeerId,
    reader: &mut Reader<'_>,
    range: DataHeader,
    len: u64,
    registry: &Arc<Registry>,
) -> Result<(), TransferError> {
    if len > registry.arena().bytes() as u64 {
        return Err(garbage());
    }
    let Ok(claim) = registry.claim(peer, range, len) else { return Ok(reader.discard(len)?) };
    for run in claim.runs() {
        reader.copy_into(claim.arena(), *run)?;
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

fn send_hello(mut stream: &TcpStream) -> io::Result<()> {
    let build_id = build_id();
    let mut frame = prelude(&Header::hello(), build_id.len() as u64).to_vec();
    frame.extend_from_slice(build_id.as_bytes());
    stream.write_all(&frame)
}

/// Reads exactly the hello and not a byte of what follows.
fn expect_hello(stream: &TcpStream, until: Instant) -> Result<(), TransferError> {
    let mut bytes = [0; PRELUDE_BYTES];
    read_until(stream, &mut bytes, until)?;
    let (header, len) = parse_prelude(&bytes).ok_or_else(garbage)?;
    let Header::Hello { protocol } = header else { return Err(garbage()) };
    if len > MAX_HELLO_BYTES as u64 {
        return Err(garbage());
    }
    let mut theirs = vec![0; len as usize];
    read_until(stream, &mut theirs, until)?;
    if protocol != PROTOCOL_VERSION || theirs != build_id().as_bytes() {
        let theirs = String::from_utf8_lossy(&theirs).escape_default().to_string();
        let message = format!("the KV peer speaks protocol {protocol} build {theirs}, we speak {}", build_id());
        return Err(TransferError::new(TransferErrorKind::Incompatible, message));
    }
    Ok(())
}

/// Fills `bytes` by a time: a read timeout alone lets a peer hold its place by a byte now and then.
fn read_until(mut stream: &TcpStream, bytes: &mut [u8], until: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted || is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_loop(mut stream: &TcpStream, queue: &FrameQueue, arena: &Arena) -> io::Result<()> {
    let mut scratch = vec![0; DATA_AT + SCRATCH_BYTES];
    while let Some(frame) = queue.next() {
        match frame {
            Frame::Bare(header) => stream.write_all(&prelude(&header, 0))?,
            Frame::Seal { handoff, payload, .. } => {
                let mut bytes = prelude(&Header::Seal(handoff), payload.len() as u64).to_vec();
                bytes.extend_from_slice(&payload);
                stream.write_all(&bytes)?;
            }
            Frame::Data(data) => write_data(stream, &data, arena, &mut scratch)?,
        }
    }
    Ok(())
}

fn write_data(mut stream: &TcpStream, data: &DataFrame, arena: &Arena, scratch: &mut [u8]) -> io::Result<()> {
    let len = data.bytes() - if data.faults.truncate_push { 8 } else { 0 };
    scratch[DATA_AT - PRELUDE_BYTES..DATA_AT].copy_from_slice(&prelude(&Header::Data(data.range), len as u64));
    let (mut from, mut offset) = (DATA_AT - PRELUDE_BYTES, 0);
    while offset < len {
        let chunk = SCRATCH_BYTES.min(len - offset);
        arena.gather(&data.runs, offset, &mut scratch[DATA_AT..DATA_AT + chunk]);
        scratch[DATA_AT] ^= u8::from(data.faults.flip_byte && offset == 0);
        stream.write_all(&scratch[from..DATA_AT + chunk])?;
        (from, offset) = (DATA_AT, offset + chunk);
    }
    // A truncated range of 8 bytes has no payload at all.
    if len == 0 { stream.write_all(&scratch[from..DATA_AT]) } else { Ok(()) }
}

fn prelude(header: &Header, len: u64) -> [u8; PRELUDE_BYTES] {
    let mut bytes = [0; PRELUDE_BYTES];
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    bytes[HEADER_BYTES..].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn parse_prelude(bytes: &[u8]) -> Option<(Header, u64)> {
    let (header, len) = bytes.split_at_checked(HEADER_BYTES)?;
    Some((Header::parse(header)?, u64::from_le_bytes(len.try_into().ok()?)))
}

fn garbage() -> TransferError {
    TransferError::new(TransferErrorKind::Corrupt, "what arrived is not our protocol")
}

/// Buffered reading that hands out its buffer, so that bytes are copied once on their way into the arena.
struct Reader<'a> {
    stream: &'a TcpStream,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        Self { stream, buffer: vec![0; SCRATCH_BYTES], start: 0, end: 0 }
    }

    /// Waits for the next frame as long as it takes.
    fn prelude(&mut self) -> Result<(Header, u64), TransferError> {
        while self.start == self.end {
            match self.fill() {
                Err(error) if is_timeout(&error) => {}
                other => other?,
            }
        }
        self.ensure(PRELUDE_BYTES)?;
        let parsed = parse_prelude(&self.buffer[self.start..self.start + PRELUDE_BYTES]).ok_or_else(garbage)?;
        self.start += PRELUDE_BYTES;
        Ok(parsed)
    }

    fn payload(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut payload = Vec::with_capacity(len);
        while payload.len() < len {
            self.ensure(1)?;
            let take = (self.end - self.start).min(len - payload.len());
            payload.extend_from_slice(&self.buffer[self.start..self.start + take]);
            self.start += take;
        }
        Ok(payload)
    }

    fn copy_into(&mut self, arena: &Arena, run: Run) -> io::Result<()> {
        let mut offset = 0;
        while offset < run.bytes {
            self.ensure(8)?;
            let take = (self.end - self.start).min(run.bytes - offset) & !7;
            arena.write(run.at + offset, &self.buffer[self.start..self.start + take]);
            self.start += take;
            offset += take;
        }
        Ok(())
    }

    fn discard(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            self.ensure(1)?;
            let take = ((self.end - self.start) as u64).min(len);
            self.start += take as usize;
            len -= take;
        }
        Ok(())
    }

    /// At least `bytes` (few) are in the buffer.
    fn ensure(&mut self, bytes: usize) -> io::Result<()> {
        while self.end - self.start < bytes {
            self.fill()?;
        }
        Ok(())
    }

    fn fill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match self.stream.read(&mut self.buffer[self.end..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                self.end += read;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
