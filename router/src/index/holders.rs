//! Sets of nodes, each kept once however many hashes it belongs to. The blocks of one prompt mostly have the same
//! holders, so there are far fewer sets than hashes: an entry needs four bytes for its holders, a walk along a prompt
//! compares numbers and not sets, and a node that leaves is taken out of the sets, not out of each of its blocks.
//!
//! A set is found by its key, the exclusive or of its members' keys (Zobrist hashing), which a change of one member
//! changes in one step; members are compared too. After [`HolderSets::forget`] two sets may be equal: that costs a
//! comparison in a walk, and nothing else.
use std::collections::HashMap;

use super::hash_table::mix;

/// Members that a set may have: a node each.
pub const MOST_NODES: usize = 1024;
/// The set without members; it belongs to no entry.
pub(super) const NOBODY: u32 = 0;

/// A bit for each node.
pub(super) type Bits = [u64; MOST_NODES / 64];

#[derive(Debug)]
pub(super) struct HolderSets {
    sets: Vec<Set>,
    unused: Vec<u32>,
    /// Of equal sets, one.
    by_key: HashMap<u64, u32>,
    seed: u64,
    /// Sets at most.
    limit: usize,
}

#[derive(Clone, Debug)]
struct Set {
    bits: Bits,
    key: u64,
    /// Hashes that have these holders.
    hashes: u32,
}

impl HolderSets {
    pub fn new(limit: usize, seed: u64) -> Self {
        let nobody = Set { bits: [0; MOST_NODES / 64], key: 0, hashes: 0 };
        Self { sets: vec![nobody], unused: Vec::new(), by_key: HashMap::from([(0, NOBODY)]), seed, limit }
    }

    /// Sets that belong to a hash.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.sets.len() - 1 - self.unused.len()
    }

    pub fn bits(&self, set: u32) -> &Bits {
        &self.sets[set as usize].bits
    }

    pub fn has(&self, set: u32, node: u16) -> bool {
        let (word, bit) = place(node);
        self.bits(set)[word] & bit != 0
    }

    pub fn is_empty(&self, set: u32) -> bool {
        // All sets without members have the key of no members; one with members has it once in 2^64 times.
        self.sets[set as usize].key == 0 && *self.bits(set) == [0; MOST_NODES / 64]
    }

    /// A hash changes from `from` to the set with `node` more, or less. `None`: there are too many sets; nothing
    /// changed.
    pub fn toggle(&mut self, from: u32, node: u16) -> Option<u32> {
        let (word, bit) = place(node);
        let mut bits = *self.bits(from);
        bits[word] ^= bit;
        let key = self.sets[from as usize].key ^ self.key(node);
        let known = self.by_key.get(&key).copied().filter(|known| *self.bits(*known) == bits);
        let to = match known {
            Some(known) => known,
            None if from != NOBODY && self.sets[from as usize].hashes == 1 => {
                self.change(from, bits, key);
                return Some(from);
            }
            None => self.add(bits, key)?,
        };
        if to != NOBODY {
            self.sets[to as usize].hashes += 1;
        }
        self.release(from);
        Some(to)
    }

    /// A hash that had these holders is gone.
    pub fn release(&mut self, set: u32) {
        if set == NOBODY {
            return;
        }
        let Set { hashes, key, .. } = &mut self.sets[set as usize];
        *hashes -= 1;
        if *hashes == 0 {
            let key = *key;
            self.unname(set, key);
            self.unused.push(set);
        }
    }

    /// Takes `node` out of all sets; how many hashes have no holder since.
    pub fn forget(&mut self, node: u16) -> usize {
        let (word, bit) = place(node);
        let mut orphans = 0;
        for set in 0..self.sets.len() {
            let Set { bits, key, hashes } = &self.sets[set];
            if *hashes > 0 && bits[word] & bit != 0 {
                let (mut bits, key, hashes) = (*bits, key ^ self.key(node), *hashes);
                bits[word] &= !bit;
                self.change(set as u32, bits, key);
                orphans += if bits == [0; MOST_NODES / 64] { hashes as usize } else { 0 };
            }
        }
        orphans
    }

    /// Gives a set in use other members.
    fn change(&mut self, set: u32, bits: Bits, key: u64) {
        let Set { bits: old_bits, key: old_key, .. } = &mut self.sets[set as usize];
        *old_bits = bits;
        let old_key = std::mem::replace(old_key, key);
        self.unname(set, old_key);
        self.by_key.entry(key).or_insert(set);
    }

    fn add(&mut self, bits: Bits, key: u64) -> Option<u32> {
        let new = Set { bits, key, hashes: 0 };
        let set = match self.unused.pop() {
            Some(set) => {
                self.sets[set as usize] = new;
                set
            }
            None if self.sets.len() > self.limit => return None,
            None => {
                self.sets.push(new);
                self.sets.len() as u32 - 1
            }
        };
        self.by_key.entry(key).or_insert(set);
        Some(set)
    }

    fn unname(&mut self, set: u32, key: u64) {
        if self.by_key.get(&key) == Some(&set) {
            self.by_key.remove(&key);
        }
    }

    fn key(&self, node: u16) -> u64 {
        mix(mix(u64::from(node) + 1, self.seed), 0xa076_1d64_78bd_642f)
    }
}

