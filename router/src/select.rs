//! Which nodes get a request. Pure: the cluster as values in, the plan and every candidate's terms out. Time, sockets
//! and the node table belong to [`crate::membership`], which calls this under its lock.
//!
//! A plan is a pair, a prefill and a decode node, or *local prefill*: the decode node computes the prompt itself. The
//! joint policy takes the plan with the least predicted cost, over all pairs that fit together and all local ones:
//!
//! `wait for prefill + prefill + exposed transfer + wait for decode + interference +
//! step · (TTFT objective / TPOT objective)`
//!
//! All but the last are milliseconds that a client waits once, for its first or its second token. The step comes again
//! with each token, and its weight is how many milliseconds of TTFT one of TPOT is worth by the operator's objectives:
//! it is the cost `ttft / ttft_objective + tpot / tpot_objective`, in milliseconds of TTFT. Interference is the
//! second part of that for the requests that run there. [`Terms`] says what each term is, [`cost`] how it is predicted,
//! [`calibrate`] what predictions learn, [`backlog`] how a queue is worked off between two reports, [`pending_streams`]
//! which streams begin later, [`processor`] which nodes share cores. Work that was routed after a node's last report
//! counts as if the node had reported it.
//!
//! Before the cost come three ranks, in this order: no node whose circuit breaker is shut; nothing that failed this
//! very request before ([`Avoid`]); the prefill node that has its prompt already. They are ranks and not filters: a
//! node that is perhaps broken is still better than none, so a request is never refused while nodes are there that
//! could take it.
//!
//! Plans within [`Settings::near_optimal`] of the best are as good as equal: [`policy::of_two`] picks among them, among
//! the pairs if there are any whose nodes do not share their cores: a prompt beside a decode node's streams is also in
//! the way of those who come after it; else among the local plans: nothing has to travel. [`prune`] keeps the cost of
//! all this linear in nodes; [`policy`] has the baselines, to which a local plan is a last resort. Only nodes pair that
//! have a way for the KV in common: [`ways`].
pub mod backlog;
pub mod calibrate;
pub mod cost;
pub mod numerics;
pub mod pending_streams;
mod plan;
pub mod policy;
pub mod processor;
pub mod prune;
pub mod ways;

use std::str::FromStr;
use std::sync::Arc;

use crate::capacity::Demand;
use calibrate::Links;
use cost::StepCost;
use numerics::Numerics;
use pending_streams::PendingStreams;
pub use plan::{Candidate, NoPair, PLANS, Plan, Terms};
use policy::{Policy, of_two};
use processor::Processor;
use prune::{Field, Scored, Scorer};
use ways::Ways;

/// Candidates whose terms are told at most.
const MAX_CANDIDATES: usize = 16;
/// Below this difference of costs nothing is predicted, in milliseconds.
const SAME_MS: f64 = 0.01;

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Generates tokens.
    Decode,
}

impl Role {
    /// For messages and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Work on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Requests, running or waiting.
    pub requests: u32,
    /// Prompt tokens that are not computed yet.
    pub tokens: u64,
    /// KV blocks.
    pub blocks: u32,
    /// Positions in the KV of the running batch.
    pub context: u64,
    /// Tokens of the answers at most.
    pub answers: u64,
}

impl Work {
    /// More of it.
    pub fn add(&mut self, other: &Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.tokens = self.tokens.saturating_add(other.tokens);
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.context = self.context.saturating_add(other.context);
        self.answers = self.answers.saturating_add(other.answers);
    }

    /// Less of it.
    pub fn sub(&mut self, other: &Self) {
        self.requests = self.requests.saturating_sub(other.requests);
        self.tokens = self.tokens.saturating_sub(other.tokens);
        self.blocks = self.blocks.saturating_sub(other.blocks);
        self.context = self.context.saturating_sub(other.context);
        self.answers = self.answers.saturating_sub(other.answers);
    }
}

/// One node as the selection sees it. The table keeps these up to date, so that a request copies none of them.
#[derive(Clone, Debug)]
pub struct NodeView {
    /// Key of the node in the table.
    pub session: u64,
    /// For people.
    pub node_id: Arc<str>,
    /// What it does.
    pub role: Role,
    /// Nodes pair within domains, see [`ways`]: numbers of those it is in, the fastest way first.
    pub domains: Arc<[u32]>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks of its arena.
    pub total_blocks: u32,
    /// Blocks free at its last report.
    pub free_blocks: u32,
    /// Longest sequence it takes.
    pub max_context_tokens: u32,
    /// Sequences of one batch.
    pub max_running: u32,
    /// Tokens of one step; 0: it did not say.
    pub max_step_tokens: u32,
    /// Takes no new work.
    pub draining: bool,
    /// Its circuit breaker lets nothing pass now.
    pub shut: bool,
    /// Of the reported requests, those in the running batch.
    pub running: u32,
    /// Requests and tokens of its last report.
    pub reported: Work,
    /// Routed to it since then.
    pub routed: Work,
    /// All that this router has on it, whatever is reported: also requests that wait there for blocks.
    pub held: Work,
    /// Of the requests, those that do not run yet.
    pub pending_streams: PendingStreams,
    /// What it computes on.
    pub processor: Processor,
    /// How long its steps take; all zero before it has measured one.
    pub step_cost: StepCost,
    /// By how much its prompts take longer than that says.
    pub prefill_factor: f64,
    /// It has computed prompts since it is here: its steps with prompts are among those that it has measured.
    pub computes_prompts: bool,
    /// Until it has computed the prompts that it has, milliseconds.
    pub backlog_ms: f64,
    /// Leading blocks of the request's prompt whose KV it has and would not compute again.
    pub cached_blocks_of_prompt: u32,
}

