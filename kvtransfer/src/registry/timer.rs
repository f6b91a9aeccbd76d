//! The task that watches the deadlines of a registry while there are any.
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::Registry;

impl Registry {
    /// Sees to it that a task watches the deadlines while there are any.
    pub(super) fn keep_time(self: &Arc<Self>) {
        if std::mem::replace(&mut self.lock().has_timer, true) {
            return self.rearm.notify_one();
        }
        let mut timer = Timer(Arc::downgrade(self));
        let rearm = self.rearm.clone();
        tokio::spawn(async move {
            while let Some(due) = timer.next() {
                tokio::select! {
                    biased;
                    () = rearm.notified() => {}
                    () = tokio::time::sleep_until(due.into()) => timer.strike(),
                }
            }
        });
    }
}

/// The task that watches a registry's deadlines; another one may start when it is gone, with its runtime too.
struct Timer(Weak<Registry>);

impl Timer {
    /// When to look again; `None`: there is nothing to wait for, and the next grant starts another task.
    fn next(&mut self) -> Option<Instant> {
        let registry = self.0.upgrade()?;
        let mut table = registry.lock();
        let due = table.sessions.next_timeout();
        if due.is_none() {
            table.has_timer = false;
            // What happens next is another task's.
            self.0 = Weak::new();
        }
        due
    }

    fn strike(&self) {
        if let Some(registry) = self.0.upgrade() {
            registry.expire();
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // Before its end, with its runtime.
        if let Some(registry) = self.0.upgrade() {
            registry.lock().has_timer = false;
        }
    }
}
