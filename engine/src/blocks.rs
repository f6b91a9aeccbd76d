//! Owns who holds which KV block, and who waits for some. Knows ids and hashes only: no tensors, no bytes, no sequences.
//! The bytes of block `b` are `arena[b * block_bytes ..][.. block_bytes]`, see `executor.rs`; which blocks can be reused
//! is `prefix_cache.rs`.
//!
//! Invariant: each block is in exactly one state, so that empty + cached + leased = all:
//!
//! - *empty*: nobody holds it, and its bytes mean nothing;
//! - *cached*: nobody holds it, and its bytes are the KV of a known prefix;
//! - *leased*: at least one lease holds it. Several may, if it is cached; then none of them writes it.
//!
//! Empty and cached blocks are *free*: a reservation can have them, empty ones first.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tandem_proto::SequenceHash;
use tokio::sync::{Notify, oneshot};

use crate::error::EngineError;
use crate::prefix_cache::{CacheUpdate, PrefixCache};

/// All KV blocks of one arena. Clones are handles on the same pool.
#[derive(Clone)]
pub struct BlockPool(Arc<Inner>);

struct Inner {
    total: usize,
    block_tokens: usize,
    prefix_caching: bool,
    state: Mutex<State>,
    /// Blocks entered the cache. For one reader.
    published: Notify,
}

struct State {
    /// Ordered, so that leases are runs of adjacent blocks where they can be: a run is one transfer descriptor.
    empty: BTreeSet<u32>,
    /// How many leases hold each block.
    holders: Vec<u32>,
    cache: PrefixCache,
    /// By arrival. Only the first is ever served, so that a large request is not starved by small ones behind it.
    waiting: BTreeMap<u64, Waiter>,
    next_waiter: u64,
}

/// A reservation that waits for blocks.
struct Waiter {
    want: Want,
    lease: oneshot::Sender<KvLease>,
}

#[derive(Clone)]
struct Want {
    blocks: usize,
    /// Of the blocks that may be shared.
    prefix: Vec<SequenceHash>,
}

/// The tokens that a lease is for, as the cache knows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefix<'a> {
    /// Sequence hashes of the prompt's blocks; that of a last partial block is ignored.
    pub hashes: &'a [SequenceHash],
    /// Tokens of the prompt. The last one is always computed, since its logits give the next token: a prompt of
    /// `n` tokens shares `(n - 1) / block_tokens` blocks at most.
    pub tokens: usize,
}

impl BlockPool {
    /// A pool of the ids `0..total`, each block holding `block_tokens` tokens (at least one), with a prefix cache. An
    /// arena has fewer blocks than a `u32` has values; what exceeds them is left out.
    pub fn new(total: usize, block_tokens: usize) -> Self {
        Self::with_prefix_caching(total, block_tokens, true)
    }

    /// As [`BlockPool::new`]; without `prefix_caching` nothing is ever cached or shared.
    pub fn with_prefix_caching(total: usize, block_tokens: usize, prefix_caching: bool) -> Self {
        let ids = u32::try_from(total).unwrap_or(u32::MAX);
        let state = State {
            empty: (0..ids).collect(),
            holders: vec![0; ids as usize],
            cache: PrefixCache::default(),
            waiting: BTreeMap::new(),
            next_waiter: 0,
        };
        let block_tokens = block_tokens.max(1);
        let (total, state, published) = (ids as usize, Mutex::new(state), Notify::new());
        Self(Arc::new(Inner { total, block_tokens, prefix_caching, state, published }))
    }

    /// Blocks of the pool: empty, cached and leased.
    pub fn total(&self) -> usize {
        self.0.total
    }

    /// Blocks in no lease, empty and cached: what a reservation can have.
    pub fn free(&self) -> usize {
        self.0.state().free()
    }

    /// Blocks in no lease whose KV can be reused.
    pub fn cached(&self) -> usize {
        self.0.state().cache.idle()
    }

    /// Reservations that wait for blocks.
    pub fn waiting(&self) -> usize {
        self.0.state().waiting.len()
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.0.block_tokens
    }

