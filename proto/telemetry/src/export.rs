//! Spans to an OTLP/gRPC collector. A dead collector must cost a request nothing: `export` only counts and queues, one
//! task sends what came together, and every span that does not arrive is counted as dropped. Spans of several processes
//! go in one call, each in the name of the one that it is of: a router sends those that its nodes told of. They are in
//! OTLP's form already; a call puts their bytes beside each other.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;
use tandem_proto::codec::Codec;
use tandem_proto::{spans, v1};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status};

use crate::collector::{Collector, Connection, connect};
use crate::log_export;
use crate::otlp;

/// Spans that may wait for the collector; about 3 MB.
const QUEUE_SPANS: usize = 4096;
/// Spans of a call, but for the rest of the trace that begins in it.
const BATCH_SPANS: usize = 512;
/// A trace is in the collector this long after its request ended.
const SEND_EVERY: Duration = Duration::from_millis(250);
/// OTLP's one call for spans.
const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// The collector's time to answer one call.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Handle to the process's span exporter. Without an endpoint it takes spans and forgets them.
#[derive(Clone, Debug)]
pub struct Exporter {
    queue: Option<Queue>,
}

#[derive(Clone, Debug)]
struct Queue {
    sender: mpsc::UnboundedSender<Queued>,
    counts: Arc<Counts>,
}

/// Spans that came together, packed; or the wish to know when all before it are sent.
enum Queued {
    Spans(Vec<u8>),
    Flush(oneshot::Sender<()>),
}

/// OTLP's `ExportTraceServiceRequest`, whose spans are written already.
#[derive(Clone, PartialEq, Message)]
struct Export {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, optional, tag = "2")]
    scope_spans: Option<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    scope: Option<InstrumentationScope>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    spans: Vec<Vec<u8>>,
}

/// Bounds the queue, which has none of its own, by spans.
#[derive(Debug, Default)]
struct Counts {
    waiting: AtomicU64,
    dropped: AtomicU64,
}

impl Exporter {
    /// Starts exporting as `service` / `instance` (`service.name`, `service.instance.id`). Must run inside a tokio
    /// runtime: the connection lives there.
    ///
    /// # Errors
    /// The endpoint is not a `http://host:port` URL. An endpoint that does not answer is no error.
    pub fn start(service: &str, instance: &str, collector: &Collector) -> anyhow::Result<Self> {
        let Some(endpoint) = collector.endpoint() else { return Ok(Self::disabled()) };
        let connection = connect(endpoint, collector.headers(), SEND_TIMEOUT)?;
        log_export::start(endpoint, collector.headers(), service, instance)?;
        let counts = Arc::new(Counts::default());
        let (sender, spans) = mpsc::unbounded_channel();
        let sending = Sending {
            client: Grpc::new(connection),
            endpoint: endpoint.to_owned(),
            own: (service.to_owned(), instance.to_owned()),
            counts: Arc::clone(&counts),
            failing: false,
        };
        tokio::spawn(sending.run(spans));
        Ok(Self { queue: Some(Queue { sender, counts }) })
    }

    /// An exporter that forgets.
    pub fn disabled() -> Self {
        Self { queue: None }
    }

    /// Whether it does not forget.
    pub fn is_on(&self) -> bool {
        self.queue.is_some()
    }

    /// Queues packed spans (`tandem_proto::spans`), each of which arrives in the name of its process. Never blocks;
    /// spans for which there is no room, and malformed ones, are counted as dropped.
    pub fn export(&self, packed: Vec<u8>) {
        let Some(Queue { sender, counts }) = &self.queue else { return };
        let count = spans::each(&packed).count() as u64;
        let room = counts.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waiting| {
            Some(waiting + count).filter(|&waiting| waiting <= QUEUE_SPANS as u64)
        });
        if room.is_err() {
            counts.dropped.fetch_add(count, Ordering::Relaxed);
        } else if sender.send(Queued::Spans(packed)).is_err() {
            counts.settle(count, false);
        }
    }

    /// Spans that did not reach the collector.
    pub fn dropped(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.counts.dropped.load(Ordering::Relaxed))
    }

    /// Sends what waits. Takes seconds at most.
    pub async fn shutdown(&self) {
        let Some(Queue { sender, .. }) = &self.queue else { return };
        let (done, sent) = oneshot::channel();
        let flushed = async { sender.send(Queued::Flush(done)).is_ok() && sent.await.is_ok() };
        if !timeout(SHUTDOWN_TIMEOUT, flushed).await.unwrap_or(false) {
            tracing::warn!("spans may be lost at shutdown");
        }
        // It blocks, so it gets a thread; it fails only with the runtime, which ends.
        let _ = tokio::task::spawn_blocking(log_export::flush).await;
    }
}

