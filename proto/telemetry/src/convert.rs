//! Metrics from the text of a scrape to OTLP's messages. Pure. Names stay as scrapers know them: a collector that
//! writes for Prometheus then makes the same series of both.
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, Sum, exemplar,
    metric, number_data_point,
};
use tandem_proto::trace::unhex;

use crate::openmetrics::{self, Family, Kind, Sample, families};
use crate::otlp::attribute;

const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;
/// The label of a bucket's bound.
const BOUND: &str = "le";

/// The metrics of `text` as they were at `at_unix_ns`, counted since `start_unix_ns`.
pub(crate) fn metrics(text: &str, start_unix_ns: u64, at_unix_ns: u64) -> Vec<Metric> {
    let times = Times { start_unix_ns, at_unix_ns };
    families(text).iter().filter(|family| !family.samples.is_empty()).map(|family| times.metric(family)).collect()
}

#[derive(Clone, Copy)]
struct Times {
    start_unix_ns: u64,
    at_unix_ns: u64,
}

impl Times {
    fn metric(self, family: &Family<'_>) -> Metric {
        let numbers = || family.samples.iter().map(|sample| self.number(sample)).collect();
        let (name, data) = match family.kind {
            Kind::Gauge => (family.name, metric::Data::Gauge(Gauge { data_points: numbers() })),
            Kind::Counter => {
                let sum = Sum { data_points: numbers(), aggregation_temporality: CUMULATIVE, is_monotonic: true };
                (family.samples.first().map_or(family.name, |sample| sample.name), metric::Data::Sum(sum))
            }
            Kind::Histogram => {
                let data_points = self.distributions(family);
                let histogram = Histogram { data_points, aggregation_temporality: CUMULATIVE };
                (family.name, metric::Data::Histogram(histogram))
            }
        };
        Metric {
            name: name.to_owned(),
            description: family.help.to_owned(),
            unit: unit(name).to_owned(),
            data: Some(data),
            ..Metric::default()
        }
    }

    fn number(self, sample: &Sample<'_>) -> NumberDataPoint {
        NumberDataPoint {
            attributes: attributes(sample).collect(),
            start_time_unix_nano: self.start_unix_ns,
            time_unix_nano: self.at_unix_ns,
            value: Some(number_data_point::Value::AsDouble(sample.value)),
            ..NumberDataPoint::default()
        }
    }

    /// One point for each set of labels. Its samples stand together.
    fn distributions(self, family: &Family<'_>) -> Vec<HistogramDataPoint> {
        let (mut points, mut counted) = (Vec::<HistogramDataPoint>::new(), 0);
        for sample in &family.samples {
            let attributes: Vec<_> = attributes(sample).collect();
            if points.last().is_none_or(|point| point.attributes != attributes) {
                counted = 0;
                points.push(HistogramDataPoint {
                    attributes,
                    start_time_unix_nano: self.start_unix_ns,
                    time_unix_nano: self.at_unix_ns,
                    ..HistogramDataPoint::default()
                });
            }
            let Some(point) = points.last_mut() else { continue };
            match &sample.name[family.name.len()..] {
                "_sum" => point.sum = Some(sample.value),
                "_bucket" => {
                    let below = sample.value as u64;
                    point.bucket_counts.push(below.saturating_sub(counted));
                    counted = counted.max(below);
                    point.explicit_bounds.extend(bound(sample).filter(|bound| bound.is_finite()));
                    point.exemplars.extend(sample.exemplar.as_ref().map(|exemplar| self.exemplar(exemplar)));
                    // Of what the buckets say: requests that end meanwhile may be in the text's own count already.
                    point.count = counted;
                }
                _ => {}
            }
        }
        points
    }

    fn exemplar(self, told: &openmetrics::Exemplar<'_>) -> Exemplar {
        let trace = told.labels.iter().find(|(key, _)| *key == "trace_id");
        Exemplar {
            time_unix_nano: self.at_unix_ns,
            value: Some(exemplar::Value::AsDouble(told.value)),
            trace_id: trace.and_then(|(_, id)| unhex::<16>(id)).map(Vec::from).unwrap_or_default(),
            ..Exemplar::default()
        }
    }
}

