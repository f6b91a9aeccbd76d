//! The terms of a prediction, in milliseconds, each a pure function of one node and one request. What is put together
//! from them stands in [`super::prune`], which scores pairs; where their coefficients come from: nodes measure their
//! steps, [`super::calibrate`] the ways between nodes and how far these predictions are off.
//!
//! A step takes `base + token · tokens + context · positions`, with terms of their own for the tokens of prompts and
//! for the sequences that decode (the nodes' own model, `engine/src/step_model.rs`). From it:
//!
//! - **prefill**: the tokens of the prompt that the node has not cached, in chunks of the node's step budget: a base
//!   for each chunk, each token, and all positions that they attend to;
//! - **wait for prefill**: the prompts before this one, as [`super::backlog`] keeps them (prefill nodes are first come,
//!   first served);
//! - **step**: one step of the decode node's batch with this request in it, at the context that it starts with;
//! - **wait for decode**: until there is room ([`room_ms`]), or until the prompts that the node computes itself no
//!   longer slow its steps; only what outlasts the prefill counts, as the reservation runs beside it;
//! - **local prefill**: the same tokens in steps that also carry the node's running streams;
//! - **interference**: what a prompt delays the streams beside it (DistServe, <https://arxiv.org/abs/2401.09670>). Each
//!   stream waits for what the prompt adds to the steps ([`interference_ms`]), and one that begins meanwhile for the
//!   rest of that ([`super::pending_streams`]);
//! - **contention**: where the two nodes of a pair share their cores ([`super::processor`]), prompt and streams slow
//!   each other down as long as both run ([`contention`]). The prefill takes longer, and interferes with the streams.
use super::NodeView;
use crate::capacity::Demand;

/// Of a node whose step budget is not known: a usual one.
const STEP_TOKENS: u32 = 512;
/// Where no node of any role has measured a step yet. Its size only matters against waits and transfers, of which then
/// little is known either; requests spread by it because work that was routed counts.
pub const UNMEASURED: StepCost =
    StepCost { base_ms: 5.0, token_ms: 0.5, context_ms: 0.0001, decode_token_ms: 0.5, decode_context_ms: 0.0001 };
/// Answers are not taken to be longer, whatever they may be: most end long before `max_tokens`.
const USUAL_ANSWER: f64 = 256.0;

/// How long a node's steps take: a base, and `token · tokens + context · positions` of prompts and of decode each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    /// Of every step, milliseconds.
    pub base_ms: f64,
    /// Of each token of a prompt, milliseconds.
    pub token_ms: f64,
    /// Of each position that these attend to, milliseconds.
    pub context_ms: f64,
    /// Of each sequence that decodes, milliseconds.
    pub decode_token_ms: f64,
    /// Of each position that these attend to, milliseconds.
    pub decode_context_ms: f64,
}

impl StepCost {
    /// What a node reports; anything but positive numbers counts as nothing measured. Where the node tells nothing of
    /// decode, it costs what prompts do.
    pub fn reported(cost: Option<&tandem_proto::v1::StepCost>) -> Self {
        let cost = cost.copied().unwrap_or_default();
        let sound = |ms: f64| if ms.is_finite() { ms.clamp(0.0, 1e6) } else { 0.0 };
        Self {
            base_ms: sound(cost.base_ms),
            token_ms: sound(cost.token_ms),
            context_ms: sound(cost.context_ms),
            decode_token_ms: sound(cost.decode_token_ms.unwrap_or(cost.token_ms)),
            decode_context_ms: sound(cost.decode_context_ms.unwrap_or(cost.context_ms)),
        }
    }

    /// Whether a step was measured at all.
    pub fn is_measured(&self) -> bool {
        self.base_ms + self.token_ms + self.context_ms + self.decode_token_ms + self.decode_context_ms > 0.0
    }

