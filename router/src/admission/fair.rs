//! Start-time fair queueing (Goyal, Vin and Cheng, 1996): who is next among flows that share one server, each with a
//! weight. Pure. A flow has the virtual time at which its next piece of work may start; serving it moves that on by
//! cost ÷ weight. The flow with the earliest start is next, and its start is the virtual time of all. So while two
//! flows both wait, what each has had per weight differs by no more than the largest piece of each, and what one of
//! them had saved up. A flow that was away, or found no room when it was its turn, pays for nobody and saves up no more
//! than a given credit: who asks now and then finds its few requests next, also where two come at a time.
//!
//! What a piece costs is known when it is done. It is served at an estimate, and what it took beyond that is charged
//! when it is known ([`Fair::charge`]), as in the virtual token counter (VTC; Sheng et al., OSDI '24). What it did not
//! take comes back ([`Fair::give_back`]). A flow that waits was wrongly passed by others: it may fall behind the
//! virtual time by what comes back, up to [`MOST_OWED`] tokens beside its credit. A flow that is away gets back no more
//! than it owes, so that being away never pays.
//!
//! What waits in a flow, and in which order, belongs to [`super::queue`].
use std::collections::BTreeMap;

/// Virtual time: tokens per unit of weight, in steps of 1/2^20.
type Virtual = u128;

const SCALE: Virtual = 1 << 20;
/// Tokens that a flow which waits may be behind the virtual time because it was charged too much.
pub const MOST_OWED: u64 = 16_384;

/// The flows that are known, by name.
#[derive(Clone, Debug)]
pub struct Fair<K> {
    now: Virtual,
    /// Tokens that a flow may save up, whatever its weight.
    credit: u64,
    flows: BTreeMap<K, Flow>,
    events: u64,
}

#[derive(Clone, Debug)]
struct Flow {
    weight: u32,
    /// When its next piece starts, in virtual time.
    start: Virtual,
    /// By how much it may be behind because it was charged too much.
    owed: Virtual,
    /// The event at which it began to wait: the order among equal starts.
    since: u64,
    waits: bool,
    /// The last event that touched it.
    used: u64,
}

impl<K> Default for Fair<K> {
    fn default() -> Self {
        Self::saving(0)
    }
}

impl<K> Fair<K> {
    /// No flows yet; one may save up `credit` tokens.
    pub fn saving(credit: u64) -> Self {
        Self { now: 0, credit, flows: BTreeMap::new(), events: 0 }
    }

    /// No flow of this weight starts earlier.
    fn earliest(&self, weight: u32) -> Virtual {
        self.now.saturating_sub(share(self.credit, weight))
    }
}

/// So many tokens in virtual time.
fn share(tokens: u64, weight: u32) -> Virtual {
    Virtual::from(tokens) * SCALE / Virtual::from(weight.max(1))
}

impl<K: Ord + Clone> Fair<K> {
    /// The flow has something to be served; a new one is taken in. `weight` counts from its next piece on.
    pub fn wants(&mut self, key: &K, weight: u32) {
        let (now, earliest, event) = (self.now, self.earliest(weight), self.event());
        let new = Flow { weight, start: now, owed: 0, since: event, waits: false, used: event };
        let flow = self.flows.entry(key.clone()).or_insert(new);
        (flow.weight, flow.used) = (weight.max(1), event);
        if !flow.waits {
            (flow.waits, flow.since, flow.start) = (true, event, flow.start.max(earliest));
            flow.owed = 0;
        }
    }

    /// The flow has nothing to be served any more.
    pub fn rests(&mut self, key: &K) {
        if let Some(flow) = self.flows.get_mut(key) {
            flow.waits = false;
        }
    }

    /// A piece of the flow is served.
    pub fn serve(&mut self, key: &K, cost: u64) {
        let event = self.event();
        let Some(weight) = self.flows.get(key).map(|flow| flow.weight) else { return };
        let earliest = self.earliest(weight);
        if let Some(flow) = self.flows.get_mut(key) {
            self.now = self.now.max(flow.start);
            // Who waited for room meanwhile has saved up no more than others.
            flow.start = flow.start.max(earliest.saturating_sub(flow.owed)) + share(cost.max(1), weight);
            flow.owed = flow.owed.min(self.now.saturating_sub(flow.start));
            (flow.since, flow.used) = (event, event);
        }
    }

