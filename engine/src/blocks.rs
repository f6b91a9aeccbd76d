//! Owns who holds which KV block. Knows ids only: no tensors, no bytes, no sequences. The bytes of block `b` are
//! `arena[b * block_bytes ..][.. block_bytes]`, see `executor.rs`.
//!
//! Invariant: the ids in the free set are at least as many as the semaphore's permits, because a lease takes its
//! permits before its ids and gives its ids back before its permits.
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::EngineError;

/// All KV blocks of one arena. Clones are handles on the same pool.
#[derive(Clone)]
pub struct BlockPool(Arc<Inner>);

struct Inner {
    total: usize,
    block_tokens: usize,
    /// FIFO and cancel-safe; a large request at its head is not starved by small ones behind it.
    permits: Arc<Semaphore>,
    /// Ordered, so that leases are runs of adjacent blocks where they can be: a run is one transfer descriptor.
    free: Mutex<BTreeSet<u32>>,
}

impl BlockPool {
    /// A pool of the ids `0..total`, each block holding `block_tokens` tokens (at least one). An arena has fewer blocks
    /// than a `u32` has values; what exceeds them is left out.
    pub fn new(total: usize, block_tokens: usize) -> Self {
        let ids = u32::try_from(total).unwrap_or(u32::MAX);
        let total = (ids as usize).min(Semaphore::MAX_PERMITS);
        let (permits, free) = (Arc::new(Semaphore::new(total)), Mutex::new((0..ids).take(total).collect()));
        Self(Arc::new(Inner { total, block_tokens: block_tokens.max(1), permits, free }))
    }

    /// Blocks of the pool, free and leased.
    pub fn total(&self) -> usize {
        self.0.total
    }

    /// Blocks in no lease.
    pub fn free(&self) -> usize {
        self.0.free().len()
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.0.block_tokens
    }

    /// Blocks that hold the KV of `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.0.block_tokens)
    }

    /// Takes `n` blocks now, behind everyone who already waits in [`BlockPool::reserve`].
    ///
    /// # Errors
    /// `Overloaded` when they are not free; `InvalidArgument` when the pool never has so many.
    pub fn try_reserve(&self, n: usize) -> Result<KvLease, EngineError> {
        let permits = Arc::clone(&self.0.permits).try_acquire_many_owned(self.check(n)?).map_err(|_| {
            EngineError::Overloaded(format!("{n} KV blocks wanted, {} of {} free", self.free(), self.total()))
        })?;
        Ok(KvLease::new(&self.0, n, permits))
    }

    /// Waits, first come first served, until `n` blocks are free, and takes them. Dropping the future takes none.
    ///
    /// # Errors
    /// `InvalidArgument`, at once, when the pool never has so many.
    pub async fn reserve(&self, n: usize) -> Result<KvLease, EngineError> {
        let permits = Arc::clone(&self.0.permits).acquire_many_owned(self.check(n)?).await;
        let permits = permits.map_err(|_| EngineError::Stopped("the KV pool is closed".into()))?;
        Ok(KvLease::new(&self.0, n, permits))
    }

    fn check(&self, n: usize) -> Result<u32, EngineError> {
        u32::try_from(n).ok().filter(|_| n <= self.total()).ok_or_else(|| {
            EngineError::InvalidArgument(format!("{n} KV blocks wanted, the whole arena has {}", self.total()))
        })
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockPool({} of {} free)", self.free(), self.total())
    }
}

impl Inner {
    fn free(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // Every critical section below leaves the set whole, so that a poisoned lock still holds a good one.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks that belong to one holder; dropping it returns them. Share it as `Arc<KvLease>` between the sequence and
/// a transfer in flight: the blocks are free again when the last of them lets go.
pub struct KvLease {
    blocks: Vec<u32>,
    pool: Arc<Inner>,
    /// Released after `drop` has returned the ids.
    _permits: OwnedSemaphorePermit,
}

impl KvLease {
    fn new(pool: &Arc<Inner>, n: usize, permits: OwnedSemaphorePermit) -> Self {
        let mut free = pool.free();
        let blocks: Vec<u32> = std::iter::from_fn(|| free.pop_first()).take(n).collect();
        drop(free);
        debug_assert_eq!(blocks.len(), n, "a permit stands for a free id");
        Self { blocks, pool: Arc::clone(pool), _permits: permits }
    }

    /// Block ids; token `i` of the sequence lives in `blocks()[i / block_tokens]`.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Tokens whose KV fits.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.pool.block_tokens
    }

    /// Whether the blocks are ids of `pool`.
    pub fn is_of(&self, pool: &BlockPool) -> bool {
        Arc::ptr_eq(&self.pool, &pool.0)
    }
}

impl Drop for KvLease {
    fn drop(&mut self) {
        self.pool.free().extend(self.blocks.drain(..));
    }
}

impl fmt::Debug for KvLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KvLease").field(&self.blocks).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    type Reserving = Pin<Box<dyn Future<Output = Result<KvLease, EngineError>>>>;

