//! What may be read and worked on before a request has its place in the queue: bytes of bodies that arrive, and texts
//! that are parsed and tokenized. Both are bounded here, for all ports together, so that many large requests cost the
//! others neither memory nor threads: what does not fit waits a little, and is then refused as an overload.
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::setpriority_process;
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until, timeout};

/// The bytes of large bodies that are in memory at the same time: two of the largest. What is made of one, while a
/// thread reads it, comes on top: about as much again at most.
pub const BUDGET_BYTES: usize = 2 * MAX_MESSAGE_BYTES;
/// The same of bodies between [`FREE_BYTES`] and [`LARGE_BYTES`]. These have room of their own, as most long prompts
/// are among them: they wait neither for large bodies nor for those who send such ones slowly.
const MEDIUM_BUDGET_BYTES: usize = MAX_MESSAGE_BYTES;
/// Bodies up to this size are read without asking; the number of connections and of calls on each bounds them.
pub const FREE_BYTES: usize = 16 << 10;
/// Texts up to this size are worked on (in well under a millisecond) where they are; others beside the reactor's
/// threads.
const INLINE_BYTES: usize = 4096;
/// Texts from this size on have workers of their own: they take tens of milliseconds, and the others shall not wait for
/// them.
pub const LARGE_BYTES: usize = 256 << 10;
/// Larger bodies are read no faster than one worker of their class parses them, for each of these. Read at once, a few
/// of them take every core for a tenth of a second (most of it goes into fresh pages), and the others wait.
const BYTES_PER_SECOND: u32 = 200_000_000;
/// What has room arrives in this time, and as fast as this: nobody holds for long what others need by sending slowly.
const ARRIVES_WITHIN: Duration = Duration::from_secs(10);
const SLOWEST_BYTES_PER_SECOND: u32 = 500_000;
/// Bodies that wait for room, and texts that wait for a worker, of either class.
const MAX_WAITING: usize = 256;
/// For room in the budget, or for a worker.
const PATIENCE: Duration = Duration::from_secs(10);
/// Threads for large texts are this much nicer than the others (`man 2 setpriority`): beside one that is always busy
/// they have a thirtieth of a core.
const NICE: i32 = 15;
/// Threads for large work. Room and workers bound how many of them have any.
const MAX_BEHIND: usize = 64;
/// Threads for texts that have nothing to do end after this, and what they kept of freed memory goes back to the
/// system.
pub const IDLE_THREADS: Duration = Duration::from_secs(2);
/// The budget is counted in these.
const UNIT_BYTES: usize = 1 << 10;

/// Handle to the bounds.
#[derive(Clone, Debug)]
pub struct Intake {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Room for bodies of each class, in [`UNIT_BYTES`].
    medium_bytes: Pool,
    large_bytes: Pool,
    /// Threads for texts of each class.
    small: Pool,
    large: Pool,
    behind: Behind,
    /// When the bytes of large bodies that were read so far would have been parsed.
    parsed: Mutex<Instant>,
    refused: AtomicU64,
}

/// So many of something, which are taken for a while, and those who wait for some.
#[derive(Debug)]
struct Pool {
    most: usize,
    free: Arc<Semaphore>,
    waiting: AtomicUsize,
}

/// Room for one body; dropping it gives the room back.
#[derive(Debug, Default)]
pub struct Reserved {
    _room: Option<OwnedSemaphorePermit>,
}

/// For metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes taken by bodies over [`FREE_BYTES`].
    pub body_bytes: usize,
    /// Texts that are worked on.
    pub working: usize,
    /// Texts that wait for a worker.
    pub waiting: usize,
    /// Requests refused here since the start.
    pub refused: u64,
}

