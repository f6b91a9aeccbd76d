//! Whose payload lands next, when many senders have announced more than should land at once. Announced payloads wait at
//! their senders, and are posted within a budget of bytes: so many are under way at most, however many peers there are.
//! Peers take turns by bytes (deficit round robin, M. Shreedhar and G. Varghese, SIGCOMM 1995): none starves, whatever
//! the size of its frames. Within a peer the first is the first. Pure: knows no payload, no UCX and no clock.
use std::collections::{HashMap, VecDeque};

use super::ids::EndpointId;

/// What a peer may post in a turn: a frame of the usual size.
const QUANTUM_BYTES: usize = 1 << 20;

/// Payloads of all peers, as `T`.
pub(super) struct Turns<T> {
    budget_bytes: usize,
    /// In the order of their turns; none is without a payload.
    waiting: VecDeque<Peer<T>>,
    under_way: HashMap<EndpointId, usize>,
    under_way_bytes: usize,
}

struct Peer<T> {
    id: EndpointId,
    /// What it may still post in this turn.
    deficit_bytes: usize,
    payloads: VecDeque<(usize, T)>,
}

impl<T> Turns<T> {
    /// At most `budget_bytes` under way, or one payload that is larger.
    pub(super) fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, waiting: VecDeque::new(), under_way: HashMap::new(), under_way_bytes: 0 }
    }

    /// A peer announces a payload.
    pub(super) fn announce(&mut self, id: EndpointId, bytes: usize, payload: T) {
        match self.waiting.iter_mut().find(|peer| peer.id == id) {
            Some(peer) => peer.payloads.push_back((bytes, payload)),
            None => self.waiting.push_back(Peer { id, deficit_bytes: 0, payloads: [(bytes, payload)].into() }),
        }
    }

    /// The payload to post now, which counts as under way from here on; `None`: wait for one that ends.
    pub(super) fn next(&mut self) -> Option<(EndpointId, T)> {
        loop {
            let peer = self.waiting.front_mut()?;
            let bytes = peer.payloads.front()?.0;
            if self.under_way_bytes > 0 && self.under_way_bytes + bytes > self.budget_bytes {
                return None;
            }
            if peer.deficit_bytes < bytes {
                peer.deficit_bytes += QUANTUM_BYTES;
                self.waiting.rotate_left(1);
                continue;
            }
            peer.deficit_bytes -= bytes;
            let (id, payload) = (peer.id, peer.payloads.pop_front()?.1);
            if peer.payloads.is_empty() {
                self.waiting.pop_front();
            }
            *self.under_way.entry(id).or_default() += bytes;
            self.under_way_bytes += bytes;
            return Some((id, payload));
        }
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
        let at = self.waiting.iter().position(|peer| peer.id == id);
        let peer = at.and_then(|at| self.waiting.remove(at));
        peer.into_iter().flat_map(|peer| peer.payloads).map(|(_, payload)| payload).collect()
    }

    /// All peers are.
    pub(super) fn forget_all(&mut self) -> Vec<(EndpointId, T)> {
        let ids: Vec<EndpointId> = self.waiting.iter().map(|peer| peer.id).collect();
        let waiting = ids.into_iter().flat_map(|id| self.forget(id).into_iter().map(move |payload| (id, payload)));
        let waiting = waiting.collect();
        self.under_way.clear();
        self.under_way_bytes = 0;
        waiting
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PEERS: u64 = 16;
    const BUDGET: usize = 8 << 20;

    /// Lets every peer have announced more than `window` bytes of frames of its own size, and lands them in the order
    /// in which they were posted. Returns what each has landed of the first `window` bytes of all, and the most that
    /// were under way at once.
    fn land(sizes: &[usize], window: usize) -> (Vec<usize>, usize) {
        let mut turns = Turns::new(BUDGET);
        for (id, size) in (0..).zip(sizes) {
            (0..=window / size).for_each(|_| turns.announce(EndpointId(id), *size, *size));
        }
        let (mut landed, mut under_way, mut most) = (vec![0; sizes.len()], VecDeque::new(), 0);
        while landed.iter().sum::<usize>() < window {
            under_way.extend(std::iter::from_fn(|| turns.next()));
            most = most.max(under_way.iter().map(|(_, bytes)| *bytes).sum());
            let (id, bytes): (EndpointId, usize) = under_way.pop_front().expect("something is under way");
            landed[id.0 as usize] += bytes;
            turns.ended(id, bytes);
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
        let mut turns = Turns::new(10);
        turns.announce(EndpointId(1), 4 << 20, 'a');
        turns.announce(EndpointId(1), 1, 'b');
        assert_eq!(turns.next(), Some((EndpointId(1), 'a')));
        assert_eq!(turns.next(), None);
        turns.ended(EndpointId(1), 4 << 20);
        assert_eq!(turns.next(), Some((EndpointId(1), 'b')));
    }

    #[test]
    fn a_peer_that_is_gone_leaves_its_room_and_what_it_announced() {
        let mut turns = Turns::new(10);
        ['a', 'b', 'c'].into_iter().for_each(|payload| turns.announce(EndpointId(1), 8, payload));
        turns.announce(EndpointId(2), 8, 'd');
        assert_eq!(turns.next(), Some((EndpointId(1), 'a')));
        assert_eq!(turns.next(), None);
        assert_eq!(turns.forget(EndpointId(1)), vec!['b', 'c']);
        assert_eq!(turns.next(), Some((EndpointId(2), 'd')));
        turns.ended(EndpointId(1), 8);
        assert_eq!(turns.next(), None);
        turns.announce(EndpointId(3), 8, 'e');
        assert_eq!(turns.next(), None, "the end of a forgotten payload makes no room");
        assert_eq!(turns.forget_all(), vec![(EndpointId(3), 'e')]);
    }
}
