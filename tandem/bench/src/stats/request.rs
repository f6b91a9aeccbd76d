//! What one request's client saw, in milliseconds (pure). The definitions, because tools differ:
//!
//! - **TTFT**: from the intended send time to the first chunk with tokens, so that a generator or a connection that is
//!   late counts.
//! - **End to end** (E2E): from the intended send time to the last chunk with tokens (without one: to the answer's
//!   end).
//! - **TPOT** = (E2E − TTFT) / (n − 1) for n output tokens; an answer in one chunk has none: its pace was not seen.
//! - **ITL**: the gaps between chunks, whatever their number of tokens.
//! - **Own lag**: from intended to sent: the load generator's own lateness, part of TTFT.
use crate::record::{Objectives, Outcome, Record};

/// One answered request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// None: no token came.
    pub ttft_ms: Option<f64>,
    /// None with fewer than two chunks.
    pub tpot_ms: Option<f64>,
    /// Intended to the last token.
    pub e2e_ms: f64,
    /// In order.
    pub gaps_ms: Vec<f64>,
    /// Of all chunks.
    pub output_tokens: u64,
    /// Those that came no later than a reader at the TPOT objective needed them.
    pub tokens_on_time: u64,
}

impl Seen {
    /// Times that go backwards count as standing still.
    pub fn of(record: &Record, objectives: Objectives) -> Self {
        let chunks: Vec<(f64, u32)> =
            record.chunks.iter().copied().filter(|(at, tokens)| *tokens > 0 && at.is_finite()).collect();
        let output_tokens: u64 = chunks.iter().map(|(_, tokens)| u64::from(*tokens)).sum();
        let since = |at: f64| ((at - record.intended) * 1e3).max(0.0);
        let (first, last) = (chunks.first().map(|chunk| chunk.0), chunks.last().map(|chunk| chunk.0));
        let ttft_ms = first.map(since);
        let e2e_ms = since(last.unwrap_or(record.ended));
        let paced = chunks.len() > 1 && output_tokens > 1;
        Self {
            ttft_ms,
            tpot_ms: ttft_ms.filter(|_| paced).map(|ttft| (e2e_ms - ttft).max(0.0) / (output_tokens - 1) as f64),
            e2e_ms,
            gaps_ms: chunks.windows(2).map(|pair| ((pair[1].0 - pair[0].0) * 1e3).max(0.0)).collect(),
            output_tokens,
            tokens_on_time: on_time(&chunks, objectives.tpot_ms / 1e3),
        }
    }

    /// Meets both objectives. An answer of one chunk has no TPOT that could break its objective.
    pub fn is_good(&self, objectives: Objectives) -> bool {
        self.ttft_ms.is_some_and(|ttft| ttft <= objectives.ttft_ms)
            && self.tpot_ms.is_none_or(|tpot| tpot <= objectives.tpot_ms)
    }
}

/// Milliseconds that the request was sent later than intended.
pub fn lag_ms(record: &Record) -> f64 {
    ((record.sent - record.intended) * 1e3).max(0.0)
}

/// Was answered to its end.
pub fn is_ok(record: &Record) -> bool {
    record.outcome == Outcome::Ok
}

/// The playback model of Andes (Liu et al., 2024), as the router has it: a reader takes one token every `pace_s`
/// seconds from the first token on; a token that is late moves all later ones back. All tokens of a chunk arrive
/// together.
fn on_time(chunks: &[(f64, u32)], pace_s: f64) -> u64 {
    let Some(&(first, _)) = chunks.first() else { return 0 };
    // When the next token is wanted.
    let (mut wanted, mut on_time) = (first, 0);
    for &(at, tokens) in chunks {
        on_time += if at <= wanted { u64::from(tokens) } else { u64::from(tokens).saturating_sub(1) };
        // The first token of a late chunk is shown when it comes; those behind it are wanted a pace apart from there.
        wanted = at.max(wanted) + pace_s * f64::from(tokens);
    }
    on_time
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    const GOALS: Objectives = Objectives { ttft_ms: 200.0, tpot_ms: 50.0 };

    #[test]
    fn by_hand() {
        // Intended at 1.0 s, sent 2 ms late; 5 tokens in 3 chunks.
        let mut record = fixture::record(1.0, &[(1.1, 1), (1.2, 3), (1.3, 1)]);
        record.sent = 1.002;
        let seen = Seen::of(&record, GOALS);
        assert!((seen.ttft_ms.unwrap() - 100.0).abs() < 1e-9);
        assert!((seen.e2e_ms - 300.0).abs() < 1e-9);
        assert!((seen.tpot_ms.unwrap() - 200.0 / 4.0).abs() < 1e-9);
        assert_eq!(seen.gaps_ms.len(), 2);
        assert!(seen.gaps_ms.iter().all(|gap| (gap - 100.0).abs() < 1e-9));
        assert_eq!(seen.output_tokens, 5);
        assert!((lag_ms(&record) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn what_has_no_pace_has_no_tpot() {
        let whole = Seen::of(&fixture::record(0.0, &[(0.1, 8)]), GOALS);
        assert_eq!((whole.tpot_ms, whole.output_tokens, whole.is_good(GOALS)), (None, 8, true));
        let empty = Seen::of(&fixture::record(0.0, &[]), GOALS);
        assert_eq!((empty.ttft_ms, empty.tpot_ms, empty.is_good(GOALS)), (None, None, false));
    }

    #[test]
    fn both_objectives_count() {
        let slow_start = Seen::of(&fixture::record(0.0, &[(0.201, 1), (0.21, 1)]), GOALS);
        let slow_pace = Seen::of(&fixture::record(0.0, &[(0.1, 1), (0.16, 1)]), GOALS);
        let wide = Objectives { ttft_ms: 200.1, tpot_ms: 50.1 };
        let good = Seen::of(&fixture::record(0.0, &[(0.2, 1), (0.25, 1)]), wide);
        assert!(!slow_start.is_good(GOALS) && !slow_pace.is_good(GOALS) && good.is_good(wide));
    }

    #[test]
    fn the_reader_of_the_router() {
        // The router's own three cases, at 100 ms a token.
        let at = |millis: &[u32]| -> Vec<(f64, u32)> { millis.iter().map(|ms| (f64::from(*ms) / 1e3, 1)).collect() };
        assert_eq!(on_time(&at(&[0, 10, 20, 30]), 0.1), 4);
        assert_eq!(on_time(&at(&[0, 10, 20, 290]), 0.1), 4);
        assert_eq!(on_time(&at(&[0, 250, 260, 500]), 0.1), 2);
        // Of a late chunk of four tokens only the first is late; the next is wanted at 350 + 4 × 100.
        assert_eq!(on_time(&[(0.0, 1), (0.35, 4), (0.7, 1)], 0.1), 5);
    }

    #[test]
    fn clocks_that_go_back_give_no_negative_times() {
        let mut record = fixture::record(5.0, &[(4.0, 1), (3.0, 2), (f64::NAN, 1)]);
        record.sent = 4.5;
        let seen = Seen::of(&record, GOALS);
        assert_eq!((seen.ttft_ms, seen.e2e_ms, seen.tpot_ms), (Some(0.0), 0.0, Some(0.0)));
        assert_eq!((seen.gaps_ms, lag_ms(&record)), (vec![0.0], 0.0));
    }
}