    /// `None` of none.
    pub fn mean<'a>(costs: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let (mut sum, mut count) = (Self::default(), 0.0);
        for cost in costs {
            sum.base_ms += cost.base_ms;
            sum.token_ms += cost.token_ms;
            sum.context_ms += cost.context_ms;
            sum.decode_token_ms += cost.decode_token_ms;
            sum.decode_context_ms += cost.decode_context_ms;
            count += 1.0;
        }
        (count > 0.0).then(|| Self {
            base_ms: sum.base_ms / count,
            token_ms: sum.token_ms / count,
            context_ms: sum.context_ms / count,
            decode_token_ms: sum.decode_token_ms / count,
            decode_context_ms: sum.decode_context_ms / count,
        })
    }

    /// The prompts of this one beside the decode of `node`.
    pub fn beside(&self, node: &Self) -> Self {
        let &Self { decode_token_ms, decode_context_ms, .. } = node;
        Self { decode_token_ms, decode_context_ms, ..*self }
    }

    /// Milliseconds of a step in which so many sequences decode that attend to so many positions.
    pub fn step_ms(&self, sequences: f64, positions: f64) -> f64 {
        self.base_ms + self.decode_token_ms * sequences + self.decode_context_ms * positions
    }

    /// What `tokens` of a prompt behind `cached` others add to the steps that compute them.
    fn tokens_ms(&self, cached: u64, tokens: u64) -> f64 {
        self.token_ms * tokens as f64 + self.context_ms * positions(cached, tokens)
    }

    /// Milliseconds of prompts that a node reports as queued: `tokens` of `prompts` prompts of equal length, of which
    /// `computed` positions are in its KV already.
    pub fn queue_ms(&self, tokens: u64, prompts: u32, computed: u64, step_tokens: u32) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let prompts = u64::from(prompts.max(1)).min(tokens);
        let (each, steps) = (tokens as f64 / prompts as f64, tokens.div_ceil(u64::from(step_tokens.max(1))));
        let positions = tokens as f64 * (each + 1.0) / 2.0 + each * computed as f64;
        self.base_ms * steps as f64 + self.token_ms * tokens as f64 + self.context_ms * positions
    }
}

/// Positions that `tokens` attend to behind `cached` others, themselves included.
pub fn positions(cached: u64, tokens: u64) -> f64 {
    let (cached, tokens) = (cached as f64, tokens as f64);
    tokens * cached + tokens * (tokens + 1.0) / 2.0
}

/// What computing the prompt on a prefill node takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTerms {
    /// Before it begins, milliseconds.
    pub wait_ms: f64,
    /// From then to the first token, milliseconds.
    pub prefill_ms: f64,
    /// Prompt tokens that need no computing.
    pub cached_tokens: u32,
}

impl PrefillTerms {
    /// Of a node that has the prompt already: it is no news to it.
    pub const KEPT: Self = Self { wait_ms: 0.0, prefill_ms: 0.0, cached_tokens: 0 };

    /// To the first token.
    pub fn first_ms(&self) -> f64 {
        self.wait_ms + self.prefill_ms
    }
}

/// What generating on a decode node takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeTerms {
    /// Until it can take the request with full speed, milliseconds from now.
    pub wait_ms: f64,
    /// Its step with this request in the batch, milliseconds.
    pub step_ms: f64,
    /// Blocks of the prompt that it does not hold: they would travel.
    pub missing_blocks: u32,
    /// Blocks that it lacks now.
    pub short_blocks: u32,
}

/// What computing the prompt on the decode node itself takes, beside [`DecodeTerms`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalTerms {
    /// From its begin to the first token, milliseconds.
    pub prefill_ms: f64,
    /// What each stream waits for it in the mean, milliseconds.
    pub delay_ms: f64,
    /// What the prompts of a prefill node on the same cores wait for it, milliseconds.
    pub prompts_ms: f64,
    /// By how much prompts there take longer than the step model says: it is in `prefill_ms`.
    pub factor: f64,
    /// Prompt tokens that need no computing.
    pub cached_tokens: u32,
}

/// What the two nodes of a pair make each other wait for where they share their cores: as long as both compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contention {
    /// The prompt, milliseconds.
    pub prefill_ms: f64,
    /// Each running stream, milliseconds.
    pub delay_ms: f64,
    /// The prompts that the decode node computes itself, milliseconds.
    pub prompts_ms: f64,
}

impl Contention {
    /// They share nothing.
    pub const NONE: Self = Self { prefill_ms: 0.0, delay_ms: 0.0, prompts_ms: 0.0 };
}

/// Prompt tokens of which `node` holds the KV. The last one is always computed: its logits are the first token.
pub fn cached_tokens(node: &NodeView, demand: &Demand) -> u32 {
    let full = demand.prompt_tokens.saturating_sub(1) / node.block_tokens;
    node.cached_blocks_of_prompt.min(full).saturating_mul(node.block_tokens)
}

