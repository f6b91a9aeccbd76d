//! Which collector a process reports to: flags, and the variables that OpenTelemetry gives the same meaning
//! (<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>). Each process takes the same ones.
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::headers::Headers;

/// OpenTelemetry's.
const METRICS_EVERY_MS: &str = "60000";

/// See the head of this file.
#[derive(Args, Clone, Debug)]
pub struct Collector {
    /// OTLP/gRPC collector for spans, log lines and metrics, as http://host:port. The router sends the spans of all
    /// nodes. A node sends spans itself only where no router takes them, as when none is connected
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
    /// The collector for metrics, where it is another one
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")]
    otlp_metrics_endpoint: Option<String>,
    /// Headers of every call to it, percent-encoded. Prefer the variable: all users of a machine can read flags
    #[arg(
        long,
        value_name = "KEY=VALUE,…",
        env = "OTEL_EXPORTER_OTLP_HEADERS",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true
    )]
    otlp_headers: Headers,
    /// Those of calls with metrics, where they are others
    #[arg(long, value_name = "KEY=VALUE,…", env = "OTEL_EXPORTER_OTLP_METRICS_HEADERS", hide_env_values = true)]
    otlp_metrics_headers: Option<Headers>,
    /// Milliseconds from one export of metrics to the next
    #[arg(
        long,
        value_name = "MS",
        env = "OTEL_METRIC_EXPORT_INTERVAL",
        default_value = METRICS_EVERY_MS,
        value_parser = interval
    )]
    otlp_metrics_ms: Duration,
}

impl Default for Collector {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_metrics_endpoint: None,
            otlp_headers: Headers::default(),
            otlp_metrics_headers: None,
            otlp_metrics_ms: Duration::from_secs(60),
        }
    }
}

impl Collector {
    /// One for everything.
    pub fn at(endpoint: impl Into<String>) -> Self {
        Self { otlp_endpoint: Some(endpoint.into()), ..Self::default() }
    }

    /// The same, with metrics so often.
    #[must_use]
    pub fn with_metrics_every(self, interval: Duration) -> Self {
        Self { otlp_metrics_ms: interval, ..self }
    }

    /// The same, which wants headers.
    ///
    /// # Errors
    /// Not `key=value,key=value`.
    pub fn with_headers(self, headers: &str) -> Result<Self, String> {
        Ok(Self { otlp_headers: headers.parse()?, ..self })
    }

    /// For spans and log lines.
    pub fn endpoint(&self) -> Option<&str> {
        given(&self.otlp_endpoint)
    }

    /// For metrics.
    pub fn metrics_endpoint(&self) -> Option<&str> {
        given(&self.otlp_metrics_endpoint).or(self.endpoint())
    }

    /// For spans and log lines.
    pub(crate) fn headers(&self) -> &Headers {
        &self.otlp_headers
    }

    /// For metrics.
    pub(crate) fn metrics_headers(&self) -> &Headers {
        self.otlp_metrics_headers.as_ref().unwrap_or(&self.otlp_headers)
    }

    /// Whether its addresses can be used. Whether anybody is there is not asked.
    ///
    /// # Errors
    /// One is not a `http://host:port` URL.
    pub fn check(&self) -> anyhow::Result<()> {
        self.endpoint().into_iter().chain(self.metrics_endpoint()).try_for_each(|text| usable(text).map(drop))
    }

    /// From one export of metrics to the next.
    pub fn metrics_every(&self) -> Duration {
        self.otlp_metrics_ms
    }
}

/// To a collector, with its headers.
pub(crate) type Connection = InterceptedService<Channel, Headers>;

/// A connection that is made when it is used, to a collector that has `limit` to answer.
///
/// # Errors
/// The endpoint is not a `http://host:port` URL. An endpoint that does not answer is no error.
pub(crate) fn connect(endpoint: &str, headers: &Headers, limit: Duration) -> anyhow::Result<Connection> {
    let channel = usable(endpoint)?.timeout(limit).connect_timeout(limit).connect_lazy();
    Ok(InterceptedService::new(channel, headers.clone()))
}