    /// A piece of the flow that was served took so many tokens more.
    pub fn charge(&mut self, key: &K, tokens: u64) {
        if let Some(flow) = self.flows.get_mut(key) {
            flow.start += share(tokens, flow.weight);
        }
    }

    /// A piece of the flow that was served took so many tokens fewer.
    pub fn give_back(&mut self, key: &K, tokens: u64) {
        let Some(weight) = self.flows.get(key).map(|flow| flow.weight) else { return };
        let earliest = self.earliest(weight);
        if let Some(flow) = self.flows.get_mut(key) {
            let start = flow.start.saturating_sub(share(tokens, weight));
            if flow.waits {
                flow.owed = earliest.saturating_sub(start).max(flow.owed).min(share(MOST_OWED, weight));
            }
            flow.start = start.max(earliest.saturating_sub(flow.owed)).min(flow.start);
        }
    }

    /// The flows that wait, the next one first.
    pub fn order(&self) -> Vec<K> {
        let mut waiting: Vec<_> = self.flows.iter().filter(|(_, flow)| flow.waits).collect();
        waiting.sort_by_key(|(_, flow)| (flow.start, flow.since));
        waiting.into_iter().map(|(key, _)| key.clone()).collect()
    }

    /// How much of the work `waiting(other)` of the other waiting flows is served before a piece of `key`, which waits,
    /// that has `ahead` of its own flow before it.
    pub fn work_before(&self, key: &K, ahead: u64, waiting: impl Fn(&K) -> u64) -> u64 {
        let Some(flow) = self.flows.get(key) else { return 0 };
        let start = flow.start + share(ahead, flow.weight);
        let others = self.flows.iter().filter(|(other, flow)| *other != key && flow.waits);
        let before = |(other, flow): (&K, &Flow)| {
            let share = start.saturating_sub(flow.start) * Virtual::from(flow.weight) / SCALE;
            u64::try_from(share).unwrap_or(u64::MAX).min(waiting(other))
        };
        others.map(before).fold(0, u64::saturating_add)
    }

    /// Whether the flow is known.
    pub fn knows(&self, key: &K) -> bool {
        self.flows.contains_key(key)
    }

    /// Makes room for one more of `limit` flows: those that wait for nothing and owe nothing go, with what they have
    /// saved up, then the one that waits for nothing and was used least recently. Says who went; nobody when all wait.
    pub fn make_room(&mut self, limit: usize) -> Vec<K> {
        if self.flows.len() < limit {
            return Vec::new();
        }
        let idle = || self.flows.iter().filter(|(_, flow)| !flow.waits);
        let mut gone: Vec<K> = idle().filter(|(_, flow)| flow.start <= self.now).map(|(key, _)| key.clone()).collect();
        if gone.is_empty() {
            gone.extend(idle().min_by_key(|(_, flow)| flow.used).map(|(key, _)| key.clone()));
        }
        for key in &gone {
            self.flows.remove(key);
        }
        gone
    }

    /// Flows that are known.
    pub fn known(&self) -> usize {
        self.flows.len()
    }

    fn event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn serve_next(fair: &mut Fair<u8>, cost: u64) -> u8 {
        let next = fair.order()[0];
        fair.serve(&next, cost);
        next
    }

    #[test]
    fn equal_flows_take_turns_and_weights_count() {
        let mut fair = Fair::default();
        fair.wants(&1, 1);
        fair.wants(&2, 3);
        let served: Vec<u8> = (0..40).map(|_| serve_next(&mut fair, 10)).collect();
        assert_eq!(served.iter().filter(|key| **key == 2).count(), 30);
    }

    #[test]
    fn who_comes_new_has_saved_nothing_up_and_who_leaves_keeps_its_debt() {
        let mut fair = Fair::default();
        fair.wants(&1, 1);
        (0..100).for_each(|_| assert_eq!(serve_next(&mut fair, 10), 1));
        fair.wants(&2, 1);
        let served: Vec<u8> = (0..10).map(|_| serve_next(&mut fair, 10)).collect();
        assert_eq!(served.iter().filter(|key| **key == 2).count(), 5, "{served:?}");
        fair.serve(&2, 1000);
        fair.rests(&2);
        fair.wants(&2, 1);
        assert_eq!(fair.order(), [1, 2]);
    }

