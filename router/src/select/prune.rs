//! From a thousand nodes to a short list without looking at each pair. Pure. A pair costs what its prefill node costs,
//! what its decode node costs, and what lies between them (the transfer, and a wait for decode that the prefill hides).
//! The first two are computed once for each node; of each role and domain ([`super::ways`]) the best [`SHORT`] stay,
//! and beside them the [`CACHED`] that hold most of the prompt. Pairs are scored exactly, but only of these, and within
//! domains, so that none is without a way. So the cost is linear in nodes.
//!
//! What that can miss: a pair of two nodes that are both beyond the best few by themselves, with a much faster way
//! between them than others of its domain, or with cores of their own where all better ones share theirs. Where ways
//! are equal, no decode node waits and none shares its cores, nothing is missed (tested against all pairs). Of nodes
//! that share their cores only the two of a pair are seen: not the streams of a third one there.
use std::collections::HashSet;

use super::calibrate::Links;
use super::cost::{self, DecodeTerms, LocalTerms, PrefillTerms, StepCost};
use super::policy::{Policy, draw};
use super::ways::Ways;
use super::{LocalPrefill, NodeView, Role, Settings, Terms, Wish};
use crate::capacity::Demand;

/// Nodes of a role that stay for their cost.
pub const SHORT: usize = 8;
/// Those that stay for what they have cached.
pub const CACHED: usize = 4;

/// What was found among the nodes.
pub struct Field<'a> {
    /// All that could take the request, in no order.
    pub plans: Vec<Scored<'a>>,
    /// By role: a node is there that takes work.
    pub available: [bool; 2],
    /// There are two that fit together, and have a way.
    pub compatible: bool,
}

/// A plan with its terms. Names are for later.
pub struct Scored<'a> {
    /// `None`: the decode node computes the prompt.
    pub prefill: Option<&'a NodeView>,
    /// Generates.
    pub decode: &'a NodeView,
    /// Of a pair: the domain by whose way its KV travels.
    pub way: Option<u32>,
    /// In milliseconds.
    pub terms: Terms,
    /// Prompt tokens that are not computed.
    pub cached_tokens: u32,
    /// Blocks that the decode node lacks.
    pub blocks_short: u32,
    /// By how much its prompt takes longer than the step model says: it is in the terms.
    pub factor: f64,
    /// Smaller is better; the policy's.
    pub score: f64,
    /// See [`super::Candidate`]; so for the next two.
    pub shut: bool,
    /// It failed this request before.
    pub avoided: bool,
    /// It has the prompt already.
    pub kept: bool,
}

impl Scored<'_> {
    /// What comes before the score.
    pub fn ranks(&self) -> (bool, bool, bool) {
        (self.shut, self.avoided, !self.kept)
    }

    /// Requests on its nodes.
    pub fn requests(&self) -> f64 {
        self.prefill.map_or(0.0, NodeView::requests) + self.decode.requests()
    }
}

/// A node on the short list.
#[derive(Clone, Copy)]
struct Side<'a, T> {
    node: &'a NodeView,
    terms: T,
    /// For the short list and, with a baseline, for the pair.
    score: f64,
    shut: bool,
    avoided: bool,
    kept: bool,
}

impl<'a, T> Side<'a, T> {
    /// The same node with other terms.
    fn with<U>(&self, terms: U, score: f64) -> Side<'a, U> {
        Side { node: self.node, terms, score, shut: self.shut, avoided: self.avoided, kept: self.kept }
    }

    fn worse_than(&self, other: &Self) -> bool {
        let key = |side: &Self| (side.shut, side.avoided, !side.kept);
        key(self).cmp(&key(other)).then(self.score.total_cmp(&other.score)).is_gt()
    }
}

/// The best so many by rank and score, best first; and those with the most cached, where that is not the same.
struct Best<'a, T> {
    best: Vec<Side<'a, T>>,
    limit: usize,
    cached: Vec<Side<'a, T>>,
}

impl<'a, T: Copy> Best<'a, T> {
    fn of(limit: usize) -> Self {
        Self { best: Vec::new(), limit, cached: Vec::new() }
    }

