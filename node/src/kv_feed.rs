//! What the router is told of this node's prefix cache on one membership stream, cut into messages of bounded size.
//! Pure: the cache's log is read through a closure. When to send is `membership.rs`'s matter.
//!
//! The changes of a stream are numbered by this feed and not by the cache: a snapshot is a change for each hash here. A
//! feed begins with a snapshot. When the cache's log no longer knows what is missing, or the router asks, another one
//! follows.
use std::collections::VecDeque;

use tandem_engine::prefix_cache::{CacheEvent, CacheUpdate};
use tandem_proto::{SequenceHash, v1};

/// Hashes of a message at most: the router holds its node table for about a third of a millisecond to take them in.
pub const MOST_HASHES: usize = 1024;
/// Asks the cache for all of it: it counts from 0, and does not come so far.
const EVERYTHING: u64 = u64::MAX;

/// What is still to be told. Bounded by what the cache gives at once: its log, or all its blocks.
#[derive(Debug)]
pub struct KvFeed {
    /// The cache's number for the first event that was not read.
    unread: u64,
    /// The stream's number for the first change that was not told.
    next: u64,
    /// Read, and not told.
    pending: VecDeque<CacheEvent>,
    /// The first of `pending` begins a snapshot.
    snapshot: bool,
}

impl Default for KvFeed {
    fn default() -> Self {
        Self { unread: EVERYTHING, next: 0, pending: VecDeque::new(), snapshot: false }
    }
}

impl KvFeed {
    /// The router lost count: the next message is a snapshot.
    pub fn start_over(&mut self) {
        (self.unread, self.snapshot) = (EVERYTHING, false);
        self.pending.clear();
    }

