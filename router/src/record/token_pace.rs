//! How the tokens of an answer come to its client: each one while it runs, and what is kept of that when it ends. Pure.
use std::time::{Duration, Instant};

/// When each token was in the client's stream, in order.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(Vec<Instant>);

impl Arrivals {
    /// The next one was.
    pub fn push(&mut self, at: Instant) {
        self.0.push(at);
    }

    /// Tokens so far.
    pub fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Times between tokens; the first one is the hand-off's, if there was one.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.0.windows(2).map(|pair| pair[1] - pair[0])
    }

    /// All of it, in short, for a reader who wants a token each `objective`.
    pub fn pace(&self, objective: Duration) -> TokenPace {
        TokenPace { tokens: self.count(), itl: self.itl(objective) }
    }

    fn itl(&self, objective: Duration) -> Option<ItlSummary> {
        let first = self.gaps().next()?;
        let mut gaps: Vec<Duration> = self.gaps().collect();
        gaps.sort_unstable();
        let percentile = |percent: usize| gaps[(gaps.len() - 1) * percent / 100];
        let all: Duration = gaps.iter().sum();
        Some(ItlSummary {
            mean: all / u32::try_from(gaps.len()).unwrap_or(u32::MAX),
            first,
            p50: percentile(50),
            p99: percentile(99),
            longest: percentile(100),
            smoothness: self.smoothness(objective),
            stalls: u32::try_from(gaps.iter().filter(|gap| **gap > objective).count()).unwrap_or(u32::MAX),
        })
    }

    /// The share of tokens that come in time for a reader: no later than `objective` after the one before was shown
    /// (Andes' playback model, <https://arxiv.org/abs/2404.16283>).
    fn smoothness(&self, objective: Duration) -> f64 {
        let Some(mut shown) = self.0.first().copied() else { return 1.0 };
        let mut on_time = 1_usize;
        for &arrival in &self.0[1..] {
            let wanted = shown + objective;
            on_time += usize::from(arrival <= wanted);
            shown = arrival.max(wanted);
        }
        on_time as f64 / self.0.len() as f64
    }
}

/// How the tokens of an answer came.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenPace {
    /// How many.
    pub tokens: u32,
    /// `None` below two tokens.
    pub itl: Option<ItlSummary>,
}

/// The times between tokens.
#[derive(Clone, Copy, Debug)]
pub struct ItlSummary {
    /// Time per token after the first.
    pub mean: Duration,
    /// Between the first two tokens: the hand-off's.
    pub first: Duration,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// Longest.
    pub longest: Duration,
    /// The share of tokens that come in time for a reader at the objective.
    pub smoothness: f64,
    /// Times that are longer than the objective.
    pub stalls: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECTIVE: Duration = Duration::from_millis(100);

    fn at(millis: &[u64]) -> Arrivals {
        let start = Instant::now();
        Arrivals(millis.iter().map(|millis| start + Duration::from_millis(*millis)).collect())
    }

    #[test]
    fn smoothness_counts_what_comes_after_the_reader_wants_it() {
        assert!((at(&[0, 10, 20, 30]).smoothness(OBJECTIVE) - 1.0).abs() < 1e-9);
        // A burst buys time: the fourth token is wanted at 300 ms.
        assert!((at(&[0, 10, 20, 290]).smoothness(OBJECTIVE) - 1.0).abs() < 1e-9);
        // Wanted at 0, 100, 350, 450 ms: the second and the last one are late.
        assert!((at(&[0, 250, 260, 500]).smoothness(OBJECTIVE) - 0.5).abs() < 1e-9);
        // A slower reader misses nothing of it.
        assert!((at(&[0, 250, 260, 500]).smoothness(Duration::from_millis(250)) - 1.0).abs() < 1e-9);
        let stalls =
            |objective_ms| at(&[0, 250, 260, 500]).pace(Duration::from_millis(objective_ms)).itl.map(|itl| itl.stalls);
        assert_eq!([stalls(100), stalls(245), stalls(250)], [Some(2), Some(1), Some(0)]);
    }

    #[test]
    fn the_times_between_tokens_need_two_tokens() {
        let pace = at(&[]).pace(OBJECTIVE);
        assert!(pace.tokens == 0 && pace.itl.is_none());
        let pace = at(&[7]).pace(OBJECTIVE);
        assert!(pace.tokens == 1 && pace.itl.is_none());
        let TokenPace { tokens, itl: Some(itl) } = at(&[0, 50, 60, 90]).pace(OBJECTIVE) else { panic!("four tokens") };
        let all = [itl.mean, itl.first, itl.p50, itl.p99, itl.longest];
        assert_eq!((tokens, all.map(|gap| gap.as_millis())), (4, [30, 50, 30, 30, 50]));
    }
}
