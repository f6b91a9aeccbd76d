//! The prefix index: which node holds the KV of which block, by the block's sequence hash, as the nodes'
//! [`CacheChanges`] tell it. Pure and synchronous; who asks nodes for a snapshot is [`crate::membership`]'s matter.
//!
//! - `changes.rs`: what nodes tell. `hash_table.rs`: hash → entry. `entries.rs`: the entries in the order of their use.
//!   `holders.rs`: sets of nodes, each kept once.
//!
//! **Look-up.** [`PrefixIndex::matches`] walks along the prompt with the set of nodes that hold all of it so far, and
//! stops when nobody is left. Nothing is skipped: a node may lack a block and hold later ones (it evicts the ends of
//! sequences first, but its snapshot comes in parts, and this side forgets hashes too), so that a binary or galloping
//! search would give wrong lengths. It need not be skipped either: neighbours mostly have the same set, which is seen
//! by its number, and the reads of a table far larger than the caches go on beside each other, a batch of them at a
//! time.
//!
//! **Bounds.** `limit` hashes; beyond it the least recently used one is forgotten (used: stored, or matched by a
//! prompt). The sets are bounded by an eighth of it. Worst case 28 bytes a hash, 11 to 22 for its place, 27 for its
//! share of the sets. To forget is always safe: a node's later `removed` of such a hash changes nothing.
//!
//! **One owner.** It lives in the node table, under its one lock. Measured (docs/benchmarks/router.md; 1,000 nodes,
//! 4,000,000 hashes): a look-up of 1,000 blocks 6 to 8 µs when they are in a cache, 24 to 39 µs when not, a change 0.06
//! to 0.31 µs, a message of 1,024 new hashes 0.3 ms, a node's death 25 µs. 1,000 nodes that cache 100 new blocks a
//! second each hold the lock 3 % of the time: shards or a lock of its own would buy nothing yet.
mod changes;
mod entries;
mod hash_table;
mod holders;

use std::collections::HashMap;

use tandem_proto::SequenceHash;

pub use changes::CacheChanges;
use entries::Entries;
use hash_table::{HashTable, place_of};
pub use holders::MOST_NODES;
use holders::{HolderSets, NOBODY, members};

/// Hashes that are looked up before the first of them is needed.
const BATCH: usize = 32;
/// Entries looked at after a message while some have lost all their holders at once, beside two for each change.
const SWEEP: usize = 256;
/// There may be a set of holders for so many hashes.
const HASHES_A_SET: usize = 8;
const FEWEST_SETS: usize = 64;

/// See the head of this file.
#[derive(Debug)]
pub struct PrefixIndex {
    table: HashTable,
    entries: Entries,
    sets: HolderSets,
    /// By session.
    nodes: HashMap<u64, u16>,
    /// The streams of `nodes`; those of the numbers in `unused` mean nothing.
    streams: Vec<Stream>,
    unused: Vec<u16>,
    seed: u64,
    limit: usize,
    /// Entries without holders: their node was forgotten. They are as good as absent, and [`Self::sweep`] finds them.
    orphans: usize,
    sweep_at: u32,
    evicted: u64,
    gaps: u64,
    /// Entries along the prompt of the present look-up.
    walked: Vec<u32>,
}

/// What one node told.
#[derive(Clone, Copy, Debug)]
struct Stream {
    session: u64,
    state: State,
    /// Hashes that it holds, of those known here.
    hashes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has come.
    New,
    /// The number of the next change.
    Expects(u64),
    /// Changes were lost: a snapshot is waited for.
    Stale,
}

/// Changes of a node's cache were lost. What is known of it stays until its next snapshot; until then its changes are
/// ignored. Whoever gets this asks the node for one, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its cache's changes go on at number {found}, expected was {}", .expected.map_or("a snapshot".into(), |n| n.to_string()))]
pub struct Gap {
    /// Number of the change that should have come; `None`: the stream has to begin with a snapshot.
    pub expected: Option<u64>,
    /// Number of the first change that came.
    pub found: u64,
}

/// How much is known, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexTotals {
    /// Hashes that at least one node holds.
    pub blocks: usize,
    /// Hashes that may be known at most.
    pub limit: usize,
    /// Hashes forgotten to keep the limits.
    pub evicted: u64,
    /// Gaps in nodes' streams.
    pub gaps: u64,
}

impl PrefixIndex {
    /// An empty index of at most `limit` hashes (at least 1). `seed` is any number that clients cannot know.
    pub fn new(limit: usize, seed: u64) -> Self {
        let limit = limit.clamp(1, u32::MAX as usize - 1);
        Self::with_sets(limit, (limit / HASHES_A_SET).max(FEWEST_SETS), seed)
    }

