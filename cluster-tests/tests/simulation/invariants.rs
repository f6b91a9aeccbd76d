//! What must hold, whatever happens: DESIGN's invariants as far as one run can show them. Each finding says which one
//! broke.
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tandem_kvtransfer::mem::MemNetwork;
use tandem_proto::{ErrorKind, v1};

use crate::client::{End, Outcome};
use crate::node::{IDLE_TASKS, MAX_CALLS, NodeProcess};
use crate::oracle::Expected;
use crate::process::Process;
use crate::router::RouterProcess;
use crate::schedule::{Client, Request, Schedule};

/// A request ends so long after its deadline at the latest.
const AFTER_DEADLINE: Duration = Duration::from_millis(5);
/// Child spans leave no larger gap.
const TILED_MS: f64 = 0.01;

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// See [`INVARIANTS`].
    pub invariant: usize,
    pub what: String,
}

/// By number, from 1.
pub const INVARIANTS: [&str; 7] = [
    "every token is the undisturbed engine's: no unverified KV was read",
    "tokens come once and in order, then an end or a typed error",
    "all blocks come back, nothing is left in quarantine, no hand-off, no task",
    "everything ends within its bound",
    "queues keep their limits",
    "queue, route and prefill add up to TTFT",
    "a healed cluster serves",
];

