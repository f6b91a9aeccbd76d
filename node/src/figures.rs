//! What a node counts for dashboards beside its calls and hand-offs: lookups in the prefix cache, KV that came from other
//! nodes, and times between tokens. Lock-free; read at the scrape ([`crate::admin`]), in vLLM's names.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Down to 0.5 ms.
const SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// 4 KiB to 4 GiB.
const BYTES: &[f64] = &[4096.0, 65536.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0, 268435456.0, 4294967296.0];
const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];

/// A distribution with fixed bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// Of each bound, then of what is beyond the last one.
    counts: Vec<AtomicU64>,
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Counts one value; negative ones count as 0.
    pub fn observe(&self, value: f64) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        self.counts[place].fetch_add(1, Relaxed);
        self.sum.fetch_add((value.max(0.0) * 1e6) as u64, Relaxed);
    }

    /// Upper bounds with how many values were not above them; the last bound is infinite and has all of them.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let mut seen = 0;
        let up_to = self.counts.iter().map(|count| {
            seen += count.load(Relaxed);
            seen
        });
        bounds.zip(up_to.collect::<Vec<_>>()).collect()
    }

    /// Of all values.
    pub fn sum(&self) -> f64 {
        self.sum.load(Relaxed) as f64 * 1e-6
    }
}

/// Figures since the node's start.
#[derive(Debug)]
pub struct Figures {
    /// Tokens of prompts that were looked up in this node's prefix cache.
    pub prefix_queries: AtomicU64,
    /// Those of them whose KV was there.
    pub prefix_hits: AtomicU64,
    /// Tokens of prompts whose KV was to come from another node.
    pub external_queries: AtomicU64,
    /// Those of them whose KV came and was verified.
    pub external_hits: AtomicU64,
    /// Computed prompts that gave their blocks up under pressure and were computed again.
    pub preemptions: AtomicU64,
    /// Seconds of verified copies, first byte posted to last byte landed.
    pub transfer_seconds: Histogram,
    /// Their bytes.
    pub transfer_bytes: Histogram,
    /// Their blocks.
    pub transfer_blocks: Histogram,
    /// Seconds between two tokens of one answer.
    pub inter_token_seconds: Histogram,
    /// Seconds from a sequence's arrival in the engine to its end.
    pub decode_seconds: Histogram,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            prefix_queries: AtomicU64::new(0),
            prefix_hits: AtomicU64::new(0),
            external_queries: AtomicU64::new(0),
            external_hits: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            transfer_seconds: Histogram::new(SECONDS),
            transfer_bytes: Histogram::new(BYTES),
            transfer_blocks: Histogram::new(COUNTS),
            inter_token_seconds: Histogram::new(SECONDS),
            decode_seconds: Histogram::new(SECONDS),
        }
    }
}

impl Figures {
    /// A prompt of `tokens` was looked up, and `cached` of them were there.
    pub fn looked_up(&self, tokens: usize, cached: usize) {
        self.prefix_queries.fetch_add(tokens as u64, Relaxed);
        self.prefix_hits.fetch_add(cached as u64, Relaxed);
    }

    /// The KV of `tokens` was asked of another node.
    pub fn awaited(&self, tokens: usize) {
        self.external_queries.fetch_add(tokens as u64, Relaxed);
    }

    /// It came: so many bytes and blocks in this time.
    pub fn received(&self, tokens: usize, bytes: u64, blocks: u32, copy: Duration) {
        self.external_hits.fetch_add(tokens as u64, Relaxed);
        self.transfer_seconds.observe(copy.as_secs_f64());
        self.transfer_bytes.observe(bytes as f64);
        self.transfer_blocks.observe(blocks.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_their_bounds_inclusive() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 9.0, -1.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.buckets(), [(1.0, 3), (2.0, 5), (f64::INFINITY, 6)]);
        assert!((histogram.sum() - 14.0).abs() < 1e-6);
    }
}
