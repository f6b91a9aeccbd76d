//! The thread that owns a UCX worker and makes every `ucp_*` call: commands from the process, events from the
//! callbacks, deadlines of our own, and the close of endpoints. What frames mean stands in `sending.rs` and
//! `receiving.rs`.
//!
//! Trust in UCX ends where measurements ended it: it does not notice a frozen peer, and it may lose the requests of a
//! dead one. So every operation has a deadline; one that is late, or that failed, takes its endpoint with it; and
//! blocks stay with their operation until its callback came or UCX has closed the endpoint.
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tandem_proto::HandoffId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use ucx_sys::{Api, UCS_OK};

use super::address::{AddressKey, CheckedAddress};
use super::endpoints::{Closed, EndpointId, Endpoints, Loss};
use super::inbox::{self, Event};
use super::one_copy::OneCopy;
use super::operations::{Operation, OperationId, Operations, Work, Writes};
use super::owners::{Context, Region, Worker};
use super::probe::Probe;
use super::profile::{UcxConfig, UcxProfile};
use super::queue::Queue;
use super::receiving::Receiving;
use super::result::{Posted, UcxError};
use super::sending::{Sending, Way};
use crate::arena::{Arena, Run};
use crate::error::{TransferError, TransferErrorKind};
use crate::outgoing::{AnswerSlot, PendingAnswers};
use crate::registry::Registry;
use crate::transport::BlockOwner;
use crate::wire::{Answer, DataHeader, HEADER_BYTES, Header};

/// Commands in one turn.
const COMMANDS_PER_TURN: usize = 64;
/// Calls of `ucp_worker_progress` in one turn that did something, and in a row that did not while something is in
/// flight.
const HITS_PER_TURN: usize = 64;
const MISSES_PER_TURN: usize = 16;
/// A system call costs more than a few turns in which a fragment may arrive.
const TURNS_TO_YIELD: u32 = 8;
/// Longest sleep, and the grain of deadlines.
const TICK: Duration = Duration::from_millis(100);
/// Sleep while an endpoint closes: UCX has no event for that.
const CLOSING_TICK: Duration = Duration::from_millis(1);
/// UCX looks for dead peers in one call of progress out of 32, however long ago the last one was.
const KEEPALIVE_TURNS: usize = 33;
/// More than any of UCX's queues is long.
const DRAIN_TURNS: usize = 4096;
/// Nothing happened for so long: nothing is under way.
const SETTLED: Duration = Duration::from_millis(3);
/// For the last answers to leave at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(50);

/// What the rest of the process asks of the driver.
pub(super) enum Command {
    /// Connect, announce a hand-off, and reply when it is welcome.
    Open { handoff: HandoffId, address: CheckedAddress, reply: oneshot::Sender<Result<Opened, TransferError>> },
    /// Send a range.
    Push { endpoint: EndpointId, range: DataHeader, runs: Vec<Run>, owner: BlockOwner, credit: OwnedSemaphorePermit },
    /// Tell the receiver that more is to come.
    KeepAlive { endpoint: EndpointId, handoff: HandoffId },
    /// Send the seal when all ranges are over.
    Seal { handoff: HandoffId, payload: Vec<u8> },
    /// Tell the receiver that nothing more comes.
    Cancel { handoff: HandoffId },
    /// Close a peer whose writes overstay.
    CutOff { endpoint: EndpointId },
    /// Tell the sender that a range was copied out of its memory.
    Copied { endpoint: EndpointId, range: DataHeader },
    /// Tell the sender how it ended.
    Answer { endpoint: EndpointId, handoff: HandoffId, answer: Answer },
}

/// An announced hand-off.
pub(super) struct Opened {
    pub(super) endpoint: EndpointId,
    pub(super) credit: Arc<Semaphore>,
    pub(super) answer: AnswerSlot,
}

