//! The threads that compute. A step forks and joins some hundred times, a few microseconds of work each, so that a
//! fork is one atomic store: workers look for the next region for some microseconds after the last one and sleep only
//! then. Between steps nobody spins. The caller works too, and waits only for tasks that somebody has begun: a
//! worker that the system does not run (more threads than free cores) holds nobody up.
//!
//! Beside its workers, which stay on the node's own cores, a pool may have *guests*: threads on cores that other nodes
//! lend ([`super::lending`]). A region calls those whose core is free; they leave when its node has work, or when no
//! region comes.
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use super::Shared;
use super::lending::{Lending, Place};

/// Looks for work before a worker sleeps: 30 to 100 µs, longer than the serial pieces of a step.
const SPINS: u32 = 3000;
/// Looks of the caller for the end of a region before it offers its core to the worker that it waits for.
const SPINS_BEFORE_YIELD: u32 = 1000;

/// Tasks of a region at most: the fields of [`Inner::state`] are 24 bits wide, and each thread may overshoot by one.
const MOST_TASKS: usize = 1 << 23;

/// Threads of one executor. Dropping it ends them.
pub struct Pool {
    inner: Arc<Inner>,
    workers: Vec<JoinHandle<()>>,
    /// Where the caller has yet to be bound.
    caller_cpu: Option<usize>,
    lending: Option<Lending>,
}

struct Inner {
    /// The caller, the workers and the guests.
    threads: AtomicUsize,
    /// `region << 48 | tasks << 24 | next task`. One word, so that whoever takes a task knows that it exists.
    state: AtomicU64,
    job: AtomicPtr<Job<'static>>,
    /// Tasks of the region that have ended.
    done: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    /// Only the caller locks it, so the lock is never contended.
    guests: Mutex<Vec<Guest>>,
    /// Since [`Pool::lent_share`] asked last: of all, and of guests.
    tasks: AtomicUsize,
    lent_tasks: Padded,
}

/// In cache lines of its own: what guests write does not slow down who reads what is beside it.
#[repr(align(128))]
#[derive(Default)]
struct Padded(AtomicUsize);

/// A thread on a core that another node lends, when it does.
struct Guest {
    place: Place,
    /// It is to look for tasks; it takes that back when it leaves.
    called: Arc<AtomicBool>,
    thread: Thread,
}

struct Job<'a>(&'a (dyn Fn(usize) + Sync));

thread_local! {
    /// The pool that this thread's regions run on; null inside of one.
    static CURRENT: Cell<*const Inner> = const { Cell::new(ptr::null()) };
}