impl Counts {
    fn settle(&self, spans: u64, arrived: bool) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        if !arrived {
            self.dropped.fetch_add(spans, Ordering::Relaxed);
        }
    }
}

/// The task that sends.
struct Sending {
    client: Grpc<Connection>,
    endpoint: String,
    /// Service and instance of this process.
    own: (String, String),
    counts: Arc<Counts>,
    failing: bool,
}

impl Sending {
    async fn run(mut self, mut queue: mpsc::UnboundedReceiver<Queued>) {
        loop {
            let (packed, flushed, open) = receive(&mut queue).await;
            if !packed.is_empty() {
                self.send(&packed).await;
            }
            if let Some(done) = flushed {
                let _ = done.send(());
            }
            if !open {
                return;
            }
        }
    }

    /// One call. A batch that does not arrive is dropped and counted; the next one is the retry.
    async fn send(&mut self, packed: &[u8]) {
        let all = spans::each(packed).count() as u64;
        let (request, count) = self.request(packed);
        self.counts.settle(all - count, false);
        let result = self.call(request).await;
        self.counts.settle(count, result.is_ok());
        self.tell(result.err());
    }

    async fn call(&mut self, request: Export) -> Result<(), Status> {
        self.client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = Codec::<Export, ExportTraceServiceResponse>::default();
        self.client.unary(Request::new(request), PathAndQuery::from_static(EXPORT), codec).await.map(drop)
    }

    /// The call, and how many spans are in it: those that have a place in a trace.
    fn request(&self, packed: &[u8]) -> (Export, u64) {
        let (mut processes, mut count) = (BTreeMap::<_, Vec<Vec<u8>>>::new(), 0);
        for raw in spans::raw(packed) {
            let mut span = Vec::with_capacity(raw.bytes().len());
            raw.without_process(&mut span);
            processes.entry(raw.process).or_default().push(span);
            count += 1;
        }
        let resource_spans = processes.into_iter().map(|(process, spans)| {
            let v1::Process { service, instance } = v1::Process::decode(process).unwrap_or_default();
            let version = ((&service, &instance) == (&self.own.0, &self.own.1)).then_some(env!("CARGO_PKG_VERSION"));
            let resource = Some(otlp::resource(&service, &instance, version));
            ResourceSpans { resource, scope_spans: Some(ScopeSpans { scope: Some(otlp::scope()), spans }) }
        });
        (Export { resource_spans: resource_spans.collect() }, count)
    }

    /// Logs once when the collector goes away and once when it is back.
    fn tell(&mut self, failure: Option<Status>) {
        let endpoint = &self.endpoint;
        match (&failure, self.failing) {
            (Some(error), false) => {
                tracing::warn!(endpoint, %error, "OTLP collector cannot be reached: dropping spans")
            }
            (None, true) => tracing::info!(endpoint, "OTLP collector is back"),
            _ => {}
        }
        self.failing = failure.is_some();
    }
}

/// What comes together goes together: a call to the collector costs more than its spans. Gives the spans, who waits for
/// them to be sent, and whether there can be more.
async fn receive(queue: &mut mpsc::UnboundedReceiver<Queued>) -> (Vec<u8>, Option<oneshot::Sender<()>>, bool) {
    let mut packed = match queue.recv().await {
        Some(Queued::Spans(packed)) => packed,
        Some(Queued::Flush(done)) => return (Vec::new(), Some(done), true),
        None => return (Vec::new(), None, false),
    };
    let mut count = spans::each(&packed).count();
    let more = async {
        while count < BATCH_SPANS {
            match queue.recv().await {
                Some(Queued::Spans(more)) => {
                    count += spans::each(&more).count();
                    packed.extend(more);
                }
                Some(Queued::Flush(done)) => return (Some(done), true),
                None => return (None, false),
            }
        }
        (None, true)
    };
    let (flushed, open) = timeout(SEND_EVERY, more).await.unwrap_or((None, true));
    (packed, flushed, open)
}
