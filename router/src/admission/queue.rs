//! The admission queue as a state machine: who may start, who waits, who is refused. Pure: time is an argument, what
//! the nodes have room for is asked of the caller, and entries and ticks return the tickets that may start now. Waking
//! them, metrics and locks are [`super`]'s matter; rate limits come before it.
//!
//! **Order.** Three choices, each without starvation: between pools and between the tenants of a pool by start-time
//! fair queueing over tokens of prompt and answer ([`Fair`]); within a tenant by priority, where a level is worth
//! [`PLACES_A_LEVEL`] places of that tenant's later arrivals, as in the nodes' own queues; among equals first come,
//! first served. A request that nobody has room for is passed over by others that fit, [`MAX_PASSES`] times at most:
//! then its pool waits for it, and after [`MAX_PASSES_OF_OTHERS`] the other pools, too.
//!
//! **Charges.** A request is charged its prompt and [`ANSWER_WEIGHT`] times what is generated: at its start as much as
//! this tenant's answers usually have, then what comes beyond that, and at its end what did not come is given back.
//!
//! **Bounds.** Slots; each pool's share of them; places in the queue. Where there are several tenants, one may hold no
//! more than [`SHARE`] times the places that are free (a dynamic threshold after Choudhury and Hahne, 1998): however
//! many of them want more, some places stay free for who comes new.
//!
//! Long because order, charges and bounds are one state: whoever enters, starts or leaves changes all three.
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::drain_rate::DrainRate;
use super::fair::Fair;
use super::lateness::Lateness;
use super::refusal::{Reason, Refused};
use super::tenant::DEFAULT_TENANT;
use crate::capacity::{Ahead, Demand, Predicted};
use crate::limits::pools::{Pool, Pools};

/// What a token of an answer costs against one of a prompt, for shares: as in VTC's paper. It takes a step of its own,
/// and its KV stays longest.
pub const ANSWER_WEIGHT: u64 = 2;
/// What one more answer weighs in the usual length of a tenant's answers.
const ANSWERS_MEMORY: f64 = 1.0 / 8.0;
/// What a level of priority is worth, see the head of this file.
pub const PLACES_A_LEVEL: i64 = 32;
/// Requests of its own pool that may start before one that finds no room.
pub const MAX_PASSES: u32 = 64;
/// A tenant's places against the free ones.
pub const SHARE: usize = 4;
/// Tenants that are known at a time, in each pool; further ones share one place in the order.
pub const MAX_TENANTS: usize = 256;
/// Tokens that a tenant may save up: some requests of a usual length. Pools save up nothing.
const CREDIT: u64 = 4096;
/// The name of those that share.
pub const OTHERS: &str = "(others)";
/// The same for requests of other pools. They have shares of their own; but nobody is passed by for ever.
pub const MAX_PASSES_OF_OTHERS: u32 = 8 * MAX_PASSES;
/// First requests of each pool that are tried for room before all of it wait.
const MAX_TRIED: usize = 8;
/// No client is told to stay away for longer.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Names a request from its entry until it leaves.
pub type Ticket = u64;

/// A request, as far as the queue must know it.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Whose it is.
    pub tenant: Arc<str>,
    /// The tenant's share against the others' (≥ 1).
    pub weight: u32,
    /// Higher goes first among the tenant's own.
    pub priority: i32,
    /// What it needs of the nodes.
    pub demand: Demand,
    /// It is of no use to anybody after this.
    pub deadline: Instant,
    /// What the nodes need for its first token, as far as that is known.
    pub predicted: Option<Predicted>,
}

/// The limits.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Requests that run.
    pub max_inflight: usize,
    /// Requests that wait.
    pub max_queue: usize,
    /// Classes by prompt length.
    pub pools: Pools,
    /// First tokens predicted later than this are refused.
    pub max_ttft: Option<Duration>,
    /// Tenants are known by their API keys: each has its share of the service and of the queue. Without keys a tenant's
    /// name is a label that anybody may write, and all requests stand in one line.
    pub tenants: bool,
}

/// What a change leads to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// These may start now.
    pub start: Vec<Ticket>,
    /// The deadlines of these passed while they waited: they are out.
    pub expired: Vec<Ticket>,
}