    #[derive(Clone, Debug)]
    enum Action {
        Try(usize),
        Wait(usize),
        PollAll,
        CancelWait(usize),
        Release(usize),
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            (0usize..14).prop_map(Action::Try),
            (0usize..14).prop_map(Action::Wait),
            Just(Action::PollAll),
            (0usize..8).prop_map(Action::CancelWait),
            (0usize..8).prop_map(Action::Release),
        ]
    }

    fn waiting(pool: &BlockPool, n: usize) -> Reserving {
        let pool = pool.clone();
        Box::pin(async move { pool.reserve(n).await })
    }

    fn poll_all(waiters: &mut Vec<Reserving>, leases: &mut Vec<KvLease>) {
        let mut context = Context::from_waker(Waker::noop());
        waiters.retain_mut(|waiter| match waiter.as_mut().poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(lease) => {
                leases.extend(lease);
                false
            }
        });
    }

    proptest! {
        #[test]
        fn free_and_leased_blocks_are_all_blocks(actions in prop::collection::vec(action(), 0..120)) {
            let pool = BlockPool::new(12, 16);
            let (mut leases, mut waiters) = (Vec::new(), Vec::new());
            for action in actions {
                match action {
                    Action::Try(n) => leases.extend(pool.try_reserve(n)),
                    Action::Wait(n) => waiters.push(waiting(&pool, n)),
                    Action::PollAll => poll_all(&mut waiters, &mut leases),
                    Action::CancelWait(i) if i < waiters.len() => drop(waiters.remove(i)),
                    Action::Release(i) if i < leases.len() => drop(leases.swap_remove(i)),
                    Action::CancelWait(_) | Action::Release(_) => {}
                }
                let mut ids: Vec<u32> = leases.iter().flat_map(|lease: &KvLease| lease.blocks()).copied().collect();
                prop_assert_eq!(ids.len() + pool.free(), 12);
                ids.sort_unstable();
                ids.dedup();
                prop_assert_eq!(ids.len() + pool.free(), 12, "a block has two holders");
            }
            drop((leases, waiters));
            prop_assert_eq!(pool.free(), 12);
            prop_assert_eq!(pool.try_reserve(12).map(|lease| lease.blocks().len()), Ok(12));
        }
    }

    #[test]
    fn a_large_reservation_is_not_overtaken() {
        let pool = BlockPool::new(4, 16);
        let held = pool.try_reserve(3);
        let (mut waiters, mut leases) = (vec![waiting(&pool, 4)], Vec::new());
        poll_all(&mut waiters, &mut leases);
        assert!(matches!(pool.try_reserve(1), Err(EngineError::Overloaded(_))), "overtook the waiter");
        drop(held);
        assert!(matches!(pool.try_reserve(1), Err(EngineError::Overloaded(_))), "overtook the waiter");
        poll_all(&mut waiters, &mut leases);
        assert_eq!(leases[0].blocks(), [0, 1, 2, 3]);
    }

    #[test]
    fn what_never_fits_is_refused_at_once() {
        let pool = BlockPool::new(4, 16);
        assert!(matches!(pool.try_reserve(5), Err(EngineError::InvalidArgument(_))));
        let poll = waiting(&pool, 5).as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll, Poll::Ready(Err(EngineError::InvalidArgument(_)))));
        assert_eq!((pool.blocks_for(0), pool.blocks_for(16), pool.blocks_for(17)), (0, 1, 2));
    }
}
