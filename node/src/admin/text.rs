//! The two text forms of metrics: Prometheus' classic one
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>) and OpenMetrics for scrapers that ask for it
//! (<https://prometheus.io/docs/specs/om/open_metrics_spec/>). Knows no metric.
use std::fmt::Write;

use tandem_proto::trace::hex;

use crate::figures::{Bucket, Exemplar, Histogram};

/// How the metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Classic,
    OpenMetrics,
}

impl Form {
    /// What a scraper with this `Accept` header understands.
    pub fn accepted(accept: Option<&str>) -> Self {
        let open = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Classic }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Writer of one scrape. All samples carry role and instance, vLLM's the model's name, too.
pub(super) struct Text {
    out: String,
    form: Form,
    name: &'static str,
    common: [(&'static str, String); 3],
}

impl Text {
    pub fn new(form: Form, role: &str, instance: &str, model_name: &str) -> Self {
        let common = [("role", role), ("instance", instance), ("model_name", model_name)];
        Self { out: String::new(), form, name: "", common: common.map(|(key, value)| (key, value.to_owned())) }
    }

    /// The samples that follow are of this metric. A counter's name ends with `_total`.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        // There the name of a counter is that of its samples without the ending.
        let counts = self.form == Form::OpenMetrics && kind == "counter";
        let family = if counts { name.strip_suffix("_total").unwrap_or(name) } else { name };
        // Writing to a String cannot fail.
        let _ = write!(self.out, "# HELP {family} {help}\n# TYPE {family} {kind}\n");
    }

    pub fn sample(&mut self, labels: &[(&str, &str)], value: f64) {
        self.sample_of("", labels, value, None);
    }

    pub fn histogram(&mut self, name: &'static str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let buckets = histogram.buckets();
        for Bucket { bound, count, exemplar } in &buckets {
            // With a point, as OpenMetrics wants it, and as the router writes it in both forms.
            let bound = if bound.is_finite() { format!("{bound:?}") } else { "+Inf".to_owned() };
            // Only there: a reader of the classic form takes it for garbage.
            let exemplar = exemplar.filter(|_| self.form == Form::OpenMetrics);
            self.sample_of("_bucket", &[("le", &bound)], *count as f64, exemplar);
        }
        self.sample_of("_sum", &[], histogram.sum(), None);
        self.sample_of("_count", &[], buckets.last().map_or(0, |all| all.count) as f64, None);
    }

    /// The whole text.
    pub fn finish(mut self) -> String {
        if self.form == Form::OpenMetrics {
            self.out.push_str("# EOF\n");
        }
        self.out
    }

    fn sample_of(&mut self, part: &str, labels: &[(&str, &str)], value: f64, exemplar: Option<Exemplar>) {
        let common = if self.name.starts_with("vllm:") { &self.common[..] } else { &self.common[..2] };
        let common = common.iter().map(|(key, value)| (*key, value.as_str()));
        let labels: Vec<_> =
            common.chain(labels.iter().copied()).map(|(key, value)| format!("{key}=\"{}\"", escape(value))).collect();
        let _ = write!(self.out, "{}{part}{{{}}} {value}", self.name, labels.join(","));
        if let Some(Exemplar { trace_id, value }) = exemplar {
            let _ = write!(self.out, " # {{trace_id=\"{}\"}} {value}", hex(&trace_id));
        }
        self.out.push('\n');
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(form: Form) -> String {
        let mut text = Text::new(form, "decode", "a\"b", "m");
        text.family("tandem_kv_blocks", "gauge", "Blocks.");
        text.sample(&[("state", "free")], 3.0);
        text.family("vllm:request_success_total", "counter", "Answers.");
        text.sample(&[("finished_reason", "stop")], 2.0);
        let histogram = Histogram::new(&[1.0]);
        histogram.observe(0.5, [0xab; 16]);
        text.histogram("tandem_x_seconds", "Times.", &histogram);
        text.finish()
    }

    #[test]
    fn classic_text() {
        let expected = "# HELP tandem_kv_blocks Blocks.\n# TYPE tandem_kv_blocks gauge\n\
            tandem_kv_blocks{role=\"decode\",instance=\"a\\\"b\",state=\"free\"} 3\n\
            # HELP vllm:request_success_total Answers.\n# TYPE vllm:request_success_total counter\n\
            vllm:request_success_total{role=\"decode\",instance=\"a\\\"b\",model_name=\"m\",finished_reason=\"stop\"} 2\n\
            # HELP tandem_x_seconds Times.\n# TYPE tandem_x_seconds histogram\n\
            tandem_x_seconds_bucket{role=\"decode\",instance=\"a\\\"b\",le=\"1.0\"} 1\n\
            tandem_x_seconds_bucket{role=\"decode\",instance=\"a\\\"b\",le=\"+Inf\"} 1\n\
            tandem_x_seconds_sum{role=\"decode\",instance=\"a\\\"b\"} 0.5\n\
            tandem_x_seconds_count{role=\"decode\",instance=\"a\\\"b\"} 1\n";
        assert_eq!(written(Form::accepted(None)), expected);
        assert_eq!(Form::accepted(Some("*/*")).content_type(), "text/plain; version=0.0.4; charset=utf-8");
    }

    #[test]
    fn open_metrics_when_asked() {
        let form = Form::accepted(Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        let text = written(form);
        assert!(form.content_type().starts_with("application/openmetrics-text"));
        assert!(text.contains("# TYPE vllm:request_success counter\nvllm:request_success_total{"), "{text}");
        let exemplar = "le=\"1.0\"} 1 # {trace_id=\"abababababababababababababababab\"} 0.5\n";
        assert!(text.contains(exemplar) && text.ends_with("} 1\n# EOF\n"), "{text}");
    }
}