    #[test]
    fn who_was_away_goes_first_for_a_while() {
        let mut fair = Fair::saving(4096);
        (0..3).for_each(|key| fair.wants(&key, 1));
        fair.rests(&2);
        (0..200).for_each(|_| assert_ne!(serve_next(&mut fair, 100), 2));
        fair.wants(&2, 1);
        let served: Vec<u8> = (0..100).map(|_| serve_next(&mut fair, 100)).collect();
        let alone = served.iter().take_while(|key| **key == 2).count();
        assert!((41..=42).contains(&alone), "the credit and its own turn: {served:?}");
        let then = served[alone..].iter().filter(|key| **key == 2).count();
        assert!(then.abs_diff((100 - alone) / 3) <= 1, "{served:?}");
    }

    #[test]
    fn who_found_no_room_saves_up_no_more() {
        let mut fair = Fair::saving(4096);
        (1..3).for_each(|key| fair.wants(&key, 1));
        (0..100).for_each(|_| fair.serve(&2, 2000));
        let served: Vec<u8> = (0..100).map(|_| serve_next(&mut fair, 100)).collect();
        let first = served.iter().take_while(|key| **key == 1).count();
        assert!((40..=62).contains(&first), "the credit and what the last piece of the other one was: {first}");
        let mut none: Fair<u8> = Fair::default();
        (1..3).for_each(|key| none.wants(&key, 1));
        (0..100).for_each(|_| none.serve(&2, 2000));
        let served: Vec<u8> = (0..60).map(|_| serve_next(&mut none, 100)).collect();
        assert!(served.iter().take_while(|key| **key == 1).count() <= 21, "without credit a piece at most: {served:?}");
    }

    #[test]
    fn what_a_piece_took_beyond_its_estimate_is_charged_and_what_it_did_not_take_comes_back() {
        let mut fair = Fair::default();
        (1..3).for_each(|key| fair.wants(&key, 1));
        assert_eq!((serve_next(&mut fair, 100), serve_next(&mut fair, 100)), (1, 2));
        fair.charge(&1, 300);
        let served: Vec<u8> = (0..4).map(|_| serve_next(&mut fair, 100)).collect();
        assert_eq!(served, [2, 2, 2, 1], "both have had 400, and the first one of the equal ones is next");
        fair.serve(&1, 2000);
        (0..20).for_each(|_| assert_eq!(serve_next(&mut fair, 100), 2));
        fair.give_back(&1, 2000);
        let served: Vec<u8> = (0..21).map(|_| serve_next(&mut fair, 100)).collect();
        let first = served.iter().take_while(|key| **key == 1).count();
        assert!((19..=20).contains(&first), "all of it comes back: {served:?}");
    }

    #[test]
    fn being_away_never_pays() {
        for credit in [0, 4096] {
            let mut fair = Fair::saving(credit);
            (1..3).for_each(|key| fair.wants(&key, 1));
            // It was charged too much, and left before that came back.
            fair.serve(&1, 1_000_000);
            fair.rests(&1);
            fair.give_back(&1, 999_990);
            (0..10_000).for_each(|_| assert_eq!(serve_next(&mut fair, 100), 2));
            fair.give_back(&1, 10);
            fair.wants(&1, 1);
            let served: Vec<u8> = (0..300).map(|_| serve_next(&mut fair, 100)).collect();
            let first = served.iter().take_while(|key| **key == 1).count() as u64;
            assert!(first <= credit.div_ceil(100) + 1, "{first} with a credit of {credit}");
        }
    }

    #[test]
    fn what_is_owed_is_bounded() {
        let mut fair = Fair::default();
        (1..3).for_each(|key| fair.wants(&key, 1));
        fair.serve(&1, 1_000_000);
        (0..10_000).for_each(|_| assert_eq!(serve_next(&mut fair, 100), 2));
        fair.give_back(&1, 1_000_000);
        let served: Vec<u8> = (0..1000).map(|_| serve_next(&mut fair, 100)).collect();
        let first = served.iter().take_while(|key| **key == 1).count() as u64;
        assert!(first.abs_diff(MOST_OWED / 100) <= 2, "{first}");
        let then = served[first as usize..].iter().filter(|key| **key == 1).count();
        assert!(then.abs_diff((1000 - first as usize) / 2) <= 1, "and then its share: {then}");
    }

