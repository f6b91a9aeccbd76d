//! Metrics of the ports: how many connections each has, how many had to go, and when its certificate ends.
use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tandem_ports::Occupancy;

use super::whole;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfPort {
    port: &'static str,
}

/// See the head of this file.
#[derive(Clone, Default)]
pub(super) struct PortMetrics {
    open: Family<OfPort, Gauge>,
    evicted: Family<OfPort, Counter>,
    refused: Family<OfPort, Counter>,
    failed: Family<OfPort, Counter>,
    throttled: Family<OfPort, Counter>,
    certificates: Family<OfPort, Gauge>,
}

impl PortMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let own = Self::default();
        registry.register("tandem_connections", "Open connections", own.open.clone());
        registry.register(
            "tandem_connections_evicted",
            "Idle and half-open connections that made room for others",
            own.evicted.clone(),
        );
        registry.register(
            "tandem_connections_refused",
            "Connections closed at once because all others were busy",
            own.refused.clone(),
        );
        registry.register(
            "tandem_connections_failed",
            "Connections that the port ended because of what they sent, or did not send or read in time",
            own.failed.clone(),
        );
        registry.register(
            "tandem_connections_throttled",
            "Times that a connection had to wait because of its errors, before it was read",
            own.throttled.clone(),
        );
        registry.register(
            "tandem_certificate_not_after_seconds",
            "Unix time at which a port's certificate ends, or one of the authorities' behind it",
            own.certificates.clone(),
        );
        own
    }

    /// The ports count; this only shows it.
    pub fn set(&self, ports: &[(&'static str, Occupancy)]) {
        for (port, now) in ports {
            let of = OfPort { port };
            self.open.get_or_create(&of).set(whole(now.open));
            self.evicted.get_or_create(&of).inner().store(now.evicted, Ordering::Relaxed);
            self.refused.get_or_create(&of).inner().store(now.refused, Ordering::Relaxed);
            self.failed.get_or_create(&of).inner().store(now.failed, Ordering::Relaxed);
            self.throttled.get_or_create(&of).inner().store(now.throttled, Ordering::Relaxed);
            if let Some(seconds) = now.certificate_not_after {
                self.certificates.get_or_create(&of).set(i64::try_from(seconds).unwrap_or(i64::MAX));
            }
        }
    }
}
