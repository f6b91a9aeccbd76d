//! Everything that is known about one request when it ends, and what is told of it: its timings for the client, its
//! spans for the trace. Pure but for span identities, which the caller draws at the start. [`crate::flow`] fills it,
//! [`crate::metrics`] reads it.
//!
//! - [`timeline`]: the phases that the client waits for. [`pace`]: how its tokens come. [`drafts`]: guesses at them.
pub mod drafts;
pub mod pace;
pub mod timeline;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{Error, TraceContext, TraceState, v1};
use tandem_telemetry::notes::Note;
use tandem_telemetry::{ACCESS, Kind, Phase as SpanBuilder, Value};

use crate::membership::Route;
use crate::select::ways::Apart;
use crate::select::{self, Candidate, Plan, Role};
use drafts::Drafts;
use pace::Pace;
use timeline::{Phase, Timeline};

/// Room for the spans of a request that went well.
const SPANS_BYTES: usize = 8 << 10;

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
    pub pace: Pace,
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
        self.pace.rhythm.map(|rhythm| rhythm.mean)
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
            handoff_gap_ms: self.pace.rhythm.map_or(0.0, |rhythm| ms(rhythm.first)),
            kv_bytes: kv.map_or(0, |kv| kv.bytes),
            kv_blocks: kv.map_or(0, |kv| kv.blocks),
            kv_transport: kv.map(|kv| kv.transport.clone()).unwrap_or_default(),
            kv_gbps: kv.map_or(0.0, gigabytes_per_second),
            prefill_instance: name(Names::prefill),
            decode_instance: name(Names::decode),
            replans: self.replan_count(),
            longest_gap_ms: self.pace.rhythm.map_or(0.0, |rhythm| ms(rhythm.longest)),
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

    /// The router's spans, packed: the phases, then the root. The phase in which a request failed ends with the error.
    pub fn spans(&self, instance: &str, outcome: Result<v1::FinishReason, &Error>) -> Vec<u8> {
        let mut spans = Vec::with_capacity(SPANS_BYTES);
        for (phase, start, end) in self.timeline.spans() {
            spans.extend(self.phase(phase).end(SERVICE, instance, start, end));
        }
        if let (Err(error), None) = (outcome, self.timeline.end_of(Phase::Decode)) {
            let open = self.phase(self.timeline.phase()).error(&error.message);
            let start = if spans.is_empty() { self.timeline.received() } else { after(self.timeline.last()) };
            spans.extend(open.end(SERVICE, instance, start, self.ended));
        }
        // A phase that ended a microsecond after an immediate failure must not outlive its parent.
        let end = self.ended.max(after(self.timeline.last()));
        spans.extend(self.root(outcome).end(SERVICE, instance, self.timeline.received(), end));
        spans
    }

    fn phase(&self, phase: Phase) -> SpanBuilder {
        let kind = match phase {
            Phase::Prefill | Phase::Decode => Kind::Client,
            Phase::Queue | Phase::Route | Phase::Transfer => Kind::Internal,
        };
        let root = Some(self.identities.root.span_id);
        let span =
            SpanBuilder::new(phase.as_str(), kind, self.identities.of(phase), root).in_state(self.state.as_str());
        match (phase, &self.chosen, self.nodes_in(phase), &self.verified) {
            (Phase::Route, Some(chosen), ..) => routed(span, chosen),
            (Phase::Prefill, _, Some(nodes), _) => span.attr("tandem.prefill.instance", nodes.prefill()),
            (Phase::Decode, _, Some(nodes), _) => span
                .attr("tandem.decode.instance", nodes.decode())
                .attr("tandem.tokens", self.pace.tokens.saturating_sub(1)),
            (Phase::Transfer, .., Some(kv)) => self.with_copy(with_kv(span, kv), kv),
            _ => span,
        }
    }

    /// The nodes with which `phase` ended: what was re-planned later is none of its business.
    fn nodes_in(&self, phase: Phase) -> Option<&Names> {
        let until = self.replans.iter().rfind(|replan| replan.phase <= phase).map(|replan| &replan.nodes);
        until.or(self.chosen.as_ref().map(|chosen| &chosen.nodes))
    }

    /// The exposed tail points to the whole copy, decode's span.
    fn with_copy(&self, span: SpanBuilder, kv: &v1::Verified) -> SpanBuilder {
        match kv.span_id.as_slice().try_into() {
            Ok(span_id) => span.link(TraceContext { span_id, ..self.identities.root }),
            Err(_) => span,
        }
    }

    fn root(&self, outcome: Result<v1::FinishReason, &Error>) -> SpanBuilder {
        let Identities { root, parent, .. } = self.identities;
        let mut span = SpanBuilder::new(format!("{} {}", self.api, self.model), Kind::Server, root, parent)
            .in_state(self.state.as_str())
            .attr("tandem.request_id", self.request_id.as_str())
            .attr("tandem.replans", self.replan_count());
        if let Some(chosen) = &self.chosen {
            span = span.attr("tandem.route.policy", chosen.choice.policy.as_str());
        }
        if let Some(predicted_ms) = self.predicted_ttft_ms() {
            span = span.attr("tandem.predicted_ttft_ms", predicted_ms);
        }
        if let Some(nodes) = self.nodes() {
            span = span
                .attr("tandem.route.plan", nodes.plan().as_str())
                .attr("tandem.prefill.instance", nodes.prefill())
                .attr("tandem.decode.instance", nodes.decode());
        }
        span = self.replans.iter().fold(span, replanned);
        for Note { message, level, at, fields } in &self.notes {
            let level = ("level", Value::from(*level));
            span = span.event(message, *at, fields.iter().cloned().chain([level]));
        }
        if let Some(kv) = &self.verified {
            let exposed_ms = ms(self.timeline.length(Phase::Transfer));
            span = with_kv(span, kv)
                .attr("tandem.kv.blocks_reused", kv.held_blocks)
                .attr("tandem.kv.exposed_ms", exposed_ms)
                .attr("tandem.kv.hidden_ms", (kv.transfer_ms - exposed_ms).max(0.0));
        }
        span = self.latencies(self.gen_ai(span, outcome));
        match outcome {
            Ok(_) => span,
            Err(error) => span.attr("error.type", format!("{:?}", error.kind)).error(&error.message),
        }
    }

    fn gen_ai(&self, span: SpanBuilder, outcome: Result<v1::FinishReason, &Error>) -> SpanBuilder {
        let span = span
            .attr("gen_ai.operation.name", self.api)
            .attr("gen_ai.provider.name", "tandem")
            .attr("gen_ai.request.model", self.model.as_str())
            .attr("gen_ai.response.model", self.model.as_str())
            .attr("gen_ai.response.id", self.request_id.as_str())
            .attr("gen_ai.request.max_tokens", self.max_tokens)
            .attr("gen_ai.request.temperature", self.sampling.temperature)
            .attr("gen_ai.request.top_p", self.sampling.top_p)
            .attr("gen_ai.request.top_k", self.sampling.top_k)
            .attr("gen_ai.request.seed", self.sampling.seed)
            .attr("gen_ai.request.presence_penalty", self.sampling.presence_penalty)
            .attr("gen_ai.request.frequency_penalty", self.sampling.frequency_penalty)
            .attr("gen_ai.usage.input_tokens", self.prompt_tokens)
            .attr("gen_ai.usage.cache_read.input_tokens", self.cached_tokens)
            .attr("gen_ai.usage.output_tokens", self.pace.tokens)
            .attr("gen_ai.latency.time_in_queue", self.timeline.length(Phase::Queue).as_secs_f64())
            .attr("gen_ai.latency.e2e", self.e2e().as_secs_f64())
            .attr("gen_ai.latency.time_in_model_prefill", self.timeline.length(Phase::Prefill).as_secs_f64())
            .attr("gen_ai.latency.time_in_model_decode", self.timeline.length(Phase::Decode).as_secs_f64());
        match outcome {
            Ok(reason) => span.attr("gen_ai.response.finish_reasons", vec![reason_text(reason).to_owned()]),
            Err(_) => span,
        }
    }

    fn latencies(&self, mut span: SpanBuilder) -> SpanBuilder {
        if let Some(ttft) = self.ttft() {
            span = span.attr("tandem.ttft_ms", ms(ttft)).attr("gen_ai.latency.time_to_first_token", ttft.as_secs_f64());
        }
        if let Some(rhythm) = &self.pace.rhythm {
            span = span
                .attr("tandem.tpot_ms", ms(rhythm.mean))
                .attr("tandem.handoff_gap_ms", ms(rhythm.first))
                .attr("tandem.itl.p50_ms", ms(rhythm.p50))
                .attr("tandem.itl.p99_ms", ms(rhythm.p99))
                .attr("tandem.itl.max_ms", ms(rhythm.longest))
                .attr("tandem.smoothness", rhythm.smoothness)
                .attr("tandem.stalls", rhythm.stalls);
        }
        span
    }
}

