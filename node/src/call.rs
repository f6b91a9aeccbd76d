//! One streaming call as a task. The task dies with its client: when the response stream is dropped, the future is
//! dropped at its present await, and with it every lease, sequence and hand-off that it holds. So it is when the router
//! declares this life of the node dead.
use std::future::Future;

use tandem_proto::{Error, ErrorKind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::work::Call;

/// Events that may wait for a slow client; beyond that the producer waits.
const EVENTS: usize = 64;

/// What a call sends to its client.
#[derive(Debug)]
pub struct Events<E> {
    sender: mpsc::Sender<Result<E, Status>>,
}

impl<E> Events<E> {
    /// Sends one event; waits while the client is slow.
    ///
    /// # Errors
    /// `Cancelled` when the client is gone.
    pub async fn send(&self, event: E) -> Result<(), Error> {
        let gone = |_| Error::new(ErrorKind::Cancelled, "the caller closed the call");
        self.sender.send(Ok(event)).await.map_err(gone)
    }
}

/// Response body of a call.
pub type EventStream<E> = ReceiverStream<Result<E, Status>>;

/// Runs `body` until it ends or the client goes; its error becomes the status of the call.
pub fn spawn<E, F>(call: Call, body: impl FnOnce(Events<E>) -> F) -> EventStream<E>
where
    E: Send + 'static,
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(EVENTS);
    let running = body(Events { sender: sender.clone() });
    let life_over = call.life_over();
    call.tasks().spawn(async move {
        let result = tokio::select! {
            biased;
            // Leaving this block drops `running`, whatever it waits for.
            () = life_over => Err(Error::new(ErrorKind::DeclaredDead, "the router declared this node dead")),
            // `call` is dropped without an end: cancelled.
            () = sender.closed() => return,
            result = running => result,
        };
        call.end(&result);
        if let Err(error) = result {
            tracing::info!(kind = ?error.kind, "call failed: {error}");
            let _ = sender.send(Err(error.into())).await;
        }
    });
    ReceiverStream::new(receiver)
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;
    use crate::work::Work;

    #[tokio::test]
    async fn events_then_the_error() {
        let work = Work::new(1);
        let mut stream = spawn(work.begin().unwrap(), |events: Events<u32>| async move {
            events.send(1).await?;
            Err(Error::new(ErrorKind::Corrupt, "bad block"))
        });
        assert_eq!(stream.next().await.unwrap().unwrap(), 1);
        assert_eq!(stream.next().await.unwrap().unwrap_err().code(), tonic::Code::DataLoss);
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn the_end_of_a_life_drops_its_calls_and_no_later_ones() {
        let work = Work::new(2);
        let (held, released) = tokio::sync::oneshot::channel::<()>();
        let mut old = spawn(work.begin().unwrap(), |_events: Events<u32>| async move {
            let _held = held;
            std::future::pending().await
        });
        work.end_life();
        let mut new = spawn(work.begin().unwrap(), |events: Events<u32>| async move { events.send(1).await });
        released.await.unwrap_err();
        let status = old.next().await.unwrap().unwrap_err();
        assert_eq!(Error::from(status).kind, ErrorKind::DeclaredDead);
        assert_eq!(new.next().await.unwrap().unwrap(), 1);
        assert!(new.next().await.is_none() && old.next().await.is_none());
        assert!(work.outcomes().any(|outcome| outcome == ("declared_dead", 1)));
    }

    #[tokio::test]
    async fn dropping_the_stream_drops_the_body() {
        let work = Work::new(1);
        let (held, released) = tokio::sync::oneshot::channel::<()>();
        let stream = spawn(work.begin().unwrap(), |_events: Events<u32>| async move {
            let _held = held;
            std::future::pending().await
        });
        drop(stream);
        released.await.unwrap_err();
        work.drain();
        work.drained().await;
        assert!(work.outcomes().any(|outcome| outcome == ("cancelled", 1)));
    }
}
