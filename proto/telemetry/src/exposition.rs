//! Metrics as text: OpenMetrics (<https://prometheus.io/docs/specs/om/open_metrics_spec/>) for scrapers that ask for it
//! and for the collector, and Prometheus' classic form
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>) for all others. Histograms point to traces.
use std::fmt::{self, Write};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::registry::Registry;
use tandem_proto::TraceContext;
use tandem_proto::trace::hex;

/// What one says who takes it.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Bounds for times: down to 0.5 ms, up to two minutes.
pub const SECONDS: [f64; 18] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// A histogram of which each bucket points to the trace of the last request in it.
pub type Traced = HistogramWithExemplars<Exemplar>;

/// Points from a histogram's bucket to a trace. Each request leaves some twenty.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Exemplar {
    /// Of the trace.
    pub trace_id: TraceId,
}

/// Written as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

impl EncodeLabelValue for TraceId {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(&hex(&self.0))
    }
}

impl Exemplar {
    /// To the trace of this span.
    pub fn of(trace: TraceContext) -> Self {
        Self { trace_id: TraceId(trace.trace_id) }
    }
}

/// The content type and the text for a scraper with this `Accept` header.
pub fn exposition(registry: &Registry, accept: Option<&str>) -> (&'static str, String) {
    let mut text = String::new();
    if encode(&mut text, registry).is_err() {
        tracing::error!("metrics could not be written");
    }
    if accept.is_some_and(|accept| accept.contains("application/openmetrics-text")) {
        (OPEN_METRICS, text)
    } else {
        (CLASSIC, classic(&text))
    }
}

/// Classic text from OpenMetrics text: counters are named as their samples are; no units, exemplars or end mark.
fn classic(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + open_metrics.len() / 8);
    let mut lines = open_metrics.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("# EOF") || line.starts_with("# UNIT") {
            continue;
        }
        let described = ["# HELP ", "# TYPE "].into_iter().find_map(|mark| Some((mark, line.strip_prefix(mark)?)));
        let Some((mark, (name, rest))) = described.and_then(|(mark, rest)| Some((mark, rest.split_once(' ')?))) else {
            text.extend([line.split(" # {").next().unwrap_or(line), "\n"]);
            continue;
        };
        // A family's type stands behind its help. A gauge may have a counter's name.
        let kind = if mark == "# HELP " { lines.peek().copied().unwrap_or_default() } else { line };
        let total = if kind.ends_with(" counter") { "_total" } else { "" };
        text.extend([mark, name, total, " ", rest, "\n"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::registry::Unit;

    use super::*;

    fn registry() -> Registry {
        let mut registry = Registry::default();
        let (counter, gauge, histogram) =
            (Counter::<u64>::default(), Gauge::<i64>::default(), Traced::new([1.0].into_iter()));
        counter.inc_by(3);
        gauge.set(2);
        histogram.observe(0.5, Some(Exemplar { trace_id: TraceId([0xab; 16]) }), None);
        let registered = registry.sub_registry_with_label(("instance".into(), "a\"b".into()));
        // Both have this name.
        registered.register("tandem_sessions", "That are", gauge);
        registered.register("tandem_sessions", "That began", counter);
        registered.register_with_unit("tandem_wait", "Times", Unit::Seconds, histogram);
        registry
    }

    #[test]
    fn classic_text_for_whom_asks_for_nothing_else() {
        let (kind, text) = exposition(&registry(), Some("*/*"));
        let expected = "# HELP tandem_sessions That are.\n# TYPE tandem_sessions gauge\n\
            tandem_sessions{instance=\"a\\\"b\"} 2\n\
            # HELP tandem_sessions_total That began.\n# TYPE tandem_sessions_total counter\n\
            tandem_sessions_total{instance=\"a\\\"b\"} 3\n\
            # HELP tandem_wait_seconds Times.\n# TYPE tandem_wait_seconds histogram\n\
            tandem_wait_seconds_sum{instance=\"a\\\"b\"} 0.5\n\
            tandem_wait_seconds_count{instance=\"a\\\"b\"} 1\n\
            tandem_wait_seconds_bucket{instance=\"a\\\"b\",le=\"1.0\"} 1\n\
            tandem_wait_seconds_bucket{instance=\"a\\\"b\",le=\"+Inf\"} 1\n";
        assert_eq!((kind, text.as_str()), (CLASSIC, expected));
    }

    #[test]
    fn open_metrics_when_asked() {
        let (kind, text) = exposition(&registry(), Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        assert_eq!(kind, OPEN_METRICS);
        assert!(text.contains("# TYPE tandem_sessions counter\ntandem_sessions_total{"), "{text}");
        let exemplar = "} 1 # {trace_id=\"abababababababababababababababab\"} 0.5\n";
        assert!(text.contains(exemplar) && text.ends_with("# EOF\n"), "{text}");
    }
}