/// Whether the nodes have room for a request behind those that are ahead of it.
pub type HasRoom<'a> = &'a mut dyn FnMut(&Demand, &Ahead) -> bool;

/// See the head of this file.
#[derive(Debug)]
pub struct Queue {
    bounds: Bounds,
    pools: Vec<Class>,
    /// The order of the pools.
    between: Fair<usize>,
    places: HashMap<Ticket, Place>,
    deadlines: BTreeSet<(Instant, Ticket)>,
    inflight: usize,
    ahead: Ahead,
    last: Ticket,
    /// The tenant of all requests where tenants have no shares.
    everybody: Arc<str>,
    /// Of those whose first token is to come: since when, and after which time that was predicted.
    expected: HashMap<Ticket, (Instant, Duration)>,
    lateness: Lateness,
}

/// One pool.
#[derive(Debug)]
struct Class {
    slots: usize,
    share: u32,
    inflight: usize,
    waiting: usize,
    /// The order of the lanes.
    order: Fair<Arc<str>>,
    lanes: BTreeMap<Arc<str>, Lane>,
    drain_rate: DrainRate,
}

/// What one tenant has waiting in one pool.
#[derive(Debug, Default)]
struct Lane {
    /// By place, then by arrival.
    waiting: BTreeMap<Key, Waiting>,
    /// What all of them cost.
    cost: u64,
    arrivals: i64,
    /// Tokens of its answers as they have been lately; `None` before the first one.
    usual_answer: Option<f64>,
}

type Key = (i64, Ticket);

#[derive(Debug)]
struct Waiting {
    ask: Ask,
    /// Tokens of the answer that are charged at the start.
    answer: u32,
    /// By requests of its own pool.
    passes: u32,
    passes_of_others: u32,
}

#[derive(Debug)]
enum Place {
    Waiting { pool: usize, lane: Arc<str>, key: Key },
    Running { pool: usize, lane: Arc<str>, ahead: Option<Ahead>, charge: Charge },
}

/// What a running request is charged with.
#[derive(Clone, Copy, Debug)]
struct Charge {
    prompt: u32,
    /// Tokens of its answer.
    answer: u32,
    /// Those of them that are generated.
    generated: u32,
    /// Its nodes have it: the prompt costs what it costs.
    routed: bool,
}

impl Waiting {
    /// For shares.
    fn cost(&self) -> u64 {
        u64::from(self.ask.demand.prompt_tokens) + ANSWER_WEIGHT * u64::from(self.answer)
    }
}

impl Queue {
    /// Nobody is there.
    pub fn new(bounds: Bounds) -> Self {
        let slots = bounds.pools.slots(bounds.max_inflight);
        let class = |(pool, slots): (&Pool, usize)| Class {
            slots,
            share: pool.share,
            inflight: 0,
            waiting: 0,
            order: Fair::saving(CREDIT),
            lanes: BTreeMap::new(),
            drain_rate: DrainRate::default(),
        };
        let pools = bounds.pools.iter().zip(slots).map(class).collect();
        Self {
            bounds,
            pools,
            between: Fair::default(),
            places: HashMap::new(),
            deadlines: BTreeSet::new(),
            inflight: 0,
            ahead: Ahead::default(),
            last: 0,
            everybody: Arc::from(DEFAULT_TENANT),
            expected: HashMap::new(),
            lateness: Lateness::default(),
        }
    }

    /// Takes requests in that are of no use without each other: all or none. Each starts (then its ticket is in the
    /// turn) or waits.
    pub fn enter_all(
        &mut self,
        asks: Vec<Ask>,
        now: Instant,
        room: HasRoom<'_>,
    ) -> (Result<Vec<Ticket>, Refused>, Turn) {
        let expired = self.expire(now);
        // Too late even for one that starts at once: nothing else matters.
        if let Some(refused) = asks.iter().find_map(|ask| self.too_late(ask, None, now)) {
            self.note_waiting(now);
            return (Err(refused), Turn { start: Vec::new(), expired });
        }
        let on_nodes: Vec<_> = asks.iter().map(|ask| ask.predicted).collect();
        let tickets: Vec<Ticket> = asks.into_iter().map(|ask| self.push(ask)).collect();
        let mut start = self.start(now, room);
        let refused = tickets.iter().find_map(|ticket| self.refusal(*ticket, now));
        if refused.is_some() {
            tickets.iter().for_each(|ticket| self.remove(*ticket));
            let own = start.len();
            start.retain(|ticket| !tickets.contains(ticket));
            if start.len() < own {
                // Somebody else may have what they gave back.
                start.append(&mut self.start(now, room));
            }
        } else {
            // A prediction of the wait alone says nothing of the first token.
            for (ticket, on_nodes) in tickets.iter().zip(on_nodes).filter(|(_, on_nodes)| on_nodes.is_some()) {
                let first_token = first_token(self.predicted_wait(*ticket, now), on_nodes);
                self.expected.extend(first_token.map(|first_token| (*ticket, (now, first_token))));
            }
        }
        self.note_waiting(now);
        (refused.map_or(Ok(tickets), Err), Turn { start, expired })
    }

