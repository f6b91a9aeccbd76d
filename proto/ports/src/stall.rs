//! Writes of which the other end takes nothing. The server's keep-alive does not find such a client: what it has to say
//! at the end stands behind the bytes that are not read.
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};

/// How long a connection's writes have made no progress.
#[derive(Default)]
pub(crate) struct Stall {
    /// That may last; `None`: for ever.
    patience: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
}

impl Stall {
    /// Of a connection that ends with `TimedOut` after so long.
    pub fn within(patience: Duration) -> Self {
        Self { patience: Some(patience), late: None }
    }

    /// What became of a write or flush. While it is pending, the task is woken when the time is over, too.
    pub fn poll<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.late = None;
            return write;
        }
        let Some(patience) = self.patience else { return write };
        let late = self.late.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(late.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// When a write that is pending for ever ends.
    async fn ends(stall: &mut Stall) -> Duration {
        let begun = Instant::now();
        let ended = poll_fn(|cx| stall.poll::<()>(cx, Poll::Pending)).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_counts_from_the_last_progress() {
        let mut stall = Stall::within(PATIENCE);
        for _ in 0..3 {
            let slow = tokio::time::timeout(PATIENCE / 2, ends(&mut stall)).await;
            assert!(slow.is_err(), "half the time is none");
            let progress = poll_fn(|cx| stall.poll(cx, Poll::Ready(Ok(1)))).await;
            assert_eq!(progress.unwrap(), 1);
        }
        assert!(ends(&mut stall).await.abs_diff(PATIENCE) < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_patience_nothing_ends() {
        assert!(tokio::time::timeout(100 * PATIENCE, ends(&mut Stall::default())).await.is_err());
    }
}
