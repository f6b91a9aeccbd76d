//! The worker that owns executor and scheduler, what drives it, and the handle to it. The handle validates and queues;
//! the worker steps. It rests while there is nothing to run, and it never waits for a reader: a stream has room for
//! every event that its sequence can have.
//!
//! Where the executor lets several steps be under way ([`Executor::most_under_way`]), the worker begins the next one
//! before it waits for the end of the oldest: a device then goes from step to step without waiting for the host, which
//! reads, tells and plans meanwhile. What of that the scheduler can plan ahead is its matter, see `scheduler.rs`.
//!
//! Two drivers: a thread of its own ([`Engine::start`]), and a future whose steps take tokio's time instead of the
//! machine's ([`Engine::stepped`], in [`stepper`]), for many engines in one simulated cluster. They differ in where
//! they wait and whose clock they read, and the future has one step under way at a time.
mod stepper;
mod warm_up;

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tandem_memory::KvMemory;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::blocks::BlockPool;
use crate::error::EngineError;
use crate::executor::{Batch, EngineSpec, Executor, LayersDone, Seq};
use crate::pace::Pace;
use crate::sampling::Sampled;
use crate::scheduler::{Decision, Scheduler, SchedulerConfig};
use crate::sequence::{MAX_PREEMPTIONS_TOLD, SequenceEvent, SequenceRequest};
use crate::step_model::{StepCost, StepShape};

pub use stepper::Stepper;
use warm_up::Rounds;

/// A longer queue would only outlive its callers' deadlines.
const MAX_INBOX: usize = 1 << 16;

/// Where all blocks that a step wants are in transfers, so long passes until the next look.
const BLOCKS_AWAY: Duration = Duration::from_millis(1);

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

/// The worker's end of a stream.
struct Client {
    events: mpsc::Sender<SequenceEvent>,
    /// Held while the sequence waits.
    queue_place: Option<OwnedSemaphorePermit>,
    /// See `SequenceRequest::report_layers`; empty once the first token is there.
    report_layers: Vec<usize>,
    started: bool,
    /// So many preemptions can still be told.
    preemptions: usize,
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
        let report_layers = request.report_layers.clone();
        let preemptions = MAX_PREEMPTIONS_TOLD;
        let client = Client { events: sender, queue_place: Some(place), report_layers, started: false, preemptions };
        shared.inbox_tokens.fetch_add(tokens, Ordering::Relaxed);
        inbox.try_send(Message::Submit(Box::new(Submission { request, client }))).map_err(|refused| {
            shared.inbox_tokens.fetch_sub(tokens, Ordering::Relaxed);
            match refused {
                TrySendError::Full(_) => overloaded(),
                TrySendError::Closed(_) => EngineError::Stopped(shared.stop_reason()),
            }
        })?;
        Ok(SequenceStream { events, shared: Arc::clone(shared), ended: false })
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
        let worker = Worker {
            executor,
            under_way: VecDeque::new(),
            scheduler: Scheduler::new(&config, &spec, pool.clone()),
            pace: Pace::default(),
            warm: false,
            lost: None,
            clients: HashMap::new(),
            inbox: receiver,
            shared: Arc::clone(&shared),
            next_seq: 0,
        };
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

/// The events of one sequence. Dropping it cancels the sequence before the next step that the engine begins.
#[derive(Debug)]
pub struct SequenceStream {
    events: mpsc::Receiver<SequenceEvent>,
    shared: Arc<Shared>,
    ended: bool,
}

impl SequenceStream {
    /// The next event, or `None` after the last one. Always ends in `Finished` or `Failed`. Cancel-safe.
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        // Without an end from the worker, the worker itself has ended.
        let event = event.unwrap_or_else(|| SequenceEvent::Failed(EngineError::Stopped(self.shared.stop_reason())));
        self.ended = event.is_last();
        Some(event)
    }
}

/// A step under way.
struct Flight {
    /// Holds the leases of its sequences.
    batch: Batch,
    /// One that could not begin takes its turn all the same, as those before it have tokens to tell.
    begun: Result<(), EngineError>,
    /// When it was begun, or when the one before it ended, which it had to wait for.
    began: Instant,
}

