//! Keeps the two nodes of many requests from waiting for each other for ever. A computed prompt that waits for its
//! ticket holds blocks here while it waits for blocks on a decode node; a request that has its ticket holds blocks
//! there while it waits for blocks here. When both kinds meet, the first gives way: its blocks are dropped, and its
//! prompt is computed again once its ticket is there. So whoever holds a ticket gets blocks in the end. One prompt
//! gives way at a time, and the next one only if that was not enough: computing prompts again is what it costs.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// Blocks that were dropped are with whoever waited for them within this time.
const HANDED_OVER: Duration = Duration::from_millis(1);

/// How many requests that have a ticket wait for blocks. One per node; clones are handles on the same count.
#[derive(Clone, Debug, Default)]
pub struct Pressure {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: AtomicUsize,
    /// Somebody gives way.
    yielding: AtomicBool,
    /// Somebody waits, or nobody gives way any more.
    changed: Notify,
}

impl Pressure {
    /// Counts one such request until the guard is dropped.
    pub fn add(&self) -> PressureGuard {
        self.inner.waiting.fetch_add(1, Ordering::AcqRel);
        self.inner.changed.notify_waiters();
        PressureGuard { pressure: self.clone() }
    }

    /// Ready when there is such a request, and nobody else gives way to it.
    pub async fn felt(&self) -> GivingWay {
        loop {
            // Before the look: what comes behind it is not missed.
            let changed = self.inner.changed.notified();
            let is_needed = self.inner.waiting.load(Ordering::Acquire) > 0;
            if is_needed && !self.inner.yielding.swap(true, Ordering::AcqRel) {
                return GivingWay { pressure: self.clone() };
            }
            changed.await;
        }
    }
}

/// See [`Pressure::add`].
#[derive(Debug)]
pub struct PressureGuard {
    pressure: Pressure,
}

impl Drop for PressureGuard {
    fn drop(&mut self) {
        self.pressure.inner.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The right to drop one's blocks for others. The next one gets it when this is dropped.
#[derive(Debug)]
pub struct GivingWay {
    pressure: Pressure,
}

impl GivingWay {
    /// The blocks are dropped: lets whoever waits take them, before another one gives way.
    pub async fn done(self) {
        tokio::time::sleep(HANDED_OVER).await;
    }
}

impl Drop for GivingWay {
    fn drop(&mut self) {
        self.pressure.inner.yielding.store(false, Ordering::Release);
        self.pressure.inner.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn felt_only_while_somebody_waits() {
        let pressure = Pressure::default();
        assert!(!poll_once(pressure.felt()).await);
        let guard = pressure.add();
        assert!(poll_once(pressure.felt()).await);
        drop(guard);
        assert!(!poll_once(pressure.felt()).await);
    }

    #[tokio::test]
    async fn one_gives_way_at_a_time_and_the_next_only_if_somebody_still_waits() {
        let pressure = Pressure::default();
        let (first, second) = (pressure.add(), pressure.add());
        let giving = pressure.felt().await;
        assert!(!poll_once(pressure.felt()).await, "another one gives way");
        drop(first);
        let (giving, ()) = tokio::join!(pressure.felt(), giving.done());
        drop(second);
        giving.done().await;
        assert!(!poll_once(pressure.felt()).await, "nobody waits");
        let _third = pressure.add();
        assert!(poll_once(pressure.felt()).await);
    }

    /// Whether `future` is ready at its first poll.
    async fn poll_once<T>(future: impl Future<Output = T>) -> bool {
        tokio::select! {
            biased;
            _ = future => true,
            () = std::future::ready(()) => false,
        }
    }
}
