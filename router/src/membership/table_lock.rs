//! The lock around the table, and what follows a change of the table once it is released: log lines, and the end of a
//! dead node's calls, which wakes all requests of that node. All requests wait for this lock. Nothing that can block,
//! or wake many, happens under it: the table leaves a [`Notice`] instead.
use std::sync::{Mutex, PoisonError};

use super::notice::Notice;
use super::table::Table;

/// The table, for many tasks.
#[derive(Debug)]
pub(super) struct TableLock(Mutex<Table>);

impl TableLock {
    pub fn new(table: Table) -> Self {
        Self(Mutex::new(table))
    }

    /// Lets `change` happen under the lock, and what follows from it behind the lock, before this returns.
    ///
    /// A verdict on a node holds from within the lock on: its life is fenced and its row is gone, so nobody books there
    /// or takes it in again. Only the end of its calls comes behind. Nothing relies on the calls ending any earlier: a
    /// request that was routed before the verdict may open its calls after it in any case, and no request is given
    /// other nodes before it has seen the end of those that it has. Whoever learns of the verdict from the caller of
    /// this, such as waiting requests or the node's next life, learns of it behind the end of the calls.
    pub fn with<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        // The table has no invariant that a panicking holder could break half-way: go on with it.
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut table);
        let notices = table.take_notices();
        drop(table);
        notices.into_iter().for_each(Notice::tell);
        result
    }

    #[cfg(test)]
    pub fn is_held(&self) -> bool {
        self.0.try_lock().is_err()
    }
}
