//! Metrics of the ways by which KV travels between nodes.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::select::ways::Fallbacks;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FromTo {
    from: Arc<str>,
    to: Arc<str>,
}

/// See the head of this file.
#[derive(Clone, Default)]
pub(super) struct WayMetrics {
    fallbacks: Family<FromTo, Counter>,
}

impl WayMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let own = Self::default();
        registry.register(
            "tandem_kv_way_fallbacks",
            "Pairs of nodes whose KV went over from one way to another, because a hand-off by the first failed",
            own.fallbacks.clone(),
        );
        own
    }

    /// The table counts; this only shows it.
    pub fn set(&self, fallbacks: &Fallbacks) {
        for ((from, to), count) in fallbacks {
            let of = FromTo { from: Arc::clone(from), to: Arc::clone(to) };
            self.fallbacks.get_or_create(&of).inner().store(*count, Ordering::Relaxed);
        }
    }
}
