//! Pool and leases under every sequence of actions: no block is lost, and none is written by two.
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;
use tandem_proto::SequenceKey;
use tandem_proto::hash::sequence_hashes;

use super::*;

const TOTAL: usize = 12;
type Reserving = Pin<Box<dyn Future<Output = Result<KvLease, EngineError>>>>;

/// Prompts share a beginning when their first numbers are equal: `family` repeated, then `member`.
#[derive(Clone, Copy, Debug)]
struct Request {
    blocks: usize,
    family: u32,
    member: u32,
}

impl Request {
    fn hashes(&self) -> Vec<SequenceHash> {
        let half = self.blocks * 16 / 2;
        let tokens: Vec<u32> =
            (0..self.blocks * 16).map(|i| if i < half { self.family } else { self.member }).collect();
        sequence_hashes(SequenceKey::new(0, CacheSalt::NONE), &tokens, 16)
    }
}

#[derive(Clone, Debug)]
enum Action {
    Try(Request),
    Wait(Request),
    PollAll,
    CancelWait(usize),
    Publish(usize, usize),
    Release(usize),
    /// Of one lease; whether a step in flight holds it as well.
    Grow(usize, bool),
    EndStep,
    Keep(usize),
    /// A preempted sequence comes back, leaving so many blocks.
    Again(Request, usize),
}

fn action() -> impl Strategy<Value = Action> {
    let request =
        || (0usize..14, 0u32..2, 0u32..3).prop_map(|(blocks, family, member)| Request { blocks, family, member });
    prop_oneof![
        request().prop_map(Action::Try),
        request().prop_map(Action::Wait),
        Just(Action::PollAll),
        (0usize..8).prop_map(Action::CancelWait),
        (0usize..8, 0usize..14).prop_map(|(lease, blocks)| Action::Publish(lease, blocks)),
        (0usize..8).prop_map(Action::Release),
        (0usize..8, any::<bool>()).prop_map(|(lease, shared)| Action::Grow(lease, shared)),
        Just(Action::EndStep),
        (0usize..TOTAL + 1).prop_map(Action::Keep),
        (request(), 0usize..4).prop_map(|(request, spare)| Action::Again(request, spare)),
    ]
}

fn waiting(pool: &BlockPool, n: usize, hashes: Vec<SequenceHash>) -> Reserving {
    let pool = pool.clone();
    Box::pin(async move {
        pool.reserve_prefix(n, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: n * 16 }).await
    })
}

fn poll_all(waiters: &mut Vec<(Request, Reserving)>, leases: &mut Vec<(Request, Arc<KvLease>)>) {
    let mut context = Context::from_waker(Waker::noop());
    waiters.retain_mut(|(request, waiter)| match waiter.as_mut().poll(&mut context) {
        Poll::Pending => true,
        Poll::Ready(lease) => {
            leases.extend(lease.ok().map(|lease| (*request, Arc::new(lease))));
            false
        }
    });
}

/// What each block holds, as far as its lease published it; `None` from when somebody may write it.
type Contents = BTreeMap<u32, SequenceHash>;

