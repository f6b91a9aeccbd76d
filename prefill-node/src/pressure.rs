//! Keeps the two nodes of many requests from waiting for each other for ever. A computed prompt that waits for its
//! ticket holds blocks here while it waits for blocks on a decode node; a request that has its ticket holds blocks there
//! while it waits for blocks here. When both kinds meet, the first gives way: its blocks are dropped, and its prompt is
//! computed again once its ticket is there. So whoever holds a ticket gets blocks in the end.
use tokio::sync::watch;

/// How many requests that have a ticket wait for blocks. One per node; clones are handles on the same count.
#[derive(Clone, Debug)]
pub struct Pressure {
    waiting: watch::Sender<usize>,
}

impl Default for Pressure {
    fn default() -> Self {
        Self { waiting: watch::Sender::new(0) }
    }
}

impl Pressure {
    /// Counts one such request until the guard is dropped.
    pub fn add(&self) -> PressureGuard {
        self.waiting.send_modify(|waiting| *waiting += 1);
        PressureGuard { pressure: self.clone() }
    }

    /// Ready when there is such a request.
    pub async fn felt(&self) {
        // The sender lives in `self`: the channel cannot be closed.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }
}

/// See [`Pressure::add`].
#[derive(Debug)]
pub struct PressureGuard {
    pressure: Pressure,
}

impl Drop for PressureGuard {
    fn drop(&mut self) {
        self.pressure.waiting.send_modify(|waiting| *waiting -= 1);
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
