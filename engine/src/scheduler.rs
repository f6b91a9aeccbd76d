//! Decides what each step computes: continuous batching, chunked prefill, several prompts' chunks beside the decode
//! tokens. A pure state machine: no clock, channel, thread or tensor; time is an argument. `engine.rs` runs it; a step
//! reads `admit → apply → plan → execute → resolve → apply`. Decisions are values; only [`Scheduler::apply`] changes
//! state, lets go of leases and caches blocks.
//!
//! A sequence arrives with a lease for the most it can come to hold, so that a running one never needs a block that is
//! not there: nothing is preempted ([`SequenceRequest`] says what that costs and why).
//!
//! **Order.** A level of priority is worth [`PLACES_A_LEVEL`] places in the queue of arrivals, and each later arrival
//! ages those before it by one place. So the order of two sequences never changes, and nothing starves: a sequence is
//! overtaken by at most `PLACES_A_LEVEL * 2 * MAX_PRIORITY` later ones. Sequences start in this order and their prompts
//! share a step's tokens in this order. Every running one that decodes is in every step, and since there are fewer of
//! them than tokens in a step (`max_running <= max_step_tokens`), the first that prefills is in every step too.
//!
//! **Cache.** A sequence's full blocks are cached when a step has ended in logits that are numbers. Such logits have
//! read the KV of all positions, so that broken KV is never shared; the inner chunks of a prompt are cached at its end.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::SequenceHash;
use tandem_proto::hash::sequence_hashes;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Choose, Chosen, EngineSpec, History, Seq, Tokens};
use crate::sampling::{Sampled, uniform};
use crate::sequence::{FinishReason, SequenceRequest};

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
    /// Its step succeeded.
    Advance {
        /// Tokens whose KV is in the lease now.
        computed: usize,
        /// Whether the step was over given tokens.
        chunk: bool,
        /// The token that follows them, when the step reached the end of the sequence.
        sampled: Option<Sampled>,
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
            Self::Start => false,
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
    /// Salt of the sequence hashes.
    model_digest: u64,
    waiting: BTreeMap<Seq, Sequence>,
    /// Those of `waiting`, in the order in which they start.
    queue: BTreeSet<Rank>,
    running: BTreeMap<Seq, Sequence>,
}

/// A place in the order: lower is first. Equal places go by arrival.
type Rank = (i64, Seq);

struct Sequence {
    /// `tokens` and `computed` grow with every step.
    request: SequenceRequest,
    /// Length of `tokens` on arrival.
    given: usize,
    rank: Rank,
    cached: Cached,
    /// Whether the last of `tokens` is what the executor chose in the sequence's last step, and has kept.
    chosen: bool,
    /// Tokens that may not be chosen before `min_tokens`; none where every number will do.
    ends: Option<Arc<[u32]>>,
}

/// How much of a sequence is in the prefix cache.
struct Cached {
    blocks: usize,
    /// Hash of the last of them, or the salt.
    hash: SequenceHash,
}

impl Scheduler {
    /// An empty scheduler.
    pub fn new(config: &SchedulerConfig, spec: &EngineSpec) -> Self {
        let max_step_tokens = config.max_step_tokens.max(1);
        Self {
            max_running: config.max_running.clamp(1, max_step_tokens),
            max_step_tokens,
            eos_token_id: spec.eos_token_id,
            max_context_tokens: spec.max_context_tokens,
            block_tokens: spec.block_tokens.max(1),
            model_digest: spec.model_digest,
            waiting: BTreeMap::new(),
            queue: BTreeSet::new(),
            running: BTreeMap::new(),
        }
    }

    /// Takes a validated request. The caller bounds how many wait.
    pub fn enqueue(&mut self, seq: Seq, request: SequenceRequest) {
        debug_assert!(self.waiting.keys().chain(self.running.keys()).all(|&other| other < seq));
        let given = request.tokens.len();
        let place = i64::try_from(seq).unwrap_or(i64::MAX).saturating_sub(i64::from(request.priority) * PLACES_A_LEVEL);
        let cached = Cached { blocks: 0, hash: self.model_digest };
        self.queue.insert((place, seq));
        let ends = (request.sampling.min_tokens > 0).then(|| request.ends(self.eos_token_id).collect());
        self.waiting.insert(seq, Sequence { request, given, rank: (place, seq), cached, chosen: false, ends });
    }

