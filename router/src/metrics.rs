//! Counters and histograms. Owns their names and both text forms: classic Prometheus text by default, OpenMetrics when
//! the scraper asks for it. Base units: seconds and bytes; labels `role` and `instance`. Beside our own names stand
//! those of vLLM whose meaning is the same, because public dashboards read them: `vllm`, and `cache` for those of the
//! KV. Every histogram that a request fills points to its trace.
mod admission;
mod cache;
mod ports;
mod vllm;
mod ways;

use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tandem_ports::Occupancy;
use tandem_proto::trace::hex;
use tandem_proto::{ERROR_KINDS, Error, ErrorKind, TraceContext, v1};

use crate::admission::{Counts, Reason};
use crate::failure::{BOUNDS, Bound, CAUSES, Failure};
use crate::index::IndexTotals;
use crate::intake::Load;
use crate::membership::breaker::Circuit;
use crate::membership::{Breakers, DEATHS, Totals};
use crate::record::pace::Arrivals;
use crate::record::timeline::Phase;
use crate::record::{OBJECTIVES, Record};
use crate::select::ways::Fallbacks;
use crate::select::{PLANS, Plan, Role};
use admission::AdmissionMetrics;
use ports::PortMetrics;
use vllm::Vllm;
use ways::WayMetrics;