    /// The request is gone: it ended, or it waits no longer. Unknown tickets are nobody's. Others may start at the next
    /// [`Self::tick`].
    pub fn leave(&mut self, ticket: Ticket, now: Instant) {
        self.remove(ticket);
        self.note_waiting(now);
    }

    /// A request that started is on its nodes: they know of it. Others may start at the next [`Self::tick`].
    pub fn routed(&mut self, ticket: Ticket) {
        self.forget_ahead(ticket);
        if let Some(Place::Running { charge, .. }) = self.places.get_mut(&ticket) {
            charge.routed = true;
        }
    }

    /// A request that runs is on no node any more: it takes room before those who have not started, until it is routed
    /// again.
    pub fn displaced(&mut self, ticket: Ticket, demand: &Demand) {
        self.forget_ahead(ticket);
        if let Some(Place::Running { ahead, .. }) = self.places.get_mut(&ticket) {
            let own = Ahead::of(demand);
            *ahead = Some(own);
            self.ahead.add(&own);
        }
    }

    /// So many tokens of a running request's answer are generated, in all: what is not charged yet is charged now.
    pub fn generated(&mut self, ticket: Ticket, tokens: u32) {
        let Some(Place::Running { pool, lane, charge, .. }) = self.places.get_mut(&ticket) else { return };
        charge.generated = tokens;
        let more = ANSWER_WEIGHT * u64::from(tokens.saturating_sub(charge.answer));
        charge.answer = charge.answer.max(tokens);
        if more > 0 {
            self.pools[*pool].order.charge(lane, more);
            self.between.charge(pool, more);
        }
    }

    /// The request's first token is here: predictions learn from it.
    pub fn first_token(&mut self, ticket: Ticket, now: Instant) {
        if let Some((since, predicted)) = self.expected.remove(&ticket) {
            self.lateness.observe(predicted, now.saturating_duration_since(since), now);
        }
    }

    /// Time has passed, a slot is free, or the nodes have other room than before.
    pub fn tick(&mut self, now: Instant, room: HasRoom<'_>) -> Turn {
        let mut turn = Turn::default();
        if self.waiting() > 0 {
            turn.expired = self.expire(now);
            turn.start = self.start(now, room);
        }
        self.note_waiting(now);
        turn
    }

    /// Holds to these from now on. Who runs or waits stays, also beyond them. Pools keep their shares.
    pub fn set_bounds(&mut self, max_inflight: usize, max_queue: usize, max_ttft: Option<Duration>) {
        self.bounds = Bounds { max_inflight, max_queue, max_ttft, ..self.bounds.clone() };
        let slots = self.bounds.pools.slots(max_inflight);
        self.pools.iter_mut().zip(slots).for_each(|(pool, slots)| pool.slots = slots);
    }

    /// Requests that may wait.
    pub fn places(&self) -> usize {
        self.bounds.max_queue
    }

    /// Requests that may run and wait.
    pub fn most(&self) -> usize {
        self.bounds.max_inflight + self.bounds.max_queue
    }

    /// Whether there is a longest time to a first token.
    pub fn has_objective(&self) -> bool {
        self.bounds.max_ttft.is_some()
    }

