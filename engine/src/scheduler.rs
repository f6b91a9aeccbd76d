//! Decides what each step computes: continuous batching, chunked prefill, several prompts' chunks beside the decode
//! tokens. A pure state machine: no clock, channel, thread or tensor; time is an argument. `engine/worker.rs` runs
//! it; a step reads `admit → fit → plan → begin … resolve → end`, and `apply` behind each decision. Decisions are
//! values; only [`Scheduler::apply`] changes a sequence, takes blocks and caches them. Where each sequence stands is
//! `scheduler/sequence.rs`.
//!
//! **Steps that overlap.** The next step can be planned while others are under way: a sequence is then taken to be
//! where these will leave it. The place of a token that one of them chooses is certain, and so are its block and its
//! random number; its value is not, and the executor continues it by [`Tokens::Last`]. As each step gives a sequence
//! the tokens that it would have had alone, four things are to be seen to:
//!
//! - *Who needs the value waits*: where a sequence's next step hangs on more than the place (drafts, and rules that are
//!   the host's, see [`Choose::is_of_device`](crate::Choose::is_of_device)), no step is planned before the one under
//!   way has ended. It is so for all, so that nobody gets fewer steps than others for what they asked for.
//! - *Who turns out to have ended* by a stop token, a cancel or a failure has a row too many in the step behind. That
//!   is dropped: the sequence is not there any more. Its KV lies behind the sequence's end, and so behind every block
//!   that is cached. An end by length is known ahead, and has no such row.
//! - *Leases* are held by each step from its planning to its end, so that blocks are free, or another's, only after the
//!   last step that writes them.
//! - *Preemption* frees no block of a sequence in a step under way, so it waits until there is none.
//!
//! **Order.** A level of priority is worth [`PLACES_A_LEVEL`] places in the queue of arrivals, and each later arrival
//! ages those before it by one place. So the order of two sequences never changes, and nothing starves: a sequence is
//! overtaken by at most `PLACES_A_LEVEL * 2 * MAX_PRIORITY` later ones. Sequences start in this order and their prompts
//! share a step's tokens in this order. Every running one that decodes is in every step for which it has a block, and
//! since there are fewer of them than tokens in a step (`max_running <= max_step_tokens`), the first that prefills is
//! in every step too.
//!
//! **Memory.** A sequence arrives with blocks for its given tokens and takes one more whenever its last one is full,
//! ahead of reservations. When none is free, the last in the order that holds blocks is *preempted*: it gives all of
//! them back and waits, in its old place, to be computed again. Its full blocks stay cached until somebody needs them,
//! so that this is often little work. Nobody is preempted for one behind it: who finds nobody behind itself waits for a
//! block and keeps those it has, as long as others run. New reservations leave a block for each running sequence that
//! may grow; while a preempted one waits they get nothing, so that it comes back first.
//!
//! *The first in the order is never preempted*, so it ends, and then the next one is first. *Nobody is preempted for
//! ever*: each preemption of `s` belongs to a sequence before it, which grew by a block or started in its place. It
//! starts once, and grows by a block of its answer once (when it is preempted itself, it returns with room for all its
//! tokens); and only so many sequences are ever before `s` as the order says. So `s` is preempted at most as often as
//! these are, and have blocks of answers. Blocks that are in no sequence's hands belong to transfers. These end by
//! themselves; they wait for nothing here.
//!
//! **Cache.** A sequence's full blocks are cached as soon as a step has filled them, those of a long prompt chunk by
//! chunk: the executor vouches for each item that all it computed are numbers, so that broken KV is never shared.
//!
//! Long because order, memory and overlapping steps are decided over one state: each decision needs all three.
mod sequence;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use crate::blocks::{BlockPool, KvLease};
use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Chosen, Draft, EngineSpec, Seq, Tokens};
use crate::sampling::Sampled;
use crate::sequence::{Drafts, FinishReason, SequenceRequest};
use crate::speculation::{Budget, MAX_DRAFTS, MAX_ROWS, Speculate, WORTH_A_WAIT, draft};
use crate::step_model::{StepCost, StepShape};
use sequence::Sequence;

