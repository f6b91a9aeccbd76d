//! The live page's data: what the cluster looks like now, as a stream of changes that all who look share. The thin
//! shell of [`view`]: it looks once a second, and at once when nodes come or go, as long as somebody is there. Read
//! [`view`] next; the HTTP side is `http/page.rs`, the page itself lies in `page/web/`.
//!
//! - [`view`]: what is shown, and what changed since; pure. [`rate`], [`tail`]: what it computes from counters and from
//!   requests; pure.
//! - [`row`]: one request in one line, out of its spans; pure.
pub mod rate;
pub mod row;
pub mod tail;
pub mod view;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use serde_json::{Value, json};
use tandem_proto::spans::write::{self, number};
use tandem_proto::spans::{raw, unpack};
use tandem_proto::{Error, ErrorKind, v1};
use tandem_telemetry::clock::{self, clock};
use tokio::sync::{Mutex, Notify, OwnedSemaphorePermit, Semaphore, broadcast};

use crate::api::{Service, run_blocking};
use row::Row;
use view::{Look, View};

/// Who looks at the same time; the next one is refused.
pub const MAX_SUBSCRIBERS: usize = 16;
/// Between two looks.
const TICK: Duration = Duration::from_secs(1);
/// Between two looks when nodes come and go.
const SOON: Duration = Duration::from_millis(100);
/// Requests that are read at one look, the newest; others are only counted.
const MAX_READ: usize = 256;
/// At the first one.
const MAX_READ_FIRST: usize = view::MAX_ROWS;
/// Updates that a subscriber may be behind: beyond that it starts anew.
const MAX_BEHIND: usize = 8;
/// Requests in one event.
const ROWS_OF_EVENT: usize = 200;

/// Handle to what is looked at.
#[derive(Clone)]
pub struct Page {
    inner: Arc<Inner>,
}

struct Inner {
    service: Service,
    state: Mutex<State>,
    updates: broadcast::Sender<Bytes>,
    places: Arc<Semaphore>,
    /// Somebody has come.
    wanted: Notify,
}

#[derive(Default)]
struct State {
    view: View,
    /// Requests that had ended at the last look.
    finished: u64,
    looked: Option<Instant>,
    /// What subscribers begin with, once one has come since the last look. All who come until the next one share it: it
    /// is up to a thousand requests as JSON, and the thread that writes it forwards tokens.
    beginning: Option<Vec<Bytes>>,
}

/// One who looks; dropping it gives the place back.
pub struct Subscription {
    page: Page,
    updates: broadcast::Receiver<Bytes>,
    _place: OwnedSemaphorePermit,
}

impl Page {
    /// Of the cluster of `service`. Without [`Self::watch`] nothing changes.
    pub fn new(service: Service) -> Self {
        let (updates, _) = broadcast::channel(MAX_BEHIND);
        let (places, wanted) = (Arc::new(Semaphore::new(MAX_SUBSCRIBERS)), Notify::new());
        Self { inner: Arc::new(Inner { service, state: Mutex::default(), updates, places, wanted }) }
    }

    /// The router behind it.
    pub fn service(&self) -> &Service {
        &self.inner.service
    }