impl Violation {
    pub fn new(invariant: usize, what: impl Into<String>) -> Self {
        Self { invariant, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invariant {} ({}): {}", self.invariant, INVARIANTS[self.invariant - 1], self.what)
    }
}

/// Of what the clients saw.
pub fn of_outcomes(schedule: &Schedule, expected: &[Expected], outcomes: &[Outcome]) -> Vec<Violation> {
    let calm = !schedule.excuses();
    let found = outcomes.iter().flat_map(|outcome| {
        let (request, expected) = (&schedule.requests[outcome.request], &expected[outcome.request]);
        of_outcome(request, expected, outcome, calm)
    });
    found.collect()
}

/// Of requests that nothing disturbed, each [`patient`].
pub fn of_healed(schedule: &Schedule, expected: &[Expected], outcomes: &[Outcome]) -> Vec<Violation> {
    let unanswered = outcomes.iter().filter(|outcome| !matches!(outcome.end, End::Finished { .. }));
    let mut found: Vec<_> = unanswered
        .map(|outcome| Violation::new(7, format!("request {}: {:?}", outcome.request, outcome.end)))
        .collect();
    found.extend(outcomes.iter().flat_map(|outcome| {
        let request = patient(&schedule.requests[outcome.request]);
        of_outcome(&request, &expected[outcome.request], outcome, true)
    }));
    found
}

fn of_outcome(request: &Request, expected: &Expected, outcome: &Outcome, calm: bool) -> Vec<Violation> {
    let found = [tokens(outcome, expected), end(outcome, expected, calm), in_time(outcome, request), tiled(outcome)];
    found.into_iter().flatten().collect()
}

/// The same request by a client that waits.
pub fn patient(request: &Request) -> Request {
    Request { client: Client::Patient, deadline: Duration::from_secs(10), ..request.clone() }
}

/// Of a node at any time.
pub fn of_limits(node: &NodeProcess) -> Vec<Violation> {
    let (load, pool, calls) = (node.node.engine.load(), node.node.engine.pool(), node.node.work.in_flight());
    let mut found = Vec::new();
    if calls > MAX_CALLS || load.waiting > MAX_CALLS {
        found.push(Violation::new(5, format!("{}: {calls} calls, {load:?}", node.name)));
    }
    if pool.cached() > pool.free() || pool.free() > pool.total() {
        found.push(Violation::new(3, format!("{}: {pool:?}", node.name)));
    }
    found
}

/// Of a router at any time.
pub fn of_queue(schedule: &Schedule, router: &RouterProcess) -> Option<Violation> {
    let counts = router.service.counts();
    let within = counts.inflight <= schedule.max_inflight as usize && counts.queued <= schedule.max_queue;
    (!within).then(|| Violation::new(5, format!("the router: {counts:?}")))
}

/// Of a router that has nothing to do.
pub fn of_idle(router: &RouterProcess) -> Option<Violation> {
    let counts = router.service.counts();
    (counts.inflight + counts.queued > 0).then(|| Violation::new(3, format!("the router: {counts:?}")))
}

/// Of a process that was killed.
pub fn of_dead(process: &Process) -> Option<Violation> {
    let left = process.tasks();
    (left > 0).then(|| Violation::new(3, format!("a dead process has {left} tasks left")))
}

/// Of a node that has nothing to do.
pub fn of_rest(node: &NodeProcess) -> Vec<Violation> {
    let (pool, registry) = (node.node.engine.pool(), node.transport.registry());
    let open_writes = registry.counters().open_writes.load(Relaxed);
    let left = |what: &str, count: usize| {
        (count > 0).then(|| Violation::new(3, format!("{}: {count} {what} left", node.name)))
    };
    [
        left("blocks leased", pool.total() - pool.free()),
        left("hand-offs in quarantine", registry.quarantined().handoffs),
        left("hand-offs", registry.handoffs()),
        left("writes", open_writes as usize),
        left("calls", node.node.work.in_flight()),
        left("tasks", node.process.tasks().saturating_sub(IDLE_TASKS)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Of a router whose nodes all run.
pub fn of_membership(schedule: &Schedule, router: &RouterProcess) -> Option<Violation> {
    let totals = router.service.membership().totals();
    let (got, want) = ((totals.prefill_nodes, totals.decode_nodes), (schedule.prefill_nodes, schedule.decode_nodes));
    let all = (got.0 as usize, got.1 as usize) == want;
    (!all).then(|| Violation::new(7, format!("the router knows {got:?} nodes of {want:?}")))
}

/// Of the KV network when nobody has anything to send.
pub fn of_network(network: &MemNetwork) -> Option<Violation> {
    let open = network.connections();
    (open > 0).then(|| Violation::new(3, format!("{open} KV connections left")))
}

fn tokens(outcome: &Outcome, expected: &Expected) -> Option<Violation> {
    let same = expected.tokens.starts_with(&outcome.tokens);
    (!same).then(|| {
        let (got, want) = (&outcome.tokens, &expected.tokens);
        Violation::new(1, format!("request {}: {got:?} instead of {want:?}", outcome.request))
    })
}

fn end(outcome: &Outcome, expected: &Expected, calm: bool) -> Option<Violation> {
    let broken = |what: String| Some(Violation::new(2, format!("request {}: {what}", outcome.request)));
    match &outcome.end {
        End::Broken(what) => broken(what.clone()),
        End::Finished { reason, .. } if (outcome.tokens.len(), *reason) != (expected.tokens.len(), expected.reason) => {
            let (got, want) = (outcome.tokens.len(), expected.tokens.len());
            broken(format!("{reason:?} after {got} tokens instead of {:?} after {want}", expected.reason))
        }
        End::Failed(error) if !excusable(error.kind, outcome.tokens.is_empty(), calm) => broken(format!("{error:?}")),
        _ => None,
    }
}

/// Errors that the clients or, unless it is `calm`, the world can cause; any other one is a bug.
fn excusable(kind: ErrorKind, nothing_sent: bool, calm: bool) -> bool {
    match kind {
        ErrorKind::DeadlineExceeded | ErrorKind::Overloaded => true,
        ErrorKind::Unavailable => nothing_sent && !calm,
        ErrorKind::Aborted => !nothing_sent && !calm,
        _ => false,
    }
}

fn in_time(outcome: &Outcome, request: &Request) -> Option<Violation> {
    let reading = match request.client {
        Client::Slow(pause) => pause * (outcome.tokens.len() as u32 + 1),
        _ => Duration::ZERO,
    };
    let bound = request.deadline + AFTER_DEADLINE + reading;
    (outcome.took > bound).then(|| {
        let (took, deadline, at, client) = (outcome.took, request.deadline, request.at, request.client);
        let what = format!("came at {at:?} ({client:?}) and took {took:?}, its deadline was {deadline:?}");
        Violation::new(4, format!("request {} {what}", outcome.request))
    })
}

fn tiled(outcome: &Outcome) -> Option<Violation> {
    let End::Finished { timings, .. } = &outcome.end else { return None };
    let v1::Timings { queue_ms, route_ms, prefill_ms, ttft_ms, .. } = **timings;
    let parts = queue_ms + route_ms + prefill_ms;
    ((parts - ttft_ms).abs() > TILED_MS)
        .then(|| Violation::new(6, format!("request {}: {parts} ms of {ttft_ms} ms", outcome.request)))
}