    /// Why nobody may wait now, if so: as many wait as may. Without a queue only those who do not start are refused.
    pub fn full(&self, now: Instant) -> Option<Refused> {
        if self.bounds.max_queue == 0 || self.waiting() < self.bounds.max_queue {
            return None;
        }
        // A class with a free slot and nobody before it may start at once, however many wait in others.
        let starts = |pool: &Class| pool.waiting == 0 && pool.inflight < pool.slots;
        if self.inflight < self.bounds.max_inflight && self.pools.iter().any(starts) {
            return None;
        }
        let retry_after = self.pools.iter().filter_map(|pool| pool.half_drained(now)).min();
        let retry_after = retry_after.map(|drained| drained.min(LONGEST_RETRY));
        Some(Refused { reason: Reason::QueueFull, retry_after, first_token: None })
    }

    /// Requests that run.
    pub fn inflight(&self) -> usize {
        self.inflight
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.places.len() - self.inflight
    }

    /// Requests that wait, by tenant; those of known tenants that wait for nothing are 0.
    pub fn depths(&self) -> BTreeMap<Arc<str>, usize> {
        let mut depths: BTreeMap<Arc<str>, usize> = BTreeMap::new();
        if !self.bounds.tenants {
            depths.insert(Arc::clone(&self.everybody), 0);
        }
        for (lane_name, lane) in self.pools.iter().flat_map(|pool| &pool.lanes) {
            if self.bounds.tenants {
                *depths.entry(Arc::clone(lane_name)).or_default() += lane.waiting.len();
                continue;
            }
            for waiting in lane.waiting.values() {
                let known = depths.contains_key(&waiting.ask.tenant) || depths.len() < MAX_TENANTS;
                let name = if known { Arc::clone(&waiting.ask.tenant) } else { Arc::from(OTHERS) };
                *depths.entry(name).or_default() += 1;
            }
        }
        depths
    }

    /// How long a waiting request will wait; `None` while nobody can tell.
    pub fn predicted_wait(&self, ticket: Ticket, now: Instant) -> Option<Duration> {
        let Place::Waiting { pool, lane, key } = self.places.get(&ticket)? else { return Some(Duration::ZERO) };
        let class = &self.pools[*pool];
        let own = class.lanes.get(lane)?;
        let behind: u64 = own.waiting.range(key..).map(|(_, waiting)| waiting.cost()).sum();
        let ahead = own.cost.saturating_sub(behind);
        let cost_of = |other: &Arc<str>| class.lanes.get(other).map_or(0, |lane| lane.cost);
        let before = ahead.saturating_add(class.order.work_before(lane, ahead, cost_of));
        class.drain_rate.time_for(before, now)
    }

    fn push(&mut self, ask: Ask) -> Ticket {
        self.last += 1;
        let (ticket, pool) = (self.last, self.bounds.pools.of(ask.demand.prompt_tokens));
        let class = &mut self.pools[pool];
        // A name that clients give themselves is no claim: whoever invents names would have as many shares.
        let name = if self.bounds.tenants { class.lane_of(&ask.tenant) } else { Arc::clone(&self.everybody) };
        let lane = class.lanes.entry(Arc::clone(&name)).or_default();
        let key = (lane.arrivals.saturating_sub(i64::from(ask.priority) * PLACES_A_LEVEL), ticket);
        lane.arrivals += 1;
        let usual = lane.usual_answer.map_or(ask.demand.answer_tokens, |usual| usual.ceil() as u32);
        let (answer, deadline) = (usual.min(ask.demand.max_tokens).max(1), ask.deadline);
        class.order.wants(&name, ask.weight);
        self.between.wants(&pool, class.share);
        self.deadlines.insert((deadline, ticket));
        let waiting = Waiting { ask, answer, passes: 0, passes_of_others: 0 };
        lane.cost += waiting.cost();
        lane.waiting.insert(key, waiting);
        class.waiting += 1;
        self.places.insert(ticket, Place::Waiting { pool, lane: name, key });
        ticket
    }

    /// Takes a ticket out, wherever it is.
    fn remove(&mut self, ticket: Ticket) {
        self.forget_ahead(ticket);
        self.expected.remove(&ticket);
        match self.places.remove(&ticket) {
            Some(Place::Waiting { pool, lane, key }) => drop(self.take(ticket, pool, &lane, key)),
            Some(Place::Running { pool, lane, charge, .. }) => {
                self.inflight -= 1;
                self.pools[pool].inflight -= 1;
                self.settle(pool, &lane, charge);
            }
            None => {}
        }
    }

