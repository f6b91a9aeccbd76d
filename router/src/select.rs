//! Which nodes get a request. Pure: the cluster as values in, one plan and every candidate's terms out. Time, sockets and
//! the node table belong to [`crate::membership`], which calls this under its lock.
//!
//! A plan is a pair (a prefill node computes the prompt and hands its KV to a decode node), or local: one decode node
//! computes the prompt, too. [`LocalPrefill`] says which kinds there may be.
//!
//! The score of a plan is the sum of two loads, each in "batches ahead": how much work stands before this request on
//! the prefill node and on the decode node. Work that was routed after a node's last report is counted as if the node
//! had reported it, so that a burst between two reports spreads.
//!
//! Before the score come three ranks, in this order: no node whose circuit breaker is shut; nothing that failed this very
//! request before ([`Avoid`]); the prefill node that has its prompt already. They are ranks and not filters: a node that is
//! perhaps broken is still better than none, so a request is never refused while the nodes of a plan are there. Between
//! the kinds, a pair comes before a local plan of the same ranks.
use std::str::FromStr;

/// Tokens that count as one batch ahead on a prefill node: a usual step budget of chunked prefill.
const BATCH_TOKENS: f64 = 512.0;
/// Added when a decode node has no room now: the request would wait for another one to end.
const NO_ROOM: f64 = 1.0;
/// Candidates whose terms are told at most.
const MAX_CANDIDATES: usize = 16;

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

/// The kind of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plan {
    /// A prefill node computes the prompt, a decode node takes over.
    Pair,
    /// The decode node computes the prompt, too.
    Local,
}

impl Plan {
    /// For labels and spans.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::Local => "local",
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
}

/// One node as the selection sees it.
#[derive(Clone, Debug)]
pub struct NodeView {
    /// Key of the node in the table.
    pub session: u64,
    /// For people, and for a stable order.
    pub node_id: String,
    /// What it does.
    pub role: Role,
    /// Nodes with different digests never pair.
    pub compatibility_digest: u64,
    /// Transport backend and build: both ends must have the same.
    pub transport: (String, String),
    /// Blocks of its arena.
    pub total_blocks: u32,
    /// Blocks free at its last report.
    pub free_blocks: u32,
    /// Longest sequence it takes.
    pub max_context_tokens: u32,
    /// Sequences of one batch.
    pub max_running: u32,
    /// Takes no new work.
    pub draining: bool,
    /// Its circuit breaker lets nothing pass now.
    pub shut: bool,
    /// Requests and tokens of its last report.
    pub reported: Work,
    /// Routed to it since then.
    pub routed: Work,
}

/// What a request needs.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt and all tokens that may be generated.
    pub total_tokens: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Need {
    /// Blocks of the prompt: what the prefill node holds.
    pub fn prompt_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.block_tokens)
    }

    /// Blocks of the longest answer: what the decode node reserves.
    pub fn total_blocks(&self) -> u32 {
        self.total_tokens.div_ceil(self.block_tokens)
    }
}

/// What an earlier attempt of the same request asks of the choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The prefill node that computes the prompt already: the best one as long as nothing speaks against the pair.
    pub keep: Option<u64>,
    /// What failed the request.
    pub avoid: Avoid,
}

/// Nodes and pairs that failed a request, by their keys in the table. Grows by one with each failed attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Avoid {
    /// With any partner.
    pub nodes: Vec<u64>,
    /// (prefill, decode): whose fault it was is not known.
    pub pairs: Vec<(u64, u64)>,
}

impl Avoid {
    fn names(&self, prefill: Option<u64>, decode: u64) -> bool {
        let is_part = |node: &u64| decode == *node || prefill == Some(*node);
        self.nodes.iter().any(is_part) || prefill.is_some_and(|prefill| self.pairs.contains(&(prefill, decode)))
    }
}