/// Limits of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences in the running batch, at least 1 and at most `max_step_tokens`; values outside are clamped.
    pub max_running: usize,
    /// Tokens that a step computes, decode and prefill together.
    pub max_step_tokens: usize,
    /// Sequences that may wait to run (1 to 65,536); further ones are refused as `Overloaded`.
    pub inbox: usize,
    /// Whether computed blocks are kept for prompts that begin alike.
    pub prefix_caching: bool,
    /// Whether steps compute guesses at further tokens beside the last ones.
    pub speculate: Speculate,
}

/// What a level of priority is worth, see the head of this file.
pub const PLACES_A_LEVEL: i64 = 32;

/// What a step came to: what was chosen for each item.
pub type StepOutcome<'a> = Result<&'a [Chosen], EngineError>;

/// What will happen to a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// It joins the running batch.
    Start,
    /// It gets one more block.
    Grow,
    /// It gives its blocks to one before it and waits until there is room to compute it again.
    Preempt,
    /// It joins the running batch again, with blocks for all its tokens.
    Resume,
    /// Its step succeeded.
    Advance {
        /// Tokens whose KV is in the lease now.
        computed: usize,
        /// Whether the step was over given tokens, and came further than any before.
        chunk: bool,
        /// The tokens that are new, when the step reached the end of the sequence: one, and one for each draft that
        /// came true.
        sampled: Vec<Sampled>,
        /// What came of the step's drafts.
        drafts: Drafts,
        /// Set when that was the last one.
        finish: Option<FinishReason>,
    },
    /// Its caller has gone.
    Cancel,
    /// It is given up.
    Fail(EngineError),
}

impl Decision {
    /// Whether the sequence leaves the scheduler.
    pub fn ends(&self) -> bool {
        match self {
            Self::Start | Self::Grow | Self::Preempt | Self::Resume => false,
            Self::Advance { finish, .. } => finish.is_some(),
            Self::Cancel | Self::Fail(_) => true,
        }
    }
}

/// The sequences of one engine and where each stands.
pub struct Scheduler {
    max_running: usize,
    max_step_tokens: usize,
    eos_token_id: u32,
    max_context_tokens: usize,
    block_tokens: usize,
    /// For the sequence hashes.
    model_digest: u64,
    pool: BlockPool,
    waiting: BTreeMap<Seq, Sequence>,
    /// Those of `waiting` that have blocks, in the order in which they start.
    queue: BTreeSet<Rank>,
    /// Those of `waiting` that gave their blocks away, in the order in which they come back.
    preempted: BTreeSet<Rank>,
    running: BTreeMap<Seq, Sequence>,
    preemptions: u64,
    /// Steps that have begun and not ended.
    under_way: usize,
    speculate: Speculate,
    /// What steps take, as far as they were measured.
    cost: StepCost,
}

/// A place in the order: lower is first. Equal places go by arrival.
type Rank = (i64, Seq);

impl Scheduler {
    /// An empty scheduler of sequences whose leases are of `pool`.
    pub fn new(config: &SchedulerConfig, spec: &EngineSpec, pool: BlockPool) -> Self {
        let max_step_tokens = config.max_step_tokens.max(1);
        // The KV of the last token is never needed. With this a sequence always fits the pool when nobody else is
        // there.
        let memory_tokens = pool.total().saturating_mul(pool.block_tokens()).saturating_add(1);
        Self {
            max_running: config.max_running.clamp(1, max_step_tokens),
            max_step_tokens,
            eos_token_id: spec.eos_token_id,
            max_context_tokens: spec.max_context_tokens.min(memory_tokens),
            block_tokens: spec.block_tokens.max(1),
            model_digest: spec.model_digest,
            pool,
            waiting: BTreeMap::new(),
            queue: BTreeSet::new(),
            preempted: BTreeSet::new(),
            running: BTreeMap::new(),
            preemptions: 0,
            under_way: 0,
            speculate: config.speculate,
            cost: StepCost::default(),
        }
    }

    /// Takes a validated request. The caller bounds how many wait.
    pub fn enqueue(&mut self, seq: Seq, request: SequenceRequest) {
        debug_assert!(self.waiting.keys().chain(self.running.keys()).all(|&other| other < seq));
        let place = i64::try_from(seq).unwrap_or(i64::MAX).saturating_sub(i64::from(request.priority) * PLACES_A_LEVEL);
        let rank = (place, seq);
        let sequence = Sequence::new(request, rank, self.eos_token_id, self.model_digest);
        self.queue.insert(rank);
        self.waiting.insert(seq, sequence);
    }