/// Down to 0.5 ms, up to two minutes.
const SECONDS: [f64; 18] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Of how far a prediction is off.
const ERROR_MS: [f64; 15] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4];
/// The same, as a share of what it was.
const ERROR_RATIO: [f64; 12] = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0];
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The content type of that form of metrics which has exemplars.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct NodeRole {
    /// `role` is this process's own.
    node_role: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Replanned {
    node_role: &'static str,
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Planned {
    plan: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answered {
    objectives: &'static str,
}

/// As nodes have it, too.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HandedOff {
    state: &'static str,
}

const VERIFIED: HandedOff = HandedOff { state: "verified" };
const ABORTED: HandedOff = HandedOff { state: "aborted" };

/// As nodes have it, too.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Moved {
    direction: &'static str,
}

const RECEIVED: Moved = Moved { direction: "received" };

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Exhausted {
    bound: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Died {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct NodeInstance {
    node_role: &'static str,
    /// `instance` is this process's own.
    node_instance: String,
}

/// Points from a histogram's bucket to a trace. Each request leaves some twenty.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Exemplar {
    trace_id: TraceId,
}

/// Written as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
struct TraceId([u8; 16]);

impl EncodeLabelValue for TraceId {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> std::fmt::Result {
        encoder.write_str(&hex(&self.0))
    }
}

type Traced = HistogramWithExemplars<Exemplar>;
/// A histogram for each kind of plan.
type ByPlan = Family<Planned, Traced, fn() -> Traced>;

impl Exemplar {
    fn of(trace: TraceContext) -> Self {
        Self { trace_id: TraceId(trace.trace_id) }
    }
}

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

#[derive(Clone)]
struct Own {
    requests: Family<Outcome, Counter>,
    ttft: Traced,
    itl: Traced,
    e2e: Traced,
    queue: Traced,
    route: Traced,
    answers: Family<Answered, Counter>,
    handoff_gap: Traced,
    transfer_exposed: Traced,
    handoffs: Family<HandedOff, Counter>,
    kv_bytes: Family<Moved, Counter>,
    inflight: Gauge,
    queued: Gauge,
    nodes: Family<NodeRole, Gauge>,
    plans: Family<Planned, Counter>,
    prediction_error_ms: ByPlan,
    prediction_error_ratio: ByPlan,
    replans: Family<Replanned, Counter>,
    replan_exhausted: Family<Exhausted, Counter>,
    retrying: Gauge,
    retry_budget: Gauge,
    waiting_for_node: Gauge,
    client_stalls: Counter,
    node_deaths: Family<Died, Counter>,
    breaker_state: Family<NodeInstance, Gauge>,
    breaker_opened: Family<NodeRole, Counter>,
    spans_dropped: Counter,
    log_lines_lost: Counter,
    index_blocks: Gauge,
    index_evicted: Counter,
    index_gaps: Counter,
}

/// A request that waits for a node; counted until it is dropped.
#[derive(Debug)]
pub struct WaitsForNode(Gauge);

impl Drop for WaitsForNode {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// What is looked at when somebody scrapes.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Sums over the nodes.
    pub nodes: Totals,
    /// Their circuit breakers.
    pub breakers: Breakers,
    /// Requests by state.
    pub requests: Counts,
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
    /// Bodies and texts on their way to the queue.
    pub intake: Load,
    /// Calls to join without the cluster's token.
    pub strangers: u64,
    /// Registrations that were refused, by kind.
    pub registrations: Vec<(ErrorKind, u64)>,
    /// The ports by name.
    pub ports: Vec<(&'static str, Occupancy)>,
    /// Pairs that took another way.
    pub way_fallbacks: Fallbacks,
}

impl Metrics {
    /// All at zero.
    pub fn new(model_name: &str, instance: &str) -> Self {
        let mut registry = Registry::default();
        let who = [("role".into(), "router".into()), ("instance".into(), instance.to_owned().into())];
        let registered = registry.sub_registry_with_labels(who.into_iter());
        let (own, admission) = (Own::register(registered), AdmissionMetrics::register(registered));
        let ports = PortMetrics::register(registered);
        let ways = WayMetrics::register(registered);
        let model = ("model_name".into(), model_name.to_owned().into());
        let vllm = Vllm::register(registered.sub_registry_with_label(model));
        Self { registry: Arc::new(registry), own, admission, ports, ways, vllm, scraping: Arc::default() }
    }

    /// A request that was refused before it started.
    pub fn refused(&self, kind: ErrorKind) {
        self.own.requests.get_or_create(&Outcome { outcome: outcome(kind) }).inc();
    }

    /// Why it was refused, where it was not the request's own fault.
    pub fn turned_away(&self, reason: Reason) {
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
        let outcome = result.map_or_else(|error| outcome(error.kind), |_| "ok");
        self.own.requests.get_or_create(&Outcome { outcome }).inc();
        self.own.observe(record, arrivals, result.is_ok());
        self.vllm.observe(record, arrivals, result.ok());
    }

    /// Decode has reserved, and the KV of so many tokens is to come from the prefill node.
    pub fn awaited(&self, tokens: u64) {
        self.vllm.cache.awaited(tokens);
    }

    /// Decode has verified it.
    pub fn handed_off(&self, kv: &v1::Verified, tokens: u64, trace: TraceContext) {
        self.own.handoffs.get_or_create(&VERIFIED).inc();
        self.own.kv_bytes.get_or_create(&RECEIVED).inc_by(kv.bytes);
        self.vllm.cache.handed_off(kv, tokens, Exemplar::of(trace));
    }

    /// An attempt of a request got the nodes of such a plan.
    pub fn planned(&self, plan: Plan) {
        self.own.plans.get_or_create(&Planned { plan: plan.as_str() }).inc();
    }

    /// An attempt of a request failed, whatever comes after it.
    pub fn failed(&self, failure: &Failure) {
        if failure.of_handoff() {
            self.own.handoffs.get_or_create(&ABORTED).inc();
            self.vllm.cache.handoff_failed();
        }
    }

    /// A request goes on with other nodes after this failure.
    pub fn replanned(&self, failure: &Failure) {
        let of = Replanned { node_role: failure.role.as_str(), cause: failure.cause.as_str() };
        self.own.replans.get_or_create(&of).inc();
    }

    /// A request failed because there were enough attempts, of its own or of all, or they took long enough.
    pub fn replan_exhausted(&self, bound: Bound) {
        self.own.replan_exhausted.get_or_create(&Exhausted { bound: bound.as_str() }).inc();
    }

    /// A client took no token for so long that it was given up.
    pub fn client_stalled(&self) {
        self.own.client_stalls.inc();
    }

    /// A request waits until a node comes, or until it may try one again.
    pub fn waits_for_node(&self) -> WaitsForNode {
        self.own.waiting_for_node.inc();
        WaitsForNode(self.own.waiting_for_node.clone())
    }

    /// The content type and the text for a scraper with this `Accept` header.
    pub fn text(&self, accept: Option<&str>, seen: &Seen) -> (&'static str, String) {
        let _scraping = self.scraping.lock().unwrap_or_else(PoisonError::into_inner);
        self.own.set(seen);
        self.admission.set(seen);
        self.ports.set(&seen.ports);
        self.ways.set(&seen.way_fallbacks);
        let seeking = usize::try_from(self.own.waiting_for_node.get()).unwrap_or(0);
        self.vllm.set(&seen.nodes, seen.requests, seeking);
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            tracing::error!("metrics could not be written");
        }
        if accept.is_some_and(|accept| accept.contains("application/openmetrics-text")) {
            (OPEN_METRICS, text)
        } else {
            (CLASSIC, classic(&text))
        }
    }
}

impl Own {
    fn register(registry: &mut Registry) -> Self {
        let own = Self {
            requests: Family::default(),
            ttft: Traced::new(SECONDS.into_iter()),
            itl: Traced::new(SECONDS.into_iter()),
            e2e: Traced::new(SECONDS.into_iter()),
            queue: Traced::new(SECONDS.into_iter()),
            route: Traced::new(SECONDS.into_iter()),
            answers: Family::default(),
            handoff_gap: Traced::new(SECONDS.into_iter()),
            transfer_exposed: Traced::new(SECONDS.into_iter()),
            handoffs: Family::default(),
            kv_bytes: Family::default(),
            inflight: Gauge::default(),
            queued: Gauge::default(),
            nodes: Family::default(),
            plans: Family::default(),
            prediction_error_ms: ByPlan::new_with_constructor(|| Traced::new(ERROR_MS.into_iter())),
            prediction_error_ratio: ByPlan::new_with_constructor(|| Traced::new(ERROR_RATIO.into_iter())),
            replans: Family::default(),
            replan_exhausted: Family::default(),
            retrying: Gauge::default(),
            retry_budget: Gauge::default(),
            waiting_for_node: Gauge::default(),
            client_stalls: Counter::default(),
            node_deaths: Family::default(),
            breaker_state: Family::default(),
            breaker_opened: Family::default(),
            spans_dropped: Counter::default(),
            log_lines_lost: Counter::default(),
            index_blocks: Gauge::default(),
            index_evicted: Counter::default(),
            index_gaps: Counter::default(),
        };
        registry.register("tandem_requests", "Requests by outcome", own.requests.clone());
        registry.register("tandem_ttft_seconds", "Request accepted to first token sent", own.ttft.clone());
        registry.register("tandem_itl_seconds", "Between two tokens of one answer", own.itl.clone());
        registry.register("tandem_e2e_seconds", "Request accepted to answer complete", own.e2e.clone());
        registry.register("tandem_queue_seconds", "Waiting for admission", own.queue.clone());
        registry.register("tandem_route_seconds", "Choosing nodes and sending them the request", own.route.clone());
        registry.register("tandem_answers", "Whole answers by the latency objectives they kept", own.answers.clone());
        registry.register("tandem_handoff_gap_seconds", "First to second token", own.handoff_gap.clone());
        registry.register(
            "tandem_transfer_exposed_seconds",
            "First token to verified KV",
            own.transfer_exposed.clone(),
        );
        registry.register("tandem_handoffs", "KV hand-offs, by what became of them", own.handoffs.clone());
        registry.register("tandem_kv_bytes", "KV bytes moved: what decode nodes verified", own.kv_bytes.clone());
        registry.register("tandem_inflight_requests", "Requests that run", own.inflight.clone());
        registry.register("tandem_queued_requests", "Requests that wait for admission", own.queued.clone());
        registry.register("tandem_nodes", "Registered nodes", own.nodes.clone());
        registry.register("tandem_plans", "Attempts by the kind of their plan", own.plans.clone());
        registry.register(
            "tandem_prediction_error_ms",
            "By how many milliseconds the predicted time to the first token was off, the queue left out",
            own.prediction_error_ms.clone(),
        );
        registry.register(
            "tandem_prediction_error_ratio",
            "The same as a share of the time that it was",
            own.prediction_error_ratio.clone(),
        );
        registry.register("tandem_replans", "Requests that went on with other nodes", own.replans.clone());
        registry.register(
            "tandem_replan_exhausted",
            "Requests that failed because attempts, time or the retry budget were used up",
            own.replan_exhausted.clone(),
        );
        let retrying = "Running requests whose retry has brought no token yet";
        registry.register("tandem_retrying_requests", retrying, own.retrying.clone());
        let budget = "Running requests that may be retries at once";
        registry.register("tandem_retry_budget_requests", budget, own.retry_budget.clone());
        registry.register(
            "tandem_waiting_for_node_requests",
            "Running requests that wait for a node to join, to have room or to be tried again, or for the retry budget",
            own.waiting_for_node.clone(),
        );
        registry.register("tandem_client_stalls", "Clients that took no token for too long", own.client_stalls.clone());
        registry.register("tandem_node_deaths", "Nodes declared dead", own.node_deaths.clone());
        registry.register(
            "tandem_breaker_state",
            "Circuit breaker of a node: 0 closed, 1 half-open, 2 open",
            own.breaker_state.clone(),
        );
        registry.register("tandem_breaker_opened", "Circuit breakers that opened", own.breaker_opened.clone());
        registry.register("tandem_spans_dropped", "Spans that no collector took", own.spans_dropped.clone());
        let lost = "Lines of the log that nobody read in time";
        registry.register("tandem_log_lines_lost", lost, own.log_lines_lost.clone());
        registry.register("tandem_index_blocks", "KV blocks known to be cached somewhere", own.index_blocks.clone());
        registry.register("tandem_index_evicted", "Blocks forgotten by the full index", own.index_evicted.clone());
        registry.register("tandem_index_gaps", "Gaps in nodes' streams of cache events", own.index_gaps.clone());
        own.begin();
        own
    }

    /// Every series that can be known is there from the start: a counter that appears at its first event has no rate
    /// for it, and an alert does not see it.
    fn begin(&self) {
        for outcome in ERROR_KINDS.into_iter().map(outcome).chain(["ok"]) {
            let _ = self.requests.get_or_create(&Outcome { outcome });
        }
        for objectives in OBJECTIVES {
            let _ = self.answers.get_or_create(&Answered { objectives: objectives.as_str() });
        }
        for state in [VERIFIED, ABORTED] {
            let _ = self.handoffs.get_or_create(&state);
        }
        let _ = self.kv_bytes.get_or_create(&RECEIVED);
        for plan in PLANS {
            let of = Planned { plan: plan.as_str() };
            let _ = self.plans.get_or_create(&of);
            let _ = self.prediction_error_ms.get_or_create(&of);
            let _ = self.prediction_error_ratio.get_or_create(&of);
        }
        for (node_role, cause) in ROLES.into_iter().flat_map(|role| CAUSES.map(|cause| (role.as_str(), cause.as_str())))
        {
            let _ = self.replans.get_or_create(&Replanned { node_role, cause });
        }
        for bound in BOUNDS {
            let _ = self.replan_exhausted.get_or_create(&Exhausted { bound: bound.as_str() });
        }
    }

    fn observe(&self, record: &Record, arrivals: &Arrivals, complete: bool) {
        let trace = Exemplar::of(record.identities.root);
        let note = |histogram: &Traced, value: f64| histogram.observe(value, Some(trace), None);
        if record.timeline.end_of(Phase::Queue).is_some() {
            note(&self.queue, seconds(record.timeline.length(Phase::Queue)));
        }
        if record.timeline.end_of(Phase::Route).is_some() {
            note(&self.route, seconds(record.timeline.length(Phase::Route)));
        }
        if let Some(ttft) = record.ttft() {
            note(&self.ttft, seconds(ttft));
        }
        if let (Some((predicted_ms, actual_ms)), Some(nodes)) = (record.predicted_and_actual_ttft_ms(), record.nodes())
        {
            let of = Planned { plan: nodes.plan().as_str() };
            let off_ms = (predicted_ms - actual_ms).abs();
            note(&self.prediction_error_ms.get_or_create(&of), off_ms);
            note(&self.prediction_error_ratio.get_or_create(&of), off_ms / actual_ms.max(f64::MIN_POSITIVE));
        }
        if let Some(rhythm) = &record.pace.rhythm {
            note(&self.handoff_gap, seconds(rhythm.first));
            observe_gaps(&self.itl, arrivals, trace);
        }
        if record.verified.is_some() {
            note(&self.transfer_exposed, seconds(record.timeline.length(Phase::Transfer)));
        }
        if complete {
            self.answers.get_or_create(&Answered { objectives: record.objectives().as_str() }).inc();
            note(&self.e2e, seconds(record.e2e()));
        }
    }

    fn set(&self, seen: &Seen) {
        let Seen { nodes, breakers, requests, retrying, retry_limit, spans_dropped, index, .. } = seen;
        self.inflight.set(whole(requests.inflight));
        self.retrying.set(whole(*retrying));
        self.retry_budget.set(whole(*retry_limit));
        self.queued.set(whole(requests.queued));
        self.nodes.get_or_create(&NodeRole { node_role: "prefill" }).set(nodes.prefill_nodes.into());
        self.nodes.get_or_create(&NodeRole { node_role: "decode" }).set(nodes.decode_nodes.into());
        for death in DEATHS {
            let counter = self.node_deaths.get_or_create(&Died { reason: death.as_str() });
            counter.inner().store(nodes.deaths[death as usize], Ordering::Relaxed);
        }
        // Nodes that are gone leave no series behind.
        self.breaker_state.clear();
        for (role, node, circuit) in &breakers.nodes {
            let of = NodeInstance { node_role: role.as_str(), node_instance: node.clone() };
            self.breaker_state.get_or_create(&of).set(match circuit {
                Circuit::Closed => 0,
                Circuit::HalfOpen => 1,
                Circuit::Open => 2,
            });
        }
        for role in ROLES {
            let counter = self.breaker_opened.get_or_create(&NodeRole { node_role: role.as_str() });
            counter.inner().store(breakers.opened[role as usize], Ordering::Relaxed);
        }
        // Others count; this only shows it.
        self.spans_dropped.inner().store(*spans_dropped, Ordering::Relaxed);
        self.log_lines_lost.inner().store(tandem_telemetry::lost_lines(), Ordering::Relaxed);
        self.index_blocks.set(whole(index.blocks));
        self.index_evicted.inner().store(index.evicted, Ordering::Relaxed);
        self.index_gaps.inner().store(index.gaps, Ordering::Relaxed);
    }
}

/// All gaps between a request's tokens. Only the longest points to the trace: it is what one looks for there, and the
/// others need not be written a thousand times.
fn observe_gaps(histogram: &Traced, arrivals: &Arrivals, trace: Exemplar) {
    let mut longest = arrivals.gaps().max();
    for gap in arrivals.gaps() {
        let exemplar = longest.take_if(|longest| *longest == gap).map(|_| trace);
        histogram.observe(seconds(gap), exemplar, None);
    }
}

/// Classic text from OpenMetrics text: counters are named as their samples are; no units, exemplars or end mark.
fn classic(open_metrics: &str) -> String {
    let counters: Vec<&str> =
        open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut text = String::with_capacity(open_metrics.len() + 32 * counters.len());
    for line in open_metrics.lines().filter(|line| !line.starts_with("# EOF") && !line.starts_with("# UNIT")) {
        let described = ["# HELP ", "# TYPE "].into_iter().find_map(|mark| Some((mark, line.strip_prefix(mark)?)));
        match described.and_then(|(mark, rest)| Some((mark, rest.split_once(' ')?))) {
            Some((mark, (name, rest))) if counters.contains(&name) => {
                text.extend([mark, name, "_total ", rest]);
            }
            Some(_) => text.push_str(line),
            None => text.push_str(line.split(" # {").next().unwrap_or(line)),
        }
        text.push('\n');
    }
    text
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

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(accept: Option<&str>) -> String {
        let metrics = Metrics::new("m", "r0");
        metrics.refused(ErrorKind::Overloaded);
        metrics.own.ttft.observe(0.02, Some(Exemplar { trace_id: TraceId([0xab; 16]) }), None);
        let breakers = Breakers { nodes: vec![(Role::Decode, "d0".into(), Circuit::Open)], opened: [0, 3] };
        metrics.replan_exhausted(Bound::Time);
        let _waits = metrics.waits_for_node();
        metrics.turned_away(Reason::TenantShare);
        metrics.waited(
            -3,
            Duration::from_millis(20),
            TraceContext { trace_id: [0xcd; 16], span_id: [1; 8], sampled: true },
        );
        let depths = vec![("team".into(), 7)];
        let index = IndexTotals { blocks: 5, limit: 9, evicted: 2, gaps: 1 };
        let ports =
            vec![("http", Occupancy { open: 6, evicted: 4, refused: 2, failed: 3, certificate_not_after: Some(7) })];
        let way_fallbacks = [(("ucx/shm".into(), "tcp".into()), 7)].into();
        metrics.text(accept, &Seen { breakers, index, depths, ports, way_fallbacks, ..Seen::default() }).1
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
            "tandem_certificate_not_after_seconds{role=\"router\",instance=\"r0\",port=\"http\"} 7",
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
        let text = Metrics::new("m", "r0").text(None, &Seen::default()).1;
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
    }

    #[test]
    fn open_metrics_when_asked() {
        let text = text(Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        assert!(text.ends_with("# EOF\n") && text.contains("# {trace_id=\"abababababababababababababababab\"}"));
        assert!(text.contains("# TYPE tandem_requests counter"));
    }
}