/// The name that clients and dashboards know.
pub fn reason_text(reason: v1::FinishReason) -> &'static str {
    match reason {
        v1::FinishReason::Length => "length",
        v1::FinishReason::Stop | v1::FinishReason::Unspecified => "stop",
    }
}

fn routed(mut span: SpanBuilder, chosen: &Chosen) -> SpanBuilder {
    for (place, candidate) in chosen.candidates.iter().enumerate() {
        let prefill = candidate.prefill_id.as_ref().unwrap_or(&candidate.decode_id);
        let terms = &candidate.terms;
        span = span.event(
            "candidate",
            chosen.at,
            [
                ("tandem.route.chosen", Value::from(place == 0)),
                ("tandem.route.plan", Value::from(candidate.plan().as_str())),
                ("tandem.prefill.instance", Value::from(&**prefill)),
                ("tandem.decode.instance", Value::from(&*candidate.decode_id)),
                ("tandem.route.wait_prefill_ms", Value::from(terms.wait_prefill_ms)),
                ("tandem.route.prefill_ms", Value::from(terms.prefill_ms)),
                ("tandem.route.exposed_ms", Value::from(terms.exposed_ms)),
                ("tandem.route.wait_decode_ms", Value::from(terms.wait_decode_ms)),
                ("tandem.route.step_ms", Value::from(terms.step_ms)),
                ("tandem.route.harm_ms", Value::from(terms.harm_ms)),
                ("tandem.route.total_ms", Value::from(candidate.total_ms)),
                ("tandem.route.ttft_ms", Value::from(candidate.ttft_ms())),
                ("tandem.route.cached_tokens", Value::from(candidate.cached_tokens)),
                ("tandem.route.blocks_short", Value::from(candidate.blocks_short)),
                ("tandem.route.measured", Value::from(candidate.measured)),
                ("tandem.route.breaker_shut", Value::from(candidate.shut)),
                ("tandem.route.avoided", Value::from(candidate.avoided)),
            ]
            .into_iter()
            .chain(way(candidate)),
        );
    }
    for Apart { prefill_id, decode_id, why } in chosen.apart.iter() {
        let names = [("tandem.prefill.instance", prefill_id), ("tandem.decode.instance", decode_id)];
        let told = names.into_iter().chain([("tandem.route.why", why)]);
        span = span.event("no_way", chosen.at, told.map(|(name, text)| (name, Value::from(&**text))));
    }
    span.attr("tandem.route.candidates", chosen.candidates.len())
        .attr("tandem.route.policy", chosen.choice.policy.as_str())
        .attr("tandem.route.step_weight", chosen.choice.step_weight())
}

