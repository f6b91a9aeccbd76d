//! What words became, remembered: of a prompt nearly all were seen before. Two generations bound it. A word that is
//! asked for is in the young one; when that is full it is the old one, and what was not asked for since goes. So a word
//! is dropped only when a generation of new ones came, from any client, and none asked for it meanwhile.
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::{PoisonError, RwLock};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Words of a generation. Both take some 4 MiB.
const MOST_WORDS: usize = 1 << 14;

/// See the head of this file. For many to ask and to teach.
#[derive(Default)]
pub(super) struct Words(RwLock<Generations>);

#[derive(Default)]
struct Generations {
    young: Generation,
    old: Generation,
}

type Generation = HashMap<Box<str>, Box<[u32]>, Seed>;

impl Words {
    /// Appends the ids of a word; whether it is known.
    pub fn append(&self, word: &str, ids: &mut Vec<u32>) -> bool {
        {
            // A panic of a holder leaves no half a word behind.
            let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(found) = known.young.get(word) {
                ids.extend_from_slice(found);
                return true;
            }
            let Some(found) = known.old.get(word) else { return false };
            ids.extend_from_slice(found);
        }
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // Somebody else may have been first, or it is gone by now.
        let again = known.old.remove_entry(word);
        let gone = again.and_then(|(word, ids)| known.insert(word, ids));
        drop(known);
        drop(gone);
        true
    }

    /// Remembers a word and its ids.
    pub fn learn(&self, word: &str, ids: &[u32]) {
        let gone = self.0.write().unwrap_or_else(PoisonError::into_inner).insert(word.into(), ids.into());
        // Not under the lock: it is long.
        drop(gone);
    }
}

impl Generations {
    /// Returns the words that are forgotten for it, if any.
    fn insert(&mut self, word: Box<str>, ids: Box<[u32]>) -> Option<Generation> {
        let full = self.young.len() >= MOST_WORDS;
        let gone = full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.young)));
        self.young.insert(word, ids);
        gone
    }
}

/// Hashes words faster than the standard library does: of a prompt every word is looked up. Nobody outside knows the
/// seed.
#[derive(Clone)]
struct Seed(u64);

impl Default for Seed {
    fn default() -> Self {
        Self(rand::random())
    }
}

impl BuildHasher for Seed {
    type Hasher = Hash;

    fn build_hasher(&self) -> Hash {
        Hash(self.0)
    }
}

struct Hash(u64);

impl Hasher for Hash {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    /// What ends a text, where several are hashed. Here it is one.
    fn write_u8(&mut self, _: u8) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
impl Words {
    /// All of them, in order.
    pub fn all(&self) -> Vec<String> {
        let known = self.0.read().unwrap();
        let mut words: Vec<String> = known.young.keys().chain(known.old.keys()).map(ToString::to_string).collect();
        words.sort_unstable();
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knows(words: &Words, word: &str) -> bool {
        let mut ids = vec![1];
        let known = words.append(word, &mut ids);
        assert_eq!(ids, if known { vec![1, 7, 8] } else { vec![1] });
        known
    }

    #[test]
    fn who_is_asked_for_stays_and_all_are_bounded() {
        let words = Words::default();
        words.learn("asked", &[7, 8]);
        words.learn("once", &[7, 8]);
        for number in 0..5 * MOST_WORDS {
            if number % (MOST_WORDS / 2) == 0 {
                assert!(knows(&words, "asked"), "after {number} others");
            }
            words.learn(&number.to_string(), &[7, 8]);
            assert!(words.0.read().unwrap().young.len() <= MOST_WORDS);
        }
        assert!(!knows(&words, "once") && !knows(&words, "0"));
        assert!(knows(&words, &(5 * MOST_WORDS - 1).to_string()));
        let all = words.all();
        assert!(all.len() <= 2 * MOST_WORDS, "{}", all.len());
        assert_eq!(all.iter().filter(|word| *word == "asked").count(), 1, "moved, not copied");
    }
}