    /// From now on steps are expected to take so long.
    pub fn expect(&mut self, cost: StepCost) {
        self.cost = cost;
    }

    /// Who leaves (`gone` by choice, or by deadline), who starts, and who comes back: the first of the preempted, when
    /// its blocks are there.
    pub fn admit(&self, now: Instant, gone: impl Fn(Seq) -> bool) -> Vec<(Seq, Decision)> {
        let leaving = |sequence: &Sequence| {
            let seq = sequence.rank.1;
            let expired = sequence.request.deadline.is_some_and(|deadline| deadline <= now);
            if gone(seq) {
                Some((seq, Decision::Cancel))
            } else {
                expired.then_some((seq, Decision::Fail(EngineError::DeadlineExceeded)))
            }
        };
        let mut decisions: Vec<_> = self.running.values().filter_map(leaving).collect();
        let mut room = self.max_running - (self.running.len() - decisions.len());
        decisions.extend(self.preempted.iter().filter_map(|(_, seq)| self.waiting.get(seq)).filter_map(leaving));
        let returning = self.returning().filter(|(_, seq)| decisions.iter().all(|(other, _)| other != seq));
        let place = returning.unwrap_or((i64::MAX, Seq::MAX));
        for rank in self.queue.range(..place).chain(&returning).chain(self.queue.range(place..)) {
            let (seq, back) = (&rank.1, returning == Some(*rank));
            if let Some(decision) = self.waiting.get(seq).and_then(leaving) {
                decisions.push(decision);
            } else if room > 0 {
                room -= 1;
                decisions.push((*seq, if back { Decision::Resume } else { Decision::Start }));
            }
        }
        decisions
    }

    /// The blocks of the next step: who gets one more, and who gives way. One round of it: once it is carried out the
    /// next one may go further, and none is left to decide when there are no decisions.
    pub fn fit(&self) -> Vec<(Seq, Decision)> {
        if self.going_on().any(|sequence| sequence.ahead.must_end()) {
            return Vec::new();
        }
        let mut lacking: Vec<Rank> = self.going_on().filter(|it| it.lacks_block()).map(|it| it.rank).collect();
        lacking.sort_unstable();
        if lacking.is_empty() {
            return self.fit_drafts();
        }
        let free = self.pool.free();
        let mut decisions: Vec<_> = lacking.iter().take(free).map(|&(_, seq)| (seq, Decision::Grow)).collect();
        if let Some(first) = lacking.get(free).filter(|_| self.under_way == 0) {
            // Behind the first that gets nothing, and so behind all who get something. The only one that runs gives its
            // place to those before it, should there be some.
            let place = self.running.len() == 1 && !self.queue.is_empty();
            let victim = self.last_with_blocks().filter(|last| last > first || place);
            decisions.extend(victim.map(|(_, seq)| (seq, Decision::Preempt)));
        }
        decisions
    }

    /// The next step: every sequence that decodes, then prefill chunks in order of rank while tokens are left in the
    /// budget. Empty when nothing runs, when the only one that does waits for blocks that a transfer holds, or when a
    /// step under way must end first.
    pub fn plan(&self) -> Batch {
        if self.must_wait() {
            return Batch::default();
        }
        let mut budget = self.max_step_tokens;
        let mut order: Vec<&Sequence> = self.going_on().filter(|sequence| !sequence.lacks_block()).collect();
        order.sort_unstable_by_key(|sequence| (sequence.queued_tokens() > 1, sequence.rank));
        let (mut items, mut report_layers) = (Vec::with_capacity(order.len()), BTreeSet::new());
        for sequence in order {
            let count = sequence.queued_tokens().min(budget);
            if count == 0 {
                break;
            }
            budget -= count;
            let item = sequence.item(count);
            if item.choose.is_some() && item.start < sequence.given {
                report_layers.extend(&sequence.request.report_layers);
            }
            items.push(item);
        }
        let mut batch = Batch { items, report_layers: report_layers.into_iter().collect() };
        if self.speculate == Speculate::Ngram && self.under_way == 0 {
            self.add_drafts(&mut batch, budget);
        }
        batch
    }

