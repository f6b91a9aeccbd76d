//! The thread that owns a UCX worker and makes every `ucp_*` call: commands from the process, events from the
//! callbacks, deadlines of our own, and the close of endpoints. What frames mean stands in `sending.rs` and
//! `receiving.rs`, which share a `desk.rs`; when blocks are free is decided in `custody.rs`.
//!
//! Trust in UCX ends where measurements ended it: it does not notice a frozen peer, and it may lose the requests of a
//! dead one. So every operation has a deadline; one that is late, or that failed, takes its endpoint with it; and
//! blocks stay with their operation until its callback came or nobody can write any more.
//!
//! Long because every `ucp_*` call is made here, by the one owner of the worker; what needs no UCX is elsewhere.
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ucx_sys::Api;

use super::commands::{Command, Shared};
use super::custody::{Closed, Custody, Facts, Medium, Verdict};
use super::desk::{Desk, End};
use super::device;
use super::endpoints::Loss;
use super::ids::EndpointId;
use super::inbox::{self, Event};
use super::operations::Cargo;
use super::owners::{Context, Region, Worker};
use super::probe::Prober;
use super::profile::{UcxConfig, UcxProfile};
use super::receiving::Receiving;
use super::sending::Sending;
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::Way;
use crate::wire::{HEADER_BYTES, Header};

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
/// Sleep while an endpoint closes, or something waits for room in a peer's ring: UCX has no event for that.
const BLIND_TICK: Duration = Duration::from_millis(1);
/// A ring that has been full for so long has a reader that does not run, or needs this core.
const FULL: Duration = Duration::from_millis(3);
/// UCX looks for dead peers in one call of progress out of 32, however long ago the last one was.
const KEEPALIVE_TURNS: usize = 33;
/// More than any of UCX's queues is long.
const DRAIN_TURNS: usize = 4096;
/// Nothing happened for so long: nothing is under way.
const SETTLED: Duration = Duration::from_millis(3);
/// For the last answers to leave at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(50);