    /// A request has ended: what of its charge did not come is given back.
    fn settle(&mut self, pool: usize, lane: &Arc<str>, charge: Charge) {
        let Charge { prompt, answer, generated, routed } = charge;
        let prompt = if routed { 0 } else { u64::from(prompt) };
        let fewer = prompt + ANSWER_WEIGHT * u64::from(answer.saturating_sub(generated));
        let class = &mut self.pools[pool];
        if fewer > 0 {
            class.order.give_back(lane, fewer);
            self.between.give_back(&pool, fewer);
        }
        if let Some(lane) = class.lanes.get_mut(lane).filter(|_| generated > 0) {
            let usual = lane.usual_answer.get_or_insert(generated.into());
            *usual += (f64::from(generated) - *usual) * ANSWERS_MEMORY;
        }
    }

    /// Out of its lane.
    fn take(&mut self, ticket: Ticket, pool: usize, name: &Arc<str>, key: Key) -> Option<Waiting> {
        let class = &mut self.pools[pool];
        let lane = class.lanes.get_mut(name)?;
        let waiting = lane.waiting.remove(&key)?;
        class.waiting -= 1;
        lane.cost = lane.cost.saturating_sub(waiting.cost());
        self.deadlines.remove(&(waiting.ask.deadline, ticket));
        if lane.waiting.is_empty() {
            class.order.rests(name);
        }
        if class.waiting == 0 {
            self.between.rests(&pool);
        }
        Some(waiting)
    }

    fn start(&mut self, now: Instant, room: HasRoom<'_>) -> Vec<Ticket> {
        let mut started = Vec::new();
        while self.inflight < self.bounds.max_inflight
            && let Some((pool, lane, key)) = self.next(room)
        {
            let ticket = key.1;
            let Some(waiting) = self.take(ticket, pool, &lane, key) else { break };
            let (cost, ahead) = (waiting.cost(), Ahead::of(&waiting.ask.demand));
            let class = &mut self.pools[pool];
            class.order.serve(&lane, cost);
            class.drain_rate.started(cost, now);
            class.inflight += 1;
            self.between.serve(&pool, cost);
            self.inflight += 1;
            self.ahead.add(&ahead);
            let Waiting { ask, answer, .. } = waiting;
            let charge = Charge { prompt: ask.demand.prompt_tokens, answer, generated: 0, routed: false };
            self.places.insert(ticket, Place::Running { pool, lane, ahead: Some(ahead), charge });
            started.push(ticket);
        }
        started
    }

    /// The request whose turn it is, if there is room for it or for one that may pass it.
    fn next(&mut self, room: HasRoom<'_>) -> Option<(usize, Arc<str>, Key)> {
        let mut passed: Vec<(usize, Arc<str>, Key)> = Vec::new();
        // Its other requests wait for the one that was passed enough.
        let mut closed = None;
        for (pool, lane, key) in self.heads() {
            let waiting = self.pools[pool].lanes.get(&lane)?.waiting.get(&key)?;
            if closed == Some(pool) {
                continue;
            }
            if room(&waiting.ask.demand, &self.ahead) {
                self.note_passes(&passed, pool);
                return Some((pool, lane, key));
            }
            if waiting.passes_of_others >= MAX_PASSES_OF_OTHERS {
                return None;
            }
            closed = (waiting.passes >= MAX_PASSES).then_some(pool);
            passed.push((pool, lane, key));
        }
        None
    }

    /// A request of pool `by` starts before all of these.
    fn note_passes(&mut self, passed: &[(usize, Arc<str>, Key)], by: usize) {
        for (pool, lane, key) in passed {
            let waiting = self.pools[*pool].lanes.get_mut(lane).and_then(|lane| lane.waiting.get_mut(key));
            if let Some(waiting) = waiting {
                let passes = if *pool == by { &mut waiting.passes } else { &mut waiting.passes_of_others };
                *passes += 1;
            }
        }
    }

    /// The first request of each tenant in each pool that has a slot, in order; of each pool as many as are tried.
    fn heads(&self) -> Vec<(usize, Arc<str>, Key)> {
        let pools =
            self.between.order().into_iter().filter(|pool| self.pools[*pool].inflight < self.pools[*pool].slots);
        let head = |pool: usize, lane: Arc<str>| {
            let key = *self.pools[pool].lanes.get(&lane)?.waiting.first_key_value()?.0;
            Some((pool, lane, key))
        };
        let of_pool = |pool: usize| {
            let lanes = self.pools[pool].order.order().into_iter();
            lanes.filter_map(move |lane| head(pool, lane)).take(MAX_TRIED)
        };
        pools.flat_map(of_pool).collect()
    }