/// The members of a set.
pub(super) fn members(bits: &Bits) -> impl Iterator<Item = u16> + '_ {
    bits.iter().enumerate().flat_map(|(word, bits)| {
        let rest = |bits: &u64| Some(bits & bits.wrapping_sub(1)).filter(|rest| *rest != 0);
        std::iter::successors(Some(*bits).filter(|bits| *bits != 0), rest)
            .map(move |bits| (word * 64) as u16 + bits.trailing_zeros() as u16)
    })
}

fn place(node: u16) -> (usize, u64) {
    (usize::from(node) / 64, 1 << (node % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(sets: &mut HolderSets, nodes: &[u16]) -> u32 {
        nodes.iter().fold(NOBODY, |set, node| sets.toggle(set, *node).unwrap())
    }

    #[test]
    fn equal_sets_are_one() {
        let mut sets = HolderSets::new(100, 5);
        let (a, b) = (set(&mut sets, &[1, 700]), set(&mut sets, &[700, 3, 1, 3]));
        assert_eq!((a, sets.len()), (b, 1));
        assert_eq!(members(sets.bits(a)).collect::<Vec<_>>(), [1, 700]);
        assert!(sets.has(a, 700) && !sets.has(a, 3));
        let a = sets.toggle(a, 1).unwrap();
        assert_ne!(a, b, "the other hash keeps its holders");
        sets.release(a);
        sets.release(b);
        assert_eq!((sets.len(), sets.by_key.len()), (0, 1));
        assert_eq!(set(&mut sets, &[9, 9]), NOBODY);
    }

    #[test]
    fn a_node_that_is_forgotten_is_in_no_set() {
        let mut sets = HolderSets::new(100, 5);
        let [alone, both, other] = [&[7][..], &[7, 8], &[8]].map(|nodes| set(&mut sets, nodes));
        let again = set(&mut sets, &[7]);
        assert_eq!(again, alone);
        assert_eq!(sets.forget(7), 2);
        assert!(sets.is_empty(alone) && !sets.is_empty(both));
        assert_eq!(sets.bits(both), sets.bits(other));
        // Equal ones are found by their key all the same, and leave cleanly.
        let more = set(&mut sets, &[8]);
        assert_eq!(sets.bits(more), sets.bits(other));
        let revived = sets.toggle(alone, 8).unwrap();
        assert_eq!(sets.bits(revived), sets.bits(other));
        for gone in [again, revived, both, other, more] {
            sets.release(gone);
        }
        assert_eq!((sets.len(), sets.by_key.len()), (0, 1));
    }

    #[test]
    fn there_are_no_more_sets_than_the_limit() {
        let mut sets = HolderSets::new(2, 5);
        let (one, _two) = (set(&mut sets, &[1]), set(&mut sets, &[2]));
        assert_eq!(sets.toggle(NOBODY, 3), None);
        assert_eq!(sets.toggle(NOBODY, 1), Some(one));
        assert_eq!(sets.toggle(one, 3), None, "it belongs to another hash as well");
        sets.release(one);
        assert_eq!(sets.toggle(one, 3), Some(one));
        assert_eq!(sets.len(), 2);
    }
}