    fn offer(&mut self, side: Side<'a, T>) {
        if side.node.cached_blocks_of_prompt > 0 {
            let fewer =
                |a: &Side<'a, T>, b: &Side<'a, T>| a.node.cached_blocks_of_prompt < b.node.cached_blocks_of_prompt;
            insert(&mut self.cached, side, CACHED, fewer);
        }
        insert(&mut self.best, side, self.limit, |a, b| a.worse_than(b));
    }

    /// All that stayed, some twice.
    fn some(&self) -> impl Iterator<Item = &'a NodeView> {
        self.best.iter().chain(&self.cached).map(|side| side.node)
    }

    /// All that stayed, each once.
    fn all(&self) -> impl Iterator<Item = &Side<'a, T>> + Clone {
        let more =
            self.cached.iter().filter(|side| self.best.iter().all(|best| best.node.session != side.node.session));
        self.best.iter().chain(more)
    }
}

/// Keeps `list` sorted and within `limit`; of equal ones the first stays.
fn insert<T>(list: &mut Vec<T>, item: T, limit: usize, worse: impl Fn(&T, &T) -> bool) {
    if list.len() == limit && list.last().is_some_and(|last| !worse(last, &item)) {
        return;
    }
    let place = list.partition_point(|other| !worse(other, &item));
    list.insert(place, item);
    list.truncate(limit);
}

/// Nodes of one domain: those of both roles pair with each other.
struct Group<'a> {
    prefills: Best<'a, PrefillTerms>,
    decodes: Best<'a, DecodeTerms>,
    /// By role: it has nodes that take work.
    has: [bool; 2],
}

impl Group<'_> {
    fn of(limit: usize) -> Self {
        Self { prefills: Best::of(limit), decodes: Best::of(limit), has: [false; 2] }
    }

    fn pairs(&self) -> usize {
        self.prefills.all().count() * self.decodes.all().count()
    }
}

/// The request, and everything by which its plans are scored.
pub struct Scorer<'a> {
    /// What is needed.
    pub demand: &'a Demand,
    /// What an earlier attempt asks for.
    pub wish: &'a Wish,
    /// The operator's.
    pub settings: &'a Settings,
    /// How fast KV moves between nodes.
    pub links: &'a Links,
    /// By which ways.
    pub ways: &'a Ways,
    /// Counts requests.
    pub turn: u64,
    /// Of nodes that have measured no step, by role.
    pub unmeasured: [StepCost; 2],
    /// How the prefill nodes' steps cost in the mean: so a prompt is predicted on a decode node that has not computed
    /// one. Its own steps of single tokens say nothing of what a prompt costs.
    pub prompts: Option<StepCost>,
}