/// All state of the thread. `shut_down` takes it apart in the order that UCX needs.
pub(super) struct Driver {
    /// `None`: this profile has no queue that goes deaf, or UCX gives no second worker.
    prober: Option<Prober>,
    custody: Custody,
    pub(super) desk: Desk,
    context: Rc<Context>,
    pub(super) sending: Sending,
    pub(super) receiving: Receiving,
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
        device::bind(&shared.arena)?;
        let context = Context::open(api, &config.settings(device::holds(&shared.arena)))?;
        let description = context.describe();
        let name = config.name(&description).ok_or_else(|| {
            let message = format!("UCX {} has no transport for profile {}", api.version, config.profile);
            TransferError::new(TransferErrorKind::Incompatible, message)
        })?;
        let lacking = device::lacking(&shared.arena, config.profile, &description, &api.version.to_string());
        lacking.map_or(Ok(()), Err)?;
        let region = Region::register(&context, shared.arena.clone())?;
        let worker = Worker::create(&context)?;
        let medium = match config.profile {
            UcxProfile::Shm => Medium::SharedMemory,
            UcxProfile::Tcp | UcxProfile::Rdma => Medium::Connection,
        };
        let mut driver = Self {
            prober: None,
            custody: Custody::new(medium),
            receiving: Receiving::new(config.landing_frames * device::range_bytes(&shared.arena, &config)),
            desk: Desk::new(worker, region, shared, config, build_id)?,
            context,
            sending: Sending::default(),
            name,
            spare: Vec::new(),
            ticked: Instant::now(),
        };
        if driver.desk.one_copy.is_possible() {
            driver.name.push_str(", one copy");
        }
        driver.make_known()?;
        Ok(driver)
    }

    /// What UCX opened, for people.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Works until the queue is closed.
    pub(super) fn run(mut self) {
        let mut active = Instant::now();
        let mut idle_turns = 0u32;
        while !self.desk.shared.queue.is_closed() {
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
            let idle = now.duration_since(active);
            if idle < self.desk.config.spin && !self.desk.one_copy.is_busy() {
                idle_turns += 1;
                // Somebody else may need the core, the peer first of all.
                if idle_turns.is_multiple_of(TURNS_TO_YIELD) {
                    std::thread::yield_now();
                }
            } else {
                self.sleep(idle);
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

    /// The worker's address is what tickets and hellos say from now on.
    fn make_known(&mut self) -> Result<(), TransferError> {
        let address = self.desk.worker.address()?;
        self.desk.shared.set_address(address.clone(), self.desk.key.clone());
        self.prober = match self.desk.config.profile {
            UcxProfile::Shm => Prober::new(&self.context, &address, Instant::now())
                .inspect_err(|error| tracing::warn!(%error, "cannot probe the UCX worker"))
                .ok(),
            UcxProfile::Tcp | UcxProfile::Rdma => None,
        };
        Ok(())
    }

    /// One call moves a few KiB through shared memory, in less time than the rest of a turn takes: many calls a turn.
    fn progress(&self) -> bool {
        let patience = if self.desk.operations.is_idle() { 1 } else { MISSES_PER_TURN };
        let (mut hits, mut misses) = (0, 0);
        while hits < HITS_PER_TURN && misses < patience {
            if self.desk.worker.progress() {
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
            let Some(command) = self.desk.shared.queue.pop() else { break };
            any = true;
            self.run_command(command);
            self.hand_out_ends();
        }
        any
    }

    fn run_command(&mut self, command: Command) {
        let Self { desk, sending, receiving, .. } = self;
        match command {
            Command::Open { handoff, address, secret, reply } => {
                sending.open_handoff(desk, handoff, &address, (secret, reply), |id| receiving.uses(id));
            }
            Command::Push { endpoint, range, runs, owner, credit } => {
                sending.push(desk, endpoint, range, &runs, (owner, credit));
            }
            Command::KeepAlive { endpoint, handoff } => {
                desk.post_frame(endpoint, Header::KeepAlive(handoff), Vec::new());
            }
            Command::Seal { handoff, payload } => sending.seal(desk, handoff, payload),
            Command::Cancel { handoff } => sending.cancel(desk, handoff),
            Command::CutOff { endpoint } => self.cut_off(endpoint),
            Command::Copied { ranges } => {
                let frames = ranges.into_iter();
                frames.for_each(|(from, range)| desk.post_frame(from, Header::Copied(range), Vec::new()));
            }
            Command::Answer { endpoint, handoff, answer } => receiving.answer(desk, endpoint, handoff, answer),
        }
    }

    fn handle_events(&mut self) -> bool {
        let mut events = inbox::take(std::mem::take(&mut self.spare));
        let any = !events.is_empty();
        for event in events.drain(..) {
            self.handle_event(event);
            self.hand_out_ends();
        }
        self.spare = events;
        self.desk.registry().counters().dropped_frames.fetch_add(inbox::take_dropped(), Relaxed);
        any
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::Completed { operation, status } => self.desk.completed(operation, status),
            Event::EndpointFailed { endpoint, status } => {
                let text = self.desk.worker.api().describe(status);
                let why = TransferError::peer_gone(format!("the KV peer is gone: {text}"));
                self.desk.lose(endpoint, Loss::of(status), why);
            }
            Event::Frame { header, payload } => self.on_frame(&header, &payload),
            Event::Range { header, length, descriptor } => {
                self.receiving.on_range(&mut self.desk, &header, length, descriptor);
            }
            Event::Garbage => self.desk.registry().violation(),
        }
    }

    fn on_frame(&mut self, header: &[u8; HEADER_BYTES], payload: &[u8]) {
        let Self { desk, sending, receiving, prober, custody, .. } = self;
        match Header::parse(header) {
            Some(Header::Hello { protocol }) => receiving.on_hello(desk, protocol, payload, |id| sending.uses(id)),
            Some(Header::Seal(handoff)) => receiving.on_seal(desk, handoff, payload),
            Some(Header::KeepAlive(handoff)) => receiving.on_keep_alive(desk, handoff),
            Some(Header::Cancel(handoff)) if prober.as_ref().is_some_and(|prober| prober.is_own(handoff)) => {
                prober.iter_mut().for_each(Prober::arrived);
                custody.probe_back();
            }
            Some(Header::Cancel(handoff)) => receiving.on_cancel(desk, handoff),
            Some(Header::Answer(handoff, answer)) => sending.on_answer(desk, handoff, answer),
            Some(Header::Welcome(handoff)) => sending.on_welcome(desk, handoff, payload, Way::Sent),
            Some(Header::WillCopy(handoff)) => sending.on_welcome(desk, handoff, payload, Way::Copied),
            Some(Header::Ready(range)) => receiving.on_ready(desk, range, payload),
            Some(Header::Copied(range)) => sending.on_copied(desk, range),
            // Data comes by rendezvous only, and each hand-off says hello.
            Some(Header::Data(_) | Header::Join(_)) | None => desk.registry().violation(),
        }
    }

    /// Tells the halves what is over. One may post more, which may be over at once.
    fn hand_out_ends(&mut self) {
        while let Some(end) = self.desk.next_end() {
            match end {
                End::Lost(endpoint, why) => self.sending.forget(endpoint, &why),
                End::Finished { on, cargo, succeeded } => self.finished(on, cargo, succeeded),
            }
        }
    }

    fn finished(&mut self, on: EndpointId, cargo: Cargo, succeeded: bool) {
        if let Cargo::Receive { claim, .. } = &cargo {
            self.receiving.ended(on, claim);
            self.receiving.land(&mut self.desk);
        }
        match cargo {
            Cargo::Send(send) => self.sending.range_sent(&mut self.desk, *send),
            Cargo::Receive { claim, .. } if succeeded => claim.written(),
            // Others of its endpoint may still write: all end together, with the better reason, in `let_go`.
            Cargo::Receive { claim, .. } if self.is_held(on) => self.receiving.hold(on, claim),
            // That is past, and this was a receive that it had to leave quarantined: the blocks are free now.
            Cargo::Receive { claim, .. } => {
                self.desk.settle();
                drop(claim);
            }
            Cargo::Frame { .. } | Cargo::Lost { .. } => {}
        }
    }

    /// `let_go` is still to come, or at work.
    fn is_held(&self, endpoint: EndpointId) -> bool {
        self.desk.endpoints.has(endpoint) || self.custody.is_waiting(endpoint)
    }

    /// Deadlines and closes. True when an endpoint is gone now.
    fn tick(&mut self, now: Instant) -> bool {
        if now.duration_since(self.ticked) >= TICK {
            self.ticked = now;
            self.tick_slowly(now);
        }
        for closed in self.desk.take_closed(now) {
            self.custody.closed(closed);
        }
        if !self.probe(now) {
            self.start_anew("a lost KV peer has jammed it");
            return true;
        }
        if self.custody.due().is_none() {
            return false;
        }
        // Completions that came with the close.
        self.handle_events();
        // Each counts as waiting while it is let go of: completions may still come (`is_held`).
        while let Some(closed) = self.custody.due() {
            self.let_go(closed);
        }
        self.hand_out_ends();
        true
    }

    fn tick_slowly(&mut self, now: Instant) {
        // A block may be so long that it needs what is kept back.
        self.sending.return_credit();
        (0..KEEPALIVE_TURNS).for_each(|_| _ = self.desk.worker.progress());
        self.prober.iter().for_each(Prober::tend);
        self.receiving.sweep(now);
        self.sending.give_up_unwelcome(&mut self.desk, now);
        self.desk.give_up_overdue(now);
        self.sending.give_up_uncopied(&mut self.desk, now);
        self.desk.give_up_ended();
        self.hand_out_ends();
        for endpoint in self.custody.quarantined() {
            // A process that ends later, or whose receives did.
            if self.desk.has_ended(endpoint) {
                self.drain();
            }
            let facts = self.look(endpoint);
            if self.custody.look_again(endpoint, facts) == Verdict::Free {
                self.free(endpoint);
            }
        }
    }

    /// Sees to it that a probe flies when one is wanted. False: the last one did not come back.
    fn probe(&mut self, now: Instant) -> bool {
        let Some(prober) = &mut self.prober else {
            self.custody.probe_sent();
            self.custody.probe_back();
            return true;
        };
        if prober.is_flying() {
            if self.custody.wants_probe() {
                prober.hurry(now);
            }
            return prober.progress(now);
        }
        let after_loss = self.custody.wants_probe();
        if after_loss || (prober.is_due(now) && !self.desk.endpoints.is_empty()) {
            let sent = prober.send(after_loss, now);
            self.custody.probe_sent();
            if !sent {
                self.custody.probe_back();
            }
        }
        true
    }

    /// What we know of an endpoint that UCX has closed. On a device UCX writes by this process, so whose other one has
    /// ended is no evidence: its receives have to end.
    fn look(&self, endpoint: EndpointId) -> Facts {
        let ended = self.desk.has_ended(endpoint) && !device::holds(&self.desk.shared.arena);
        Facts { receives: self.desk.operations.receives(endpoint), ended }
    }

    /// UCX has closed an endpoint: its hand-offs end, and its blocks are free unless somebody may still write.
    fn let_go(&mut self, closed: Closed) {
        if self.desk.has_ended(closed.id) || closed.confirmed {
            self.drain();
        }
        let facts = self.look(closed.id);
        match self.custody.decide(closed, facts) {
            Verdict::Quarantine => {
                let (peer, kept) = (closed.id.0, facts.receives);
                tracing::error!(peer, kept, "a lost KV peer may still write: the blocks stay quarantined");
                self.desk.operations.quarantine(closed.id);
                let mut left = self.receiving.forget(closed.id);
                left.claims.extend(self.desk.one_copy.stop(closed.id));
                self.desk.settle();
                for handoff in left.handoffs {
                    self.desk.registry().lost_by(closed.id.into(), handoff);
                }
                left.descriptors.into_iter().for_each(|descriptor| self.desk.release(descriptor));
                drop(left.claims);
            }
            Verdict::Free | Verdict::CutOff | Verdict::Replace => self.free(closed.id),
        }
    }

    /// Nobody can write for this endpoint any more.
    fn free(&mut self, endpoint: EndpointId) {
        self.desk.settle();
        self.release(endpoint);
    }

    /// The same, of what has settled.
    fn release(&mut self, endpoint: EndpointId) {
        self.desk.operations.abandon(endpoint);
        let left = self.receiving.forget(endpoint);
        self.desk.fence(endpoint);
        left.descriptors.into_iter().for_each(|descriptor| self.desk.release(descriptor));
        drop(left.claims);
        // Its room is another one's.
        self.receiving.land(&mut self.desk);
    }

    /// Writes of a peer do not end by themselves. Closing its endpoint ends what UCX knows of; what then still counts
    /// as possible ends with its process, or with the worker.
    fn cut_off(&mut self, endpoint: EndpointId) {
        let why = "its writes into abandoned KV blocks did not end";
        let is_open = self.desk.endpoints.get(endpoint).is_some();
        let others = self.sending.is_busy() || self.receiving.is_busy();
        let facts = self.look(endpoint);
        match self.custody.overstayed(endpoint, is_open, others, facts) {
            Verdict::CutOff => {
                self.desk.lose(endpoint, Loss::GivenUp, TransferError::new(TransferErrorKind::Timeout, why));
            }
            Verdict::Replace => self.start_anew(why),
            Verdict::Free => self.free(endpoint),
            Verdict::Quarantine => {}
        }
    }

    /// The worker is deaf, or somebody may write through it: takes leave of every peer, and goes on with a new worker
    /// at a new address. Tickets of the old one lead nowhere, so grants that nobody has opened end, too.
    fn start_anew(&mut self, why: &str) {
        tracing::error!("the UCX worker is replaced, and open KV hand-offs end: {why}");
        self.prober = None;
        self.sending.cancel_all(&mut self.desk);
        self.receiving.refuse_all(&mut self.desk);
        self.flush();
        self.hand_out_ends();
        self.receiving.dismiss_all(&mut self.desk);
        let mut ids = self.desk.endpoints.all();
        ids.extend(self.custody.replaced());
        let why = TransferError::peer_gone(format!("the KV transport started anew: {why}"));
        for id in &ids {
            self.desk.shared.pending.peer_gone((*id).into(), &why);
            self.sending.forget(*id, &why);
        }
        let worker = match Worker::create(&self.context) {
            Ok(worker) => worker,
            Err(error) => return self.fail(&why, &error.into()),
        };
        let endpoints = self.desk.endpoints.reset(worker.clone());
        let old = std::mem::replace(&mut self.desk.worker, worker);
        if self.desk.config.profile == UcxProfile::Tcp {
            // As in `shut_down`. Nobody calls its progress any more, and only that writes into the arena.
            std::mem::forget((endpoints, old));
        } else {
            // The last owner of the old worker, which ends every write into the arena.
            drop(endpoints);
            drop(old);
        }
        inbox::take(Vec::new());
        self.desk.settle();
        // Whoever learns that its blocks are free may grant them anew: at the new address, then.
        if let Err(error) = self.make_known() {
            self.fail(&why, &error);
        }
        self.desk.registry().withdraw();
        self.desk.operations.clear();
        ids.into_iter().for_each(|id| self.release(id));
    }

    /// UCX gives no other worker: the node has to leave.
    fn fail(&mut self, why: &TransferError, error: &TransferError) {
        tracing::error!(%error, "UCX gives no new worker: KV transfers end");
        self.desk.shared.failure.get_or_init(|| format!("{why}, and it gave no new worker: {error}"));
        self.desk.shared.queue.close();
    }

    /// Lets UCX deliver what a dead peer had put into the worker's queues, and what a device has copied.
    fn drain(&mut self) {
        self.desk.settle();
        for _ in 0..DRAIN_TURNS {
            if !self.desk.worker.progress() {
                break;
            }
        }
        self.handle_events();
    }

    fn sleep(&mut self, idle: Duration) {
        let queue = self.desk.shared.queue.clone();
        if !queue.prepare_sleep() {
            return;
        }
        let flying = self.prober.as_ref().is_some_and(Prober::is_flying);
        let hurry = self.desk.endpoints.is_closing() || self.custody.has_waiting() || flying;
        let timeout = if hurry { BLIND_TICK } else { TICK };
        match self.desk.worker.arm() {
            Ok(true) if inbox::is_empty() => poll([self.desk.worker.event_fd(), queue.event_fd()], timeout),
            Ok(true) => {}
            // UCX wants more turns, and in turn after turn it did nothing: a frame waits for room in a peer's ring.
            Ok(false) if idle < FULL => std::thread::yield_now(),
            Ok(false) => poll([queue.event_fd(); 2], BLIND_TICK),
            Err(error) => {
                tracing::error!(%error, "UCX has no wake-up");
                poll([queue.event_fd(); 2], BLIND_TICK);
            }
        }
        queue.woke();
    }

    /// Lets what is under way arrive, so that its senders can be told.
    fn settle(&mut self) {
        let (start, mut active) = (Instant::now(), Instant::now());
        while active.elapsed() < SETTLED && start.elapsed() < FLUSH_TIMEOUT {
            if self.desk.worker.progress() | self.handle_events() {
                active = Instant::now();
            }
            std::thread::yield_now();
        }
    }

    /// Waits a little for what was posted.
    fn flush(&mut self) {
        let until = Instant::now() + FLUSH_TIMEOUT;
        while !self.desk.operations.is_idle() && Instant::now() < until {
            self.desk.worker.progress();
            self.handle_events();
        }
    }

    /// Takes leave of every peer, closes everything, and lets nobody wait for a thread that is gone.
    fn shut_down(mut self) {
        while self.run_commands() {}
        self.settle();
        self.sending.cancel_all(&mut self.desk);
        self.receiving.refuse_all(&mut self.desk);
        self.flush();
        self.hand_out_ends();
        let why = TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down");
        self.receiving.dismiss_all(&mut self.desk);
        let mut ids = self.desk.endpoints.all();
        ids.extend(self.custody.replaced());
        let Self { prober, desk, context, receiving, .. } = self;
        let shared = desk.shared.clone();
        ids.iter().for_each(|id| shared.pending.peer_gone((*id).into(), &why));
        while shared.queue.pop().is_some() {}
        drop(prober);
        if desk.config.profile == UcxProfile::Tcp {
            // UCX 1.13 aborts when a worker ends while a socket still connects. Without a thread it touches nothing
            // more, and the process closes its sockets.
            let Desk { endpoints, worker, region, operations, .. } = desk;
            std::mem::forget((endpoints, worker, region, context));
            shared.settle();
            drop(operations);
        } else {
            // Connections before the worker before the memory: here every write into the arena ends.
            let Desk { endpoints, worker, region, operations, one_copy, .. } = desk;
            drop((endpoints, worker));
            shared.settle();
            drop((region, operations, one_copy, context));
        }
        ids.into_iter().for_each(|id| shared.registry.fence(id.into()));
        drop(receiving);
    }
}

fn poll(descriptors: [std::os::fd::RawFd; 2], timeout: Duration) {
    let mut entries = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // SAFETY: two valid entries. Whatever it returns, the caller looks at everything again.
    unsafe { libc::poll(entries.as_mut_ptr(), 2, timeout.as_millis() as libc::c_int) };
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
