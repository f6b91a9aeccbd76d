//! The families of a node's metrics: its own, and those with the names that public dashboards read, where the meaning
//! is the same (`vllm:`). Read at the scrape; nothing is kept.
use std::fmt::Result;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::metrics::counter::Counter;
use tandem_ports::Occupancy;

use super::scrape::Scrape;
use crate::figures::FINISH_REASONS;
use crate::node::Node;

pub(super) fn requests(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let (load, engine, total) = (node.load(), node.engine.load(), node.engine.pool().total());
    let (cost, lives) = (engine.step_cost, node.work.lives().counts());
    let blocks = ("tandem_kv_blocks", "KV blocks of the arena; cached ones are free and hold a reusable prefix.");
    let free = f64::from(load.free_blocks);
    scrape.gauges(
        blocks,
        "state",
        [("free", free), ("cached", engine.cached_blocks as f64), ("total", total as f64)],
    )?;
    let costs = [
        ("step", cost.base_ms),
        ("token", cost.token_ms),
        ("context", cost.context_ms),
        ("decode_token", cost.decode_token_ms),
        ("decode_context", cost.decode_context_ms),
    ];
    scrape.gauges(("tandem_step_cost_ms", "What a step's time is made of, as measured."), "of", costs)?;
    let steps = ("tandem_steps", "Engine steps, by whether other nodes lent their cores.");
    scrape.counters(steps, "cores", ["own", "borrowed"].into_iter().zip(engine.steps))?;
    let ahead = "Engine steps that began while one before was under way.";
    scrape.counter("tandem_steps_ahead", ahead, engine.steps_ahead)?;
    scrape.gauge("tandem_requests_running", "Requests in the running batch.", load.running.into())?;
    let waiting = "Requests that wait for blocks, a peer or the batch.";
    scrape.gauge("tandem_requests_waiting", waiting, load.waiting.into())?;
    scrape.gauge("tandem_queued_tokens", "Tokens accepted and not computed.", load.queued_tokens as f64)?;
    let strangers = "Calls refused for want of the cluster's join token or of a good certificate.";
    scrape.counter("tandem_strangers_refused", strangers, node.strangers.refused())?;
    let outcomes = ("tandem_requests", "Requests that ended, by outcome.");
    scrape.counters(outcomes, "outcome", node.work.outcomes())?;
    let sessions = "Routers that this node is in a session with.";
    scrape.gauge("tandem_router_sessions", sessions, lives.0 as f64)?;
    scrape.counter("tandem_router_sessions", "Sessions with routers that began.", lives.1)?;
    let dropped = "Spans that did not reach the collector.";
    scrape.counter("tandem_spans_dropped", dropped, node.spans.exporter.dropped())?;
    let lost = "Lines of the log that nobody read in time.";
    scrape.counter("tandem_log_lines_lost", lost, tandem_telemetry::lost_lines())
}

pub(super) fn ports(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let ports: Vec<(&str, Occupancy)> =
        node.ports.get().into_iter().flatten().map(|(name, places)| (*name, places.occupancy())).collect();
    let open = ("tandem_connections", "Open connections.");
    scrape.gauges(open, "port", ports.iter().map(|(port, now)| (*port, now.open as f64)))?;
    for (name, help, count) in [
        (
            "tandem_connections_evicted",
            "Idle and half-open connections that made room for others.",
            (|now| now.evicted) as fn(&Occupancy) -> u64,
        ),
        ("tandem_connections_refused", "Connections closed at once because all others were busy.", |now| now.refused),
        (
            "tandem_connections_failed",
            "Connections that the port ended because of what they sent, or did not send or read in time.",
            |now| now.failed,
        ),
    ] {
        scrape.counters((name, help), "port", ports.iter().map(|(port, now)| (*port, count(now))))?;
    }
    let ends = "Unix time at which a port's certificate ends, or one of the authorities' behind it.";
    let certificates = ports.iter().filter_map(|(port, now)| Some((*port, now.certificate_not_after? as f64)));
    scrape.gauges(("tandem_certificate_not_after_seconds", ends), "port", certificates)
}