    /// Who leaves (`gone` by choice, or by deadline) and who starts.
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
        for (_, seq) in &self.queue {
            if let Some(decision) = self.waiting.get(seq).and_then(leaving) {
                decisions.push(decision);
            } else if room > 0 {
                room -= 1;
                decisions.push((*seq, Decision::Start));
            }
        }
        decisions
    }

    /// The next step: every sequence that decodes, then prefill chunks in order of rank while tokens are left in the
    /// budget. Empty exactly when nothing runs.
    pub fn plan(&self) -> Batch {
        let mut budget = self.max_step_tokens;
        let mut order: Vec<&Sequence> = self.running.values().collect();
        order.sort_unstable_by_key(|sequence| (sequence.request.queued_tokens() > 1, sequence.rank));
        let (mut items, mut report_layers) = (Vec::with_capacity(order.len()), BTreeSet::new());
        for sequence in order {
            let count = sequence.request.queued_tokens().min(budget);
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
        Batch { items, report_layers: report_layers.into_iter().collect() }
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

    /// Carries a decision out. A sequence that ends is dropped here, and its hold on its lease with it.
    pub fn apply(&mut self, seq: Seq, decision: &Decision) {
        if let Decision::Advance { computed, sampled: Some(_), .. } = decision
            && let Some(sequence) = self.running.get_mut(&seq)
        {
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
            Decision::Advance { computed, sampled, .. } => {
                if let Some(Sequence { request, chosen, .. }) = self.running.get_mut(&seq) {
                    request.computed = *computed;
                    request.tokens.extend(sampled.as_ref().map(|sampled| sampled.token));
                    *chosen = sampled.is_some();
                    debug_assert!(request.computed < request.tokens.len(), "a running sequence has a token to run");
                }
            }
            Decision::Cancel | Decision::Fail(_) => {}
        }
    }

    /// Sequences that wait to start.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
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
        self.queue.remove(&sequence.rank);
        Some(sequence)
    }

    fn advance(&self, sequence: &Sequence, item: &BatchItem, chosen: &Chosen) -> Result<Decision, EngineError> {
        let (computed, chunk) = (item.end(), item.start < sequence.given);
        let wrong = |why: &str| Err(EngineError::Executor(why.into()));
        match (chosen, &item.choose) {
            (Chosen::Nothing, None) => Ok(Decision::Advance { computed, chunk, sampled: None, finish: None }),
            (Chosen::Token(sampled), Some(_)) => {
                let finish = self.finish(sequence, sampled.token);
                Ok(Decision::Advance { computed, chunk, sampled: Some(sampled.clone()), finish })
            }
            (Chosen::NotNumbers, Some(_)) => wrong("the logits are not numbers"),
            (Chosen::Nothing, Some(_)) => wrong("no token was chosen"),
            (Chosen::Token(_) | Chosen::NotNumbers, None) => wrong("a token was chosen in the middle of a prompt"),
        }
    }

    fn finish(&self, Sequence { request, given, .. }: &Sequence, token: u32) -> Option<FinishReason> {
        let is_eos = token == self.eos_token_id && !request.ignore_eos;
        let len = request.tokens.len() + 1;
        if is_eos || request.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if len - given >= request.max_new_tokens as usize || len >= self.max_context_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

impl Sequence {
    /// Puts the blocks before index `full` into the cache that are not there yet.
    fn cache_blocks(&mut self, full: usize, block_tokens: usize) {
        let Cached { blocks, hash } = &mut self.cached;
        let tokens = self.request.tokens.get(*blocks * block_tokens..full * block_tokens).unwrap_or_default();
        let hashes = sequence_hashes(*hash, tokens, block_tokens);
        if let Some(&last) = hashes.last() {
            self.request.lease.publish(*blocks, &hashes);
            (*blocks, *hash) = (full, last);
        }
    }

    fn item(&self, count: usize) -> BatchItem {
        let (start, end) = (self.request.computed, self.request.computed + count);
        let last = self.chosen && count == 1;
        BatchItem {
            seq: self.rank.1,
            tokens: if last { Tokens::Last } else { Tokens::Given(self.request.tokens[start..end].to_vec()) },
            start,
            blocks: Arc::clone(&self.request.lease),
            choose: (end == self.request.tokens.len()).then(|| self.choose(start, last)),
        }
    }

    /// How to choose the token after all that are known, of which those from `start` on are computed.
    fn choose(&self, start: usize, last: bool) -> Choose {
        let SequenceRequest { tokens, prompt_len, sampling, .. } = &self.request;
        let too_short = tokens.len() - prompt_len < sampling.min_tokens as usize;
        let history = || History { tokens: tokens[..start].to_vec(), prompt_len: *prompt_len };
        Choose {
            sampling: Arc::clone(sampling),
            uniform: uniform(sampling.seed, tokens.len()),
            forbidden: self.ends.as_ref().filter(|_| too_short).cloned(),
            history: (sampling.penalizes() && !last).then(history),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::blocks::{BlockPool, Prefix};
    use crate::executor::Executor;
    use crate::sampling::SamplingParams;
    use crate::sequence::MAX_PRIORITY;
    use crate::simulated::{SimulatedConfig, SimulatedExecutor};

    const VOCAB: usize = 8;

    fn scheduler(max_running: usize, max_step_tokens: usize) -> Scheduler {
        let config = SimulatedConfig { vocab_size: VOCAB, eos_token_id: 7, blocks: 1, ..Default::default() };
        let executor = SimulatedExecutor::new(&config).unwrap();
        Scheduler::new(
            &SchedulerConfig { max_running, max_step_tokens, inbox: 0, prefix_caching: true },
            executor.spec(),
        )
    }

    fn request(pool: &BlockPool, len: usize, max_new_tokens: u32) -> SequenceRequest {
        SequenceRequest {
            id: String::new(),
            tokens: vec![1; len],
            prompt_len: len,
            computed: 0,
            lease: Arc::new(pool.try_reserve(pool.blocks_for(len + max_new_tokens as usize)).unwrap()),
            max_new_tokens,
            sampling: SamplingParams::GREEDY.into(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            deadline: None,
            priority: 0,
            report_layers: Vec::new(),
        }
    }

    fn apply(scheduler: &mut Scheduler, decisions: &[(Seq, Decision)]) {
        decisions.iter().for_each(|(seq, decision)| scheduler.apply(*seq, decision));
    }

    /// Every choice is token 3.
    fn three(batch: &Batch) -> Vec<Chosen> {
        let three = Chosen::Token(Sampled { token: 3, logprob: 0.0, top: Vec::new() });
        batch.items.iter().map(|item| item.choose.as_ref().map_or(Chosen::Nothing, |_| three.clone())).collect()
    }

    fn step(scheduler: &mut Scheduler, now: Instant) -> Vec<(Seq, Decision)> {
        let decisions = scheduler.admit(now, |_| false);
        apply(scheduler, &decisions);
        let batch = scheduler.plan();
        let chosen = three(&batch);
        let decisions = scheduler.resolve(&batch, Ok(&chosen));
        apply(scheduler, &decisions);
        decisions
    }

    proptest! {
        #[test]
        fn steps_keep_their_limits_and_everyone_ends(
            arrivals in prop::collection::vec((1usize..90, 1u32..12, 0usize..30, -2i32..3), 1..40),
            max_running in 1usize..6, max_step_tokens in 1usize..40, cancelled in prop::collection::btree_set(0u64..40, 0..6),
        ) {
            let (mut scheduler, now) = (scheduler(max_running, max_step_tokens), Instant::now());
            let pool = BlockPool::new(1000, 16);
            let work: usize = arrivals.iter().map(|(len, new, ..)| len + *new as usize).sum();
            let mut arrivals: Vec<_> = arrivals.into_iter().enumerate().collect();
            let (mut expected, mut ended) = (BTreeMap::<Seq, usize>::new(), BTreeSet::new());
            let mut next = 0;
            // Each step computes at least one token, and arrivals keep coming for 30 steps.
            for round in 0..work + 31 {
                arrivals.retain(|&(_, (len, new, at, priority))| {
                    if at > round { return true; }
                    scheduler.enqueue(next, SequenceRequest { priority, ..request(&pool, len, new) });
                    next += 1;
                    false
                });
                let decisions = scheduler.admit(now, |seq| round > 3 && cancelled.contains(&seq));
                ended.extend(decisions.iter().filter(|(_, decision)| decision.ends()).map(|(seq, _)| *seq));
                apply(&mut scheduler, &decisions);
                prop_assert!(scheduler.running() <= max_running);
                let batch = scheduler.plan();
                prop_assert!(batch.tokens() <= max_step_tokens);
                prop_assert_eq!(batch.items.is_empty(), scheduler.running() == 0);
                let members: BTreeSet<_> = batch.items.iter().map(|item| item.seq).collect();
                prop_assert_eq!(members.len(), batch.items.len(), "a sequence is in a step twice");
                for (&seq, sequence) in &scheduler.running {
                    let prefilling = scheduler.running.values().filter(|s| s.request.queued_tokens() > 1);
                    let first_prefill = prefilling.min_by_key(|s| s.rank).map(|s| s.rank.1);
                    let must = sequence.request.queued_tokens() == 1 || first_prefill == Some(seq);
                    prop_assert!(!must || members.contains(&seq), "{} starves", seq);
                }
                for item in &batch.items {
                    let start = expected.insert(item.seq, item.start + item.tokens.len()).unwrap_or(0);
                    prop_assert_eq!(item.start, start, "a token is skipped or computed twice");
                }
                let chosen = three(&batch);
                let decisions = scheduler.resolve(&batch, Ok(&chosen));
                ended.extend(decisions.iter().filter(|(_, decision)| decision.ends()).map(|(seq, _)| *seq));
                apply(&mut scheduler, &decisions);
            }
            prop_assert!(scheduler.is_idle());
            prop_assert_eq!(ended.len() as u64, next);
            prop_assert_eq!(pool.free(), 1000);
        }
    }

    #[test]
    fn a_long_prompt_is_not_starved_and_does_not_stall_decoding() {
        let (mut scheduler, pool, now) = (scheduler(4, 8), BlockPool::new(1000, 16), Instant::now());
        scheduler.enqueue(0, request(&pool, 1, 100));
        scheduler.enqueue(1, request(&pool, 70, 1));
        for seq in 2..20 {
            scheduler.enqueue(seq, request(&pool, 30, 1));
        }
        let steps_of_one = std::iter::from_fn(|| Some(step(&mut scheduler, now)))
            .take_while(|decisions| {
                assert!(decisions.iter().any(|(seq, _)| *seq == 0), "the decoding one waited");
                !decisions.iter().any(|(seq, decision)| *seq == 1 && decision.ends())
            })
            .count();
        assert_eq!(steps_of_one, 9, "ten steps of 7 tokens each, beside the one that decodes");
    }

    proptest! {
        /// One arrival a step, one place to run: the worst that can be done to those who wait.
        #[test]
        fn priorities_order_starts_and_nobody_is_overtaken_for_ever(
            priorities in prop::collection::vec(prop_oneof![Just(-MAX_PRIORITY), Just(MAX_PRIORITY), -3i32..3], 1..900),
        ) {
            let (mut scheduler, pool, now) = (scheduler(1, 8), BlockPool::new(2000, 16), Instant::now());
            let mut started: Vec<Seq> = Vec::new();
            let count = priorities.len();
            let mut arrivals = priorities.iter().zip(0..);
            for _ in 0..2 * count + 2 {
                for (&priority, seq) in arrivals.by_ref().take(2) {
                    scheduler.enqueue(seq, SequenceRequest { priority, ..request(&pool, 1, 1) });
                }
                let decisions = scheduler.admit(now, |_| false);
                started.extend(decisions.iter().filter(|(_, what)| *what == Decision::Start).map(|(seq, _)| *seq));
                apply(&mut scheduler, &decisions);
                let batch = scheduler.plan();
                let chosen = three(&batch);
                let decisions = scheduler.resolve(&batch, Ok(&chosen));
                apply(&mut scheduler, &decisions);
            }
            prop_assert_eq!(started.len(), count);
            let (priority, bound) = (|seq: Seq| i64::from(priorities[seq as usize]), PLACES_A_LEVEL);
            for (at, &seq) in started.iter().enumerate() {
                let overtakers = started[..at].iter().filter(|&&other| other > seq);
                for &other in overtakers {
                    let allowed = (priority(other) - priority(seq)) * bound;
                    prop_assert!((other - seq) as i64 <= allowed, "{} overtook {}", other, seq);
                }
            }
        }
    }

    #[test]
    fn a_step_mixes_decode_tokens_and_the_chunks_of_several_prompts() {
        let (mut scheduler, pool, now) = (scheduler(8, 32), BlockPool::new(1000, 16), Instant::now());
        scheduler.enqueue(0, request(&pool, 1, 100));
        step(&mut scheduler, now);
        for (seq, priority) in [(1, 0), (2, 0), (3, 1), (4, 0)] {
            scheduler.enqueue(seq, SequenceRequest { priority, ..request(&pool, 10, 9) });
        }
        let decisions = scheduler.admit(now, |_| false);
        apply(&mut scheduler, &decisions);
        let items: Vec<_> = scheduler.plan().items.iter().map(|item| (item.seq, item.tokens.len())).collect();
        assert_eq!(items, [(0, 1), (3, 10), (1, 10), (2, 10), (4, 1)], "the budget is used to the last token");
    }

    #[test]
    fn blocks_are_cached_when_logits_have_vouched_for_them() {
        let (mut scheduler, pool, now) = (scheduler(1, 32), BlockPool::new(100, 16), Instant::now());
        scheduler.enqueue(0, request(&pool, 70, 40));
        let hashes = sequence_hashes(SimulatedConfig::default().identity, &[1; 70], 16);
        let cached = |tokens| {
            let lease = pool.try_reserve_prefix(5, Prefix { hashes: &hashes, tokens }).unwrap();
            lease.cached_tokens()
        };
        let seen: Vec<_> = (0..3)
            .map(|_| {
                step(&mut scheduler, now);
                cached(80)
            })
            .collect();
        assert_eq!(seen, [0, 0, 64], "four full blocks, at the end of the prompt");
        let known: Vec<u32> = [vec![1; 70], vec![3; 31]].concat();
        let hashes = sequence_hashes(SimulatedConfig::default().identity, &known, 16);
        for _ in 0..30 {
            step(&mut scheduler, now);
        }
        let lease = pool.try_reserve_prefix(7, Prefix { hashes: &hashes, tokens: 101 }).unwrap();
        assert_eq!(lease.cached_tokens(), 96, "the answer's blocks follow as they fill");
    }

    #[test]
    fn broken_logits_cache_nothing() {
        let (mut scheduler, pool, now) = (scheduler(1, 80), BlockPool::new(100, 16), Instant::now());
        scheduler.enqueue(0, request(&pool, 70, 1));
        let decisions = scheduler.admit(now, |_| false);
        apply(&mut scheduler, &decisions);
        let batch = scheduler.plan();
        let decisions = scheduler.resolve(&batch, Ok(&[Chosen::NotNumbers]));
        drop(batch);
        apply(&mut scheduler, &decisions);
        assert_eq!((pool.free(), pool.cached()), (100, 0));
    }

    #[test]
    fn deadlines_count_in_the_queue_and_in_the_batch() {
        let (mut scheduler, pool, now) = (scheduler(1, 8), BlockPool::new(100, 16), Instant::now());
        let later = now + Duration::from_secs(1);
        for seq in 0..3 {
            let deadline = (seq < 2).then_some(later);
            scheduler.enqueue(seq, SequenceRequest { deadline, ..request(&pool, 4, 9) });
        }
        assert_eq!(scheduler.admit(now, |_| false), [(0, Decision::Start)]);
        step(&mut scheduler, now);
        let expired = Decision::Fail(EngineError::DeadlineExceeded);
        let expected = [(0, expired.clone()), (1, expired), (2, Decision::Start)];
        assert_eq!(scheduler.admit(later, |_| false), expected);
    }

    #[test]
    fn a_wrong_outcome_fails_the_step_and_not_the_others() {
        type Outcome = Result<Vec<Chosen>, EngineError>;
        let broken: [fn(&Batch) -> Outcome; 5] = [
            |_| Ok(Vec::new()),
            |_| Err(EngineError::Executor("broken".into())),
            |_| Ok(vec![Chosen::Nothing]),
            |batch| Ok([three(batch), three(batch)].concat()),
            |_| Ok(vec![Chosen::NotNumbers]),
        ];
        for broken in broken {
            let (mut scheduler, pool, now) = (scheduler(1, 8), BlockPool::new(100, 16), Instant::now());
            scheduler.enqueue(0, request(&pool, 4, 9));
            scheduler.enqueue(1, request(&pool, 4, 9));
            let decisions = scheduler.admit(now, |_| false);
            apply(&mut scheduler, &decisions);
            let batch = scheduler.plan();
            let outcome = broken(&batch);
            let decisions = scheduler.resolve(&batch, outcome.as_deref().map_err(EngineError::clone));
            assert!(matches!(decisions[..], [(0, Decision::Fail(EngineError::Executor(_)))]), "{decisions:?}");
            apply(&mut scheduler, &decisions);
            assert_eq!((scheduler.running(), scheduler.waiting()), (0, 1));
        }
    }
}
