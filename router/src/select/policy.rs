//! What "best" means: the joint choice in predicted milliseconds, and simpler policies to compare it with. Pure. A
//! baseline scores each node by itself, and a pair by the sum; the joint score is that of the pair, see
//! [`super::prune`]. The ranks that come before any score are the same for all of them.
use super::{NodeView, Role};

/// Tokens that count as one batch ahead on a prefill node, for [`Policy::LeastLoaded`].
const BATCH_TOKENS: f64 = 512.0;
/// For [`Policy::LeastLoaded`], when a decode node has no room now: the request would wait for another one to end.
const NO_ROOM: f64 = 1.0;

/// How a request's nodes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// The least predicted cost of all, in milliseconds
    #[default]
    Joint,
    /// Nodes of each role in turn
    RoundRobin,
    /// The least work on each of the two, whatever they have cached
    LeastLoaded,
    /// The most of the prompt cached on each of the two, whatever their load; in turn where nobody has any
    CacheOnly,
}

impl Policy {
    /// As on the command line and in traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joint => "joint",
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::CacheOnly => "cache-only",
        }
    }

    /// A baseline's score of one node, the smaller the better: it is the `place`th of `count` of its role, and `blocks`
    /// are what it would hold. `None` for the joint policy, which scores pairs.
    pub fn score(self, node: &NodeView, blocks: u32, (place, count): (usize, usize), turn: u64) -> Option<f64> {
        // `turn`, `turn + 1`, … of the role have 0, 1, …
        let in_turn = || {
            let count = (count as u64).max(1);
            ((place as u64 + count - turn % count) % count) as f64
        };
        match self {
            Self::Joint => None,
            Self::RoundRobin => Some(in_turn()),
            Self::LeastLoaded => Some(load(node, blocks)),
            Self::CacheOnly => Some(in_turn() / count.max(1) as f64 - f64::from(node.cached_blocks_of_prompt)),
        }
    }
}

/// Batches ahead.
fn load(node: &NodeView, blocks: u32) -> f64 {
    let requests = node.requests() / f64::from(node.max_running.max(1));
    match node.role {
        Role::Prefill => node.reported.tokens.saturating_add(node.routed.tokens) as f64 / BATCH_TOKENS + requests,
        Role::Decode if blocks > node.free_blocks.saturating_sub(node.routed.blocks) => requests + NO_ROOM,
        Role::Decode => requests,
    }
}

/// A number that looks random and depends on `turn` and `index` alone (SplitMix64's finalizer).
pub fn draw(turn: u64, index: u64) -> u64 {
    let mut z = turn.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(index.wrapping_mul(0xD1B5_4A32_D192_ED03));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Of `count` that are as good as equal, the one with less on it of two that are drawn: a hot prefix spreads over all
/// that are near the best, and no crowd runs to the one that was best a moment ago.
pub fn of_two(count: usize, turn: u64, requests: impl Fn(usize) -> f64) -> usize {
    let count = count as u64;
    if count < 2 {
        return 0;
    }
    let first = draw(turn, 1) % count;
    let second = (first + 1 + draw(turn, 2) % (count - 1)) % count;
    let [first, second] = [first as usize, second as usize];
    if requests(second) < requests(first) { second } else { first }
}

#[cfg(test)]
mod tests {
    use super::super::tests::node;
    use super::*;

    #[test]
    fn turns_go_round() {
        let nodes: Vec<_> = (0..3).map(|session| node(session, Role::Prefill)).collect();
        let chosen = |turn| {
            let score = |place: &usize| Policy::RoundRobin.score(&nodes[*place], 1, (*place, 3), turn).unwrap();
            (0..3).min_by(|a, b| score(a).total_cmp(&score(b))).unwrap()
        };
        assert_eq!([0, 1, 2, 3, 4].map(chosen), [0, 1, 2, 0, 1]);
    }

    #[test]
    fn cache_only_looks_at_nothing_else() {
        let (mut full, mut idle) = (node(1, Role::Prefill), node(2, Role::Prefill));
        (full.cached_blocks_of_prompt, full.reported.tokens) = (3, 1_000_000);
        idle.cached_blocks_of_prompt = 2;
        for turn in 0..4 {
            let score = |node, place| Policy::CacheOnly.score(node, 1, (place, 2), turn).unwrap();
            assert!(score(&full, 0) < score(&idle, 1));
        }
    }

    #[test]
    fn least_loaded_counts_work_and_room() {
        let (mut busy, idle) = (node(1, Role::Prefill), node(2, Role::Prefill));
        busy.routed.tokens = 100;
        let score = |node: &NodeView, blocks| Policy::LeastLoaded.score(node, blocks, (0, 1), 0).unwrap();
        assert!(score(&idle, 1) < score(&busy, 1));
        let mut full = node(3, Role::Decode);
        full.free_blocks = 4;
        assert!(score(&full, 4) < score(&full, 5));
    }

    #[test]
    fn two_draws_differ_and_all_are_drawn() {
        let mut drawn = std::collections::HashSet::new();
        for turn in 0..200 {
            let mut asked = std::cell::RefCell::new(Vec::new());
            drawn.insert(of_two(5, turn, |index| {
                asked.borrow_mut().push(index);
                0.0
            }));
            let asked = asked.get_mut();
            assert_ne!(asked[0], asked[1]);
        }
        assert_eq!(drawn.len(), 5);
        assert_eq!(of_two(1, 7, |_| 0.0), 0);
        assert_eq!(of_two(2, 7, |index| index as f64), 0);
    }
}
