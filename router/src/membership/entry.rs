//! One node of the table: what it reported, what is booked on it ([`super::booking`]), and what of that the choice of
//! nodes sees. Time is an argument. The view itself lies beside the others in one row, see [`super::table`]; this file
//! alone writes its loads.
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_ports::is_life_secret;
use tandem_proto::{Error, ErrorKind, v1};

use super::Node;
use super::booking::{Bookings, Stage};
use super::breaker::{Breaker, Circuit};
use super::node_capacity::NodeCapacity;
use super::now::{NodeNow, State};
use crate::select::calibrate::Factor;
use crate::select::cost::{self, StepCost};
use crate::select::pending_streams::PendingStreams;
use crate::select::processor::Processor;
use crate::select::{NodeView, Role, Work};

/// A node, without its view.
#[derive(Debug)]
pub(super) struct NodeEntry {
    pub node: Arc<Node>,
    pub load: v1::Load,
    /// Whether there was a report.
    reported: bool,
    pub heard: Instant,
    pub breaker: Breaker,
    pub bookings: Bookings,
    /// How far predictions of its prompts are off.
    factor: Factor,
}

impl NodeEntry {
    pub fn new(node: Arc<Node>, breaker: Breaker, now: Instant) -> Self {
        let load = v1::Load { free_blocks: node.info.total_blocks, ..v1::Load::default() };
        let (bookings, factor) = (Bookings::new(now), Factor::default());
        Self { node, load, reported: false, heard: now, breaker, bookings, factor }
    }

    /// The view of a node that has just registered.
    pub fn view(&self, domains: Arc<[u32]>) -> NodeView {
        let info = &self.node.info;
        NodeView {
            session: self.node.session,
            node_id: info.node_id.as_str().into(),
            role: self.node.role,
            domains,
            block_tokens: info.block_tokens,
            total_blocks: info.total_blocks,
            free_blocks: info.total_blocks,
            max_context_tokens: info.max_context_tokens,
            max_running: info.max_running,
            max_step_tokens: info.max_batched_tokens,
            draining: false,
            shut: false,
            running: 0,
            reported: Work::default(),
            routed: Work::default(),
            held: Work::default(),
            pending_streams: PendingStreams::default(),
            processor: Processor::reported(info.processor.as_ref()),
            step_cost: StepCost::default(),
            prefill_factor: 1.0,
            computes_prompts: false,
            backlog_ms: 0.0,
            cached_blocks_of_prompt: 0,
        }
    }

    /// Takes a report: what was routed before it is in it, but for what was still on its way then: by so many calls
    /// fewer than this router has there the node has seen, and the youngest are not among those. Returns the
    /// preemptions since the one before; what was before the first one is not this membership's.
    pub fn report(&mut self, view: &mut NodeView, load: &v1::Load, now: Instant) -> u64 {
        let before = if self.reported { self.load.preemptions } else { load.preemptions };
        let preempted = load.preemptions.saturating_sub(before);
        let free_blocks = load.free_blocks.min(self.node.info.total_blocks);
        self.load = v1::Load { free_blocks, ..*load };
        self.reported = true;
        self.factor.fade(now.saturating_duration_since(self.heard));
        self.heard = now;
        view.free_blocks = free_blocks;
        view.running = load.running;
        view.reported = Work {
            requests: load.running.saturating_add(load.waiting),
            tokens: load.queued_tokens,
            blocks: 0,
            context: load.running_tokens,
            answers: 0,
        };
        view.step_cost = StepCost::reported(load.step_cost.as_ref());
        let seen = load.own.map(|own| match view.role {
            Role::Prefill => own.prompts,
            Role::Decode => own.requests,
        });
        self.bookings.reported(seen, self.queued_ms(view), now);
        preempted
    }

    /// How long the prompts take that the node reported.
    fn queued_ms(&self, view: &NodeView) -> f64 {
        let cost = if view.step_cost.is_measured() { view.step_cost } else { cost::UNMEASURED };
        let (tokens, prompts, computed) = match view.role {
            Role::Prefill => (view.reported.tokens, view.reported.requests, view.reported.context),
            // Each of its streams has one token that is known and not computed. What else is queued are prompts of its
            // own.
            Role::Decode => (view.reported.tokens.saturating_sub(view.running.into()), 1, 0),
        };
        cost.queue_ms(tokens, prompts, computed, cost::step_tokens(view)) * self.factor.value()
    }

    /// Whether it is not among those that are tried last: its breaker is not shut, and it was not silent for
    /// `suspicion`.
    pub fn is_sound(&self, now: Instant, suspicion: Duration) -> bool {
        self.breaker.admits(now) && now.saturating_duration_since(self.heard) <= suspicion
    }