impl Default for Intake {
    fn default() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Intake {
    /// For a machine of so many cores.
    pub fn new(cores: usize) -> Self {
        let room = |bytes: usize| Pool::new(bytes / UNIT_BYTES);
        let (medium_bytes, large_bytes) = (room(MEDIUM_BUDGET_BYTES), room(BUDGET_BYTES));
        // The reactor and the small texts keep half of the machine.
        let workers = (cores / 2).clamp(1, 4);
        let (small, large, behind) = (Pool::new(cores.max(1)), Pool::new(workers), Behind::new());
        let (parsed, refused) = (Mutex::new(Instant::now()), AtomicU64::default());
        Self { inner: Arc::new(Inner { medium_bytes, large_bytes, small, large, behind, parsed, refused }) }
    }

    /// Room for a body of so many bytes, before more than [`FREE_BYTES`] of it are read.
    ///
    /// # Errors
    /// `Overloaded`: others took all the room, for longer than is worth waiting.
    pub async fn reserve(&self, bytes: usize) -> Result<Reserved, Error> {
        self.reserve_for(bytes, bytes).await
    }

    /// The same for a body that takes `cost` bytes of memory.
    ///
    /// # Errors
    /// As there.
    pub async fn reserve_for(&self, bytes: usize, cost: usize) -> Result<Reserved, Error> {
        if cost <= FREE_BYTES {
            return Ok(Reserved::default());
        }
        let room = if bytes < LARGE_BYTES { &self.inner.medium_bytes } else { &self.inner.large_bytes };
        let units = u32::try_from(cost.div_ceil(UNIT_BYTES).min(room.most)).unwrap_or(u32::MAX);
        let room = room.take(units).await;
        let room = room.ok_or_else(|| self.refuse("too many large requests arrive at once: try later"))?;
        Ok(Reserved { _room: Some(room) })
    }

    /// How long a body of so many bytes that has room may take to arrive.
    pub fn arrives_within(bytes: usize) -> Duration {
        ARRIVES_WITHIN + Duration::from_secs(bytes as u64) / SLOWEST_BYTES_PER_SECOND
    }

    /// Waits until it is time to read more of a body of which `before` bytes were read, and now `bytes` more.
    pub async fn pace(&self, before: usize, bytes: usize) {
        if before + bytes < LARGE_BYTES {
            return;
        }
        let takes = Duration::from_secs(bytes as u64) / (BYTES_PER_SECOND * self.inner.large.most as u32);
        let until = {
            let mut parsed = self.inner.parsed.lock().unwrap_or_else(PoisonError::into_inner);
            *parsed = (*parsed).max(Instant::now()) + takes;
            *parsed
        };
        sleep_until(until).await;
    }

    /// Does the work on so many bytes of text without holding up the requests of others.
    ///
    /// # Errors
    /// Those of `work`; `Overloaded` when no worker is free for long, `Internal` when the work panicked.
    pub async fn work<T: Send + 'static, E: From<Error> + Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        let workers = if bytes < LARGE_BYTES { &self.inner.small } else { &self.inner.large };
        let worker =
            workers.take(1).await.ok_or_else(|| self.refuse("too many texts are tokenized at once: try later"))?;
        // The permit goes with the work: a client that leaves does not free a thread that still computes.
        let work = move || {
            let result = work();
            drop(worker);
            result
        };
        let done = if bytes < LARGE_BYTES { spawn_blocking(work) } else { self.behind(work) };
        done.await.map_err(|_| Error::new(ErrorKind::Internal, "the tokenizer failed on this text"))?
    }

    /// Does large work on a thread of its own that waits for all others. What may wait in it is up to the caller: there
    /// are [`MAX_BEHIND`] such threads.
    pub fn behind<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.inner.behind.spawn_blocking(work)
    }

    /// Now.
    pub fn load(&self) -> Load {
        let Inner { medium_bytes, large_bytes, small, large, refused, .. } = &*self.inner;
        Load {
            body_bytes: (medium_bytes.taken() + large_bytes.taken()) * UNIT_BYTES,
            working: small.taken() + large.taken(),
            waiting: small.waiting.load(Ordering::Relaxed) + large.waiting.load(Ordering::Relaxed),
            refused: refused.load(Ordering::Relaxed),
        }
    }

    fn refuse(&self, why: &str) -> Error {
        self.inner.refused.fetch_add(1, Ordering::Relaxed);
        Error::new(ErrorKind::Overloaded, why)
    }
}