/// What driver and transport share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) arena: Arc<Arena>,
    pub(super) registry: Arc<Registry>,
    pub(super) pending: Arc<PendingAnswers>,
    pub(super) queue: Arc<Queue<Command>>,
    /// Of the worker, as it travels; written by the driver.
    pub(super) address: Arc<Mutex<Vec<u8>>>,
    /// Why the thread ended.
    pub(super) failure: Arc<OnceLock<String>>,
}

impl Shared {
    pub(super) fn address(&self) -> Vec<u8> {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_address(&self, address: Vec<u8>) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
    }
}

/// All state of the thread. `shut_down` takes it apart in the order that UCX needs.
pub(super) struct Driver {
    pub(super) probe: Option<Probe>,
    /// Wait for the probe's end.
    closed: Vec<Closed>,
    pub(super) endpoints: Endpoints,
    worker: Rc<Worker>,
    pub(super) region: Region,
    context: Rc<Context>,
    pub(super) operations: Operations,
    pub(super) sending: Sending,
    pub(super) receiving: Receiving,
    pub(super) one_copy: OneCopy,
    pub(super) shared: Shared,
    pub(super) config: UcxConfig,
    pub(super) build_id: String,
    pub(super) key: AddressKey,
    name: String,
    spare: Vec<Event>,
    ticked: Instant,
}

impl Driver {
    /// Opens UCX on the calling thread.
    pub(super) fn open(
        api: &'static Api,
        config: UcxConfig,
        build_id: String,
        shared: Shared,
    ) -> Result<Self, TransferError> {
        let context = Context::open(api, &config.settings())?;
        let name = config.name(&context.describe()).ok_or_else(|| {
            let message = format!("UCX {} has no transport for profile {}", api.version, config.profile);
            TransferError::new(TransferErrorKind::Incompatible, message)
        })?;
        let region = Region::register(&context, shared.arena.clone())?;
        let worker = Worker::create(&context)?;
        let key = AddressKey::new(&config.address_key, &build_id);
        let one_copy = OneCopy::start(&shared.arena, &config, reporter(&shared))?;
        let name = if one_copy.is_possible() { format!("{name}, one copy") } else { name };
        shared.set_address(worker.address()?.sealed(&key));
        Ok(Self {
            probe: None,
            closed: Vec::new(),
            endpoints: Endpoints::new(worker.clone(), config.credit_bytes),
            worker,
            region,
            context,
            operations: Operations::default(),
            sending: Sending::default(),
            receiving: Receiving::default(),
            one_copy,
            shared,
            config,
            build_id,
            key,
            name,
            spare: Vec::new(),
            ticked: Instant::now(),
        })
    }

    /// What UCX opened, for people.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Works until the queue is closed.
    pub(super) fn run(mut self) {
        let mut active = Instant::now();
        let mut idle_turns = 0u32;
        while !self.shared.queue.is_closed() {
            let commanded = self.run_commands();
            let progressed = self.progress();
            let happened = self.handle_events();
            let now = Instant::now();
            let ticked = self.tick(now);
            if commanded || progressed || happened || ticked {
                active = now;
                idle_turns = 0;
                continue;
            }
            self.sending.return_credit();
            if now.duration_since(active) < self.config.spin {
                idle_turns += 1;
                // Somebody else may need the core, the peer first of all.
                if idle_turns.is_multiple_of(TURNS_TO_YIELD) {
                    std::thread::yield_now();
                }
            } else {
                self.sleep();
            }
        }
        self.shut_down();
    }

    /// One turn of a driver that does not run: all but sleep.
    pub(super) fn turn(&mut self) {
        self.run_commands();
        self.progress();
        self.handle_events();
        self.tick(Instant::now());
    }

    /// Posts a small frame; a failure takes the endpoint.
    pub(super) fn post_frame(&mut self, to: EndpointId, header: Header, payload: Vec<u8>) {
        let operation = self.operations.next_id();
        let header = header.encode().to_vec();
        let Some(entry) = self.endpoints.get(to) else { return };
        // SAFETY: heap memory, kept in the table of operations until the callback came.
        let posted = unsafe { entry.endpoint.send_frame(&header[..], &payload, operation) };
        self.keep(to, operation, posted, Work::Frame { header, payload });
    }

