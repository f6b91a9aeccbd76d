//! Who may start: the border between the flow and the admission queue. This file is the thin part, which has locks and
//! wakes those who wait; what it decides is decided by pure state machines:
//!
//! - [`queue`]: who starts, who waits, who is refused; [`fair`]: the order between tenants; [`drain_rate`]: how fast
//!   it moves.
//! - [`lateness`]: what predictions miss. [`limiter`]: rates of one API key.
//! - [`tenant`]: whose request it is; [`keys`]: which key makes it whose; [`cache_salt`]: whose cached KV it may reuse.
//!   [`refusal`]: why it may not start.
//!
//! A request starts when a slot is free *and* the nodes have room for it ([`Capacity`]), so that what cannot run yet
//! waits here, where it is in order and can be refused, and not on a node. While requests wait, one task starts them as
//! room comes ([`look_for_room`]); all others only notify it. Refusals are made at the entry, before any work was
//! spent.
//!
//! Nothing here outlives its request: dropping an [`Entered`] or a [`Slot`] gives the place back, whatever state it is
//! in.
pub mod cache_salt;
pub mod drain_rate;
pub mod fair;
pub mod keys;
pub mod lateness;
pub mod limiter;
pub mod queue;
pub mod refusal;
pub mod tenant;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tandem_proto::{Error, ErrorKind};
use tandem_telemetry::clock;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep_until, timeout_at};

use crate::capacity::{Ahead, Capacity, Demand};
use crate::limits::Limits;
pub use queue::Ask;
use queue::{Bounds, Queue, Ticket, Turn};
use refusal::Refused;
pub use refusal::{ENDING, REASONS, Reason, Refusal};
use tenant::DEFAULT_TENANT;
pub use tenant::Tenant;

/// While requests wait, the queue looks for room so often, whatever happens: time alone makes room, too, when a node
/// is about to be done with a prompt. With the millisecond that a timer may be late, as long as what a node is given
/// ahead.
const LOOK: Duration = Duration::from_millis(2);
/// News of the nodes' room comes in crowds, and each look asks for all nodes: the next look for such news begins so
/// long after the last one, and after [`PAUSE`] times its length, so that as a rule looks take a tenth of the time.
const BETWEEN: Duration = Duration::from_millis(1);
const PAUSE: u32 = 9;
/// No pause is longer: a look may have stood still with its thread.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// So many tokens of an answer are charged at a time.
const CHARGED_TOKENS: u32 = 32;

/// Requests by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Admitted and not ended.
    pub inflight: usize,
    /// In the queue.
    pub queued: usize,
}

/// Handle to the queue.
#[derive(Clone, Debug)]
pub struct Admission {
    inner: Arc<Inner>,
}

/// A place in the queue, or beyond it. Dropping it gives the place back.
#[derive(Debug)]
pub struct Entered {
    place: Place,
    /// `None`: it has started.
    started: Option<oneshot::Receiver<()>>,
}

/// One running request. Dropping it lets the next one start.
#[derive(Debug)]
pub struct Slot(Place);

/// A running request's part in the order of those who wait for room.
#[derive(Clone, Debug)]
pub struct Claim {
    inner: Arc<Inner>,
    ticket: Ticket,
}

struct Inner {
    state: Mutex<State>,
    nodes: Box<dyn Capacity>,
    closed: AtomicBool,
    /// Nobody runs or waits.
    empty: Notify,
    /// Who waits may have a turn, whatever the nodes say: a slot is free, or one that started is on its nodes.
    moved: Notify,
    /// There are several tenants.
    several: bool,
    /// The service is shared, among tenants or pools.
    shared: bool,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    /// Requests that may wait on each decode node.
    node_queue: u32,
    /// Of those who wait.
    wake: Wakes,
    /// Somebody waits, and the task looks.
    looking: bool,
}

/// A ticket, and the other end of its wake unless it starts at once.
type Placed = (Ticket, Option<oneshot::Receiver<()>>);
type Wakes = HashMap<Ticket, oneshot::Sender<()>>;