    /// Why a request that has not started may not wait, if it may not.
    fn refusal(&self, ticket: Ticket, now: Instant) -> Option<Refused> {
        let Some(Place::Waiting { pool, lane, key }) = self.places.get(&ticket) else { return None };
        let (waiting, limit) = (self.waiting() - 1, self.bounds.max_queue);
        let drained = || Some(self.pools[*pool].half_drained(now)?.min(LONGEST_RETRY));
        if waiting >= limit {
            return Some(Refused { reason: Reason::QueueFull, retry_after: drained(), first_token: None });
        }
        let own: usize = self.pools.iter().filter_map(|pool| pool.lanes.get(lane)).map(|lane| lane.waiting.len()).sum();
        if self.bounds.tenants && own > SHARE * (limit - waiting) {
            return Some(Refused { reason: Reason::TenantShare, retry_after: drained(), first_token: None });
        }
        let ask = &self.pools[*pool].lanes.get(lane)?.waiting.get(key)?.ask;
        self.too_late(ask, self.predicted_wait(ticket, now), now)
    }

    /// Why nobody would wait for the first token of a request that starts after `wait`, if nobody would; `None` where
    /// the wait is not known.
    fn too_late(&self, ask: &Ask, wait: Option<Duration>, now: Instant) -> Option<Refused> {
        let predicted = first_token(wait, ask.predicted)?;
        let prefill = ask.predicted.unwrap_or_default().prefill;
        let late = |reason, allowed: Duration| {
            let first_token = predicted.saturating_add(self.lateness.margin(allowed, now));
            // What takes too long by itself does so at any time.
            let retry_after = (prefill <= allowed).then(|| first_token.saturating_sub(allowed).min(LONGEST_RETRY));
            (first_token > allowed).then_some(Refused { reason, retry_after, first_token: Some(first_token) })
        };
        late(Reason::Deadline, ask.deadline.saturating_duration_since(now))
            .or_else(|| late(Reason::Objective, self.bounds.max_ttft?))
    }

    fn expire(&mut self, now: Instant) -> Vec<Ticket> {
        let mut expired = Vec::new();
        while let Some((deadline, ticket)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.remove(ticket);
            self.deadlines.remove(&(deadline, ticket));
            expired.push(ticket);
        }
        expired
    }

    fn forget_ahead(&mut self, ticket: Ticket) {
        if let Some(Place::Running { ahead, .. }) = self.places.get_mut(&ticket)
            && let Some(ahead) = ahead.take()
        {
            self.ahead.sub(&ahead);
        }
    }

    fn note_waiting(&mut self, now: Instant) {
        self.pools.iter_mut().for_each(|pool| pool.drain_rate.waits(pool.waiting > 0, now));
    }
}

/// From now to the first token, with the wait for a start and what the nodes need, as far as they are known. While a
/// request waits here, the nodes work off what they have: the longer of the two waits counts.
fn first_token(wait: Option<Duration>, on_nodes: Option<Predicted>) -> Option<Duration> {
    if wait.is_none() && on_nodes.is_none() {
        return None;
    }
    let Predicted { wait: there, prefill } = on_nodes.unwrap_or_default();
    Some(wait.unwrap_or_default().max(there).saturating_add(prefill))
}

impl Class {
    /// The lane of a tenant: its own, or the one of those for whom there is none.
    fn lane_of(&mut self, tenant: &Arc<str>) -> Arc<str> {
        if self.order.knows(tenant) {
            return Arc::clone(tenant);
        }
        for gone in self.order.make_room(MAX_TENANTS) {
            self.lanes.remove(&gone);
        }
        if self.order.known() < MAX_TENANTS { Arc::clone(tenant) } else { Arc::from(OTHERS) }
    }

    /// Until half of what waits has started.
    fn half_drained(&self, now: Instant) -> Option<Duration> {
        let cost: u64 = self.lanes.values().map(|lane| lane.cost).sum();
        self.drain_rate.time_for(cost / 2, now)
    }
}

#[cfg(test)]
mod tests;