    fn with_sets(limit: usize, sets: usize, seed: u64) -> Self {
        Self {
            table: HashTable::new(),
            entries: Entries::new(),
            sets: HolderSets::new(sets, seed),
            nodes: HashMap::new(),
            streams: Vec::new(),
            unused: Vec::new(),
            seed,
            limit,
            orphans: 0,
            sweep_at: 0,
            evicted: 0,
            gaps: 0,
            walked: Vec::new(),
        }
    }

    /// Takes a message of the node with this session. Of more than [`MOST_NODES`] nodes at once, the last ones are not
    /// indexed.
    ///
    /// # Errors
    /// [`Gap`], at the first message after one was lost; further ones are ignored until a snapshot comes.
    pub fn apply(&mut self, session: u64, changes: &CacheChanges) -> Result<(), Gap> {
        let Some(node) = self.node(session) else { return Ok(()) };
        if changes.snapshot {
            self.forget(node);
        } else {
            let expected = match self.streams[usize::from(node)].state {
                State::Stale => return Ok(()),
                State::New => None,
                State::Expects(number) => Some(number),
            };
            if expected != Some(changes.first) {
                self.streams[usize::from(node)].state = State::Stale;
                self.gaps += 1;
                return Err(Gap { expected, found: changes.first });
            }
        }
        let next = changes.first.wrapping_add(changes.hashes.len() as u64);
        self.streams[usize::from(node)].state = State::Expects(next);
        self.change(node, changes);
        self.sweep(SWEEP + 2 * changes.hashes.len());
        Ok(())
    }

    /// The node is gone, and what it held with it.
    pub fn remove(&mut self, session: u64) {
        if let Some(node) = self.nodes.remove(&session) {
            self.forget(node);
            self.unused.push(node);
        }
    }

    /// How many leading blocks of a prompt with these hashes each node holds, without the nodes that lack the first
    /// one; in no order. What is matched counts as used.
    pub fn matches(&mut self, hashes: &[SequenceHash]) -> Vec<(u64, u32)> {
        let mut matches = Vec::new();
        self.walked.clear();
        let (mut set, mut holders) = (NOBODY, None);
        'walk: for batch in hashes.chunks(BATCH) {
            for id in self.find_all(batch).into_iter().take(batch.len()) {
                let Some(id) = id else { break 'walk };
                let its_set = self.entries.get(id).set;
                if its_set != set {
                    let known = self.walked.len() as u32;
                    let its = self.sets.bits(its_set);
                    let left = holders.get_or_insert(*its);
                    let mut lost = *left;
                    (left.iter_mut().zip(&mut lost).zip(its)).for_each(|((left, lost), its)| {
                        *lost &= !its;
                        *left &= its;
                    });
                    matches.extend(members(&lost).map(|node| (self.streams[usize::from(node)].session, known)));
                    if left.iter().all(|word| *word == 0) {
                        break 'walk;
                    }
                    set = its_set;
                }
                self.walked.push(id);
            }
        }
        let known = self.walked.len() as u32;
        let left = holders.unwrap_or_default();
        matches.extend(members(&left).map(|node| (self.streams[usize::from(node)].session, known)));
        // The prompt's beginning is the last to be forgotten.
        self.entries.touch_all(&self.walked);
        matches
    }

    /// Known blocks of the node with this session.
    pub fn blocks_of(&self, session: u64) -> u32 {
        self.nodes.get(&session).map_or(0, |node| self.streams[usize::from(*node)].hashes)
    }

    /// Sums, for metrics.
    pub fn totals(&self) -> IndexTotals {
        IndexTotals {
            blocks: self.entries.len() - self.orphans,
            limit: self.limit,
            evicted: self.evicted,
            gaps: self.gaps,
        }
    }

    /// The number under which sets hold the node with this session.
    fn node(&mut self, session: u64) -> Option<u16> {
        if let Some(node) = self.nodes.get(&session) {
            return Some(*node);
        }
        let stream = Stream { session, state: State::New, hashes: 0 };
        let node = match self.unused.pop() {
            Some(node) => {
                self.streams[usize::from(node)] = stream;
                node
            }
            None if self.streams.len() < MOST_NODES => {
                self.streams.push(stream);
                self.streams.len() as u16 - 1
            }
            None => return None,
        };
        self.nodes.insert(session, node);
        Some(node)
    }