#[derive(Debug)]
struct Place {
    inner: Arc<Inner>,
    ticket: Ticket,
    tenant: Tenant,
    /// What was taken from its rates: a request until it starts, and tokens.
    requests: u32,
    tokens: u64,
    /// The tokens of prompt and answer that it used.
    used: u64,
    /// Tokens of its answer.
    generated: u32,
}

impl Admission {
    /// An empty queue before these nodes. Without a queue ([`Limits::max_queue`] 0) their room does not matter: who has
    /// a slot starts.
    pub fn new(limits: &Limits, nodes: impl Capacity + 'static, several: bool) -> Self {
        let &Limits { max_inflight, max_queue, node_queue, max_ttft, ref pools, .. } = limits;
        let bounds =
            Bounds { max_inflight: max_inflight as usize, max_queue, pools: pools.clone(), max_ttft, tenants: several };
        let inner = Inner {
            state: Mutex::new(State { queue: Queue::new(bounds), node_queue, wake: Wakes::new(), looking: false }),
            nodes: Box::new(nodes),
            closed: AtomicBool::default(),
            empty: Notify::default(),
            moved: Notify::default(),
            several,
            shared: several || pools.iter().len() > 1,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Takes a slot or a place in the queue for each of the requests of one tenant, or for none of them.
    ///
    /// # Errors
    /// `Overloaded`, with the time after which it is worth another try, for a rate, a limit of the queue or a time that
    /// cannot be kept; `Unavailable` when the router drains.
    pub fn enter_all(&self, tenant: &Tenant, asks: Vec<Ask>, now: Instant) -> Result<Vec<Entered>, Refusal> {
        self.open()?;
        let costs: Vec<u64> = asks.iter().map(|ask| ask.demand.tokens()).collect();
        let (requests, tokens) = (u32::try_from(costs.len()).unwrap_or(u32::MAX), costs.iter().sum());
        tenant.begin(requests).map_err(|crowded| Refusal::crowded(tenant.name(), crowded))?;
        if let Err(exceeded) = tenant.take(requests, tokens, now) {
            tenant.end(requests);
            return Err(Refusal::too_fast(tenant.name(), exceeded));
        }
        match self.inner.enter_all(asks, now) {
            Ok(places) => {
                let entry = |((ticket, started), tokens)| {
                    let (inner, tenant) = (Arc::clone(&self.inner), tenant.clone());
                    Entered {
                        place: Place { inner, ticket, tenant, requests: 1, tokens, used: 0, generated: 0 },
                        started,
                    }
                };
                let entries = places.into_iter().zip(costs).map(entry).collect();
                // Who drains may have looked just before they were in, and waits for nobody: they leave.
                self.open()?;
                Ok(entries)
            }
            Err((refused, counts)) => {
                tenant.give_back(requests, tokens, now);
                tenant.end(requests);
                Err(Refusal::of(refused, counts, tenant.name(), self.max_queue()))
            }
        }
    }

    /// Whether a request of this tenant could be let in at all; takes nothing. Asked before a request is read: what it
    /// says is as old as the reading takes, so [`Self::enter_all`] has the last word.
    ///
    /// # Errors
    /// As [`Self::enter_all`], of what does not depend on the request.
    pub fn may_enter(&self, tenant: &Tenant, now: Instant) -> Result<(), Refusal> {
        self.open()?;
        tenant.could_begin().map_err(|crowded| Refusal::crowded(tenant.name(), crowded))?;
        tenant.could_take(now).map_err(|exceeded| Refusal::too_fast(tenant.name(), exceeded))?;
        let full = self.inner.lock().queue.full(now);
        full.map_or(Ok(()), |refused| Err(Refusal::of(refused, self.counts(), tenant.name(), self.max_queue())))
    }

    /// Takes one request from the tenant's rates, for work that is done here.
    ///
    /// # Errors
    /// As [`Self::enter_all`], of a router that drains and of rates.
    pub fn charge(&self, tenant: &Tenant, now: Instant) -> Result<(), Refusal> {
        self.open()?;
        tenant.take(1, 0, now).map_err(|exceeded| Refusal::too_fast(tenant.name(), exceeded))
    }

    fn open(&self) -> Result<(), Refusal> {
        if !self.is_closed() {
            return Ok(());
        }
        Err(Refusal::draining())
    }

    /// Requests that may wait.
    pub fn max_queue(&self) -> usize {
        self.inner.lock().queue.places()
    }

    /// Requests that may run and wait, in all.
    pub fn most_requests(&self) -> usize {
        self.inner.lock().queue.most()
    }

    /// Whether first tokens that are predicted too late are refused, whatever their deadline.
    pub fn has_objective(&self) -> bool {
        self.inner.lock().queue.has_objective()
    }

    /// Holds to the `max_inflight`, `max_queue`, `node_queue` and `max_ttft` of these from now on. Who runs or waits
    /// stays; who waits where there is no queue any more starts with the next slot.
    pub fn set_limits(&self, limits: &Limits) {
        let &Limits { max_inflight, max_queue, node_queue, max_ttft, .. } = limits;
        {
            let mut state = self.inner.lock();
            state.queue.set_bounds(max_inflight as usize, max_queue, max_ttft);
            state.node_queue = node_queue;
        }
        self.inner.moved.notify_one();
    }

    /// Whether there are several tenants: they have API keys.
    pub fn has_tenants(&self) -> bool {
        self.inner.several
    }

    /// The name under which a tenant's service is counted: its own, if it has a key.
    pub fn account<'a>(&self, tenant: &'a Tenant) -> &'a str {
        if self.inner.several { tenant.name() } else { DEFAULT_TENANT }
    }

