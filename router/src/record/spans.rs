//! The spans of one request, for its trace: its phases, and the whole with what OpenTelemetry's conventions for
//! generative AI and our own attributes say of it. Pure.
use std::time::{Duration, Instant};

use tandem_proto::{Error, TraceContext, v1};
use tandem_telemetry::notes::Note;
use tandem_telemetry::{Kind, Phase as SpanBuilder, Value};

use super::timeline::Phase;
use super::{Chosen, Identities, Record, Replanned, SERVICE, gigabytes_per_second, ms, reason_text};
use crate::select::Candidate;
use crate::select::ways::Apart;

/// Room for the spans of a request that went well.
const SPANS_BYTES: usize = 8 << 10;

impl Record {
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
        if let Some(itl) = &self.pace.itl {
            span = span
                .attr("tandem.tpot_ms", ms(itl.mean))
                .attr("tandem.handoff_gap_ms", ms(itl.first))
                .attr("tandem.itl.p50_ms", ms(itl.p50))
                .attr("tandem.itl.p99_ms", ms(itl.p99))
                .attr("tandem.itl.max_ms", ms(itl.longest))
                .attr("tandem.smoothness", itl.smoothness)
                .attr("tandem.stalls", itl.stalls);
        }
        span
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
                ("tandem.route.interference_ms", Value::from(terms.interference_ms)),
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

fn after(at: Instant) -> Instant {
    at + Duration::from_micros(1)
}
