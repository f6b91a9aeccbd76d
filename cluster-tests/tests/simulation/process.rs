//! A process of the simulated cluster: it runs, is frozen (SIGSTOP: its tasks are not polled, time goes on), or is dead
//! (kill −9: its tasks are gone). Knows nothing of what the tasks do.
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::future::BoxFuture;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A handle; clones are the same process.
#[derive(Clone, Default)]
pub struct Process {
    state: Arc<Mutex<State>>,
    dead: CancellationToken,
}

#[derive(Default)]
struct State {
    frozen: bool,
    last_task: u64,
    /// Of each task that lives; `None` before its first poll.
    tasks: BTreeMap<u64, Option<Waker>>,
    /// Who waits for a thaw.
    waiting: Vec<Waker>,
}

impl Process {
    /// `task` as a task of this process.
    pub fn task(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        let mut state = self.lock();
        state.last_task += 1;
        let id = state.last_task;
        state.tasks.insert(id, None);
        drop(state);
        Box::pin(Task { process: self.clone(), id, task: Some(task) })
    }

    /// Runs `task` in this process.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(tokio::spawn(self.task(Box::pin(task))));
    }

    /// SIGSTOP.
    pub fn freeze(&self) {
        self.lock().frozen = true;
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        let mut state = self.lock();
        state.frozen = false;
        state.wake_all();
    }

    /// kill −9.
    pub fn kill(&self) {
        self.dead.cancel();
        self.lock().wake_all();
    }

    pub fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    /// Tasks that live.
    pub fn tasks(&self) -> usize {
        self.lock().tasks.len()
    }

    /// Ready when it is dead.
    pub fn died(&self) -> WaitForCancellationFutureOwned {
        self.dead.clone().cancelled_owned()
    }

    /// Ready when it is not frozen; false when it is dead.
    pub async fn runs(&self) -> bool {
        std::future::poll_fn(|context| {
            if self.is_dead() {
                return Poll::Ready(false);
            }
            let mut state = self.lock();
            if !state.frozen {
                return Poll::Ready(true);
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wake_all(&mut self) {
        self.tasks.values().flatten().chain(&self.waiting).for_each(Waker::wake_by_ref);
        self.waiting.clear();
    }
}

struct Task {
    process: Process,
    id: u64,
    task: Option<BoxFuture<'static, ()>>,
}

impl Future for Task {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.process.is_dead() {
            self.task = None;
            return Poll::Ready(());
        }
        let id = self.id;
        let mut state = self.process.lock();
        state.tasks.insert(id, Some(context.waker().clone()));
        let frozen = state.frozen;
        drop(state);
        match &mut self.task {
            Some(task) if !frozen => task.as_mut().poll(context),
            Some(_) => Poll::Pending,
            None => Poll::Ready(()),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // First what it holds, then its place: no task left means nothing held.
        self.task = None;
        self.process.lock().tasks.remove(&self.id);
    }
}