    /// Blocks that hold the KV of `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.0.block_tokens)
    }

    /// What has entered and left the cache since event `from`, see [`CacheUpdate`].
    pub fn cache_events(&self, from: u64) -> CacheUpdate {
        self.0.state().cache.events_since(from)
    }

    /// Ready when blocks have entered the cache since this was last ready; for one reader of
    /// [`BlockPool::cache_events`]. What leaves the cache does not wake it: it can wait.
    pub async fn cache_grew(&self) {
        self.0.published.notified().await;
    }

    /// Takes `n` blocks now, behind everyone who already waits in [`BlockPool::reserve`].
    ///
    /// # Errors
    /// `Overloaded` when they are not free; `InvalidArgument` when the pool never has so many.
    pub fn try_reserve(&self, n: usize) -> Result<KvLease, EngineError> {
        self.try_reserve_prefix(n, Prefix::default())
    }

    /// As [`BlockPool::try_reserve`], sharing what is cached of `prefix`, see [`BlockPool::reserve_prefix`].
    ///
    /// # Errors
    /// As [`BlockPool::try_reserve`].
    pub fn try_reserve_prefix(&self, n: usize, prefix: Prefix<'_>) -> Result<KvLease, EngineError> {
        let want = self.want(n, prefix)?;
        let mut state = self.0.state();
        let taken = if state.waiting.is_empty() { state.take(&want) } else { None };
        let free = state.free();
        drop(state);
        taken
            .map(|taken| KvLease::new(&self.0, taken))
            .ok_or_else(|| EngineError::Overloaded(format!("{n} KV blocks wanted, {free} of {} free", self.total())))
    }

    /// Waits, first come first served, until `n` blocks are free, and takes them. Dropping the future takes none.
    ///
    /// # Errors
    /// `InvalidArgument`, at once, when the pool never has so many.
    pub async fn reserve(&self, n: usize) -> Result<KvLease, EngineError> {
        self.reserve_prefix(n, Prefix::default()).await
    }

    /// As [`BlockPool::reserve`], for a sequence that begins with `prefix`: the first blocks of the lease are shared
    /// with whoever computed them, as far as the cache has them when the lease is given. They hold the KV of
    /// [`KvLease::cached_tokens`] tokens and are not to be written. Those among them that others hold take no room.
    ///
    /// # Errors
    /// As [`BlockPool::reserve`].
    pub async fn reserve_prefix(&self, n: usize, prefix: Prefix<'_>) -> Result<KvLease, EngineError> {
        let want = self.want(n, prefix)?;
        let (id, lease) = {
            let mut state = self.0.state();
            if state.waiting.is_empty()
                && let Some(taken) = state.take(&want)
            {
                return Ok(KvLease::new(&self.0, taken));
            }
            let (sender, receiver) = oneshot::channel();
            let id = state.next_waiter;
            state.next_waiter += 1;
            state.waiting.insert(id, Waiter { want, lease: sender });
            (id, receiver)
        };
        // Dropped after `lease`: should both find this future cancelled, the lease's blocks are back by then.
        let _place = Place { pool: &self.0, id };
        lease.await.map_err(|_| EngineError::Stopped("the KV pool is closed".into()))
    }

    fn want(&self, n: usize, prefix: Prefix<'_>) -> Result<Want, EngineError> {
        if n > self.total() {
            let why = format!("{n} KV blocks wanted, the whole arena has {}", self.total());
            return Err(EngineError::InvalidArgument(why));
        }
        let shareable = if self.0.prefix_caching { prefix.tokens.saturating_sub(1) / self.0.block_tokens } else { 0 };
        let shareable = shareable.min(prefix.hashes.len()).min(n);
        Ok(Want { blocks: n, prefix: prefix.hashes[..shareable].to_vec() })
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockPool({} of {} free, {} of them cached)", self.free(), self.total(), self.cached())
    }
}

/// A place in the queue, left when dropped.
struct Place<'a> {
    pool: &'a Arc<Inner>,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let left = self.pool.state().waiting.remove(&self.id);
        if left.is_some() {
            // Who stood behind it may fit where it did not.
            self.pool.serve();
        }
    }
}

/// Blocks just taken: `shared` of them at the head are cached ones.
struct Taken {
    blocks: Vec<u32>,
    shared: usize,
    /// Names the shared ones.
    prefix: Option<SequenceHash>,
}

