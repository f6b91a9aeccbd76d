//! How many bytes land at once. Announced payloads wait at their senders, and are posted within a budget, in turn
//! (`turns.rs`): so many bytes are under way at most, however many peers there are. Pure, as the turns are.
use std::collections::HashMap;

use super::ids::EndpointId;
use super::turns::Turns;

/// Payloads of all peers, as `T`.
pub(super) struct Budget<T> {
    most_bytes: usize,
    turns: Turns<T>,
    under_way: HashMap<EndpointId, usize>,
    under_way_bytes: usize,
}

impl<T> Budget<T> {
    /// At most `most_bytes` under way, or one payload that is larger.
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, turns: Turns::default(), under_way: HashMap::new(), under_way_bytes: 0 }
    }

    /// A peer announces a payload.
    pub(super) fn announce(&mut self, id: EndpointId, bytes: usize, payload: T) {
        self.turns.announce(id, bytes, payload);
    }

    /// The payload to post now, which counts as under way from here on; `None`: wait for one that ends.
    pub(super) fn next(&mut self) -> Option<(EndpointId, T)> {
        let (under_way_bytes, most_bytes) = (self.under_way_bytes, self.most_bytes);
        let has_room = |bytes| under_way_bytes == 0 || under_way_bytes + bytes <= most_bytes;
        let (id, bytes, payload) = self.turns.next(has_room)?;
        *self.under_way.entry(id).or_default() += bytes;
        self.under_way_bytes += bytes;
        Some((id, payload))
    }

    /// Bytes of what was posted and is not here yet.
    pub(super) fn under_way_bytes(&self) -> usize {
        self.under_way_bytes
    }

    /// A payload of a peer is here, or will not come. One of a peer that was forgotten counts no more.
    pub(super) fn ended(&mut self, id: EndpointId, bytes: usize) {
        if let Some(of_peer) = self.under_way.get_mut(&id) {
            let bytes = bytes.min(*of_peer);
            *of_peer -= bytes;
            self.under_way_bytes -= bytes;
            if *of_peer == 0 {
                self.under_way.remove(&id);
            }
        }
    }

    /// A peer is gone. Returns what it had announced.
    pub(super) fn forget(&mut self, id: EndpointId) -> Vec<T> {
        self.under_way_bytes -= self.under_way.remove(&id).unwrap_or(0);
        self.turns.forget(id)
    }

    /// All peers are.
    pub(super) fn forget_all(&mut self) -> Vec<(EndpointId, T)> {
        self.under_way.clear();
        self.under_way_bytes = 0;
        self.turns.forget_all()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const PEERS: u64 = 16;
    const BUDGET: usize = 8 << 20;

    /// Lets every peer have announced more than `window` bytes of frames of its own size, and lands them in the order
    /// in which they were posted. Returns what each has landed of the first `window` bytes of all, and the most that
    /// were under way at once.
    fn land(sizes: &[usize], window: usize) -> (Vec<usize>, usize) {
        let mut budget = Budget::new(BUDGET);
        for (id, size) in (0..).zip(sizes) {
            (0..=window / size).for_each(|_| budget.announce(EndpointId(id), *size, *size));
        }
        let (mut landed, mut under_way, mut most) = (vec![0; sizes.len()], VecDeque::new(), 0);
        while landed.iter().sum::<usize>() < window {
            under_way.extend(std::iter::from_fn(|| budget.next()));
            most = most.max(under_way.iter().map(|(_, bytes)| *bytes).sum());
            let (id, bytes): (EndpointId, usize) = under_way.pop_front().expect("something is under way");
            landed[id.0 as usize] += bytes;
            budget.ended(id, bytes);
        }
        (landed, most)
    }

    proptest! {
        #[test]
        fn sixteen_senders_share_and_stay_within_the_budget(
            sizes in prop::collection::vec((64usize << 10)..(2 << 20), PEERS as usize),
        ) {
            let (landed, most) = land(&sizes, (16 * 16) << 20);
            prop_assert!(most <= BUDGET, "{most} bytes under way");
            let (max, min) = (landed.iter().max().copied(), landed.iter().min().copied());
            prop_assert!(max <= min.map(|min| 2 * min), "{landed:?}");
        }
    }

    #[test]
    fn a_payload_beyond_the_budget_goes_alone() {
        let mut budget = Budget::new(10);
        budget.announce(EndpointId(1), 4 << 20, 'a');
        budget.announce(EndpointId(1), 1, 'b');
        assert_eq!(budget.next(), Some((EndpointId(1), 'a')));
        assert_eq!(budget.next(), None);
        budget.ended(EndpointId(1), 4 << 20);
        assert_eq!(budget.next(), Some((EndpointId(1), 'b')));
    }

    #[test]
    fn a_peer_that_is_gone_leaves_its_room_and_what_it_announced() {
        let mut budget = Budget::new(10);
        ['a', 'b', 'c'].into_iter().for_each(|payload| budget.announce(EndpointId(1), 8, payload));
        budget.announce(EndpointId(2), 8, 'd');
        assert_eq!(budget.next(), Some((EndpointId(1), 'a')));
        assert_eq!(budget.next(), None);
        assert_eq!(budget.forget(EndpointId(1)), vec!['b', 'c']);
        assert_eq!(budget.next(), Some((EndpointId(2), 'd')));
        budget.ended(EndpointId(1), 8);
        assert_eq!(budget.next(), None);
        budget.announce(EndpointId(3), 8, 'e');
        assert_eq!(budget.next(), None, "the end of a forgotten payload makes no room");
        assert_eq!(budget.forget_all(), vec![(EndpointId(3), 'e')]);
    }
}
