//! The index beside a map of sets, under whatever nodes may say.
use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;

use super::hash_table::mix;
use super::*;

/// Chain `chain`'s block `position`: chains share their first `chain % 4` blocks with chain 0, as prompts do.
fn hash(chain: u64, position: u64) -> SequenceHash {
    let chain = if position < chain % 4 { 0 } else { chain };
    let number = chain * 1_000 + position;
    (u128::from(mix(number, 77)) << 64 | u128::from(number)).into()
}

fn prompt(chain: u64, blocks: u64) -> Vec<SequenceHash> {
    (0..blocks).map(|position| hash(chain, position)).collect()
}

fn stored(first: u64, snapshot: bool, hashes: &[SequenceHash]) -> CacheChanges {
    CacheChanges { first, snapshot, hashes: hashes.to_vec(), removed: Vec::new() }
}

fn removed(first: u64, hashes: &[SequenceHash]) -> CacheChanges {
    CacheChanges { removed: vec![u8::MAX; hashes.len().div_ceil(8)], ..stored(first, false, hashes) }
}

fn matches(index: &mut PrefixIndex, hashes: &[SequenceHash]) -> BTreeMap<u64, u32> {
    let found = index.matches(hashes);
    let by_session: BTreeMap<u64, u32> = found.iter().copied().collect();
    assert_eq!(by_session.len(), found.len(), "no node twice: {found:?}");
    by_session
}

/// The same, by what is easy to believe.
#[derive(Default)]
struct Naive {
    nodes: HashMap<u64, HashSet<SequenceHash>>,
    /// What each node's next message is numbered, and whether the router is to ignore it.
    streams: HashMap<u64, (u64, bool)>,
}

impl Naive {
    fn matches(&self, hashes: &[SequenceHash]) -> BTreeMap<u64, u32> {
        let leading = |held: &HashSet<_>| hashes.iter().take_while(|hash| held.contains(*hash)).count() as u32;
        self.nodes.iter().map(|(session, held)| (*session, leading(held))).filter(|(_, blocks)| *blocks > 0).collect()
    }

    fn blocks(&self) -> usize {
        self.nodes.values().flatten().collect::<HashSet<_>>().len()
    }