/// Threads whose work waits for all others': where the system has no core to spare, a text of megabytes holds up
/// nobody. They have a pool of their own, as a thread's priority can only be lowered.
#[derive(Debug)]
struct Behind(Option<Runtime>);

impl Behind {
    fn new() -> Self {
        let mut pool = Builder::new_current_thread();
        let pool = pool.max_blocking_threads(MAX_BEHIND).thread_keep_alive(IDLE_THREADS).on_thread_start(|| {
            // On Linux it is the calling thread's alone.
            if let Err(error) = setpriority_process(None, NICE) {
                tracing::warn!(%error, "large texts are worked on at the priority of all else");
            }
        });
        // Without it the work is done where small texts are.
        Self(pool.build().ok())
    }

    fn spawn_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        match &self.0 {
            Some(pool) => pool.spawn_blocking(work),
            None => spawn_blocking(work),
        }
    }
}

impl Drop for Behind {
    /// Nobody waits for the threads: the last handle may go where waiting is not allowed.
    fn drop(&mut self) {
        if let Some(pool) = self.0.take() {
            pool.shutdown_background();
        }
    }
}

impl Pool {
    fn new(most: usize) -> Self {
        Self { most, free: Arc::new(Semaphore::new(most)), waiting: AtomicUsize::default() }
    }

    /// So many of them, now or when others give them back. `None`: too many wait already, or none came in time.
    async fn take(&self, count: u32) -> Option<OwnedSemaphorePermit> {
        if let Ok(taken) = Arc::clone(&self.free).try_acquire_many_owned(count) {
            return Some(taken);
        }
        let _place = Waits::enter(&self.waiting)?;
        timeout(PATIENCE, Arc::clone(&self.free).acquire_many_owned(count)).await.ok()?.ok()
    }

    fn taken(&self) -> usize {
        self.most - self.free.available_permits()
    }
}

