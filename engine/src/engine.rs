//! The handle to an engine, and what drives its worker. The handle validates and queues; the worker (`worker.rs`)
//! steps, and tells each sequence's reader what became of it (`stream.rs`).
//!
//! Two drivers: a thread of its own ([`Engine::start`]), and a future whose steps take tokio's time instead of the
//! machine's ([`Engine::stepped`], in [`stepper`]), for many engines in one simulated cluster. They differ in where
//! they wait and whose clock they read, and the future has one step under way at a time.
mod stepper;
mod stream;
mod warm_up;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tandem_memory::KvMemory;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::blocks::BlockPool;
use crate::error::EngineError;
use crate::executor::{Batch, EngineSpec, Executor};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::sequence::SequenceRequest;
use crate::step_model::{StepCost, StepShape};

pub use stepper::Stepper;
use stream::Client;
pub use stream::SequenceStream;
use worker::Worker;

/// A longer queue would only outlive its callers' deadlines.
const MAX_INBOX: usize = 1 << 16;

/// Handle to one engine; clones are cheap. Dropping the last one shuts the engine down.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    inbox: mpsc::Sender<Message>,
    shared: Arc<Shared>,
    spec: EngineSpec,
    pool: BlockPool,
    memory: Arc<dyn KvMemory>,
    /// `None` when it is driven otherwise, or has ended.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What handle, worker and streams all see.
#[derive(Debug)]
struct Shared {
    /// One permit for each sequence that may wait to run.
    queue: Arc<Semaphore>,
    queue_limit: usize,
    /// Given tokens that the worker has not taken out of the inbox.
    inbox_tokens: AtomicUsize,
    /// As of the worker's last step.
    scheduled_tokens: AtomicUsize,
    running_tokens: AtomicUsize,
    /// Started and not ended: those in the batch and the preempted.
    started: AtomicUsize,
    /// Waiting to be computed again.
    preempted: AtomicUsize,
    preemptions: AtomicU64,
    own_steps: AtomicU64,
    helped_steps: AtomicU64,
    steps_ahead: AtomicU64,
    cost: Mutex<StepCost>,
    /// When the step that runs began: the oldest of those under way.
    step_began: Mutex<Option<Instant>>,
    stop: AtomicBool,
    /// Why the worker has ended; set before it lets go of its streams.
    stopped: OnceLock<String>,
}

impl Shared {
    fn step_began(&self, at: Option<Instant>) {
        *self.step_began.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }
}

enum Message {
    Submit(Box<Submission>),
    /// Run these and learn from them; they are nobody's.
    WarmUp(Vec<Batch>, oneshot::Sender<Result<(), EngineError>>),
    /// Look at `Shared::stop`.
    Wake,
}

struct Submission {
    request: SequenceRequest,
    client: Client,
}

/// A momentary picture of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences in the running batch.
    pub running: usize,
    /// Sequences that wait to join it.
    pub waiting: usize,
    /// Tokens known but not computed.
    pub queued_tokens: usize,
    /// Positions in the KV of the running batch: what its next step reads.
    pub running_tokens: usize,
    /// KV blocks in no lease, the cached ones included.
    pub free_blocks: usize,
    /// Those of the free blocks whose KV can be reused.
    pub cached_blocks: usize,
    /// How often a sequence has given its blocks to another, since the engine started.
    pub preemptions: u64,
    /// Steps so far on this node's cores alone, and those with cores that other nodes lent.
    pub steps: [u64; 2],
    /// Steps that began while another was under way: counted as they begin, so those that fail later as well.
    pub steps_ahead: u64,
    /// How long steps take here, as measured; where nodes lend each other cores: while the others have nothing to do.
    pub step_cost: StepCost,
}

impl Engine {
    /// Starts the thread. Should the system refuse one, the engine is there but stopped, and says so on `submit`.
    pub fn start(executor: Box<dyn Executor>, config: SchedulerConfig) -> Self {
        let (mut inner, worker) = Inner::new(executor, config);
        let spawned = std::thread::Builder::new().name("engine".into()).spawn(move || worker.live());
        let thread = spawned.map_err(|error| inner.shared.stopped.set(format!("no thread: {error}"))).ok();
        inner.thread = Mutex::new(thread);
        Self(Arc::new(inner))
    }

    /// An engine without a thread: it computes while somebody polls [`Stepper::run`]. A step's time is `step_time` of
    /// its shape, in tokio's clock, whatever the executor takes.
    pub fn stepped(
        executor: Box<dyn Executor>,
        config: SchedulerConfig,
        step_time: impl Fn(StepShape) -> Duration + Send + Sync + 'static,
    ) -> (Self, Stepper) {
        let (inner, worker) = Inner::new(executor, config);
        (Self(Arc::new(inner)), Stepper::new(worker, step_time))
    }

    /// Runs a few steps for nobody, see [`warm_up`]. A step is not larger than `max_step_tokens`.
    ///
    /// # Errors
    /// The first that failed; `Stopped` when the engine is, or when a step panicked; `Overloaded` when it has work
    /// already.
    pub async fn warm_up(&self, max_step_tokens: usize) -> Result<(), EngineError> {
        let Inner { inbox, shared, spec, pool, .. } = &*self.0;
        let (done, outcome) = oneshot::channel();
        // Where there are no blocks for it, it goes without.
        let batches = warm_up::kinds(pool, spec, max_step_tokens).unwrap_or_default();
        inbox.try_send(Message::WarmUp(batches, done)).map_err(|refused| match refused {
            TrySendError::Full(_) => EngineError::Overloaded("it has work already".into()),
            TrySendError::Closed(_) => EngineError::Stopped(shared.stop_reason()),
        })?;
        outcome.await.unwrap_or_else(|_| Err(EngineError::Stopped(shared.stop_reason())))
    }

