//! The thread that copies out of senders' memories into claimed blocks, so that the driver goes on meanwhile. One range
//! after the other, in the order of their announcements; what nobody wants any more is skipped.
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tandem_memory::{Copy, PeerMemory, Run};

use super::super::ids::EndpointId;
use crate::mutation::Mutation;
use crate::registry::Claim;
use crate::wire::DataHeader;

/// Ranges that wait. A sender has 64 MiB announced at most, so this is many senders, or one that keeps no rule.
const MAX_JOBS: usize = 64 * 1024;
/// Copied before their senders are told, unless nothing more waits. Each time wakes the driver, on the core that
/// copies.
const REPORT_BYTES: u64 = 4 << 20;
/// Leaves between two looks at whether somebody wants them to be the last: a quarter of a megabyte.
const LEAVES_AT_ONCE: usize = 64;

/// Told of ranges that were copied, and where each came from.
pub(in super::super) type Report = Box<dyn Fn(Vec<(EndpointId, DataHeader)>) + Send>;

/// A range to copy.
pub(super) struct Job {
    pub(super) from: EndpointId,
    pub(super) claim: Claim,
    pub(super) memory: Arc<PeerMemory>,
    /// In the peer's memory, checked; as many bytes as the claim has.
    pub(super) source: Vec<Run>,
}

/// The thread, and what waits for it. Dropping it ends both.
pub(super) struct Copier {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares with the driver.
#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
    /// The endpoint whose range must not be copied further.
    stopping: AtomicU64,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Whose range is being copied.
    at_work: Option<EndpointId>,
    /// What was begun when its endpoint was stopped.
    stopped: Option<Claim>,
    closed: bool,
}

impl Copier {
    pub(super) fn start(report: Report, mutation: Mutation) -> io::Result<Self> {
        let desk = Arc::new(Desk::default());
        let worker = Worker { desk: desk.clone(), report, copied: Copied::default(), mutation };
        let thread = std::thread::Builder::new().name("kv-copy".to_owned()).spawn(move || worker.run())?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Queues a range. Without a place for it, its claim is dropped, which fails the hand-off.
    pub(super) fn submit(&self, job: Job) {
        let mut state = self.desk.lock();
        if state.closed || state.waiting.len() >= MAX_JOBS {
            drop(state);
            return tracing::warn!(peer = job.from.0, "no place for a KV range to be copied: its hand-off fails");
        }
        state.waiting.push_back(job);
        if state.at_work.is_none() {
            self.desk.changed.notify_all();
        }
    }

    /// A range is being copied, or waits for it.
    pub(super) fn is_busy(&self) -> bool {
        let state = self.desk.lock();
        state.at_work.is_some() || !state.waiting.is_empty()
    }

    /// Ends what comes from `endpoint`, and waits for the pieces that are being copied.
    pub(super) fn stop(&self, endpoint: EndpointId) -> Vec<Claim> {
        let mut state = self.desk.lock();
        let (of_it, others): (VecDeque<_>, _) =
            std::mem::take(&mut state.waiting).into_iter().partition(|job| job.from == endpoint);
        state.waiting = others;
        let mut claims: Vec<Claim> = of_it.into_iter().map(|job| job.claim).collect();
        self.desk.stopping.store(endpoint.0, Relaxed);
        while state.at_work == Some(endpoint) {
            state = self.desk.wait(state);
        }
        self.desk.stopping.store(EndpointId::NONE.0, Relaxed);
        claims.extend(state.stopped.take());
        claims
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let dropped = self.desk.close();
        if let Some(thread) = self.thread.take() {
            // A panic there was already printed.
            let _ = thread.join();
        }
        drop(dropped);
    }
}

impl Desk {
    /// The next range; waits, and calls `idle` before it does. `None`: closed.
    fn next(&self, idle: impl FnOnce()) -> Option<Job> {
        let mut state = self.lock();
        if state.waiting.is_empty() {
            drop(state);
            idle();
            state = self.lock();
        }
        while !state.closed {
            if let Some(job) = state.waiting.pop_front() {
                state.at_work = Some(job.from);
                return Some(job);
            }
            state = self.wait(state);
        }
        None
    }

