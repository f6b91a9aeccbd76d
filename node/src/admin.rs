//! The admin port: `/health/live` and `/health/ready` for supervisors, and `/metrics`. Everything is read at the
//! scrape; nothing is kept. How it is written is [`text`]'s matter.
mod text;

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tandem_ports::Occupancy;
use tandem_proto::v1::Role;

use crate::figures::FINISH_REASONS;
use crate::node::{Node, role_name};
use text::{Form, Text};

/// The routes.
pub fn routes(node: Arc<Node>) -> Router {
    let ready = || get(async |State(node): State<Arc<Node>>| answer(node.failed(), node.work.is_draining()));
    let live = get(async |State(node): State<Arc<Node>>| answer(node.failed(), false));
    let health = Router::new().route("/health/live", live).route("/health/ready", ready()).route("/health", ready());
    health.route("/metrics", get(metrics)).with_state(node)
}

/// A node that failed stays so; one that drains lives, and takes nothing new.
fn answer(failed: Option<impl Display>, is_draining: bool) -> (StatusCode, String) {
    match (failed, is_draining) {
        (Some(reason), _) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        (None, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
        (None, false) => (StatusCode::OK, "ok\n".to_owned()),
    }
}

async fn metrics(State(node): State<Arc<Node>>, headers: HeaderMap) -> impl IntoResponse {
    let form = Form::accepted(headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()));
    ([(header::CONTENT_TYPE, form.content_type())], render(&node, form))
}

/// All of them, with exemplars.
pub(crate) fn metrics_text(node: &Node) -> String {
    render(node, Form::OpenMetrics)
}

fn render(node: &Node, form: Form) -> String {
    let mut text = Text::new(form, role_name(node.role), &node.node_id, &node.engine.spec().model_name);
    requests(&mut text, node);
    ports(&mut text, node);
    handoffs(&mut text, node);
    vllm(&mut text, node);
    if node.role == Role::Decode {
        vllm_decode(&mut text, node);
        vllm_answers(&mut text, node);
    }
    text.finish()
}

fn requests(text: &mut Text, node: &Node) {
    let (load, engine, total) = (node.load(), node.engine.load(), node.engine.pool().total());
    text.family(
        "tandem_kv_blocks",
        "gauge",
        "KV blocks of the arena; cached ones are free and hold a reusable prefix.",
    );
    text.sample(&[("state", "free")], load.free_blocks as f64);
    text.sample(&[("state", "cached")], engine.cached_blocks as f64);
    text.sample(&[("state", "total")], total as f64);
    text.family("tandem_step_cost_ms", "gauge", "What a step's time is made of, as measured.");
    text.sample(&[("of", "step")], engine.step_cost.base_ms);
    text.sample(&[("of", "token")], engine.step_cost.token_ms);
    text.sample(&[("of", "context")], engine.step_cost.context_ms);
    text.sample(&[("of", "decode_token")], engine.step_cost.decode_token_ms);
    text.sample(&[("of", "decode_context")], engine.step_cost.decode_context_ms);
    text.family("tandem_steps_total", "counter", "Engine steps, by whether other nodes lent their cores.");
    for (cores, steps) in ["own", "borrowed"].into_iter().zip(engine.steps) {
        text.sample(&[("cores", cores)], steps as f64);
    }
    text.family("tandem_steps_ahead_total", "counter", "Engine steps that began while one before was under way.");
    text.sample(&[], engine.steps_ahead as f64);
    text.family("tandem_requests_running", "gauge", "Requests in the running batch.");
    text.sample(&[], f64::from(load.running));
    text.family("tandem_requests_waiting", "gauge", "Requests that wait for blocks, a peer or the batch.");
    text.sample(&[], f64::from(load.waiting));
    text.family("tandem_queued_tokens", "gauge", "Tokens accepted and not computed.");
    text.sample(&[], load.queued_tokens as f64);
    text.family(
        "tandem_strangers_refused_total",
        "counter",
        "Calls refused for want of the cluster's join token or of a good certificate.",
    );
    text.sample(&[], node.strangers.refused() as f64);
    text.family("tandem_requests_total", "counter", "Requests that ended, by outcome.");
    for (outcome, count) in node.work.outcomes() {
        text.sample(&[("outcome", outcome)], count as f64);
    }
    let (open, begun) = node.work.lives().counts();
    text.family("tandem_router_sessions", "gauge", "Routers that this node is in a session with.");
    text.sample(&[], open as f64);
    text.family("tandem_router_sessions_total", "counter", "Sessions with routers that began.");
    text.sample(&[], begun as f64);
    text.family("tandem_spans_dropped_total", "counter", "Spans that did not reach the collector.");
    text.sample(&[], node.spans.exporter.dropped() as f64);
    text.family("tandem_log_lines_lost_total", "counter", "Lines of the log that nobody read in time.");
    text.sample(&[], tandem_telemetry::lost_lines() as f64);
}