    fn apply(&mut self, session: u64, snapshot: bool, changes: &[(SequenceHash, bool)]) {
        let (_, stale) = self.streams.entry(session).or_default();
        *stale &= !snapshot;
        if *stale {
            return;
        }
        let held = self.nodes.entry(session).or_default();
        if snapshot {
            held.clear();
        }
        for (hash, removed) in changes {
            if *removed {
                held.remove(hash)
            } else {
                held.insert(*hash)
            };
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    /// Blocks of a chain come or go, from a position on.
    Change {
        node: u64,
        snapshot: bool,
        lost: bool,
        changes: Vec<(u64, u64, u64, bool)>,
    },
    Death(u64),
    Match(u64, u64),
}

fn action() -> impl Strategy<Value = Action> {
    let changes = prop::collection::vec((0u64..7, 0u64..12, 1u64..12, any::<bool>()), 0..5);
    prop_oneof![
        6 => (0u64..6, prop::bool::weighted(0.15), prop::bool::weighted(0.08), changes)
            .prop_map(|(node, snapshot, lost, changes)| Action::Change { node, snapshot, lost, changes }),
        1 => (0u64..6).prop_map(Action::Death),
        2 => (0u64..8, 0u64..24).prop_map(|(chain, blocks)| Action::Match(chain, blocks)),
    ]
}

/// Plays `actions` on both, and calls `check` with them after each.
fn play(
    index: &mut PrefixIndex,
    actions: Vec<Action>,
    check: impl Fn(&mut PrefixIndex, &Naive, &[SequenceHash]) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut naive = Naive::default();
    // A node that comes back has another session.
    let mut lives = [0u64; 6];
    for action in actions {
        match action {
            Action::Change { node, snapshot, lost, changes } => {
                let session = node + 100 * lives[node as usize];
                let (next, stale) = naive.streams.get(&session).copied().unwrap_or((0, true));
                let first_ever = !naive.streams.contains_key(&session);
                let changes: Vec<(SequenceHash, bool)> = changes
                    .into_iter()
                    .flat_map(|(chain, from, blocks, gone)| {
                        (from..from + blocks).map(move |position| (hash(chain, position), gone))
                    })
                    .collect();
                let mut events = stored(next, snapshot, &changes.iter().map(|(hash, _)| *hash).collect::<Vec<_>>());
                events.removed = vec![0; changes.len().div_ceil(8)];
                for (i, _) in changes.iter().enumerate().filter(|(_, (_, removed))| *removed) {
                    events.removed[i / 8] |= 1 << (i % 8);
                }
                events.first += u64::from(lost);
                let applied = index.apply(session, &events);
                let gap = !snapshot && (first_ever || (lost && !stale));
                prop_assert_eq!(applied.is_err(), gap, "{:?}", applied);
                naive.streams.insert(session, (events.first + changes.len() as u64, (stale || gap) && !snapshot));
                naive.apply(session, snapshot, &changes);
            }
            Action::Death(node) => {
                let session = node + 100 * lives[node as usize];
                index.remove(session);
                naive.nodes.remove(&session);
                naive.streams.remove(&session);
                lives[node as usize] += 1;
            }
            Action::Match(chain, blocks) => check(index, &naive, &prompt(chain, blocks))?,
        }
        for chain in 0..7 {
            check(index, &naive, &prompt(chain, 20))?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn knows_what_a_map_of_sets_knows(actions in prop::collection::vec(action(), 1..60), seed: u64) {
        let mut index = PrefixIndex::new(100_000, seed);
        play(&mut index, actions, |index, naive, prompt| {
            prop_assert_eq!(matches(index, prompt), naive.matches(prompt));
            prop_assert_eq!(index.totals().blocks, naive.blocks());
            for (session, held) in &naive.nodes {
                prop_assert_eq!(index.blocks_of(*session) as usize, held.len());
            }
            Ok(())
        })?;
        let sessions: Vec<u64> = index.nodes.keys().copied().collect();
        sessions.into_iter().for_each(|session| index.remove(session));
        index.sweep(10_000);
        let left = (index.entries.len(), index.orphans, index.sets.len(), index.totals());
        prop_assert_eq!((left.0, left.1, left.2, left.3.blocks, left.3.evicted), (0, 0, 0, 0, 0), "it leaks");
    }

    /// Beyond its limits it knows less, and nothing that is wrong.
    #[test]
    fn stays_within_its_limits(
        actions in prop::collection::vec(action(), 1..60), limit in 1usize..40, sets in 1usize..8, seed: u64,
    ) {
        let mut index = PrefixIndex::with_sets(limit, sets, seed);
        play(&mut index, actions, |index, naive, prompt| {
            let truth = naive.matches(prompt);
            for (session, blocks) in matches(index, prompt) {
                prop_assert!(truth.get(&session).is_some_and(|known| *known >= blocks), "{session} has less");
            }
            prop_assert!(index.entries.len() <= limit && index.sets.len() <= sets);
            prop_assert!(index.entries.slots() as usize <= limit);
            let held: u32 = index.streams.iter().map(|stream| stream.hashes).sum();
            let of_sets: u32 = (0..index.entries.slots())
                .filter_map(|id| index.entries.at(id))
                .map(|entry| members(index.sets.bits(entry.set)).count() as u32)
                .sum();
            prop_assert_eq!(held, of_sets, "counts agree with what is there");
            Ok(())
        })?;
    }

    /// Whatever a node sends, there is no panic, and no growth beyond the limits.
    #[test]
    fn takes_any_message(
        messages in prop::collection::vec(
            (
                0u64..5, prop_oneof![0u64..20, any::<u64>()], any::<bool>(),
                prop::collection::vec(prop_oneof![0u128..50, any::<u128>()].prop_map(SequenceHash::from), 0..60),
                prop::collection::vec(any::<u8>(), 0..12), prop::bool::weighted(0.1),
            ),
            0..60,
        ),
    ) {
        let mut index = PrefixIndex::with_sets(64, 16, 1);
        for (session, first, snapshot, hashes, removed, dies) in messages {
            let _ = index.apply(session, &CacheChanges { first, snapshot, hashes: hashes.clone(), removed });
            let (totals, longest) = (index.totals(), hashes.len() as u32);
            prop_assert!(totals.blocks <= 64 && index.entries.slots() <= 64 && index.sets.len() <= 16);
            prop_assert!(matches(&mut index, &hashes).values().all(|blocks| *blocks <= longest));
            if dies { index.remove(session) }
            prop_assert!(index.nodes.len() <= 5 && index.streams.len() <= 5);
        }
    }
}

#[test]
fn a_hole_ends_the_run_of_its_node_alone() {
    let mut index = PrefixIndex::new(1_000, 3);
    let hashes = prompt(5, 40);
    index.apply(1, &stored(0, true, &hashes)).unwrap();
    index.apply(2, &stored(0, true, &hashes)).unwrap();
    index.apply(3, &stored(0, true, &hashes[1..])).unwrap();
    index.apply(1, &removed(40, &hashes[17..18])).unwrap();
    assert_eq!(matches(&mut index, &hashes), BTreeMap::from([(1, 17), (2, 40)]));
    index.apply(1, &stored(41, false, &hashes[17..18])).unwrap();
    assert_eq!(matches(&mut index, &hashes), BTreeMap::from([(1, 40), (2, 40)]));
    assert_eq!(index.matches(&[]), []);
}

#[test]
fn a_gap_is_told_once_and_forgets_nothing_until_the_snapshot() {
    let mut index = PrefixIndex::new(1_000, 3);
    let (old, new) = (prompt(0, 3), prompt(4, 3));
    assert_eq!(index.apply(1, &stored(5, false, &old)), Err(Gap { expected: None, found: 5 }));
    assert_eq!(index.apply(1, &stored(8, false, &old)), Ok(()));
    assert_eq!(index.blocks_of(1), 0, "changes to something unknown");
    index.apply(1, &stored(0, true, &old)).unwrap();
    let gap = index.apply(1, &stored(4, false, &new)).unwrap_err();
    assert_eq!(gap, Gap { expected: Some(3), found: 4 });
    assert_eq!(gap.to_string(), "its cache's changes go on at number 4, expected was 3");
    assert_eq!(index.apply(1, &removed(7, &old)), Ok(()));
    assert_eq!(matches(&mut index, &old), BTreeMap::from([(1, 3)]));
    index.apply(1, &stored(10, true, &new)).unwrap();
    assert_eq!((matches(&mut index, &old).len(), matches(&mut index, &new)), (0, BTreeMap::from([(1, 3)])));
    assert_eq!(index.apply(1, &stored(13, false, &old)), Ok(()));
    assert_eq!((index.totals().gaps, index.blocks_of(1)), (2, 6));
}

#[test]
fn the_least_recently_used_hashes_are_forgotten_from_their_end() {
    let mut index = PrefixIndex::new(8, 3);
    let [used, idle, new] = [4, 8, 12].map(|chain| prompt(chain, 4));
    index.apply(1, &stored(0, true, &used)).unwrap();
    index.apply(1, &stored(4, false, &idle)).unwrap();
    assert_eq!(index.matches(&used), [(1, 4)]);
    index.apply(1, &stored(8, false, &new[..2])).unwrap();
    assert_eq!((index.matches(&idle), index.matches(&used)), (vec![(1, 2)], vec![(1, 4)]));
    assert_eq!(index.totals(), IndexTotals { blocks: 8, limit: 8, evicted: 2, gaps: 0 });
    index.apply(1, &removed(10, &idle)).unwrap();
    assert_eq!((index.totals().blocks, index.blocks_of(1)), (6, 6), "what is forgotten is removed in vain");
    index.apply(1, &stored(14, false, &prompt(16, 20))).unwrap();
    assert_eq!((index.totals().blocks, index.blocks_of(1)), (8, 8));
}

#[test]
fn nodes_beyond_the_most_are_not_indexed_until_others_leave() {
    let mut index = PrefixIndex::new(100, 3);
    let hashes = prompt(0, 2);
    for session in 0..=MOST_NODES as u64 {
        index.apply(session, &stored(0, true, &hashes)).unwrap();
    }
    assert_eq!(index.matches(&hashes).len(), MOST_NODES);
    index.remove(7);
    let last = MOST_NODES as u64;
    index.apply(last, &stored(0, true, &hashes)).unwrap();
    let found = matches(&mut index, &hashes);
    assert_eq!((found.len(), found.get(&7), found.get(&last)), (MOST_NODES, None, Some(&2)));
}

#[test]
fn what_a_dead_node_held_is_found_and_swept() {
    let mut index = PrefixIndex::new(100_000, 3);
    let hashes = prompt(4, 10_000);
    index.apply(1, &stored(0, true, &hashes)).unwrap();
    index.apply(2, &stored(0, true, &hashes[..100])).unwrap();
    index.remove(1);
    assert_eq!((index.totals().blocks, index.entries.len()), (100, 10_000));
    assert_eq!(index.matches(&hashes), [(2, 100)]);
    for message in 0.. {
        index.apply(2, &stored(100, false, &[])).unwrap();
        if index.entries.len() == 100 {
            assert_eq!(message, 10_000 / SWEEP as u64);
            break;
        }
    }
    assert_eq!(index.matches(&hashes), [(2, 100)]);
}
