//! Our own series: what requests took, how they ended, what was planned and retried, and the nodes as they are. Those
//! of admission, ports and ways have files of their own.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tandem_proto::{ERROR_KINDS, ErrorKind, v1};

use super::exemplar::{Exemplar, SECONDS, Traced, observe_gaps, seconds};
use super::{Labels, Seen, outcome, whole};
use crate::membership::DEATHS;
use crate::membership::breaker::Circuit;
use crate::record::timeline::Phase;
use crate::record::token_pace::Arrivals;
use crate::record::{OBJECTIVES, Record};
use crate::select::{PLANS, Plan, Role};

/// Of how far a prediction is off.
const ERROR_MS: [f64; 15] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4];
/// The same, as a share of what it was.
const ERROR_RATIO: [f64; 12] = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0];
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];

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
    node_instance: Arc<str>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Prefix {
    etcd: Arc<str>,
}

/// A histogram for each kind of plan.
type ByPlan = Family<Planned, Traced, fn() -> Traced>;

/// See the head of this file.
#[derive(Clone)]
pub(super) struct Own {
    requests: Family<Outcome, Counter>,
    pub ttft: Traced,
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
    registered: Family<Prefix, Gauge>,
}

/// A request that waits for a node; counted until it is dropped.
#[derive(Debug)]
pub struct WaitsForNode(Gauge);

impl Drop for WaitsForNode {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Own {
    pub fn register(registry: &mut Registry, labels: &Labels) -> Self {
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
            registered: Family::default(),
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
        let registered = "Whether the router stands in etcd, where nodes look for it: 1 or 0";
        registry.register("tandem_etcd_registered", registered, own.registered.clone());
        own.begin(labels);
        own
    }

    /// Every series that can be known is there from the start: a counter that appears at its first event has no rate
    /// for it, and an alert does not see it.
    fn begin(&self, Labels { causes, bounds, .. }: &Labels) {
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
        for (role, cause) in ROLES.into_iter().flat_map(|role| causes.iter().map(move |cause| (role, cause))) {
            let _ = self.replans.get_or_create(&Replanned { node_role: role.as_str(), cause });
        }
        for bound in bounds {
            let _ = self.replan_exhausted.get_or_create(&Exhausted { bound });
        }
    }

    /// A request that ended, with an error of this kind or well.
    pub fn observe(&self, record: &Record, arrivals: &Arrivals, failed: Option<ErrorKind>) {
        self.requests.get_or_create(&Outcome { outcome: failed.map_or("ok", outcome) }).inc();
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
        if let Some(itl) = &record.pace.itl {
            note(&self.handoff_gap, seconds(itl.first));
            observe_gaps(&self.itl, arrivals, trace);
        }
        if record.verified.is_some() {
            note(&self.transfer_exposed, seconds(record.timeline.length(Phase::Transfer)));
        }
        if failed.is_none() {
            self.answers.get_or_create(&Answered { objectives: record.objectives().as_str() }).inc();
            note(&self.e2e, seconds(record.e2e()));
        }
    }

    /// What is looked at when somebody scrapes.
    pub fn set(&self, seen: &Seen) {
        let Seen { nodes, breakers, inflight, queued, retrying, retry_limit, spans_dropped, index, registered, .. } =
            seen;
        self.inflight.set(whole(*inflight));
        self.retrying.set(whole(*retrying));
        self.retry_budget.set(whole(*retry_limit));
        self.queued.set(whole(*queued));
        self.nodes.get_or_create(&NodeRole { node_role: "prefill" }).set(nodes.prefill_nodes.into());
        self.nodes.get_or_create(&NodeRole { node_role: "decode" }).set(nodes.decode_nodes.into());
        for death in DEATHS {
            let counter = self.node_deaths.get_or_create(&Died { reason: death.as_str() });
            counter.inner().store(nodes.deaths[death as usize], Ordering::Relaxed);
        }
        // Nodes that are gone leave no series behind.
        self.breaker_state.clear();
        for (role, node, circuit) in &breakers.nodes {
            let of = NodeInstance { node_role: role.as_str(), node_instance: Arc::clone(node) };
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
        if let Some((etcd, is_there)) = registered {
            self.registered.get_or_create(&Prefix { etcd: Arc::clone(etcd) }).set((*is_there).into());
        }
    }

    /// A request of this outcome.
    pub fn refused(&self, kind: ErrorKind) {
        self.requests.get_or_create(&Outcome { outcome: outcome(kind) }).inc();
    }

    /// Decode has verified KV.
    pub fn handed_off(&self, kv: &v1::Verified) {
        self.handoffs.get_or_create(&VERIFIED).inc();
        self.kv_bytes.get_or_create(&RECEIVED).inc_by(kv.bytes);
    }

    /// KV did not get to decode.
    pub fn handoff_failed(&self) {
        self.handoffs.get_or_create(&ABORTED).inc();
    }

    /// An attempt of a request got the nodes of such a plan.
    pub fn planned(&self, plan: Plan) {
        self.plans.get_or_create(&Planned { plan: plan.as_str() }).inc();
    }

    /// A request goes on with other nodes after the node of this role failed.
    pub fn replanned(&self, role: Role, cause: &'static str) {
        let of = Replanned { node_role: role.as_str(), cause };
        self.replans.get_or_create(&of).inc();
    }

    /// A request failed because there were enough attempts, or they took long enough.
    pub fn replan_exhausted(&self, bound: &'static str) {
        self.replan_exhausted.get_or_create(&Exhausted { bound }).inc();
    }

    /// A client took no token for so long that it was given up.
    pub fn client_stalled(&self) {
        self.client_stalls.inc();
    }

    /// A request waits until a node comes, or until it may try one again.
    pub fn waits_for_node(&self) -> WaitsForNode {
        self.waiting_for_node.inc();
        WaitsForNode(self.waiting_for_node.clone())
    }

    /// How many do.
    pub fn waiting_for_node(&self) -> usize {
        usize::try_from(self.waiting_for_node.get()).unwrap_or(0)
    }
}