fn taken(contents: &mut Contents, (request, lease): &(Request, Arc<KvLease>)) -> Result<(), TestCaseError> {
    let (shared, hashes) = (lease.cached_tokens() / 16, request.hashes());
    prop_assert!(shared < request.blocks.max(1), "the last token has to be computed");
    for (block, hash) in lease.blocks()[..shared].iter().zip(&hashes) {
        prop_assert_eq!(contents.get(block), Some(hash), "a shared block holds something else");
    }
    contents.retain(|block, _| !lease.blocks()[shared..].contains(block));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn no_block_is_lost_or_written_by_two(actions in prop::collection::vec(action(), 0..160)) {
        let pool = BlockPool::new(TOTAL, 16);
        let (mut leases, mut waiters, mut contents) = (Vec::new(), Vec::new(), Contents::new());
        // Those that a step in flight holds beside their sequences.
        let mut steps: Vec<Arc<KvLease>> = Vec::new();
        let mut kept = 0;
        for action in actions {
            let (before, free) = (leases.len(), pool.free());
            match action {
                Action::Try(request) => {
                    let prefix = request.hashes();
                    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &prefix, tokens: request.blocks * 16 };
                    let lease = pool.try_reserve_prefix(request.blocks, prefix);
                    leases.extend(lease.map(|lease| (request, Arc::new(lease))));
                    prop_assert!(pool.free() == free || pool.free() >= kept, "a reservation took what is kept");
                }
                Action::Again(request, spare) => {
                    let prefix = request.hashes();
                    let prefix = Prefix { cache_salt: CacheSalt::NONE, hashes: &prefix, tokens: request.blocks * 16 };
                    let has = pool.has_again(request.blocks, prefix, spare);
                    let lease = pool.take_again(request.blocks, prefix, spare);
                    prop_assert_eq!(has, lease.is_some());
                    prop_assert!(pool.free() == free || pool.free() >= spare);
                    leases.extend(lease.map(|lease| (request, Arc::new(lease))));
                }
                Action::Wait(request) => waiters.push((request, waiting(&pool, request.blocks, request.hashes()))),
                Action::CancelWait(i) if i < waiters.len() => drop(waiters.remove(i)),
                Action::Publish(i, blocks) if i < leases.len() => {
                    let (request, lease) = &leases[i];
                    let (first, hashes) = (lease.read_only_tokens() / 16, request.hashes());
                    let hashes = hashes.get(first..blocks.min(request.blocks)).unwrap_or_default();
                    lease.publish(first, hashes);
                    contents.extend(lease.blocks()[first..].iter().copied().zip(hashes.iter().copied()));
                }
                Action::Release(i) if i < leases.len() => drop(leases.swap_remove(i)),
                Action::Grow(i, shared) if i < leases.len() => {
                    let lease = &mut leases[i].1;
                    steps.extend(shared.then(|| Arc::clone(lease)));
                    let had = (lease.blocks().to_vec(), lease.cached_tokens(), lease.read_only_tokens());
                    let grew = KvLease::grow(lease);
                    prop_assert_eq!(grew, free > 0, "growth takes whatever is free");
                    if grew {
                        contents.remove(&lease.blocks()[had.0.len()]);
                        prop_assert_eq!(pool.free(), free - 1);
                    }
                    let kept = &lease.blocks()[..had.0.len()];
                    prop_assert_eq!((kept.to_vec(), lease.cached_tokens(), lease.read_only_tokens()), had);
                }
                Action::EndStep => steps.clear(),
                Action::Keep(blocks) => {
                    pool.keep_free(blocks);
                    kept = blocks;
                }
                _ => {}
            }
            // A lease is given when blocks come back, not when its waiter looks.
            poll_all(&mut waiters, &mut leases);
            for lease in leases.get(before..).unwrap_or_default() {
                taken(&mut contents, lease)?;
            }
            let writable: Vec<u32> =
                leases.iter().flat_map(|(_, lease)| &lease.blocks()[lease.read_only_tokens() / 16..]).copied().collect();
            let leased = leases.iter().map(|(_, lease)| lease).chain(&steps);
            let held: BTreeSet<u32> = leased.flat_map(|lease| lease.blocks()).copied().collect();
            for block in &writable {
                let holders = leases.iter().filter(|(_, lease)| lease.blocks().contains(block)).count();
                prop_assert_eq!(holders, 1, "block {} is written by one and held by another", block);
            }
            prop_assert_eq!(held.len() + pool.free(), TOTAL);
            prop_assert!(pool.cached() <= pool.free());
        }
        drop((leases, waiters, steps));
        pool.keep_free(0);
        prop_assert_eq!(pool.free(), TOTAL);
        prop_assert_eq!(pool.try_reserve(TOTAL).map(|lease| lease.blocks().len()), Ok(TOTAL));
    }
}

#[test]
fn growth_goes_before_reservations_which_leave_room_for_it() {
    let pool = BlockPool::new(4, 16);
    let request = Request { blocks: 2, family: 0, member: 0 };
    let mut running = Arc::new(pool.try_reserve(1).unwrap());
    pool.keep_free(2);
    let (mut waiters, mut leases) = (vec![(request, waiting(&pool, 2, Vec::new()))], Vec::new());
    poll_all(&mut waiters, &mut leases);
    assert_eq!((pool.free(), pool.waiting()), (3, 1), "one block would stay");
    assert!(KvLease::grow(&mut running), "past the one who waits");
    pool.keep_free(0);
    poll_all(&mut waiters, &mut leases);
    assert_eq!((pool.free(), leases.len()), (0, 1), "served as soon as less is kept");
    assert!(!KvLease::grow(&mut running));
    assert_eq!(running.blocks(), [0, 1]);
}

