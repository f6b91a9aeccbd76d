//! A client's socket, which takes something of what is written to it within a time. A server's keep-alive does not find
//! a client that reads nothing: its last word stands behind the bytes that are not read.
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

pub(crate) struct Socket {
    stream: TcpStream,
    stall: Stall,
}

impl Socket {
    /// Whose writes fail with `TimedOut` after so long without progress.
    pub fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, stall: Stall::new(patience) }
    }

    /// Who is at the other end.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    /// Ready when a read is likely to find something, an end or an error: whether more may come behind it.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<bool> {
        if ready!(self.stream.poll_read_ready(cx)).is_err() {
            return Poll::Ready(false);
        }
        let ready = pin!(self.stream.ready(Interest::READABLE)).poll(cx);
        Poll::Ready(!matches!(ready, Poll::Ready(Ok(ready)) if ready.is_read_closed()))
    }
}

/// Whether it is the error of a client that took nothing: the system's own, of a host that is gone, has a number.
pub(crate) fn is_stall(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none()
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.stall.poll(cx, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.stall.poll(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// How long writes have made no progress.
struct Stall {
    /// The longest time without.
    patience: Duration,
    late: Option<Pin<Box<Sleep>>>,
}

impl Stall {
    fn new(patience: Duration) -> Self {
        Self { patience, late: None }
    }

    /// What became of a write. While it is pending, the task is woken when the time is over, too.
    fn poll<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.late = None;
            return write;
        }
        let late = self.late.get_or_insert_with(|| Box::pin(sleep(self.patience)));
        ready!(late.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing of what it is sent")))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// When a write that is pending for ever ends.
    async fn ends(stall: &mut Stall) -> Duration {
        let begun = Instant::now();
        let ended = poll_fn(|cx| stall.poll::<()>(cx, Poll::Pending)).await;
        assert!(is_stall(&ended.unwrap_err()));
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_counts_from_the_last_progress() {
        let mut stall = Stall::new(PATIENCE);
        for _ in 0..3 {
            let slow = tokio::time::timeout(PATIENCE / 2, ends(&mut stall)).await;
            assert!(slow.is_err(), "half the time is none");
            let progress = poll_fn(|cx| stall.poll(cx, Poll::Ready(Ok(1)))).await;
            assert_eq!(progress.unwrap(), 1);
        }
        assert!(ends(&mut stall).await.abs_diff(PATIENCE) < Duration::from_millis(2));
    }

    #[test]
    fn what_the_system_says_is_no_stall() {
        assert!(!is_stall(&io::Error::from_raw_os_error(nix::libc::ETIMEDOUT)));
    }
}
