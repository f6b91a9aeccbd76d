//! Histograms that a request fills: each bucket points to the trace of the last request in it.
use std::fmt::Write;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use tandem_proto::TraceContext;
use tandem_proto::trace::hex;

use crate::record::token_pace::Arrivals;

/// Down to 0.5 ms, up to two minutes.
pub(super) const SECONDS: [f64; 18] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// Points from a histogram's bucket to a trace. Each request leaves some twenty.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct Exemplar {
    pub trace_id: TraceId,
}

/// Written as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct TraceId(pub [u8; 16]);

impl EncodeLabelValue for TraceId {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> std::fmt::Result {
        encoder.write_str(&hex(&self.0))
    }
}

pub(super) type Traced = HistogramWithExemplars<Exemplar>;

impl Exemplar {
    pub fn of(trace: TraceContext) -> Self {
        Self { trace_id: TraceId(trace.trace_id) }
    }
}

/// All gaps between a request's tokens. Only the longest points to the trace: it is what one looks for there, and the
/// others need not be written a thousand times.
pub(super) fn observe_gaps(histogram: &Traced, arrivals: &Arrivals, trace: Exemplar) {
    let mut longest = arrivals.gaps().max();
    for gap in arrivals.gaps() {
        let exemplar = longest.take_if(|longest| *longest == gap).map(|_| trace);
        histogram.observe(seconds(gap), exemplar, None);
    }
}

pub(super) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