impl NodeView {
    /// Reported and routed since.
    pub fn requests(&self) -> f64 {
        f64::from(self.reported.requests) + f64::from(self.routed.requests)
    }

    /// Positions that its batch will read. Requests that wait for their KV are not in what is reported: they count like
    /// the mean of those that run, or like this request's prompt where none runs.
    pub fn context_tokens(&self, demand: &Demand) -> f64 {
        let waiting = f64::from(self.reported.requests.saturating_sub(self.running));
        let reported = self.reported.context as f64;
        let each = if self.running > 0 { reported / f64::from(self.running) } else { f64::from(demand.prompt_tokens) };
        reported + waiting * each + self.routed.context as f64
    }

    /// Whether a prompt on the one slows the streams of the other.
    pub fn contends_with(&self, other: &Self) -> bool {
        self.processor.contention(&other.processor) > 0.0
    }
}

/// Whether decode nodes may compute prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalPrefill {
    /// Pairs only.
    Never,
    /// No pairs: every decode node computes the prompts of its own requests (aggregated serving).
    Always,
    /// Both kinds of plan.
    Auto,
}

impl FromStr for LocalPrefill {
    type Err = String;

    /// From the flag `--local-prefill`.
    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "never" => Ok(Self::Never),
            "always" => Ok(Self::Always),
            "auto" => Ok(Self::Auto),
            _ => Err("it is `auto`, `never` or `always`".to_owned()),
        }
    }
}

/// What the operator wants of the choice.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What is best.
    pub policy: Policy,
    /// The time to the first token that users call good, milliseconds, above 0.
    pub ttft_objective_ms: f64,
    /// The time per further token that users call good, milliseconds, above 0.
    pub tpot_objective_ms: f64,
    /// Plans that cost at most so much more than the best one, as a share of it, are as good as equal.
    pub near_optimal: f64,
    /// Whether decode nodes may compute prompts.
    pub local: LocalPrefill,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Joint,
            ttft_objective_ms: 1000.0,
            tpot_objective_ms: 100.0,
            near_optimal: 0.1,
            local: LocalPrefill::Never,
        }
    }
}

impl Settings {
    /// Milliseconds of TTFT that one of TPOT is worth.
    pub fn step_weight(&self) -> f64 {
        self.ttft_objective_ms / self.tpot_objective_ms
    }
}

/// The cluster as it is now.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// All nodes.
    pub nodes: &'a [NodeView],
    /// How fast KV moves between them.
    pub links: &'a Links,
    /// By which ways.
    pub ways: &'a Ways,
}

/// What an earlier attempt of the same request asks of the choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The prefill node that computes the prompt already: the best one as long as nothing speaks against the pair.
    pub keep: Option<u64>,
    /// What failed the request.
    pub avoid: Avoid,
    /// How the nodes compute that began the answer: others must not go on with it. `None` while the client has nothing.
    pub continues: Option<Numerics>,
}

/// Nodes and pairs that failed a request, by their keys in the table. Grows by one with each failed attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Avoid {
    /// With any partner.
    pub nodes: Vec<u64>,
    /// (prefill, decode): whose fault it was is not known.
    pub pairs: Vec<(u64, u64)>,
}

/// The best candidates: the choice first, the others behind it, the best first. `turn` counts requests, and is all the
/// chance that there is: the same arguments choose the same. A node that is to be kept is a candidate even if it takes
/// nothing new: the request is no news to it.
///
/// # Errors
/// [`NoPair`], the first reason that holds.
pub fn select(
    cluster: &Cluster<'_>,
    demand: &Demand,
    wish: &Wish,
    settings: &Settings,
    turn: u64,
) -> Result<Vec<Candidate>, NoPair> {
    let unmeasured = unmeasured(cluster.nodes);
    let prompts = match settings.local {
        LocalPrefill::Never => None,
        LocalPrefill::Always | LocalPrefill::Auto => mean(cluster.nodes, Role::Prefill),
    };
    let Cluster { links, ways, .. } = *cluster;
    let scorer = Scorer { demand, wish, settings, links, ways, turn, unmeasured, prompts };
    let Field { mut plans, available, compatible } = scorer.field(cluster.nodes);
    if plans.is_empty() {
        let missing = |role: Role| !available[role as usize];
        return Err(match settings.local {
            LocalPrefill::Never if missing(Role::Prefill) => NoPair::NoNode(Role::Prefill),
            _ if missing(Role::Decode) => NoPair::NoNode(Role::Decode),
            LocalPrefill::Never if !compatible => match cluster.ways.apart().first() {
                Some(apart) => NoPair::NoWay(Arc::clone(&apart.why)),
                None => NoPair::Incompatible,
            },
            _ => {
                let blocks = cluster.nodes.first().map_or(0, |node| demand.prompt_blocks(node.block_tokens));
                NoPair::TooLarge { blocks, tokens: demand.most_tokens() }
            }
        });
    }
    let ranks = |plan: &Scored<'_>| (plan.ranks(), settings.policy != Policy::Joint && plan.prefill.is_none());
    let order = |a: &Scored<'_>, b: &Scored<'_>| ranks(a).cmp(&ranks(b)).then(a.score.total_cmp(&b.score));
    if plans.len() > MAX_CANDIDATES {
        plans.select_nth_unstable_by(MAX_CANDIDATES - 1, order);
        plans.truncate(MAX_CANDIDATES);
    }
    plans.sort_by(order);
    let chosen = near_best(&plans, settings, turn);
    plans[..=chosen].rotate_right(1);
    Ok(plans.iter().map(|plan| candidate(plan, settings, cluster.ways)).collect())
}

