//! Whose turn it is, where many peers wait for one thing: the place where payloads land (`budget.rs`), the thread that
//! copies (`one_copy/copier.rs`). Peers take turns by bytes (deficit round robin, M. Shreedhar and G. Varghese, SIGCOMM
//! 1995): none starves, whatever the size of its payloads and however many it has announced. Within a peer the first is
//! the first. Pure: knows no payload, no UCX and no clock.
use std::collections::VecDeque;

use super::ids::EndpointId;

/// What a peer may have in a turn: a frame of the usual size.
const QUANTUM_BYTES: usize = 1 << 20;

/// What all peers wait for, as `T`.
pub(super) struct Turns<T> {
    /// In the order of their turns; none is without a payload.
    peers: VecDeque<Peer<T>>,
    /// Of all peers.
    payloads: usize,
}

struct Peer<T> {
    id: EndpointId,
    /// What it may still have in this turn.
    deficit_bytes: usize,
    payloads: VecDeque<(usize, T)>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { peers: VecDeque::new(), payloads: 0 }
    }
}

impl<T> Turns<T> {
    /// A peer announces a payload.
    pub(super) fn announce(&mut self, id: EndpointId, bytes: usize, payload: T) {
        self.payloads += 1;
        match self.peers.iter_mut().find(|peer| peer.id == id) {
            Some(peer) => peer.payloads.push_back((bytes, payload)),
            None => self.peers.push_back(Peer { id, deficit_bytes: 0, payloads: [(bytes, payload)].into() }),
        }
    }

    /// Takes the payload whose turn it is, with its bytes, if there is room for so many. What has no room is not
    /// overtaken: smaller payloads would starve it.
    pub(super) fn next(&mut self, has_room: impl Fn(usize) -> bool) -> Option<(EndpointId, usize, T)> {
        loop {
            let peer = self.peers.front_mut()?;
            let bytes = peer.payloads.front()?.0;
            if !has_room(bytes) {
                return None;
            }
            if peer.deficit_bytes < bytes {
                peer.deficit_bytes += QUANTUM_BYTES;
                self.peers.rotate_left(1);
                continue;
            }
            peer.deficit_bytes -= bytes;
            let (id, payload) = (peer.id, peer.payloads.pop_front()?.1);
            if peer.payloads.is_empty() {
                self.peers.pop_front();
            }
            self.payloads -= 1;
            return Some((id, bytes, payload));
        }
    }

    /// Takes the newest payload of the peer that has announced most: where places run out, those who take most of them
    /// lose one, and nobody else does.
    pub(super) fn crowd_out(&mut self) -> Option<(EndpointId, T)> {
        let (at, peer) = self.peers.iter_mut().enumerate().max_by_key(|(_, peer)| peer.payloads.len())?;
        let (id, payload) = (peer.id, peer.payloads.pop_back()?.1);
        if peer.payloads.is_empty() {
            self.peers.remove(at);
        }
        self.payloads -= 1;
        Some((id, payload))
    }

    /// Payloads that wait.
    pub(super) fn len(&self) -> usize {
        self.payloads
    }

    /// None waits.
    pub(super) fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// A peer is gone. Returns what it had announced.
    pub(super) fn forget(&mut self, id: EndpointId) -> Vec<T> {
        let at = self.peers.iter().position(|peer| peer.id == id);
        let peer = at.and_then(|at| self.peers.remove(at));
        let payloads: Vec<T> = peer.into_iter().flat_map(|peer| peer.payloads).map(|(_, payload)| payload).collect();
        self.payloads -= payloads.len();
        payloads
    }

    /// All peers are.
    pub(super) fn forget_all(&mut self) -> Vec<(EndpointId, T)> {
        self.payloads = 0;
        let peers = std::mem::take(&mut self.peers).into_iter();
        peers.flat_map(|peer| peer.payloads.into_iter().map(move |(_, payload)| (peer.id, payload))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const PEERS: u64 = 16;
    const LARGEST: usize = 4 << 20;

    fn any_room(_: usize) -> bool {
        true
    }

    /// One thing that happens to the turns.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Announce(u64, usize),
        Next(usize),
        CrowdOut,
        Forget(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..PEERS, 1..LARGEST).prop_map(|(id, bytes)| Step::Announce(id, bytes)),
            4 => (0..2 * LARGEST).prop_map(Step::Next),
            1 => Just(Step::CrowdOut),
            1 => (0..PEERS).prop_map(Step::Forget),
        ]
    }