    /// What the engine serves.
    pub fn spec(&self) -> &EngineSpec {
        &self.0.spec
    }

    /// The KV blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.0.pool
    }

    /// The KV memory: block `b` is the bytes `b * block_bytes ..` of it.
    pub fn memory(&self) -> Arc<dyn KvMemory> {
        Arc::clone(&self.0.memory)
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong request, `Overloaded` when as many wait as may, `Stopped` when the engine is.
    pub fn submit(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let Inner { inbox, shared, spec, pool, .. } = &*self.0;
        request.validate(spec, pool)?;
        if let Some(reason) = self.stopped() {
            return Err(EngineError::Stopped(reason.to_owned()));
        }
        let overloaded = || EngineError::Overloaded(format!("{} sequences wait already", shared.queue_limit));
        let place = Arc::clone(&shared.queue).try_acquire_owned().map_err(|_| overloaded())?;
        let (sender, events) = mpsc::channel(request.max_events(spec.max_context_tokens));
        let tokens = request.queued_tokens();
        let client = Client::new(sender, place, request.report_layers.clone());
        shared.inbox_tokens.fetch_add(tokens, Ordering::Relaxed);
        inbox.try_send(Message::Submit(Box::new(Submission { request, client }))).map_err(|refused| {
            shared.inbox_tokens.fetch_sub(tokens, Ordering::Relaxed);
            match refused {
                TrySendError::Full(_) => overloaded(),
                TrySendError::Closed(_) => EngineError::Stopped(shared.stop_reason()),
            }
        })?;
        Ok(SequenceStream::new(events, Arc::clone(shared)))
    }

    /// A momentary picture; cheap. A sequence that moves from waiting to running may be counted in both, never in none.
    pub fn load(&self) -> EngineLoad {
        let shared = &self.0.shared;
        let waiting = shared.queue_limit - shared.queue.available_permits().min(shared.queue_limit);
        let tokens = [&shared.inbox_tokens, &shared.scheduled_tokens];
        let pool = &self.0.pool;
        let started = shared.started.load(Ordering::Acquire);
        let preempted = shared.preempted.load(Ordering::Relaxed).min(started);
        EngineLoad {
            running: started - preempted,
            waiting: waiting + preempted,
            queued_tokens: tokens.iter().map(|count| count.load(Ordering::Relaxed)).sum(),
            running_tokens: shared.running_tokens.load(Ordering::Relaxed),
            free_blocks: pool.free(),
            cached_blocks: pool.cached(),
            preemptions: shared.preemptions.load(Ordering::Relaxed),
            steps: [&shared.own_steps, &shared.helped_steps].map(|steps| steps.load(Ordering::Relaxed)),
            steps_ahead: shared.steps_ahead.load(Ordering::Relaxed),
            step_cost: *shared.cost.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// How long the step that runs has taken so far. Of an engine with a thread: virtual time knows no step that hangs.
    pub fn step_age(&self) -> Option<Duration> {
        let began = *self.0.shared.step_began.lock().unwrap_or_else(PoisonError::into_inner);
        began.map(|began| began.elapsed())
    }

    /// Why the engine takes no more work, when it does not: it was shut down, a step panicked, or its device is gone,
    /// which a step or a transfer of KV finds out.
    pub fn stopped(&self) -> Option<&str> {
        self.0.shared.stopped.get().map(String::as_str).or_else(|| self.0.memory.lost())
    }

    /// Ends the worker after its present step, and waits for its thread to do so if it has one; sequences that are not
    /// finished fail, those of steps that have begun behind it too. A node that drains waits for [`Engine::load`] to be
    /// empty first.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }
}

impl Inner {
    fn new(executor: Box<dyn Executor>, config: SchedulerConfig) -> (Self, Worker) {
        let (spec, memory) = (executor.spec().clone(), executor.memory());
        let queue_limit = config.inbox.clamp(1, MAX_INBOX);
        // Everyone who sends a submission holds a queue permit; one more place is for a wake-up.
        let (inbox, receiver) = mpsc::channel(queue_limit + 1);
        let shared = Arc::new(Shared {
            queue: Arc::new(Semaphore::new(queue_limit)),
            queue_limit,
            inbox_tokens: AtomicUsize::new(0),
            scheduled_tokens: AtomicUsize::new(0),
            running_tokens: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            preempted: AtomicUsize::new(0),
            preemptions: AtomicU64::new(0),
            own_steps: AtomicU64::new(0),
            helped_steps: AtomicU64::new(0),
            steps_ahead: AtomicU64::new(0),
            cost: Mutex::default(),
            step_began: Mutex::default(),
            stop: AtomicBool::new(false),
            stopped: OnceLock::new(),
        });
        let pool = BlockPool::with_prefix_caching(spec.total_blocks, spec.block_tokens, config.prefix_caching);
        let scheduler = Scheduler::new(&config, &spec, pool.clone());
        let worker = Worker::new(executor, scheduler, receiver, Arc::clone(&shared));
        (Self { inbox, shared, spec, pool, memory, thread: Mutex::default() }, worker)
    }

    fn shutdown(&self) {
        self.shared.stop.store(true, Ordering::Release);
        // A full inbox needs no wake-up: the worker is awake and looks at the flag before its next step.
        let _ = self.inbox.try_send(Message::Wake);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the engine thread panicked outside its steps");
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn stop_reason(&self) -> String {
        self.stopped.get().cloned().unwrap_or_else(|| "its worker is gone".into())
    }
}