fn ports(text: &mut Text, node: &Node) {
    let ports: Vec<(&str, Occupancy)> =
        node.ports.get().into_iter().flatten().map(|(name, places)| (*name, places.occupancy())).collect();
    let mut family = |name, kind, help, value: fn(&Occupancy) -> f64| {
        text.family(name, kind, help);
        ports.iter().for_each(|(port, now)| text.sample(&[("port", port)], value(now)));
    };
    family("tandem_connections", "gauge", "Open connections.", |now| now.open as f64);
    let evicted = "Idle and half-open connections that made room for others.";
    family("tandem_connections_evicted_total", "counter", evicted, |now| now.evicted as f64);
    let refused = "Connections closed at once because all others were busy.";
    family("tandem_connections_refused_total", "counter", refused, |now| now.refused as f64);
    let failed = "Connections that the port ended because of what they sent, or did not send in time.";
    family("tandem_connections_failed_total", "counter", failed, |now| now.failed as f64);
    let ends = "Unix time at which a port's certificate ends, or one of the authorities' behind it.";
    text.family("tandem_certificate_not_after_seconds", "gauge", ends);
    let ends = ports.iter().filter_map(|(port, now)| Some((port, now.certificate_not_after?)));
    ends.for_each(|(port, seconds)| text.sample(&[("port", port)], seconds as f64));
}

fn handoffs(text: &mut Text, node: &Node) {
    let counters = node.transport.counters();
    text.family("tandem_kv_transport_info", "gauge", "The KV transports that this node offers.");
    for info in node.transport.infos() {
        text.sample(&[("backend", &info.backend), ("name", &info.name)], 1.0);
    }
    text.family("tandem_handoffs_total", "counter", "KV hand-offs, by what became of them.");
    for (state, count) in [
        ("sent", &counters.sent_handoffs),
        ("verified", &counters.verified_handoffs),
        ("aborted", &counters.aborted_handoffs),
        ("released", &counters.released_handoffs),
        ("quarantined", &counters.quarantined_handoffs),
    ] {
        text.sample(&[("state", state)], count.load(Relaxed) as f64);
    }
    match node.role {
        Role::Prefill => sent(text, node),
        _ => {
            text.family(
                "tandem_kv_blocks_reused_total",
                "counter",
                "Blocks of prompts that did not travel: they were here.",
            );
            text.sample(&[], node.handoffs.reused_blocks.load(Relaxed) as f64);
        }
    }
    text.family("tandem_handoff_refusals_total", "counter", "KV hand-offs that this node refused, by reason.");
    for (reason, count) in counters.refused() {
        text.sample(&[("reason", reason)], count as f64);
    }
    text.family("tandem_kv_bytes_total", "counter", "KV bytes moved.");
    text.sample(&[("direction", "sent")], counters.sent_bytes.load(Relaxed) as f64);
    text.sample(&[("direction", "received")], counters.received_bytes.load(Relaxed) as f64);
    text.family("tandem_kv_copied_bytes_total", "counter", "KV bytes copied out of a sender's memory: one copy.");
    text.sample(&[], counters.copied_bytes.load(Relaxed) as f64);
    text.family(
        "tandem_kv_unmapped_peers_total",
        "counter",
        "KV senders whose memory could not be mapped: two copies.",
    );
    text.sample(&[], counters.unmapped_peers.load(Relaxed) as f64);
    text.family("tandem_kv_protocol_errors_total", "counter", "Garbage on the KV transport.");
    text.sample(&[], counters.protocol_errors.load(Relaxed) as f64);
    text.family(
        "tandem_kv_rejected_addresses_total",
        "counter",
        "Tickets and hellos refused before anything that they say was used.",
    );
    text.sample(&[("from", "ticket")], counters.rejected_tickets.load(Relaxed) as f64);
    text.sample(&[("from", "hello")], counters.rejected_hellos.load(Relaxed) as f64);
    text.family("tandem_kv_dropped_frames_total", "counter", "KV frames for which there was no room.");
    text.sample(&[], counters.dropped_frames.load(Relaxed) as f64);
    text.family("tandem_kv_lost_peers_total", "counter", "KV peers lost.");
    text.sample(&[], counters.lost_peers.load(Relaxed) as f64);
    text.family("tandem_kv_fenced_peers_total", "counter", "KV peers cut off because a write of theirs did not end.");
    text.sample(&[], counters.fenced_peers.load(Relaxed) as f64);
    text.family("tandem_kv_quarantined_blocks", "gauge", "KV blocks of ended hand-offs that a writer may still touch.");
    text.sample(&[], counters.quarantined_blocks.load(Relaxed) as f64);
}