/// Nodes that could take the request, and why they are as good as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Table key of the prefill node; `None` in a local plan.
    pub prefill: Option<u64>,
    /// Table key of the decode node.
    pub decode: u64,
    /// Name of the prefill node; `None` in a local plan.
    pub prefill_id: Option<String>,
    /// Name of the decode node.
    pub decode_id: String,
    /// Batches ahead on the node that computes the prompt.
    pub prefill_load: f64,
    /// Share of the decode node's batch that is taken.
    pub decode_load: f64,
    /// Blocks that the decode node lacks now.
    pub blocks_short: u32,
    /// The circuit breaker of one of its nodes is shut.
    pub shut: bool,
    /// It failed this request before.
    pub avoided: bool,
    /// It has the prompt already.
    pub kept: bool,
}

impl Candidate {
    /// Its kind.
    pub fn plan(&self) -> Plan {
        if self.prefill.is_some() { Plan::Pair } else { Plan::Local }
    }

    /// Whether nothing but load speaks against it.
    pub fn is_sound(&self) -> bool {
        !self.shut && !self.avoided
    }

    /// Smaller is better.
    pub fn score(&self) -> f64 {
        self.prefill_load + self.decode_load + if self.blocks_short > 0 { NO_ROOM } else { 0.0 }
    }
}

/// Why nothing was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPair {
    /// No node of this role is there, or all of them are draining.
    #[error("no {} node is available", .0.as_str())]
    NoNode(Role),
    /// There are nodes of both roles, but none that fit together.
    #[error("no prefill and decode node with the same compatibility digest and transport build are available")]
    Incompatible,
    /// No plan's nodes could ever hold the request.
    #[error("the request needs {blocks} KV blocks ({tokens} tokens); no available node or pair of nodes can hold them")]
    TooLarge {
        /// Blocks needed.
        blocks: u32,
        /// Tokens needed.
        tokens: u32,
    },
}

/// The candidates, best first: the first one is the choice. Equal ones are taken in turn. The node that is to be kept is a
/// candidate even if it takes nothing new: the request is no news to it.
///
/// # Errors
/// [`NoPair`], the first reason that holds.
pub fn select(
    nodes: &[NodeView],
    need: &Need,
    wish: &Wish,
    local: LocalPrefill,
    turn: usize,
) -> Result<Vec<Candidate>, NoPair> {
    let mut candidates = candidates(nodes, need, wish, local)?;
    candidates.sort_by(|a, b| (&a.prefill_id, &a.decode_id).cmp(&(&b.prefill_id, &b.decode_id)));
    let start = turn % candidates.len();
    candidates.rotate_left(start);
    let ranks = |of: &Candidate| (of.shut, of.avoided, !of.kept, of.plan() == Plan::Local);
    candidates.sort_by(|a, b| ranks(a).cmp(&ranks(b)).then(a.score().total_cmp(&b.score())));
    candidates.truncate(MAX_CANDIDATES);
    Ok(candidates)
}

/// All plans whose nodes could hold the request; at least one.
fn candidates(nodes: &[NodeView], need: &Need, wish: &Wish, local: LocalPrefill) -> Result<Vec<Candidate>, NoPair> {
    let available = |role| {
        let takes = |node: &&NodeView| node.role == role && (!node.draining || wish.keep == Some(node.session));
        nodes.iter().filter(takes).collect::<Vec<_>>()
    };
    let (prefills, decodes) = (available(Role::Prefill), available(Role::Decode));
    if prefills.is_empty() && local == LocalPrefill::Never {
        return Err(NoPair::NoNode(Role::Prefill));
    }
    if decodes.is_empty() {
        return Err(NoPair::NoNode(Role::Decode));
    }
    let pairs =
        || prefills.iter().flat_map(|p| decodes.iter().map(move |d| (*p, *d))).filter(|(p, d)| compatible(p, d));
    if local == LocalPrefill::Never && pairs().next().is_none() {
        return Err(NoPair::Incompatible);
    }
    let mut candidates = Vec::new();
    if local != LocalPrefill::Always {
        candidates.extend(pairs().filter(|(p, d)| fits(p, d, need)).map(|(p, d)| candidate(Some(p), d, need, wish)));
    }
    if local != LocalPrefill::Never {
        let alone = decodes.iter().filter(|decode| fits_whole(decode, need));
        candidates.extend(alone.map(|decode| candidate(None, decode, need, wish)));
    }
    if candidates.is_empty() {
        return Err(NoPair::TooLarge { blocks: need.total_blocks(), tokens: need.total_tokens });
    }
    Ok(candidates)
}

