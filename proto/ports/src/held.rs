//! One request and its response. Its connection counts as busy from the end of the request's body, or from the start of
//! the response where that comes first. So a head whose body never comes holds no place that others need.
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};

use hyper::Response;
use hyper::body::{Body, Frame, SizeHint};

use crate::places::{Call, Calls};

/// Lives until the response is sent or dropped.
#[derive(Clone)]
pub(crate) struct Exchange {
    calls: Calls,
    call: Arc<OnceLock<Call>>,
}

impl Exchange {
    /// After the head of a request was read.
    pub fn new(calls: Calls) -> Self {
        calls.stirred();
        Self { calls, call: Arc::default() }
    }

    /// Wraps the request's body. It holds the exchange weakly: some handlers keep a body beyond the response.
    pub fn asked<B: Body>(&self, body: B) -> Asked<B> {
        let mut asked = Asked { body, ended: false, calls: self.calls.clone(), call: Arc::downgrade(&self.call) };
        asked.look();
        asked
    }

    /// Wraps the response's body; an error is noted at the connection.
    pub fn answered<B>(self, response: Response<B>) -> Response<Held<B>> {
        begin(&self.calls, &self.call);
        self.calls.note(&response);
        response.map(|body| Held { body, _exchange: self })
    }
}

fn begin(calls: &Calls, call: &OnceLock<Call>) {
    call.get_or_init(|| calls.begin());
}

/// A request's body: its end makes the connection busy.
pub(crate) struct Asked<B: Body> {
    body: B,
    /// Read to its end. Of a body in chunks `is_end_stream` does not say so.
    ended: bool,
    calls: Calls,
    call: Weak<OnceLock<Call>>,
}

impl<B: Body> Asked<B> {
    fn look(&mut self) {
        if self.body.is_end_stream() {
            self.end();
        }
    }

    fn end(&mut self) {
        self.ended = true;
        if let Some(call) = self.call.upgrade() {
            begin(&self.calls, &call);
        }
    }
}

impl<B: Body + Unpin> Body for Asked<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.end(),
            Poll::Ready(Some(_)) => self.look(),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: Body> Drop for Asked<B> {
    fn drop(&mut self) {
        if !self.ended {
            self.calls.leave_unread();
        }
    }
}

/// An answer's body that keeps its connection busy.
pub(crate) struct Held<B> {
    body: B,
    _exchange: Exchange,
}

impl<B: Body + Unpin> Body for Held<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