pub(super) fn handoffs(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let counters = node.transport.counters();
    let infos = node.transport.infos();
    let offered = infos.iter().map(|info| [("backend", &*info.backend), ("name", &*info.name)]);
    scrape.info(("tandem_kv_transport_info", "The KV transports that this node offers."), offered)?;
    let states = [
        ("sent", &counters.sent_handoffs),
        ("verified", &counters.verified_handoffs),
        ("aborted", &counters.aborted_handoffs),
        ("released", &counters.released_handoffs),
        ("quarantined", &counters.quarantined_handoffs),
    ];
    scrape.counters(("tandem_handoffs", "KV hand-offs, by what became of them."), "state", read(states))?;
    let refusals = ("tandem_handoff_refusals", "KV hand-offs that this node refused, by reason.");
    scrape.counters(refusals, "reason", counters.refused())?;
    let moved = [("sent", &counters.sent_bytes), ("received", &counters.received_bytes)];
    scrape.counters(("tandem_kv_bytes", "KV bytes moved."), "direction", read(moved))?;
    let rejected = [("ticket", &counters.rejected_tickets), ("hello", &counters.rejected_hellos)];
    let help = "Tickets and hellos refused before anything that they say was used.";
    scrape.counters(("tandem_kv_rejected_addresses", help), "from", read(rejected))?;
    for (name, help, count) in [
        ("tandem_kv_copied_bytes", "KV bytes copied out of a sender's memory: one copy.", &counters.copied_bytes),
        (
            "tandem_kv_unmapped_peers",
            "KV senders whose memory could not be mapped: two copies.",
            &counters.unmapped_peers,
        ),
        ("tandem_kv_protocol_errors", "Garbage on the KV transport.", &counters.protocol_errors),
        ("tandem_kv_dropped_frames", "KV frames for which there was no room.", &counters.dropped_frames),
        ("tandem_kv_lost_peers", "KV peers lost.", &counters.lost_peers),
        ("tandem_kv_fenced_peers", "KV peers cut off because a write of theirs did not end.", &counters.fenced_peers),
    ] {
        scrape.counter(name, help, count.load(Relaxed))?;
    }
    let quarantined = "KV blocks of ended hand-offs that a writer may still touch.";
    scrape.gauge("tandem_kv_quarantined_blocks", quarantined, counters.quarantined_blocks.load(Relaxed) as f64)
}

fn read<'l, const N: usize>(counts: [(&'l str, &AtomicU64); N]) -> [(&'l str, u64); N] {
    counts.map(|(of, count)| (of, count.load(Relaxed)))
}

/// What only the sending side knows.
pub(super) fn sent(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let handoffs = &node.handoffs;
    for (name, help, [hidden, exposed]) in [
        (
            "tandem_kv_pushed_bytes",
            "KV bytes pushed, by whether the prompt was still computed.",
            [&handoffs.hidden_bytes, &handoffs.exposed_bytes],
        ),
        (
            "tandem_kv_pushed_blocks",
            "KV blocks pushed, by whether the prompt was still computed.",
            [&handoffs.hidden_blocks, &handoffs.exposed_blocks],
        ),
    ] {
        scrape.counters((name, help), "part", read([("hidden", hidden), ("exposed", exposed)]))?;
    }
    let times = read([("hidden", &handoffs.hidden_ns), ("exposed", &handoffs.exposed_ns)]);
    let help = "Time of delivered hand-offs, by whether the prompt was still computed.";
    let seconds = times.map(|(part, ns)| (part, ns as f64 * 1e-9));
    scrape.counters(("tandem_kv_transfer_seconds", help), "part", seconds)?;
    let speed = "Speed of the links to receivers; where computing was always the slow part, what they can do at least; 0 before a hand-off of 1 MiB.";
    let bytes_per_second = handoffs.link_bytes_per_second.load(Relaxed) as f64;
    scrape.gauge("tandem_kv_link_bytes_per_second", speed, bytes_per_second)?;
    let again = "Second and further tickets of one request.";
    scrape.counter("tandem_handoff_redeliveries", again, handoffs.redelivered.load(Relaxed))?;
    let late = "Requests for which no other ticket came in time.";
    scrape.counter("tandem_handoff_redeliver_timeouts", late, handoffs.not_redelivered.load(Relaxed))?;
    let undelivered = ("tandem_handoffs_undelivered", "KV hand-offs that failed on the receiver's side, by cause.");
    scrape.counters(undelivered, "cause", handoffs.undelivered())
}

/// What only the receiving side knows, and that of answers which vLLM has no name for.
pub(super) fn received(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let reused = "Blocks of prompts that did not travel: they were here.";
    scrape.counter("tandem_kv_blocks_reused", reused, node.handoffs.reused_blocks.load(Relaxed))?;
    let drafted = "Guesses at tokens that were verified beside the next one.";
    scrape.metric("tandem_drafted_tokens", drafted, &node.figures.drafted)?;
    scrape.metric("tandem_accepted_tokens", "Guesses at tokens that came true.", &node.figures.accepted)
}

pub(super) fn vllm(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let (load, pool, figures) = (node.engine.load(), node.engine.pool(), &node.figures);
    let total = pool.total();
    scrape.gauge("vllm:num_requests_running", "Requests in the running batch.", load.running as f64)?;
    // Who waits for the other node of its pair, or is done and waits for a ticket, is in no queue.
    let waiting = (load.waiting + pool.waiting()) as f64;
    scrape.gauge("vllm:num_requests_waiting", "Requests that wait for KV blocks or a place in the batch.", waiting)?;
    let used = 1.0 - load.free_blocks as f64 / total.max(1) as f64;
    scrape.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)?;
    let preempted = "Sequences and computed prompts that gave their blocks up to be computed again.";
    scrape.counter("vllm:num_preemptions", preempted, node.load().preemptions)?;
    let queries = "Tokens looked up in the prefix cache.";
    scrape.metric("vllm:prefix_cache_queries", queries, &figures.prefix_queries)?;
    scrape.metric("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", &figures.prefix_hits)?;
    // vLLM's names for blocks wherever they are.
    let (block_tokens, total) = (node.engine.spec().block_tokens.to_string(), total.to_string());
    let config = [("block_size", &*block_tokens), ("num_gpu_blocks", &*total)];
    scrape.info(("vllm:cache_config_info", "The KV cache."), [config])
}

