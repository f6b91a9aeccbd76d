//! One node of the table: what it reported, what was routed to it since, and what of that the choice of nodes sees.
//! Time is an argument. The view itself lies beside the others in one row, see [`super::table`]; this file alone writes
//! its loads.
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::v1;

use super::Node;
use super::breaker::{Breaker, Circuit};
use super::now::{NodeNow, State};
use super::room::Occupied;
use crate::select::backlog::Backlog;
use crate::select::calibrate::Factor;
use crate::select::coming::{Awaited, Coming};
use crate::select::cost::{self, StepCost};
use crate::select::processor::Processor;
use crate::select::{Candidate, NodeView, Role, Work};

/// A node, without its view.
#[derive(Debug)]
pub(super) struct Entry {
    pub node: Arc<Node>,
    pub load: v1::Load,
    /// Whether there was a report.
    reported: bool,
    /// Booked, and in no report yet.
    recent: Recent,
    pub heard: Instant,
    pub breaker: Breaker,
    /// Prompts of the routes there are that it has not computed.
    prompts: u32,
    /// The prompts that it has to compute.
    backlog: Backlog,
    /// Requests of the routes there are whose prompts another node has not computed yet.
    awaited: Awaited,
    /// How far predictions of its prompts are off.
    factor: Factor,
}

/// Work booked on a node. It counts until a report of the node that includes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub session: u64,
    /// Among all of the node, see [`Recent`].
    number: u64,
    work: Work,
    /// `None` where the node computes none for this request, or has done so.
    prompt: Option<Prompt>,
    /// Whether the prompt is still being computed elsewhere.
    awaited: bool,
    /// Whether the work is still on the node: until the route is dropped, or the prompt is computed.
    held: bool,
    /// The breaker's one request while it is half-open; until the verdict.
    pub probe: bool,
}

/// What a node has to do with a request's prompt.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// It computes it; `None`: it has it already.
    Computes(Option<Prompt>),
    /// Its KV comes from another node, after so many milliseconds by the prediction.
    Awaits(f64),
}

/// A prompt that a node is to compute, as it was predicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prompt {
    wait_ms: f64,
    prefill_ms: f64,
    /// The same without any factor; `None`: it was a guess.
    model_ms: Option<f64>,
    routed: Instant,
}

impl Prompt {
    /// What `candidate` predicts, unless its node has the prompt already.
    pub fn of(candidate: &Candidate, now: Instant) -> Option<Self> {
        if candidate.kept {
            return None;
        }
        let prefill_ms = candidate.terms.prefill_ms;
        let model_ms = candidate.measured.then_some(prefill_ms / candidate.factor);
        Some(Self { wait_ms: candidate.ttft_ms() - prefill_ms, prefill_ms, model_ms, routed: now })
    }
}

/// Bookings that no report of the node includes, in their order. No more than the router's requests on the node, and
/// what ended there since its last report.
#[derive(Debug, Default)]
struct Recent {
    bookings: VecDeque<Recently>,
    /// Bookings so far.
    last: u64,
}

#[derive(Debug)]
struct Recently {
    number: u64,
    work: Work,
    /// 0 where the node computes no prompt for it.
    prompt_ms: f64,
}

impl Recent {
    fn add(&mut self, work: Work, prompt_ms: f64) -> u64 {
        self.last += 1;
        self.bookings.push_back(Recently { number: self.last, work, prompt_ms });
        self.last
    }

    fn remove(&mut self, number: u64) -> Option<Recently> {
        let at = self.bookings.binary_search_by_key(&number, |booking| booking.number).ok()?;
        self.bookings.remove(at)
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut Recently> {
        let at = self.bookings.binary_search_by_key(&number, |booking| booking.number).ok()?;
        self.bookings.get_mut(at)
    }

    /// All but the youngest are reported. Returns the work of these.
    fn keep_youngest(&mut self, count: usize) -> Work {
        self.bookings.drain(..self.bookings.len().saturating_sub(count));
        self.bookings.iter().fold(Work::default(), |mut sum, booking| {
            sum.add(&booking.work);
            sum
        })
    }

    fn prompts_ms(&self) -> impl Iterator<Item = f64> {
        self.bookings.iter().map(|booking| booking.prompt_ms).filter(|ms| *ms > 0.0)
    }
}

impl Entry {
    pub fn new(node: Arc<Node>, breaker: Breaker, now: Instant) -> Self {
        let load = v1::Load { free_blocks: node.info.total_blocks, ..v1::Load::default() };
        let (backlog, awaited, factor) = (Backlog::new(now), Awaited::new(now), Factor::default());
        let (reported, recent) = (false, Recent::default());
        Self { node, load, reported, recent, heard: now, breaker, prompts: 0, backlog, awaited, factor }
    }

