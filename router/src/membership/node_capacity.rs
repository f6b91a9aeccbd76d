//! Whether the nodes have room for one more request, so that it need not wait on one of them. Pure. Beside what a node
//! reports, twice a second, stands what this router has on it now: that knows at once when a request ends. Where the
//! two differ, the better one counts: reports know of blocks that requests share, and a request too many waits on its
//! node. Of other routers' requests there are reports alone, a fiftieth of a second old: they are added to this
//! router's own, and where there are some, free blocks are what the report says.
//!
//! Nodes count as the choice ranks them: those that nobody would be sent to have no room for anybody.
use tandem_proto::v1;

use crate::capacity::{Ahead, Demand};
use crate::select::{LocalPrefill, NodeView, Role, Work};

/// A node with a prompt gets the next one so long before it is done with it: enough to keep it busy. Whoever comes next
/// waits for what is on the node, whatever the order in the queue is.
const SOON_MS: f64 = 3.0;
/// So many may then wait there.
const PROMPTS_WAITING: u32 = 1;
/// Prompts of less work than this, or than what every step takes, are not waited for: several go into one step.
const LITTLE_MS: f64 = 8.0;
/// The same in tokens, where the node has not said how fast it is: a usual step.
const LITTLE_TOKENS: u64 = 512;

/// A [`Demand`] in blocks, and what comes before it: requests that have started and are on no node yet. Computed once,
/// since all nodes are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDemand {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of prompt and longest answer.
    pub total_tokens: u32,
    /// KV blocks of the prompt.
    pub prompt_blocks: u32,
    /// KV blocks of prompt and usual answer.
    pub blocks: u32,
    /// Blocks of those before it.
    pub blocks_ahead: u32,
    /// How many are before it.
    pub requests_ahead: u32,
    /// Tokens of their prompts.
    pub prompt_tokens_ahead: u64,
    /// Requests that may wait on each decode node; on a prefill node one, if any.
    pub node_queue: u32,
}

impl BlockDemand {
    /// By a request behind `ahead`, in blocks of so many tokens.
    pub fn of(demand: &Demand, ahead: &Ahead, node_queue: u32, block_tokens: u32) -> Self {
        // Each of those before it has a block that is not full.
        let blocks_ahead = u32::try_from(ahead.total_tokens.div_ceil(block_tokens.into())).unwrap_or(u32::MAX);
        Self {
            prompt_tokens: demand.prompt_tokens,
            total_tokens: demand.most_tokens(),
            prompt_blocks: demand.prompt_blocks(block_tokens),
            blocks: demand.usual_blocks(block_tokens),
            blocks_ahead: blocks_ahead.saturating_add(ahead.requests),
            requests_ahead: ahead.requests,
            prompt_tokens_ahead: ahead.prompt_tokens,
            node_queue,
        }
    }

    /// Whether such a node could ever hold it, and takes new work.
    fn fits(&self, view: &NodeView) -> bool {
        let tokens = match view.role {
            Role::Prefill => self.prompt_tokens,
            Role::Decode => self.total_tokens,
        };
        !view.draining && self.prompt_blocks <= view.total_blocks && tokens <= view.max_context_tokens
    }
}

/// The room of all nodes. Each node is counted in once.
#[derive(Debug)]
pub struct ClusterCapacity {
    wanted: BlockDemand,
    local: LocalPrefill,
    /// Of nodes against which nothing but load speaks.
    sound: Nodes,
    /// Of all: they count where those make no plan.
    all: Nodes,
}

/// What room there is, the best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Room {
    /// None.
    No,
    /// On a decode node that computes the prompt, too; for a request that goes to a pair there is none.
    Local,
    /// Whatever the plan is.
    Yes,
}

/// What nodes could do, and have room to do.
#[derive(Clone, Debug, Default)]
struct Nodes {
    /// By the domains' numbers: those of one domain pair.
    domains: Vec<Domain>,
    decodes: bool,
    /// A decode node has room for the prompt's computation, too.
    local_room: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Domain {
    prefills: bool,
    decodes: bool,
    prefill_room: bool,
    decode_room: bool,
}

impl ClusterCapacity {
    /// Of no nodes.
    pub fn new(wanted: BlockDemand, local: LocalPrefill) -> Self {
        Self { wanted, local, sound: Nodes::default(), all: Nodes::default() }
    }

