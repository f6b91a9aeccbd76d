//! Metrics to an OTLP/gRPC collector: the families that `/metrics` has, read from its text, cumulative since the start
//! of the process, histograms with their bounds and exemplars. One task asks for the text at each interval and sends
//! it; no request waits for it. A collector that takes no metrics, as Jaeger, is asked once.
use std::sync::Arc;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::metrics::v1::{Metric, ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval_at, timeout};
use tonic::Code;

use crate::clock::{clock, now};
use crate::collector::{Collector, Connection, connect};
use crate::convert::metrics;
use crate::otlp;

/// For one export; the next one has all that it had.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// For the last one.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Handle to the task. Without a collector there is none.
#[derive(Clone, Debug, Default)]
pub struct MetricsExport {
    end: Option<mpsc::Sender<oneshot::Sender<()>>>,
}

/// Writes the metrics as OpenMetrics text.
pub type Text = Arc<dyn Fn() -> String + Send + Sync>;

impl MetricsExport {
    /// Starts exporting what `text` says as `service` / `instance`. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// The endpoint is no URL. One that does not answer is no error.
    pub fn start(service: &str, instance: &str, collector: &Collector, text: Text) -> anyhow::Result<Self> {
        let Some(endpoint) = collector.metrics_endpoint() else { return Ok(Self::default()) };
        let connection = connect(endpoint, collector.metrics_headers(), SEND_TIMEOUT)?;
        let sender = Sender {
            client: MetricsServiceClient::new(connection),
            endpoint: endpoint.to_owned(),
            resource: otlp::resource(service, instance, Some(env!("CARGO_PKG_VERSION"))),
            start_unix_ns: clock().unix_ns(now()),
            text,
            failing: false,
        };
        // Ends that are asked for: at most a few.
        let (end, ends) = mpsc::channel(1);
        tokio::spawn(sender.run(collector.metrics_every(), ends));
        Ok(Self { end: Some(end) })
    }

    /// Sends the last figures, then stops. Takes seconds at most.
    pub async fn shutdown(&self) {
        let Some(end) = &self.end else { return };
        let (done, sent) = oneshot::channel();
        // A task that has ended has nothing to send.
        let _ = timeout(SHUTDOWN_TIMEOUT, async { end.send(done).await.is_ok() && sent.await.is_ok() }).await;
    }
}

struct Sender {
    client: MetricsServiceClient<Connection>,
    endpoint: String,
    resource: Resource,
    start_unix_ns: u64,
    text: Text,
    failing: bool,
}

impl Sender {
    async fn run(mut self, every: Duration, mut ends: mpsc::Receiver<oneshot::Sender<()>>) {
        let mut ticks = interval_at(tokio::time::Instant::now() + every, every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let ended = tokio::select! {
                ended = ends.recv() => Some(ended),
                _ = ticks.tick() => None,
            };
            let wanted = self.send().await;
            if let Some(ended) = ended {
                if let Some(done) = ended {
                    let _ = done.send(());
                }
                return;
            }
            if !wanted {
                return;
            }
        }
    }

    /// Whether the collector takes metrics at all, as far as that is known.
    async fn send(&mut self) -> bool {
        let (text, start, at) = (Arc::clone(&self.text), self.start_unix_ns, clock().unix_ns(now()));
        // Hundreds of series take a while to write and to read.
        let made = tokio::task::spawn_blocking(move || metrics(&text(), start, at)).await;
        let Ok(metrics) = made else { return true };
        let result = self.client.export(self.request(metrics)).await.map(drop);
        let failed = result.is_err();
        match result {
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::info!(endpoint = self.endpoint, "the OTLP collector takes no metrics: sending none");
                return false;
            }
            Err(status) if !self.failing => {
                tracing::warn!(endpoint = self.endpoint, error = %status, "OTLP collector cannot be reached: it misses metrics");
            }
            Ok(()) if self.failing => tracing::info!(endpoint = self.endpoint, "OTLP collector takes metrics again"),
            _ => {}
        }
        self.failing = failed;
        true
    }

    fn request(&self, metrics: Vec<Metric>) -> ExportMetricsServiceRequest {
        let scope_metrics = vec![ScopeMetrics { scope: Some(otlp::scope()), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        ExportMetricsServiceRequest { resource_metrics }
    }
}
