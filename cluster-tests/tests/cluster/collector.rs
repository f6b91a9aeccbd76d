//! An OTLP/gRPC collector that keeps what it gets: spans, log lines, metrics. Knows no test.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
pub use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::Notify;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Exporters send in batches, at least every five seconds.
pub const EXPORTED: Duration = Duration::from_secs(20);

/// Attributes by name.
pub type Attributes = BTreeMap<String, Value>;

/// One span.
#[derive(Clone, Debug)]
pub struct Span {
    pub service: String,
    pub name: String,
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub state: String,
    pub start: u64,
    pub end: u64,
    pub attributes: Attributes,
    /// Ids of the spans it links to.
    pub links: Vec<String>,
}

/// One line of a log.
#[derive(Clone, Debug)]
pub struct Line {
    pub service: String,
    pub severity: String,
    pub text: String,
    pub trace: String,
    pub span: String,
    pub attributes: Attributes,
}

/// The metrics of one process, as it last sent them.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    pub resource: Attributes,
    pub metrics: BTreeMap<String, Metric>,
    /// Times that it sent some.
    pub times: usize,
}

/// What came so far.
#[derive(Debug, Default)]
pub struct Got {
    pub spans: Vec<Span>,
    pub lines: Vec<Line>,
    /// By service.
    pub metrics: BTreeMap<String, Scrape>,
}

/// See the head of this file.
#[derive(Clone)]
pub struct Collector {
    url: String,
    got: Arc<Mutex<Got>>,
    came: Arc<Notify>,
}

impl Collector {
    /// Starts one on a free port.
    pub async fn start() -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let own = Self { url, got: Arc::default(), came: Arc::default() };
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(own.clone()))
            .add_service(LogsServiceServer::new(own.clone()))
            .add_service(MetricsServiceServer::new(own.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Ok(own)
    }

    /// The flags of processes that report here, metrics each quarter of a second.
    pub fn flags(&self) -> Vec<String> {
        self.flags_with_metrics_every(250)
    }

    /// The same with metrics so often.
    pub fn flags_with_metrics_every(&self, ms: u32) -> Vec<String> {
        ["--otlp-endpoint", &self.url, "--otlp-metrics-ms", &ms.to_string()].map(str::to_owned).to_vec()
    }

    /// Waits until `find` finds what it looks for in all that came.
    ///
    /// # Panics
    /// It does not in time.
    pub async fn until<T>(&self, what: &str, find: impl Fn(&Got) -> Option<T>) -> T {
        let search = async {
            loop {
                let came = self.came.notified();
                if let Some(found) = self.so_far(&find) {
                    return found;
                }
                came.await;
            }
        };
        let found = tokio::time::timeout(EXPORTED, search).await;
        found.unwrap_or_else(|_| panic!("{what} did not come: {}", self.so_far(summary)))
    }

    /// What came so far.
    pub fn so_far<T>(&self, look: impl FnOnce(&Got) -> T) -> T {
        look(&self.got.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn keep(&self, keep: impl FnOnce(&mut Got)) {
        keep(&mut self.got.lock().unwrap_or_else(PoisonError::into_inner));
        self.came.notify_waiters();
    }
}

fn summary(got: &Got) -> String {
    let spans: Vec<_> = got.spans.iter().map(|span| (&span.service, &span.name, &span.id, &span.parent)).collect();
    let lines: Vec<_> = got.lines.iter().map(|line| (&line.service, &line.text, &line.trace)).collect();
    let times: Vec<_> = got.metrics.iter().map(|(service, scrape)| (service, scrape.times)).collect();
    format!("spans {spans:#?}, lines {lines:#?}, metrics {times:?}")
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for sent in request.into_inner().resource_spans {
            let service = service(&resource(sent.resource));
            let spans = sent.scope_spans.into_iter().flat_map(|scope| scope.spans).map(|span| Span {
                service: service.clone(),
                name: span.name,
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                state: span.trace_state,
                start: span.start_time_unix_nano,
                end: span.end_time_unix_nano,
                attributes: attributes(span.attributes),
                links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
            });
            self.keep(|got| got.spans.extend(spans));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl LogsService for Collector {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        for sent in request.into_inner().resource_logs {
            let service = service(&resource(sent.resource));
            let lines = sent.scope_logs.into_iter().flat_map(|scope| scope.log_records).map(|record| Line {
                service: service.clone(),
                severity: record.severity_text,
                text: match record.body.and_then(|body| body.value) {
                    Some(Value::StringValue(text)) => text,
                    other => panic!("a line of {service} without a text: {other:?}"),
                },
                trace: hex(&record.trace_id),
                span: hex(&record.span_id),
                attributes: attributes(record.attributes),
            });
            self.keep(|got| got.lines.extend(lines));
        }
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        for sent in request.into_inner().resource_metrics {
            let resource = resource(sent.resource);
            let metrics = sent.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
            let metrics = metrics.map(|metric| (metric.name.clone(), metric)).collect();
            self.keep(|got| {
                let scrape = got.metrics.entry(service(&resource)).or_default();
                *scrape = Scrape { resource, metrics, times: scrape.times + 1 };
            });
        }
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

fn resource(resource: Option<Resource>) -> Attributes {
    attributes(resource.unwrap_or_default().attributes)
}

fn service(resource: &Attributes) -> String {
    match resource.get("service.name") {
        Some(Value::StringValue(name)) => name.clone(),
        other => panic!("no service name: {other:?}"),
    }
}

/// Attributes as a map.
pub fn attributes(list: Vec<KeyValue>) -> Attributes {
    let value = |value: Option<AnyValue>| value.and_then(|value| value.value);
    list.into_iter().filter_map(|pair| Some((pair.key, value(pair.value)?))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