/// The prompt on prefill node `node`, whose steps cost `cost`.
pub fn prefill(node: &NodeView, cost: &StepCost, demand: &Demand) -> PrefillTerms {
    let cached_tokens = cached_tokens(node, demand);
    let tokens = demand.prompt_tokens.saturating_sub(cached_tokens);
    let steps = tokens.div_ceil(step_tokens(node));
    let compute_ms = cost.base_ms * f64::from(steps) + cost.tokens_ms(cached_tokens.into(), tokens.into());
    PrefillTerms { wait_ms: node.backlog_ms, prefill_ms: compute_ms * node.prefill_factor, cached_tokens }
}

/// The answer on decode node `node`, whose steps cost `cost`.
pub fn decode(node: &NodeView, cost: &StepCost, demand: &Demand) -> DecodeTerms {
    let requests = node.requests();
    let rows = (requests + 1.0).min(f64::from(node.max_running.max(1)));
    // Who waits for the batch has a context too, of which only the sum of the running ones is reported.
    let context = (node.context_tokens(demand) + f64::from(demand.prompt_tokens)) * rows / (requests + 1.0);
    let step_ms = cost.step_ms(rows, context);
    let before = node.routed.blocks.saturating_add(waiting_blocks(node));
    let short_blocks = demand.usual_blocks(node.block_tokens).saturating_add(before).saturating_sub(node.free_blocks);
    let held = node.cached_blocks_of_prompt.min(demand.prompt_blocks(node.block_tokens));
    DecodeTerms {
        wait_ms: room_ms(node, demand, short_blocks, step_ms).max(node.backlog_ms),
        step_ms,
        missing_blocks: demand.prompt_blocks(node.block_tokens) - held,
        short_blocks,
    }
}

/// The prompt on decode node `node`. Its steps with prompts cost `cost`, and it computes as `like` does: itself, or a
/// prefill node on the same cores, whose prompts then are in its way.
pub fn local(node: &NodeView, like: &NodeView, cost: &StepCost, demand: &Demand) -> LocalTerms {
    let cached_tokens = cached_tokens(node, demand);
    let tokens = demand.prompt_tokens.saturating_sub(cached_tokens);
    let streams = streams(node);
    let budget = (f64::from(step_tokens(node)) - streams).max(1.0);
    let steps = (f64::from(tokens) / budget).ceil();
    let added_ms = cost.tokens_ms(cached_tokens.into(), tokens.into()) * like.prefill_factor;
    let running_ms = steps * cost.step_ms(streams, node.context_tokens(demand)) * like.prefill_factor;
    let (contention, delays) = match like.session == node.session {
        true => (0.0, 0.0),
        false => (node.processor.contention(&like.processor), node.processor.delays(&like.processor)),
    };
    let alone_ms = added_ms + running_ms;
    let delayed = node.pending_streams.delayed(node.requests(), node.backlog_ms, alone_ms);
    let both_ms = alone_ms.min(like.backlog_ms);
    LocalTerms {
        prefill_ms: alone_ms + contention * both_ms,
        delay_ms: added_ms * delayed,
        prompts_ms: delays * both_ms,
        factor: like.prefill_factor,
        cached_tokens,
    }
}

/// What it costs the streams of `node` to wait for `delay_ms` each, in milliseconds of TTFT, of which `step_weight` are
/// worth one of TPOT: over the tokens that follow an answer's first one the delay is as much of its TPOT. Without such
/// tokens there is none; below one in the mean, as many answers have one.
pub fn interference_ms(node: &NodeView, demand: &Demand, delay_ms: f64, step_weight: f64) -> f64 {
    let further = answer_tokens(node, demand) - 1.0;
    match streams(node) * delay_ms * further.min(1.0 / further) {
        // Whatever the weight is.
        0.0 => 0.0,
        per_token_ms => per_token_ms * step_weight,
    }
}

