//! Which traces stay: the newest, and of those that say most for longer. Pure. When it is full, the oldest usual one
//! goes; the slow and the failed go first only where they are more than half of all, the refused where they are more
//! than an eighth. So neither ten thousand good answers nor ten thousand refusals hide the one that was slow.
use std::collections::{HashMap, VecDeque};

/// Traces kept where nothing else is said.
pub const DEFAULT_RING: usize = 1_000;
/// Traces of running requests of which nodes have told something outside of the requests' calls.
pub const MAX_EARLY: usize = 256;

/// 16 bytes of W3C's.
pub type TraceId = [u8; 16];

/// What a trace says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The request never ran.
    Refused,
    /// It went well.
    Usual,
    /// It failed, or took longer than the objectives.
    Notable,
}

/// At most so many entries, each of one trace.
pub struct Ring<T> {
    entries: HashMap<TraceId, Entry<T>>,
    /// By class, and within it by age: the newest is at the back. Who moved on has another turn by now.
    order: [VecDeque<(u64, TraceId)>; 3],
    turn: u64,
    most: usize,
}

struct Entry<T> {
    value: T,
    class: Class,
    turn: u64,
}

impl<T: Default> Ring<T> {
    /// Empty.
    pub fn new(most: usize) -> Self {
        Self { entries: HashMap::new(), order: Default::default(), turn: 0, most: most.max(1) }
    }

    /// The entry of a trace, which is the newest now. One trace can have several requests: what says most counts.
    pub fn renew(&mut self, trace_id: TraceId, class: Class) -> &mut T {
        self.turn += 1;
        let turn = self.turn;
        if !self.entries.contains_key(&trace_id) && self.entries.len() == self.most {
            self.evict();
        }
        let new = || Entry { value: T::default(), class, turn };
        let entry = self.entries.entry(trace_id).or_insert_with(new);
        let moved = (entry.turn != turn).then_some((entry.class, entry.turn));
        (entry.class, entry.turn) = (entry.class.max(class), turn);
        self.order[entry.class as usize].push_back((turn, trace_id));
        if let Some((class, old)) = moved {
            self.order[class as usize].retain(|(turn, _)| *turn != old);
        }
        &mut entry.value
    }

    /// The entry of a trace that is here.
    pub fn get(&self, trace_id: &TraceId) -> Option<&T> {
        self.entries.get(trace_id).map(|entry| &entry.value)
    }

    /// The same, to change it; it stays as old as it is.
    pub fn get_mut(&mut self, trace_id: &TraceId) -> Option<&mut T> {
        self.entries.get_mut(trace_id).map(|entry| &mut entry.value)
    }

    /// The newest one.
    pub fn last(&self) -> Option<TraceId> {
        self.order.iter().filter_map(VecDeque::back).max_by_key(|(turn, _)| *turn).map(|(_, trace_id)| *trace_id)
    }

    /// All of them.
    pub fn newest_first(&self) -> Vec<(TraceId, &T)> {
        self.newest(self.most)
    }

    /// So many of them at most, the newest first.
    pub fn newest(&self, most: usize) -> Vec<(TraceId, &T)> {
        let of_class = |order: &VecDeque<(u64, TraceId)>| order.iter().rev().take(most).copied().collect::<Vec<_>>();
        let mut newest: Vec<_> = self.order.iter().flat_map(of_class).collect();
        newest.sort_unstable_by_key(|(turn, _)| std::cmp::Reverse(*turn));
        newest.truncate(most);
        newest.into_iter().filter_map(|(_, id)| Some((id, self.get(&id)?))).collect()
    }

    fn evict(&mut self) {
        let too_many = |class: Class, part: usize| self.order[class as usize].len() > self.most / part;
        let class = match () {
            () if too_many(Class::Refused, 8) => Class::Refused,
            () if too_many(Class::Notable, 2) => Class::Notable,
            () => Class::Usual,
        };
        let first = [class, Class::Usual, Class::Refused, Class::Notable];
        let oldest = first.into_iter().find_map(|class| self.order[class as usize].pop_front());
        if let Some((_, trace_id)) = oldest {
            self.entries.remove(&trace_id);
        }
    }
}

