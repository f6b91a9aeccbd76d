//! Owns which blocks hold the KV of which prefix, and which of them may be taken away. Pure: ids, hashes and counters;
//! leases and waiting are in `blocks.rs`, which calls it.
//!
//! A block enters under its sequence hash, which names its tokens together with all tokens before them, when it is full
//! and its KV is known to be good (`scheduler.rs` says when that is). From then on nobody writes it. While a lease
//! holds it, it stays; afterwards it is *idle*: still found, and the least recently held idle block is evicted when a
//! reservation finds no empty one. A partial block is never in the cache: its hash would change with its next token.
//!
//! What enters and leaves is told as events with consecutive numbers. The log is a ring: a reader who falls too far
//! behind gets all hashes at once instead, and goes on from there.
use std::collections::{BTreeMap, HashMap, VecDeque};

use tandem_proto::SequenceHash;

/// Events that a reader may fall behind.
pub const EVENT_LOG: usize = 4096;

/// A change of what is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A block with this hash can be reused.
    Stored(SequenceHash),
    /// It no longer can.
    Removed(SequenceHash),
}

/// What a reader missed. `next` is the number of the first event after it: ask with it the next time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheUpdate {
    /// The events, in order.
    Events {
        /// Those from the number asked for on.
        events: Vec<CacheEvent>,
        /// See [`CacheUpdate`].
        next: u64,
    },
    /// They are no longer known: everything that is cached now, in no order.
    Snapshot {
        /// Replaces all that the reader knew.
        stored: Vec<SequenceHash>,
        /// See [`CacheUpdate`].
        next: u64,
    },
}

/// The cached blocks of one pool.
#[derive(Debug, Default)]
pub struct PrefixCache {
    by_hash: HashMap<SequenceHash, u32>,
    by_block: HashMap<u32, Entry>,
    /// Blocks that nobody holds, least recently held first.
    idle: BTreeMap<u64, u32>,
    /// Counts releases; the keys of `idle`.
    clock: u64,
    log: VecDeque<CacheEvent>,
    /// Number of the event after the last one in `log`.
    next_event: u64,
}

#[derive(Debug)]
struct Entry {
    hash: SequenceHash,
    /// Key in `idle` while nobody holds the block.
    idle_since: Option<u64>,
}

impl PrefixCache {
    /// The longest cached beginning of `hashes`, as blocks.
    pub fn lookup(&self, hashes: &[SequenceHash]) -> Vec<u32> {
        hashes.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect()
    }

    /// Caches `block`, which somebody holds. False when another block is cached under this hash, or this block under
    /// another: it then stays what it was.
    pub fn insert(&mut self, hash: SequenceHash, block: u32) -> bool {
        if self.by_hash.contains_key(&hash) || self.by_block.contains_key(&block) {
            return false;
        }
        self.by_hash.insert(hash, block);
        self.by_block.insert(block, Entry { hash, idle_since: None });
        self.tell(CacheEvent::Stored(hash));
        true
    }

    /// Somebody holds `block` (again).
    pub fn hold(&mut self, block: u32) {
        let since = self.by_block.get_mut(&block).and_then(|entry| entry.idle_since.take());
        if let Some(since) = since {
            self.idle.remove(&since);
        }
    }

    /// Nobody holds `block` any more. False when it is not cached. Release the blocks of a sequence last one first: a
    /// block is of no use without those before it, so that these should outlive it.
    pub fn release(&mut self, block: u32) -> bool {
        let Some(entry) = self.by_block.get_mut(&block) else { return false };
        debug_assert!(entry.idle_since.is_none(), "block {block} is released twice");
        entry.idle_since = Some(self.clock);
        self.idle.insert(self.clock, block);
        self.clock += 1;
        true
    }