/// What only the sending side knows.
fn sent(text: &mut Text, node: &Node) {
    let handoffs = &node.handoffs;
    let mut split = |name, help, [hidden, exposed]: [&AtomicU64; 2], unit: f64| {
        text.family(name, "counter", help);
        text.sample(&[("part", "hidden")], hidden.load(Relaxed) as f64 * unit);
        text.sample(&[("part", "exposed")], exposed.load(Relaxed) as f64 * unit);
    };
    split(
        "tandem_kv_pushed_bytes_total",
        "KV bytes pushed, by whether the prompt was still computed.",
        [&handoffs.hidden_bytes, &handoffs.exposed_bytes],
        1.0,
    );
    split(
        "tandem_kv_pushed_blocks_total",
        "KV blocks pushed, by whether the prompt was still computed.",
        [&handoffs.hidden_blocks, &handoffs.exposed_blocks],
        1.0,
    );
    split(
        "tandem_kv_transfer_seconds_total",
        "Time of delivered hand-offs, by whether the prompt was still computed.",
        [&handoffs.hidden_ns, &handoffs.exposed_ns],
        1e-9,
    );
    text.family(
        "tandem_kv_link_bytes_per_second",
        "gauge",
        "Speed of the links to receivers; where computing was always the slow part, what they can do at least; 0 before a hand-off of 1 MiB.",
    );
    text.sample(&[], handoffs.link_bytes_per_second.load(Relaxed) as f64);
    text.family("tandem_handoff_redeliveries_total", "counter", "Second and further tickets of one request.");
    text.sample(&[], handoffs.redelivered.load(Relaxed) as f64);
    text.family(
        "tandem_handoff_redeliver_timeouts_total",
        "counter",
        "Requests for which no other ticket came in time.",
    );
    text.sample(&[], handoffs.not_redelivered.load(Relaxed) as f64);
    text.family(
        "tandem_handoffs_undelivered_total",
        "counter",
        "KV hand-offs that failed on the receiver's side, by cause.",
    );
    for (cause, count) in handoffs.undelivered() {
        text.sample(&[("cause", cause)], count as f64);
    }
}

/// The names that public dashboards read, where the meaning is the same.
fn vllm(text: &mut Text, node: &Node) {
    let (load, pool, figures) = (node.engine.load(), node.engine.pool(), &node.figures);
    let total = pool.total();
    text.family("vllm:num_requests_running", "gauge", "Requests in the running batch.");
    text.sample(&[], load.running as f64);
    // Who waits for the other node of its pair, or is done and waits for a ticket, is in no queue.
    text.family("vllm:num_requests_waiting", "gauge", "Requests that wait for KV blocks or a place in the batch.");
    text.sample(&[], (load.waiting + pool.waiting()) as f64);
    text.family("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.");
    text.sample(&[], 1.0 - load.free_blocks as f64 / total.max(1) as f64);
    let help = "Sequences and computed prompts that gave their blocks up to be computed again.";
    text.family("vllm:num_preemptions_total", "counter", help);
    text.sample(&[], node.load().preemptions as f64);
    for (name, help, count) in [
        ("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", &figures.prefix_queries),
        ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", &figures.prefix_hits),
    ] {
        text.family(name, "counter", help);
        text.sample(&[], count.load(Relaxed) as f64);
    }
    // vLLM's names for blocks wherever they are.
    text.family("vllm:cache_config_info", "gauge", "The KV cache.");
    let block_tokens = node.engine.spec().block_tokens.to_string();
    text.sample(&[("block_size", &block_tokens), ("num_gpu_blocks", &total.to_string())], 1.0);
}

