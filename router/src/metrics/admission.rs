//! Metrics of the admission queue: who waits, for how long, and why others may not.
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;

use super::{Exemplar, SECONDS, Traced, seconds, whole};
use crate::admission::{REASONS, Reason};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfTenant {
    tenant: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

/// -10 to 10: what the check of a request lets through.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Level {
    priority: i64,
}

type Waits = Family<Level, Traced, fn() -> Traced>;

/// See the head of this file.
#[derive(Clone)]
pub(super) struct AdmissionMetrics {
    depth: Family<OfTenant, Gauge>,
    refused: Family<Why, Counter>,
    wait: Waits,
}

impl AdmissionMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let histogram: fn() -> Traced = || Traced::new(SECONDS.into_iter());
        let own =
            Self { depth: Family::default(), refused: Family::default(), wait: Waits::new_with_constructor(histogram) };
        registry.register("tandem_queue_depth", "Requests that wait for admission, by tenant", own.depth.clone());
        registry.register("tandem_refused", "Requests refused before they started", own.refused.clone());
        registry.register("tandem_queue_wait_seconds", "Waiting of those admitted, by priority", own.wait.clone());
        for reason in REASONS {
            let _ = own.refused.get_or_create(&Why { reason: reason.as_str() });
        }
        own
    }

    pub fn refused(&self, reason: Reason) {
        self.refused.get_or_create(&Why { reason: reason.as_str() }).inc();
    }

    pub fn waited(&self, priority: i32, wait: Duration, trace: Exemplar) {
        let histogram = self.wait.get_or_create(&Level { priority: priority.into() });
        histogram.observe(seconds(wait), Some(trace), None);
    }

    /// Tenants that are no longer known leave no series behind.
    pub fn set(&self, depths: &[(Arc<str>, usize)]) {
        self.depth.clear();
        for (tenant, depth) in depths {
            self.depth.get_or_create(&OfTenant { tenant: tenant.to_string() }).set(whole(*depth));
        }
    }
}