/// A prefill of `prefill_ms` on `prefill` beside the prompts and streams of `decode`, whose steps take `step_ms`. What
/// runs when the prompt begins is taken to be what runs now: others come when these end.
pub fn contention(prefill: &NodeView, prefill_ms: f64, decode: &NodeView, step_ms: f64, demand: &Demand) -> Contention {
    let contention = prefill.processor.contention(&decode.processor);
    if contention == 0.0 || streams(decode) == 0.0 {
        return Contention::NONE;
    }
    // Half of its answer is still to come from one that runs, in the mean, and all of it from others. What is reserved
    // and not filled does not tell: requests share blocks.
    let running = f64::from(decode.running) / decode.requests();
    let streams_ms = answer_tokens(decode, demand) * (1.0 - 0.5 * running.min(1.0)) * step_ms;
    let delays = prefill.processor.delays(&decode.processor);
    Contention {
        prefill_ms: contention * prefill_ms.min(decode.backlog_ms + streams_ms),
        delay_ms: delays * prefill_ms.min(streams_ms),
        prompts_ms: delays * prefill_ms.min(decode.backlog_ms),
    }
}

/// Tokens of an answer there in the mean, as long as it may get: by what this router has there, or like this request's.
fn answer_tokens(node: &NodeView, demand: &Demand) -> f64 {
    node_answer(node, demand).clamp(1.0, USUAL_ANSWER)
}

fn node_answer(node: &NodeView, demand: &Demand) -> f64 {
    match node.held.requests {
        0 => f64::from(demand.answer_tokens),
        requests => node.held.answers as f64 / f64::from(requests),
    }
}

/// Requests whose tokens are computed at a time.
fn streams(node: &NodeView) -> f64 {
    node.requests().min(f64::from(node.max_running.max(1)))
}

/// Until a full node has room, milliseconds. Requests leave as their answers end. What they have still to generate, in
/// the mean, is half of what answers usually are: of `n` of them, ends spread evenly over twice the mean, so the k-th
/// comes after `k / (n + 1)` of it.
fn room_ms(node: &NodeView, demand: &Demand, short_blocks: u32, step_ms: f64) -> f64 {
    let requests = node.requests();
    let over = (requests + 1.0 - f64::from(node.max_running.max(1))).max(0.0);
    if short_blocks == 0 && over == 0.0 {
        return 0.0;
    }
    let reserved = node.total_blocks.saturating_sub(node.free_blocks);
    let used = f64::from(reserved) + f64::from(node.routed.blocks) + f64::from(waiting_blocks(node));
    let holders = requests.max(1.0);
    let ends = (f64::from(short_blocks) / (used / holders).max(1.0)).ceil().max(over).min(holders);
    let mean_left = (node_answer(node, demand) / 2.0).max(1.0);
    2.0 * mean_left * ends / (holders + 1.0) * step_ms
}

/// Blocks that requests wait for there since before its last report, which tells how many wait, and not for what: what
/// this router has there beyond the blocks that are reserved. Where one of the mean size would find its blocks free,
/// nobody waits for blocks: those who share some hold fewer than they asked for, and others wait for their KV.
fn waiting_blocks(node: &NodeView) -> u32 {
    let each = node.held.blocks.div_ceil(node.held.requests.max(1));
    if node.free_blocks >= each {
        return 0;
    }
    let waiting = node.reported.requests.saturating_sub(node.running);
    let reserved = node.total_blocks.saturating_sub(node.free_blocks);
    let beyond = node.held.blocks.saturating_sub(node.routed.blocks).saturating_sub(reserved);
    beyond.min(waiting.saturating_mul(each))
}

/// Tokens of one of `node`'s steps.
pub fn step_tokens(node: &NodeView) -> u32 {
    if node.max_step_tokens == 0 { STEP_TOKENS } else { node.max_step_tokens }
}

#[cfg(test)]
mod tests {
    use super::super::pending_streams::PendingStreams;
    use super::super::processor::Processor;
    use super::super::tests::{DEMAND, node};
    use super::super::{Role, Work};
    use super::*;
    use tandem_proto::v1;

    const COST: StepCost =
        StepCost { base_ms: 2.0, token_ms: 0.5, context_ms: 0.01, decode_token_ms: 0.5, decode_context_ms: 0.01 };

    #[test]
    fn positions_are_those_of_the_step_model() {
        assert_eq!(positions(0, 4), 10.0);
        assert_eq!(positions(10, 1), 11.0);
        assert_eq!(positions(10, 2), 23.0);
    }