impl State {
    fn free(&self) -> usize {
        self.empty.len() + self.cache.idle()
    }

    /// Takes what is wanted, or nothing.
    fn take(&mut self, want: &Want) -> Option<Taken> {
        let mut blocks = self.cache.lookup(&want.prefix);
        let shared = blocks.len();
        let held = blocks.iter().filter(|&&block| self.holders[block as usize] > 0).count();
        if want.blocks - held > self.free() {
            return None;
        }
        // Held first, so that none of them is evicted to make room for the others.
        blocks.iter().for_each(|&block| self.hold(block));
        while self.empty.len() < want.blocks - shared {
            let evicted = self.cache.evict()?;
            self.empty.insert(evicted);
        }
        for _ in shared..want.blocks {
            let block = self.empty.pop_first()?;
            self.hold(block);
            blocks.push(block);
        }
        let prefix = shared.checked_sub(1).map(|last| want.prefix[last]);
        Some(Taken { blocks, shared, prefix })
    }

    fn hold(&mut self, block: u32) {
        self.holders[block as usize] += 1;
        self.cache.hold(block);
    }

    fn release(&mut self, block: u32) {
        let holders = &mut self.holders[block as usize];
        debug_assert!(*holders > 0, "block {block} is released twice");
        *holders -= 1;
        if *holders == 0 && !self.cache.release(block) {
            self.empty.insert(block);
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // No critical section runs foreign code: a poisoned lock still holds a good state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives blocks to those who wait, in order, as far as they go.
    fn serve(self: &Arc<Self>) {
        while let Some((waiter, taken)) = self.next_served() {
            // Outside the lock: a lease whose waiter has just left is dropped here, and returns its blocks.
            drop(waiter.lease.send(KvLease::new(self, taken)));
        }
    }

    fn next_served(&self) -> Option<(Waiter, Taken)> {
        let mut state = self.state();
        let (id, want) = state.waiting.first_key_value().map(|(&id, waiter)| (id, waiter.want.clone()))?;
        let taken = state.take(&want)?;
        Some((state.waiting.remove(&id)?, taken))
    }
}

/// Blocks that belong to one holder; dropping it returns them. Share it as `Arc<KvLease>` between the sequence and
/// a transfer in flight: the blocks are free again when the last of them lets go.
pub struct KvLease {
    blocks: Vec<u32>,
    shared: usize,
    prefix: Option<SequenceHash>,
    /// Blocks at the head that are not to be written: the shared ones, and those of this lease that are cached since.
    read_only: AtomicUsize,
    pool: Arc<Inner>,
}

impl KvLease {
    fn new(pool: &Arc<Inner>, Taken { blocks, shared, prefix }: Taken) -> Self {
        Self { blocks, shared, prefix, read_only: AtomicUsize::new(shared), pool: Arc::clone(pool) }
    }

    /// Block ids; token `i` of the sequence lives in `blocks()[i / block_tokens]`.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Tokens whose KV fits.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.pool.block_tokens
    }

    /// Tokens, counted from the first, whose KV was there when the lease was given.
    pub fn cached_tokens(&self) -> usize {
        self.shared * self.pool.block_tokens
    }

    /// Sequence hash of the last shared block: what the first [`KvLease::cached_tokens`] tokens must be.
    pub(crate) fn prefix(&self) -> Option<SequenceHash> {
        self.prefix
    }

    /// Tokens, counted from the first, whose blocks others may read: a step must not write there.
    pub fn read_only_tokens(&self) -> usize {
        self.read_only.load(Ordering::Acquire) * self.pool.block_tokens
    }

    /// Puts the blocks from index `first` on, full and computed, into the cache under `hashes`.
    pub(crate) fn publish(&self, first: usize, hashes: &[SequenceHash]) {
        if !self.pool.prefix_caching || hashes.is_empty() {
            return;
        }
        let mut state = self.pool.state();
        let blocks = self.blocks.iter().skip(first);
        let mut grew = false;
        for (&block, &hash) in blocks.zip(hashes) {
            grew |= state.cache.insert(hash, block);
        }
        self.read_only.fetch_max((first + hashes.len()).min(self.blocks.len()), Ordering::AcqRel);
        drop(state);
        if grew {
            self.pool.published.notify_one();
        }
    }

    /// Whether the blocks are ids of `pool`.
    pub fn is_of(&self, pool: &BlockPool) -> bool {
        Arc::ptr_eq(&self.pool, &pool.0)
    }
}

impl Drop for KvLease {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        self.blocks.iter().rev().for_each(|&block| state.release(block));
        let someone_waits = !state.waiting.is_empty();
        drop(state);
        if someone_waits {
            self.pool.serve();
        }
    }
}