    /// Whether [`Self::drain`] was called.
    pub fn is_closed(&self) -> bool {
        self.inner.closed.load(Ordering::Relaxed)
    }

    /// Requests by state, now.
    pub fn counts(&self) -> Counts {
        self.inner.counts()
    }

    /// Requests that wait, by tenant; `tenants` and others that are known and have none included: a series that comes
    /// and goes says nothing while it is gone.
    pub fn depths_of(&self, tenants: Vec<Arc<str>>) -> Vec<(Arc<str>, usize)> {
        let mut depths = self.inner.lock().queue.depths();
        for tenant in tenants {
            depths.entry(tenant).or_default();
        }
        depths.into_iter().collect()
    }

    /// Lets nobody in any more and waits, no longer than `limit`, until everybody has left.
    pub async fn drain(&self, limit: Duration) {
        self.inner.closed.store(true, Ordering::Relaxed);
        let all_left = async {
            loop {
                // Before the look: who leaves behind it is not missed.
                let empty = self.inner.empty.notified();
                if self.counts() == Counts::default() {
                    return;
                }
                empty.await;
            }
        };
        if tokio::time::timeout(limit, all_left).await.is_err() {
            tracing::warn!(counts = ?self.counts(), "requests still run at the end of the drain");
        }
    }
}

impl Entered {
    /// Waits for the slot. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// `DeadlineExceeded`, without a message, when the deadline passed first.
    pub async fn admitted(self) -> Result<Slot, Error> {
        let Self { mut place, started } = self;
        if let Some(started) = started
            && started.await.is_err()
        {
            return Err(Error::new(ErrorKind::DeadlineExceeded, String::new()));
        }
        place.requests = 0;
        Ok(Slot(place))
    }
}

impl Slot {
    /// For the time in which it has no nodes.
    pub fn claim(&self) -> Claim {
        Claim { inner: Arc::clone(&self.0.inner), ticket: self.0.ticket }
    }

    /// Its first token is on the way to the client.
    pub fn first_token(&self, now: Instant) {
        self.0.inner.lock().queue.first_token(self.0.ticket, now);
    }

    /// So many tokens of its answer are generated, in all. Shares are charged now and then, and at its end.
    pub fn generated(&mut self, tokens: u32) {
        self.0.generated = tokens;
        if self.0.inner.shared && tokens.is_multiple_of(CHARGED_TOKENS) {
            self.0.inner.lock().queue.generated(self.0.ticket, tokens);
        }
    }

    /// It used so many tokens of prompt and answer: these count for the tenant's rates, and no others.
    pub fn used(&mut self, prompt: u32, generated: u32) {
        self.0.generated = generated;
        self.0.used = u64::from(prompt) + u64::from(generated);
    }
}