    /// Counts a node in. True once the others cannot change the answer: there is room.
    pub fn tell(&mut self, view: &NodeView, node: &NodeCapacity<'_>, sound: bool) -> bool {
        if !self.wanted.fits(view) {
            return false;
        }
        self.all.tell(view, node, &self.wanted);
        if !sound {
            return false;
        }
        self.sound.tell(view, node, &self.wanted);
        match self.local {
            LocalPrefill::Always => self.sound.local_room,
            LocalPrefill::Never | LocalPrefill::Auto => self.sound.has_room_for_pairs(&view.domains),
        }
    }

    /// Whether there is room. A request that nobody could ever take finds it: its refusal is the flow's matter.
    pub fn answer(&self) -> Room {
        self.sound.room(self.local).or_else(|| self.all.room(self.local)).unwrap_or(Room::Yes)
    }
}

impl Nodes {
    fn tell(&mut self, view: &NodeView, node: &NodeCapacity<'_>, wanted: &BlockDemand) {
        let room = match view.role {
            Role::Prefill => node.prefills(wanted),
            Role::Decode => node.decodes(wanted),
        };
        if view.role == Role::Decode {
            self.decodes = true;
            self.local_room |= room && node.computes(wanted);
        }
        for number in view.domains.iter().map(|number| *number as usize) {
            if self.domains.len() <= number {
                self.domains.resize(number + 1, Domain::default());
            }
            let domain = &mut self.domains[number];
            match view.role {
                Role::Prefill => (domain.prefills, domain.prefill_room) = (true, domain.prefill_room || room),
                Role::Decode => (domain.decodes, domain.decode_room) = (true, domain.decode_room || room),
            }
        }
    }

    /// In one of these domains.
    fn has_room_for_pairs(&self, domains: &[u32]) -> bool {
        let has_room = |domain: &Domain| domain.prefill_room && domain.decode_room;
        domains.iter().filter_map(|number| self.domains.get(*number as usize)).any(has_room)
    }

    /// `None`: they make no plan.
    fn room(&self, local: LocalPrefill) -> Option<Room> {
        let mut pairing = self.domains.iter().filter(|domain| domain.prefills && domain.decodes).peekable();
        let pairs = pairing.peek().is_some() && local != LocalPrefill::Always;
        let alone = self.decodes && local != LocalPrefill::Never;
        let room = match self.local_room && alone {
            _ if pairs && pairing.any(|domain| domain.prefill_room && domain.decode_room) => Room::Yes,
            true if pairs => Room::Local,
            true => Room::Yes,
            false => Room::No,
        };
        (pairs || alone).then_some(room)
    }
}

/// What bounds the room of one node.
#[derive(Clone, Copy, Debug)]
pub struct NodeCapacity<'a> {
    /// Blocks of its arena.
    pub total_blocks: u32,
    /// Sequences of one batch.
    pub max_running: u32,
    /// Its last report.
    pub load: &'a v1::Load,
    /// Routed to it since then.
    pub routed: Work,
    /// What this router has on it: on a decode node until a request ends, on a prefill node until its first token.
    pub held: Work,
    /// Of these requests, those whose prompts it has still to compute.
    pub prompts: u32,
    /// Until it is done with them, as predicted.
    pub backlog_ms: f64,
}

