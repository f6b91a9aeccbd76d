//! What predictions learn from what then happened. Pure: measurements in, estimates out.
//!
//! - [`Links`]: how fast KV moves from one node to another by one way, from each verified hand-off; for pairs that had
//!   none, the mean of the pairs of the same domain. At most [`MAX_PAIRS`]; those not seen for longest go first.
//! - [`Factor`]: by how much a node's prompts take longer than its step model says: what the model does not see (calls,
//!   queues inside, a neighbour on the machine). Robust: one wild value moves it little, and it stays within bounds.
use std::collections::HashMap;
use std::time::Duration;

/// Pairs of nodes kept at most, each once for each way.
pub const MAX_PAIRS: usize = 4096;
/// Of a sum, what the next measurement leaves of it.
const KEEP: f64 = 0.8;
/// Half of what is known of a node's slowness is forgotten in this time.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// Bounds of a node's factor.
const FACTOR: std::ops::RangeInclusive<f64> = 0.25..=4.0;
/// The share of a new value in a factor that has settled.
const SETTLED: f64 = 0.1;
/// A single value moves the estimate as if it were at most so far from it (natural logarithm of the ratio).
const WILD: f64 = 0.5;

/// Bytes and the milliseconds in which they moved, older ones fading. A sum of each, and not a mean of ratios: large
/// transfers say more about the speed than small ones.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    bytes: f64,
    ms: f64,
}

impl Rate {
    fn observe(&mut self, bytes: f64, ms: f64) {
        self.bytes = self.bytes * KEEP + bytes;
        self.ms = self.ms * KEEP + ms;
    }

    fn bytes_per_ms(&self) -> Option<f64> {
        (self.ms > 0.0 && self.bytes > 0.0).then(|| self.bytes / self.ms)
    }
}

/// The pairs of a domain, see [`super::ways`].
#[derive(Clone, Copy, Debug, Default)]
struct Kind {
    rate: Rate,
    block_bytes: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    rate: Rate,
    /// [`Links::clock`] when it was seen last.
    seen: u64,
    handoffs: u64,
    bytes: u64,
}

/// What is known of one pair, for people.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Table keys of prefill and decode node.
    pub pair: (u64, u64),
    /// How fast bytes move, lately.
    pub bytes_per_ms: f64,
    /// Hand-offs so far.
    pub handoffs: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Links {
    /// By prefill node, decode node and domain.
    pairs: HashMap<(u64, u64, u32), Pair>,
    /// By domain.
    kinds: HashMap<u32, Kind>,
    clock: u64,
}

impl Links {
    /// A hand-off from `prefill` to `decode` (table keys) by the way of this `domain` moved `blocks` of `bytes` in all
    /// while `copying_ms` passed. What moved nothing says nothing.
    pub fn observe(&mut self, (prefill, decode): (u64, u64), domain: u32, bytes: u64, blocks: u32, copying_ms: f64) {
        if bytes == 0 || blocks == 0 || !copying_ms.is_finite() || copying_ms <= 0.0 {
            return;
        }
        self.clock += 1;
        let key = (prefill, decode, domain);
        if self.pairs.len() >= MAX_PAIRS && !self.pairs.contains_key(&key) {
            self.forget_older_half();
        }
        let seen = self.clock;
        let pair = self.pairs.entry(key).or_default();
        pair.rate.observe(bytes as f64, copying_ms);
        pair.seen = seen;
        pair.handoffs += 1;
        pair.bytes = pair.bytes.saturating_add(bytes);
        let kind = self.kinds.entry(domain).or_default();
        kind.rate.observe(bytes as f64, copying_ms);
        kind.block_bytes = bytes as f64 / f64::from(blocks);
    }

    /// Milliseconds in which so many blocks travel by the way of this domain. 0 before anything of it was measured:
    /// then nothing is known against any of its pairs.
    pub fn transfer_ms(&self, pair: (u64, u64), domain: u32, blocks: u32) -> f64 {
        let Some(kind) = self.kinds.get(&domain) else { return 0.0 };
        let own = self.pairs.get(&(pair.0, pair.1, domain)).and_then(|pair| pair.rate.bytes_per_ms());
        let speed = own.or_else(|| kind.rate.bytes_per_ms());
        speed.map_or(0.0, |bytes_per_ms| f64::from(blocks) * kind.block_bytes / bytes_per_ms)
    }

    /// All pairs, in no order: of one that took several ways the sum, with the speed of the last.
    pub fn all(&self) -> impl Iterator<Item = Link> {
        let mut links: HashMap<(u64, u64), (u64, Link)> = HashMap::new();
        for (&(prefill, decode, _), &Pair { rate, seen, handoffs, bytes }) in &self.pairs {
            let (pair, bytes_per_ms) = ((prefill, decode), rate.bytes_per_ms().unwrap_or(0.0));
            let none = (0, Link { pair, bytes_per_ms, handoffs: 0, bytes: 0 });
            let (last, link) = links.entry(pair).or_insert(none);
            link.handoffs += handoffs;
            link.bytes = link.bytes.saturating_add(bytes);
            if seen > *last {
                (*last, link.bytes_per_ms) = (seen, bytes_per_ms);
            }
        }
        links.into_values().map(|(_, link)| link)
    }

    /// A node is gone, and these domains with it.
    pub fn remove(&mut self, session: u64, domains: &[u32]) {
        self.pairs.retain(|(prefill, decode, _), _| *prefill != session && *decode != session);
        self.kinds.retain(|domain, _| !domains.contains(domain));
    }

    /// Pairs that are known.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Half of them at once: looking for the oldest one each time would cost as much as doing this.
    fn forget_older_half(&mut self) {
        let mut seen: Vec<u64> = self.pairs.values().map(|pair| pair.seen).collect();
        let middle = seen.len() / 2;
        let median = *seen.select_nth_unstable(middle).1;
        self.pairs.retain(|_, pair| pair.seen >= median);
    }
}