    /// Keeps what was posted until it is over.
    pub(super) fn keep(&mut self, on: EndpointId, id: OperationId, posted: Result<Posted, UcxError>, work: Work) {
        match posted {
            Ok(Posted::Done) => self.finished(on, work, true),
            Ok(Posted::Pending(request)) => {
                // UCX overlooks a death now and then, and a frozen peer always.
                let deadline = Some(Instant::now() + self.config.stall_timeout);
                self.operations.insert(id, Operation { endpoint: on, deadline, request: Some(request), work });
            }
            Err(error) => {
                self.lose(
                    on,
                    Loss::of(error.status),
                    TransferError::peer_gone(format!("the KV peer is gone: {error}")),
                );
                self.finished(on, work, false);
            }
        }
    }

    /// Gives up an endpoint and everything on it. The registry learns of it when UCX has let go of the memory.
    pub(super) fn lose(&mut self, endpoint: EndpointId, loss: Loss, why: TransferError) {
        if !self.endpoints.close(endpoint, loss, Instant::now()) {
            return;
        }
        tracing::warn!(peer = endpoint.0, "KV peer lost: {why}");
        self.shared.registry.counters().lost_peers.fetch_add(1, Relaxed);
        self.shared.pending.peer_gone(endpoint.into(), &why);
        self.sending.forget(endpoint, &why);
    }

    pub(super) fn receive(&mut self, from: EndpointId, descriptor: inbox::Descriptor, claim: crate::registry::Claim) {
        let operation = self.operations.next_id();
        let target = self.region.vector(claim.runs());
        // SAFETY: the claim keeps the blocks, the table of operations keeps both until the callback came; the vector's
        // heap memory stays in place when it moves there.
        let posted = unsafe { self.worker.receive(descriptor, &self.region, &target, operation) };
        self.keep(from, operation, posted, Work::Receive { claim, target });
    }

    pub(super) fn release(&mut self, descriptor: inbox::Descriptor) {
        self.worker.release(descriptor);
    }

    /// One call moves a few KiB through shared memory, in less time than the rest of a turn takes: many calls a turn.
    fn progress(&self) -> bool {
        let patience = if self.operations.is_idle() { 1 } else { MISSES_PER_TURN };
        let (mut hits, mut misses) = (0, 0);
        while hits < HITS_PER_TURN && misses < patience {
            if self.worker.progress() {
                (hits, misses) = (hits + 1, 0);
            } else {
                misses += 1;
            }
        }
        hits > 0
    }

