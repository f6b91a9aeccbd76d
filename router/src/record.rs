//! Everything that is known about one request when it ends, and what is told of it: its timings for the client, its
//! spans for the trace. Pure but for span identities, which the caller draws at the start. [`crate::flow`] fills it,
//! [`crate::metrics`] reads it.
//!
//! - [`timeline`]: the phases that the client waits for. [`token_pace`]: how its tokens come. [`drafts`]: guesses at
//!   them.
//! - `spans.rs`: what the trace tells of it.
pub mod drafts;
mod spans;
pub mod timeline;
pub mod token_pace;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{Error, TraceContext, TraceState, v1};
use tandem_telemetry::ACCESS;
use tandem_telemetry::notes::Note;

use crate::membership::Route;
use crate::select::ways::Apart;
use crate::select::{self, Candidate, Plan, Role};
use drafts::Drafts;
use timeline::{Phase, Timeline};
use token_pace::TokenPace;

/// This service's name in traces.
pub const SERVICE: &str = "tandem-router";

/// The identities of this request's spans, drawn at its start because nodes need them while it runs.
#[derive(Clone, Copy, Debug)]
pub struct Identities {
    /// The whole request.
    pub root: TraceContext,
    /// The client's span.
    pub parent: Option<[u8; 8]>,
    /// One for each phase, in order.
    pub phases: [TraceContext; 5],
}

impl Identities {
    /// Draws those of the phases within `root`, which is under the client's span if there is one.
    pub fn draw(root: TraceContext, parent: Option<TraceContext>, rng: &mut impl rand::Rng) -> Self {
        let phases = std::array::from_fn(|_| root.child(rng));
        Self { root, parent: parent.map(|parent| parent.span_id), phases }
    }

    /// The span of a phase.
    pub fn of(&self, phase: Phase) -> TraceContext {
        self.phases[phase as usize]
    }
}

/// Names of the nodes of a plan.
#[derive(Clone, Debug)]
pub struct Names {
    prefill: Option<String>,
    decode: String,
}

impl Names {
    /// Of the nodes of `route`.
    pub fn of(route: &Route) -> Self {
        let prefill = route.prefill.as_ref().map(|prefill| prefill.info.node_id.clone());
        Self { prefill, decode: route.decode.info.node_id.clone() }
    }

    /// Of the node that computes the prompt: in a local plan the one that generates.
    pub fn prefill(&self) -> &str {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }

    /// Of the node that generates.
    pub fn decode(&self) -> &str {
        &self.decode
    }

    /// The kind of plan.
    pub fn plan(&self) -> Plan {
        if self.prefill.is_some() { Plan::Pair } else { Plan::Local }
    }
}

/// The nodes that were chosen.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Their names.
    pub nodes: Names,
    /// All candidates, the chosen one first.
    pub candidates: Vec<Candidate>,
    /// Pairs that are none, some of them.
    pub apart: Arc<[Apart]>,
    /// The rule by which it was chosen.
    pub choice: select::Settings,
    /// When.
    pub at: Instant,
}

/// A re-plan that found nodes to go on with.
#[derive(Clone, Debug)]
pub struct Replanned {
    /// When the attempt before it failed.
    pub at: Instant,
    /// From then to the new plan.
    pub search: Duration,
    /// The phase in which it was: the pause is part of it.
    pub phase: Phase,
    /// What the node that failed did.
    pub role: Role,
    /// Its name.
    pub node: String,
    /// Label of the cause.
    pub cause: &'static str,
    /// Names of the new ones.
    pub nodes: Names,
}

/// Which objectives of latency (`--ttft-objective-ms`, `--tpot-objective-ms`) an answer kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objectives {
    /// All: it counts as goodput.
    Met,
    /// Its first token was late.
    TtftMissed,
    /// The others were, in the mean.
    TpotMissed,
    /// All of them.
    BothMissed,
}

/// All of them, for metrics.
pub const OBJECTIVES: [Objectives; 4] =
    [Objectives::Met, Objectives::TtftMissed, Objectives::TpotMissed, Objectives::BothMissed];