impl fmt::Debug for KvLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvLease").field("blocks", &self.blocks).field("shared", &self.shared).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;
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
            sequence_hashes(0, &tokens, 16)
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
        ]
    }

    fn waiting(pool: &BlockPool, n: usize, hashes: Vec<SequenceHash>) -> Reserving {
        let pool = pool.clone();
        Box::pin(async move { pool.reserve_prefix(n, Prefix { hashes: &hashes, tokens: n * 16 }).await })
    }

    fn poll_all(waiters: &mut Vec<(Request, Reserving)>, leases: &mut Vec<(Request, KvLease)>) {
        let mut context = Context::from_waker(Waker::noop());
        waiters.retain_mut(|(request, waiter)| match waiter.as_mut().poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(lease) => {
                leases.extend(lease.ok().map(|lease| (*request, lease)));
                false
            }
        });
    }

    /// What each block holds, as far as its lease published it; `None` from when somebody may write it.
    type Contents = BTreeMap<u32, SequenceHash>;

    fn taken(contents: &mut Contents, (request, lease): &(Request, KvLease)) -> Result<(), TestCaseError> {
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
            for action in actions {
                let before = leases.len();
                match action {
                    Action::Try(request) => {
                        let prefix = request.hashes();
                        let prefix = Prefix { hashes: &prefix, tokens: request.blocks * 16 };
                        leases.extend(pool.try_reserve_prefix(request.blocks, prefix).map(|lease| (request, lease)));
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
                    _ => {}
                }
                // A lease is given when blocks come back, not when its waiter looks.
                poll_all(&mut waiters, &mut leases);
                for lease in leases.get(before..).unwrap_or_default() {
                    taken(&mut contents, lease)?;
                }
                let writable: Vec<u32> =
                    leases.iter().flat_map(|(_, lease)| &lease.blocks()[lease.read_only_tokens() / 16..]).copied().collect();
                let held: BTreeSet<u32> = leases.iter().flat_map(|(_, lease)| lease.blocks()).copied().collect();
                for block in &writable {
                    let holders = leases.iter().filter(|(_, lease)| lease.blocks().contains(block)).count();
                    prop_assert_eq!(holders, 1, "block {} is written by one and held by another", block);
                }
                prop_assert_eq!(held.len() + pool.free(), TOTAL);
                prop_assert!(pool.cached() <= pool.free());
            }
            drop((leases, waiters));
            prop_assert_eq!(pool.free(), TOTAL);
            prop_assert_eq!(pool.try_reserve(TOTAL).map(|lease| lease.blocks().len()), Ok(TOTAL));
        }
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
        let hashes = sequence_hashes(0, &[5; 64], 16);
        let first = pool.try_reserve(4).unwrap();
        let mut grew = Box::pin(pool.cache_grew());
        let mut context = Context::from_waker(Waker::noop());
        assert!(grew.as_mut().poll(&mut context).is_pending());
        first.publish(0, &hashes);
        assert!(grew.as_mut().poll(&mut context).is_ready());
        assert_eq!((first.cached_tokens(), first.read_only_tokens()), (0, 64));
        let shared = |tokens| {
            let lease = pool.try_reserve_prefix(4, Prefix { hashes: &hashes, tokens }).unwrap();
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
        let others: Vec<_> =
            (0..3).map(|_| pool.try_reserve_prefix(4, Prefix { hashes: &hashes, tokens: 64 }).unwrap()).collect();
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
        let hashes = sequence_hashes(0, &[5; 64], 16);
        pool.try_reserve(4).unwrap().publish(0, &hashes);
        let again = pool.try_reserve_prefix(4, Prefix { hashes: &hashes, tokens: 64 }).unwrap();
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
}
