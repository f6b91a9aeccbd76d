//! One accepted connection: a socket with its place among the port's, and, where many streams share it, a deadline for
//! its first bytes and writes that gather. When its place goes to another, its reads end as if the client had left.
//! Where a request was answered before its body was read, closing drains that body for a bounded time (a lingering
//! close).
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep, sleep_until};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::gathering::Gathering;
use crate::places::{Calls, Place};
use crate::socket::is_stall;
use crate::stream::Stream;
use crate::who::Who;

/// What every HTTP/2 connection begins with (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What a connection reads before the others have their turn.
const TURN_BYTES: usize = 32 << 10;

/// How long a close drains a body that no handler read. Closing a socket with unread bytes resets the connection, and a
/// reset discards an answer that the client has not read yet.
const LINGER: Duration = Duration::from_secs(10);

/// A socket of a [`Port`](crate::Port). Dropping it makes room for another.
pub(crate) struct Connection {
    stream: Stream,
    peer: TcpConnectInfo,
    who: Who,
    greeting: Option<Greeting>,
    gathering: Option<Gathering>,
    lingers: Lingers,
    joins_frames: bool,
    turn: Turn,
    /// Until when it is not read, as it caused errors.
    throttled: Option<Pin<Box<Sleep>>>,
    place: Place,
}

/// Who calls over a gRPC connection, and where its calls are noted.
#[derive(Clone)]
pub(crate) struct Peer {
    pub address: TcpConnectInfo,
    pub who: Who,
    pub calls: Calls,
}

/// Whether closing drains what the client still sends.
enum Lingers {
    Never,
    WhenUnread,
    Until(Pin<Box<Sleep>>),
}

/// The first bytes, until they are HTTP/2's preface or cannot become it any more, and until when that must be.
struct Greeting {
    /// Bytes of the preface that came.
    met: usize,
    late: Pin<Box<Sleep>>,
}

/// Bytes that came one after the other, with no wait between them. A client that says more than is read, such as pings
/// without end, would keep a thread of the reactor for tens of milliseconds.
#[derive(Default)]
struct Turn(usize);

impl Turn {
    /// Ready while the connection may go on; else all others have their turn first, and it is woken after them.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.0 < TURN_BYTES {
            return Poll::Ready(());
        }
        self.0 = 0;
        // Unlike a plain wake, it also waits until the reactor has looked for what came over other sockets.
        pin!(tokio::task::yield_now()).poll(cx)
    }

    fn read(&mut self, bytes: Option<usize>) {
        self.0 = bytes.map_or(0, |bytes| self.0 + bytes);
    }
}

impl Greeting {
    fn within(silence: Duration) -> Self {
        Self { met: 0, late: Box::pin(sleep(silence)) }
    }

    /// Whether it is over after these bytes. What is no preface is up to the protocol's own deadlines.
    fn ends_with(&mut self, bytes: &[u8]) -> bool {
        let expected = &PREFACE[self.met..];
        let met = bytes.iter().zip(expected).take_while(|(byte, expected)| byte == expected).count();
        self.met += met;
        self.met == PREFACE.len() || met < bytes.len()
    }
}

impl Connection {
    pub(crate) fn new(stream: Stream, peer: TcpConnectInfo, place: Place) -> Self {
        Self {
            stream,
            peer,
            who: Who::Anybody,
            greeting: None,
            gathering: None,
            lingers: Lingers::Never,
            joins_frames: false,
            turn: Turn::default(),
            throttled: None,
            place,
        }
    }

    /// The same, whose other end is noted there.
    pub(crate) fn called_by(self, who: Who) -> Self {
        Self { who, ..self }
    }

    /// For those who see its requests.
    pub(crate) fn who(&self) -> Who {
        self.who.clone()
    }

    /// For those who see its requests.
    pub(crate) fn calls(&self) -> Calls {
        self.place.calls()
    }

