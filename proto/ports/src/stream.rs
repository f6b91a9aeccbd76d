//! The bytes of one connection, in the clear or within TLS. The handshake is part of the first read or write, so that
//! it costs no task, holds nobody else up, and falls under the deadline of the first bytes.
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

pub(crate) enum Stream {
    Plain(TcpStream),
    /// Until the client has said hello and been answered.
    Handshake(Box<Accept<TcpStream>>),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub fn new(stream: TcpStream, tls: Option<Arc<ServerConfig>>) -> Self {
        match tls {
            None => Self::Plain(stream),
            Some(config) => Self::Handshake(Box::new(TlsAcceptor::from(config).accept(stream))),
        }
    }

    /// Ready when bytes of the application can be exchanged.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Self::Handshake(accept) = self {
            let stream = ready!(Pin::new(accept.as_mut()).poll(cx))?;
            *self = Self::Tls(Box::new(stream));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
            Self::Handshake(_) => Poll::Pending,
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            Self::Handshake(_) => Poll::Pending,
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
            Self::Handshake(_) => Poll::Pending,
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            // rustls takes several slices into one record.
            Self::Handshake(_) | Self::Tls(_) => true,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            // Nothing was written yet.
            Self::Handshake(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            // Dropping the socket is all the good-bye that a stranger gets.
            Self::Handshake(_) => Poll::Ready(Ok(())),
        }
    }
}
