//! Keeps the two nodes of many requests from waiting for each other for ever. A computed prompt that waits for its
//! ticket holds blocks here while it waits for blocks on a decode node; a request that has its ticket holds blocks
//! there while it waits for blocks here. When both kinds meet, the first gives way: its blocks are dropped, and its
//! prompt is computed again once its ticket is there. So whoever holds a ticket gets blocks in the end.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// How many requests that have a ticket wait for blocks. One per node; clones are handles on the same count.
#[derive(Clone, Debug, Default)]
pub struct Pressure {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: AtomicUsize,
    /// Tells those who give way in the order in which they came.
    felt: Notify,
}

impl Pressure {
    /// Counts one such request until the guard is dropped.
    pub fn add(&self) -> PressureGuard {
        self.inner.waiting.fetch_add(1, Ordering::AcqRel);
        self.inner.felt.notify_waiters();
        PressureGuard { pressure: self.clone() }
    }

    /// Ready when there is such a request.
    pub async fn felt(&self) {
        loop {
            // Before the look: what comes behind it is not missed.
            let told = self.inner.felt.notified();
            if self.inner.waiting.load(Ordering::Acquire) > 0 {
                return;
            }
            told.await;
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

    /// Whether `future` is ready at its first poll.
    async fn poll_once(future: impl Future<Output = ()>) -> bool {
        tokio::select! {
            biased;
            () = future => true,
            () = std::future::ready(()) => false,
        }
    }
}