#[test]
fn a_large_reservation_is_not_overtaken() {
    let pool = BlockPool::new(4, 16);
    let request = Request { blocks: 4, family: 0, member: 0 };
    let held = pool.try_reserve(3);
    let (mut waiters, mut leases) = (vec![(request, waiting(&pool, 4, Vec::new()))], Vec::new());
    poll_all(&mut waiters, &mut leases);
    assert_eq!(pool.waiting(), 1);
    assert!(matches!(pool.try_reserve(1), Err(EngineError::Overloaded(_))), "overtook the waiter");
    drop(held);
    assert!(matches!(pool.try_reserve(1), Err(EngineError::Overloaded(_))), "overtook the waiter");
    poll_all(&mut waiters, &mut leases);
    assert_eq!(leases[0].1.blocks(), [0, 1, 2, 3]);
}

#[test]
fn a_waiter_that_leaves_gives_way_whatever_it_was_given() {
    let pool = BlockPool::new(4, 16);
    let request = Request { blocks: 4, family: 0, member: 0 };
    for served in [false, true] {
        let held = pool.try_reserve(3);
        let (mut waiters, mut leases) = (Vec::new(), Vec::new());
        for blocks in [4, 1] {
            waiters.push((request, waiting(&pool, blocks, Vec::new())));
            poll_all(&mut waiters, &mut leases);
        }
        let held = held.ok().filter(|_| !served);
        drop(waiters.remove(0));
        poll_all(&mut waiters, &mut leases);
        assert_eq!(leases.len(), 1, "the small one behind it is served");
        drop((held, leases));
        assert_eq!(pool.free(), 4);
    }
}

#[test]
fn blocks_are_shared_up_to_the_last_token() {
    let pool = BlockPool::new(8, 16);
    let hashes = sequence_hashes(SequenceKey::new(0, CacheSalt::NONE), &[5; 64], 16);
    let first = pool.try_reserve(4).unwrap();
    let readers = [pool.cache_growth(), pool.cache_growth()];
    let grew = || readers.each_ref().map(|reader| reader.has_changed().unwrap());
    assert_eq!(grew(), [false, false]);
    first.publish(0, &hashes);
    assert_eq!(grew(), [true, true]);
    assert_eq!((first.cached_tokens(), first.read_only_tokens()), (0, 64));
    let shared = |tokens| {
        let lease =
            pool.try_reserve_prefix(4, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens }).unwrap();
        (
            lease.cached_tokens(),
            lease.blocks()[..lease.cached_tokens() / 16] == first.blocks()[..lease.cached_tokens() / 16],
        )
    };
    assert_eq!(
        [shared(64), shared(65), shared(49), shared(16), shared(1)],
        [(48, true), (64, true), (48, true), (0, true), (0, true)]
    );
    // While the first lease lives, its blocks take no room: three such requests fit the four blocks left.
    let others: Vec<_> = (0..3)
        .map(|_| {
            pool.try_reserve_prefix(4, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: 64 }).unwrap()
        })
        .collect();
    assert_eq!((pool.free(), others.len()), (1, 3));
    drop((first, others));
    assert_eq!((pool.free(), pool.cached()), (8, 4));
    let all = pool.try_reserve(8).unwrap();
    assert_eq!(all.blocks(), [0, 1, 2, 3, 4, 5, 6, 7], "cached blocks are evicted when there is need");
    drop(all);
    assert_eq!(pool.cached(), 0);
}

#[test]
fn nothing_is_cached_when_it_is_off() {
    let pool = BlockPool::with_prefix_caching(8, 16, false);
    let hashes = sequence_hashes(SequenceKey::new(0, CacheSalt::NONE), &[5; 64], 16);
    pool.try_reserve(4).unwrap().publish(0, &hashes);
    let again =
        pool.try_reserve_prefix(4, Prefix { cache_salt: CacheSalt::NONE, hashes: &hashes, tokens: 64 }).unwrap();
    assert_eq!((again.cached_tokens(), pool.cached()), (0, 0));
}

#[test]
fn what_never_fits_is_refused_at_once() {
    let pool = BlockPool::new(4, 16);
    assert!(matches!(pool.try_reserve(5), Err(EngineError::InvalidArgument(_))));
    let poll = waiting(&pool, 5, Vec::new()).as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(poll, Poll::Ready(Err(EngineError::InvalidArgument(_)))));
    assert_eq!((pool.blocks_for(0), pool.blocks_for(16), pool.blocks_for(17)), (0, 1, 2));
}
