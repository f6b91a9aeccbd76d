//! The worker: it owns executor and scheduler, and steps. It rests while there is nothing to run.
//!
//! Where the executor lets several steps be under way ([`Executor::most_under_way`]), the worker begins the next one
//! before it waits for the end of the oldest: a device then goes from step to step without waiting for the host, which
//! reads, tells and plans meanwhile. What of that the scheduler can plan ahead is its matter, see `scheduler.rs`.
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::stream::Client;
use super::warm_up::{self, Rounds};
use super::{Message, Shared, Submission};
use crate::error::EngineError;
use crate::executor::{Batch, Executor, LayersDone, Seq};
use crate::pace::Pace;
use crate::scheduler::{Decision, Scheduler};
use crate::step_model::StepShape;

/// Where all blocks that a step wants are in transfers, so long passes until the next look.
pub(super) const BLOCKS_AWAY: Duration = Duration::from_millis(1);

/// A step under way.
pub(super) struct Flight {
    /// Holds the leases of its sequences.
    pub batch: Batch,
    /// One that could not begin takes its turn all the same, as those before it have tokens to tell.
    begun: Result<(), EngineError>,
    /// When it was begun, or when the one before it ended, which it had to wait for.
    began: Instant,
}

/// What a step came to.
pub(super) struct Outcome {
    /// Why it failed as a whole.
    pub failed: Option<EngineError>,
    decisions: Vec<(Seq, Decision)>,
}

impl Outcome {
    /// Waits for the executor's oldest step, which is `flight`.
    pub fn of(flight: &Flight, executor: &mut dyn Executor, scheduler: &Scheduler, done: &mut LayersDone<'_>) -> Self {
        let chosen = flight.begun.clone().and_then(|()| executor.finish(done));
        Self { failed: chosen.as_ref().err().cloned(), decisions: scheduler.resolve(&flight.batch, chosen) }
    }
}

/// What steps. Field order is drop order: the executor waits for what its device still computes before leases are back,
/// and those are before the streams end.
pub(super) struct Worker {
    pub executor: Box<dyn Executor>,
    /// The oldest first.
    pub under_way: VecDeque<Flight>,
    pub scheduler: Scheduler,
    pace: Pace,
    /// Whether there was something to run: the warm-up shall learn what steps take on the node's own cores.
    warm: bool,
    /// Why no step can follow: the device is gone.
    pub lost: Option<String>,
    pub clients: HashMap<Seq, Client>,
    pub inbox: mpsc::Receiver<Message>,
    shared: Arc<Shared>,
    next_seq: Seq,
}

impl Worker {
    /// With nothing to run.
    pub fn new(
        executor: Box<dyn Executor>,
        scheduler: Scheduler,
        inbox: mpsc::Receiver<Message>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            executor,
            under_way: VecDeque::new(),
            scheduler,
            pace: Pace::default(),
            warm: false,
            lost: None,
            clients: HashMap::new(),
            inbox,
            shared,
            next_seq: 0,
        }
    }

    /// A thread's life.
    pub fn live(mut self) {
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
    pub fn take_waiting(&mut self) -> bool {
        while let Ok(message) = self.inbox.try_recv() {
            self.take(message);
        }
        !self.shared.stop.load(Ordering::Acquire)
    }

    /// Why the loop has ended.
    pub fn ended(&mut self) -> String {
        self.lost.take().unwrap_or_else(|| "it was shut down".to_owned())
    }

    /// The engine takes no more work, for this reason.
    pub fn stopped(&mut self, reason: String) {
        tracing::info!(reason, "the engine stops");
        let _ = self.shared.stopped.set(reason);
        self.shared.started.store(0, Ordering::Relaxed);
        self.shared.preempted.store(0, Ordering::Relaxed);
        self.shared.scheduled_tokens.store(0, Ordering::Relaxed);
        self.shared.running_tokens.store(0, Ordering::Relaxed);
    }

    /// Does what a message asks.
    pub fn take(&mut self, message: Message) {
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
    pub fn plan(&mut self, now: Instant) -> Option<Batch> {
        let gone = |seq| self.clients.get(&seq).is_none_or(|client| client.has_left());
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

    /// Begins a step behind those under way.
    pub fn begin(&mut self, batch: Batch, began: Instant) {
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
    pub fn conclude(&mut self, Outcome { failed, decisions }: Outcome, took: Duration, now: Instant) {
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
pub(super) fn waiting_for_layers<'a>(clients: &'a HashMap<Seq, Client>, batch: &Batch) -> Vec<&'a Client> {
    let last_chunks = batch.items.iter().filter(|item| item.choose.is_some());
    let clients = last_chunks.filter_map(|item| clients.get(&item.seq));
    clients.filter(|client| client.waits_for_layers()).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