    /// The planned step is under way: what it computes and chooses can be continued.
    pub fn begin(&mut self, batch: &Batch) {
        self.under_way += 1;
        for item in &batch.items {
            if let Some(sequence) = self.running.get_mut(&item.seq) {
                sequence.ahead.begin(item);
            }
        }
    }

    /// The oldest step under way has ended, and is resolved: its hold on leases goes with it. What it came to is to be
    /// applied next.
    pub fn end(&mut self, batch: Batch) {
        self.under_way = self.under_way.saturating_sub(1);
        for item in &batch.items {
            if let Some(sequence) = self.running.get_mut(&item.seq) {
                sequence.ahead.end(item);
            }
        }
    }

    /// Whether the next step cannot be planned before those under way have ended: it hangs on tokens that they choose,
    /// or on blocks that somebody may have to give up. Where text repeats itself, guesses save more than overlap, if
    /// they come true.
    fn must_wait(&self) -> bool {
        let waits = |it: &Sequence| it.ahead.must_end() || it.lacks_block();
        // No text is scanned where another sequence's cheap answer is enough.
        self.under_way > 0 && (self.going_on().any(waits) || self.going_on().any(|it| self.may_guess(it)))
    }

    /// Whether drafts are likely, and likely enough to come true, once the steps under way have chosen the sequence's
    /// next token. The scan comes last.
    fn may_guess(&self, sequence: &Sequence) -> bool {
        self.speculate == Speculate::Ngram
            && self.running.len() < MAX_ROWS
            && sequence.ahead.chosen() > 0
            && self.tokens_left(sequence) > 1 + sequence.ahead.chosen()
            && sequence.acceptance.chance() >= WORTH_A_WAIT
            && sequence.repeats_itself()
    }

    /// The running sequences that do not end with the steps under way, as far as is known.
    fn going_on(&self) -> impl Iterator<Item = &Sequence> {
        let goes_on = |it: &&Sequence| it.ahead.chosen() == 0 || self.tokens_left(it) > it.ahead.chosen();
        self.running.values().filter(goes_on)
    }

    /// Room for drafts, ahead of the tokens that may be there: of blocks that nobody needs now, and only one more than
    /// a sequence fills.
    fn fit_drafts(&self) -> Vec<(Seq, Decision)> {
        let drafts = self.speculate == Speculate::Ngram && self.under_way == 0 && self.running.len() < MAX_ROWS;
        if !drafts || !self.preempted.is_empty() {
            return Vec::new();
        }
        let spare = self.pool.free().saturating_sub(self.growing());
        let lacking = self.running.values().filter(|sequence| {
            let wanted = self.tokens_left(sequence).saturating_sub(1).min(MAX_DRAFTS);
            sequence.chosen && sequence.request.tokens.len() + wanted > sequence.request.lease.capacity_tokens()
        });
        lacking.take(spare).map(|sequence| (sequence.rank.1, Decision::Grow)).collect()
    }

    /// Adds to a planned step, of whose tokens `room` are left, what its sequences may go on with.
    fn add_drafts(&self, batch: &mut Batch, room: usize) {
        let shape = StepShape::of(batch);
        let rows = MAX_ROWS.saturating_sub(shape.decode_tokens).min(room);
        let mut budget = Budget::new(&self.cost, shape, shape.decode_tokens, rows);
        for item in &mut batch.items {
            let Some(sequence) = self.running.get(&item.seq).filter(|_| item.tokens == Tokens::Last) else { continue };
            let place = item.blocks.capacity_tokens() - item.end();
            let most = self.tokens_left(sequence).saturating_sub(1).min(place).min(MAX_DRAFTS);
            let chance = sequence.acceptance.chance();
            let drafts = draft(&sequence.request.tokens, budget.drafts(chance, most));
            budget.take(chance, drafts.len());
            if let Some(choose) = &mut item.choose {
                choose.drafts = sequence.drafts(drafts);
            }
        }
    }