/// Of these candidates, the best one first, the one whose first token would come soonest, among those against which no
/// more speaks than against the best. `None` where its node has measured nothing: that is no prediction.
pub fn soonest(candidates: &[Candidate]) -> Option<&Candidate> {
    let best = candidates.first()?;
    let equal = candidates.iter().filter(|candidate| candidate.is_sound() == best.is_sound());
    equal.min_by(|a, b| a.ttft_ms().total_cmp(&b.ttft_ms())).filter(|soonest| soonest.measured)
}

/// Whether the nodes of a plan are there that take new work.
pub fn is_served(nodes: &[NodeView], local: LocalPrefill) -> bool {
    let of = |role| nodes.iter().filter(move |node| node.role == role && !node.draining);
    match local {
        LocalPrefill::Never => {
            let mut domains: Vec<u32> = of(Role::Prefill).flat_map(|node| node.domains.iter().copied()).collect();
            domains.sort_unstable();
            domains.dedup();
            of(Role::Decode).any(|node| node.domains.iter().any(|domain| domains.binary_search(domain).is_ok()))
        }
        LocalPrefill::Always | LocalPrefill::Auto => of(Role::Decode).next().is_some(),
    }
}

/// Which of the sorted `plans` is taken: the best one, or one that is as good as equal. Baselines take the best.
fn near_best(plans: &[Scored<'_>], settings: &Settings, turn: u64) -> usize {
    if settings.policy != Policy::Joint {
        return 0;
    }
    let best = &plans[0];
    let enough = best.score * (1.0 + settings.near_optimal) + SAME_MS;
    let near = |plan: &&Scored<'_>| plan.ranks() == best.ranks() && plan.score <= enough;
    // The best one is among them, also where its score is no number.
    let near = plans.iter().take_while(near).count().max(1);
    let kind = |plan: &Scored<'_>| match plan.prefill {
        Some(prefill) if !prefill.contends_with(plan.decode) => 0,
        None => 1,
        Some(_) => 2,
    };
    let first = plans[..near].iter().map(kind).min();
    let equal: Vec<usize> = (0..near).filter(|index| Some(kind(&plans[*index])) == first).collect();
    equal[of_two(equal.len(), turn, |index| plans[equal[index]].requests())]
}

/// By role, what steps cost where nothing is measured: the mean of the role's other nodes, or of the other role's.
fn unmeasured(nodes: &[NodeView]) -> [StepCost; 2] {
    if nodes.iter().all(|node| node.step_cost.is_measured()) {
        return [cost::UNMEASURED; 2];
    }
    let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| mean(nodes, role));
    [prefill.or(decode), decode.or(prefill)].map(|cost| cost.unwrap_or(cost::UNMEASURED))
}

/// Of the nodes of `role` that have measured their steps.
fn mean(nodes: &[NodeView], role: Role) -> Option<StepCost> {
    let of_role = nodes.iter().filter(|node| node.role == role).map(|node| &node.step_cost);
    StepCost::mean(of_role.filter(|cost| cost.is_measured()))
}

/// As it is told of.
fn candidate(plan: &Scored<'_>, settings: &Settings, ways: &Ways) -> Candidate {
    let way = plan.prefill.zip(plan.way);
    Candidate {
        way: way.and_then(|(prefill, way)| ways.describe(prefill, plan.decode, way)),
        prefill: plan.prefill.map(|node| node.session),
        decode: plan.decode.session,
        prefill_id: plan.prefill.map(|node| Arc::clone(&node.node_id)),
        decode_id: Arc::clone(&plan.decode.node_id),
        terms: plan.terms,
        total_ms: plan.terms.total_ms(settings),
        cached_tokens: plan.cached_tokens,
        blocks_short: plan.blocks_short,
        measured: plan.prefill.unwrap_or(plan.decode).step_cost.is_measured(),
        factor: plan.factor,
        shut: plan.shut,
        avoided: plan.avoided,
        kept: plan.kept,
    }
}

#[cfg(test)]
mod tests;