impl Pool {
    /// A pool of `threads` threads, of which the caller of [`Pool::install`] is one. Thread `i` is bound to the core
    /// `cpus[i % cpus.len()]`; with no `cpus`, the system places them.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(threads: usize, cpus: Vec<usize>) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            threads: AtomicUsize::new(threads.max(1)),
            state: AtomicU64::new(0),
            job: AtomicPtr::new(ptr::null_mut()),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            guests: Mutex::default(),
            tasks: AtomicUsize::new(0),
            lent_tasks: Padded::default(),
        });
        // Made first: if a later thread does not start, dropping the pool ends the earlier ones.
        let mut pool = Self { inner, workers: Vec::new(), caller_cpu: cpus.first().copied(), lending: None };
        for number in 1..threads {
            let (inner, cpu) = (Arc::clone(&pool.inner), cpus.get(number % cpus.len().max(1)).copied());
            let body = move || {
                if let Some(cpu) = cpu {
                    bind(cpu);
                }
                inner.work();
            };
            pool.workers.push(std::thread::Builder::new().name(format!("compute-{number}")).spawn(body)?);
        }
        Ok(pool)
    }

    /// Threads, the caller's and guests counted.
    pub fn threads(&self) -> usize {
        self.inner.threads()
    }

    /// The pool of a node that lends its cores and borrows others', from its first [`Pool::rest`] on.
    pub fn share_cores(&mut self, lending: Lending) {
        self.lending = Some(lending);
    }

    /// No region comes for now: until the next [`Pool::install`] the cores are lent.
    pub fn rest(&mut self) {
        self.lending.iter_mut().for_each(Lending::lend);
    }

    /// The part of the tasks since the last call that was computed on borrowed cores: 0 to 1.
    pub fn lent_share(&mut self) -> f64 {
        let [lent, all] = [&self.inner.lent_tasks.0, &self.inner.tasks].map(|tasks| tasks.swap(0, Ordering::Relaxed));
        lent as f64 / all.max(1) as f64
    }

    /// A guest for each core of another node that has come since the last time.
    fn meet_others(&mut self) {
        let Some(lending) = &self.lending else { return };
        let mut guests = self.inner.guests.lock().unwrap_or_else(PoisonError::into_inner);
        for core in lending.others() {
            if guests.iter().any(|guest| guest.place.core() == core) {
                continue;
            }
            let (place, called) = (lending.place(core), Arc::new(AtomicBool::new(false)));
            let body = {
                let (inner, place, called) = (Arc::clone(&self.inner), place.clone(), Arc::clone(&called));
                move || inner.visit(&place, &called)
            };
            match std::thread::Builder::new().name(format!("guest-{core}")).spawn(body) {
                Ok(handle) => {
                    guests.push(Guest { place, called, thread: handle.thread().clone() });
                    self.workers.push(handle);
                    self.inner.threads.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => tracing::warn!(core, "no thread for a core that another node lends: {error}"),
            }
        }
    }

    /// Runs `f` with the kernels' regions on this pool. One caller at a time, which `&mut` sees to.
    pub fn install<R>(&mut self, f: impl FnOnce() -> R) -> R {
        struct Restore(*const Inner);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        if let Some(cpu) = self.caller_cpu.take() {
            bind(cpu);
        }
        if self.lending.as_mut().is_some_and(Lending::take_back) {
            self.meet_others();
        }
        let _restore = Restore(CURRENT.replace(Arc::as_ptr(&self.inner)));
        f()
    }
}

/// Binds the calling thread to a core; whether that went well.
fn bind(cpu: usize) -> bool {
    // SAFETY: a set of zeros is empty; the core's bit is in the set; the call reads the set only.
    let bound = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpu < 8 * size_of_val(&set) && {
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set) == 0
        }
    };
    if !bound {
        tracing::warn!(cpu, "a compute thread stays unbound: {}", std::io::Error::last_os_error());
    }
    bound
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::SeqCst);
        self.inner.wake_all();
        self.workers.iter().for_each(|worker| worker.thread().unpark());
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Threads that [`for_each`] would use here.
pub fn threads() -> usize {
    // SAFETY: not null only inside `install`, whose pool outlives it.
    unsafe { CURRENT.get().as_ref() }.map_or(1, Inner::threads)
}

/// `f` of `0..tasks`, each once, in any order, on the threads of the installed pool; without one, or inside a task, on
/// the caller's.
///
/// # Panics
/// If a task does, after all have ended.
pub fn for_each(tasks: usize, f: impl Fn(usize) + Sync) {
    let current = CURRENT.get();
    // SAFETY: not null only inside `install`, whose pool outlives it.
    match unsafe { current.as_ref() } {
        Some(inner) if inner.threads() > 1 && (2..MOST_TASKS).contains(&tasks) => {
            CURRENT.set(ptr::null());
            let outcome = catch_unwind(AssertUnwindSafe(|| inner.run(tasks, &f)));
            CURRENT.set(current);
            outcome.unwrap_or_else(|panic| resume_unwind(panic));
        }
        _ => (0..tasks).for_each(f),
    }
}

/// Like [`for_each`] over the runs of at least `least` numbers into which `0..n` is cut for the threads.
pub fn for_each_run(n: usize, least: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
    let runs = (n / least.max(1)).clamp(1, 2 * threads());
    for_each(runs, |run| f(run * n / runs..(run + 1) * n / runs));
}