    /// Whether its life here is over for one that says this of itself, and has its name: that is another life of the
    /// same process, which proves it, or this one was silent for `suspicion`. Its requests end for whoever takes its
    /// name.
    ///
    /// # Errors
    /// `Unavailable`, with the time after which it yields if it says nothing more.
    pub fn yields_to(&self, info: &v1::Register, now: Instant, suspicion: Duration) -> Result<(), Error> {
        let own = &self.node.info;
        let refuse = |how: String| {
            let message = format!("node `{}` is in a session with this router already, {how}", info.node_id);
            Error::new(ErrorKind::Unavailable, message)
        };
        let same = own.incarnation == info.incarnation;
        if same && own.link != info.link {
            return Err(refuse("by another address of it".to_owned()));
        }
        let silent = now.saturating_duration_since(self.heard);
        let shows = |life: &v1::LifeSecret| is_life_secret(&life.secret, &own.secret_digest);
        if silent > suspicion || same && info.ended.iter().any(shows) {
            return Ok(());
        }
        let wait = suspicion.saturating_sub(silent) + Duration::from_millis(1);
        let (heard_ms, wait_ms) = (silent.as_millis(), wait.as_millis());
        let who = if same { "and this is no proof that it is over" } else { "as another process" };
        let error = refuse(format!(
            "{who}: that one was heard {heard_ms} ms ago, and has to be silent for {wait_ms} ms more. Give each node a \
             --node-id of its own; a node that was started again joins then"
        ));
        Err(Error { retry_after: Some(wait), ..error })
    }

    /// Brings up to date what depends on the time, and forgets what the last request's prompt had here.
    pub fn refresh(&self, view: &mut NodeView, now: Instant, suspicion: Duration) {
        view.shut = !self.is_sound(now, suspicion);
        (view.routed, view.held) = (self.bookings.routed(), self.bookings.held());
        (view.backlog_ms, view.pending_streams) = (self.bookings.backlog_ms(now), self.bookings.pending_streams(now));
        view.prefill_factor = self.factor.value();
        view.computes_prompts = self.factor.has_seen();
        view.cached_blocks_of_prompt = 0;
    }

    /// A request is routed to the node. Returns the booking's number.
    pub fn book(&mut self, work: Work, stage: Stage, now: Instant) -> u64 {
        let probe = self.breaker.begin(now);
        self.bookings.book(work, stage, probe, now)
    }

    /// The first token of this booking is here. Says how good the prediction was of a prompt that the node computed,
    /// where the request had not to wait for longer than it was computed: else the wait's error would be taken for the
    /// computation's.
    pub fn computed(&mut self, number: u64, now: Instant) {
        let Some(prompt) = self.bookings.computed(number, now) else { return };
        let took_ms = now.saturating_duration_since(prompt.routed).as_secs_f64() * 1e3 - prompt.wait_ms;
        if let Some(model_ms) = prompt.model_ms.filter(|_| prompt.wait_ms <= prompt.prefill_ms) {
            self.factor.observe(model_ms, took_ms);
        }
    }

    /// The node did its part for this booking.
    pub fn succeeded(&mut self, number: u64) {
        self.bookings.judged(number);
        self.breaker.succeeded();
    }

    /// The node failed this booking; true if that opened its breaker.
    pub fn failed(&mut self, number: u64, now: Instant) -> bool {
        let probe = self.bookings.judged(number);
        self.breaker.failed(probe, now)
    }

    /// The booking's request is over here.
    pub fn end(&mut self, number: u64, now: Instant) {
        if self.bookings.end(number, now) {
            self.breaker.unproven();
        }
    }

    /// What it has, as far as its room goes.
    pub fn capacity(&self, view: &NodeView, now: Instant) -> NodeCapacity<'_> {
        let (&NodeView { total_blocks, max_running, .. }, bookings) = (view, &self.bookings);
        let (routed, held, prompts) = (bookings.routed(), bookings.held(), bookings.prompts());
        let backlog_ms = bookings.backlog_ms(now);
        NodeCapacity { total_blocks, max_running, load: &self.load, routed, held, prompts, backlog_ms }
    }

    /// As people are shown it.
    pub fn now(&self, view: &NodeView, indexed_blocks: u32, now: Instant, suspicion: Duration) -> NodeNow {
        let (circuit, silent) = (self.breaker.circuit(now), now.saturating_duration_since(self.heard));
        let state = match circuit {
            _ if view.draining => State::Draining,
            _ if silent > suspicion => State::Suspect,
            Circuit::Open | Circuit::HalfOpen => State::Failing,
            Circuit::Closed => State::Ready,
        };
        NodeNow {
            node: Arc::clone(&self.node),
            load: self.load,
            silent,
            state,
            circuit,
            indexed_blocks,
            backlog_ms: self.bookings.backlog_ms(now),
            step_cost: view.step_cost,
            prefill_factor: self.factor.value(),
            max_step_tokens: view.max_step_tokens,
        }
    }
}