    #[test]
    fn a_prompt_costs_its_chunks_its_tokens_and_its_positions() {
        let mut prefill_node = node(1, Role::Prefill);
        (prefill_node.max_step_tokens, prefill_node.backlog_ms) = (40, 7.0);
        let terms = prefill(&prefill_node, &COST, &DEMAND);
        assert_eq!(terms.wait_ms, 7.0);
        assert!((terms.prefill_ms - (3.0 * 2.0 + 50.0 + 0.01 * 5050.0)).abs() < 1e-9, "{terms:?}");
        prefill_node.cached_blocks_of_prompt = 4;
        let terms = prefill(&prefill_node, &COST, &DEMAND);
        assert_eq!(terms.cached_tokens, 64);
        assert!((terms.prefill_ms - (2.0 + 18.0 + 0.01 * (36.0 * 64.0 + 666.0))).abs() < 1e-9, "{terms:?}");
        prefill_node.prefill_factor = 2.0;
        assert!((prefill(&prefill_node, &COST, &DEMAND).prefill_ms - 2.0 * terms.prefill_ms).abs() < 1e-9);
    }

    #[test]
    fn the_last_token_of_a_cached_prompt_is_computed() {
        let mut prefill_node = node(1, Role::Prefill);
        prefill_node.cached_blocks_of_prompt = 100;
        let demand = Demand { prompt_tokens: 96, ..DEMAND };
        assert_eq!(prefill(&prefill_node, &COST, &demand).cached_tokens, 80);
        assert_eq!(cached_tokens(&prefill_node, &Demand { prompt_tokens: 0, ..DEMAND }), 0);
    }

    #[test]
    fn a_step_grows_with_the_batch_and_its_context() {
        let mut decode_node = node(3, Role::Decode);
        let alone = decode(&decode_node, &COST, &DEMAND);
        assert!((alone.step_ms - (2.0 + 0.5 + 1.0)).abs() < 1e-9);
        decode_node.reported = Work { requests: 2, context: 300, ..Work::default() };
        decode_node.running = 1;
        // The second request is not running yet: it will have a context like the first one's.
        let busy = decode(&decode_node, &COST, &DEMAND);
        assert!((busy.step_ms - (2.0 + 1.5 + 0.01 * 700.0)).abs() < 1e-9, "{busy:?}");
        decode_node.routed = Work { requests: 1, context: 50, ..Work::default() };
        assert!((decode(&decode_node, &COST, &DEMAND).step_ms - (2.0 + 2.0 + 0.01 * 750.0)).abs() < 1e-9);
    }

    #[test]
    fn a_full_node_waits_for_ends() {
        let mut decode_node = node(3, Role::Decode);
        assert_eq!(decode(&decode_node, &COST, &DEMAND).wait_ms, 0.0);
        // 60 of 64 blocks held by 3 requests; of answers of 100 tokens 50 are left in the mean.
        (decode_node.free_blocks, decode_node.running) = (4, 3);
        decode_node.reported = Work { requests: 3, context: 660, ..Work::default() };
        let terms = decode(&decode_node, &COST, &DEMAND);
        assert_eq!(terms.short_blocks, 9);
        assert!((terms.wait_ms - 2.0 * 50.0 / 4.0 * terms.step_ms).abs() < 1e-9, "{terms:?}");
        // Blocks enough, but no place in the batch.
        (decode_node.free_blocks, decode_node.max_running) = (64, 3);
        assert!(decode(&decode_node, &COST, &DEMAND).wait_ms > 0.0);
        decode_node.max_running = 4;
        assert_eq!(decode(&decode_node, &COST, &DEMAND).wait_ms, 0.0);
    }

    #[test]
    fn who_waits_for_blocks_counts_after_a_report_as_before() {
        let mut decode_node = node(3, Role::Decode);
        // Three of 20 blocks run, four wait.
        let seven = Work { requests: 7, blocks: 140, context: 700, tokens: 0, answers: 0 };
        (decode_node.routed, decode_node.held) = (seven, seven);
        let before = decode(&decode_node, &COST, &DEMAND);
        assert_eq!(before.short_blocks, 13 + 140 - 64);
        (decode_node.routed, decode_node.free_blocks, decode_node.running) = (Work::default(), 4, 3);
        decode_node.reported = Work { requests: 7, context: 300, ..Work::default() };
        let after = decode(&decode_node, &COST, &DEMAND);
        assert_eq!(after.short_blocks, before.short_blocks);
        assert!((after.wait_ms / before.wait_ms - 1.0).abs() < 0.01, "{after:?} {before:?}");
        // Requests that share blocks have all that they asked for.
        decode_node.free_blocks = 20;
        assert_eq!(decode(&decode_node, &COST, &DEMAND).short_blocks, 0);
        (decode_node.free_blocks, decode_node.running) = (4, 7);
        assert_eq!(decode(&decode_node, &COST, &DEMAND).short_blocks, 9, "nobody waits");
    }