impl Objectives {
    /// Label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::TtftMissed => "ttft_missed",
            Self::TpotMissed => "tpot_missed",
            Self::BothMissed => "both_missed",
        }
    }
}

/// One request, as it ended.
#[derive(Debug)]
pub struct Record {
    /// "chat", "text_completion", …
    pub api: &'static str,
    /// Served model name.
    pub model: String,
    /// Of the client.
    pub request_id: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens that could be generated.
    pub max_tokens: u32,
    /// How tokens are drawn.
    pub sampling: v1::Sampling,
    /// Of its spans.
    pub identities: Identities,
    /// What others say of its trace.
    pub state: TraceState,
    /// Of its phases.
    pub timeline: Timeline,
    /// How its tokens came.
    pub pace: TokenPace,
    /// The first plan, once chosen.
    pub chosen: Option<Chosen>,
    /// What came after it, in order.
    pub replans: Vec<Replanned>,
    /// What decode said of the KV that the transfer phase waited for.
    pub verified: Option<v1::Verified>,
    /// Of all its nodes.
    pub drafts: Drafts,
    /// What was logged of it.
    pub notes: Vec<Note>,
    /// Prompt tokens that the node of the first token did not have to compute.
    pub cached_tokens: u32,
    /// When the request ended.
    pub ended: Instant,
}

impl Record {
    /// Time to the first token; `None` if there was none.
    pub fn ttft(&self) -> Option<Duration> {
        self.timeline.end_of(Phase::Prefill).map(|at| at - self.timeline.received())
    }

    /// What the choice expected of the time from the end of the queue to the first token. `None` where the node had
    /// measured nothing to tell by.
    pub fn predicted_ttft_ms(&self) -> Option<f64> {
        let choice = self.chosen.as_ref()?.candidates.first()?;
        choice.measured.then(|| choice.ttft_ms())
    }

    /// The same, beside what it was, in milliseconds; of requests that had their first token where they were sent
    /// first.
    pub fn predicted_and_actual_ttft_ms(&self) -> Option<(f64, f64)> {
        let undisturbed = self.replans.iter().all(|replan| replan.phase > Phase::Prefill);
        let actual = self.ttft()?.saturating_sub(self.timeline.length(Phase::Queue));
        self.predicted_ttft_ms().filter(|_| undisturbed).map(|predicted_ms| (predicted_ms, ms(actual)))
    }

    /// From the request to its end.
    pub fn e2e(&self) -> Duration {
        self.ended.max(self.timeline.last()) - self.timeline.received()
    }

    /// Mean time per token after the first; `None` below two tokens.
    pub fn tpot(&self) -> Option<Duration> {
        self.pace.itl.map(|itl| itl.mean)
    }

    /// Which of the objectives it kept by which its nodes were chosen. What did not take place took no time.
    pub fn objectives(&self) -> Objectives {
        let Some(Chosen { choice, .. }) = &self.chosen else { return Objectives::Met };
        let beyond = |took: Option<Duration>, objective_ms: f64| took.is_some_and(|took| ms(took) > objective_ms);
        match (beyond(self.ttft(), choice.ttft_objective_ms), beyond(self.tpot(), choice.tpot_objective_ms)) {
            (false, false) => Objectives::Met,
            (true, false) => Objectives::TtftMissed,
            (false, true) => Objectives::TpotMissed,
            (true, true) => Objectives::BothMissed,
        }
    }

    /// Whether it took longer than its objectives. Such a trace is kept.
    pub fn is_slow(&self) -> bool {
        self.objectives() != Objectives::Met
    }

    /// The nodes that had the request last.
    pub fn nodes(&self) -> Option<&Names> {
        self.nodes_in(Phase::Decode)
    }

    fn replan_count(&self) -> u32 {
        u32::try_from(self.replans.len()).unwrap_or(u32::MAX)
    }