/// Like [`for_each`]: `f` of each element and its index.
pub fn for_each_of<T: Send>(elements: &mut [T], f: impl Fn(usize, &mut T) + Sync) {
    let first = Shared(elements.as_mut_ptr());
    // SAFETY: the index is below the slice's length, and no other task has it.
    for_each(elements.len(), |index| f(index, unsafe { &mut *first.get().add(index) }));
}

impl Inner {
    fn threads(&self) -> usize {
        self.threads.load(Ordering::Relaxed)
    }

    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let mut job = Job(f);
        self.done.store(0, Ordering::Relaxed);
        self.job.store((&raw mut job).cast(), Ordering::Relaxed);
        let region = (self.state.load(Ordering::Relaxed) >> 48).wrapping_add(1);
        // Publishes the two stores above; sequentially consistent because of the sleepers, see `sleep_until`.
        self.state.store(region << 48 | (tasks as u64) << 24, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
        self.tasks.fetch_add(tasks, Ordering::Relaxed);
        self.call_guests();
        self.take_tasks();
        let mut spins = 0;
        while self.done.load(Ordering::Acquire) < tasks {
            spins += 1;
            match spins < SPINS_BEFORE_YIELD {
                true => std::hint::spin_loop(),
                false => std::thread::yield_now(),
            }
        }
        if self.panicked.swap(false, Ordering::Relaxed) {
            panic!("a compute task panicked");
        }
    }

    /// Until none is left in the present region; returns its number.
    fn take_tasks(&self) -> u64 {
        loop {
            if let Err(region) = self.take_task(false) {
                return region;
            }
        }
    }

