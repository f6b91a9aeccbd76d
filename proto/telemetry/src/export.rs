//! Spans to an OTLP/gRPC collector. A dead collector must cost a request nothing: `export` only counts and queues,
//! the SDK's batch processor sends from its own thread, and every span that does not arrive is counted as dropped.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry_otlp::{RetryPolicy, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::ResourceBuilder;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor};
use tandem_proto::v1;

use crate::collector::Collector;
use crate::log_export;
use crate::otlp::span_data;
use crate::relay::Relay;

/// Spans that may wait for the collector; about 3 MB.
pub(crate) const QUEUE_SPANS: usize = 4096;
pub(crate) const BATCH_SPANS: usize = 512;
/// A trace is in the collector this long after its request ended.
pub(crate) const SEND_EVERY: Duration = Duration::from_millis(250);
/// The collector's time to answer one batch.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Handle to the process's span exporter. Without an endpoint it takes spans and forgets them.
#[derive(Clone, Debug)]
pub struct Exporter {
    sender: Option<Arc<Sender>>,
}

#[derive(Debug)]
struct Sender {
    processor: BatchSpanProcessor,
    relay: Relay,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    waiting: AtomicU64,
    dropped: AtomicU64,
    failing: AtomicBool,
}

impl Exporter {
    /// Starts exporting as `service` / `instance` (`service.name`, `service.instance.id`). Must run inside a tokio
    /// runtime: the connection lives there.
    ///
    /// # Errors
    /// The endpoint is not a `http://host:port` URL. An endpoint that does not answer is no error.
    pub fn start(service: &str, instance: &str, collector: &Collector) -> anyhow::Result<Self> {
        let Some(endpoint) = collector.endpoint() else { return Ok(Self::disabled()) };
        let counts = Arc::new(Counts::default());
        let counting = |inner| Counting { inner, endpoint: endpoint.to_owned(), counts: counts.clone() };
        let mut processor = BatchSpanProcessor::new(counting(connect(endpoint)?), batches());
        let own =
            resource(service, instance).with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        let own = own.build();
        processor.set_resource(&own);
        // With a connection of its own, which is made when it is used.
        let relay = Relay::start(counting(connect(endpoint)?));
        log_export::start(endpoint, own)?;
        Ok(Self { sender: Some(Arc::new(Sender { processor, relay, counts })) })
    }

    /// An exporter that forgets.
    pub fn disabled() -> Self {
        Self { sender: None }
    }

    /// Whether it does not forget.
    pub fn is_on(&self) -> bool {
        self.sender.is_some()
    }

    /// Queues a copy of a span. Never blocks; a full queue or a malformed span is a counted drop.
    pub fn export(&self, span: &v1::Span) {
        let Some(sender) = self.with_room() else { return };
        match span_data(span.clone()) {
            Some(data) => sender.processor.on_end(data),
            None => sender.counts.settle(1, false),
        }
    }

    /// The same for a span of another process, which did not export it: it arrives in that one's name.
    pub fn pass_on(&self, span: v1::Span) {
        if let Some(sender) = self.with_room() {
            sender.relay.pass_on(span);
        }
    }

    /// Where one more span may wait; without room it is a counted drop.
    fn with_room(&self) -> Option<&Sender> {
        let sender = self.sender.as_deref()?;
        let counts = &sender.counts;
        let room = counts.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waiting| {
            (waiting < QUEUE_SPANS as u64).then_some(waiting + 1)
        });
        if room.is_err() {
            counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
        room.is_ok().then_some(sender)
    }

    /// Spans that did not reach the collector.
    pub fn dropped(&self) -> u64 {
        self.sender.as_ref().map_or(0, |sender| sender.counts.dropped.load(Ordering::Relaxed))
    }

    /// Sends what waits, then stops. Bounded by a few seconds; the processor's shutdown blocks, so it gets a thread.
    pub async fn shutdown(&self) {
        let Some(sender) = self.sender.clone() else { return };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, sender.relay.flushed()).await.is_err() {
            tracing::warn!("other processes' spans may be lost at shutdown");
        }
        let stopped = tokio::task::spawn_blocking(move || {
            log_export::flush();
            sender.processor.shutdown_with_timeout(SHUTDOWN_TIMEOUT)
        });
        match stopped.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "spans may be lost at shutdown"),
            Err(error) => tracing::warn!(%error, "span exporter did not stop"),
        }
    }
}

fn connect(endpoint: &str) -> anyhow::Result<opentelemetry_otlp::SpanExporter> {
    opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(SEND_TIMEOUT)
        // A batch that failed is dropped and counted; the next one is the retry.
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .with_context(|| format!("OTLP endpoint {endpoint:?} is not usable (expected http://host:port)"))
}

/// Who a span is from.
pub(crate) fn resource(service: &str, instance: &str) -> ResourceBuilder {
    let instance = KeyValue::new("service.instance.id", instance.to_owned());
    Resource::builder_empty().with_service_name(service.to_owned()).with_attribute(instance)
}

fn batches() -> opentelemetry_sdk::trace::BatchConfig {
    BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE_SPANS)
        .with_max_export_batch_size(BATCH_SPANS)
        .with_scheduled_delay(SEND_EVERY)
        .build()
}

impl Counts {
    pub(crate) fn settle(&self, spans: u64, arrived: bool) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        if !arrived {
            self.dropped.fetch_add(spans, Ordering::Relaxed);
        }
    }
}

/// The SDK drops silently; this wrapper counts, and logs once when the collector goes away and once when it is back.
#[derive(Debug)]
pub(crate) struct Counting<E> {
    inner: E,
    endpoint: String,
    pub(crate) counts: Arc<Counts>,
}

impl<E: SpanExporter> SpanExporter for Counting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let result = self.inner.export(batch).await;
        self.counts.settle(spans, result.is_ok());
        let failed = result.is_err();
        if self.counts.failing.swap(failed, Ordering::Relaxed) != failed {
            match &result {
                Ok(()) => tracing::info!(endpoint = self.endpoint, "OTLP collector is back"),
                Err(error) => tracing::warn!(endpoint = self.endpoint, %error, "OTLP collector away: dropping spans"),
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