    /// What the outcome of `batch` means for each of its sequences.
    pub fn resolve(&self, batch: &Batch, outcome: StepOutcome<'_>) -> Vec<(Seq, Decision)> {
        let items = &batch.items;
        let chosen = match outcome {
            Ok(chosen) if chosen.len() == items.len() => Ok(chosen),
            Ok(chosen) => {
                let why = format!("{} choices for the step's {} items", chosen.len(), items.len());
                Err(EngineError::Executor(why))
            }
            Err(error) => Err(error),
        };
        let decide = |index: usize, item: &BatchItem| {
            let sequence = self.running.get(&item.seq)?;
            let chosen = chosen.as_ref().map_err(EngineError::clone).map(|chosen| &chosen[index]);
            let decision = chosen.and_then(|chosen| self.advance(sequence, item, chosen));
            Some((item.seq, decision.unwrap_or_else(Decision::Fail)))
        };
        items.iter().enumerate().filter_map(|(index, item)| decide(index, item)).collect()
    }

    /// Carries decisions out. A sequence that ends is dropped here, and its hold on its lease with it.
    pub fn apply(&mut self, decisions: &[(Seq, Decision)]) {
        decisions.iter().for_each(|(seq, decision)| self.apply_one(*seq, decision));
        let kept = if self.preempted.is_empty() { self.growing() } else { self.pool.total() };
        self.pool.keep_free(kept);
    }

    fn apply_one(&mut self, seq: Seq, decision: &Decision) {
        if let Decision::Advance { computed, sampled, drafts, .. } = decision
            && let Some(sequence) = self.running.get_mut(&seq)
        {
            sequence.advance(*computed, sampled, *drafts);
            sequence.cache_blocks(*computed / self.block_tokens, self.block_tokens);
        }
        if decision.ends() {
            drop(self.leave_queue(seq).or_else(|| self.running.remove(&seq)));
            return;
        }
        match decision {
            Decision::Start => {
                if let Some(sequence) = self.leave_queue(seq) {
                    self.running.insert(seq, sequence);
                }
            }
            Decision::Grow => {
                // Should a reservation have been faster, the next round decides anew.
                let _ = self.running.get_mut(&seq).map(|sequence| KvLease::grow(&mut sequence.request.lease));
            }
            Decision::Preempt => self.preempt(seq),
            Decision::Resume => self.resume(seq),
            Decision::Advance { .. } | Decision::Cancel | Decision::Fail(_) => {}
        }
    }

    fn preempt(&mut self, seq: Seq) {
        debug_assert_eq!(self.under_way, 0, "a step under way keeps the blocks");
        let Some(mut sequence) = self.leave_queue(seq).or_else(|| self.running.remove(&seq)) else { return };
        sequence.give_up_blocks(&self.pool);
        self.preemptions += 1;
        self.preempted.insert(sequence.rank);
        self.waiting.insert(seq, sequence);
    }

    fn resume(&mut self, seq: Seq) {
        let lease = self.waiting.get(&seq).and_then(|sequence| {
            let (blocks, prefix) = sequence.wants_again(&self.pool);
            self.pool.take_again(blocks, prefix, self.growing())
        });
        debug_assert!(lease.is_some(), "reservations get nothing while a preempted sequence waits");
        let Some(lease) = lease else { return };
        let Some(mut sequence) = self.leave_queue(seq) else { return };
        sequence.request.computed = lease.cached_tokens();
        sequence.request.lease = Arc::new(lease);
        sequence.hashes = Vec::new();
        self.running.insert(seq, sequence);
    }

    /// Sequences that wait to start.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Of these, the ones that gave their blocks away.
    pub fn preempted(&self) -> usize {
        self.preempted.len()
    }

    /// How often a sequence has given its blocks away.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Sequences in the running batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Tokens known but not computed, over all sequences.
    pub fn queued_tokens(&self) -> usize {
        self.waiting.values().chain(self.running.values()).map(|sequence| sequence.request.queued_tokens()).sum()
    }

    /// Positions in the KV of the running sequences: what a step over all of them reads.
    pub fn running_tokens(&self) -> usize {
        self.running.values().map(|sequence| sequence.request.computed).sum()
    }

    fn leave_queue(&mut self, seq: Seq) -> Option<Sequence> {
        let sequence = self.waiting.remove(&seq)?;
        let _ = self.queue.remove(&sequence.rank) || self.preempted.remove(&sequence.rank);
        Some(sequence)
    }