    /// Milliseconds of every phase.
    pub fn timings(&self) -> v1::Timings {
        let phase = |phase| ms(self.timeline.length(phase));
        let kv = self.verified.as_ref();
        let name = |of: fn(&Names) -> &str| self.nodes().map(of).unwrap_or_default().to_owned();
        v1::Timings {
            queue_ms: phase(Phase::Queue),
            route_ms: phase(Phase::Route),
            prefill_ms: phase(Phase::Prefill),
            ttft_ms: self.ttft().map_or(0.0, ms),
            transfer_exposed_ms: phase(Phase::Transfer),
            transfer_total_ms: kv.map_or(0.0, |kv| kv.transfer_ms),
            decode_ms: phase(Phase::Decode),
            e2e_ms: ms(self.e2e()),
            tpot_ms: self.tpot().map_or(0.0, ms),
            handoff_gap_ms: self.pace.itl.map_or(0.0, |itl| ms(itl.first)),
            kv_bytes: kv.map_or(0, |kv| kv.bytes),
            kv_blocks: kv.map_or(0, |kv| kv.blocks),
            kv_transport: kv.map(|kv| kv.transport.clone()).unwrap_or_default(),
            kv_gbps: kv.map_or(0.0, gigabytes_per_second),
            prefill_instance: name(Names::prefill),
            decode_instance: name(Names::decode),
            replans: self.replan_count(),
            longest_gap_ms: self.pace.itl.map_or(0.0, |itl| ms(itl.longest)),
            predicted_ttft_ms: self.predicted_ttft_ms().unwrap_or(0.0),
            drafted_tokens: self.drafts.drafted,
            accepted_tokens: self.drafts.accepted,
        }
    }

    /// The line in the access log. A failure says why.
    pub fn log(&self, tenant: &str, outcome: Result<v1::FinishReason, &Error>) {
        let (request, api, tokens) = (self.request_id.as_str(), self.api, self.pace.tokens);
        let (prompt_tokens, cached_tokens, replans) = (self.prompt_tokens, self.cached_tokens, self.replan_count());
        let name = |of: fn(&Names) -> &str| self.nodes().map_or("-", of);
        let (prefill, decode) = (name(Names::prefill), name(Names::decode));
        let (ttft_ms, e2e_ms) = (self.ttft().map(rounded_ms), rounded_ms(self.e2e()));
        match outcome {
            Ok(reason) => tracing::info!(
                target: ACCESS, request, tenant, api, status = "ok", finish = reason_text(reason), prompt_tokens,
                cached_tokens, tokens, ttft_ms, e2e_ms, prefill, decode, replans, "request answered"
            ),
            Err(error) => {
                let phase = self.timeline.phase().as_str();
                tracing::info!(
                    target: ACCESS, request, tenant, api, status = ?error.kind, phase, error = error.message,
                    prompt_tokens, cached_tokens, tokens, ttft_ms, e2e_ms, prefill, decode, replans, "request failed"
                );
            }
        }
    }

    /// The nodes with which `phase` ended: what was re-planned later is none of its business.
    fn nodes_in(&self, phase: Phase) -> Option<&Names> {
        let until = self.replans.iter().rfind(|replan| replan.phase <= phase).map(|replan| &replan.nodes);
        until.or(self.chosen.as_ref().map(|chosen| &chosen.nodes))
    }
}

/// The name that clients and dashboards know.
pub fn reason_text(reason: v1::FinishReason) -> &'static str {
    match reason {
        v1::FinishReason::Length => "length",
        v1::FinishReason::Stop | v1::FinishReason::Unspecified => "stop",
    }
}

/// 10⁹ bytes a second while bytes were moving; 0 when no time was measured.
fn gigabytes_per_second(kv: &v1::Verified) -> f64 {
    if kv.copying_ms > 0.0 { kv.bytes as f64 / kv.copying_ms / 1e6 } else { 0.0 }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// For people: microseconds are enough.
fn rounded_ms(duration: Duration) -> f64 {
    (ms(duration) * 1e3).round() / 1e3
}
