//! Log lines to an OTLP/gRPC collector, beside the spans. The SDK's batch processor sends from a thread of its own,
//! drops what its queue has no room for, and is asked for nothing where there is no endpoint.
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry::logs::{AnyValue, LogRecord, Logger, LoggerProvider, Severity};
use opentelemetry::trace::{SpanId, TraceFlags, TraceId};
use opentelemetry_otlp::{RetryPolicy, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{BatchConfigBuilder, BatchLogProcessor, SdkLogger, SdkLoggerProvider};
use tandem_proto::TraceContext;
use tracing::{Level, Metadata};

use crate::fields::Fields;
use crate::headers::Headers;
use crate::phase::Value;

/// Lines that may wait for the collector.
const QUEUE_LINES: usize = 2048;
const BATCH_LINES: usize = 512;
const SEND_EVERY: Duration = Duration::from_millis(500);
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Lines of those who send lines would be about themselves.
const OWN: [&str; 6] = ["opentelemetry", "h2", "hyper", "tonic", "tower", "reqwest"];

/// What takes lines.
pub(crate) struct Queue {
    provider: SdkLoggerProvider,
    logger: SdkLogger,
}

static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Where there is a collector.
pub(crate) fn queue() -> Option<&'static Queue> {
    QUEUE.get()
}

/// From now on lines go to the collector. Must run inside a tokio runtime, as the connection does. The first call of a
/// process counts.
///
/// # Errors
/// The endpoint is no URL.
pub(crate) fn start(endpoint: &str, headers: &Headers, service: &str, instance: &str) -> anyhow::Result<()> {
    let exporter = opentelemetry_otlp::LogExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_metadata(headers.metadata())
        .with_timeout(SEND_TIMEOUT)
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .with_context(|| format!("OTLP endpoint {endpoint:?} is not usable (expected http://host:port)"))?;
    let batches = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE_LINES)
        .with_max_export_batch_size(BATCH_LINES)
        .with_scheduled_delay(SEND_EVERY)
        .build();
    let who = [("service.instance.id", instance.to_owned()), ("service.version", env!("CARGO_PKG_VERSION").to_owned())];
    let resource = Resource::builder_empty()
        .with_service_name(service.to_owned())
        .with_attributes(who.map(|(key, value)| KeyValue::new(key, value)))
        .build();
    let processor = BatchLogProcessor::builder(exporter).with_batch_config(batches).build();
    let provider = SdkLoggerProvider::builder().with_log_processor(processor).with_resource(resource).build();
    let logger = provider.logger("tandem");
    let _ = QUEUE.set(Queue { provider, logger });
    Ok(())
}

/// Sends what waits. Blocks, for a time that has a bound.
pub(crate) fn flush() {
    if let Some(queue) = queue() {
        // Who has nothing to send to has said so.
        let _ = queue.provider.force_flush();
    }
}

impl Queue {
    /// Queues a line.
    pub fn take(&self, metadata: &Metadata<'static>, fields: Fields, ids: Option<TraceContext>) {
        let target = metadata.target();
        if OWN.iter().any(|own| target.starts_with(own)) {
            return;
        }
        let mut record = self.logger.create_log_record();
        let (number, text) = severity(*metadata.level());
        record.set_severity_number(number);
        record.set_severity_text(text);
        record.set_timestamp(std::time::SystemTime::now());
        record.set_target(target);
        record.add_attributes(fields.attributes().map(|(key, value)| (key, any(value))));
        record.set_body(AnyValue::from(fields.message));
        if let Some(TraceContext { trace_id, span_id, .. }) = ids {
            let flags = Some(TraceFlags::SAMPLED);
            record.set_trace_context(TraceId::from_bytes(trace_id), SpanId::from_bytes(span_id), flags);
        }
        self.logger.emit(record);
    }
}

fn severity(level: Level) -> (Severity, &'static str) {
    match level {
        Level::ERROR => (Severity::Error, "ERROR"),
        Level::WARN => (Severity::Warn, "WARN"),
        Level::INFO => (Severity::Info, "INFO"),
        Level::DEBUG => (Severity::Debug, "DEBUG"),
        Level::TRACE => (Severity::Trace, "TRACE"),
    }
}

fn any(value: Value) -> AnyValue {
    match value {
        Value::Text(text) => text.into(),
        Value::Texts(items) => items.into_iter().collect(),
        Value::Integer(integer) => integer.into(),
        Value::Number(number) => number.into(),
        Value::Flag(flag) => flag.into(),
    }
}
