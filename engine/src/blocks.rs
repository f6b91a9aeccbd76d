//! Owns who holds which KV block, and who waits for some. Knows ids and hashes only: no tensors, no bytes, no
//! sequences. The bytes of block `b` are `arena[b * block_bytes ..][.. block_bytes]`, see `executor.rs`; which blocks
//! can be reused is `prefix_cache.rs`.
//!
//! Invariant: each block is in exactly one state, so that empty + cached + leased = all:
//!
//! - *empty*: nobody holds it, and its bytes mean nothing;
//! - *cached*: nobody holds it, and its bytes are the KV of a known prefix;
//! - *leased*: at least one lease holds it. Several may, if it is cached; then none of them writes it.
//!
//! Empty and cached blocks are *free*: a reservation can have them, empty ones first.
//!
//! A lease grows block by block while its sequence runs ([`KvLease::grow`]). Growth goes ahead of reservations, which
//! leave some free blocks for it ([`BlockPool::keep_free`]): a sequence that runs ends sooner than one that waits.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tandem_proto::{CacheSalt, SequenceHash};
use tokio::sync::{oneshot, watch};

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
    /// Marked as changed when blocks enter the cache.
    published: watch::Sender<()>,
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
    /// Free blocks that reservations leave to those who run.
    kept: usize,
}

/// A reservation that waits for blocks.
struct Waiter {
    want: Want,
    lease: oneshot::Sender<KvLease>,
}

#[derive(Clone)]
struct Want {
    blocks: usize,
    cache_salt: CacheSalt,
    /// Of the blocks that may be shared.
    prefix: Vec<SequenceHash>,
}

