//! Who may start: a bounded number of running requests and a bounded queue before them, first come, first served. Full
//! is told at once, before any work was spent.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tandem_proto::{Error, ErrorKind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Limits;

/// Handle to the queue.
#[derive(Clone, Debug)]
pub struct Admission {
    slots: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    closed: Arc<AtomicBool>,
    max_inflight: u32,
    max_queue: usize,
}

/// A place in the queue, or beyond it. Dropping it gives the place back.
#[derive(Debug)]
pub enum Entry {
    /// A slot was free.
    Admitted(Slot),
    /// All slots are taken.
    Waiting(Place),
}

/// One running request.
#[derive(Debug)]
pub struct Slot(#[expect(dead_code, reason = "held for its Drop")] OwnedSemaphorePermit);

/// One waiting request.
#[derive(Debug)]
pub struct Place {
    slots: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
}

/// Requests by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Admitted and not ended.
    pub inflight: usize,
    /// In the queue.
    pub queued: usize,
}

impl Admission {
    /// An empty queue.
    pub fn new(limits: &Limits) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(limits.max_inflight as usize)),
            waiting: Arc::default(),
            closed: Arc::default(),
            max_inflight: limits.max_inflight,
            max_queue: limits.max_queue,
        }
    }

    /// Takes a slot or a place in the queue.
    ///
    /// # Errors
    /// `Overloaded` when the queue is full, `Unavailable` when the router drains.
    pub fn enter(&self) -> Result<Entry, Error> {
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Unavailable, "the router is shutting down"));
        }
        if let Ok(permit) = Arc::clone(&self.slots).try_acquire_owned() {
            return Ok(Entry::Admitted(Slot(permit)));
        }
        let taken = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waiting| {
            (waiting < self.max_queue).then_some(waiting + 1)
        });
        match taken {
            Ok(_) => Ok(Entry::Waiting(Place { slots: Arc::clone(&self.slots), waiting: Arc::clone(&self.waiting) })),
            Err(waiting) => {
                let message = format!("{} requests are running and {waiting} waiting: try later", self.max_inflight);
                Err(Error::new(ErrorKind::Overloaded, message))
            }
        }
    }

    /// Whether [`Self::drain`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Requests by state, now.
    pub fn counts(&self) -> Counts {
        let inflight = (self.max_inflight as usize).saturating_sub(self.slots.available_permits());
        Counts { inflight, queued: self.waiting.load(Ordering::Relaxed) }
    }

    /// Lets nobody in any more and waits, no longer than `limit`, until everybody has left.
    pub async fn drain(&self, limit: Duration) {
        self.closed.store(true, Ordering::Relaxed);
        if tokio::time::timeout(limit, self.slots.acquire_many(self.max_inflight)).await.is_err() {
            tracing::warn!(counts = ?self.counts(), "requests still run at the end of the drain");
        }
    }
}

impl Entry {
    /// Waits for the slot. Cancel-safe: dropping the future leaves the queue.
    ///
    /// # Errors
    /// `Internal` if the queue was torn down.
    pub async fn admitted(self) -> Result<Slot, Error> {
        match self {
            Self::Admitted(slot) => Ok(slot),
            Self::Waiting(place) => match Arc::clone(&place.slots).acquire_owned().await {
                Ok(permit) => Ok(Slot(permit)),
                Err(_) => Err(Error::new(ErrorKind::Internal, "the admission queue is gone")),
            },
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_refuses_and_a_left_slot_admits() {
        let admission = Admission::new(&Limits { max_inflight: 1, max_queue: 1, ..Limits::default() });
        let running = admission.enter().unwrap().admitted().await.unwrap();
        let waiting = admission.enter().unwrap();
        assert_eq!(admission.enter().unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!(admission.counts(), Counts { inflight: 1, queued: 1 });
        drop(running);
        let slot = waiting.admitted().await.unwrap();
        assert_eq!(admission.counts(), Counts { inflight: 1, queued: 0 });
        drop(slot);
        admission.drain(Duration::from_secs(1)).await;
        assert_eq!(admission.enter().unwrap_err().kind, ErrorKind::Unavailable);
    }

    #[tokio::test]
    async fn a_waiter_that_gives_up_leaves_its_place() {
        let admission = Admission::new(&Limits { max_inflight: 1, max_queue: 1, ..Limits::default() });
        let _running = admission.enter().unwrap();
        drop(admission.enter().unwrap().admitted());
        assert_eq!(admission.counts().queued, 0);
    }
}