    fn run_commands(&mut self) -> bool {
        let mut any = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.shared.queue.pop() else { break };
            any = true;
            match command {
                Command::Open { handoff, address, reply } => self.open_handoff(handoff, &address, reply),
                Command::Push { endpoint, range, runs, owner, credit } => {
                    self.push(endpoint, range, &runs, owner, credit)
                }
                Command::KeepAlive { endpoint, handoff } => {
                    self.post_frame(endpoint, Header::KeepAlive(handoff), Vec::new())
                }
                Command::Seal { handoff, payload } => self.seal(handoff, payload),
                Command::Cancel { handoff } => self.cancel(handoff),
                Command::CutOff { endpoint } => self.cut_off(endpoint),
                Command::Copied { endpoint, range } => self.post_frame(endpoint, Header::Copied(range), Vec::new()),
                Command::Answer { endpoint, handoff, answer } => self.answer(endpoint, handoff, answer),
            }
        }
        any
    }

    fn handle_events(&mut self) -> bool {
        let mut events = inbox::take(std::mem::take(&mut self.spare));
        let any = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Completed { operation, status } => self.completed(operation, status),
                Event::EndpointFailed { endpoint, status } => {
                    let text = self.worker.api().describe(status);
                    let why = TransferError::peer_gone(format!("the KV peer is gone: {text}"));
                    self.lose(endpoint, Loss::of(status), why);
                }
                Event::Frame { header, payload } => self.on_frame(&header, payload),
                Event::Range { header, length, descriptor } => self.on_range(&header, length, descriptor),
                Event::Garbage => self.shared.registry.violation(),
            }
        }
        self.spare = events;
        self.shared.registry.counters().dropped_frames.fetch_add(inbox::take_dropped(), Relaxed);
        any
    }

    fn on_frame(&mut self, header: &[u8; HEADER_BYTES], payload: Vec<u8>) {
        match Header::parse(header) {
            Some(Header::Hello { protocol }) => self.on_hello(protocol, &payload),
            Some(Header::Seal(handoff)) => self.on_seal(handoff, &payload),
            Some(Header::KeepAlive(handoff)) => self.on_keep_alive(handoff),
            Some(Header::Cancel(handoff)) => self.on_cancel(handoff),
            Some(Header::Answer(handoff, answer)) => self.on_answer(handoff, answer),
            Some(Header::Welcome(handoff)) => self.on_welcome(handoff, Way::Rendezvous),
            Some(Header::WillCopy(handoff)) => self.on_welcome(handoff, Way::OneCopy),
            Some(Header::Ready(range)) => self.on_ready(range, &payload),
            Some(Header::Copied(range)) => self.on_copied(range),
            // Data comes by rendezvous only.
            Some(Header::Data(_)) | None => self.shared.registry.violation(),
        }
    }

    fn completed(&mut self, id: OperationId, status: ucx_sys::ucs_status_t) {
        let Some(operation) = self.operations.complete(id) else { return };
        if let Some(request) = operation.request {
            self.worker.free(request);
        }
        if status != UCS_OK {
            let text = self.worker.api().describe(status);
            let why = TransferError::peer_gone(format!("a KV transfer failed: {text}"));
            self.lose(operation.endpoint, Loss::of(status), why);
        } else if self.endpoints.has(operation.endpoint) {
            // A slow peer is none that hangs.
            self.operations.progressed(operation.endpoint, Instant::now() + self.config.stall_timeout);
        }
        self.finished(operation.endpoint, operation.work, status == UCS_OK);
    }

    fn finished(&mut self, on: EndpointId, work: Work, succeeded: bool) {
        match work {
            Work::Send(send) => self.range_sent(*send),
            Work::Receive { claim, .. } if succeeded => claim.written(),
            // Others of its endpoint may still write: all end together, with the better reason, in `let_go`.
            Work::Receive { claim, .. } if self.is_held(on) => self.receiving.hold(on, claim),
            // That is past, and this was a receive that it had to leave quarantined: the blocks are free now.
            Work::Receive { claim, .. } => drop(claim),
            Work::Frame { .. } | Work::Lost { .. } => {}
        }
    }

    /// `let_go` is still to come, or at work.
    fn is_held(&self, endpoint: EndpointId) -> bool {
        self.endpoints.has(endpoint) || self.closed.iter().any(|closed| closed.id == endpoint)
    }

    /// Deadlines and closes. True when an endpoint is gone now.
    fn tick(&mut self, now: Instant) -> bool {
        if now.duration_since(self.ticked) >= TICK {
            self.ticked = now;
            // A block may be so long that it needs what is kept back.
            self.sending.return_credit();
            (0..KEEPALIVE_TURNS).for_each(|_| _ = self.worker.progress());
            self.receiving.sweep(now);
            self.give_up_unwelcome(now);
            for endpoint in self.operations.overdue(now).into_iter().chain(self.sending.overdue(now)) {
                let message = "a KV transfer took too long; the peer is given up";
                self.lose(endpoint, Loss::GivenUp, TransferError::new(TransferErrorKind::Timeout, message));
            }
        }
        if self.probe.as_mut().is_some_and(|probe| !probe.progress(now)) {
            self.start_anew("a lost KV peer has jammed it");
            return true;
        }
        let closed = self.endpoints.take_closed(now);
        if !closed.is_empty() && self.config.profile == UcxProfile::Shm {
            self.start_probe(now);
        }
        self.closed.extend(closed);
        if self.closed.is_empty() || self.probe.is_some() {
            return false;
        }
        // Completions that came with the close.
        self.handle_events();
        // Each stays listed while it is let go of: completions may still come (`is_held`).
        while let Some(closed) = self.closed.last().copied() {
            self.let_go(closed);
            self.closed.pop();
        }
        true
    }

    /// UCX has closed an endpoint: its hand-offs end, and its blocks are free unless somebody may still write.
    fn let_go(&mut self, closed: Closed) {
        let over = match self.config.profile {
            // Shared memory takes what a living peer puts there.
            UcxProfile::Shm => closed.loss == Loss::Dead,
            // A closed connection brings nothing.
            UcxProfile::Tcp | UcxProfile::Rdma => closed.confirmed,
        };
        let writes = if over { Writes::Over } else { Writes::Possible };
        if writes == Writes::Over {
            self.drain();
        }
        let kept = self.operations.abandon(closed.id, writes);
        let mut held = self.receiving.forget(closed.id);
        held.claims.extend(self.one_copy.stop(closed.id));
        if kept == 0 {
            self.shared.registry.fence(closed.id.into());
        } else {
            tracing::error!(peer = closed.id.0, kept, "a lost KV peer may still write: the blocks stay quarantined");
            for handoff in held.handoffs {
                self.shared.registry.lost_by(closed.id.into(), handoff);
            }
        }
        drop(held.claims);
    }

    /// Writes of a peer do not end by themselves. Closing its endpoint ends what UCX knows of; what then still counts
    /// as possible (`let_go` kept it in quarantine) ends with the worker.
    fn cut_off(&mut self, endpoint: EndpointId) {
        let message = "its writes into abandoned KV blocks did not end";
        if self.endpoints.has(endpoint) {
            self.lose(endpoint, Loss::GivenUp, TransferError::new(TransferErrorKind::Timeout, message));
        } else if self.operations.is_busy(endpoint) {
            self.start_anew(message);
        } else {
            let stopped = self.one_copy.stop(endpoint);
            self.shared.registry.fence(endpoint.into());
            drop(stopped);
        }
    }

    fn start_probe(&mut self, now: Instant) {
        if self.probe.is_none() {
            let address = self.worker.address();
            let probe = address.and_then(|address| Ok(Probe::start(&self.context, &address, now)?));
            self.probe = probe.inspect_err(|error| tracing::warn!(%error, "cannot probe the UCX worker")).ok();
        }
    }

    /// The worker is deaf: takes leave of every peer, and goes on with a new worker at a new address. Tickets of the
    /// old one lead nowhere and fail at their senders.
    fn start_anew(&mut self, why: &str) {
        tracing::error!("the UCX worker is replaced, and open KV hand-offs end: {why}");
        self.probe = None;
        self.cancel_all();
        self.refuse_all();
        self.flush();
        let mut ids = self.endpoints.all();
        ids.extend(std::mem::take(&mut self.closed).into_iter().map(|closed| closed.id));
        let why = TransferError::peer_gone(format!("the KV transport started anew: {why}"));
        for id in &ids {
            self.shared.pending.peer_gone((*id).into(), &why);
            self.sending.forget(*id, &why);
        }
        let replaced = Worker::create(&self.context).map_err(TransferError::from);
        let replaced = replaced.and_then(|worker| Ok((worker.address()?, worker)));
        let (address, worker) = match replaced {
            Ok(replaced) => replaced,
            Err(error) => {
                tracing::error!(%error, "UCX gives no new worker: KV transfers end");
                self.shared.failure.get_or_init(|| format!("{why}, and it gave no new worker: {error}"));
                self.shared.queue.close();
                return;
            }
        };
        self.shared.set_address(address.sealed(&self.key));
        let endpoints = self.endpoints.reset(worker.clone());
        let old = std::mem::replace(&mut self.worker, worker);
        if self.config.profile == UcxProfile::Tcp {
            // As in `shut_down`. Nobody calls its progress any more, and only that writes into the arena.
            std::mem::forget((endpoints, old));
        } else {
            // The last owner of the old worker, which ends every write into the arena.
            drop(endpoints);
            drop(old);
        }
        inbox::take(Vec::new());
        self.operations.clear();
        for id in ids {
            let mut held = self.receiving.forget(id);
            held.claims.extend(self.one_copy.stop(id));
            self.shared.registry.fence(id.into());
            drop(held);
        }
    }

    /// Lets UCX deliver what a dead peer had put into the worker's queues.
    fn drain(&mut self) {
        for _ in 0..DRAIN_TURNS {
            if !self.worker.progress() {
                break;
            }
        }
        self.handle_events();
    }

    fn sleep(&mut self) {
        if !self.shared.queue.prepare_sleep() {
            return;
        }
        let hurry = self.endpoints.is_closing() || self.probe.is_some();
        let timeout = if hurry { CLOSING_TICK } else { TICK };
        match self.worker.arm() {
            Ok(true) if inbox::is_empty() => poll([self.worker.event_fd(), self.shared.queue.event_fd()], timeout),
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "UCX has no wake-up");
                poll([self.shared.queue.event_fd(); 2], CLOSING_TICK);
            }
        }
        self.shared.queue.woke();
    }

    /// Lets what is under way arrive, so that its senders can be told.
    fn settle(&mut self) {
        let (start, mut active) = (Instant::now(), Instant::now());
        while active.elapsed() < SETTLED && start.elapsed() < FLUSH_TIMEOUT {
            if self.worker.progress() | self.handle_events() {
                active = Instant::now();
            }
            std::thread::yield_now();
        }
    }

    /// Waits a little for what was posted.
    fn flush(&mut self) {
        let until = Instant::now() + FLUSH_TIMEOUT;
        while !self.operations.is_idle() && Instant::now() < until {
            self.worker.progress();
            self.handle_events();
        }
    }

    /// Takes leave of every peer, closes everything, and lets nobody wait for a thread that is gone.
    fn shut_down(mut self) {
        while self.run_commands() {}
        self.settle();
        self.cancel_all();
        self.refuse_all();
        self.flush();
        let why = TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down");
        let mut ids = self.endpoints.all();
        ids.extend(std::mem::take(&mut self.closed).into_iter().map(|closed| closed.id));
        ids.iter().for_each(|id| self.shared.pending.peer_gone((*id).into(), &why));
        while self.shared.queue.pop().is_some() {}
        let registry = self.shared.registry.clone();
        let Self { probe, endpoints, worker, region, context, operations, mut one_copy, config, .. } = self;
        let stopped: Vec<_> = ids.iter().flat_map(|id| one_copy.stop(*id)).collect();
        drop((probe, one_copy));
        if config.profile == UcxProfile::Tcp {
            // UCX 1.13 aborts when a worker ends while a socket still connects. Without a thread it touches nothing
            // more, and the process closes its sockets.
            std::mem::forget((endpoints, worker, region, context));
        } else {
            // Connections before the worker before the memory: here every write into the arena ends.
            drop(endpoints);
            drop(worker);
            drop((region, context));
        }
        drop(operations);
        ids.into_iter().for_each(|id| registry.fence(id.into()));
        drop(stopped);
    }
}

/// Tells the driver of what was copied.
fn reporter(shared: &Shared) -> Box<dyn Fn(EndpointId, DataHeader) + Send> {
    let queue = shared.queue.clone();
    Box::new(move |endpoint, range| {
        // After shutdown there is nobody to tell.
        let _ = queue.send_now(Command::Copied { endpoint, range });
    })
}

fn poll(descriptors: [std::os::fd::RawFd; 2], timeout: Duration) {
    let mut entries = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // SAFETY: two valid entries. Whatever it returns, the caller looks at everything again.
    unsafe { libc::poll(entries.as_mut_ptr(), 2, timeout.as_millis() as libc::c_int) };
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