/// Those that mean something where answers are generated and KV arrives.
fn vllm_decode(text: &mut Text, node: &Node) {
    let (figures, (prompt, generated)) = (&node.figures, node.work.tokens());
    let failed = node.transport.counters().aborted_handoffs.load(Relaxed);
    for (name, help, count) in [
        ("vllm:prompt_tokens_total", "Tokens of prompts whose KV came here.", prompt),
        ("vllm:generation_tokens_total", "Tokens of answers, the first ones included.", generated),
        (
            "vllm:external_prefix_cache_queries_total",
            "Tokens whose KV was to come from a prefill node.",
            figures.external_queries.load(Relaxed),
        ),
        (
            "vllm:external_prefix_cache_hits_total",
            "Tokens whose KV came from a prefill node.",
            figures.external_hits.load(Relaxed),
        ),
        (
            "tandem_drafted_tokens_total",
            "Guesses at tokens that were verified beside the next one.",
            figures.drafted.load(Relaxed),
        ),
        ("tandem_accepted_tokens_total", "Guesses at tokens that came true.", figures.accepted.load(Relaxed)),
        (
            "vllm:spec_decode_num_draft_tokens_total",
            "Guesses at tokens that were verified.",
            figures.drafted.load(Relaxed),
        ),
        (
            "vllm:spec_decode_num_accepted_tokens_total",
            "Guesses at tokens that came true.",
            figures.accepted.load(Relaxed),
        ),
        ("vllm:nixl_num_failed_transfers_total", "KV hand-offs that did not come to their end here.", failed),
    ] {
        text.family(name, "counter", help);
        text.sample(&[], count as f64);
    }
    for (name, help, histogram) in [
        ("vllm:nixl_xfer_time_seconds", "Verified KV hand-offs: the whole copy.", &figures.transfer_seconds),
        ("vllm:nixl_bytes_transferred", "Verified KV hand-offs: bytes.", &figures.transfer_bytes),
        ("vllm:nixl_num_descriptors", "Verified KV hand-offs: ranges they came as.", &figures.transfer_descriptors),
        ("vllm:inter_token_latency_seconds", "Between two tokens of one answer.", &figures.inter_token_seconds),
    ] {
        text.histogram(name, help, histogram);
    }
}

/// Of whole answers, from this node's side: it knows neither the router's queue nor, of a pair, the time before the
/// first token.
fn vllm_answers(text: &mut Text, node: &Node) {
    let answers = &node.figures.answers;
    text.family("vllm:request_success_total", "counter", "Answers that ended well, by reason.");
    for (reason, count) in FINISH_REASONS.into_iter().zip(&answers.ended) {
        text.sample(&[("finished_reason", reason)], count.load(Relaxed) as f64);
    }
    for (name, help, histogram) in [
        ("vllm:request_prompt_tokens", "Prompt tokens of an answer.", &answers.prompt_tokens),
        ("vllm:request_generation_tokens", "Tokens of an answer, the first one included.", &answers.tokens),
        (
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            &answers.per_token_seconds,
        ),
        ("vllm:request_queue_time_seconds", "Waiting for KV blocks and for the batch.", &answers.queue_seconds),
        ("vllm:request_decode_time_seconds", "From the first token here to the end.", &answers.decode_seconds),
        ("vllm:e2e_request_latency_seconds", "From the call to the end of the answer.", &answers.e2e_seconds),
    ] {
        text.histogram(name, help, histogram);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_drains_lives_and_one_that_failed_does_not() {
        let ok = (StatusCode::OK, "ok\n".to_owned());
        assert_eq!(answer(None::<&str>, false), ok);
        assert_eq!(answer(None::<&str>, true), (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()));
        for is_draining in [false, true] {
            let failed = answer(Some("the engine hangs"), is_draining);
            assert_eq!(failed, (StatusCode::SERVICE_UNAVAILABLE, "the engine hangs\n".to_owned()));
        }
    }
}