/// How the KV of a pair would travel, and the faster way that failed there lately.
fn way(candidate: &Candidate) -> impl Iterator<Item = (&'static str, Value)> {
    let told = candidate.way.iter().flat_map(|way| {
        let failed = way.instead_of.as_ref().map(|name| ("tandem.route.way_instead_of", name));
        [("tandem.route.way", &way.name)].into_iter().chain(failed)
    });
    told.map(|(name, way)| (name, Value::from(&**way)))
}

fn replanned(span: SpanBuilder, replan: &Replanned) -> SpanBuilder {
    let nodes = &replan.nodes;
    span.event(
        "replan",
        replan.at,
        [
            ("tandem.replan.failed_instance", Value::from(replan.node.as_str())),
            ("tandem.replan.failed_role", Value::from(replan.role.as_str())),
            ("tandem.replan.cause", Value::from(replan.cause)),
            ("tandem.replan.phase", Value::from(replan.phase.as_str())),
            ("tandem.replan.search_ms", Value::from(ms(replan.search))),
            ("tandem.route.plan", Value::from(nodes.plan().as_str())),
            ("tandem.prefill.instance", Value::from(nodes.prefill())),
            ("tandem.decode.instance", Value::from(nodes.decode())),
        ],
    )
}

fn with_kv(span: SpanBuilder, kv: &v1::Verified) -> SpanBuilder {
    span.attr("tandem.kv.bytes", kv.bytes)
        .attr("tandem.kv.blocks", kv.blocks)
        .attr("tandem.kv.transport", kv.transport.as_str())
        .attr("tandem.kv.gbps", gigabytes_per_second(kv))
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

fn after(at: Instant) -> Instant {
    at + Duration::from_micros(1)
}
