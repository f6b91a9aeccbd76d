//! Histograms that a request fills: each bucket points to the trace of the last request in it.
use std::time::Duration;

pub(super) use tandem_telemetry::exposition::{Exemplar, SECONDS, Traced};

use crate::record::token_pace::Arrivals;

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