    /// Computes one, if one is left; else returns the number of the region, which has none to take any more.
    fn take_task(&self, by_guest: bool) -> Result<(), u64> {
        let state = self.state.fetch_add(1, Ordering::AcqRel);
        let (region, tasks, next) = (state >> 48, state >> 24 & 0xff_ffff, state & 0xff_ffff);
        if next >= tasks {
            return Err(region);
        }
        if by_guest {
            self.lent_tasks.0.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the task `next` has not ended, so `run` has not returned, and the job is on its stack.
        let Job(f) = unsafe { &*self.job.load(Ordering::Relaxed) };
        if catch_unwind(AssertUnwindSafe(|| f(next as usize))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.done.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Those who are away, as far as they have where to work.
    fn call_guests(&self) {
        for guest in &*self.guests.lock().unwrap_or_else(PoisonError::into_inner) {
            if !guest.called.load(Ordering::Relaxed) && guest.place.is_free() {
                guest.called.store(true, Ordering::Release);
                guest.thread.unpark();
            }
        }
    }

    /// A guest's life.
    fn visit(&self, place: &Place, called: &AtomicBool) {
        if !bind(place.core()) {
            // It would work on this node's own cores. Nobody calls who was called.
            return called.store(true, Ordering::Relaxed);
        }
        while !self.stop.load(Ordering::SeqCst) {
            if called.load(Ordering::Acquire) {
                if let Some(_stay) = place.take() {
                    self.help(place);
                }
                called.store(false, Ordering::Release);
            } else {
                std::thread::park();
            }
        }
    }

    /// Until the core's node has work, or no region comes.
    fn help(&self, place: &Place) {
        let (mut over, mut spins) = (None, 0);
        while place.is_lent() && spins < SPINS && !self.stop.load(Ordering::Relaxed) {
            if over == Some(self.state.load(Ordering::Relaxed) >> 48) {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            over = self.take_task(true).err();
            if over.is_none() {
                spins = 0;
            }
        }
    }

    fn work(&self) {
        loop {
            let region = self.take_tasks();
            let mut spins = 0;
            while self.state.load(Ordering::Relaxed) >> 48 == region {
                spins += 1;
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                match spins < SPINS {
                    true => std::hint::spin_loop(),
                    false => self.sleep_until_after(region),
                }
            }
        }
    }

    /// Either this sees the next region's state, or `run` sees the sleeper: both sides write before they read, in one
    /// total order.
    fn sleep_until_after(&self, region: u64) {
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.state.load(Ordering::SeqCst) >> 48 == region && !self.stop.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        // Taken, so that nobody is between his last look and his sleep.
        drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn every_task_runs_once_and_the_caller_waits_for_all() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads, Vec::new()).unwrap();
            pool.install(|| {
                for tasks in (0..40).chain([1000]).cycle().take(600) {
                    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    for_each(tasks, |task| {
                        // A region in a task runs on its thread.
                        for_each(2, |_| {
                            counts[task].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2), "{threads} {tasks}");
                }
            });
        }
    }

    #[test]
    fn sleeping_workers_wake_for_the_next_region() {
        let mut pool = Pool::new(3, Vec::new()).unwrap();
        for _ in 0..20 {
            while pool.inner.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            // The barrier opens only if all three threads take part.
            let barrier = std::sync::Barrier::new(3);
            pool.install(|| for_each(3, |_| _ = barrier.wait()));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(2, Vec::new()).unwrap();
        for _ in 0..5 {
            let outcome = catch_unwind(AssertUnwindSafe(|| pool.install(|| for_each(8, |task| assert!(task != 3)))));
            assert!(outcome.is_err());
            let sum = AtomicUsize::new(0);
            pool.install(|| for_each(8, |task| _ = sum.fetch_add(task, Ordering::Relaxed)));
            assert_eq!(sum.into_inner(), 28);
        }
    }

    /// Pools of two nodes with a core each, as far as they know: the threads may all run on the same one.
    fn sharing(file: &std::path::Path) -> [Pool; 2] {
        [0, 1].map(|core| {
            let mut pool = Pool::new(1, Vec::new()).unwrap();
            pool.share_cores(Lending::join(file, &[core]).unwrap());
            pool
        })
    }

    fn sum_of(pool: &mut Pool, tasks: usize) -> usize {
        let sum = AtomicUsize::new(0);
        pool.install(|| for_each(tasks, |task| _ = sum.fetch_add(task, Ordering::Relaxed)));
        sum.into_inner()
    }

    #[test]
    fn a_lent_core_computes_and_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let [mut one, mut two] = sharing(&folder.path().join("cores"));
        two.rest();
        assert_eq!((sum_of(&mut one, 50), one.threads()), (1225, 1), "before it has lent its own, it borrows none");
        one.rest();
        let (begun, mut lent) = (Instant::now(), 0.0);
        while lent == 0.0 && may_use_core_1() && begun.elapsed() < Duration::from_secs(10) {
            assert_eq!(sum_of(&mut one, 50), 1225);
            lent = one.lent_share();
        }
        assert_eq!((sum_of(&mut one, 50), one.threads()), (1225, 2));
        assert_eq!(lent > 0.0, may_use_core_1());
        assert_eq!(sum_of(&mut two, 50), 1225, "from here on the other has work");
        one.lent_share();
        for _ in 0..100 {
            assert_eq!(sum_of(&mut one, 50), 1225);
        }
        assert!(one.lent_share() == 0.0, "its node has work");
        two.rest();
        drop(two);
        assert_eq!(sum_of(&mut one, 50), 1225);
    }

    fn may_use_core_1() -> bool {
        std::thread::spawn(|| bind(1)).join().unwrap()
    }

    #[test]
    fn every_element_is_changed_once() {
        let mut pool = Pool::new(3, Vec::new()).unwrap();
        let mut elements: Vec<usize> = (0..100).collect();
        pool.install(|| for_each_of(&mut elements, |index, element| *element += index));
        assert!(elements.into_iter().eq((0..200).step_by(2)));
    }

    #[test]
    fn runs_cover_everything_once() {
        let mut pool = Pool::new(3, Vec::new()).unwrap();
        for (n, least) in [(0, 4), (1, 4), (16, 4), (17, 1), (100, 200)] {
            let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.install(|| {
                for_each_run(n, least, |run| run.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed)))
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