impl<'a> Scorer<'a> {
    /// The plans worth a look.
    pub fn field(&self, nodes: &'a [NodeView]) -> Field<'a> {
        let limit = SHORT + self.wish.avoid.nodes.len() + self.wish.avoid.pairs.len();
        let mut groups: Vec<Group<'a>> = Vec::new();
        let (mut locals, mut available) = (Best::of(limit), [false; 2]);
        let places = self.places(nodes);
        for role in [Role::Prefill, Role::Decode] {
            let of_role = |node: &&NodeView| node.role == role && self.takes(node);
            let nodes = in_turn(nodes, self.settings.policy, self.turn).filter(of_role);
            for (place, node) in nodes.enumerate() {
                available[role as usize] = true;
                for number in node.domains.iter().map(|number| *number as usize) {
                    if groups.len() <= number {
                        groups.resize_with(number + 1, || Group::of(limit));
                    }
                    groups[number].has[role as usize] = true;
                }
                if self.fits(node) {
                    self.offer(node, (place, places[role as usize]), &mut groups, &mut locals);
                }
            }
        }
        let pairs: usize = groups.iter().map(Group::pairs).sum();
        let mut plans = Vec::with_capacity(pairs + locals.all().count());
        if self.settings.local != LocalPrefill::Always {
            self.pairs(&groups, &mut plans);
        }
        plans.extend(locals.all().map(|side| self.local_plan(side)));
        Field { plans, available, compatible: groups.iter().any(|group| group.has == [true; 2]) }
    }

    /// Puts the node on the short lists of its domains, and on that of those who may compute prompts themselves. Decode
    /// nodes come behind all prefill nodes, whose best then says how long a wait is hidden.
    fn offer(
        &self,
        node: &'a NodeView,
        place: (usize, usize),
        groups: &mut [Group<'a>],
        locals: &mut Best<'a, (DecodeTerms, LocalTerms)>,
    ) {
        let domains = || node.domains.iter().map(|number| *number as usize);
        match node.role {
            Role::Prefill => {
                let side = self.prefill(node, place);
                domains().for_each(|number| groups[number].prefills.offer(side));
            }
            Role::Decode => {
                let terms = cost::decode(node, self.cost(node), self.demand);
                for number in domains() {
                    let group = &mut groups[number];
                    let hidden_ms = group.prefills.best.first().map_or(0.0, |best| best.terms.first_ms());
                    group.decodes.offer(self.decode(node, terms, place, hidden_ms));
                }
                if self.settings.local != LocalPrefill::Never {
                    let side = self.decode(node, terms, place, 0.0);
                    locals.offer(self.local(side, domains().flat_map(|number| groups[number].prefills.some())));
                }
            }
        }
    }

    /// Nodes by role, for those who take turns.
    fn places(&self, nodes: &[NodeView]) -> [usize; 2] {
        if self.settings.policy == Policy::Joint {
            return [0; 2];
        }
        [Role::Prefill, Role::Decode]
            .map(|role| nodes.iter().filter(|node| node.role == role && self.takes(node)).count())
    }

    fn takes(&self, node: &NodeView) -> bool {
        !node.draining || self.wish.keep == Some(node.session)
    }

    fn fits(&self, node: &NodeView) -> bool {
        let demand = self.demand;
        let tokens = match node.role {
            Role::Prefill => demand.prompt_tokens,
            Role::Decode => demand.most_tokens(),
        };
        // An answer that outgrows the node's memory ends there.
        demand.prompt_blocks(node.block_tokens) <= node.total_blocks && tokens <= node.max_context_tokens
    }

    /// How steps cost there; what the others of its role do, where it has measured nothing.
    fn cost(&self, node: &'a NodeView) -> &StepCost {
        if node.step_cost.is_measured() { &node.step_cost } else { &self.unmeasured[node.role as usize] }
    }

    fn side<T>(&self, node: &'a NodeView, terms: T, score: f64) -> Side<'a, T> {
        let kept = self.wish.keep == Some(node.session);
        let avoided = self.wish.avoid.nodes.contains(&node.session);
        Side { node, terms, score, shut: node.shut && !kept, avoided, kept }
    }

    fn prefill(&self, node: &'a NodeView, place: (usize, usize)) -> Side<'a, PrefillTerms> {
        let kept = self.wish.keep == Some(node.session);
        let terms = if kept { PrefillTerms::KEPT } else { cost::prefill(node, self.cost(node), self.demand) };
        let score = self.settings.policy.score(node, self.demand.prompt_blocks(node.block_tokens), place, self.turn);
        self.side(node, terms, score.unwrap_or(terms.first_ms()))
    }

    /// A wait up to `hidden_ms` passes beside the prefill of any pair.
    fn decode(
        &self,
        node: &'a NodeView,
        terms: DecodeTerms,
        place: (usize, usize),
        hidden_ms: f64,
    ) -> Side<'a, DecodeTerms> {
        let cost_ms = (terms.wait_ms - hidden_ms).max(0.0) + self.settings.step_weight() * terms.step_ms;
        let score = self.settings.policy.score(node, self.demand.usual_blocks(node.block_tokens), place, self.turn);
        self.side(node, terms, score.unwrap_or(cost_ms))
    }

    /// A prompt costs the same on either node of a pair that shares its cores. The prefill node knows better what that
    /// is: the other one's own measurements are of single tokens, and of prompts that both computed at a time. What its
    /// streams take beside the prompt is its own.
    fn local(
        &self,
        side: Side<'a, DecodeTerms>,
        prefills: impl Iterator<Item = &'a NodeView>,
    ) -> Side<'a, (DecodeTerms, LocalTerms)> {
        let beside = prefills.filter(|prefill| prefill.contends_with(side.node));
        let like = beside.max_by(|a, b| a.backlog_ms.total_cmp(&b.backlog_ms)).unwrap_or(side.node);
        let of_others = self.prompts.as_ref().filter(|_| !like.computes_prompts);
        let cost = of_others.unwrap_or_else(|| self.cost(like)).beside(self.cost(side.node));
        let local = cost::local(side.node, like, &cost, self.demand);
        let score = match self.settings.policy {
            Policy::Joint => self.local_terms(side.node, &side.terms, &local).total_ms(self.settings),
            _ => side.score,
        };
        side.with((side.terms, local), score)
    }

    fn local_terms(&self, node: &NodeView, decode: &DecodeTerms, local: &LocalTerms) -> Terms {
        let interference_ms = cost::interference_ms(node, self.demand, local.delay_ms, self.settings.step_weight());
        Terms {
            wait_prefill_ms: 0.0,
            prefill_ms: local.prefill_ms,
            exposed_ms: 0.0,
            wait_decode_ms: decode.wait_ms,
            step_ms: decode.step_ms,
            interference_ms: interference_ms + local.prompts_ms,
        }
    }

    fn local_plan(&self, side: &Side<'a, (DecodeTerms, LocalTerms)>) -> Scored<'a> {
        let (decode, local) = &side.terms;
        Scored {
            prefill: None,
            decode: side.node,
            way: None,
            terms: self.local_terms(side.node, decode, local),
            cached_tokens: local.cached_tokens,
            blocks_short: decode.short_blocks,
            factor: local.factor,
            score: side.score,
            shut: side.shut,
            avoided: side.avoided,
            kept: false,
        }
    }

    /// Each pair once, by the best of its ways, in however many domains the two are.
    fn pairs(&self, groups: &[Group<'a>], plans: &mut Vec<Scored<'a>>) {
        let several = groups.iter().filter(|group| group.has == [true; 2]).nth(1).is_some();
        let mut seen = HashSet::new();
        for group in groups {
            for prefill in group.prefills.all() {
                for decode in group.decodes.all() {
                    if !several || seen.insert((prefill.node.session, decode.node.session)) {
                        let way = self.ways.between(prefill.node, decode.node);
                        plans.extend(way.map(|way| self.pair(prefill, decode, way)));
                    }
                }
            }
        }
    }

    fn pair(&self, prefill: &Side<'a, PrefillTerms>, decode: &Side<'a, DecodeTerms>, way: u32) -> Scored<'a> {
        let pair = (prefill.node.session, decode.node.session);
        let transfer_ms = self.links.transfer_ms(pair, way, decode.terms.missing_blocks);
        let step_ms = decode.terms.step_ms;
        let contention = cost::contention(prefill.node, prefill.terms.prefill_ms, decode.node, step_ms, self.demand);
        let prefill_ms = prefill.terms.prefill_ms + contention.prefill_ms;
        let terms = Terms {
            wait_prefill_ms: prefill.terms.wait_ms,
            prefill_ms,
            exposed_ms: (transfer_ms - prefill_ms).max(0.0),
            wait_decode_ms: (decode.terms.wait_ms - prefill.terms.wait_ms - prefill_ms).max(0.0),
            step_ms,
            interference_ms: cost::interference_ms(
                decode.node,
                self.demand,
                contention.delay_ms,
                self.settings.step_weight(),
            ) + contention.prompts_ms,
        };
        let score = match self.settings.policy {
            Policy::Joint => terms.total_ms(self.settings),
            _ => prefill.score + decode.score,
        };
        Scored {
            prefill: Some(prefill.node),
            decode: decode.node,
            way: Some(way),
            terms,
            cached_tokens: prefill.terms.cached_tokens,
            blocks_short: decode.terms.short_blocks,
            factor: prefill.node.prefill_factor,
            score,
            shut: prefill.shut || decode.shut,
            avoided: prefill.avoided || decode.avoided || self.wish.avoid.pairs.contains(&pair),
            kept: prefill.kept,
        }
    }
}

/// From a place that differs from request to request: of equal ones the first stay on the list.
fn in_turn(nodes: &[NodeView], policy: Policy, turn: u64) -> impl Iterator<Item = &NodeView> {
    let start = match policy {
        Policy::Joint if !nodes.is_empty() => (draw(turn, 0) % nodes.len() as u64) as usize,
        // These take turns by themselves.
        _ => 0,
    };
    nodes[start..].iter().chain(&nodes[..start])
}