    fn forget(&mut self, node: u16) {
        let hashes = &mut self.streams[usize::from(node)].hashes;
        if std::mem::take(hashes) > 0 {
            self.orphans += self.sets.forget(node);
        }
    }

    fn change(&mut self, node: u16, changes: &CacheChanges) {
        // The blocks of a sequence are told in order: each is used less than the one before it, so that a forgotten end
        // leaves a beginning, and not the other way round.
        let mut newer = None;
        for (number, batch) in changes.hashes.chunks(BATCH).enumerate() {
            let found = self.find_all(batch);
            for (i, (hash, found)) in batch.iter().zip(found).enumerate() {
                // Those before it in the batch may have moved it.
                let is_there = |id: &u32| self.entries.at(*id).is_some_and(|entry| entry.hash == *hash);
                let found = found.filter(is_there).or_else(|| self.find(*hash));
                let at = number * BATCH + i;
                let removed = changes.removed.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1);
                match found {
                    Some(id) if removed => {
                        let gone = self.take_from(node, id);
                        newer = newer.filter(|newer| !gone || *newer != id);
                    }
                    None if removed => {}
                    Some(id) => newer = self.give_to(node, id, newer),
                    None => newer = self.add(node, *hash, newer),
                }
            }
        }
    }

    /// The node holds this one too. The entry, if it is still there.
    fn give_to(&mut self, node: u16, id: u32, newer: Option<u32>) -> Option<u32> {
        let set = self.entries.get(id).set;
        if !self.sets.has(set, node) {
            let orphan = self.sets.is_empty(set);
            let Some(with) = self.sets.toggle(set, node) else {
                self.evict(id);
                return newer.filter(|newer| *newer != id);
            };
            self.entries.set_holders(id, with);
            self.streams[usize::from(node)].hashes += 1;
            self.orphans -= usize::from(orphan);
        }
        self.entries.touch(id, newer);
        Some(id)
    }

    /// The node holds a hash that nobody was known to hold. The entry, if there is one.
    fn add(&mut self, node: u16, hash: SequenceHash, newer: Option<u32>) -> Option<u32> {
        let mut newer = newer;
        if self.entries.len() >= self.limit
            && let Some(oldest) = self.entries.oldest()
        {
            newer = newer.filter(|newer| *newer != oldest);
            self.evict(oldest);
        }
        let Some(set) = self.sets.toggle(NOBODY, node) else {
            self.evicted += 1;
            return newer;
        };
        let id = self.entries.add(hash, set, newer);
        self.table.insert(place_of(hash, self.seed), id);
        self.streams[usize::from(node)].hashes += 1;
        Some(id)
    }

    /// The node does not hold this one any more. Whether the entry is gone.
    fn take_from(&mut self, node: u16, id: u32) -> bool {
        let set = self.entries.get(id).set;
        if !self.sets.has(set, node) {
            return false;
        }
        let Some(without) = self.sets.toggle(set, node) else {
            self.evict(id);
            return true;
        };
        self.streams[usize::from(node)].hashes -= 1;
        self.entries.set_holders(id, without);
        if without == NOBODY {
            self.drop_entry(id);
        }
        without == NOBODY
    }

    /// Forgets a hash to keep a limit.
    fn evict(&mut self, id: u32) {
        let set = self.entries.get(id).set;
        if self.sets.is_empty(set) {
            self.orphans -= 1;
        } else {
            self.evicted += 1;
            for node in members(self.sets.bits(set)) {
                self.streams[usize::from(node)].hashes -= 1;
            }
        }
        self.drop_entry(id);
    }

    fn drop_entry(&mut self, id: u32) {
        let entry = self.entries.remove(id);
        self.table.remove(place_of(entry.hash, self.seed), id);
        self.sets.release(entry.set);
    }

    /// Looks at some entries for such as nobody holds.
    fn sweep(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.orphans == 0 {
                return;
            }
            let id = self.sweep_at;
            self.sweep_at = if id + 1 < self.entries.slots() { id + 1 } else { 0 };
            if self.entries.at(id).is_some_and(|entry| self.sets.is_empty(entry.set)) {
                self.orphans -= 1;
                self.drop_entry(id);
            }
        }
    }

    fn find(&self, hash: SequenceHash) -> Option<u32> {
        self.table.find(place_of(hash, self.seed), |id| self.entries.get(id).hash == hash)
    }

    /// The entries of at most [`BATCH`] hashes.
    fn find_all(&self, hashes: &[SequenceHash]) -> [Option<u32>; BATCH] {
        std::array::from_fn(|i| self.find(*hashes.get(i)?))
    }
}

#[cfg(test)]
mod tests;
