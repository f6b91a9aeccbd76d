//! Hashes of blocks → entry numbers: hashbrown's table, in [`SHARDS`] parts. Each part grows at its own time: the whole
//! table at once would stand still for tens of milliseconds, under the router's one lock. Knows neither entries nor
//! nodes.
//!
//! A place holds 32 bits of the (mixed) hash beside the number, so that another entry is read in vain once in 2³²
//! times, and a part grows without reading any.
use tandem_proto::SequenceHash;

const SHARDS: usize = 256;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct HashTable {
    shards: Vec<Shard>,
}

/// Tags and entries.
type Shard = hashbrown::HashTable<(u32, u32)>;

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
        Self { shards: vec![Shard::new(); SHARDS] }
    }

    /// The entry under `mixed` for which `is` holds: several hashes may have one tag.
    pub fn find(&self, mixed: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let wanted = tag(mixed);
        let found = self.shards[shard(mixed)].find(spread(wanted), |(tag, entry)| *tag == wanted && is(*entry));
        found.map(|(_, entry)| *entry)
    }

    /// Adds an entry that is not there.
    pub fn insert(&mut self, mixed: u64, entry: u32) {
        let tag = tag(mixed);
        self.shards[shard(mixed)].insert_unique(spread(tag), (tag, entry), |(tag, _)| spread(*tag));
    }

    /// Takes an entry out.
    pub fn remove(&mut self, mixed: u64, entry: u32) {
        let wanted = (tag(mixed), entry);
        if let Ok(found) = self.shards[shard(mixed)].find_entry(spread(wanted.0), |place| *place == wanted) {
            found.remove();
        }
    }
}

fn shard(mixed: u64) -> usize {
    (mixed >> 56) as usize
}

fn tag(mixed: u64) -> u32 {
    mixed as u32
}

/// Over all bits: a table looks at the highest and at the lowest.
fn spread(tag: u32) -> u64 {
    u64::from(tag).wrapping_mul(ODD)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few shards and few tags, so that many have the same.
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
            prop_assert_eq!(table.shards.iter().map(Shard::len).sum::<usize>(), model.len());
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