/// One that waits, also while it is being dropped.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn enter(waiting: &'a AtomicUsize) -> Option<Self> {
        let entered = waiting.fetch_add(1, Ordering::Relaxed) < MAX_WAITING;
        let place = Self(waiting);
        entered.then_some(place)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn large_bodies_together_come_as_fast_as_they_are_parsed() {
        let (intake, begun) = (Intake::new(2), Instant::now());
        intake.pace(0, LARGE_BYTES - 1).await;
        assert_eq!(begun.elapsed(), Duration::ZERO, "most prompts wait for nothing");
        let half = BYTES_PER_SECOND as usize / 4;
        tokio::join!(intake.pace(half, half), intake.pace(half, half));
        let took = begun.elapsed().as_millis();
        assert!((500..=502).contains(&took), "{took} ms for half a second's bytes");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let later = Instant::now();
        intake.pace(half, half).await;
        assert!(later.elapsed() >= Duration::from_millis(250), "a quiet minute saves nothing up");
    }

    #[tokio::test(start_paused = true)]
    async fn large_bodies_share_a_budget_and_small_ones_need_none() {
        let intake = Intake::new(2);
        let mut held = Vec::new();
        for _ in 0..BUDGET_BYTES / MAX_MESSAGE_BYTES {
            held.push(intake.reserve(MAX_MESSAGE_BYTES).await.unwrap());
        }
        assert_eq!(intake.load().body_bytes, BUDGET_BYTES);
        let refused = intake.reserve(LARGE_BYTES).await.unwrap_err();
        assert_eq!((refused.kind, intake.load().refused), (ErrorKind::Overloaded, 1));
        for _ in 0..MEDIUM_BUDGET_BYTES / LARGE_BYTES {
            held.push(intake.reserve(LARGE_BYTES - 1).await.expect("room of their own"));
        }
        assert_eq!(intake.load().body_bytes, BUDGET_BYTES + MEDIUM_BUDGET_BYTES);
        let refused = intake.reserve(FREE_BYTES + 1).await.unwrap_err();
        assert_eq!((refused.kind, intake.load().refused), (ErrorKind::Overloaded, 2));
        assert!(intake.reserve(FREE_BYTES).await.is_ok());
        drop(held);
        assert!(intake.reserve(usize::MAX).await.is_ok(), "whatever is announced, the whole budget is enough");
        assert_eq!(intake.load().body_bytes, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn few_wait_for_room_and_the_others_are_refused_at_once() {
        let (intake, begun) = (Intake::new(2), Instant::now());
        let _all = intake.reserve(BUDGET_BYTES).await.unwrap();
        let waits = || {
            let intake = intake.clone();
            tokio::spawn(async move { intake.reserve(LARGE_BYTES).await.is_err() })
        };
        let waiting: Vec<_> = (0..MAX_WAITING).map(|_| waits()).collect();
        while intake.inner.large_bytes.waiting.load(Ordering::Relaxed) < MAX_WAITING {
            tokio::task::yield_now().await;
        }
        assert!(intake.reserve(LARGE_BYTES).await.is_err());
        assert_eq!((begun.elapsed(), intake.load().refused), (Duration::ZERO, 1));
        for one in waiting {
            assert!(one.await.unwrap(), "no room came");
        }
        assert!(begun.elapsed() < PATIENCE + Duration::from_secs(1));
        assert_eq!(intake.load().refused, 1 + MAX_WAITING as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_room_gets_it() {
        let intake = Intake::new(2);
        let all = intake.reserve(BUDGET_BYTES).await.unwrap();
        let waits = tokio::spawn({
            let intake = intake.clone();
            async move { intake.reserve(1 << 20).await.is_ok() }
        });
        tokio::task::yield_now().await;
        drop(all);
        assert!(waits.await.unwrap());
    }

    #[tokio::test]
    async fn texts_have_as_many_threads_as_there_are_and_no_more() {
        use std::sync::mpsc::channel;
        let intake = Intake::new(1);
        let (sender, holds) = channel::<()>();
        let busy = tokio::spawn({
            let intake = intake.clone();
            async move { intake.work(LARGE_BYTES, move || Ok::<_, Error>(holds.recv().is_ok())).await }
        });
        while intake.load().working == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(intake.work(INLINE_BYTES, || Ok::<_, Error>(7)).await, Ok(7), "small texts wait for nobody");
        assert_eq!(intake.work(LARGE_BYTES - 1, || Ok::<_, Error>(8)).await, Ok(8), "nor do those of the other class");
        let waits: Vec<_> = (0..MAX_WAITING)
            .map(|_| {
                let intake = intake.clone();
                tokio::spawn(async move { intake.work(LARGE_BYTES, || Ok::<_, Error>(9)).await })
            })
            .collect();
        while intake.load().waiting < MAX_WAITING {
            tokio::task::yield_now().await;
        }
        let refused = intake.work(LARGE_BYTES, || Ok::<_, Error>(10)).await.unwrap_err();
        assert_eq!((refused.kind, intake.load().waiting), (ErrorKind::Overloaded, MAX_WAITING));
        sender.send(()).unwrap();
        assert_eq!(busy.await.unwrap(), Ok(true));
        for one in waits {
            assert_eq!(one.await.unwrap(), Ok(9));
        }
        assert_eq!(intake.load(), Load { refused: 1, ..Load::default() });
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error_and_keeps_no_thread() {
        let intake = Intake::new(1);
        for _ in 0..3 {
            let failed = intake.work::<(), Error>(LARGE_BYTES, || panic!("as a test wants")).await.unwrap_err();
            assert_eq!(failed.kind, ErrorKind::Internal);
        }
        assert_eq!(intake.load(), Load::default());
    }
}