/// Spans of requests that have not ended, packed. The oldest traces go first.
#[derive(Default)]
pub struct Early {
    packed: HashMap<TraceId, Vec<u8>>,
    order: VecDeque<TraceId>,
}

impl Early {
    /// Those of a trace, to add some.
    pub fn entry(&mut self, trace_id: TraceId) -> &mut Vec<u8> {
        if !self.packed.contains_key(&trace_id) {
            self.order.push_back(trace_id);
        }
        if self.order.len() > MAX_EARLY
            && let Some(oldest) = self.order.pop_front()
        {
            self.packed.remove(&oldest);
        }
        self.packed.entry(trace_id).or_default()
    }

    /// Those of a trace that are here.
    pub fn take(&mut self, trace_id: TraceId) -> Vec<u8> {
        let Some(packed) = self.packed.remove(&trace_id) else { return Vec::new() };
        self.order.retain(|id| *id != trace_id);
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> TraceId {
        u128::from(number + 1).to_be_bytes()
    }

    fn count(ring: &Ring<u64>) -> [usize; 3] {
        assert_eq!(ring.order.iter().map(VecDeque::len).sum::<usize>(), ring.entries.len());
        [Class::Refused, Class::Usual, Class::Notable].map(|class| ring.order[class as usize].len())
    }

    #[test]
    fn what_says_most_stays_longest() {
        let mut ring = Ring::<u64>::new(16);
        *ring.renew(id(0), Class::Notable) = 7;
        for number in 1..1_000 {
            ring.renew(id(number), Class::Usual);
        }
        assert_eq!((count(&ring), ring.get(&id(0))), ([0, 15, 1], Some(&7)));
        for number in 1_000..2_000 {
            ring.renew(id(number), Class::Refused);
        }
        assert_eq!(count(&ring), [3, 12, 1], "refusals hide nothing");
        assert_eq!(ring.last(), Some(id(1_999)));
        for number in 2_000..3_000 {
            ring.renew(id(number), Class::Notable);
        }
        assert_eq!(count(&ring)[2], 9);
        ring.renew(id(3_000), Class::Usual);
        let newest: Vec<_> = ring.newest(2).into_iter().map(|(id, _)| id).collect();
        assert_eq!((newest, ring.last()), (vec![id(3_000), id(2_999)], Some(id(3_000))));
    }

    #[test]
    fn only_refusals_or_failures_fill_it_too() {
        for class in [Class::Refused, Class::Notable] {
            let mut ring = Ring::<u64>::new(4);
            (0..10).for_each(|number| *ring.renew(id(number), class) += 1);
            assert_eq!(ring.newest_first().into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [9, 8, 7, 6].map(id));
        }
    }

    #[test]
    fn a_trace_of_several_requests_is_one_and_counts_for_the_one_that_says_most() {
        let mut ring = Ring::<u64>::new(8);
        *ring.renew(id(1), Class::Refused) += 1;
        ring.renew(id(2), Class::Usual);
        *ring.renew(id(1), Class::Notable) += 1;
        *ring.renew(id(1), Class::Usual) += 1;
        assert_eq!((count(&ring), ring.get(&id(1)), ring.last()), ([0, 1, 1], Some(&3), Some(id(1))));
    }

    #[test]
    fn early_spans_are_bounded() {
        let mut early = Early::default();
        for number in 0..2 * MAX_EARLY as u64 {
            early.entry(id(number)).push(1);
            early.entry(id(number)).push(2);
        }
        assert_eq!((early.packed.len(), early.order.len()), (MAX_EARLY, MAX_EARLY));
        assert!(early.take(id(0)).is_empty());
        assert_eq!(early.take(id(MAX_EARLY as u64)), [1, 2]);
        assert_eq!((early.packed.len(), early.order.len()), (MAX_EARLY - 1, MAX_EARLY - 1));
    }
}