/// See the head of this file.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// Natural logarithm of the factor: twice as long and half as long are equally far off.
    log: f64,
    /// Of that, the factor: it is asked for with every request.
    value: f64,
    count: u32,
}

impl Default for Factor {
    fn default() -> Self {
        Self { log: 0.0, value: 1.0, count: 0 }
    }
}

impl Factor {
    /// What predictions are multiplied by.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Whether a prompt was observed.
    pub fn has_seen(&self) -> bool {
        self.count > 0
    }

    /// A prompt took `actual_ms` where the uncorrected prediction was `model_ms`.
    pub fn observe(&mut self, model_ms: f64, actual_ms: f64) {
        let ratio = actual_ms / model_ms;
        if !(ratio.is_finite() && ratio > 0.0) {
            return;
        }
        self.count = self.count.saturating_add(1);
        let off = (ratio.ln() - self.log).clamp(-WILD, WILD);
        let share = (1.0 / f64::from(self.count)).max(SETTLED);
        self.log = (self.log + share * off).clamp(FACTOR.start().ln(), FACTOR.end().ln());
        self.value = self.log.exp();
    }

    /// So much time has passed: what was seen is worth less. Else a node that was slow once, and is chosen no more for
    /// it, could never show that it has recovered.
    pub fn fade(&mut self, elapsed: Duration) {
        self.log *= 0.5_f64.powf(elapsed.as_secs_f64() / HALF_LIFE.as_secs_f64());
        self.value = self.log.exp();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_known_of_a_slow_node_fades() {
        let mut factor = Factor::default();
        (0..50).for_each(|_| factor.observe(100.0, 400.0));
        assert!(factor.value() > 3.5);
        factor.fade(HALF_LIFE);
        assert!((1.85..2.05).contains(&factor.value()), "{}", factor.value());
        (0..20).for_each(|_| factor.fade(HALF_LIFE / 2));
        assert!((factor.value() - 1.0).abs() < 0.01 && factor.has_seen());
    }

    #[test]
    fn a_pair_has_its_own_speed_and_strangers_the_mean() {
        let mut links = Links::default();
        assert_eq!(links.transfer_ms((1, 2), 0, 10), 0.0);
        for _ in 0..20 {
            links.observe((1, 2), 0, 1_000_000, 10, 10.0);
            links.observe((1, 3), 0, 1_000_000, 10, 30.0);
        }
        assert!((links.transfer_ms((1, 2), 0, 20) - 20.0).abs() < 1e-6);
        assert!((links.transfer_ms((1, 3), 0, 20) - 60.0).abs() < 1e-6);
        let stranger = links.transfer_ms((9, 9), 0, 20);
        assert!((35.0..50.0).contains(&stranger), "{stranger}");
        assert_eq!(links.transfer_ms((1, 2), 1, 20), 0.0, "another way");
        links.observe((1, 2), 1, 1_000_000, 10, 100.0);
        assert!((links.transfer_ms((1, 2), 0, 20) - 20.0).abs() < 1e-6, "each way has its own speed");
        let link = links.all().find(|link| link.pair == (1, 2)).expect("the pair");
        assert_eq!(
            (link.handoffs, link.bytes, link.bytes_per_ms),
            (21, 21_000_000, 1e4),
            "of both, as fast as the last"
        );
    }

    #[test]
    fn speeds_follow_a_change_and_small_transfers_say_little() {
        let mut links = Links::default();
        links.observe((1, 2), 0, 10_000_000, 100, 10.0);
        links.observe((1, 2), 0, 100_000, 1, 5.0);
        let before = links.transfer_ms((1, 2), 0, 100);
        assert!(before < 20.0, "{before}");
        for _ in 0..30 {
            links.observe((1, 2), 0, 10_000_000, 100, 100.0);
        }
        assert!((links.transfer_ms((1, 2), 0, 100) - 100.0).abs() < 2.0);
    }

    #[test]
    fn what_moved_nothing_says_nothing() {
        let mut links = Links::default();
        for (bytes, blocks, ms) in [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, f64::NAN), (1, 1, -1.0)] {
            links.observe((1, 2), 0, bytes, blocks, ms);
        }
        assert!(links.is_empty());
    }

    #[test]
    fn pairs_are_bounded_and_the_recent_ones_stay() {
        let mut links = Links::default();
        for i in 0..3 * MAX_PAIRS as u64 {
            links.observe((i, 0), 0, 1, 1, 1.0);
            links.observe((u64::MAX, 0), 0, 1_000, 1, 1.0);
            assert!(links.len() <= MAX_PAIRS);
        }
        assert!(links.pairs.contains_key(&(u64::MAX, 0, 0)), "seen all the time");
        links.remove(0, &[0]);
        assert!(links.is_empty() && links.kinds.is_empty());
    }

    #[test]
    fn a_factor_finds_the_ratio_whatever_single_values_say() {
        let mut factor = Factor::default();
        assert_eq!(factor.value(), 1.0);
        for i in 0..60 {
            let wild = if i % 10 == 9 { 50.0 } else { 1.0 };
            factor.observe(10.0, 14.0 * wild);
        }
        assert!((1.3..1.7).contains(&factor.value()), "{}", factor.value());
    }

    proptest! {
        #[test]
        fn a_factor_stays_within_its_bounds(values in prop::collection::vec((any::<f64>(), any::<f64>()), 0..100)) {
            let mut factor = Factor::default();
            for (model_ms, actual_ms) in values {
                factor.observe(model_ms, actual_ms);
                prop_assert!((0.249..=4.001).contains(&factor.value()));
            }
        }
    }
}
