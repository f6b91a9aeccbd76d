//! What a node counts for dashboards beside its calls and hand-offs: lookups in the prefix cache, KV that came from
//! other nodes, times between tokens, and answers. To count costs an atomic, in a histogram a lock that nobody holds
//! for long; read at the scrape ([`crate::admin`]), in vLLM's names.
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use tandem_engine::Drafts;
use tandem_proto::v1::FinishReason;
use tandem_telemetry::exposition::{Exemplar, SECONDS, TraceId, Traced};

/// 4 KiB to 4 GiB.
const BYTES: &[f64] = &[4096.0, 65536.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0, 268435456.0, 4294967296.0];
const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];

/// A distribution with these bounds.
fn histogram(bounds: &[f64]) -> Traced {
    Traced::new(bounds.iter().copied())
}

fn exemplar(trace_id: [u8; 16]) -> Option<Exemplar> {
    Some(Exemplar { trace_id: TraceId(trace_id) })
}

/// Figures since the node's start.
#[derive(Debug)]
pub struct Figures {
    /// Tokens of prompts that were looked up in this node's prefix cache.
    pub prefix_queries: Counter,
    /// Those of them whose KV was there.
    pub prefix_hits: Counter,
    /// Tokens of prompts whose KV was to come from another node.
    pub external_queries: Counter,
    /// Those of them whose KV came and was verified.
    pub external_hits: Counter,
    /// Computed prompts that gave their blocks up under pressure and were computed again.
    pub preemptions: Counter,
    /// Seconds of verified copies, first byte posted to last byte landed.
    pub transfer_seconds: Traced,
    /// Their bytes.
    pub transfer_bytes: Traced,
    /// Ranges that they came as.
    pub transfer_descriptors: Traced,
    /// Seconds between two tokens of one answer.
    pub inter_token_seconds: Traced,
    /// Guesses at tokens that the engine verified.
    pub drafted: Counter,
    /// Those of them that came true.
    pub accepted: Counter,
    /// Of a decode node.
    pub answers: Answers,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            external_queries: Counter::default(),
            external_hits: Counter::default(),
            preemptions: Counter::default(),
            transfer_seconds: histogram(&SECONDS),
            transfer_bytes: histogram(BYTES),
            transfer_descriptors: histogram(COUNTS),
            inter_token_seconds: histogram(&SECONDS),
            drafted: Counter::default(),
            accepted: Counter::default(),
            answers: Answers::default(),
        }
    }
}

impl Figures {
    /// A prompt of `tokens` was looked up, and `cached` of them were there.
    pub fn looked_up(&self, tokens: usize, cached: usize) {
        self.prefix_queries.inc_by(tokens as u64);
        self.prefix_hits.inc_by(cached as u64);
    }

    /// A step verified guesses.
    pub fn drafted(&self, Drafts { drafted, accepted }: Drafts) {
        self.drafted.inc_by(drafted.into());
        self.accepted.inc_by(accepted.into());
    }

    /// So long after the one before, an answer of this trace had its next token.
    pub fn next_token(&self, gap: Duration, trace_id: [u8; 16]) {
        self.inter_token_seconds.observe(gap.as_secs_f64(), exemplar(trace_id), None);
    }

    /// The KV of `tokens` was asked of another node.
    pub fn awaited(&self, tokens: usize) {
        self.external_queries.inc_by(tokens as u64);
    }

    /// It came.
    pub fn received(&self, copy: &Copied) {
        let Copied { tokens, bytes, descriptors, time, trace_id } = *copy;
        self.external_hits.inc_by(tokens as u64);
        self.transfer_seconds.observe(time.as_secs_f64(), exemplar(trace_id), None);
        self.transfer_bytes.observe(bytes as f64, exemplar(trace_id), None);
        self.transfer_descriptors.observe(descriptors.into(), exemplar(trace_id), None);
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
    pub ended: [Counter; FINISH_REASONS.len()],
    /// Of each.
    pub prompt_tokens: Traced,
    /// Of each.
    pub tokens: Traced,
    /// Seconds that each waited in this node's queues.
    pub queue_seconds: Traced,
    /// Seconds from the first token to the end.
    pub decode_seconds: Traced,
    /// Seconds from the call to the end.
    pub e2e_seconds: Traced,
    /// Mean seconds of a token after the first, of answers that have some.
    pub per_token_seconds: Traced,
}

/// Labels of [`Answers::ended`].
pub const FINISH_REASONS: [&str; 2] = ["stop", "length"];

impl Default for Answers {
    fn default() -> Self {
        Self {
            ended: Default::default(),
            prompt_tokens: histogram(COUNTS),
            tokens: histogram(COUNTS),
            queue_seconds: histogram(&SECONDS),
            decode_seconds: histogram(&SECONDS),
            e2e_seconds: histogram(&SECONDS),
            per_token_seconds: histogram(&SECONDS),
        }
    }
}

impl Answers {
    /// One more.
    pub fn count(&self, answer: &Answer, reason: FinishReason) {
        self.ended[usize::from(reason == FinishReason::Length)].inc_by(1);
        let trace = exemplar(answer.trace_id);
        let note = |histogram: &Traced, value: f64| histogram.observe(value, trace, None);
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
    use prometheus_client::registry::Registry;
    use tandem_telemetry::exposition::exposition;

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
        let ended = answers.ended.each_ref().map(Counter::get);
        assert_eq!(FINISH_REASONS.into_iter().zip(ended).collect::<Vec<_>>(), [("stop", 1), ("length", 1)]);
        for (histogram, count, sum) in [
            (&answers.prompt_tokens, 2, 80.0),
            (&answers.tokens, 2, 6.0),
            (&answers.queue_seconds, 2, 0.014),
            (&answers.decode_seconds, 2, 0.082),
            (&answers.e2e_seconds, 2, 0.122),
            (&answers.per_token_seconds, 1, 0.010),
        ] {
            let mut registry = Registry::default();
            registry.register("x", "X", histogram.clone());
            let text = exposition(&registry, None).1;
            let value = |of: &str| text.lines().find_map(|line| line.strip_prefix(of)?.parse::<f64>().ok()).unwrap();
            assert!((value("x_sum ") - sum).abs() < 1e-4, "{sum}: {text}");
            assert_eq!(value("x_count "), f64::from(count), "{text}");
        }
    }
}