    proptest! {
        /// Of peers that always have something announced none is ever ahead of another by more than a turn and a
        /// payload.
        #[test]
        fn nobody_gets_far_ahead(
            sizes in prop::collection::vec(prop::collection::vec(1..LARGEST, 1..8), PEERS as usize),
            taken in 1usize..400,
        ) {
            let mut turns = Turns::default();
            let mut next: Vec<_> = sizes.iter().map(|sizes| sizes.iter().cycle()).collect();
            let mut announce = |turns: &mut Turns<()>, id: u64| {
                turns.announce(EndpointId(id), *next[id as usize].next().expect("a cycle"), ());
            };
            (0..PEERS).for_each(|id| (0..2).for_each(|_| announce(&mut turns, id)));
            let mut had = [0; PEERS as usize];
            for _ in 0..taken {
                let (id, bytes, ()) = turns.next(any_room).expect("all have announced");
                had[id.0 as usize] += bytes;
                announce(&mut turns, id.0);
                let (most, least) = (had.iter().max().copied(), had.iter().min().copied());
                let ahead = most.zip(least).map(|(most, least)| most - least);
                prop_assert!(ahead <= Some(QUANTUM_BYTES + LARGEST), "{had:?}");
            }
        }

        /// Beside a list for each peer: what is announced comes out once, in its peer's order, or is given back.
        #[test]
        fn nothing_is_lost_doubled_or_overtaken_within_a_peer(steps in prop::collection::vec(step(), 0..300)) {
            let (mut turns, mut number) = (Turns::default(), 0u32);
            let mut model: BTreeMap<u64, VecDeque<(usize, u32)>> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Announce(id, bytes) => {
                        number += 1;
                        turns.announce(EndpointId(id), bytes, number);
                        model.entry(id).or_default().push_back((bytes, number));
                    }
                    Step::Next(room) => match turns.next(|bytes| bytes <= room) {
                        Some((id, bytes, payload)) => {
                            let first = model.get_mut(&id.0).and_then(VecDeque::pop_front);
                            prop_assert!(first == Some((bytes, payload)) && bytes <= room);
                        }
                        None => {
                            let fits = |(bytes, _): &(usize, u32)| *bytes <= room;
                            prop_assert!(!model.values().all(|payloads| payloads.iter().all(fits))
                                || model.values().all(VecDeque::is_empty));
                        }
                    },
                    Step::CrowdOut => {
                        let most = model.values().map(VecDeque::len).max().unwrap_or(0);
                        let out = turns.crowd_out();
                        prop_assert_eq!(out.is_some(), most > 0);
                        if let Some((id, payload)) = out {
                            let of_it = model.entry(id.0).or_default();
                            prop_assert_eq!(of_it.len(), most);
                            prop_assert_eq!(of_it.pop_back().map(|(_, number)| number), Some(payload));
                        }
                    }
                    Step::Forget(id) => {
                        let left = model.remove(&id).unwrap_or_default();
                        prop_assert!(turns.forget(EndpointId(id)).into_iter().eq(left.into_iter().map(|(_, n)| n)));
                    }
                }
                prop_assert_eq!(turns.len(), model.values().map(VecDeque::len).sum::<usize>());
                prop_assert_eq!(turns.is_empty(), model.values().all(VecDeque::is_empty));
            }
            let left = turns.forget_all();
            prop_assert_eq!(left.len(), model.values().map(VecDeque::len).sum::<usize>());
            for (id, payloads) in model {
                let of_it = left.iter().filter(|(peer, _)| peer.0 == id).map(|(_, payload)| *payload);
                prop_assert!(of_it.eq(payloads.into_iter().map(|(_, number)| number)));
            }
            prop_assert_eq!((turns.len(), turns.next(any_room)), (0, None));
        }
    }

    /// Whoever floods loses its own; who announces as others do loses nothing.
    #[test]
    fn a_flood_crowds_out_itself() {
        const PLACES: usize = 64;
        let mut turns = Turns::default();
        let mut crowded_out = Vec::new();
        for round in 0..1000 {
            turns.announce(EndpointId(0), 1, round);
            if round < 15 {
                (1..4).for_each(|id| turns.announce(EndpointId(id), 1, round));
            }
            while turns.len() > PLACES {
                crowded_out.extend(turns.crowd_out());
            }
        }
        assert_eq!(crowded_out.len(), 1000 + 3 * 15 - PLACES);
        assert!(crowded_out.iter().all(|(id, _)| *id == EndpointId(0)));
    }
}
