//! Families of metrics whose values a node has anyway: read at each scrape, kept nowhere for it. Knows no metric.
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::node::Node;

/// Reads a node.
pub(super) struct Read {
    pub node: Arc<Node>,
    pub families: fn(&mut Scrape<'_>, &Node) -> fmt::Result,
}

impl Collector for Read {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.families)(&mut Scrape(encoder), &self.node)
    }
}

impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read").finish_non_exhaustive()
    }
}

/// One scrape. The text form adds `_total` to the names of counters.
pub(super) struct Scrape<'a>(DescriptorEncoder<'a>);

impl Scrape<'_> {
    pub fn metric(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.0.encode_descriptor(name, help, None, metric.metric_type())?)
    }

    pub fn counter(&mut self, name: &str, help: &str, count: impl EncodeCounterValue) -> fmt::Result {
        self.metric(name, help, &ConstCounter::new(count))
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.metric(name, help, &ConstGauge::new(value))
    }

    /// One for each value of a label.
    pub fn counters<'l, V: EncodeCounterValue>(
        &mut self,
        (name, help): (&str, &str),
        label: &'l str,
        counts: impl IntoIterator<Item = (&'l str, V)>,
    ) -> fmt::Result {
        let counts = counts.into_iter().map(|(of, count)| ([(label, of)], ConstCounter::new(count)));
        self.family((name, help), MetricType::Counter, counts)
    }

    /// The same.
    pub fn gauges<'l>(
        &mut self,
        (name, help): (&str, &str),
        label: &'l str,
        values: impl IntoIterator<Item = (&'l str, f64)>,
    ) -> fmt::Result {
        let values = values.into_iter().map(|(of, value)| ([(label, of)], ConstGauge::new(value)));
        self.family((name, help), MetricType::Gauge, values)
    }

    /// One that says by its labels what there is.
    pub fn info<'l>(
        &mut self,
        (name, help): (&str, &str),
        all: impl IntoIterator<Item = [(&'l str, &'l str); 2]>,
    ) -> fmt::Result {
        self.family((name, help), MetricType::Gauge, all.into_iter().map(|labels| (labels, ConstGauge::new(1.0))))
    }

    fn family<L: EncodeLabelSet, M: EncodeMetric>(
        &mut self,
        (name, help): (&str, &str),
        kind: MetricType,
        metrics: impl Iterator<Item = (L, M)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, metric) in metrics {
            metric.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