/// Whether the nodes of a plan are there that take new work.
pub fn is_served(nodes: &[NodeView], local: LocalPrefill) -> bool {
    let of = |role| nodes.iter().filter(move |node| node.role == role && !node.draining);
    match local {
        LocalPrefill::Never => of(Role::Prefill).any(|prefill| of(Role::Decode).any(|d| compatible(prefill, d))),
        LocalPrefill::Always | LocalPrefill::Auto => of(Role::Decode).next().is_some(),
    }
}

/// Whether these two may hand a request over.
pub fn compatible(prefill: &NodeView, decode: &NodeView) -> bool {
    prefill.compatibility_digest == decode.compatibility_digest && prefill.transport == decode.transport
}

fn fits(prefill: &NodeView, decode: &NodeView, need: &Need) -> bool {
    need.prompt_blocks() <= prefill.total_blocks
        && need.prompt_tokens <= prefill.max_context_tokens
        && fits_whole(decode, need)
}

fn fits_whole(decode: &NodeView, need: &Need) -> bool {
    need.total_blocks() <= decode.total_blocks && need.total_tokens <= decode.max_context_tokens
}

/// Without a prefill node it is local.
fn candidate(prefill: Option<&NodeView>, decode: &NodeView, need: &Need, wish: &Wish) -> Candidate {
    let key = prefill.map(|prefill| prefill.session);
    let kept = key.is_some() && wish.keep == key;
    let computes = prefill.unwrap_or(decode);
    let tokens_ahead = computes.reported.tokens.saturating_add(computes.routed.tokens);
    // A decode node's requests count once, below.
    let requests_ahead = prefill.map_or(0.0, |node| requests(node) / f64::from(node.max_running.max(1)));
    let free = decode.free_blocks.saturating_sub(decode.routed.blocks);
    Candidate {
        prefill: key,
        decode: decode.session,
        prefill_id: prefill.map(|prefill| prefill.node_id.clone()),
        decode_id: decode.node_id.clone(),
        prefill_load: tokens_ahead as f64 / BATCH_TOKENS + requests_ahead,
        decode_load: requests(decode) / f64::from(decode.max_running.max(1)),
        blocks_short: need.total_blocks().saturating_sub(free),
        shut: prefill.is_some_and(|prefill| prefill.shut && !kept) || decode.shut,
        avoided: wish.avoid.names(key, decode.session),
        kept,
    }
}

fn requests(node: &NodeView) -> f64 {
    f64::from(node.reported.requests) + f64::from(node.routed.requests)
}

#[cfg(test)]
mod tests {
    use super::LocalPrefill::{Always, Auto, Never};
    use super::*;

    const NEED: Need = Need { prompt_tokens: 100, total_tokens: 200, block_tokens: 16 };

    fn node(session: u64, role: Role) -> NodeView {
        NodeView {
            session,
            node_id: format!("{}{session}", role.as_str()),
            role,
            compatibility_digest: 7,
            transport: ("mem".into(), "1".into()),
            total_blocks: 64,
            free_blocks: 64,
            max_context_tokens: 8192,
            max_running: 8,
            draining: false,
            shut: false,
            reported: Work::default(),
            routed: Work::default(),
        }
    }

    fn cluster() -> Vec<NodeView> {
        vec![node(1, Role::Prefill), node(2, Role::Prefill), node(3, Role::Decode), node(4, Role::Decode)]
    }

    fn chosen(nodes: &[NodeView]) -> (u64, u64) {
        let best = &select(nodes, &NEED, &Wish::default(), Never, 0).unwrap()[0];
        (best.prefill.unwrap(), best.decode)
    }