    /// The view of a node that has just registered.
    pub fn view(&self, domains: Arc<[u32]>) -> NodeView {
        let info = &self.node.info;
        NodeView {
            session: self.node.session,
            node_id: info.node_id.as_str().into(),
            role: self.node.role,
            domains,
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
            coming: Coming::default(),
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
        self.backlog.reported(now, self.queued_ms(view));
        let seen = load.own.map_or(view.held.requests, |own| match view.role {
            Role::Prefill => own.prompts,
            Role::Decode => own.requests,
        });
        view.routed = self.recent.keep_youngest(view.held.requests.saturating_sub(seen) as usize);
        self.recent.prompts_ms().for_each(|ms| self.backlog.add(now, ms));
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

    /// Brings up to date what depends on the time, and forgets what the last request's prompt had here.
    pub fn refresh(&self, view: &mut NodeView, now: Instant, suspicion: Duration) {
        view.shut = !self.is_sound(now, suspicion);
        view.backlog_ms = self.backlog.wait_ms(now);
        view.coming = self.awaited.coming(now);
        view.prefill_factor = self.factor.value();
        view.computes_prompts = self.factor.has_seen();
        view.cached_blocks_of_prompt = 0;
    }

    pub fn book(&mut self, view: &mut NodeView, work: Work, part: Part, now: Instant) -> Share {
        view.routed.add(&work);
        view.held.add(&work);
        let (mut prompt, mut awaited) = (None, false);
        match part {
            Part::Computes(None) => {}
            Part::Computes(Some(computes)) => {
                self.prompts += 1;
                self.backlog.add(now, computes.prefill_ms);
                prompt = Some(computes);
            }
            Part::Awaits(ms) => {
                self.awaited.add(now, ms);
                awaited = true;
            }
        }
        let probe = self.breaker.begin(now);
        let number = self.recent.add(work, prompt.map_or(0.0, |prompt| prompt.prefill_ms));
        Share { session: view.session, number, work, prompt, awaited, held: true, probe }
    }

    /// The request's prompt is computed, on another node: it begins here.
    pub fn begins(&mut self, share: &mut Share) {
        if std::mem::take(&mut share.awaited) {
            self.awaited.remove();
        }
    }

    /// The node has done its work for this request, but for what its next report says.
    pub fn release(&mut self, view: &mut NodeView, share: &mut Share) {
        self.begins(share);
        if std::mem::take(&mut share.held) {
            view.held.sub(&share.work);
            self.prompts = self.prompts.saturating_sub(share.prompt.is_some().into());
        }
    }

    /// What it has, as far as its room goes.
    pub fn occupied(&self, view: &NodeView, now: Instant) -> Occupied<'_> {
        let &NodeView { total_blocks, max_running, routed, held, .. } = view;
        let backlog_ms = self.backlog.wait_ms(now);
        Occupied { total_blocks, max_running, load: &self.load, routed, held, prompts: self.prompts, backlog_ms }
    }

    /// Takes a booking back, where no report has replaced it yet.
    pub fn unbook(&mut self, view: &mut NodeView, share: &Share, now: Instant) {
        if self.recent.remove(share.number).is_none() {
            return;
        }
        view.routed.sub(&share.work);
        if let Some(prompt) = &share.prompt {
            self.backlog.take_back(now, prompt.prefill_ms);
        }
    }

    /// The node has computed the prompt of this booking: its first token is here. Says how good the prediction was,
    /// where the request had not to wait for longer than it was computed: else the wait's error would be taken for the
    /// computation's.
    pub fn computed(&mut self, view: &mut NodeView, share: &mut Share, now: Instant) {
        let Some(prompt) = share.prompt.take() else { return };
        if let Some(recent) = self.recent.get_mut(share.number) {
            view.routed.tokens = view.routed.tokens.saturating_sub(share.work.tokens);
            (recent.work.tokens, recent.prompt_ms) = (0, 0.0);
            self.backlog.done(now, prompt.prefill_ms);
        }
        if share.held {
            view.held.tokens = view.held.tokens.saturating_sub(share.work.tokens);
            self.prompts = self.prompts.saturating_sub(1);
        }
        share.work.tokens = 0;
        let took_ms = now.saturating_duration_since(prompt.routed).as_secs_f64() * 1e3 - prompt.wait_ms;
        if let Some(model_ms) = prompt.model_ms.filter(|_| prompt.wait_ms <= prompt.prefill_ms) {
            self.factor.observe(model_ms, took_ms);
        }
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
            backlog_ms: self.backlog.wait_ms(now),
            step_cost: view.step_cost,
            prefill_factor: self.factor.value(),
            max_step_tokens: view.max_step_tokens,
        }
    }
}
