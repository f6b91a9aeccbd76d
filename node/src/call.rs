//! One streaming call as a task. The task dies with its client: when the response stream is dropped, the future is
//! dropped at its present await, and with it every lease, sequence and hand-off that it holds. So it is when the router
//! declares this life of the node dead.
//!
//! A call may be open before it says what it is for: a router opens some ahead. It counts from that word on.
use std::future::Future;

use tandem_proto::{Error, ErrorKind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::work::{Opened, Work};

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

/// Runs what `start` asks for, the call's first message, until that ends or the client goes; its error becomes the
/// status of the call.
///
/// # Errors
/// `Unavailable` while draining, `Overloaded` while too many calls have not said what they are for.
pub fn spawn<S, E, F>(
    work: &Work,
    start: impl Future<Output = Result<S, Error>> + Send + 'static,
    body: impl FnOnce(S, Events<E>) -> F + Send + 'static,
) -> Result<EventStream<E>, Error>
where
    S: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (opened, tasks) = (work.open()?, work.tasks().clone());
    let (sender, receiver) = mpsc::channel(EVENTS);
    tasks.spawn(async move {
        let events = Events { sender: sender.clone() };
        let result = tokio::select! {
            biased;
            // Leaving this block drops the call, whatever it waits for: without an end it counts as cancelled.
            () = sender.closed() => return,
            result = live(opened, start, |start| body(start, events)) => result,
        };
        if let Err(error) = result {
            let _ = sender.send(Err(error.into())).await;
        }
    });
    Ok(ReceiverStream::new(receiver))
}

async fn live<S, F>(
    opened: Opened,
    start: impl Future<Output = Result<S, Error>>,
    body: impl FnOnce(S) -> F,
) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let begun = opened.begin(start).await;
    let (call, start) =
        begun.inspect_err(|error| tracing::debug!(kind = ?error.kind, "call without a start: {error}"))?;
    let result = tokio::select! {
        biased;
        () = call.life_over() => {
            tracing::info!("call ends: the router declared this node dead");
            Err(Error::new(ErrorKind::DeclaredDead, "the router declared this node dead"))
        }
        // It logs its own failure, as that of its request.
        result = body(start) => result,
    };
    call.end(&result);
    result
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tandem_proto::START_TIMEOUT;
    use tokio::sync::oneshot;
    use tokio_stream::StreamExt;

    use super::*;

    /// A call that starts at once.
    fn begun<F>(work: &Work, body: impl FnOnce(Events<u32>) -> F + Send + 'static) -> EventStream<u32>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        spawn(work, ready(Ok(())), |(), events| body(events)).unwrap()
    }

    /// One that never does.
    fn silent(work: &Work) -> Result<EventStream<u32>, Error> {
        spawn(work, pending::<Result<(), _>>(), |(), _| ready(Ok(())))
    }

    fn counted(work: &Work) -> Vec<(&'static str, u64)> {
        work.outcomes().filter(|(_, count)| *count > 0).collect()
    }

    #[tokio::test]
    async fn events_then_the_error() {
        let mut stream = begun(&Work::new(1), |events| async move {
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
        let (held, released) = oneshot::channel::<()>();
        let mut old = begun(&work, |events| async move {
            let _held = held;
            events.send(0).await?;
            pending().await
        });
        assert_eq!(old.next().await.unwrap().unwrap(), 0);
        work.end_life();
        let mut new = begun(&work, |events| async move { events.send(1).await });
        released.await.unwrap_err();
        let status = old.next().await.unwrap().unwrap_err();
        assert_eq!(Error::from(status).kind, ErrorKind::DeclaredDead);
        assert_eq!(new.next().await.unwrap().unwrap(), 1);
        assert!(new.next().await.is_none() && old.next().await.is_none());
        assert_eq!(counted(&work), [("ok", 1), ("declared_dead", 1)]);
    }

    #[tokio::test]
    async fn dropping_the_stream_drops_the_body() {
        let work = Work::new(1);
        let (held, released) = oneshot::channel::<()>();
        let mut stream = begun(&work, |events| async move {
            let _held = held;
            events.send(0).await?;
            pending().await
        });
        assert_eq!(stream.next().await.unwrap().unwrap(), 0);
        drop(stream);
        released.await.unwrap_err();
        work.drain();
        work.drained().await;
        assert_eq!(counted(&work), [("cancelled", 1)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_a_word_is_no_call_in_flight() {
        let work = Work::new(1);
        let mut waiting = silent(&work).unwrap();
        let begun_at = tokio::time::Instant::now();
        // It takes no place of those that have begun.
        assert_eq!((work.in_flight(), work.begin().is_ok()), (0, true));
        let others: Vec<_> = std::iter::repeat_with(|| silent(&work)).map_while(Result::ok).take(1000).collect();
        assert!(others.len() < 1000, "they have a bound, too");
        assert_eq!(silent(&work).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!((work.in_flight(), work.begin().is_ok()), (0, true));
        drop(others);
        let status = waiting.next().await.unwrap().unwrap_err();
        assert_eq!((status.code(), begun_at.elapsed()), (tonic::Code::Unavailable, START_TIMEOUT));
        // Neither does one whose caller has left.
        drop(silent(&work).unwrap());
        tokio::task::yield_now().await;
        let mut waiting = silent(&work).unwrap();
        work.drain();
        work.drained().await;
        assert_eq!(waiting.next().await.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
        assert_eq!(silent(&work).unwrap_err().kind, ErrorKind::Unavailable);
        assert_eq!(counted(&work), [("cancelled", 2)], "those that were begun and dropped above");
    }
}
