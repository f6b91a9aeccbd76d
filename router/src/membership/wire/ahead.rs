//! Calls that are open before anybody has something to say on them. The node has taken such a call in and answered its
//! head while nobody waited for that: of a call's time to the first token only that of its first message is left. They
//! are like the last call there was, one for each that was made, within bounds; a call of another kind is opened as if
//! there were none.
//!
//! A node ends a call that says nothing for long, and every such call when it drains. One that has an end, or is old
//! enough to meet it, is not used: nobody sees anything of these calls but the time that they save.
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use futures::FutureExt;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Method, Request, Response, Uri};
use tandem_proto::START_TIMEOUT;
use tandem_telemetry::clock;

use super::{Connected, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};

/// To one node at most: so many begin in a burst before the first of them has an answer.
const MOST: usize = 4;
/// Older ones are not used: a first message has the rest of the node's patience for its way. A node that stands still
/// is found out by then, so that it is not the call that ends.
pub const FRESH: Duration = Duration::from_secs(5);
const _: () = {
    let rest = START_TIMEOUT.as_millis() - FRESH.as_millis();
    assert!(KEEPALIVE_INTERVAL.as_millis() + KEEPALIVE_TIMEOUT.as_millis() < rest);
};

/// What a call says before its messages.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
}

/// A call whose head is on its way.
#[derive(Debug)]
pub struct Opened {
    pub head: Arc<Head>,
    pub line: Connected,
    pub reply: Reply,
    pub stream: SendStream<Bytes>,
    at: Instant,
}

impl Opened {
    /// On this connection.
    pub fn on(line: Connected, head: Arc<Head>) -> Result<Self, h2::Error> {
        let mut request = Request::new(());
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = head.uri.clone();
        *request.headers_mut() = head.headers.clone();
        // By a handle of its own: one that has to wait for room holds the call, which would then outlive who dropped
        // it.
        let (awaited, stream) = line.sender.clone().send_request(request, false)?;
        let reply = Reply { awaited, there: None };
        Ok(Self { head, line, reply, stream, at: clock::now() })
    }

    /// Whether the node waits for its first message.
    fn is_fresh(&mut self) -> bool {
        clock::now().saturating_duration_since(self.at) < FRESH && self.reply.is_silent()
    }
}

/// The head of an answer, once.
#[derive(Debug)]
pub struct Reply {
    awaited: ResponseFuture,
    there: Option<Response<RecvStream>>,
}

impl Reply {
    /// Whether the node has said no more than a head.
    fn is_silent(&mut self) -> bool {
        // Who gets the call looks again, and is the one to wake.
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(head) = self.poll_unpin(&mut context) else { return true };
        self.there = head.ok();
        self.there.as_mut().is_some_and(|head| head.body_mut().poll_data(&mut context).is_pending())
    }
}

impl Future for Reply {
    type Output = Result<Response<RecvStream>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.there.take() {
            Some(head) => Poll::Ready(Ok(head)),
            None => self.awaited.poll_unpin(context),
        }
    }
}

/// The calls to one node that are open and have said nothing.
#[derive(Debug, Default)]
pub struct CallsAhead {
    calls: Mutex<VecDeque<Opened>>,
}

impl CallsAhead {
    /// The oldest that can be used for such a call.
    pub fn take(&self, head: &Head) -> Option<Opened> {
        let mut calls = self.lock();
        while let Some(mut call) = calls.pop_front() {
            if *call.head == *head && call.is_fresh() {
                return Some(call);
            }
        }
        None
    }

    /// Keeps what `open` gives, unless there are enough.
    pub fn keep(&self, open: impl FnOnce() -> Option<Opened>) {
        let mut calls = self.lock();
        if calls.len() < MOST {
            calls.extend(open());
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Opened>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
