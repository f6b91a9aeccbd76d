//! Whether the nodes have room for one more request, so that it need not wait on one of them. Pure. Beside what a node
//! reports, twice a second, stands what this router has on it now: that knows at once when a request ends. Where the two
//! differ, the better one counts: reports know of blocks that requests share, and a request too many waits on its node.
use tandem_proto::v1;

use crate::select::Work;

/// Work that a prefill node may have before it: enough to keep it busy while the next request comes.
const PREFILL_AHEAD_MS: f64 = 50.0;
/// The same in tokens, where the node has not said how fast it is: a usual step.
const PREFILL_AHEAD_TOKENS: u64 = 512;

/// What a request needs, and what comes before it: requests that have started and are on no node yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// KV blocks of the longest answer.
    pub blocks: u32,
    /// Blocks of those before it.
    pub blocks_ahead: u32,
    /// How many are before it.
    pub requests_ahead: u32,
    /// Tokens of their prompts.
    pub prompt_tokens_ahead: u64,
}

/// A node, as far as its room goes.
#[derive(Clone, Copy, Debug)]
pub struct Occupied<'a> {
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
}

impl Occupied<'_> {
    /// Whether a decode node takes it without a wait for blocks or a place in the batch, or with one of `node_queue` waits.
    pub fn decodes(&self, wanted: &Wanted, node_queue: u32) -> bool {
        let known = self.total_blocks.saturating_sub(self.held.blocks);
        let reported = self.load.free_blocks.saturating_sub(self.routed.blocks);
        let free = u64::from(known.max(reported).saturating_sub(wanted.blocks_ahead));
        let waits = u64::from(node_queue) * u64::from(wanted.blocks);
        let running = u64::from(self.held.requests) + u64::from(wanted.requests_ahead);
        free + waits >= u64::from(wanted.blocks) && running < u64::from(self.max_running) + u64::from(node_queue)
    }

    /// Whether a prefill node gets to it soon: it has little work, or no more than `node_queue` prompts before it.
    pub fn prefills(&self, wanted: &Wanted, node_queue: u32) -> bool {
        let tokens = self.held.tokens.saturating_add(wanted.prompt_tokens_ahead);
        let token_ms = self.load.step_cost.map_or(0.0, |cost| cost.token_ms);
        let little =
            if token_ms > 0.0 { tokens as f64 * token_ms < PREFILL_AHEAD_MS } else { tokens < PREFILL_AHEAD_TOKENS };
        little || self.held.requests.saturating_add(wanted.requests_ahead) <= node_queue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted { blocks: 10, blocks_ahead: 0, requests_ahead: 0, prompt_tokens_ahead: 0 };

    fn node(load: &v1::Load, held: Work) -> Occupied<'_> {
        Occupied { total_blocks: 100, max_running: 4, load, routed: Work::default(), held }
    }

    fn work(requests: u32, tokens: u64, blocks: u32) -> Work {
        Work { requests, tokens, blocks, context: 0 }
    }

    #[test]
    fn blocks_are_free_if_either_side_says_so() {
        let (full, half) = (v1::Load::default(), v1::Load { free_blocks: 50, ..v1::Load::default() });
        assert!(node(&full, work(3, 0, 90)).decodes(&WANTED, 0), "90 of 100 are held, whatever the last report said");
        assert!(!node(&full, work(3, 0, 91)).decodes(&WANTED, 0));
        assert!(node(&half, work(3, 0, 91)).decodes(&WANTED, 0), "requests share blocks");
        assert!(!Occupied { routed: work(1, 0, 41), ..node(&half, work(3, 0, 91)) }.decodes(&WANTED, 0));
        assert!(!node(&full, work(3, 0, 90)).decodes(&Wanted { blocks_ahead: 1, ..WANTED }, 0));
    }

    #[test]
    fn so_many_may_wait_on_the_node() {
        let full = v1::Load::default();
        assert!(node(&full, work(3, 0, 100)).decodes(&WANTED, 1));
        assert!(!node(&full, work(4, 0, 0)).decodes(&WANTED, 0), "the batch is full");
        assert!(node(&full, work(4, 0, 0)).decodes(&WANTED, 1));
        assert!(!node(&full, work(4, 0, 0)).decodes(&Wanted { requests_ahead: 1, ..WANTED }, 1));
    }

    #[test]
    fn a_prefill_node_is_kept_busy_and_no_more() {
        let unknown = v1::Load::default();
        assert!(node(&unknown, work(20, 511, 0)).prefills(&WANTED, 0));
        assert!(!node(&unknown, work(1, 512, 0)).prefills(&WANTED, 0));
        assert!(node(&unknown, work(1, 9999, 0)).prefills(&WANTED, 1));
        let cost = v1::StepCost { token_ms: 1.0, ..v1::StepCost::default() };
        let slow = v1::Load { step_cost: Some(cost), ..v1::Load::default() };
        assert!(node(&slow, work(9, 49, 0)).prefills(&WANTED, 0) && !node(&slow, work(9, 50, 0)).prefills(&WANTED, 0));
        assert!(!node(&slow, work(9, 49, 0)).prefills(&Wanted { prompt_tokens_ahead: 1, ..WANTED }, 0));
    }
}
