//! Counters and histograms. Owns their names; how they are written is `exposition`'s matter, in tandem-telemetry. Base
//! units: seconds and bytes; labels `role` and `instance`. Beside our own names stand those of vLLM whose meaning is
//! the same, because public dashboards read them: `vllm`, and `cache` for those of the KV. Every histogram that a
//! request fills points to its trace (`exemplar`). Ours are in `own`; those of admission, ports and ways in files of
//! these names.
mod admission;
mod cache;
mod exemplar;
mod own;
mod ports;
mod vllm;
mod ways;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::registry::Registry;
use tandem_ports::Occupancy;
use tandem_proto::{Error, ErrorKind, TraceContext, v1};
use tandem_telemetry::exposition::exposition;

use crate::index::IndexTotals;
use crate::membership::{Breakers, Totals};
use crate::record::Record;
use crate::record::token_pace::Arrivals;
use crate::select::ways::Fallbacks;
use crate::select::{Plan, Role};
use admission::AdmissionMetrics;
use exemplar::Exemplar;
use own::Own;
pub use own::WaitsForNode;
use ports::PortMetrics;
use vllm::Vllm;
use ways::WayMetrics;

/// Handle to the router's metrics.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    own: Own,
    admission: AdmissionMetrics,
    ports: PortMetrics,
    ways: WayMetrics,
    vllm: Vllm,
    /// What is looked at is set and written by one scraper after the other: some of it is cleared first.
    scraping: Arc<Mutex<()>>,
}

/// Values of labels that the layers above give: their series are there from the start.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    /// Why a request is refused before it starts.
    pub refusals: Vec<&'static str>,
    /// What the failure of a node may be.
    pub causes: Vec<&'static str>,
    /// What ends the attempts of a request.
    pub bounds: Vec<&'static str>,
}

/// What is looked at when somebody scrapes.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Sums over the nodes.
    pub nodes: Totals,
    /// Their circuit breakers.
    pub breakers: Breakers,
    /// Requests that are admitted and have not ended.
    pub inflight: usize,
    /// Requests in the queue.
    pub queued: usize,
    /// Those of them that are retries.
    pub retrying: usize,
    /// Requests that may be retries at once.
    pub retry_limit: usize,
    /// Tenants that have keys, or the one of all.
    pub tenants: Vec<Arc<str>>,
    /// Waiting ones by tenant.
    pub depths: Vec<(Arc<str>, usize)>,
    /// Spans that no collector took.
    pub spans_dropped: u64,
    /// What is known of the nodes' caches.
    pub index: IndexTotals,
    /// Bytes taken by large bodies on their way to the queue.
    pub body_bytes: usize,
    /// Texts that are parsed or tokenized.
    pub texts_working: usize,
    /// Texts that wait for that.
    pub texts_waiting: usize,
    /// Requests refused because there were too many of these.
    pub intake_refused: u64,
    /// Calls to join without the cluster's token.
    pub strangers: u64,
    /// Registrations that were refused, by kind.
    pub registrations: Vec<(ErrorKind, u64)>,
    /// The ports by name.
    pub ports: Vec<(&'static str, Occupancy)>,
    /// Pairs that took another way.
    pub way_fallbacks: Fallbacks,
    /// Where in etcd the router is to stand, and whether it does.
    pub registered: Option<(Arc<str>, bool)>,
}

impl Metrics {
    /// All at zero.
    pub fn new(model_name: &str, instance: &str, labels: &Labels) -> Self {
        let mut registry = Registry::default();
        let who = [("role".into(), "router".into()), ("instance".into(), instance.to_owned().into())];
        let registered = registry.sub_registry_with_labels(who.into_iter());
        let (own, admission) =
            (Own::register(registered, labels), AdmissionMetrics::register(registered, &labels.refusals));
        let ports = PortMetrics::register(registered);
        let ways = WayMetrics::register(registered);
        let model = ("model_name".into(), model_name.to_owned().into());
        let vllm = Vllm::register(registered.sub_registry_with_label(model));
        Self { registry: Arc::new(registry), own, admission, ports, ways, vllm, scraping: Arc::default() }
    }

    /// A request that was refused before it started.
    pub fn refused(&self, kind: ErrorKind) {
        self.own.refused(kind);
    }

    /// Why it was refused, where it was not the request's own fault.
    pub fn turned_away(&self, reason: &'static str) {
        self.admission.refused(reason);
    }

    /// A request of this priority was admitted after so long.
    pub fn waited(&self, priority: i32, wait: Duration, trace: TraceContext) {
        self.admission.waited(priority, wait, Exemplar::of(trace));
    }

    /// A request of a tenant ended: tokens of its prompt, and those that were generated.
    pub fn served(&self, tenant: &str, prompt: u32, generated: u32) {
        self.admission.served(tenant, prompt, generated);
    }