/// What a step came to.
struct Outcome {
    /// Why it failed as a whole.
    failed: Option<EngineError>,
    decisions: Vec<(Seq, Decision)>,
}

impl Outcome {
    /// Waits for the executor's oldest step, which is `flight`.
    fn of(flight: &Flight, executor: &mut dyn Executor, scheduler: &Scheduler, done: &mut LayersDone<'_>) -> Self {
        let chosen = flight.begun.clone().and_then(|()| executor.finish(done));
        Self { failed: chosen.as_ref().err().cloned(), decisions: scheduler.resolve(&flight.batch, chosen) }
    }
}

/// What steps. Field order is drop order: the executor waits for what its device still computes before leases are back,
/// and those are before the streams end.
struct Worker {
    executor: Box<dyn Executor>,
    /// The oldest first.
    under_way: VecDeque<Flight>,
    scheduler: Scheduler,
    pace: Pace,
    /// Whether there was something to run: the warm-up shall learn what steps take on the node's own cores.
    warm: bool,
    /// Why no step can follow: the device is gone.
    lost: Option<String>,
    clients: HashMap<Seq, Client>,
    inbox: mpsc::Receiver<Message>,
    shared: Arc<Shared>,
    next_seq: Seq,
}

impl Worker {
    fn live(mut self) {
        // After a panic nothing of the executor is used again: the worker is dropped whole.
        let reason = match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(()) => self.ended(),
            Err(panic) => format!("a step panicked: {}", panic_message(&*panic)),
        };
        self.stopped(reason);
    }

    /// The thread's loop: blocks on the inbox while there is nothing to run.
    fn run(&mut self) {
        while self.lost.is_none() {
            if self.is_idle() {
                if self.warm {
                    self.executor.rest();
                }
                match self.inbox.blocking_recv() {
                    Some(message) => self.take(message),
                    None => return,
                }
            }
            if !self.take_waiting() {
                return;
            }
            self.begin_steps();
            if !self.end_step() && !self.scheduler.is_idle() {
                // Blocks come back from whoever moves KV, on other threads: a short look now and then costs less than a
                // wake-up at each of their releases.
                std::thread::park_timeout(BLOCKS_AWAY);
            }
        }
    }

    /// Whether there is nothing to do. A last step may be under way of which no sequence is left.
    fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.under_way.is_empty()
    }

    /// Takes what is in the inbox. False when the engine shall stop.
    fn take_waiting(&mut self) -> bool {
        while let Ok(message) = self.inbox.try_recv() {
            self.take(message);
        }
        !self.shared.stop.load(Ordering::Acquire)
    }

    /// Why the loop has ended.
    fn ended(&mut self) -> String {
        self.lost.take().unwrap_or_else(|| "it was shut down".to_owned())
    }

    fn stopped(&mut self, reason: String) {
        tracing::info!(reason, "the engine stops");
        let _ = self.shared.stopped.set(reason);
        self.shared.started.store(0, Ordering::Relaxed);
        self.shared.preempted.store(0, Ordering::Relaxed);
        self.shared.scheduled_tokens.store(0, Ordering::Relaxed);
        self.shared.running_tokens.store(0, Ordering::Relaxed);
    }

    fn take(&mut self, message: Message) {
        self.warm = true;
        match message {
            Message::Submit(submission) => self.enqueue(*submission),
            Message::WarmUp(batches, done) => {
                // Those under way would be taken for the warm-up's.
                while self.end_step() {}
                let outcome = self.warm_up(batches);
                // Who asked may have left: the engine is warm all the same.
                let _ = done.send(outcome);
            }
            Message::Wake => {}
        }
    }

    fn enqueue(&mut self, Submission { request, client }: Submission) {
        let tokens = request.queued_tokens();
        self.scheduler.enqueue(self.next_seq, request);
        self.clients.insert(self.next_seq, client);
        self.next_seq += 1;
        self.shared.scheduled_tokens.store(self.scheduler.queued_tokens(), Ordering::Relaxed);
        self.shared.inbox_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    fn warm_up(&mut self, kinds: Vec<Batch>) -> Result<(), EngineError> {
        let outcome = self.warm_up_rounds(&kinds);
        kinds.iter().flat_map(|batch| &batch.items).for_each(|item| self.executor.forget(item.seq));
        for (batch, took) in kinds.iter().zip(outcome?.learnt()) {
            self.learn(StepShape::of(batch), took);
        }
        Ok(())
    }

    fn warm_up_rounds(&mut self, kinds: &[Batch]) -> Result<Rounds, EngineError> {
        let mut rounds = Rounds::of(kinds.len());
        while rounds.next() {
            for (kind, batch) in kinds.iter().enumerate() {
                let few = batch.tokens() <= warm_up::DECODING;
                let wanted = if rounds.counts() { rounds.wants(kind) } else { few };
                if !wanted {
                    continue;
                }
                let begin = Instant::now();
                self.shared.step_began(Some(begin));
                let outcome = self.executor.begin(batch).and_then(|()| self.executor.finish(&mut |_| {}).map(drop));
                self.shared.step_began(None);
                outcome?;
                rounds.note(kind, begin.elapsed());
            }
        }
        Ok(rounds)
    }

    /// Who leaves, who starts, who gets blocks of whom, and the next step, if there is one.
    fn plan(&mut self, now: Instant) -> Option<Batch> {
        let gone = |seq| self.clients.get(&seq).is_none_or(|client| client.events.is_closed());
        let decisions = self.scheduler.admit(now, gone);
        self.apply(decisions, now);
        // Each round preempts a sequence or is the last but one.
        loop {
            let decisions = self.scheduler.fit();
            if decisions.is_empty() {
                break;
            }
            self.apply(decisions, now);
        }
        Some(self.scheduler.plan()).filter(|batch| !batch.items.is_empty())
    }

    /// Begins steps as long as the executor takes some and they can be planned.
    fn begin_steps(&mut self) {
        let refused = |flight: &Flight| flight.begun.is_err();
        while self.under_way.len() < self.executor.most_under_way() && !self.under_way.back().is_some_and(refused) {
            let Some(batch) = self.plan(Instant::now()) else { return };
            let began = Instant::now();
            if self.under_way.is_empty() {
                self.shared.step_began(Some(began));
            }
            self.begin(batch, began);
        }
    }

    fn begin(&mut self, batch: Batch, began: Instant) {
        let Self { executor, under_way, scheduler, shared, .. } = self;
        let ahead = !under_way.is_empty();
        scheduler.begin(&batch);
        let flight = under_way.push_back_mut(Flight { batch, begun: Ok(()), began });
        flight.begun = executor.begin(&flight.batch);
        if ahead && flight.begun.is_ok() {
            shared.steps_ahead.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for the end of the oldest step under way, and carries out what it came to; those who wait for its layers
    /// get their events while it runs. False when there is none.
    fn end_step(&mut self) -> bool {
        let Self { executor, under_way, scheduler, clients, .. } = self;
        let Some(flight) = under_way.front() else { return false };
        let waiting = waiting_for_layers(clients, &flight.batch);
        let outcome = Outcome::of(flight, &mut **executor, scheduler, &mut |layers| {
            waiting.iter().for_each(|client| client.tell_layers(layers, Instant::now()));
        });
        let (now, began) = (Instant::now(), flight.began);
        self.conclude(outcome, now.saturating_duration_since(began), now);
        self.shared.step_began(self.under_way.front().map(|flight| flight.began));
        true
    }

    /// The end of the oldest step, at `now`.
    fn conclude(&mut self, Outcome { failed, decisions }: Outcome, took: Duration, now: Instant) {
        let Some(Flight { batch, .. }) = self.under_way.pop_front() else { return };
        match failed {
            None => self.learn(StepShape::of(&batch), took),
            Some(error) => {
                tracing::error!(%error, sequences = batch.items.len(), "a step failed");
                if matches!(error, EngineError::DeviceLost(_)) {
                    self.lost.get_or_insert(error.to_string());
                }
            }
        }
        if let Some(next) = self.under_way.front_mut() {
            next.began = next.began.max(now);
        }
        // Its leases go first: a client that receives its end finds the blocks free, but for those of a step behind.
        self.scheduler.end(batch);
        self.apply(decisions, now);
    }

    fn learn(&mut self, shape: StepShape, took: Duration) {
        let lent = self.executor.lent_share();
        let steps = if lent > 0.0 { &self.shared.helped_steps } else { &self.shared.own_steps };
        steps.fetch_add(1, Ordering::Relaxed);
        self.pace.observe(shape, took.as_secs_f64() * 1e3, lent);
        self.scheduler.expect(self.pace.cost());
        *self.shared.cost.lock().unwrap_or_else(PoisonError::into_inner) = self.pace.helped_cost();
    }

    fn apply(&mut self, decisions: Vec<(Seq, Decision)>, at: Instant) {
        self.scheduler.apply(&decisions);
        let forgotten = |decision: &Decision| decision.ends() || *decision == Decision::Preempt;
        for (seq, _) in decisions.iter().filter(|(_, decision)| forgotten(decision)) {
            self.executor.forget(*seq);
        }
        // Before anybody is told, who then may look; and before `tell` gives the queue's place back: who starts is
        // never counted nowhere, see `Engine::load`.
        let preempted = self.scheduler.preempted();
        self.shared.preempted.store(preempted, Ordering::Relaxed);
        self.shared.preemptions.store(self.scheduler.preemptions(), Ordering::Relaxed);
        self.shared.started.store(self.scheduler.running() + preempted, Ordering::Release);
        self.shared.scheduled_tokens.store(self.scheduler.queued_tokens(), Ordering::Relaxed);
        self.shared.running_tokens.store(self.scheduler.running_tokens(), Ordering::Relaxed);
        for (seq, decision) in decisions {
            let ends = decision.ends();
            if let Some(client) = self.clients.get_mut(&seq) {
                client.tell(decision, at);
            }
            if ends {
                self.clients.remove(&seq);
            }
        }
    }
}

/// Who waits for layers of a step: of those whose last chunk it is.
fn waiting_for_layers<'a>(clients: &'a HashMap<Seq, Client>, batch: &Batch) -> Vec<&'a Client> {
    let last_chunks = batch.items.iter().filter(|item| item.choose.is_some());
    let clients = last_chunks.filter_map(|item| clients.get(&item.seq));
    clients.filter(|client| !client.report_layers.is_empty()).collect()
}

