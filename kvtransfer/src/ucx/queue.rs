//! The driver's inbox for the rest of the process: a bounded queue with an event descriptor, so that the driver can
//! sleep in one `poll` for UCX and for commands. A producer writes the descriptor only when the driver is asleep.
use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Commands that wait for the driver at most, beside one cancel or verdict per hand-off.
const CAPACITY: usize = 1024;
/// Refusals that wait for the driver at most. One that finds no room is dropped: its hand-off ends by the lease.
const REFUSALS: usize = 4096;

/// Commands from any thread to one driver.
pub(super) struct Queue<T> {
    room: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    commands: Mutex<VecDeque<(T, Option<OwnedSemaphorePermit>)>>,
    asleep: AtomicBool,
    closed: AtomicBool,
    event: File,
}

impl<T> Queue<T> {
    pub(super) fn new() -> std::io::Result<Arc<Self>> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else owns it.
        let event = unsafe { File::from_raw_fd(fd) };
        Ok(Arc::new(Self {
            room: Arc::new(Semaphore::new(CAPACITY)),
            refusals: Arc::new(Semaphore::new(REFUSALS)),
            commands: Mutex::default(),
            asleep: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            event,
        }))
    }

    /// Waits for room. Gives the command back when the driver is gone.
    pub(super) async fn send(&self, command: T) -> Result<(), T> {
        let Ok(permit) = self.room.clone().acquire_owned().await else { return Err(command) };
        self.push(command, Some(permit))
    }

    /// For what must not wait and comes at most once per hand-off, which bounds it.
    pub(super) fn send_now(&self, command: T) -> Result<(), T> {
        self.push(command, None)
    }

    /// For what must not wait, and what a peer can cause as often as it likes. Gives the command back when there is no
    /// room, too.
    pub(super) fn send_refusal(&self, command: T) -> Result<(), T> {
        match self.refusals.clone().try_acquire_owned() {
            Ok(room) => self.push(command, Some(room)),
            Err(_) => Err(command),
        }
    }

    /// The driver is to end: it may take what is queued, and nothing more comes.
    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
        self.room.close();
        self.wake();
    }

    /// The driver has ended: commands that are still queued are dropped with their replies.
    pub(super) fn end(&self) {
        self.close();
        // A push that saw the queue open is in it by now, since it held the lock. Dropped without it: a command may own
        // anything.
        let left = std::mem::take(&mut *self.lock());
        drop(left);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Driver: takes the next command.
    pub(super) fn pop(&self) -> Option<T> {
        self.lock().pop_front().map(|(command, _room)| command)
    }

    /// Driver: announces sleep. False: there is a command, do not sleep.
    pub(super) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, SeqCst);
        if self.lock().is_empty() && !self.is_closed() {
            return true;
        }
        self.asleep.store(false, SeqCst);
        false
    }

    /// Driver: after sleep, or instead of it.
    pub(super) fn woke(&self) {
        self.asleep.store(false, SeqCst);
        // Empty is the normal case (`WouldBlock`).
        let _ = (&self.event).read(&mut [0; 8]);
    }

    /// Driver: readable when a command came during sleep.
    pub(super) fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    fn push(&self, command: T, room: Option<OwnedSemaphorePermit>) -> Result<(), T> {
        let mut commands = self.lock();
        if self.is_closed() {
            return Err(command);
        }
        commands.push_back((command, room));
        drop(commands);
        if self.asleep.load(SeqCst) {
            self.wake();
        }
        Ok(())
    }

    fn wake(&self) {
        self.asleep.store(false, SeqCst);
        // A full counter is readable too.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(T, Option<OwnedSemaphorePermit>)>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_during_sleep_wakes_and_one_before_prevents_it() {
        let queue = Queue::new().expect("eventfd");
        assert!(queue.prepare_sleep());
        queue.send_now(1).expect("open");
        let mut poll = libc::pollfd { fd: queue.event_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 0) }, 1);
        queue.woke();
        assert!(!queue.prepare_sleep(), "the command is still there");
        assert_eq!(queue.pop(), Some(1));
        assert!(queue.prepare_sleep());
    }

    #[tokio::test]
    async fn a_full_queue_waits_and_a_closed_one_gives_back() {
        let queue = Queue::new().expect("eventfd");
        for command in 0..CAPACITY {
            queue.send(command).await.expect("room");
        }
        let waiting = tokio::spawn({
            let queue = queue.clone();
            async move { queue.send(7).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert_eq!(queue.pop(), Some(0));
        assert_eq!(waiting.await.expect("no panic"), Ok(()));
        queue.close();
        assert_eq!(queue.send(8).await, Err(8));
        assert_eq!(queue.send_now(9), Err(9));
        assert!(!queue.prepare_sleep());
    }

    #[test]
    fn refusals_have_a_bound_of_their_own() {
        let queue = Queue::new().expect("eventfd");
        (0..REFUSALS).for_each(|refusal| queue.send_refusal(refusal).expect("room"));
        assert_eq!(queue.send_refusal(7), Err(7));
        queue.send_now(8).expect("a verdict has room");
        assert_eq!(queue.pop(), Some(0));
        assert_eq!(queue.send_refusal(9), Ok(()));
    }

    #[test]
    fn the_end_drops_what_nobody_will_take() {
        let (queue, owned) = (Queue::new().expect("eventfd"), Arc::new(()));
        queue.send_now(owned.clone()).expect("open");
        queue.close();
        assert_eq!(Arc::strong_count(&owned), 2, "the driver may still take it");
        queue.end();
        assert_eq!(Arc::strong_count(&owned), 1);
        assert_eq!(queue.pop(), None);
    }
}