    /// The prompt of a request was looked up on the node of its first token, and so many of its tokens were there.
    pub fn looked_up(&self, prompt_tokens: u32, cached_tokens: u32) {
        self.vllm.cache.looked_up(prompt_tokens, cached_tokens);
    }

    /// A request that ended, and when its tokens came.
    pub fn ended(&self, record: &Record, arrivals: &Arrivals, result: Result<v1::FinishReason, &Error>) {
        self.own.observe(record, arrivals, result.err().map(|error| error.kind));
        self.vllm.observe(record, arrivals, result.ok());
    }

    /// Decode has reserved, and the KV of so many tokens is to come from the prefill node.
    pub fn awaited(&self, tokens: u64) {
        self.vllm.cache.awaited(tokens);
    }

    /// Decode has verified it.
    pub fn handed_off(&self, kv: &v1::Verified, tokens: u64, trace: TraceContext) {
        self.own.handed_off(kv);
        self.vllm.cache.handed_off(kv, tokens, Exemplar::of(trace));
    }

    /// An attempt of a request got the nodes of such a plan.
    pub fn planned(&self, plan: Plan) {
        self.own.planned(plan);
    }

    /// An attempt of a request failed because KV did not come from one node to the other.
    pub fn handoff_failed(&self) {
        self.own.handoff_failed();
        self.vllm.cache.handoff_failed();
    }

    /// A request goes on with other nodes after the node of this role failed.
    pub fn replanned(&self, role: Role, cause: &'static str) {
        self.own.replanned(role, cause);
    }

    /// A request failed because there were enough attempts, of its own or of all, or they took long enough.
    pub fn replan_exhausted(&self, bound: &'static str) {
        self.own.replan_exhausted(bound);
    }

    /// A client took no token for so long that it was given up.
    pub fn client_stalled(&self) {
        self.own.client_stalled();
    }

    /// A request waits until a node comes, or until it may try one again.
    pub fn waits_for_node(&self) -> WaitsForNode {
        self.own.waits_for_node()
    }

    /// The content type and the text for a scraper with this `Accept` header.
    pub fn text(&self, accept: Option<&str>, seen: &Seen) -> (&'static str, String) {
        let _scraping = self.scraping.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.set(seen);
        self.admission.set(seen);
        self.ports.set(&seen.ports);
        self.ways.set(&seen.way_fallbacks);
        self.vllm.set(seen, self.own.waiting_for_node());
        exposition(&self.registry, accept)
    }
}

fn outcome(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "invalid_argument",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Overloaded => "overloaded",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Aborted => "aborted",
        ErrorKind::DeadlineExceeded => "deadline_exceeded",
        ErrorKind::Cancelled => "cancelled",
        ErrorKind::Unauthenticated => "unauthenticated",
        ErrorKind::Incompatible => "incompatible",
        ErrorKind::DeclaredDead => "declared_dead",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Internal => "internal",
    }
}

fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use tandem_telemetry::exposition::TraceId;

    use super::*;
    use crate::membership::breaker::Circuit;

    fn metrics() -> Metrics {
        let refusals = vec!["queue_full", "tenant_share", "draining"];
        Metrics::new("m", "r0", &Labels { refusals, causes: vec!["died"], bounds: vec!["attempts", "time"] })
    }

    fn text(accept: Option<&str>) -> String {
        let metrics = metrics();
        metrics.refused(ErrorKind::Overloaded);
        metrics.own.ttft.observe(0.02, Some(Exemplar { trace_id: TraceId([0xab; 16]) }), None);
        let breakers = Breakers { nodes: vec![(Role::Decode, "d0".into(), Circuit::Open)], opened: [0, 3] };
        metrics.replan_exhausted("time");
        let _waits = metrics.waits_for_node();
        metrics.turned_away("tenant_share");
        metrics.waited(
            -3,
            Duration::from_millis(20),
            TraceContext { trace_id: [0xcd; 16], span_id: [1; 8], sampled: true },
        );
        let depths = vec![("team".into(), 7)];
        let index = IndexTotals { blocks: 5, limit: 9, evicted: 2, gaps: 1 };
        let ports = vec![(
            "http",
            Occupancy { open: 6, evicted: 4, refused: 2, failed: 3, throttled: 9, certificate_not_after: Some(7) },
        )];
        let way_fallbacks = [(("ucx/shm".into(), "tcp".into()), 7)].into();
        let registered = Some(("etcd://h:1/p".into(), true));
        metrics.text(accept, &Seen { breakers, index, depths, ports, way_fallbacks, registered, ..Seen::default() }).1
    }

    #[test]
    fn classic_text_by_default() {
        let text = text(Some("*/*"));
        for line in [
            "# TYPE tandem_requests_total counter",
            "tandem_requests_total{role=\"router\",instance=\"r0\",outcome=\"overloaded\"} 1",
            "tandem_nodes{role=\"router\",instance=\"r0\",node_role=\"decode\"} 0",
            "# HELP vllm:prompt_tokens_total Prompt tokens processed.",
            "vllm:prompt_tokens_total{role=\"router\",instance=\"r0\",model_name=\"m\"} 0",
            "# TYPE tandem_spans_dropped_total counter",
            "# TYPE tandem_ttft_seconds histogram",
            "tandem_breaker_state{role=\"router\",instance=\"r0\",node_role=\"decode\",node_instance=\"d0\"} 2",
            "tandem_breaker_opened_total{role=\"router\",instance=\"r0\",node_role=\"decode\"} 3",
            "tandem_kv_way_fallbacks_total{role=\"router\",instance=\"r0\",from=\"ucx/shm\",to=\"tcp\"} 7",
            "tandem_replan_exhausted_total{role=\"router\",instance=\"r0\",bound=\"time\"} 1",
            "tandem_index_blocks{role=\"router\",instance=\"r0\"} 5",
            "tandem_index_evicted_total{role=\"router\",instance=\"r0\"} 2",
            "tandem_index_gaps_total{role=\"router\",instance=\"r0\"} 1",
            "tandem_connections{role=\"router\",instance=\"r0\",port=\"http\"} 6",
            "tandem_connections_evicted_total{role=\"router\",instance=\"r0\",port=\"http\"} 4",
            "tandem_connections_refused_total{role=\"router\",instance=\"r0\",port=\"http\"} 2",
            "tandem_connections_throttled_total{role=\"router\",instance=\"r0\",port=\"http\"} 9",
            "tandem_certificate_not_after_seconds{role=\"router\",instance=\"r0\",port=\"http\"} 7",
            "tandem_etcd_registered{role=\"router\",instance=\"r0\",etcd=\"etcd://h:1/p\"} 1",
            "tandem_waiting_for_node_requests{role=\"router\",instance=\"r0\"} 1",
            "tandem_queue_depth{role=\"router\",instance=\"r0\",tenant=\"team\"} 7",
            "tandem_refused_total{role=\"router\",instance=\"r0\",reason=\"tenant_share\"} 1",
            "tandem_refused_total{role=\"router\",instance=\"r0\",reason=\"queue_full\"} 0",
            "tandem_queue_wait_seconds_bucket{role=\"router\",instance=\"r0\",le=\"0.025\",priority=\"-3\"} 1",
            "tandem_ttft_seconds_bucket{role=\"router\",instance=\"r0\",le=\"0.025\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("# EOF") && !text.contains("trace_id"));
    }

    #[test]
    fn what_has_not_happened_yet_is_zero() {
        let text = metrics().text(None, &Seen::default()).1;
        for series in [
            "tandem_requests_total{role=\"router\",instance=\"r0\",outcome=\"corrupt\"}",
            "tandem_requests_total{role=\"router\",instance=\"r0\",outcome=\"ok\"}",
            "tandem_answers_total{role=\"router\",instance=\"r0\",objectives=\"met\"}",
            "tandem_answers_total{role=\"router\",instance=\"r0\",objectives=\"both_missed\"}",
            "tandem_handoffs_total{role=\"router\",instance=\"r0\",state=\"verified\"}",
            "tandem_handoffs_total{role=\"router\",instance=\"r0\",state=\"aborted\"}",
            "tandem_kv_bytes_total{role=\"router\",instance=\"r0\",direction=\"received\"}",
            "tandem_plans_total{role=\"router\",instance=\"r0\",plan=\"local\"}",
            "tandem_prediction_error_ms_count{role=\"router\",instance=\"r0\",plan=\"pair\"}",
            "tandem_replans_total{role=\"router\",instance=\"r0\",node_role=\"decode\",cause=\"died\"}",
            "tandem_replan_exhausted_total{role=\"router\",instance=\"r0\",bound=\"attempts\"}",
            "tandem_node_deaths_total{role=\"router\",instance=\"r0\",reason=\"silent\"}",
            "tandem_breaker_opened_total{role=\"router\",instance=\"r0\",node_role=\"prefill\"}",
            "tandem_refused_total{role=\"router\",instance=\"r0\",reason=\"draining\"}",
            "tandem_queue_wait_seconds_count{role=\"router\",instance=\"r0\",priority=\"0\"}",
            "tandem_route_seconds_count{role=\"router\",instance=\"r0\"}",
            "vllm:request_success_total{role=\"router\",instance=\"r0\",model_name=\"m\",finished_reason=\"stop\"}",
        ] {
            assert!(text.lines().any(|found| found == format!("{series} 0")), "{series}\n{text}");
        }
        assert!(!text.contains("tandem_etcd_registered{"), "without --register it is not asked for");
    }

    #[test]
    fn open_metrics_when_asked() {
        let text = text(Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        assert!(text.ends_with("# EOF\n") && text.contains("# {trace_id=\"abababababababababababababababab\"}"));
        assert!(text.contains("# TYPE tandem_requests counter"));
    }
}
