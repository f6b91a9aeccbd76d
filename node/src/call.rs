//! One streaming call as a task. The task dies with its client: when the response stream is dropped, the future is
//! dropped at its present await, and with it every lease, sequence and hand-off that it holds. So it is when the life
//! of the node that it belongs to ends: the session with the router that called.
//!
//! A call may be open before it says what it is for: a router opens some ahead. It counts from that word on.
use std::future::Future;
use std::sync::Arc;

use tandem_proto::{Error, ErrorKind, LIFE_HEADER, Life};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::lives::Member;
use crate::work::{Opened, Work};

/// Events that may wait for a slow client; beyond that the producer waits.
const EVENTS: usize = 64;

/// What a call sends to its client.
#[derive(Debug)]
pub struct Events<E> {
    sender: mpsc::Sender<Result<E, Status>>,
    member: Arc<Member>,
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

    /// The call's part in its life, which counts what it has to read.
    pub fn member(&self) -> &Member {
        &self.member
    }
}

/// Lets what was just said to a client leave before the caller goes on, so that nothing else is in its way. A word
/// passes through the task of its call and that of its connection, which gathers for a turn what its calls say
/// (`proto/ports/src/gathering.rs`).
pub async fn let_it_leave() {
    // A caller that has been woken meanwhile for something else goes on after the first one, in the middle of that.
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
}

/// The life that a call's head names; `None`: it is of no router's session.
///
/// # Errors
/// `InvalidArgument` for what is no life.
pub fn life(head: &MetadataMap) -> Result<Option<Life>, Error> {
    head.get(LIFE_HEADER).map(|text| Life::from_header(text.as_bytes())).transpose()
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
    life: Option<Life>,
    start: impl Future<Output = Result<S, Error>> + Send + 'static,
    body: impl FnOnce(S, Events<E>) -> F + Send + 'static,
) -> Result<EventStream<E>, Error>
where
    S: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (opened, tasks) = (work.open(life)?, work.tasks().clone());
    let (sender, receiver) = mpsc::channel(EVENTS);
    tasks.spawn(async move {
        let events = |member| Events { sender: sender.clone(), member };
        let result = tokio::select! {
            biased;
            // Leaving this block drops the call, whatever it waits for: without an end it counts as cancelled.
            () = sender.closed() => return,
            result = live(opened, start, |start, member| body(start, events(member))) => result,
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
    body: impl FnOnce(S, Arc<Member>) -> F,
) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let begun = opened.begin(start).await;
    let (call, start) =
        begun.inspect_err(|error| tracing::debug!(kind = ?error.kind, "call without a start: {error}"))?;
    let result = tokio::select! {
        biased;
        () = call.member().over() => {
            tracing::info!("call ends: the session with its router is over");
            Err(Error::new(ErrorKind::DeclaredDead, "the session with the router is over"))
        }
        // It logs its own failure, as that of its request.
        result = body(start, call.member().clone()) => result,
    };
    call.end(&result);
    result
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};
    use std::task::Poll;
    use std::time::{Duration, Instant};

    use tandem_proto::START_TIMEOUT;
    use tokio::sync::{oneshot, watch};
    use tokio_stream::StreamExt;

    use super::*;

    /// A call that starts at once.
    fn begun<F>(work: &Work, body: impl FnOnce(Events<u32>) -> F + Send + 'static) -> EventStream<u32>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        spawn(work, None, ready(Ok(())), |(), events| body(events)).unwrap()
    }

    /// One that never does.
    fn silent(work: &Work) -> Result<EventStream<u32>, Error> {
        spawn(work, None, pending::<Result<(), _>>(), |(), _| ready(Ok(())))
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
    async fn the_end_of_a_life_drops_its_calls_and_no_others() {
        let work = Work::new(3);
        let of = |life, held: oneshot::Sender<()>| {
            let body = move |(), events: Events<u32>| async move {
                let _held = held;
                events.send(0).await?;
                pending().await
            };
            spawn(&work, Some(Life(life)), ready(Ok(())), body).unwrap()
        };
        let later = Instant::now() + Duration::from_secs(3600);
        let (first, second) = (work.lives().open(Life(1), later), work.lives().open(Life(2), later));
        let ((held, released), (kept, mut still)) = (oneshot::channel::<()>(), oneshot::channel::<()>());
        let (mut old, mut other) = (of(1, held), of(2, kept));
        assert_eq!((old.next().await.unwrap().unwrap(), other.next().await.unwrap().unwrap()), (0, 0));
        drop(first);
        released.await.unwrap_err();
        let status = old.next().await.unwrap().unwrap_err();
        assert_eq!(Error::from(status).kind, ErrorKind::DeclaredDead);
        assert!(old.next().await.is_none());
        // A call that was on its way when the life ended.
        let (held, released) = oneshot::channel::<()>();
        let status = of(1, held).next().await.unwrap().unwrap_err();
        assert_eq!(Error::from(status).kind, ErrorKind::DeclaredDead);
        released.await.unwrap_err();
        assert!(still.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        assert_eq!(second.calls().0.requests, 1);
        assert_eq!(counted(&work), [("declared_dead", 1)], "the late one never was in flight");
    }

    #[tokio::test]
    async fn what_was_said_leaves_before_its_speaker_goes_on() {
        let (done, mut order) = mpsc::unbounded_channel();
        let (progress, mut seen) = watch::channel(0);
        let goes_on = done.clone();
        let mut stream = begun(&Work::new(1), move |events| async move {
            let says = async {
                // The other half waits by then.
                tokio::task::yield_now().await;
                events.send(1).await?;
                // As the KV's progress wakes the half that moves it, in the same task.
                progress.send_replace(1);
                pending().await
            };
            let moves = async {
                let _ = seen.changed().await;
                let_it_leave().await;
                let _ = goes_on.send("goes on");
                Ok(())
            };
            tokio::select! { biased; said = says => said, moved = moves => moved }
        });
        // The call's task hands the word to the connection's, which writes a turn later.
        let (to_connection, mut words) = mpsc::channel(1);
        tokio::spawn(async move {
            words.recv().await;
            let mut gathered = false;
            poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if std::mem::replace(&mut gathered, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            let _ = done.send("written");
        });
        tokio::spawn(async move {
            let word = stream.next().await;
            let _ = to_connection.send(word).await;
            stream.next().await
        });
        assert_eq!([order.recv().await, order.recv().await], [Some("written"), Some("goes on")]);
    }

    #[test]
    fn a_call_says_of_which_life_it_is() {
        let mut head = MetadataMap::new();
        assert_eq!(life(&head).unwrap(), None);
        head.insert(LIFE_HEADER, Life(7).to_string().parse().unwrap());
        assert_eq!(life(&head).unwrap(), Some(Life(7)));
        head.insert(LIFE_HEADER, "7".parse().unwrap());
        assert_eq!(life(&head).unwrap_err().kind, ErrorKind::InvalidArgument);
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
        assert_eq!((work.in_flight(), work.begin(None).is_ok()), (0, true));
        let others: Vec<_> = std::iter::repeat_with(|| silent(&work)).map_while(Result::ok).take(1000).collect();
        assert!(others.len() < 1000, "they have a bound, too");
        assert_eq!(silent(&work).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!((work.in_flight(), work.begin(None).is_ok()), (0, true));
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
