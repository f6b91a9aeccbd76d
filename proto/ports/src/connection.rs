//! One accepted connection: a socket with its place among the port's, and, where many streams share it, a deadline for its
//! first bytes and writes that gather.
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::gathering::Gathering;
use crate::stream::Stream;

/// Bytes of HTTP/2's preface, `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n`.
const PREFACE_BYTES: usize = 24;

/// A socket of a [`Port`](crate::Port). Dropping it makes room for another.
pub struct Connection {
    stream: Stream,
    peer: TcpConnectInfo,
    greeting: Option<Greeting>,
    gathering: Option<Gathering>,
    _room: Option<OwnedSemaphorePermit>,
}

/// What must still come, and until when.
struct Greeting {
    missing: usize,
    late: Pin<Box<Sleep>>,
}

impl Connection {
    pub(crate) fn new(stream: Stream, peer: TcpConnectInfo, room: Option<OwnedSemaphorePermit>) -> Self {
        Self { stream, peer, greeting: None, gathering: None, _room: room }
    }

    /// The same for HTTP/2.
    pub(crate) fn greeted_within(self, silence: Duration) -> Self {
        let greeting = Greeting { missing: PREFACE_BYTES, late: Box::pin(sleep(silence)) };
        Self { greeting: Some(greeting), gathering: Some(Gathering::default()), ..self }
    }

    fn poll_gathered(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.gathering.as_mut().map_or(Poll::Ready(()), |gathering| gathering.poll(cx))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let Some(greeting) = &mut self.greeting else { return polled };
        if polled.is_pending() {
            ready!(greeting.late.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        greeting.missing = greeting.missing.saturating_sub(buf.filled().len() - before);
        if greeting.missing == 0 {
            self.greeting = None;
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_gathered(cx));
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_gathered(cx));
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.gathering.iter_mut().for_each(Gathering::flushed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.peer.clone()
    }
}
