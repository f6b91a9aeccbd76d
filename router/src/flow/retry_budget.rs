//! The retry budget: how many requests may be retries at once, as a share of those that run (as in Finagle, linkerd2
//! and Envoy). Where much fails, retries must not be most of what the nodes do: then even what works is late.
//!
//! A request is a *retry* from the moment at which its next attempt has its nodes until the client has another token:
//! so long it costs work that was done before. The first retry after a failure waits for its turn, so that no request
//! is lost because many failed at once. A retry that failed does not wait, and comes behind those who do: where retries
//! fail, more of them only keep others from their work. Who may wait is decided in [`super::replan`].
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// A share of few requests is none: so many may be retries in any case.
pub const FLOOR: usize = 32;

/// See the head of this file. Clones are the same one.
#[derive(Clone, Debug)]
pub struct RetryBudget(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    percent: AtomicU32,
    retries: AtomicUsize,
    waiting: AtomicUsize,
    /// One retry fewer, or another percentage.
    ended: Notify,
}

/// One request that is a retry. Dropping it makes room for another one.
#[derive(Debug)]
pub struct Retrying(Arc<Inner>);

/// One request that waits for its turn. Dropping it gives that up.
#[derive(Debug)]
pub struct Waiting(Arc<Inner>);

/// Requests that are retries, and how many may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retries {
    /// Now.
    pub now: usize,
    /// At most.
    pub limit: usize,
}

/// So many of `running` requests may be retries, if `percent` of them may be.
pub fn limit(percent: u32, running: usize) -> usize {
    (running.saturating_mul(percent as usize) / 100).max(FLOOR)
}

impl RetryBudget {
    /// Of so many percent of the running requests, and [`FLOOR`].
    pub fn new(percent: u32) -> Self {
        Self(Arc::new(Inner { percent: percent.into(), ..Inner::default() }))
    }

    /// Percent of the running requests that may be retries.
    pub fn percent(&self) -> u32 {
        self.0.percent.load(Ordering::Relaxed)
    }

    /// So many from now on. Who is a retry stays one.
    pub fn set_percent(&self, percent: u32) {
        self.0.percent.store(percent, Ordering::Relaxed);
        self.0.ended.notify_waiters();
    }

    /// Whether one of so many `running` requests may become a retry, before those who wait or not. Takes nothing.
    pub fn has_room(&self, running: usize, before_others: bool) -> bool {
        self.0.retries.load(Ordering::Acquire) < self.limit(running, before_others)
    }

    /// One of so many `running` requests becomes a retry, if it may.
    pub fn begin(&self, running: usize, before_others: bool) -> Option<Retrying> {
        let limit = self.limit(running, before_others);
        let one_more = |retries: usize| (retries < limit).then_some(retries + 1);
        let begun = self.0.retries.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        begun.is_ok().then(|| Retrying(Arc::clone(&self.0)))
    }

    /// One request waits for its turn.
    pub fn wait(&self) -> Waiting {
        self.0.waiting.fetch_add(1, Ordering::AcqRel);
        Waiting(Arc::clone(&self.0))
    }

    fn limit(&self, running: usize, before_others: bool) -> usize {
        let others = if before_others { 0 } else { self.0.waiting.load(Ordering::Acquire) };
        limit(self.percent(), running).saturating_sub(others)
    }

    /// Ready when one has ended since this call, or the share is another.
    pub fn ended(&self) -> Notified<'_> {
        self.0.ended.notified()
    }

    /// While so many requests run.
    pub fn retries(&self, running: usize) -> Retries {
        Retries { now: self.0.retries.load(Ordering::Acquire), limit: limit(self.percent(), running) }
    }
}

impl Drop for Retrying {
    fn drop(&mut self) {
        self.0.retries.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.notify_waiters();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_share_of_what_runs_and_never_less_than_the_floor() {
        for (percent, running, most) in
            [(20, 0, FLOOR), (20, 160, 32), (20, 512, 102), (0, 512, FLOOR), (100, 512, 512)]
        {
            assert_eq!(limit(percent, running), most, "{percent} % of {running}");
        }
        assert!(limit(100, usize::MAX) >= FLOOR);
    }

    #[test]
    fn who_ends_makes_room_and_says_so() {
        let budget = RetryBudget::new(20);
        let mut all: Vec<Retrying> = std::iter::from_fn(|| budget.begin(10, true)).collect();
        assert_eq!((all.len(), budget.has_room(10, true)), (FLOOR, false));
        assert_eq!(budget.retries(1000), Retries { now: FLOOR, limit: 200 });
        let ended = budget.ended();
        drop(all.pop());
        assert!(ended.now_or_never().is_some(), "also for who began to wait before");
        assert!(budget.ended().now_or_never().is_none());
        assert!(budget.has_room(10, true) && budget.begin(10, true).is_some());
    }

    #[test]
    fn another_share_holds_at_once() {
        let budget = RetryBudget::new(0);
        let _most: Vec<Retrying> = std::iter::from_fn(|| budget.begin(1000, true)).collect();
        let ended = budget.ended();
        budget.set_percent(4);
        assert!(ended.now_or_never().is_some(), "who waits looks again");
        let more: Vec<Retrying> = std::iter::from_fn(|| budget.begin(1000, true)).collect();
        assert_eq!((more.len(), budget.percent()), (40 - FLOOR, 4));
        budget.set_percent(0);
        assert_eq!(budget.retries(1000), Retries { now: 40, limit: FLOOR }, "who is a retry stays one");
    }

    #[test]
    fn who_does_not_wait_comes_behind_those_who_do() {
        let budget = RetryBudget::new(20);
        let _most: Vec<Retrying> = std::iter::from_fn(|| budget.begin(10, true)).take(FLOOR - 2).collect();
        let waiting = [budget.wait(), budget.wait()];
        assert!(!budget.has_room(10, false) && budget.begin(10, false).is_none());
        assert!(budget.begin(10, true).is_some());
        drop(waiting);
        assert!(budget.has_room(10, false) && budget.begin(10, false).is_some());
    }

    proptest! {
        /// Whoever comes and goes: never more than the share of those who run at that moment.
        #[test]
        fn never_more_than_its_share(
            percent in 0u32..=100, steps in prop::collection::vec((0usize..2000, any::<bool>(), any::<usize>()), 1..300),
        ) {
            let (budget, mut all) = (RetryBudget::new(percent), Vec::new());
            for (running, begins, which) in steps {
                if begins {
                    let before = all.len();
                    all.extend(budget.begin(running, true));
                    prop_assert_eq!(all.len() > before, before < limit(percent, running));
                } else if !all.is_empty() {
                    drop(all.swap_remove(which % all.len()));
                }
                prop_assert_eq!(budget.retries(running).now, all.len());
            }
        }
    }
}