fn bound(sample: &Sample<'_>) -> Option<f64> {
    sample.labels.iter().find(|(key, _)| *key == BOUND)?.1.parse().ok()
}

fn attributes<'a>(sample: &'a Sample<'_>) -> impl Iterator<Item = KeyValue> + 'a {
    sample.labels.iter().filter(|(key, _)| *key != BOUND).map(|(key, value)| attribute(key, value))
}

/// As the name says it. Others are left out: what writes for Prometheus would add their names to the metric's.
fn unit(name: &str) -> &'static str {
    match name.strip_suffix("_total").unwrap_or(name) {
        name if name.ends_with("_seconds") => "s",
        name if name.ends_with("_bytes") => "By",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP tandem_requests Requests.\n# TYPE tandem_requests counter\n\
        tandem_requests_total{role=\"router\",outcome=\"ok\"} 7\ntandem_requests_total{role=\"router\",outcome=\"bad\"} 0\n\
        # TYPE tandem_nodes gauge\ntandem_nodes{} 2.5\n# TYPE tandem_none gauge\n\
        # TYPE tandem_x_seconds histogram\n\
        tandem_x_seconds_sum{role=\"router\"} 3.25\ntandem_x_seconds_count{role=\"router\"} 4\n\
        tandem_x_seconds_bucket{le=\"0.5\",role=\"router\"} 1 # {trace_id=\"abababababababababababababababab\"} 0.25\n\
        tandem_x_seconds_bucket{le=\"1.0\",role=\"router\"} 1\ntandem_x_seconds_bucket{le=\"+Inf\",role=\"router\"} 3\n\
        tandem_x_seconds_bucket{le=\"0.5\",role=\"other\"} 0\ntandem_x_seconds_bucket{le=\"+Inf\",role=\"other\"} 2\n# EOF\n";

    #[test]
    fn counters_are_cumulative_sums_under_the_names_of_their_series() {
        let metrics = metrics(TEXT, 5, 9);
        let names: Vec<_> = metrics.iter().map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        assert_eq!(names, [("tandem_requests_total", ""), ("tandem_nodes", ""), ("tandem_x_seconds", "s")]);
        assert_eq!(metrics[0].description, "Requests.");
        let Some(metric::Data::Sum(sum)) = &metrics[0].data else { panic!("{:?}", metrics[0]) };
        assert_eq!((sum.aggregation_temporality, sum.is_monotonic, sum.data_points.len()), (CUMULATIVE, true, 2));
        let point = &sum.data_points[0];
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (5, 9));
        assert_eq!(point.value, Some(number_data_point::Value::AsDouble(7.0)));
        assert_eq!(point.attributes, [attribute("role", "router"), attribute("outcome", "ok")]);
        let Some(metric::Data::Gauge(gauge)) = &metrics[1].data else { panic!("{:?}", metrics[1]) };
        assert_eq!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(2.5)));
    }

    #[test]
    fn histograms_have_bounds_and_counts_between_them() {
        let metrics = metrics(TEXT, 5, 9);
        let Some(metric::Data::Histogram(histogram)) = &metrics[2].data else { panic!("{:?}", metrics[2]) };
        let [router, other] = &histogram.data_points[..] else { panic!("{histogram:?}") };
        assert_eq!(
            (router.explicit_bounds.as_slice(), router.bucket_counts.as_slice()),
            (&[0.5, 1.0][..], &[1, 0, 2][..])
        );
        assert_eq!((router.count, router.sum), (3, Some(3.25)), "the count is that of the buckets");
        assert_eq!(router.attributes, [attribute("role", "router")]);
        assert_eq!((&router.exemplars[0].trace_id, router.exemplars.len()), (&vec![0xab; 16], 1));
        assert_eq!((other.bucket_counts.as_slice(), other.count, other.sum), (&[0, 2][..], 2, None));
        assert_eq!(histogram.aggregation_temporality, CUMULATIVE);
    }

    #[test]
    fn units_are_those_that_names_say() {
        let units = ["a_seconds_total", "a_bytes", "a_bytes_per_second", "a_ms", "a"].map(unit);
        assert_eq!(units, ["s", "By", "", "", ""]);
    }
}