/// Those that mean something where answers are generated and KV arrives.
pub(super) fn vllm_decode(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let (figures, (prompt, generated)) = (&node.figures, node.work.tokens());
    scrape.counter("vllm:prompt_tokens", "Tokens of prompts whose KV came here.", prompt)?;
    scrape.counter("vllm:generation_tokens", "Tokens of answers, the first ones included.", generated)?;
    for (name, help, count) in [
        (
            "vllm:external_prefix_cache_queries",
            "Tokens whose KV was to come from a prefill node.",
            &figures.external_queries,
        ),
        ("vllm:external_prefix_cache_hits", "Tokens whose KV came from a prefill node.", &figures.external_hits),
        ("vllm:spec_decode_num_draft_tokens", "Guesses at tokens that were verified.", &figures.drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Guesses at tokens that came true.", &figures.accepted),
    ] {
        scrape.metric(name, help, count)?;
    }
    let failed = node.transport.counters().aborted_handoffs.load(Relaxed);
    scrape.counter("vllm:nixl_num_failed_transfers", "KV hand-offs that did not come to their end here.", failed)?;
    for (name, help, histogram) in [
        ("vllm:nixl_xfer_time_seconds", "Verified KV hand-offs: the whole copy.", &figures.transfer_seconds),
        ("vllm:nixl_bytes_transferred", "Verified KV hand-offs: bytes.", &figures.transfer_bytes),
        ("vllm:nixl_num_descriptors", "Verified KV hand-offs: ranges they came as.", &figures.transfer_descriptors),
        ("vllm:inter_token_latency_seconds", "Between two tokens of one answer.", &figures.inter_token_seconds),
    ] {
        scrape.metric(name, help, histogram)?;
    }
    Ok(())
}

/// Of whole answers, from this node's side: it knows neither the router's queue nor, of a pair, the time before the
/// first token.
pub(super) fn vllm_answers(scrape: &mut Scrape<'_>, node: &Node) -> Result {
    let answers = &node.figures.answers;
    let ended = answers.ended.each_ref().map(Counter::get);
    let success = ("vllm:request_success", "Answers that ended well, by reason.");
    scrape.counters(success, "finished_reason", FINISH_REASONS.into_iter().zip(ended))?;
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
        scrape.metric(name, help, histogram)?;
    }
    Ok(())
}
