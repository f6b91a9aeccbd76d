//! What a node counts for dashboards beside its calls and hand-offs: lookups in the prefix cache, KV that came from
//! other nodes, times between tokens, and answers. Nobody waits to count; read at the scrape ([`crate::admin`]), in
//! vLLM's names.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tandem_engine::Drafts;
use tandem_proto::v1::FinishReason;

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
    /// Of each of them, where there is one.
    exemplars: Vec<Mutex<Option<Exemplar>>>,
    /// In millionths.
    sum: AtomicU64,
}

/// The request of one of a bucket's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exemplar {
    /// Of its trace.
    pub trace_id: [u8; 16],
    /// What was counted.
    pub value: f64,
}

/// What a histogram says of one bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// Inclusive; the last one is infinite.
    pub bound: f64,
    /// Values that were not above it.
    pub count: u64,
    /// One of those that were above the bound before.
    pub exemplar: Option<Exemplar>,
}

impl Histogram {
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        let exemplars = (0..=bounds.len()).map(|_| Mutex::default()).collect();
        Self { bounds, counts, exemplars, sum: AtomicU64::new(0) }
    }

    /// Counts one value of the request with this trace; negative ones count as 0. Its exemplar is the bucket's from now
    /// on, unless another thread has the bucket's in its hands.
    pub fn observe(&self, value: f64, trace_id: [u8; 16]) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        if let Ok(mut exemplar) = self.exemplars[place].try_lock() {
            *exemplar = Some(Exemplar { trace_id, value });
        }
        self.counts[place].fetch_add(1, Relaxed);
        self.sum.fetch_add((value.max(0.0) * 1e6) as u64, Relaxed);
    }

    /// In ascending order; the last one has all values.
    pub fn buckets(&self) -> Vec<Bucket> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let mut seen = 0;
        let bucket = |(bound, (count, exemplar)): (f64, (&AtomicU64, &Mutex<Option<Exemplar>>))| {
            seen += count.load(Relaxed);
            Bucket { bound, count: seen, exemplar: *exemplar.lock().unwrap_or_else(PoisonError::into_inner) }
        };
        bounds.zip(self.counts.iter().zip(&self.exemplars)).map(bucket).collect()
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
    /// Ranges that they came as.
    pub transfer_descriptors: Histogram,
    /// Seconds between two tokens of one answer.
    pub inter_token_seconds: Histogram,
    /// Guesses at tokens that the engine verified.
    pub drafted: AtomicU64,
    /// Those of them that came true.
    pub accepted: AtomicU64,
    /// Of a decode node.
    pub answers: Answers,
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
            transfer_descriptors: Histogram::new(COUNTS),
            inter_token_seconds: Histogram::new(SECONDS),
            drafted: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            answers: Answers::default(),
        }
    }
}

impl Figures {
    /// A prompt of `tokens` was looked up, and `cached` of them were there.
    pub fn looked_up(&self, tokens: usize, cached: usize) {
        self.prefix_queries.fetch_add(tokens as u64, Relaxed);
        self.prefix_hits.fetch_add(cached as u64, Relaxed);
    }

    /// A step verified guesses.
    pub fn drafted(&self, Drafts { drafted, accepted }: Drafts) {
        self.drafted.fetch_add(drafted.into(), Relaxed);
        self.accepted.fetch_add(accepted.into(), Relaxed);
    }

    /// The KV of `tokens` was asked of another node.
    pub fn awaited(&self, tokens: usize) {
        self.external_queries.fetch_add(tokens as u64, Relaxed);
    }

    /// It came.
    pub fn received(&self, copy: &Copied) {
        let Copied { tokens, bytes, descriptors, time, trace_id } = *copy;
        self.external_hits.fetch_add(tokens as u64, Relaxed);
        self.transfer_seconds.observe(time.as_secs_f64(), trace_id);
        self.transfer_bytes.observe(bytes as f64, trace_id);
        self.transfer_descriptors.observe(descriptors.into(), trace_id);
    }
}

/// Verified KV of another node.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// Whose KV it is.
    pub tokens: usize,
    /// Of all blocks.
    pub bytes: u64,
    /// Ranges that it came as.
    pub descriptors: u32,
    /// First byte posted to last byte landed.
    pub time: Duration,
    /// Of the request.
    pub trace_id: [u8; 16],
}

/// An answer that ended well, as the node that decoded it knows it.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Of the prompt as it came here: with what an earlier attempt generated.
    pub prompt_tokens: usize,
    /// Tokens of this attempt, the first one included wherever it was computed.
    pub tokens: u32,
    /// The call came.
    pub accepted: Instant,
    /// In between, waiting for blocks and for the batch.
    pub queued: Duration,
    /// The first token and the prompt's KV were here.
    pub first: Instant,
    /// The last token was.
    pub last: Instant,
    /// It was over.
    pub ended: Instant,
    /// Of the request.
    pub trace_id: [u8; 16],
}