    /// The first of the preempted, when there is room for it and for a block for each that runs.
    fn returning(&self) -> Option<Rank> {
        let &first = self.preempted.first()?;
        let (blocks, prefix) = self.waiting.get(&first.1)?.wants_again(&self.pool);
        self.pool.has_again(blocks, prefix, self.growing()).then_some(first)
    }

    /// Running sequences that may take further blocks.
    fn growing(&self) -> usize {
        let may_grow = |Sequence { request, given, .. }: &&Sequence| {
            let most = SequenceRequest::kv_tokens(*given, request.max_new_tokens, self.max_context_tokens);
            most > request.lease.capacity_tokens()
        };
        self.running.values().filter(may_grow).count()
    }

    fn last_with_blocks(&self) -> Option<Rank> {
        let running = self.running.values().map(|sequence| sequence.rank).max();
        running.max(self.queue.last().copied())
    }

    /// Tokens that the sequence may still have.
    fn tokens_left(&self, Sequence { request, given, .. }: &Sequence) -> usize {
        let most = given.saturating_add(request.max_new_tokens as usize).min(self.max_context_tokens);
        most.saturating_sub(request.tokens.len())
    }

    fn advance(&self, sequence: &Sequence, item: &BatchItem, chosen: &Chosen) -> Result<Decision, EngineError> {
        let computed = item.end();
        let chunk = item.start < sequence.given && sequence.told < sequence.given && computed > sequence.told;
        let wrong = |why: &str| Err(EngineError::Executor(why.into()));
        match (chosen, &item.choose) {
            (Chosen::Nothing, None) => {
                let (sampled, drafts) = (Vec::new(), Drafts::default());
                Ok(Decision::Advance { computed, chunk, sampled, drafts, finish: None })
            }
            (Chosen::Token(sampled), Some(choose)) if choose.drafts.is_empty() => {
                Ok(self.accept(sequence, item, chunk, std::slice::from_ref(sampled)))
            }
            (Chosen::Tokens(sampled), Some(choose)) if came_true(&choose.drafts, sampled) => {
                Ok(self.accept(sequence, item, chunk, sampled))
            }
            (Chosen::Token(_) | Chosen::Tokens(_), Some(_)) => wrong("the chosen tokens are not of the drafts"),
            (Chosen::NotNumbers, _) => wrong("what the step computed are not numbers"),
            (Chosen::Nothing, Some(_)) => wrong("no token was chosen"),
            (Chosen::Token(_) | Chosen::Tokens(_), None) => wrong("a token was chosen in the middle of a prompt"),
        }
    }

    /// The tokens that are the answer's: up to the first that ends it.
    fn accept(&self, sequence: &Sequence, item: &BatchItem, chunk: bool, chosen: &[Sampled]) -> Decision {
        let ends = chosen.iter().enumerate().find_map(|(before, sampled)| {
            let finish = self.finish(sequence, before, sampled.token)?;
            Some((before + 1, finish))
        });
        let (count, finish) = ends.map_or((chosen.len(), None), |(count, finish)| (count, Some(finish)));
        let accepted = count - 1;
        let drafts = Drafts { drafted: item.drafts().len() as u32, accepted: accepted as u32 };
        let (computed, sampled) = (item.end() + accepted, chosen[..count].to_vec());
        Decision::Advance { computed, chunk, sampled, drafts, finish }
    }

    /// Whether `token` is the last one, `before` tokens of the same step behind those that are known.
    fn finish(&self, Sequence { request, given, .. }: &Sequence, before: usize, token: u32) -> Option<FinishReason> {
        let is_eos = token == self.eos_token_id && !request.ignore_eos;
        let len = request.tokens.len() + before + 1;
        if is_eos || request.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if len - given >= request.max_new_tokens as usize || len >= self.max_context_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// Whether `sampled` is one token and drafts before it.
fn came_true(drafts: &[Draft], sampled: &[Sampled]) -> bool {
    let accepted = sampled.len().wrapping_sub(1);
    let tokens = sampled.iter().map(|sampled| sampled.token);
    accepted <= drafts.len() && tokens.zip(drafts).take(accepted).all(|(token, draft)| token == draft.token)
}

#[cfg(test)]
mod tests;