impl Client {
    fn tell(&mut self, decision: Decision, at: Instant) {
        match decision {
            Decision::Start => {
                self.queue_place = None;
                self.start(at);
            }
            Decision::Grow => {}
            Decision::Preempt => {
                // It holds no blocks and takes no place from those who do.
                self.queue_place = None;
                self.report_layers = Vec::new();
                if self.preemptions > 0 {
                    self.send(SequenceEvent::Preempted { at });
                }
            }
            Decision::Resume => {
                self.start(at);
                if self.preemptions > 0 {
                    self.preemptions -= 1;
                    self.send(SequenceEvent::Resumed { at });
                }
            }
            Decision::Advance { computed, chunk, sampled, mut drafts, finish } => {
                if chunk {
                    self.send(SequenceEvent::ChunkDone { tokens: computed, at });
                }
                for Sampled { token, logprob, top } in sampled {
                    self.report_layers = Vec::new();
                    let drafts = std::mem::take(&mut drafts);
                    self.send(SequenceEvent::Token { id: token, logprob, top, drafts, at });
                }
                if let Some(reason) = finish {
                    self.send(SequenceEvent::Finished { reason, at });
                }
            }
            Decision::Fail(error) => self.send(SequenceEvent::Failed(error)),
            Decision::Cancel => {}
        }
    }

    fn start(&mut self, at: Instant) {
        if !self.started {
            self.started = true;
            self.send(SequenceEvent::Started { at });
        }
    }

    /// Called in the middle of a step: the channel's send is what orders the step's writes before the reader's reads.
    fn tell_layers(&self, layers: usize, at: Instant) {
        if self.report_layers.contains(&layers) {
            self.send(SequenceEvent::LayersDone { layers, at });
        }
    }

    /// A reader that has left is no error: the next step cancels its sequence.
    fn send(&self, event: SequenceEvent) {
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            debug_assert!(false, "the stream has no room for {event:?}");
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
