//! Which pair of nodes gets a request. Pure: the cluster as values in, one pair and every candidate's terms out. Time,
//! sockets and the node table belong to [`crate::membership`], which calls this under its lock.
//!
//! The score of a pair is the sum of two loads, each in "batches ahead": how much work stands before this request on
//! the prefill node and on the decode node. Work that was routed after a node's last report is counted as if the node
//! had reported it, so that a burst between two reports spreads.
//!
//! Before the score come three ranks, in this order: no node whose circuit breaker is shut; nothing that failed this very
//! request before ([`Avoid`]); the prefill node that has its prompt already. They are ranks and not filters: a node that is
//! perhaps broken is still better than none, so a request is never refused while a node of each role is there.

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

impl Work {
    /// More of it.
    pub fn add(&mut self, other: &Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.tokens = self.tokens.saturating_add(other.tokens);
        self.blocks = self.blocks.saturating_add(other.blocks);
    }

    /// Less of it.
    pub fn sub(&mut self, other: &Self) {
        self.requests = self.requests.saturating_sub(other.requests);
        self.tokens = self.tokens.saturating_sub(other.tokens);
        self.blocks = self.blocks.saturating_sub(other.blocks);
    }
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
    fn names(&self, prefill: u64, decode: u64) -> bool {
        self.nodes.iter().any(|node| [prefill, decode].contains(node)) || self.pairs.contains(&(prefill, decode))
    }
}

/// A pair that could take the request, and why it is as good as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Table key of the prefill node.
    pub prefill: u64,
    /// Table key of the decode node.
    pub decode: u64,
    /// Name of the prefill node.
    pub prefill_id: String,
    /// Name of the decode node.
    pub decode_id: String,
    /// Batches ahead on the prefill node.
    pub prefill_load: f64,
    /// Share of the decode node's batch that is taken.
    pub decode_load: f64,
    /// Blocks that the decode node lacks now.
    pub blocks_short: u32,
    /// The circuit breaker of one of the two is shut.
    pub shut: bool,
    /// It failed this request before.
    pub avoided: bool,
    /// It has the prompt already.
    pub kept: bool,
}

impl Candidate {
    /// Whether nothing but load speaks against it.
    pub fn is_sound(&self) -> bool {
        !self.shut && !self.avoided
    }

    /// Smaller is better.
    pub fn score(&self) -> f64 {
        self.prefill_load + self.decode_load + if self.blocks_short > 0 { NO_ROOM } else { 0.0 }
    }
}

/// Why no pair was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPair {
    /// No node of this role is there, or all of them are draining.
    #[error("no {} node is available", .0.as_str())]
    NoNode(Role),
    /// There are nodes of both roles, but none that fit together.
    #[error("no prefill and decode node with the same compatibility digest and transport build are available")]
    Incompatible,
    /// No compatible pair could ever hold the request.
    #[error("the request needs {blocks} KV blocks ({tokens} tokens); no available pair of nodes can hold them")]
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
pub fn select(nodes: &[NodeView], need: &Need, wish: &Wish, turn: usize) -> Result<Vec<Candidate>, NoPair> {
    let available = |role| {
        let takes = |node: &&NodeView| node.role == role && (!node.draining || wish.keep == Some(node.session));
        nodes.iter().filter(takes).collect::<Vec<_>>()
    };
    let (prefills, decodes) = (available(Role::Prefill), available(Role::Decode));
    if prefills.is_empty() {
        return Err(NoPair::NoNode(Role::Prefill));
    }
    if decodes.is_empty() {
        return Err(NoPair::NoNode(Role::Decode));
    }
    let pairs =
        || prefills.iter().flat_map(|p| decodes.iter().map(move |d| (*p, *d))).filter(|(p, d)| compatible(p, d));
    if pairs().next().is_none() {
        return Err(NoPair::Incompatible);
    }
    let mut candidates: Vec<_> =
        pairs().filter(|(p, d)| fits(p, d, need)).map(|(p, d)| candidate(p, d, need, wish)).collect();
    if candidates.is_empty() {
        return Err(NoPair::TooLarge { blocks: need.total_blocks(), tokens: need.total_tokens });
    }
    candidates.sort_by(|a, b| (&a.prefill_id, &a.decode_id).cmp(&(&b.prefill_id, &b.decode_id)));
    let start = turn % candidates.len();
    candidates.rotate_left(start);
    let ranks = |pair: &Candidate| (pair.shut, pair.avoided, !pair.kept);
    candidates.sort_by(|a, b| ranks(a).cmp(&ranks(b)).then(a.score().total_cmp(&b.score())));
    candidates.truncate(MAX_CANDIDATES);
    Ok(candidates)
}