    /// The next message; `None` when all is told. `read` gives the events from a number on, as
    /// [`tandem_engine::BlockPool::cache_events`].
    pub fn next(&mut self, read: impl FnOnce(u64) -> CacheUpdate) -> Option<v1::KvEvents> {
        if self.pending.is_empty() {
            match read(self.unread) {
                CacheUpdate::Events { events, next } => {
                    (self.pending, self.unread) = (events.into(), next);
                    if self.pending.is_empty() {
                        return None;
                    }
                }
                CacheUpdate::Snapshot { stored, next } => {
                    self.pending = stored.into_iter().map(CacheEvent::Stored).collect();
                    (self.unread, self.snapshot) = (next, true);
                }
            }
        }
        let count = self.pending.len().min(MOST_HASHES);
        let (mut hashes, mut removed) = (Vec::with_capacity(count), Vec::new());
        for (i, event) in self.pending.drain(..count).enumerate() {
            hashes.push(match event {
                CacheEvent::Stored(hash) => hash,
                CacheEvent::Removed(hash) => {
                    removed.resize(i / 8 + 1, 0);
                    removed[i / 8] |= 1 << (i % 8);
                    hash
                }
            });
        }
        let message = v1::KvEvents {
            first: self.next,
            snapshot: std::mem::take(&mut self.snapshot),
            hashes: SequenceHash::all_to_wire(&hashes),
            removed,
        };
        self.next += count as u64;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use tandem_engine::prefix_cache::{EVENT_LOG, PrefixCache};

    use super::*;

    /// What a router knows that follows the messages.
    #[derive(Default)]
    struct Follower {
        known: HashSet<SequenceHash>,
        next: Option<u64>,
    }

    impl Follower {
        fn take(&mut self, message: &v1::KvEvents) {
            let hashes = told(message);
            assert!(hashes.len() <= MOST_HASHES && message.removed.len() <= hashes.len().div_ceil(8));
            if message.snapshot {
                self.known.clear();
            } else {
                assert_eq!(self.next, Some(message.first), "no gap, and a snapshot first");
            }
            self.next = Some(message.first + hashes.len() as u64);
            for (i, hash) in hashes.iter().enumerate() {
                if message.removed.get(i / 8).is_some_and(|byte| byte >> (i % 8) & 1 == 1) {
                    assert!(self.known.remove(hash));
                } else {
                    assert!(self.known.insert(*hash));
                }
            }
        }
    }

    fn told(message: &v1::KvEvents) -> Vec<SequenceHash> {
        SequenceHash::all_from_wire(&message.hashes).unwrap()
    }

    fn hash(number: u32) -> SequenceHash {
        u128::from(number).into()
    }

    fn tell(feed: &mut KvFeed, cache: &PrefixCache, router: &mut Follower) -> Vec<(bool, usize)> {
        let messages = std::iter::from_fn(|| feed.next(|from| cache.events_since(from)));
        messages.inspect(|message| router.take(message)).map(|of| (of.snapshot, told(&of).len())).collect()
    }

    proptest! {
        #[test]
        fn the_router_knows_what_is_cached(
            changes in prop::collection::vec((0u32..60, 0u8..6), 0..200), batch in 1u32..300,
        ) {
            let (mut cache, mut feed, mut router) = (PrefixCache::default(), KvFeed::default(), Follower::default());
            let mut cached = 0;
            for (block, action) in changes {
                match action {
                    // Enough in a row that the log overflows now and then.
                    0..=2 => for block in (block..block + batch).filter(|block| *block < 40_000) {
                        if cache.insert(hash(block + 1), block) {
                            cache.release(block);
                            cached += 1;
                        }
                    },
                    3 => for _ in 0..batch { cached -= usize::from(cache.evict().is_some()); },
                    4 => feed.start_over(),
                    _ => {
                        tell(&mut feed, &cache, &mut router);
                        prop_assert_eq!(router.known.len(), cached);
                    }
                }
            }
            tell(&mut feed, &cache, &mut router);
            prop_assert!(router.known.iter().all(|hash| cache.lookup(&[*hash]).len() == 1));
            prop_assert_eq!(router.known.len(), cache.len());
        }
    }

    #[test]
    fn begins_with_a_snapshot_even_of_nothing() {
        let (mut cache, mut feed, mut router) = (PrefixCache::default(), KvFeed::default(), Follower::default());
        assert_eq!(tell(&mut feed, &cache, &mut router), [(true, 0)]);
        assert_eq!(tell(&mut feed, &cache, &mut router), []);
        cache.insert(hash(5), 0);
        cache.release(0);
        cache.evict();
        cache.insert(hash(6), 0);
        let message = feed.next(|from| cache.events_since(from)).unwrap();
        assert_eq!((message.first, told(&message)), (0, [5, 5, 6].map(hash).into()));
        assert_eq!(message.removed, [0b10]);
    }

    #[test]
    fn a_snapshot_comes_in_parts_and_after_an_overflow_another() {
        let (mut cache, mut feed, mut router) = (PrefixCache::default(), KvFeed::default(), Follower::default());
        for block in 0..2_500 {
            cache.insert(hash(block + 1), block);
        }
        let parts = [(true, 1_024), (false, 1_024), (false, 452)];
        assert_eq!(tell(&mut feed, &cache, &mut router), parts);
        for block in 9_000..9_100 {
            cache.insert(hash(block + 1), block);
        }
        assert_eq!(tell(&mut feed, &cache, &mut router), [(false, 100)]);
        for block in 20_000..20_001 + EVENT_LOG as u32 {
            cache.insert(hash(block + 1), block);
        }
        assert!(tell(&mut feed, &cache, &mut router)[0].0);
        feed.start_over();
        assert!(tell(&mut feed, &cache, &mut router)[0].0);
        assert_eq!(router.known.len(), cache.len());
    }

    #[test]
    fn a_router_that_asks_amid_a_snapshot_gets_all_of_another() {
        let (mut cache, mut feed, mut router) = (PrefixCache::default(), KvFeed::default(), Follower::default());
        for block in 0..2_000 {
            cache.insert(hash(block + 1), block);
        }
        assert!(feed.next(|from| cache.events_since(from)).unwrap().snapshot);
        feed.start_over();
        assert_eq!(tell(&mut feed, &cache, &mut router), [(true, 1_024), (false, 976)]);
        assert_eq!(router.known.len(), 2_000);
    }
}
