//! vLLM's metrics of KV: its cache and what other nodes sent of it, over all decode nodes. One token of a prompt counts
//! once in each of its lookups: in the cache of the node that computes the prompt, and, where its KV had to come from
//! there, as asked of another node: at decode's reservation, so that what never came is a query without a hit.
use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tandem_proto::v1;

use super::exemplar::{Exemplar, SECONDS, Traced};
use crate::membership::Totals;

/// 4 KiB to 4 GiB.
const BYTES: [f64; 8] = [4096.0, 65536.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0, 268435456.0, 4294967296.0];
const COUNTS: [f64; 12] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];

const PREEMPTIONS: &str =
    "Sequences and computed prompts that gave their blocks up on a node, to be computed again, since it joined";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Config {
    block_size: u32,
    num_gpu_blocks: u64,
}

#[derive(Clone)]
pub(super) struct Cache {
    config: Family<Config, Gauge>,
    preemptions: Counter,
    queries: Counter,
    hits: Counter,
    external_queries: Counter,
    external_hits: Counter,
    transfer_seconds: Traced,
    transfer_bytes: Traced,
    transfer_descriptors: Traced,
    failed_transfers: Counter,
}

impl Cache {
    pub fn register(registry: &mut Registry) -> Self {
        let cache = Self {
            config: Family::default(),
            preemptions: Counter::default(),
            queries: Counter::default(),
            hits: Counter::default(),
            external_queries: Counter::default(),
            external_hits: Counter::default(),
            transfer_seconds: Traced::new(SECONDS.into_iter()),
            transfer_bytes: Traced::new(BYTES.into_iter()),
            transfer_descriptors: Traced::new(COUNTS.into_iter()),
            failed_transfers: Counter::default(),
        };
        registry.register("vllm:cache_config_info", "KV blocks of all decode nodes", cache.config.clone());
        for (name, help, counter) in [
            ("num_preemptions", PREEMPTIONS, &cache.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up where prompts are computed", &cache.queries),
            ("prefix_cache_hits", "Prompt tokens found there", &cache.hits),
            ("external_prefix_cache_queries", "Tokens whose KV was to come from another node", &cache.external_queries),
            ("external_prefix_cache_hits", "Tokens whose KV came from another node", &cache.external_hits),
            (
                "nixl_num_failed_transfers",
                "KV hand-offs that did not come to their end or were refused",
                &cache.failed_transfers,
            ),
        ] {
            registry.register(format!("vllm:{name}"), help, counter.clone());
        }
        for (name, help, histogram) in [
            ("nixl_xfer_time_seconds", "Verified KV hand-offs: the whole copy", &cache.transfer_seconds),
            ("nixl_bytes_transferred", "Verified KV hand-offs: bytes", &cache.transfer_bytes),
            ("nixl_num_descriptors", "Verified KV hand-offs: ranges they came as", &cache.transfer_descriptors),
        ] {
            registry.register(format!("vllm:{name}"), help, histogram.clone());
        }
        cache
    }

    pub fn looked_up(&self, prompt_tokens: u32, cached_tokens: u32) {
        self.queries.inc_by(prompt_tokens.into());
        self.hits.inc_by(cached_tokens.into());
    }

    /// Decode has reserved: the KV of so many tokens is to come.
    pub fn awaited(&self, tokens: u64) {
        self.external_queries.inc_by(tokens);
    }

    /// It came.
    pub fn handed_off(&self, kv: &v1::Verified, tokens: u64, trace: Exemplar) {
        self.external_hits.inc_by(tokens);
        let note = |histogram: &Traced, value: f64| histogram.observe(value, Some(trace), None);
        note(&self.transfer_seconds, kv.transfer_ms / 1e3);
        note(&self.transfer_bytes, kv.bytes as f64);
        note(&self.transfer_descriptors, kv.descriptors.into());
    }

    /// It did not, or was refused.
    pub fn handoff_failed(&self) {
        self.failed_transfers.inc();
    }

    pub fn set(&self, nodes: &Totals) {
        self.preemptions.inner().store(nodes.preemptions, Ordering::Relaxed);
        // One series: what was is replaced.
        self.config.clear();
        let config = Config { block_size: nodes.block_tokens, num_gpu_blocks: nodes.total_blocks };
        self.config.get_or_create(&config).inner().store(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;
    use tandem_telemetry::exposition::TraceId;

    #[test]
    fn hand_offs_move_the_numbers() {
        let mut registry = Registry::default();
        let cache = Cache::register(&mut registry);
        cache.set(&Totals { block_tokens: 16, total_blocks: 100, ..Totals::default() });
        cache.set(&Totals { block_tokens: 16, total_blocks: 200, preemptions: 3, ..Totals::default() });
        cache.looked_up(40, 32);
        let kv = v1::Verified { blocks: 9, descriptors: 4, bytes: 5000, transfer_ms: 2.0, ..v1::Verified::default() };
        cache.awaited(40);
        cache.awaited(8);
        cache.handed_off(&kv, 8, Exemplar { trace_id: TraceId([0xab; 16]) });
        // The block size of whoever is there at the scrape changes nothing.
        cache.set(&Totals { block_tokens: 64, total_blocks: 0, ..Totals::default() });
        cache.set(&Totals { block_tokens: 16, total_blocks: 200, preemptions: 5, ..Totals::default() });
        cache.handoff_failed();
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"200\"} 1",
            "vllm:prefix_cache_queries_total 40",
            "vllm:prefix_cache_hits_total 32",
            "vllm:external_prefix_cache_queries_total 48",
            "vllm:external_prefix_cache_hits_total 8",
            "vllm:nixl_xfer_time_seconds_bucket{le=\"0.0025\"} 1 # {trace_id=\"abababababababababababababababab\"} 0.002",
            "vllm:nixl_bytes_transferred_sum 5000.0",
            "vllm:nixl_num_descriptors_sum 4.0",
            "vllm:nixl_num_failed_transfers_total 1",
            "vllm:num_preemptions_total 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("num_gpu_blocks=\"100\""));
    }
}