fn usable(text: &str) -> anyhow::Result<Endpoint> {
    let endpoint = Endpoint::from_shared(text.to_owned()).ok().filter(|endpoint| {
        // `Uri` takes a port that is no number and leaves it out: what it understood must be what stands there.
        let uri = endpoint.uri();
        let understood = uri.port().map_or(String::new(), |port| format!(":{port}"));
        uri.scheme_str() == Some("http")
            && uri.authority().is_some_and(|all| all.as_str() == format!("{}{understood}", all.host()))
    });
    endpoint.with_context(|| format!("OTLP endpoint {text:?} is not usable (expected http://host:port)"))
}

/// An empty variable is none.
fn given(endpoint: &Option<String>) -> Option<&str> {
    endpoint.as_deref().filter(|endpoint| !endpoint.is_empty())
}

fn interval(text: &str) -> Result<Duration, String> {
    let text = if text.is_empty() { METRICS_EVERY_MS } else { text };
    let ms = text.parse().ok().filter(|ms| (100..=3_600_000).contains(ms));
    ms.map(Duration::from_millis).ok_or_else(|| "not 100 to 3600000".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        collector: Collector,
    }

    fn parse(flags: &str) -> Result<Collector, clap::Error> {
        Program::try_parse_from(["p"].into_iter().chain(flags.split_whitespace())).map(|program| program.collector)
    }

    #[test]
    fn metrics_go_where_the_rest_goes_unless_they_have_a_place_of_their_own() {
        let none = parse("").unwrap();
        assert_eq!((none.endpoint(), none.metrics_endpoint(), none.metrics_every().as_secs()), (None, None, 60));
        let one = parse("--otlp-endpoint http://c:1 --otlp-metrics-ms 250").unwrap();
        assert_eq!((one.metrics_endpoint(), one.metrics_every().as_millis()), (Some("http://c:1"), 250));
        let two = parse("--otlp-endpoint http://c:1 --otlp-metrics-endpoint http://m:2").unwrap();
        assert_eq!((two.endpoint(), two.metrics_endpoint()), (Some("http://c:1"), Some("http://m:2")));
        assert!(two.check().is_ok() && none.check().is_ok());
        for wrong in
            ["http://m:x", "http://m:", "http://m:99999", "m:4317", "https://m:4317", "http://a:b@m:1", "http://", "x"]
        {
            let error = parse(&format!("--otlp-metrics-endpoint={wrong}")).unwrap().check().unwrap_err().to_string();
            assert!(error.contains("http://host:port"), "{wrong}: {error}");
        }
        for right in ["http://m", "http://m:4317/", "http://[::1]:4317", "http://10.1.2.3:4317"] {
            parse(&format!("--otlp-endpoint={right}"))
                .unwrap()
                .check()
                .unwrap_or_else(|error| panic!("{right}: {error}"));
        }
        let metrics = parse("--otlp-metrics-endpoint http://m:2").unwrap();
        assert_eq!((metrics.endpoint(), metrics.metrics_endpoint()), (None, Some("http://m:2")));
    }

    #[test]
    fn metrics_have_the_headers_of_the_rest_unless_they_have_some_of_their_own() {
        let of = |headers: &Headers| headers.metadata().into_headers();
        let one = parse("--otlp-headers a=1").unwrap();
        assert_eq!((of(one.headers()).len(), one.metrics_headers()), (1, one.headers()));
        let two = parse("--otlp-headers a=1 --otlp-metrics-headers b=2").unwrap();
        assert!(of(two.headers()).contains_key("a") && !of(two.metrics_headers()).contains_key("a"));
        assert!(of(two.metrics_headers()).contains_key("b"));
        assert!(parse("--otlp-headers a").is_err() && parse("--otlp-headers=").is_ok());
    }

    #[test]
    fn empty_variables_are_none_and_nonsense_is_refused() {
        assert_eq!(parse("--otlp-endpoint=").unwrap().endpoint(), None);
        assert_eq!(parse("--otlp-metrics-ms=").unwrap().metrics_every().as_secs(), 60);
        for wrong in ["0", "99", "x", "3600001", "-5"] {
            assert!(parse(&format!("--otlp-metrics-ms={wrong}")).is_err(), "{wrong}");
        }
    }
}