    /// The same; whether it copies HTTP/2 frames together, see [`Port::of_short_frames`](crate::Port::of_short_frames).
    pub(crate) fn joining_frames(self, joins_frames: bool) -> Self {
        Self { joins_frames, ..self }
    }

    /// The same for HTTP/2 alone.
    pub(crate) fn greeted_within(self, silence: Duration) -> Self {
        self.place.only_fails();
        Self { greeting: Some(Greeting::within(silence)), gathering: Some(Gathering::default()), ..self }
    }

    /// The same for HTTP/1 and HTTP/2, told apart by their first bytes. A request may be answered before its body was
    /// read.
    pub(crate) fn of_either_within(self, silence: Duration) -> Self {
        Self { greeting: Some(Greeting::within(silence)), lingers: Lingers::WhenUnread, ..self }
    }

    /// Ready when it may be read, where it caused errors.
    fn poll_unthrottled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.throttled.is_none() && self.place.owes() {
            // Who paid before more came would have paid before a thousand ask at once. Who leaves pays nothing: a
            // connection that waits for its end takes memory.
            if ready!(self.stream.poll_readable(cx)) {
                self.throttled = self.place.pay().map(|until| Box::pin(sleep_until(until)));
            }
        }
        if let Some(wait) = &mut self.throttled {
            ready!(wait.as_mut().poll(cx));
            self.throttled = None;
        }
        Poll::Ready(())
    }

    /// Ready when the client has ended, the place went to another, or the time is up.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.lingers, Lingers::WhenUnread) && self.place.is_unread() {
            self.lingers = Lingers::Until(Box::pin(sleep(LINGER)));
        }
        let Lingers::Until(late) = &mut self.lingers else { return Poll::Ready(()) };
        let mut unread = [0; 4096];
        loop {
            if self.place.is_over(cx) || late.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            let mut unread = ReadBuf::new(&mut unread);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut unread)) {
                Ok(()) if !unread.filled().is_empty() => {}
                _ => return Poll::Ready(()),
            }
        }
    }

    /// Notes who ended a connection that broke: what is no TLS is the client's doing, and the port's end.
    fn lost(&self, error: &io::Error) {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, TimedOut, UnexpectedEof};
        let kinds = [BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, TimedOut, UnexpectedEof];
        if kinds.contains(&error.kind()) && !is_stall(error) {
            self.place.left();
        }
    }

    /// Ready when what is to be written may be.
    fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.place.is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        self.gathering.as_mut().map_or(Poll::Ready(()), |gathering| gathering.poll(cx)).map(Ok)
    }

    /// What became of bytes that the system was given.
    fn written<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &polled {
            self.lost(error);
        }
        polled
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.place.is_over(cx) {
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_unthrottled(cx));
        ready!(self.turn.poll(cx));
        let (before, room) = (buf.filled().len(), buf.remaining());
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.turn.read(polled.is_ready().then(|| buf.filled().len() - before));
        match &polled {
            Poll::Ready(Ok(())) if buf.filled().len() > before => self.place.stirs(),
            Poll::Ready(Ok(())) if room > 0 => self.place.left(),
            Poll::Ready(Err(error)) => self.lost(error),
            _ => {}
        }
        let Some(greeting) = &mut self.greeting else { return polled };
        if polled.is_pending() {
            ready!(greeting.late.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        if greeting.ends_with(&buf.filled()[before..]) {
            self.greeting = None;
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_writable(cx))?;
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_writable(cx))?;
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(polled)
    }

    fn is_write_vectored(&self) -> bool {
        // h2 copies frames together that have less than 256 bytes; where writes take no vectors, less than 1,024.
        !self.joins_frames && self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        ready!(self.written(polled))?;
        self.gathering.iter_mut().for_each(Gathering::flushed);
        self.place.flushed(cx);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        ready!(self.written(polled))?;
        self.poll_drained(cx).map(Ok)
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer { address: self.peer.clone(), who: self.who(), calls: self.calls() }
    }
}
