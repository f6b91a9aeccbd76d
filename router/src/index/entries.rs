//! The known hashes, each with who holds it, in the order of their use. Numbers and links only: what a set of holders
//! is, and where a hash is found, is known to its neighbours.
use tandem_proto::SequenceHash;

const NONE: u32 = u32::MAX;

/// A list from the most to the least recently used entry, over a slab whose numbers stay.
#[derive(Debug)]
pub(super) struct Entries {
    slab: Vec<BlockEntry>,
    newest: u32,
    oldest: u32,
    /// First of the unused ones, which are linked by `older`.
    unused: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BlockEntry {
    pub hash: SequenceHash,
    /// Names the set of its holders; [`NONE`] when this entry is unused.
    pub set: u32,
    newer: u32,
    older: u32,
}

impl Entries {
    pub fn new() -> Self {
        Self { slab: Vec::new(), newest: NONE, oldest: NONE, unused: NONE, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The entry with this number, which is in use.
    pub fn get(&self, id: u32) -> &BlockEntry {
        &self.slab[id as usize]
    }

    /// The entry at this place of the slab, if it is in use; the places are `0..slots()`.
    pub fn at(&self, id: u32) -> Option<&BlockEntry> {
        self.slab.get(id as usize).filter(|entry| entry.set != NONE)
    }

    pub fn slots(&self) -> u32 {
        self.slab.len() as u32
    }

    pub fn set_holders(&mut self, id: u32, set: u32) {
        self.slab[id as usize].set = set;
    }

    /// Adds an entry as the most recently used one, or right after `newer` in the order of use.
    pub fn add(&mut self, hash: SequenceHash, set: u32, newer: Option<u32>) -> u32 {
        let entry = BlockEntry { hash, set, newer: NONE, older: NONE };
        let id = match self.unused {
            NONE => {
                self.slab.push(entry);
                self.slots() - 1
            }
            id => {
                self.unused = self.slab[id as usize].older;
                self.slab[id as usize] = entry;
                id
            }
        };
        self.link(id, id, newer.unwrap_or(NONE));
        self.len += 1;
        id
    }

    pub fn remove(&mut self, id: u32) -> BlockEntry {
        self.unlink(id, id);
        let entry = &mut self.slab[id as usize];
        let removed = *entry;
        (entry.set, entry.older) = (NONE, self.unused);
        self.unused = id;
        self.len -= 1;
        removed
    }

    /// It was used now; or, with `newer`, right before that one.
    pub fn touch(&mut self, id: u32, newer: Option<u32>) {
        if newer != Some(id) {
            self.touch_run(id, id, newer);
        }
    }

    /// These were used now, the first of them last. What stands together in this order already, as the blocks of a
    /// prompt do that was asked for before, moves in one step.
    pub fn touch_all(&mut self, ids: &[u32]) {
        let mut newer = None;
        let mut rest = ids;
        while let [first, others @ ..] = rest {
            let (mut last, mut others) = (*first, others);
            while let [next, behind @ ..] = others
                && self.slab[*next as usize].newer == last
                && newer != Some(*next)
            {
                (last, others) = (*next, behind);
            }
            rest = others;
            if newer != Some(*first) {
                self.touch_run(*first, last, newer);
            }
            newer = Some(last);
        }
    }

    /// `newer` is none of the run.
    fn touch_run(&mut self, first: u32, last: u32, newer: Option<u32>) {
        let newer = newer.unwrap_or(NONE);
        if newer != self.slab[first as usize].newer {
            self.unlink(first, last);
            self.link(first, last, newer);
        }
    }

    /// The least recently used one.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Puts a run, from its newest to its oldest, behind `newer`.
    fn link(&mut self, first: u32, last: u32, newer: u32) {
        let older = *self.older_of(newer);
        self.slab[first as usize].newer = newer;
        self.slab[last as usize].older = older;
        *self.older_of(newer) = first;
        *self.newer_of(older) = last;
    }

    fn unlink(&mut self, first: u32, last: u32) {
        let (newer, older) = (self.slab[first as usize].newer, self.slab[last as usize].older);
        *self.older_of(newer) = older;
        *self.newer_of(older) = newer;
    }

    /// The link from `id`, or from the list's new end, to what is older.
    fn older_of(&mut self, id: u32) -> &mut u32 {
        if id == NONE { &mut self.newest } else { &mut self.slab[id as usize].older }
    }

    /// The link from `id`, or from the list's old end, to what is newer.
    fn newer_of(&mut self, id: u32) -> &mut u32 {
        if id == NONE { &mut self.oldest } else { &mut self.slab[id as usize].newer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(entries: &Entries) -> Vec<u128> {
        let mut hashes = Vec::new();
        let mut id = entries.newest;
        while id != NONE {
            hashes.push(entries.get(id).hash.into());
            id = entries.get(id).older;
        }
        let mut backwards = Vec::new();
        let mut id = entries.oldest;
        while id != NONE {
            backwards.push(entries.get(id).hash.into());
            id = entries.get(id).newer;
        }
        backwards.reverse();
        assert_eq!(hashes, backwards);
        assert_eq!(hashes.len(), entries.len());
        hashes
    }

    #[test]
    fn the_order_is_that_of_use() {
        let mut entries = Entries::new();
        let first = entries.add(1.into(), 0, None);
        let second = entries.add(2.into(), 0, Some(first));
        let third = entries.add(3.into(), 0, Some(second));
        entries.add(4.into(), 0, None);
        assert_eq!(order(&entries), [4, 1, 2, 3]);
        entries.touch(third, None);
        entries.touch(first, Some(third));
        entries.touch(first, Some(third));
        entries.touch(first, Some(first));
        assert_eq!(order(&entries), [3, 1, 4, 2]);
        assert_eq!(entries.oldest(), Some(second));
        assert_eq!(entries.remove(second).hash, 2.into());
        assert!(entries.at(second).is_none());
        assert_eq!(entries.add(5.into(), 0, None), second, "places are used again");
        assert_eq!((order(&entries), entries.slots()), (vec![5, 3, 1, 4], 4));
    }

    #[test]
    fn what_stands_together_moves_together() {
        let mut entries = Entries::new();
        let ids: Vec<u32> = (0..6).map(|hash| entries.add(hash.into(), 0, None)).collect();
        assert_eq!(order(&entries), [5, 4, 3, 2, 1, 0]);
        entries.touch_all(&[ids[3], ids[2], ids[0]]);
        assert_eq!(order(&entries), [3, 2, 0, 5, 4, 1]);
        entries.touch_all(&[ids[3], ids[2], ids[0], ids[5]]);
        assert_eq!(order(&entries), [3, 2, 0, 5, 4, 1]);
        // Whatever comes twice.
        for twice in [[4, 1, 4, 1], [1, 1, 4, 4], [0, 5, 0, 3], [2, 2, 2, 2]] {
            entries.touch_all(&twice.map(|i| ids[i]));
            order(&entries);
        }
        entries.touch_all(&[]);
        assert_eq!(order(&entries).len(), 6);
    }

    #[test]
    fn the_last_one_leaves_an_empty_list() {
        let mut entries = Entries::new();
        let only = entries.add(1.into(), 0, None);
        entries.touch(only, None);
        entries.remove(only);
        assert_eq!((entries.oldest(), entries.len()), (None, 0));
        assert_eq!(order(&entries), [0; 0]);
    }
}