impl NodeCapacity<'_> {
    /// Whether a decode node takes it without a wait for blocks or a place in the batch, or with so few others that
    /// wait.
    pub fn decodes(&self, wanted: &BlockDemand) -> bool {
        let queue = u64::from(wanted.node_queue);
        let requests = self.requests() + u64::from(wanted.requests_ahead);
        let blocks = self.has_blocks(wanted) || self.wait_for_blocks(wanted) < queue;
        blocks && requests < u64::from(self.max_running) + queue
    }

    /// Whether a decode node gets to the prompt soon, where it computes it itself.
    pub fn computes(&self, wanted: &BlockDemand) -> bool {
        self.begins_soon(self.prompts, wanted)
    }

    /// Whether a prefill node gets to it soon.
    pub fn prefills(&self, wanted: &BlockDemand) -> bool {
        self.begins_soon(self.held.requests, wanted)
    }

    /// It has little work with prompts, or one that it is about to end.
    fn begins_soon(&self, prompts: u32, wanted: &BlockDemand) -> bool {
        let others = self.others();
        let tokens = self.held.tokens.saturating_add(others.prompt_tokens).saturating_add(wanted.prompt_tokens_ahead);
        let prompts = prompts.saturating_add(others.prompts).saturating_add(wanted.requests_ahead);
        let few = prompts <= wanted.node_queue.min(PROMPTS_WAITING);
        match self.load.step_cost.filter(|cost| cost.token_ms > 0.0) {
            Some(cost) => {
                let little = tokens as f64 * cost.token_ms < cost.base_ms.max(LITTLE_MS);
                let ahead_ms = wanted.prompt_tokens_ahead as f64 * cost.token_ms;
                little || (few && self.backlog_ms + ahead_ms < SOON_MS)
            }
            None => tokens < LITTLE_TOKENS || few,
        }
    }

    fn has_blocks(&self, wanted: &BlockDemand) -> bool {
        // One that is larger than the node has room when nobody else is there.
        let wanted_blocks = u64::from(wanted.blocks.min(self.total_blocks)) + u64::from(wanted.blocks_ahead);
        let known = self.total_blocks.saturating_sub(self.held.blocks);
        let reported = self.load.free_blocks.saturating_sub(self.routed.blocks);
        let free = if self.others().requests > 0 { reported } else { known.max(reported) };
        u64::from(free) >= wanted_blocks
    }

    /// What other routers have on it.
    fn others(&self) -> v1::CallCounts {
        self.load.others.unwrap_or_default()
    }

    /// Of all routers.
    fn requests(&self) -> u64 {
        u64::from(self.held.requests) + u64::from(self.others().requests)
    }

    /// How many of those before it wait for blocks: what they lack together, in requests of their mean size. By what is
    /// booked there alone: a report of free blocks says nothing of what waits for more of them. Other routers' requests
    /// count like this router's own, where it has some, else like this one.
    fn wait_for_blocks(&self, wanted: &BlockDemand) -> u64 {
        let each = self.held.blocks.checked_div(self.held.requests).unwrap_or(wanted.blocks);
        let requests = self.requests() + u64::from(wanted.requests_ahead);
        let others = u64::from(self.others().requests) * u64::from(each);
        let blocks = u64::from(self.held.blocks) + others + u64::from(wanted.blocks_ahead);
        let lacking = blocks.saturating_sub(self.total_blocks.into());
        lacking.saturating_mul(requests).div_ceil(blocks.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: BlockDemand = BlockDemand {
        prompt_tokens: 100,
        total_tokens: 160,
        prompt_blocks: 7,
        blocks: 10,
        blocks_ahead: 0,
        requests_ahead: 0,
        prompt_tokens_ahead: 0,
        node_queue: 0,
    };

    fn node(load: &v1::Load, held: Work) -> NodeCapacity<'_> {
        NodeCapacity {
            total_blocks: 100,
            max_running: 4,
            load,
            routed: Work::default(),
            held,
            prompts: 0,
            backlog_ms: 0.0,
        }
    }

    fn work(requests: u32, tokens: u64, blocks: u32) -> Work {
        Work { requests, tokens, blocks, ..Work::default() }
    }

    fn queue(node_queue: u32) -> BlockDemand {
        BlockDemand { node_queue, ..WANTED }
    }

    #[test]
    fn blocks_are_free_if_either_side_says_so() {
        let (full, half) = (v1::Load::default(), v1::Load { free_blocks: 50, ..v1::Load::default() });
        assert!(node(&full, work(3, 0, 90)).decodes(&WANTED), "90 of 100 are held, whatever the last report said");
        assert!(!node(&full, work(3, 0, 91)).decodes(&WANTED));
        assert!(node(&half, work(3, 0, 91)).decodes(&WANTED), "requests share blocks");
        assert!(!NodeCapacity { routed: work(1, 0, 41), ..node(&half, work(3, 0, 91)) }.decodes(&WANTED));
        assert!(!node(&full, work(3, 0, 90)).decodes(&BlockDemand { blocks_ahead: 1, ..WANTED }));
    }

    #[test]
    fn so_many_may_wait_on_the_node() {
        let full = v1::Load::default();
        assert!(node(&full, work(3, 0, 100)).decodes(&queue(1)));
        assert!(!node(&full, work(4, 0, 0)).decodes(&WANTED), "the batch is full");
        assert!(node(&full, work(4, 0, 0)).decodes(&queue(1)));
        assert!(!node(&full, work(4, 0, 0)).decodes(&BlockDemand { requests_ahead: 1, ..queue(1) }));
    }

    #[test]
    fn what_other_routers_have_there_counts() {
        let others = |requests, prompts, prompt_tokens| Some(v1::CallCounts { requests, prompts, prompt_tokens });
        let load = |free_blocks, others| v1::Load { free_blocks, others, ..v1::Load::default() };
        // Of four places three are taken, by whomever.
        let (shared, full) = (load(40, others(2, 0, 0)), load(40, others(3, 0, 0)));
        assert!(node(&shared, work(1, 0, 20)).decodes(&WANTED) && !node(&full, work(1, 0, 20)).decodes(&WANTED));
        // This router holds 20 of 100 blocks: how many of the others are free only the report knows.
        let none_free = load(9, others(1, 0, 0));
        assert!(!node(&none_free, work(1, 0, 20)).decodes(&WANTED));
        assert!(node(&load(9, None), work(1, 0, 20)).decodes(&WANTED));
        // Two of 50 blocks run, a third one waits.
        let wide = |load| NodeCapacity { max_running: 64, ..node(load, work(1, 0, 50)) };
        let (two, three) = (load(0, others(1, 0, 0)), load(0, others(2, 0, 0)));
        assert!(wide(&two).decodes(&queue(1)) && !wide(&three).decodes(&queue(1)));
        // Prompts, too.
        let busy = load(100, others(2, 2, 9999));
        assert!(!node(&busy, work(0, 0, 0)).prefills(&queue(1)));
        assert!(node(&load(100, others(2, 1, 9999)), work(0, 0, 0)).prefills(&queue(1)));
    }

    #[test]
    fn no_more_wait_for_blocks_than_may() {
        let full = v1::Load { free_blocks: 10, ..v1::Load::default() };
        for (blocks, run) in [(30, 3), (40, 2), (100, 1), (33, 3)] {
            for node_queue in [0, 1, 4] {
                let wanted = BlockDemand { blocks, ..queue(node_queue) };
                let takes = |held: &u32| {
                    NodeCapacity { max_running: 64, ..node(&full, work(*held, 0, held * blocks)) }.decodes(&wanted)
                };
                let taken = (0..).take_while(takes).count() as u32;
                assert_eq!(taken, run + node_queue, "of {blocks} blocks {run} run");
            }
        }
        // What has started and is on no node yet waits there, too.
        let wide = |requests, blocks| NodeCapacity { max_running: 64, ..node(&full, work(requests, 0, blocks)) };
        let behind = BlockDemand { blocks: 30, blocks_ahead: 60, requests_ahead: 2, ..queue(4) };
        assert!(wide(4, 120).decodes(&behind) && !wide(5, 150).decodes(&behind));
        assert!(
            !wide(7, 210).decodes(&BlockDemand { blocks: 90, ..queue(4) }),
            "a large one does not wait beyond the limit"
        );
    }

    #[test]
    fn a_prefill_node_is_kept_busy_and_no_more() {
        let unknown = v1::Load::default();
        assert!(node(&unknown, work(20, 511, 0)).prefills(&WANTED));
        assert!(!node(&unknown, work(1, 512, 0)).prefills(&WANTED));
        assert!(
            node(&unknown, work(1, 9999, 0)).prefills(&queue(4))
                && !node(&unknown, work(2, 9999, 0)).prefills(&queue(4))
        );
        let cost = v1::StepCost { token_ms: 1.0, base_ms: 20.0, ..v1::StepCost::default() };
        let slow = v1::Load { step_cost: Some(cost), ..v1::Load::default() };
        let behind = BlockDemand { prompt_tokens_ahead: 1, requests_ahead: 1, ..queue(4) };
        assert!(node(&slow, work(9, 19, 0)).prefills(&WANTED) && !node(&slow, work(9, 20, 0)).prefills(&WANTED));
        assert!(!node(&slow, work(9, 19, 0)).prefills(&behind));
        // The next one comes just before the last one is done, and not behind two.
        let ends_after = |backlog_ms, requests| NodeCapacity { backlog_ms, ..node(&slow, work(requests, 99, 0)) };
        assert!(ends_after(2.0, 1).prefills(&queue(4)) && !ends_after(4.0, 1).prefills(&queue(4)));
        assert!(!ends_after(2.0, 2).prefills(&queue(4)) && !ends_after(2.0, 1).prefills(&behind));
        assert!(!ends_after(2.0, 1).prefills(&WANTED), "nobody may wait");
    }

    #[test]
    fn a_decode_node_that_computes_prompts_is_kept_busy_and_no_more() {
        let unknown = v1::Load::default();
        let busy = |tokens, prompts| NodeCapacity { prompts, ..node(&unknown, work(3, tokens, 0)) };
        assert!(busy(511, 3).computes(&WANTED) && !busy(512, 3).computes(&WANTED));
        assert!(busy(9999, 1).computes(&queue(1)), "two of the three have their first tokens");
        assert!(!busy(9999, 2).computes(&queue(1)));
    }
}