impl Claim {
    /// Its nodes failed, and the others have no room for what it needs: who has not started comes behind it.
    pub fn waits_for_room(&self, demand: &Demand) {
        self.inner.lock().queue.displaced(self.ticket, demand);
    }

    /// It is booked on its nodes, whose room shows it from now on; or it has given up its claim.
    pub fn routed(&self) {
        self.inner.lock().queue.routed(self.ticket);
        self.inner.moved.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = clock::now();
        self.tenant.give_back(self.requests, self.tokens.saturating_sub(self.used), now);
        self.tenant.owe(self.used.saturating_sub(self.tokens), now);
        self.tenant.end(1);
        let counts = {
            let mut state = self.inner.lock();
            // Who gave up while it waited is woken by nobody.
            state.wake.remove(&self.ticket);
            state.queue.generated(self.ticket, self.generated);
            state.queue.leave(self.ticket, now);
            state.counts()
        };
        self.inner.moved.notify_one();
        if counts == Counts::default() {
            self.inner.empty.notify_waiters();
        }
    }
}

/// Starts requests as the nodes have room for them, until the queue is empty. Tries again at once when a slot becomes
/// free, soon after a notification from the nodes, and every [`LOOK`] in any case.
async fn look_for_room(inner: Arc<Inner>) {
    loop {
        let began = clock::now();
        if !inner.look(began) {
            return;
        }
        let now = clock::now();
        let pause = (now.saturating_duration_since(began) * PAUSE).clamp(BETWEEN, LONGEST_PAUSE);
        let other_room = async {
            sleep_until((now + pause).into()).await;
            let _ = timeout_at((began + LOOK).into(), inner.nodes.freed().notified()).await;
        };
        tokio::select! {
            () = inner.moved.notified() => {}
            () = other_room => {}
        }
    }
}

impl State {
    fn counts(&self) -> Counts {
        Counts { inflight: self.queue.inflight(), queued: self.queue.waiting() }
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // No holder leaves the queue half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counts(&self) -> Counts {
        self.lock().counts()
    }

    /// A place for each, or why there is none.
    fn enter_all(self: &Arc<Self>, asks: Vec<Ask>, now: Instant) -> Result<Vec<Placed>, (Refused, Counts)> {
        self.change(|state, room| {
            let (entered, turn) = state.queue.enter_all(asks, now, room);
            let mut place = |ticket| {
                if turn.start.contains(&ticket) {
                    return (ticket, None);
                }
                let (sender, receiver) = oneshot::channel();
                state.wake.insert(ticket, sender);
                (ticket, Some(receiver))
            };
            let places = entered.map(|tickets| tickets.into_iter().map(&mut place).collect());
            let counts = state.counts();
            if counts.queued > 0 && !std::mem::replace(&mut state.looking, true) {
                tokio::spawn(look_for_room(Arc::clone(self)));
            }
            (turn, places.map_err(|refused| (refused, counts)))
        })
    }

    /// Lets start who may; whether somebody still waits.
    fn look(&self, now: Instant) -> bool {
        self.change(|state, room| {
            let turn = state.queue.tick(now, room);
            state.looking = state.queue.waiting() > 0;
            (turn, state.looking)
        })
    }

    /// Changes the queue and wakes whose turn it is, and those whose deadline passed.
    fn change<T>(&self, change: impl FnOnce(&mut State, queue::HasRoom<'_>) -> (Turn, T)) -> T {
        let mut state = self.lock();
        // Who has a slot starts then, whatever room the nodes have.
        let (without_queue, node_queue) = (state.queue.places() == 0, state.node_queue);
        let mut room = |demand: &Demand, ahead: &Ahead| {
            without_queue || self.nodes.has_room(demand, ahead, node_queue, clock::now())
        };
        let (turn, result) = change(&mut state, &mut room);
        for ticket in turn.start {
            // Who has just left gives its slot back when its place is dropped.
            state.wake.remove(&ticket).map(|started| started.send(()));
        }
        turn.expired.iter().for_each(|ticket| drop(state.wake.remove(ticket)));
        result
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