/// Whether these two may hand a request over.
pub fn compatible(prefill: &NodeView, decode: &NodeView) -> bool {
    prefill.compatibility_digest == decode.compatibility_digest && prefill.transport == decode.transport
}

fn fits(prefill: &NodeView, decode: &NodeView, need: &Need) -> bool {
    need.prompt_blocks() <= prefill.total_blocks
        && need.prompt_tokens <= prefill.max_context_tokens
        && need.total_blocks() <= decode.total_blocks
        && need.total_tokens <= decode.max_context_tokens
}

fn candidate(prefill: &NodeView, decode: &NodeView, need: &Need, wish: &Wish) -> Candidate {
    let kept = wish.keep == Some(prefill.session);
    let tokens_ahead = prefill.reported.tokens.saturating_add(prefill.routed.tokens);
    let requests_ahead = requests(prefill) / f64::from(prefill.max_running.max(1));
    let free = decode.free_blocks.saturating_sub(decode.routed.blocks);
    Candidate {
        prefill: prefill.session,
        decode: decode.session,
        prefill_id: prefill.node_id.clone(),
        decode_id: decode.node_id.clone(),
        prefill_load: tokens_ahead as f64 / BATCH_TOKENS + requests_ahead,
        decode_load: requests(decode) / f64::from(decode.max_running.max(1)),
        blocks_short: need.total_blocks().saturating_sub(free),
        shut: (prefill.shut && !kept) || decode.shut,
        avoided: wish.avoid.names(prefill.session, decode.session),
        kept,
    }
}

fn requests(node: &NodeView) -> f64 {
    f64::from(node.reported.requests) + f64::from(node.routed.requests)
}

#[cfg(test)]
mod tests {
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
        let best = &select(nodes, &NEED, &Wish::default(), 0).unwrap()[0];
        (best.prefill, best.decode)
    }

    #[test]
    fn takes_the_least_loaded_of_each_role() {
        let mut nodes = cluster();
        nodes[0].reported.tokens = 4_000;
        nodes[3].reported.requests = 3;
        assert_eq!(chosen(&nodes), (2, 3));
        assert_eq!(select(&nodes, &NEED, &Wish::default(), 0).unwrap().len(), 4);
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
        assert_eq!(select(&nodes, &NEED, &Wish::default(), 0).unwrap()[3].blocks_short, 1);
    }

    #[test]
    fn equal_pairs_take_turns() {
        let nodes = cluster();
        let pairs: std::collections::HashSet<_> = (0..4)
            .map(|turn| {
                let best = &select(&nodes, &NEED, &Wish::default(), turn).unwrap()[0];
                (best.prefill, best.decode)
            })
            .collect();
        assert_eq!(pairs.len(), 4);
    }

    #[test]
    fn never_pairs_what_does_not_fit_together() {
        let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
        nodes[0].compatibility_digest = 8;
        assert_eq!(select(&nodes, &NEED, &Wish::default(), 0), Err(NoPair::Incompatible));
        nodes[0].compatibility_digest = 7;
        nodes[0].transport.1 = "2".into();
        assert_eq!(select(&nodes, &NEED, &Wish::default(), 0), Err(NoPair::Incompatible));
    }

    fn wished(nodes: &[NodeView], wish: Wish) -> (u64, u64) {
        let best = &select(nodes, &NEED, &wish, 0).unwrap()[0];
        (best.prefill, best.decode)
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
        assert!(!select(&nodes[1..3], &NEED, &nothing_but(vec![3], vec![]), 0).unwrap()[0].is_sound());
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
        assert_eq!(select(&nodes, &NEED, &Wish::default(), 0), Err(NoPair::NoNode(Role::Decode)));
        assert_eq!(select(&[], &NEED, &Wish::default(), 0), Err(NoPair::NoNode(Role::Prefill)));
    }

    #[test]
    fn a_request_that_fits_nowhere_is_told_so() {
        let need = Need { total_tokens: 65 * 16, ..NEED };
        let refusal = select(&cluster(), &need, &Wish::default(), 0).unwrap_err();
        assert_eq!(refusal, NoPair::TooLarge { blocks: 65, tokens: 1040 });
        assert!(refusal.to_string().contains("65 KV blocks"));
    }
}