    /// Forgets the least recently held idle block and gives it away.
    pub fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(entry) = self.by_block.remove(&block) {
            self.by_hash.remove(&entry.hash);
            self.tell(CacheEvent::Removed(entry.hash));
        }
        Some(block)
    }

    /// Cached blocks that nobody holds.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Cached blocks, held and idle.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// The events from number `from` on (the first one ever is 0), or a snapshot when they are not all known.
    pub fn events_since(&self, from: u64) -> CacheUpdate {
        let next = self.next_event;
        let known = usize::try_from(next.wrapping_sub(from)).ok().filter(|&missed| missed <= self.log.len());
        match known {
            Some(missed) => {
                let events = self.log.range(self.log.len() - missed..).copied().collect();
                CacheUpdate::Events { events, next }
            }
            None => CacheUpdate::Snapshot { stored: self.by_hash.keys().copied().collect(), next },
        }
    }

    fn tell(&mut self, event: CacheEvent) {
        if self.log.len() == EVENT_LOG {
            self.log.pop_front();
        }
        self.log.push_back(event);
        self.next_event += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn hash(number: u32) -> SequenceHash {
        u128::from(number).into()
    }

    fn follow(known: &mut HashSet<SequenceHash>, update: CacheUpdate) -> u64 {
        match update {
            CacheUpdate::Events { events, next } => {
                for event in events {
                    match event {
                        CacheEvent::Stored(hash) => assert!(known.insert(hash), "{hash} is stored twice"),
                        CacheEvent::Removed(hash) => assert!(known.remove(&hash), "{hash} was not stored"),
                    }
                }
                next
            }
            CacheUpdate::Snapshot { stored, next } => {
                *known = stored.into_iter().collect();
                next
            }
        }
    }

    proptest! {
        #[test]
        fn a_reader_knows_what_is_cached(actions in prop::collection::vec((0u32..40, 0u32..60, 0u8..4), 0..400)) {
            let (mut cache, mut held) = (PrefixCache::default(), HashSet::new());
            let (mut known, mut next) = (HashSet::new(), 0);
            for (block, number, action) in actions {
                match action {
                    0 => if held.insert(block) { cache.hold(block) },
                    1 => if held.contains(&block) { cache.insert(hash(number), block); },
                    2 => if held.remove(&block) { cache.release(block); },
                    _ => if let Some(block) = cache.evict() { prop_assert!(!held.contains(&block)) },
                }
                if block % 3 == 0 { next = follow(&mut known, cache.events_since(next)); }
                prop_assert!(cache.idle() <= cache.len());
            }
            follow(&mut known, cache.events_since(next));
            prop_assert_eq!(&known, &cache.by_hash.keys().copied().collect());
            let mut late = HashSet::new();
            follow(&mut late, cache.events_since(u64::MAX));
            prop_assert_eq!(late, known, "a reader from another life gets a snapshot");
        }
    }

    #[test]
    fn the_log_is_bounded_and_a_gap_gives_a_snapshot() {
        let mut cache = PrefixCache::default();
        for block in 0..EVENT_LOG as u32 {
            cache.insert(hash(block * 2), block);
        }
        let CacheUpdate::Events { events, next } = cache.events_since(0) else { panic!("all are known") };
        assert_eq!((events.len(), next), (EVENT_LOG, EVENT_LOG as u64));
        cache.insert(hash(1), EVENT_LOG as u32);
        assert!(matches!(cache.events_since(0), CacheUpdate::Snapshot { stored, .. } if stored.len() == EVENT_LOG + 1));
        assert_eq!(
            cache.events_since(next),
            CacheUpdate::Events { events: vec![CacheEvent::Stored(hash(1))], next: next + 1 }
        );
    }

    #[test]
    fn the_end_of_the_least_recently_held_sequence_goes_first() {
        let mut cache = PrefixCache::default();
        for block in 0..6 {
            cache.insert(hash(100 + block), block);
        }
        // Two sequences: blocks 0 1 2 and 3 4 5; the first is held again and let go of.
        [2, 1, 0, 5, 4, 3].iter().for_each(|&block| assert!(cache.release(block)));
        [0, 1].iter().for_each(|&block| cache.hold(block));
        [1, 0].iter().for_each(|&block| assert!(cache.release(block)));
        let evicted: Vec<_> = std::iter::from_fn(|| cache.evict()).collect();
        assert_eq!(evicted, [2, 5, 4, 3, 1, 0]);
        assert_eq!((cache.len(), cache.idle()), (0, 0));
    }

    #[test]
    fn a_hash_has_one_block_and_a_block_one_hash() {
        let mut cache = PrefixCache::default();
        let [seven, eight] = [hash(7), hash(8)];
        assert!(cache.insert(seven, 0));
        assert!(!cache.insert(seven, 1) && !cache.insert(eight, 0));
        assert_eq!((cache.lookup(&[seven, eight]), cache.lookup(&[eight, seven])), (vec![0], vec![]));
        assert!(!cache.release(1), "it was never cached");
    }
}