/// The tokens that a lease is for, as the cache knows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefix<'a> {
    /// Of the key of the hashes (see [`tandem_proto::SequenceKey`]): blocks that the sequence computes are cached under
    /// it, too.
    pub cache_salt: CacheSalt,
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
            kept: 0,
        };
        let block_tokens = block_tokens.max(1);
        let (total, state, published) = (ids as usize, Mutex::new(state), watch::Sender::new(()));
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

    /// Changes whenever blocks have entered the cache, for readers of [`BlockPool::cache_events`]. What leaves it does
    /// not change this: it can wait.
    pub fn cache_growth(&self) -> watch::Receiver<()> {
        self.0.published.subscribe()
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
        let kept = state.kept;
        let taken = if state.waiting.is_empty() { state.take(&want, kept) } else { None };
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
            let kept = state.kept;
            if state.waiting.is_empty()
                && let Some(taken) = state.take(&want, kept)
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

    /// Takes `n` blocks for a sequence that had some before, ahead of whoever waits in [`BlockPool::reserve`], sharing
    /// what is cached of `prefix`. `None` when fewer than `spare` blocks would stay free.
    pub(crate) fn take_again(&self, n: usize, prefix: Prefix<'_>, spare: usize) -> Option<KvLease> {
        let want = self.want(n, prefix).ok()?;
        let taken = self.0.state().take(&want, spare)?;
        Some(KvLease::new(&self.0, taken))
    }

    /// Whether [`BlockPool::take_again`] would give blocks now.
    pub(crate) fn has_again(&self, n: usize, prefix: Prefix<'_>, spare: usize) -> bool {
        let want = self.want(n, prefix);
        want.is_ok_and(|want| self.0.state().fits(&want, spare).is_some())
    }

    /// A lease of no blocks, for a sequence of this salt.
    pub(crate) fn nothing(&self, cache_salt: CacheSalt) -> KvLease {
        KvLease::new(&self.0, Taken { blocks: Vec::new(), cache_salt, shared: 0, prefix: None })
    }

    /// From now on reservations leave `blocks` blocks free for leases that grow; as many as there are refuses them all.
    pub(crate) fn keep_free(&self, blocks: usize) {
        let mut state = self.0.state();
        let less = blocks < state.kept;
        state.kept = blocks;
        let someone_waits = !state.waiting.is_empty();
        drop(state);
        if less && someone_waits {
            self.0.serve();
        }
    }

    fn want(&self, n: usize, prefix: Prefix<'_>) -> Result<Want, EngineError> {
        if n > self.total() {
            let why = format!("{n} KV blocks wanted, the whole arena has {}", self.total());
            return Err(EngineError::InvalidArgument(why));
        }
        let shareable = if self.0.prefix_caching { prefix.tokens.saturating_sub(1) / self.0.block_tokens } else { 0 };
        let shareable = shareable.min(prefix.hashes.len()).min(n);
        Ok(Want { blocks: n, cache_salt: prefix.cache_salt, prefix: prefix.hashes[..shareable].to_vec() })
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
    cache_salt: CacheSalt,
    shared: usize,
    /// Names the shared ones.
    prefix: Option<SequenceHash>,
}

impl State {
    fn free(&self) -> usize {
        self.empty.len() + self.cache.idle()
    }

    /// The cached blocks at the head of what is wanted, if there is room for the rest and `kept` blocks stay free.
    fn fits(&self, want: &Want, kept: usize) -> Option<Vec<u32>> {
        let blocks = self.cache.lookup(&want.prefix);
        let held = blocks.iter().filter(|&&block| self.holders[block as usize] > 0).count();
        let needed = want.blocks - held;
        (needed == 0 || needed.saturating_add(kept) <= self.free()).then_some(blocks)
    }

    /// Takes what is wanted, or nothing.
    fn take(&mut self, want: &Want, kept: usize) -> Option<Taken> {
        let mut blocks = self.fits(want, kept)?;
        let shared = blocks.len();
        // Held first, so that none of them is evicted to make room for the others.
        blocks.iter().for_each(|&block| self.hold(block));
        // All evictions first: adjacent blocks make one run.
        while self.empty.len() < want.blocks - shared {
            let evicted = self.cache.evict()?;
            self.empty.insert(evicted);
        }
        for _ in shared..want.blocks {
            blocks.push(self.take_one()?);
        }
        let prefix = shared.checked_sub(1).map(|last| want.prefix[last]);
        Some(Taken { blocks, cache_salt: want.cache_salt, shared, prefix })
    }

    /// An empty block, or the least recently held cached one.
    fn take_one(&mut self) -> Option<u32> {
        let block = self.empty.pop_first().or_else(|| self.cache.evict())?;
        self.hold(block);
        Some(block)
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
        let kept = state.kept;
        let taken = state.take(&want, kept)?;
        Some((state.waiting.remove(&id)?, taken))
    }
}

/// Blocks that belong to one holder; dropping it returns them. Share it as `Arc<KvLease>` between the sequence and
/// a transfer in flight: the blocks are free again when the last of them lets go.
pub struct KvLease {
    blocks: Vec<u32>,
    cache_salt: CacheSalt,
    shared: usize,
    prefix: Option<SequenceHash>,
    /// Blocks at the head that are not to be written: the shared ones, and those of this lease that are cached since.
    read_only: AtomicUsize,
    pool: Arc<Inner>,
}

impl KvLease {
    fn new(pool: &Arc<Inner>, Taken { blocks, cache_salt, shared, prefix }: Taken) -> Self {
        Self { blocks, cache_salt, shared, prefix, read_only: AtomicUsize::new(shared), pool: Arc::clone(pool) }
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

    /// Of the [`Prefix`] that the lease was taken for: what is cached of its sequence is cached under this salt.
    pub(crate) fn cache_salt(&self) -> CacheSalt {
        self.cache_salt
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
            self.pool.published.send_replace(());
        }
    }

    /// One more block at the end of the lease, ahead of whoever waits in [`BlockPool::reserve`]. False when none is
    /// free. Where others hold the lease, too, they keep the one they have: the grown lease is another one, which holds
    /// the same blocks and one more.
    pub(crate) fn grow(lease: &mut Arc<Self>) -> bool {
        let pool = Arc::clone(&lease.pool);
        let mut state = pool.state();
        let Some(block) = state.take_one() else { return false };
        if let Some(lease) = Arc::get_mut(lease) {
            lease.blocks.push(block);
            return true;
        }
        lease.blocks.iter().for_each(|&block| state.hold(block));
        let blocks = lease.blocks.iter().copied().chain([block]).collect();
        // Before the old lease is let go of: should this have become its last holder, it takes the lock.
        drop(state);
        let grown = Self::new(
            &pool,
            Taken { blocks, cache_salt: lease.cache_salt, shared: lease.shared, prefix: lease.prefix },
        );
        grown.read_only.store(lease.read_only.load(Ordering::Acquire), Ordering::Release);
        *lease = Arc::new(grown);
        true
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
mod tests;