    /// A place among those who look, and the events with which it begins.
    ///
    /// # Errors
    /// `Overloaded`: there are enough.
    pub async fn subscribe(&self) -> Result<(Subscription, Vec<Bytes>), Error> {
        let place = Arc::clone(&self.inner.places).try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_SUBSCRIBERS} others look at this page already: try later");
            Error { retry_after: Some(5 * TICK), ..Error::new(ErrorKind::Overloaded, message) }
        })?;
        let mut state = self.inner.state.lock().await;
        // While nobody looked, nothing was read.
        if state.looked.is_none_or(|at| clock::now().saturating_duration_since(at) > TICK) {
            let update = self.look(&mut state).await;
            // Nobody is there: nobody misses it.
            let _ = self.inner.updates.send(update);
        }
        let (updates, events) = (self.inner.updates.subscribe(), self.beginning(&mut state));
        self.inner.wanted.notify_one();
        Ok((Subscription { page: self.clone(), updates, _place: place }, events))
    }

    /// Looks again and again. Ends never.
    pub async fn watch(self) {
        loop {
            while self.inner.updates.receiver_count() == 0 {
                self.inner.wanted.notified().await;
            }
            tokio::select! {
                () = tokio::time::sleep(TICK) => {}
                () = self.service().membership().changed() => tokio::time::sleep(SOON).await,
            }
            let mut state = self.inner.state.lock().await;
            let update = self.look(&mut state).await;
            let _ = self.inner.updates.send(update);
        }
    }

    /// One look, and the event that tells what changed.
    async fn look(&self, state: &mut State) -> Bytes {
        let service = self.service();
        let most = if state.looked.is_none() { MAX_READ_FIRST } else { MAX_READ };
        let since = service.traces().since(state.finished, most);
        let requests = since.finished.saturating_sub(state.finished);
        let rows = if since.traces.is_empty() {
            Vec::new()
        } else {
            let turn = service.traces().turn().await;
            let read = move || {
                let _turn = turn;
                Row::read(since.traces.iter().flatten().map(|own| without_events(&own())), MAX_READ_FIRST)
            };
            run_blocking("the traces cannot be read", read).await.unwrap_or_default()
        };
        let cluster = service.membership().now();
        let look = Look {
            at_ns: clock().unix_ns(cluster.at),
            cluster,
            counts: service.counts(),
            is_ready: service.ready(),
            is_draining: service.is_draining(),
            rows,
            finished: since.finished,
            unread: requests.saturating_sub(most as u64),
        };
        state.finished = since.finished;
        state.looked = Some(look.cluster.at);
        state.beginning = None;
        event("delta", state.view.advance(look))
    }

    /// As of the last look.
    fn beginning(&self, state: &mut State) -> Vec<Bytes> {
        let State { view, beginning, .. } = state;
        beginning.get_or_insert_with(|| self.whole(view)).clone()
    }

    /// Everything that is shown: the newest requests with all the rest, the older ones behind it.
    fn whole(&self, view: &View) -> Vec<Bytes> {
        let service = self.service();
        let mut whole = view.whole(ROWS_OF_EVENT);
        whole["about"] = json!({
            "model": service.model().model_name,
            "version": env!("CARGO_PKG_VERSION"),
            "lease_ms": service.membership().lease().as_millis() as u64,
            "jaeger": service.jaeger_ui().map(ToString::to_string),
            "tick_ms": TICK.as_millis() as u64,
        });
        let older = view.older(ROWS_OF_EVENT);
        let older = older.iter().map(|rows| event("older", json!({"requests": rows})));
        std::iter::once(event("whole", whole)).chain(older).collect()
    }
}

impl Subscription {
    /// The next events: an update, or everything anew for who is too far behind. `None`: there will be none.
    pub async fn next(&mut self) -> Option<Vec<Bytes>> {
        match self.updates.recv().await {
            Ok(update) => Some(vec![update]),
            Err(broadcast::error::RecvError::Closed) => None,
            Err(broadcast::error::RecvError::Lagged(_)) => {
                let mut state = self.page.inner.state.lock().await;
                self.updates = self.page.inner.updates.subscribe();
                Some(self.page.beginning(&mut state))
            }
        }
    }
}

/// The spans of a pack but for their events, of which a route has many and a row tells nothing.
fn without_events(packed: &[u8]) -> Vec<v1::Span> {
    let mut rest = Vec::with_capacity(packed.len());
    for span in raw(packed) {
        write::message(&mut rest, number::SPAN, |to| span.without_events(to));
    }
    unpack(&rest).collect()
}

/// A server-sent event that says itself what it is: `whole`, `older` or `delta`. JSON has no line breaks of its own.
fn event(kind: &str, mut data: Value) -> Bytes {
    data["kind"] = kind.into();
    format!("data: {data}\n\n").into()
}
