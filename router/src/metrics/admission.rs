//! Metrics of the admission queue: who waits, for how long, and why others may not.
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::exemplar::{Exemplar, SECONDS, Traced, seconds};
use super::{Seen, outcome, whole};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfTenant {
    tenant: String,
}

/// What its requests took.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Taken {
    tenant: String,
    of: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

/// -10 to 10, lower ones first, as in the APIs: what the check of a request lets through.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Level {
    priority: i64,
}

type Waits = Family<Level, Traced, fn() -> Traced>;

/// See the head of this file.
#[derive(Clone)]
pub(super) struct AdmissionMetrics {
    depth: Family<OfTenant, Gauge>,
    served: Family<Taken, Counter>,
    refused: Family<Why, Counter>,
    wait: Waits,
    body_bytes: Gauge,
    texts_working: Gauge,
    texts_waiting: Gauge,
    intake_refused: Counter,
    strangers: Counter,
    registrations: Family<Why, Counter>,
}

impl AdmissionMetrics {
    pub fn register(registry: &mut Registry, reasons: &[&'static str]) -> Self {
        let histogram: fn() -> Traced = || Traced::new(SECONDS.into_iter());
        let own = Self {
            depth: Family::default(),
            served: Family::default(),
            refused: Family::default(),
            wait: Waits::new_with_constructor(histogram),
            body_bytes: Gauge::default(),
            texts_working: Gauge::default(),
            texts_waiting: Gauge::default(),
            intake_refused: Counter::default(),
            strangers: Counter::default(),
            registrations: Family::default(),
        };
        registry.register("tandem_queue_depth", "Requests that wait for admission, by tenant", own.depth.clone());
        let served = "Tokens of prompts and answers that tenants had, of failed requests too; `default`: of all, where there are no keys";
        registry.register("tandem_tenant_tokens", served, own.served.clone());
        registry.register("tandem_refused", "Requests refused before they started", own.refused.clone());
        registry.register(
            "tandem_queue_wait_seconds",
            "Waiting of those admitted, by priority (lower ones go first)",
            own.wait.clone(),
        );
        let bytes = "Bytes of request bodies over 16 KiB that are being read";
        registry.register("tandem_body_bytes", bytes, own.body_bytes.clone());
        let working = "Texts that are parsed or tokenized beside the reactor";
        registry.register("tandem_texts_working", working, own.texts_working.clone());
        let waiting = "Texts that wait for a thread to be parsed or tokenized";
        registry.register("tandem_texts_waiting", waiting, own.texts_waiting.clone());
        let refused = "Requests refused because too many large ones were being read or tokenized";
        registry.register("tandem_intake_refused", refused, own.intake_refused.clone());
        let strangers = "Calls to join refused for want of the cluster's join token or of a good certificate";
        registry.register("tandem_strangers_refused", strangers, own.strangers.clone());
        let refused = "Registrations of nodes that were refused";
        registry.register("tandem_registrations_refused", refused, own.registrations.clone());
        let _ = own.wait.get_or_create(&Level { priority: 0 });
        for reason in reasons {
            let _ = own.refused.get_or_create(&Why { reason });
        }
        own
    }

    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&Why { reason }).inc();
    }

    pub fn served(&self, tenant: &str, prompt: u32, generated: u32) {
        for (of, tokens) in [("prompt", prompt), ("answer", generated)] {
            self.served.get_or_create(&Taken { tenant: tenant.to_owned(), of }).inc_by(tokens.into());
        }
    }

    pub fn waited(&self, priority: i32, wait: Duration, trace: Exemplar) {
        let histogram = self.wait.get_or_create(&Level { priority: priority.into() });
        histogram.observe(seconds(wait), Some(trace), None);
    }

    /// Tenants that are no longer known leave no series behind.
    pub fn set(&self, seen: &Seen) {
        let Seen { tenants, depths, strangers, registrations, .. } = seen;
        tenants.iter().for_each(|tenant| self.served(tenant, 0, 0));
        self.strangers.inner().store(*strangers, Ordering::Relaxed);
        for (kind, count) in registrations {
            let refused = self.registrations.get_or_create(&Why { reason: outcome(*kind) });
            refused.inner().store(*count, Ordering::Relaxed);
        }
        self.body_bytes.set(whole(seen.body_bytes));
        self.texts_working.set(whole(seen.texts_working));
        self.texts_waiting.set(whole(seen.texts_waiting));
        self.intake_refused.inner().store(seen.intake_refused, Ordering::Relaxed);
        self.depth.clear();
        for (tenant, depth) in depths {
            self.depth.get_or_create(&OfTenant { tenant: tenant.to_string() }).set(whole(*depth));
        }
    }
}
