//! vLLM's metrics of requests, as clients of this router see them. How many run and wait is told from the router's own
//! books alone: what nodes report is half a second old, and each request is with two of them.
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tandem_proto::v1;

use super::cache::Cache;
use super::exemplar::{Exemplar, SECONDS, Traced, observe_gaps, seconds};
use super::{Seen, whole};
use crate::membership::Totals;
use crate::record::timeline::Phase;
use crate::record::token_pace::Arrivals;
use crate::record::{Record, reason_text};

const TOKENS: [f64; 14] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

/// See the head of this file.
#[derive(Clone)]
pub(super) struct Vllm {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge<f64, AtomicU64>,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    success: Family<Finished, Counter>,
    ttft: Traced,
    itl: Traced,
    tpot: Traced,
    e2e: Traced,
    queue: Traced,
    prefill: Traced,
    decode: Traced,
    inference: Traced,
    request_prompt_tokens: Traced,
    request_generation_tokens: Traced,
    pub cache: Cache,
}

impl Vllm {
    pub fn register(registry: &mut Registry) -> Self {
        let seconds = || Traced::new(SECONDS.into_iter());
        let vllm = Self {
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            success: Family::default(),
            ttft: seconds(),
            itl: seconds(),
            tpot: seconds(),
            e2e: seconds(),
            queue: seconds(),
            prefill: seconds(),
            decode: seconds(),
            inference: seconds(),
            request_prompt_tokens: Traced::new(TOKENS.into_iter()),
            request_generation_tokens: Traced::new(TOKENS.into_iter()),
            cache: Cache::register(registry),
        };
        let running = "Admitted requests that a node's batch has a place for";
        let waiting = "Requests that wait for admission, for a node or for a place in its batch";
        registry.register("vllm:num_requests_running", running, vllm.running.clone());
        registry.register("vllm:num_requests_waiting", waiting, vllm.waiting.clone());
        registry.register("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", vllm.kv_usage.clone());
        registry.register("vllm:prompt_tokens", "Prompt tokens processed", vllm.prompt_tokens.clone());
        registry.register("vllm:generation_tokens", "Tokens generated", vllm.generation_tokens.clone());
        registry.register("vllm:request_success", "Requests answered", vllm.success.clone());
        let histograms = [
            ("time_to_first_token_seconds", "Time to first token", &vllm.ttft),
            ("e2e_request_latency_seconds", "Whole request", &vllm.e2e),
            ("inter_token_latency_seconds", "Between two tokens", &vllm.itl),
            ("request_time_per_output_token_seconds", "Mean time per token after the first", &vllm.tpot),
            ("request_queue_time_seconds", "Waiting", &vllm.queue),
            ("request_prefill_time_seconds", "Prefill", &vllm.prefill),
            ("request_decode_time_seconds", "Decode", &vllm.decode),
            ("request_inference_time_seconds", "Prefill and decode", &vllm.inference),
            ("request_prompt_tokens", "Prompt tokens of a request", &vllm.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request", &vllm.request_generation_tokens),
        ];
        for (name, help, histogram) in histograms {
            registry.register(format!("vllm:{name}"), help, histogram.clone());
        }
        for reason in [v1::FinishReason::Stop, v1::FinishReason::Length] {
            let _ = vllm.success.get_or_create(&Finished { finished_reason: reason_text(reason) });
        }
        vllm
    }

    /// A request that ended, for this reason if it was answered.
    pub fn observe(&self, record: &Record, arrivals: &Arrivals, reason: Option<v1::FinishReason>) {
        let Some(ttft) = record.ttft() else { return };
        let trace = Exemplar::of(record.identities.root);
        let note = |histogram: &Traced, value: f64| histogram.observe(value, Some(trace), None);
        self.prompt_tokens.inc_by(record.prompt_tokens.into());
        self.generation_tokens.inc_by(record.pace.tokens.into());
        note(&self.ttft, seconds(ttft));
        observe_gaps(&self.itl, arrivals, trace);
        let Some(reason) = reason else { return };
        self.success.get_or_create(&Finished { finished_reason: reason_text(reason) }).inc();
        let length = |phase| seconds(record.timeline.length(phase));
        let (prefill, decode) = (length(Phase::Prefill), length(Phase::Decode));
        note(&self.queue, length(Phase::Queue));
        note(&self.prefill, prefill);
        note(&self.decode, decode);
        note(&self.inference, prefill + length(Phase::Transfer) + decode);
        note(&self.e2e, seconds(record.e2e()));
        if let Some(tpot) = record.tpot() {
            note(&self.tpot, seconds(tpot));
        }
        note(&self.request_prompt_tokens, record.prompt_tokens.into());
        note(&self.request_generation_tokens, record.pace.tokens.into());
    }

    /// What is looked at when somebody scrapes; `seeking` of the admitted requests look for a node.
    pub fn set(&self, Seen { nodes, inflight, queued, .. }: &Seen, seeking: usize) {
        let (running, waiting) = states(nodes, (*inflight, *queued), seeking);
        self.running.set(whole(running));
        self.waiting.set(whole(waiting));
        let used = nodes.total_blocks.saturating_sub(nodes.free_blocks);
        self.kv_usage.set(used as f64 / nodes.total_blocks.max(1) as f64);
        self.cache.set(nodes);
    }
}

/// How many requests run and how many wait: together all that are in the router.
fn states(nodes: &Totals, (inflight, queued): (usize, usize), seeking: usize) -> (usize, usize) {
    let on_nodes = usize::try_from(nodes.waiting()).unwrap_or(usize::MAX);
    // The counts are of three moments.
    let idle = on_nodes.saturating_add(seeking).min(inflight);
    (inflight - idle, queued + idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_runs_or_waits_once() {
        let busy = Totals { with_prefill: 50, ..Totals::default() };
        assert_eq!(states(&busy, (50, 0), 0), (50, 0), "prompts in progress do not wait");
        let full = Totals { with_prefill: 50, beyond_prefill: 10, beyond_decode: 40, ..Totals::default() };
        assert_eq!(states(&full, (90, 3), 0), (80, 13), "nobody waits for decode before the first token");
        let local = Totals { beyond_decode: 4, ..Totals::default() };
        assert_eq!(states(&local, (12, 0), 1), (7, 5));
        assert_eq!(states(&local, (2, 0), 1), (0, 2), "all of them, though the node was looked at later");
    }
}