    /// A range is over; `stopped` is its claim if it was not copied.
    fn done(&self, stopped: Option<Claim>) {
        let mut state = self.lock();
        state.at_work = None;
        if stopped.is_some() {
            state.stopped = stopped;
        }
        self.changed.notify_all();
    }

    fn close(&self) -> VecDeque<Job> {
        let mut state = self.lock();
        state.closed = true;
        self.changed.notify_all();
        std::mem::take(&mut state.waiting)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the thread has.
struct Worker {
    desk: Arc<Desk>,
    report: Report,
    copied: Copied,
    mutation: Mutation,
}

/// What nobody was told of yet.
#[derive(Default)]
struct Copied {
    ranges: Vec<(EndpointId, DataHeader)>,
    bytes: u64,
}

impl Worker {
    fn run(mut self) {
        let desk = self.desk.clone();
        while let Some(job) = desk.next(|| self.tell()) {
            let stopped = self.copy(job);
            desk.done(stopped);
            if self.copied.bytes >= REPORT_BYTES {
                self.tell();
            }
        }
    }

    fn tell(&mut self) {
        let Copied { ranges, .. } = std::mem::take(&mut self.copied);
        if !ranges.is_empty() {
            (self.report)(ranges);
        }
    }

    /// Gives the claim back when its endpoint was stopped meanwhile.
    fn copy(&mut self, job: Job) -> Option<Claim> {
        let Job { from, claim, memory, source } = job;
        let arena = claim.arena().clone();
        let (Some(pieces), Some(to)) = (pieces(claim.leaves(), &source), arena.memory().place().host()) else {
            return None;
        };
        let mut digests = vec![0; pieces.len()];
        let uncopied = self.mutation.acknowledges_uncopied();
        for (pieces, digests) in pieces.chunks(LEAVES_AT_ONCE).zip(digests.chunks_mut(LEAVES_AT_ONCE)) {
            if self.desk.stopping.load(Relaxed) == from.0 {
                return Some(claim);
            }
            // Over: dropping the claim frees the blocks.
            if !claim.is_wanted() {
                return None;
            }
            if !uncopied {
                memory.copy(pieces, to, digests);
            }
        }
        self.copied.ranges.push((from, claim.range()));
        self.copied.bytes += claim.bytes();
        claim.counters().copied_bytes.fetch_add(claim.bytes(), Relaxed);
        claim.written_and_hashed(digests);
        None
    }
}

/// However the thread ends: nobody waits for it, and what waits fails.
impl Drop for Worker {
    fn drop(&mut self) {
        let dropped = self.desk.close();
        self.desk.done(None);
        drop(dropped);
    }
}

/// Where each leaf comes from. `None`: one would have to be put together out of two runs, or there are not enough
/// bytes.
fn pieces(leaves: Vec<Run>, source: &[Run]) -> Option<Vec<Copy>> {
    let (mut runs, mut left) = (source.iter(), Run { at: 0, bytes: 0 });
    let piece = |to: Run| {
        if left.bytes == 0 {
            left = *runs.next()?;
        }
        let from = left.at;
        left = Run { at: left.at + to.bytes, bytes: left.bytes.checked_sub(to.bytes)? };
        Some(Copy { from, to })
    };
    leaves.into_iter().map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_come_from_the_runs_in_their_order() {
        let leaf = |at, bytes| Run { at, bytes };
        let leaves = vec![leaf(0, 4096), leaf(4096, 904), leaf(90_000, 4096), leaf(94_096, 904)];
        let from = |runs: &[Run]| {
            let pieces = pieces(leaves.clone(), runs)?;
            assert!(pieces.iter().map(|piece| piece.to).eq(leaves.iter().copied()));
            Some(pieces.iter().map(|piece| piece.from).collect::<Vec<_>>())
        };
        assert_eq!(from(&[leaf(800, 10_000)]), Some(vec![800, 4896, 5800, 9896]));
        assert_eq!(from(&[leaf(800, 5000), leaf(8, 5000)]), Some(vec![800, 4896, 8, 4104]));
        assert_eq!(from(&[leaf(800, 4000), leaf(8, 6000)]), None, "a leaf of two runs");
        assert_eq!(from(&[leaf(800, 5000)]), None, "too little");
    }
}