    #[test]
    fn takes_the_least_loaded_of_each_role() {
        let mut nodes = cluster();
        nodes[0].reported.tokens = 4_000;
        nodes[3].reported.requests = 3;
        assert_eq!(chosen(&nodes), (2, 3));
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Never, 0).unwrap().len(), 4);
    }

    #[test]
    fn work_routed_since_the_report_counts() {
        let mut nodes = cluster();
        nodes[0].routed.tokens = 100;
        nodes[2].routed.requests = 1;
        assert_eq!(chosen(&nodes), (2, 4));
    }

    #[test]
    fn prefers_a_decode_node_with_room() {
        let mut nodes = cluster();
        nodes[2].free_blocks = 14;
        nodes[2].routed.blocks = 2;
        nodes[3].reported.requests = 7;
        assert_eq!(chosen(&nodes), (1, 4));
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Never, 0).unwrap()[3].blocks_short, 1);
    }

    #[test]
    fn equal_pairs_take_turns() {
        let nodes = cluster();
        let pairs: std::collections::HashSet<_> = (0..4)
            .map(|turn| {
                let best = &select(&nodes, &NEED, &Wish::default(), Never, turn).unwrap()[0];
                (best.prefill.unwrap(), best.decode)
            })
            .collect();
        assert_eq!(pairs.len(), 4);
    }

    #[test]
    fn never_pairs_what_does_not_fit_together() {
        let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
        nodes[0].compatibility_digest = 8;
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Never, 0), Err(NoPair::Incompatible));
        nodes[0].compatibility_digest = 7;
        nodes[0].transport.1 = "2".into();
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Never, 0), Err(NoPair::Incompatible));
    }

    fn wished(nodes: &[NodeView], wish: Wish) -> (u64, u64) {
        let best = &select(nodes, &NEED, &wish, Never, 0).unwrap()[0];
        (best.prefill.unwrap(), best.decode)
    }

    #[test]
    fn a_shut_node_is_the_last_resort() {
        let mut nodes = cluster();
        nodes[0].shut = true;
        nodes[1].reported.tokens = 1_000_000;
        assert_eq!(chosen(&nodes).0, 2);
        nodes[1].shut = true;
        assert_eq!(chosen(&nodes).0, 1, "no pair without one: load decides");
    }

    #[test]
    fn what_failed_the_request_is_avoided_where_it_can_be() {
        let nodes = cluster();
        let nothing_but = |nodes, pairs| Wish { keep: None, avoid: Avoid { nodes, pairs } };
        assert_eq!(wished(&nodes, nothing_but(vec![1, 3], vec![])), (2, 4));
        assert_eq!(wished(&nodes, nothing_but(vec![], vec![(1, 3), (1, 4), (2, 3)])), (2, 4));
        let mut shut = cluster();
        shut[3].shut = true;
        assert_eq!(wished(&shut, nothing_but(vec![3], vec![])).1, 3, "a shut breaker is the worse sign");
        assert!(!select(&nodes[1..3], &NEED, &nothing_but(vec![3], vec![]), Never, 0).unwrap()[0].is_sound());
    }

    #[test]
    fn the_prompt_stays_where_it_is_unless_that_failed() {
        let mut nodes = cluster();
        nodes[0].reported.tokens = 1_000_000;
        (nodes[0].draining, nodes[0].shut) = (true, true);
        let keep = |avoid| Wish { keep: Some(1), avoid };
        assert_eq!(wished(&nodes, keep(Avoid::default())).0, 1);
        assert_eq!(wished(&nodes, keep(Avoid { nodes: vec![], pairs: vec![(1, 3)] })), (1, 4));
        nodes.pop();
        assert_eq!(wished(&nodes, keep(Avoid { nodes: vec![], pairs: vec![(1, 3)] })), (2, 3));
    }

    #[test]
    fn says_which_role_is_missing() {
        let mut nodes = cluster();
        nodes[2].draining = true;
        nodes[3].draining = true;
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Never, 0), Err(NoPair::NoNode(Role::Decode)));
        assert_eq!(select(&[], &NEED, &Wish::default(), Never, 0), Err(NoPair::NoNode(Role::Prefill)));
    }

    #[test]
    fn a_request_that_fits_nowhere_is_told_so() {
        let need = Need { total_tokens: 65 * 16, ..NEED };
        let refusal = select(&cluster(), &need, &Wish::default(), Never, 0).unwrap_err();
        assert_eq!(refusal, NoPair::TooLarge { blocks: 65, tokens: 1040 });
        assert!(refusal.to_string().contains("65 KV blocks"));
    }

    fn plans(nodes: &[NodeView], wish: &Wish, local: LocalPrefill) -> Vec<(Option<u64>, u64)> {
        let candidates = select(nodes, &NEED, wish, local, 0).unwrap();
        candidates.iter().map(|candidate| (candidate.prefill, candidate.decode)).collect()
    }

    #[test]
    fn aggregated_takes_the_least_loaded_decode_node() {
        let mut nodes = cluster();
        nodes[2].routed.tokens = 100;
        assert_eq!(plans(&nodes, &Wish::default(), Always), [(None, 4), (None, 3)]);
        nodes[3].reported.requests = 7;
        assert_eq!(plans(&nodes[2..], &Wish::default(), Always), [(None, 3), (None, 4)]);
        assert_eq!(select(&nodes[..2], &NEED, &Wish::default(), Always, 0), Err(NoPair::NoNode(Role::Decode)));
        let avoid = Avoid { nodes: vec![3], pairs: vec![] };
        assert_eq!(plans(&nodes, &Wish { keep: None, avoid }, Always)[0], (None, 4));
    }

    #[test]
    fn auto_prefers_a_pair_and_goes_local_where_there_is_no_sound_one() {
        let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
        nodes[0].reported.tokens = 1_000_000;
        let (pair, local) = ((Some(1), 3), (None, 3));
        assert_eq!(plans(&nodes, &Wish::default(), Auto), [pair, local]);
        let avoid = |nodes, pairs| Wish { keep: None, avoid: Avoid { nodes, pairs } };
        assert_eq!(plans(&nodes, &avoid(vec![1], vec![]), Auto), [local, pair]);
        assert_eq!(
            plans(&nodes, &avoid(vec![], vec![(1, 3)]), Auto),
            [local, pair],
            "a pair's fault is not the node's"
        );
        assert_eq!(plans(&nodes, &avoid(vec![3], vec![]), Auto), [pair, local]);
        nodes[0].shut = true;
        assert_eq!(plans(&nodes, &Wish::default(), Auto), [local, pair]);
        nodes[0].draining = true;
        assert_eq!(plans(&nodes, &Wish::default(), Auto), [local]);
        assert_eq!(plans(&nodes, &Wish { keep: Some(1), ..Wish::default() }, Auto), [pair, local]);
        (nodes[0].draining, nodes[0].compatibility_digest) = (false, 8);
        assert_eq!(plans(&nodes, &Wish::default(), Auto), [local]);
    }

    #[test]
    fn a_cluster_serves_when_the_nodes_of_a_plan_are_there() {
        let mut nodes = cluster();
        assert!([Never, Always, Auto].into_iter().all(|local| is_served(&nodes, local)));
        let alone = &nodes[2..];
        assert_eq!([Never, Always, Auto].map(|local| is_served(alone, local)), [false, true, true]);
        (nodes[2].draining, nodes[3].draining) = (true, true);
        assert_eq!([Never, Always, Auto].map(|local| is_served(&nodes, local)), [false; 3]);
    }

    #[test]
    fn a_local_plan_needs_room_on_one_node_only() {
        let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
        nodes[0].total_blocks = 2;
        assert_eq!(plans(&nodes, &Wish::default(), Auto), [(None, 3)]);
        let refused = select(&nodes, &NEED, &Wish::default(), Never, 0);
        assert_eq!(refused, Err(NoPair::TooLarge { blocks: 13, tokens: 200 }));
        nodes[1].total_blocks = 2;
        assert_eq!(select(&nodes, &NEED, &Wish::default(), Auto, 0), refused);
    }
}
