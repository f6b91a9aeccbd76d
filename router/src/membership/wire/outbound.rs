//! What a call has to say to its node, handed to the stream by whoever reads the answer.
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use axum::body::Bytes;
use futures::task::AtomicWaker;
use h2::{Reason, SendStream};
use http_body::Body as _;
use tonic::body::Body;

/// The messages of a call that are to be sent.
pub struct Outbound {
    /// `None` once it is over.
    body: Option<Body>,
    stream: SendStream<Bytes>,
    news: Arc<News>,
}

impl Outbound {
    /// Of a call that is open.
    pub fn new(body: Body, stream: SendStream<Bytes>) -> Self {
        Self { body: Some(body), stream, news: Arc::default() }
    }

    /// Hands over all that is there, whether the node takes it now or later: messages are few, and in memory already.
    /// Whether there was something.
    pub fn push(&mut self, context: &mut Context<'_>) -> bool {
        if !self.news.take(context.waker()) {
            return false;
        }
        let mut pushed = false;
        let waker = Waker::from(Arc::clone(&self.news));
        let mut context = Context::from_waker(&waker);
        while let Some(body) = &mut self.body {
            let over = match Pin::new(body).poll_frame(&mut context) {
                Poll::Pending => break,
                // A stream that takes nothing any more says why to those who read it.
                Poll::Ready(Some(Ok(frame))) => {
                    frame.into_data().is_ok_and(|data| self.stream.send_data(data, false).is_err())
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "a message to a node cannot be written");
                    self.stream.send_reset(Reason::INTERNAL_ERROR);
                    true
                }
                Poll::Ready(None) => {
                    let _ = self.stream.send_data(Bytes::new(), true);
                    true
                }
            };
            pushed = true;
            if over {
                self.body = None;
            }
        }
        pushed
    }
}

/// Whether there may be something to send. The call is read with each token of an answer, and says two or three words
/// in all: these are not looked for each time.
struct News {
    there: AtomicBool,
    reader: AtomicWaker,
}

impl Default for News {
    fn default() -> Self {
        Self { there: AtomicBool::new(true), reader: AtomicWaker::new() }
    }
}

impl News {
    /// Whether there may be some; who asks is woken when there are more.
    fn take(&self, reader: &Waker) -> bool {
        self.reader.register(reader);
        self.there.swap(false, Ordering::AcqRel)
    }
}

impl Wake for News {
    fn wake(self: Arc<Self>) {
        self.there.store(true, Ordering::Release);
        self.reader.wake();
    }
}
