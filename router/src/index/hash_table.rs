//! An open-addressing hash table, from hashes of blocks to entry numbers. Knows neither entries nor nodes.
//!
//! It is its own and not std's map for two reasons. A look-up reads one cache line here, and std's map two, and a
//! prompt of 1,000 blocks is 1,000 look-ups in a table that is far larger than a cache. And it grows in [`SHARDS`]
//! parts, each at its own time: the whole table at once would stand still for tens of milliseconds, under the router's
//! one lock.
//!
//! A place holds 32 bits of the (mixed) hash beside the number, so that another entry is read in vain once in 2³²
//! times, and a part grows without reading any. Deleting shifts the places behind it back (Knuth 6.4, algorithm R): no
//! tombstones.
use tandem_proto::SequenceHash;

const SHARDS: usize = 256;
const FEWEST_PLACES: usize = 16;
const EMPTY: u64 = u64::MAX;

/// See the head of this file. Entry numbers are below `u32::MAX`.
#[derive(Debug)]
pub(super) struct HashTable {
    shards: Vec<Shard>,
}

#[derive(Clone, Debug, Default)]
struct Shard {
    /// Upper half: tag; lower half: entry. A power of two of them, or none.
    places: Vec<u64>,
    used: usize,
}

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Where a hash belongs, as `mix` below: both halves spread over all bits, by a number that nobody outside this process
/// knows. Whoever chooses prompts cannot choose where they end up. A node that makes hashes up can make pairs of one
/// place, and no more.
pub(super) fn place_of(hash: SequenceHash, seed: u64) -> u64 {
    let hash = u128::from(hash);
    folded(hash as u64 ^ seed, (hash >> 64) as u64 ^ seed ^ ODD)
}

/// The same for a number.
pub(super) fn mix(number: u64, seed: u64) -> u64 {
    folded(number ^ seed, ODD)
}

/// Folded multiplication, as wyhash does it.
fn folded(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

impl HashTable {
    pub fn new() -> Self {
        Self { shards: vec![Shard::default(); SHARDS] }
    }

    /// What stands where the search for `mixed` begins. Who searches for many reads these first: nothing in it depends
    /// on what it reads, so that the reads go on beside each other. In the search each guess about a place that is
    /// still on its way is a chance to wait for it alone.
    pub fn first(&self, mixed: u64) -> u64 {
        let Shard { places, .. } = &self.shards[shard(mixed)];
        places.get(mixed as u32 as usize & places.len().wrapping_sub(1)).copied().unwrap_or(EMPTY)
    }

    /// The entry under `mixed` for which `is` holds: several hashes may have one tag.
    pub fn find(&self, mixed: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.find_from(self.first(mixed), mixed, is)
    }

    /// The same, where [`Self::first`] is known.
    pub fn find_from(&self, first: u64, mixed: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let (mut place, mut at) = (first, mixed as u32 as usize);
        while place != EMPTY {
            if tag(place) == mixed as u32 && is(place as u32) {
                return Some(place as u32);
            }
            let Shard { places, .. } = &self.shards[shard(mixed)];
            at = (at + 1) & (places.len() - 1);
            place = places[at];
        }
        None
    }

    /// Adds an entry that is not there.
    pub fn insert(&mut self, mixed: u64, entry: u32) {
        let shard = &mut self.shards[shard(mixed)];
        if shard.used * 4 >= shard.places.len() * 3 {
            let larger = vec![EMPTY; (shard.places.len() * 2).max(FEWEST_PLACES)];
            let old = std::mem::replace(&mut shard.places, larger);
            old.into_iter().filter(|place| *place != EMPTY).for_each(|place| put(&mut shard.places, place));
        }
        put(&mut shard.places, u64::from(mixed as u32) << 32 | u64::from(entry));
        shard.used += 1;
    }

    /// Takes an entry out.
    pub fn remove(&mut self, mixed: u64, entry: u32) {
        let Shard { places, used } = &mut self.shards[shard(mixed)];
        let Some(mask) = places.len().checked_sub(1) else { return };
        let wanted = u64::from(mixed as u32) << 32 | u64::from(entry);
        let mut hole = mixed as u32 as usize & mask;
        while places[hole] != wanted {
            if places[hole] == EMPTY {
                return;
            }
            hole = (hole + 1) & mask;
        }
        *used -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let place = places[at];
            if place == EMPTY {
                break;
            }
            // How far each is from where it would stand: one that may stand at the hole moves there.
            let home = tag(place) as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                places[hole] = place;
                hole = at;
            }
        }
        places[hole] = EMPTY;
    }
}

fn shard(mixed: u64) -> usize {
    (mixed >> 56) as usize
}

fn tag(place: u64) -> u32 {
    (place >> 32) as u32
}

fn put(places: &mut [u64], place: u64) {
    let mask = places.len() - 1;
    let mut at = tag(place) as usize & mask;
    while places[at] != EMPTY {
        at = (at + 1) & mask;
    }
    places[at] = place;
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few shards and few tags, so that runs are long, wrap around, and have holes.
        #[test]
        fn is_a_map(changes in prop::collection::vec((0u64..2, 0u64..40, 0u64..3, any::<bool>()), 0..400)) {
            let (mut table, mut model) = (HashTable::new(), HashMap::<u64, u32>::new());
            let mut hashes = Vec::new();
            for (shard, tag, middle, store) in changes {
                let mixed = shard << 56 | middle << 40 | (tag.wrapping_mul(13) % 48);
                let found = table.find(mixed, |entry| hashes[entry as usize] == mixed);
                prop_assert_eq!(found, model.get(&mixed).copied());
                match found {
                    None if store => {
                        let entry = u32::try_from(hashes.len()).unwrap();
                        hashes.push(mixed);
                        table.insert(mixed, entry);
                        model.insert(mixed, entry);
                    }
                    Some(entry) if !store => {
                        table.remove(mixed, entry);
                        model.remove(&mixed);
                    }
                    _ => {}
                }
            }
            for (mixed, entry) in &model {
                prop_assert_eq!(table.find(*mixed, |found| hashes[found as usize] == *mixed), Some(*entry));
            }
            prop_assert_eq!(table.shards.iter().map(|shard| shard.used).sum::<usize>(), model.len());
        }
    }

    #[test]
    fn removing_what_is_not_there_changes_nothing() {
        let mut table = HashTable::new();
        table.remove(7, 1);
        table.insert(7, 1);
        table.remove(7, 2);
        assert_eq!(table.find(7, |_| true), Some(1));
    }
}
