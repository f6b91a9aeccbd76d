//! The thread that copies out of senders' memories into claimed blocks, so that the driver goes on meanwhile. One range
//! after the other; senders take turns (`turns.rs`), so that none waits for all that another one has announced. What
//! nobody wants any more is skipped.
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tandem_memory::{Copy, PeerMemory, Run};

use super::super::ids::EndpointId;
use super::super::turns::Turns;
use crate::mutation::Mutation;
use crate::registry::Claim;
use crate::wire::DataHeader;

/// Ranges that wait. A sender has 64 MiB announced at most, so this is many senders, or one that keeps no rule: which
/// then loses its own.
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
    waiting: Turns<Job>,
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

    /// Queues a range. One without a place is dropped with its claim, which fails its hand-off.
    pub(super) fn submit(&self, job: Job) {
        if let Some(surplus) = self.desk.add(job) {
            tracing::warn!(peer = surplus.from.0, "no place for a KV range to be copied: its hand-off fails");
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
        let mut claims: Vec<Claim> = state.waiting.forget(endpoint).into_iter().map(|job| job.claim).collect();
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
    /// Queues a range. Returns one that has no place: to be dropped, which nobody may wait for here.
    fn add(&self, job: Job) -> Option<Job> {
        let mut state = self.lock();
        if state.closed {
            return Some(job);
        }
        let bytes = usize::try_from(job.claim.bytes()).unwrap_or(usize::MAX);
        state.waiting.announce(job.from, bytes, job);
        if state.at_work.is_none() {
            self.changed.notify_all();
        }
        let surplus = if state.waiting.len() > MAX_JOBS { state.waiting.crowd_out() } else { None };
        surplus.map(|(_, job)| job)
    }

    /// The next range; waits, and calls `idle` before it does. `None`: closed.
    fn next(&self, idle: impl FnOnce()) -> Option<Job> {
        let mut state = self.lock();
        if state.waiting.is_empty() {
            drop(state);
            idle();
            state = self.lock();
        }
        while !state.closed {
            if let Some((from, _, job)) = state.waiting.next(|_| true) {
                state.at_work = Some(from);
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

    /// Returns what waited.
    fn close(&self) -> Vec<(EndpointId, Job)> {
        let mut state = self.lock();
        state.closed = true;
        self.changed.notify_all();
        state.waiting.forget_all()
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
    use tandem_memory::{HostMemory, KvMemory};
    use tandem_proto::{HandoffId, Incarnation};

    use super::*;
    use crate::arena::Arena;
    use crate::handshake::{Hello, Secret};
    use crate::incoming::Incoming;
    use crate::registry::{PeerLink, Registry};
    use crate::session::DEFAULT_GRACE;
    use crate::terms::{Grant, Held, PeerId};
    use crate::wire::{Answer, Units};

    const BLOCK_BYTES: usize = 1 << 20;

    struct Nobody;

    impl PeerLink for Nobody {
        fn answer(&self, _: PeerId, _: HandoffId, _: Answer) {}

        fn cut_off(&self, _: PeerId) {}
    }

    /// All blocks of a hand-off that `sender` has opened, each announced by itself; the hand-off lives as long as what
    /// comes first.
    fn announced(registry: &Arc<Registry>, memory: &Arc<PeerMemory>, sender: u32, blocks: u32) -> (Incoming, Vec<Job>) {
        let (handoff, from) = (HandoffId([sender as u8 + 1; 16]), EndpointId(u64::from(sender)));
        let grant = Grant {
            handoff,
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: (sender * blocks..(sender + 1) * blocks).collect(),
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: std::time::Duration::from_secs(60),
        };
        let incoming = Incoming::accept(registry, grant, Default::default(), Vec::new()).expect("accept");
        let hello = Secret::of(&incoming.ticket()).expect("a key").hello([1; 16], &[]);
        let authenticated = registry.authenticate(&Hello::parse(&hello).expect("whole")).expect("the key");
        registry.open(from.into(), &authenticated).expect("open");
        let job = |first| {
            let range = DataHeader { handoff, first, count: 1, units: Units::ALL };
            let claim = registry.claim(from.into(), range, BLOCK_BYTES as u64).expect("claim");
            Job { from, claim, memory: memory.clone(), source: vec![Run { at: 0, bytes: BLOCK_BYTES }] }
        };
        (incoming, (0..blocks).map(job).collect())
    }

    /// The first to announce has announced all that it has before the others say a word.
    #[test]
    fn senders_take_turns_whoever_has_announced_first() {
        const SENDERS: u32 = 4;
        const BLOCKS: u32 = 3;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        // Grants start a task that watches their leases.
        let _entered = runtime.enter();
        let memory = HostMemory::zeroed((SENDERS * BLOCKS) as usize * BLOCK_BYTES).expect("little");
        let arena = Arena::new(memory, BLOCK_BYTES, 1);
        let registry = Registry::new(arena, Arc::default(), Box::new(Nobody), DEFAULT_GRACE);
        let theirs = HostMemory::shareable(BLOCK_BYTES).expect("little");
        let memory = Arc::new(PeerMemory::map(theirs.share().expect("shareable")).expect("our own"));
        let desk = Desk::default();
        let mut handoffs = Vec::new();
        for sender in 0..SENDERS {
            let (incoming, jobs) = announced(&registry, &memory, sender, BLOCKS);
            jobs.into_iter().for_each(|job| assert!(desk.add(job).is_none()));
            handoffs.push(incoming);
        }
        let mut order = Vec::new();
        for _ in 0..SENDERS * BLOCKS {
            let Job { from, claim, .. } = desk.next(|| ()).expect("open");
            order.push((from.0 as u32, claim.range().first));
            claim.written();
            desk.done(None);
        }
        assert!(order.into_iter().eq((0..BLOCKS).flat_map(|block| (0..SENDERS).map(move |sender| (sender, block)))));
        assert_eq!(desk.close().len(), 0);
    }

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