    #[test]
    fn a_local_prompt_interferes_with_every_stream() {
        let mut decode_node = node(3, Role::Decode);
        let alone = local(&decode_node, &decode_node, &COST, &DEMAND);
        assert_eq!(interference_ms(&decode_node, &DEMAND, alone.delay_ms, 10.0), 0.0);
        assert!((alone.prefill_ms - (2.0 + 50.0 + 50.5)).abs() < 1e-9, "{alone:?}");
        decode_node.running = 2;
        decode_node.reported = Work { requests: 2, context: 200, ..Work::default() };
        let busy = local(&decode_node, &decode_node, &COST, &DEMAND);
        assert!((busy.delay_ms - 100.5).abs() < 1e-9, "{busy:?}");
        assert!((busy.prefill_ms - (100.5 + 2.0 + 1.0 + 2.0)).abs() < 1e-9, "{busy:?}");
        decode_node.pending_streams = PendingStreams { requests: 1, within_ms: busy.prefill_ms };
        let later = local(&decode_node, &decode_node, &COST, &DEMAND);
        assert!((later.delay_ms - 0.75 * 100.5).abs() < 1e-9, "one of them begins half-way through it: {later:?}");
        decode_node.pending_streams = PendingStreams::default();
        decode_node.cached_blocks_of_prompt = 6;
        assert!((local(&decode_node, &decode_node, &COST, &DEMAND).delay_ms - (2.0 + 0.01 * 394.0)).abs() < 1e-9);
    }

    #[test]
    fn a_delay_counts_as_time_per_token_of_the_answers_that_wait() {
        let mut decode_node = node(3, Role::Decode);
        decode_node.reported.requests = 2;
        let interferes = |node: &NodeView, streams: f64, further: f64| {
            let interference_ms = interference_ms(node, &DEMAND, 50.0, 10.0);
            assert!((interference_ms - streams * 50.0 * 10.0 / further).abs() < 1e-9, "{further}: {interference_ms}");
        };
        // Somebody else's: they are taken to be as long as this one.
        interferes(&decode_node, 2.0, 99.0);
        for (answers, further) in [(40, 19.0), (4, 1.0), (3, 2.0), (2, f64::INFINITY), (1_000_000, USUAL_ANSWER - 1.0)]
        {
            decode_node.held = Work { requests: 2, answers, ..Work::default() };
            interferes(&decode_node, 2.0, further);
        }
        decode_node.max_running = 1;
        interferes(&decode_node, 1.0, USUAL_ANSWER - 1.0);
    }

    #[test]
    fn nodes_on_the_same_cores_slow_each_other_down_while_both_compute() {
        let shared = Processor::reported(Some(&v1::Processor { id: 1, cores: 4, threads: 3 }));
        let (mut prefill_node, mut decode_node) = (node(1, Role::Prefill), node(3, Role::Decode));
        let contended = |p: &NodeView, d: &NodeView| contention(p, 300.0, d, 2.0, &DEMAND);
        (prefill_node.processor, decode_node.processor) = (shared, shared);
        assert_eq!(contended(&prefill_node, &decode_node), Contention::NONE, "nothing runs there");
        (decode_node.running, decode_node.reported.requests) = (2, 2);
        let until_they_end = Contention { prefill_ms: 50.0, delay_ms: 50.0, prompts_ms: 0.0 };
        assert_eq!(
            contended(&prefill_node, &decode_node),
            until_they_end,
            "half of a hundred tokens each, and half as many cores as too few"
        );
        decode_node.backlog_ms = 50.0;
        assert_eq!(
            contended(&prefill_node, &decode_node),
            Contention { prefill_ms: 75.0, prompts_ms: 25.0, ..until_they_end }
        );
        decode_node.backlog_ms = 500.0;
        assert_eq!(
            contended(&prefill_node, &decode_node),
            Contention { prefill_ms: 150.0, prompts_ms: 150.0, ..until_they_end }
        );
        decode_node.running = 0;
        assert_eq!(contended(&prefill_node, &decode_node).delay_ms, 100.0, "all of them");
        let alone = local(&decode_node, &prefill_node, &COST, &DEMAND);
        prefill_node.backlog_ms = 60.0;
        let beside = local(&decode_node, &prefill_node, &COST, &DEMAND);
        assert!((beside.prefill_ms - alone.prefill_ms - 30.0).abs() < 1e-9 && beside.prompts_ms == 30.0);
        prefill_node.prefill_factor = 2.0;
        assert_eq!(local(&decode_node, &prefill_node, &COST, &DEMAND).delay_ms, 2.0 * alone.delay_ms);
        prefill_node.processor = Processor::default();
        assert_eq!(contended(&prefill_node, &decode_node), Contention::NONE);
    }