/// Those that ended well since the node's start.
#[derive(Debug)]
pub struct Answers {
    /// By [`FINISH_REASONS`].
    pub ended: [AtomicU64; FINISH_REASONS.len()],
    /// Of each.
    pub prompt_tokens: Histogram,
    /// Of each.
    pub tokens: Histogram,
    /// Seconds that each waited in this node's queues.
    pub queue_seconds: Histogram,
    /// Seconds from the first token to the end.
    pub decode_seconds: Histogram,
    /// Seconds from the call to the end.
    pub e2e_seconds: Histogram,
    /// Mean seconds of a token after the first, of answers that have some.
    pub per_token_seconds: Histogram,
}

/// Labels of [`Answers::ended`].
pub const FINISH_REASONS: [&str; 2] = ["stop", "length"];

impl Default for Answers {
    fn default() -> Self {
        Self {
            ended: Default::default(),
            prompt_tokens: Histogram::new(COUNTS),
            tokens: Histogram::new(COUNTS),
            queue_seconds: Histogram::new(SECONDS),
            decode_seconds: Histogram::new(SECONDS),
            e2e_seconds: Histogram::new(SECONDS),
            per_token_seconds: Histogram::new(SECONDS),
        }
    }
}

impl Answers {
    /// One more.
    pub fn count(&self, answer: &Answer, reason: FinishReason) {
        self.ended[usize::from(reason == FinishReason::Length)].fetch_add(1, Relaxed);
        let note = |histogram: &Histogram, value: f64| histogram.observe(value, answer.trace_id);
        note(&self.prompt_tokens, answer.prompt_tokens as f64);
        note(&self.tokens, answer.tokens.into());
        let between = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        note(&self.queue_seconds, answer.queued.as_secs_f64());
        note(&self.decode_seconds, between(answer.first, answer.ended));
        note(&self.e2e_seconds, between(answer.accepted, answer.ended));
        if answer.tokens > 1 {
            note(&self.per_token_seconds, between(answer.first, answer.last) / f64::from(answer.tokens - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_counted_in_its_parts() {
        let (answers, accepted) = (Answers::default(), Instant::now());
        let at = |millis| accepted + Duration::from_millis(millis);
        let queued = Duration::from_millis(7);
        let (first, last, ended, trace_id) = (at(20), at(60), at(61), [7; 16]);
        let answer = Answer { prompt_tokens: 40, tokens: 5, accepted, queued, first, last, ended, trace_id };
        answers.count(&answer, FinishReason::Length);
        answers.count(&Answer { tokens: 1, last: at(20), ..answer }, FinishReason::Stop);
        let ended = answers.ended.each_ref().map(|count| count.load(Relaxed));
        assert_eq!(FINISH_REASONS.into_iter().zip(ended).collect::<Vec<_>>(), [("stop", 1), ("length", 1)]);
        let all = |histogram: &Histogram| (histogram.buckets().last().unwrap().count, histogram.sum());
        for (histogram, count, sum) in [
            (&answers.prompt_tokens, 2, 80.0),
            (&answers.tokens, 2, 6.0),
            (&answers.queue_seconds, 2, 0.014),
            (&answers.decode_seconds, 2, 0.082),
            (&answers.e2e_seconds, 2, 0.122),
            (&answers.per_token_seconds, 1, 0.010),
        ] {
            let (counted, summed) = all(histogram);
            assert!(counted == count && (summed - sum).abs() < 1e-4, "{counted} {summed}, not {count} {sum}");
        }
    }

    #[test]
    fn buckets_are_cumulative_and_their_bounds_inclusive() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for (id, value) in (0..).zip([0.5, 1.0, 1.5, 2.0, -1.0]) {
            histogram.observe(value, [id; 16]);
        }
        let of = |id, value| Some(Exemplar { trace_id: [id; 16], value });
        let buckets = |counts: [u64; 3], exemplars: [Option<Exemplar>; 3]| {
            let bounds = [1.0, 2.0, f64::INFINITY].into_iter().zip(counts).zip(exemplars);
            bounds.map(|((bound, count), exemplar)| Bucket { bound, count, exemplar }).collect::<Vec<_>>()
        };
        assert_eq!(histogram.buckets(), buckets([3, 5, 5], [of(4, -1.0), of(3, 2.0), None]), "the last of each bucket");
        histogram.observe(9.0, [5; 16]);
        assert_eq!(histogram.buckets(), buckets([3, 5, 6], [of(4, -1.0), of(3, 2.0), of(5, 9.0)]));
        assert!((histogram.sum() - 14.0).abs() < 1e-6);
    }
}
