//! The bytes of one connection, in the clear or within TLS. The handshake is part of the first read or write, so that
//! it costs no task, holds nobody else up, and falls under the deadline of the first bytes.
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::{FallibleAccept, TlsStream};

use crate::node_tls::NodeTls;
use crate::socket::Socket;
use crate::who::Who;

/// How long a caller may take to read why it was refused. Closing a socket with unread bytes resets the connection,
/// and with TLS 1.3 a caller is in the middle of its request by then.
const LAST_WORD: Duration = Duration::from_secs(1);

pub(crate) enum Stream {
    Plain(Socket),
    /// Until the client has said hello and been answered.
    Handshake(Box<Handshake>),
    Tls(Box<TlsStream<Socket>>),
    Refused(Box<Refused>),
}

/// A handshake under way.
pub(crate) struct Handshake {
    accept: FallibleAccept<Socket>,
    /// Where the name of the other end is noted.
    who: Who,
    /// Among the cluster's own: who counts those that are refused.
    cluster: Option<NodeTls>,
}

/// A caller whose handshake failed; `late` at the latest it has read why.
pub(crate) struct Refused {
    stream: Socket,
    late: Option<Pin<Box<Sleep>>>,
    error: Option<io::Error>,
}

impl Stream {
    /// Within TLS; the client's name is noted when it is known.
    pub fn secured(stream: Socket, config: Arc<ServerConfig>, who: Who) -> Self {
        Self::handshake(stream, config, who, None)
    }

    /// Within TLS of the cluster; the caller's name is noted when it is known.
    pub fn of_cluster(stream: Socket, tls: NodeTls, who: Who) -> Self {
        Self::handshake(stream, tls.server(), who, Some(tls))
    }

    fn handshake(stream: Socket, config: Arc<ServerConfig>, who: Who, cluster: Option<NodeTls>) -> Self {
        let accept = TlsAcceptor::from(config).accept(stream).into_fallible();
        Self::Handshake(Box::new(Handshake { accept, who, cluster }))
    }

    /// Ready when bytes of the application can be exchanged.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Self::Handshake(handshake) = self {
            *self = ready!(handshake.poll(cx));
        }
        match self {
            Self::Refused(refused) => refused.poll(cx).map(Err),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ready when a read is likely to find something, or an end: whether more may come behind it. Within TLS what came
    /// may be too little for a read.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<bool> {
        match self {
            Self::Plain(socket) => socket.poll_readable(cx),
            Self::Tls(stream) => match stream.get_ref() {
                (socket, tls) if tls.wants_read() => socket.poll_readable(cx),
                // The rest of what came, or its end, is with rustls.
                _ => Poll::Ready(true),
            },
            Self::Handshake(_) | Self::Refused(_) => Poll::Ready(true),
        }
    }
}

impl Handshake {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Stream> {
        let accepted = ready!(Pin::new(&mut self.accept).poll(cx));
        Poll::Ready(match accepted {
            Ok(stream) => {
                self.who.is_of(stream.get_ref().1.peer_certificates());
                Stream::Tls(Box::new(stream))
            }
            Err((error, stream)) => {
                let told = self.cluster.as_ref().is_some_and(|tls| tls.handshake_failed(&stream, &error));
                let late = told.then(|| Box::pin(sleep(LAST_WORD)));
                Stream::Refused(Box::new(Refused { stream, late, error: Some(error) }))
            }
        })
    }
}

impl Refused {
    /// Ready when the caller has left, or the time is up.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut unread = [0; 4096];
        while self.late.as_mut().is_some_and(|late| late.as_mut().poll(cx).is_pending()) {
            let mut unread = ReadBuf::new(&mut unread);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut unread)) {
                Ok(()) if !unread.filled().is_empty() => {}
                _ => break,
            }
        }
        self.late = None;
        Poll::Ready(self.error.take().unwrap_or_else(|| io::ErrorKind::ConnectionAborted.into()))
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
            Self::Handshake(_) | Self::Refused(_) => Poll::Pending,
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            Self::Handshake(_) | Self::Refused(_) => Poll::Pending,
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, slices),
            Self::Handshake(_) | Self::Refused(_) => Poll::Pending,
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            // rustls takes several slices into one record.
            Self::Handshake(_) | Self::Tls(_) | Self::Refused(_) => true,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            // Nothing was written yet.
            Self::Handshake(_) | Self::Refused(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            // Dropping the socket is all the good-bye that a stranger gets.
            Self::Handshake(_) | Self::Refused(_) => Poll::Ready(Ok(())),
        }
    }
}