    #[test]
    fn only_the_ratio_of_weights_counts() {
        let order = |scale: u32| {
            let mut fair = Fair::saving(4096);
            (1..4).for_each(|key| fair.wants(&key, scale * u32::from(key)));
            fair.rests(&3);
            let mut served: Vec<u8> = (0..100).map(|_| serve_next(&mut fair, 100)).collect();
            fair.wants(&3, 3 * scale);
            served.extend((0..100).map(|_| serve_next(&mut fair, 100)));
            served
        };
        assert_eq!(order(1), order(64));
    }

    #[test]
    fn room_is_made_by_those_who_lose_nothing() {
        let mut fair = Fair::default();
        for key in 0..4 {
            fair.wants(&key, 1);
        }
        assert!(fair.make_room(4).is_empty(), "all wait");
        fair.serve(&0, 100);
        (0..2).for_each(|key| fair.rests(&key));
        assert_eq!(fair.make_room(4), [1], "0 is in debt");
        fair.wants(&5, 1);
        assert_eq!(fair.make_room(4), [0], "now it is the least recently used");
        assert_eq!(fair.known(), 3);
    }

    #[test]
    fn what_is_served_before_a_piece() {
        let mut fair = Fair::default();
        fair.wants(&1, 1);
        fair.wants(&2, 2);
        assert_eq!(fair.work_before(&1, 0, |_| 1000), 0);
        assert_eq!(fair.work_before(&1, 100, |_| 1000), 200);
        assert_eq!(fair.work_before(&1, 100, |_| 50), 50);
    }

    proptest! {
        /// The fairness bound of the head of this file, for all pairs of flows that wait all the time.
        #[test]
        fn backlogged_flows_have_their_share(
            weights in prop::collection::vec(1u32..20, 2..6),
            costs in prop::collection::vec(1u64..5000, 10..400),
        ) {
            let mut fair = Fair::default();
            (0..).zip(&weights).for_each(|(key, weight)| fair.wants(&key, *weight));
            let (mut had, mut largest) = (vec![0u64; weights.len()], vec![0u64; weights.len()]);
            for cost in costs {
                let key = usize::from(serve_next(&mut fair, cost));
                had[key] += cost;
                largest[key] = largest[key].max(cost);
                for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                    let per_weight = |key: usize, tokens: &[u64]| tokens[key] as f64 / f64::from(weights[key]);
                    let apart = (per_weight(a, &had) - per_weight(b, &had)).abs();
                    let bound = per_weight(a, &largest) + per_weight(b, &largest) + 1e-3;
                    prop_assert!(apart <= bound, "{apart} {bound} {had:?} {weights:?}");
                }
            }
        }

        /// The same where what a piece took is known later, and differs from its estimate: all that is known counts.
        #[test]
        fn shares_hold_by_what_was_taken_and_not_by_estimates(
            weights in prop::collection::vec(1u32..20, 2..6),
            pieces in prop::collection::vec((1u64..1000, 1u64..1000, 0usize..4), 10..400),
        ) {
            let mut fair = Fair::default();
            (0..).zip(&weights).for_each(|(key, weight)| fair.wants(&key, *weight));
            let mut had = vec![0u64; weights.len()];
            let mut under_way = std::collections::VecDeque::new();
            for (estimate, took, delay) in pieces {
                under_way.push_back((serve_next(&mut fair, estimate), estimate, took));
                while under_way.len() > delay {
                    let Some((key, estimate, took)) = under_way.pop_front() else { break };
                    had[usize::from(key)] += took;
                    match took.checked_sub(estimate) {
                        Some(more) => fair.charge(&key, more),
                        None => fair.give_back(&key, estimate - took),
                    }
                }
                // A piece of each, and of each that is under way what it takes and what its estimate misses.
                let per_weight = |key: usize| had[key] as f64 / f64::from(weights[key]);
                let bound = |key: usize| 9.0 * 1000.0 / f64::from(weights[key]);
                for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                    let apart = (per_weight(a) - per_weight(b)).abs();
                    prop_assert!(apart <= bound(a) + bound(b) + 1e-3, "{apart} {had:?} {weights:?}");
                }
            }
        }
    }
}