    #[test]
    fn blocks_that_decode_holds_do_not_travel() {
        let mut decode_node = node(3, Role::Decode);
        assert_eq!(decode(&decode_node, &COST, &DEMAND).missing_blocks, 7);
        decode_node.cached_blocks_of_prompt = 5;
        assert_eq!(decode(&decode_node, &COST, &DEMAND).missing_blocks, 2);
        decode_node.cached_blocks_of_prompt = 50;
        assert_eq!(decode(&decode_node, &COST, &DEMAND).missing_blocks, 0);
    }

    #[test]
    fn a_queue_is_computed_prompt_after_prompt() {
        assert_eq!(COST.queue_ms(0, 3, 100, 512), 0.0);
        let one = COST.queue_ms(100, 1, 0, 512);
        assert!((one - (2.0 + 50.0 + 50.5)).abs() < 1e-9);
        let two = COST.queue_ms(200, 2, 0, 100);
        assert!((two - 2.0 * one).abs() < 1e-9);
        assert!(COST.queue_ms(100, 1, 1000, 512) > one);
    }

    #[test]
    fn what_is_no_number_is_not_measured() {
        let cost = |ms| {
            let decode = Some(ms);
            StepCost::reported(Some(&v1::StepCost {
                base_ms: ms,
                token_ms: ms,
                context_ms: ms,
                decode_token_ms: decode,
                decode_context_ms: decode,
            }))
        };
        for wrong in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert!(!cost(wrong).is_measured(), "{wrong}");
        }
        assert!(cost(0.1).is_measured() && !StepCost::reported(None).is_measured());
    }

    #[test]
    fn decode_costs_what_prompts_do_where_the_node_tells_no_difference() {
        let before = v1::StepCost { base_ms: 1.0, token_ms: 2.0, context_ms: 3.0, ..v1::StepCost::default() };
        let of = StepCost::reported(Some(&before));
        assert_eq!((of.decode_token_ms, of.decode_context_ms), (2.0, 3.0));
        let flat = v1::StepCost { decode_token_ms: Some(0.0), decode_context_ms: Some(-1.0), ..before };
        let of = StepCost::reported(Some(&flat));
        assert_eq!((of.token_ms, of.decode_token_ms, of.decode_context_ms), (2.0, 0.0, 0.0));
    }

    #[test]
    fn each_prediction_takes_its_own_terms() {
        let flat = StepCost { decode_token_ms: 0.0, decode_context_ms: 0.0, ..COST };
        let mut decode_node = node(3, Role::Decode);
        (decode_node.running, decode_node.reported) = (2, Work { requests: 2, context: 200, ..Work::default() });
        assert_eq!(decode(&decode_node, &flat, &DEMAND).step_ms, 2.0);
        assert_eq!(prefill(&decode_node, &flat, &DEMAND), prefill(&decode_node, &COST, &DEMAND));
        assert_eq!(flat.queue_ms(100, 1, 0, 512), COST.queue_ms(100, 1, 0, 512));
        // The streams' part of the mixed steps is gone, and the interference of the prompt is what it was.
        let (busy, without) =
            (local(&decode_node, &decode_node, &COST, &DEMAND), local(&decode_node, &decode_node, &flat, &DEMAND));
        assert!((busy.prefill_ms - without.prefill_ms - 3.0).abs() < 1e-9 && busy.delay_ms == without.delay_ms);
        let prompts = StepCost { token_ms: 0.0, context_ms: 0.0, ..COST };
        assert_eq!(decode(&decode_node, &prompts, &DEMAND), decode(&decode_node, &COST, &DEMAND));
        assert_eq!(prefill(&decode_node, &prompts, &DEMAND).prefill_ms, 2.0);
        assert_eq!((COST.beside(&flat), prompts.beside(&COST)), (flat, prompts));
    }
}
