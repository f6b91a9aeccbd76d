//! Decides what each step computes: first come, first served, continuous batching, chunked prefill. A pure state
//! machine: no clock, channel, thread or tensor; time is an argument. `engine.rs` runs it; a step reads
//! `admit → apply → plan → execute → resolve → apply`. Decisions are values; only [`Scheduler::apply`] changes state.
//!
//! A sequence arrives with a lease for the most it can come to hold, so that a running one never needs a block that is
//! not there: nothing is preempted. Nothing starves: sequences start in order, every running one that decodes
//! is in every step, and since there are fewer of them than tokens in a step (`max_running <= max_step_tokens`),
//! the first that prefills is in every step too.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, EngineSpec};
use crate::sampler::{self, Sampled};
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
}

/// Names a sequence; later arrivals have larger numbers.
pub type Seq = u64;

/// What one executor call gives: logits for each item that wants them.
pub type StepOutcome = Result<Vec<Option<Vec<f32>>>, EngineError>;

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
    vocab_size: usize,
    eos_token_id: u32,
    max_context_tokens: usize,
    /// Both are ordered by arrival.
    waiting: BTreeMap<Seq, Sequence>,
    running: BTreeMap<Seq, Sequence>,
}

struct Sequence {
    /// `tokens` and `computed` grow with every step.
    request: SequenceRequest,
    /// Length of `tokens` on arrival.
    given: usize,
}

impl Scheduler {
    /// An empty scheduler.
    pub fn new(config: &SchedulerConfig, spec: &EngineSpec) -> Self {
        let max_step_tokens = config.max_step_tokens.max(1);
        Self {
            max_running: config.max_running.clamp(1, max_step_tokens),
            max_step_tokens,
            vocab_size: spec.vocab_size,
            eos_token_id: spec.eos_token_id,
            max_context_tokens: spec.max_context_tokens,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
        }
    }

    /// Takes a validated request. The caller bounds how many wait.
    pub fn enqueue(&mut self, seq: Seq, request: SequenceRequest) {
        debug_assert!(self.waiting.keys().chain(self.running.keys()).all(|&other| other < seq));
        let given = request.tokens.len();
        self.waiting.insert(seq, Sequence { request, given });
    }

    /// Who leaves (`gone` by choice, or by deadline) and who starts.
    pub fn admit(&self, now: Instant, gone: impl Fn(Seq) -> bool) -> Vec<(Seq, Decision)> {
        let leaving = |(&seq, sequence): (&Seq, &Sequence)| {
            let expired = sequence.request.deadline.is_some_and(|deadline| deadline <= now);
            if gone(seq) {
                Some((seq, Decision::Cancel))
            } else {
                expired.then_some((seq, Decision::Fail(EngineError::DeadlineExceeded)))
            }
        };
        let mut decisions: Vec<_> = self.running.iter().filter_map(leaving).collect();
        let mut room = self.max_running - (self.running.len() - decisions.len());
        for entry in &self.waiting {
            if let Some(decision) = leaving(entry) {
                decisions.push(decision);
            } else if room > 0 {
                room -= 1;
                decisions.push((*entry.0, Decision::Start));
            }
        }
        decisions
    }

    /// The next step: every sequence that decodes, then prefill chunks in order of arrival while tokens are left in
    /// the budget. Empty exactly when nothing runs.
    pub fn plan(&self) -> Batch {
        let mut budget = self.max_step_tokens;
        let decoding = self.running.iter().filter(|(_, sequence)| sequence.request.queued_tokens() == 1);
        let prefilling = self.running.iter().filter(|(_, sequence)| sequence.request.queued_tokens() > 1);
        let mut items = Vec::with_capacity(self.running.len());
        for (&seq, sequence) in decoding.chain(prefilling) {
            let count = sequence.request.queued_tokens().min(budget);
            if count == 0 {
                break;
            }
            budget -= count;
            items.push(sequence.item(seq, count));
        }
        Batch { items }
    }

    /// What the outcome of `batch` means for each of its sequences. Lets go of the batch's hold on their leases.
    pub fn resolve(&self, batch: Batch, outcome: StepOutcome) -> Vec<(Seq, Decision)> {
        let items = batch.items.into_iter();
        let wrong_count = |got| format!("logits for {got} of the step's {} items", items.len());
        let logits = match outcome {
            Ok(logits) if logits.len() == items.len() => logits,
            Ok(logits) => {
                let error = EngineError::Executor(wrong_count(logits.len()));
                return items.map(|item| (item.seq, Decision::Fail(error.clone()))).collect();
            }
            Err(error) => return items.map(|item| (item.seq, Decision::Fail(error.clone()))).collect(),
        };
        let decide = |(item, logits): (BatchItem, Option<Vec<f32>>)| {
            let sequence = self.running.get(&item.seq)?;
            let decision = self.advance(sequence, &item, logits).unwrap_or_else(Decision::Fail);
            Some((item.seq, decision))
        };
        items.zip(logits).filter_map(decide).collect()
    }

    /// Carries a decision out. A sequence that ends is dropped here, and its hold on its lease with it.
    pub fn apply(&mut self, seq: Seq, decision: &Decision) {
        if decision.ends() {
            drop(self.waiting.remove(&seq).or_else(|| self.running.remove(&seq)));
            return;
        }
        match decision {
            Decision::Start => {
                if let Some(sequence) = self.waiting.remove(&seq) {
                    self.running.insert(seq, sequence);
                }
            }
            Decision::Advance { computed, sampled, .. } => {
                if let Some(Sequence { request, .. }) = self.running.get_mut(&seq) {
                    request.computed = *computed;
                    request.tokens.extend(sampled.as_ref().map(|sampled| sampled.token));
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

    fn advance(
        &self,
        sequence: &Sequence,
        item: &BatchItem,
        logits: Option<Vec<f32>>,
    ) -> Result<Decision, EngineError> {
        let (computed, chunk) = (item.start + item.tokens.len(), item.start < sequence.given);
        if !item.wants_logits {
            return Ok(Decision::Advance { computed, chunk, sampled: None, finish: None });
        }
        let logits = logits.filter(|logits| logits.len() == self.vocab_size);
        let logits = logits.ok_or_else(|| EngineError::Executor("no logits over the vocabulary".into()))?;
        // Broken weights or KV must not become fluent nonsense; minus infinity is a masked token.
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(EngineError::Executor("the logits are not numbers".into()));
        }
        let request = &sequence.request;
        let sampled = sampler::sample(&request.sampling, &request.past(self.eos_token_id), &logits);
        let finish = self.finish(sequence, sampled.token);
        Ok(Decision::Advance { computed, chunk, sampled: Some(sampled), finish })
    }

    fn finish(&self, Sequence { request, given }: &Sequence, token: u32) -> Option<FinishReason> {
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
    fn item(&self, seq: Seq, count: usize) -> BatchItem {
        let (start, end) = (self.request.computed, self.request.computed + count);
        BatchItem {
            seq,
            tokens: self.request.tokens[start..end].to_vec(),
            start,
            blocks: Arc::clone(&self.request.lease),
            wants_logits: end == self.request.tokens.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::blocks::BlockPool;
    use crate::executor::Executor;
    use crate::sampler::SamplingParams;
    use crate::simulated::{SimulatedConfig, SimulatedExecutor};

    const VOCAB: usize = 8;

    fn scheduler(max_running: usize, max_step_tokens: usize) -> Scheduler {
        let config = SimulatedConfig { vocab_size: VOCAB, eos_token_id: 7, blocks: 1, ..Default::default() };
        let executor = SimulatedExecutor::new(&config).unwrap();
        Scheduler::new(&SchedulerConfig { max_running, max_step_tokens, inbox: 0 }, executor.spec())
    }

    fn request(pool: &BlockPool, len: usize, max_new_tokens: u32) -> SequenceRequest {
        SequenceRequest {
            id: String::new(),
            tokens: vec![1; len],
            prompt_len: len,
            computed: 0,
            lease: Arc::new(pool.try_reserve(pool.blocks_for(len + max_new_tokens as usize)).unwrap()),
            max_new_tokens,
            sampling: SamplingParams::GREEDY,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            deadline: None,
        }
    }

    fn apply(scheduler: &mut Scheduler, decisions: &[(Seq, Decision)]) {
        decisions.iter().for_each(|(seq, decision)| scheduler.apply(*seq, decision));
    }

    /// Logits whose greatest is `token`.
    fn logits(batch: &Batch, token: usize) -> StepOutcome {
        let one_hot = || (0..VOCAB).map(|id| f32::from(u8::from(id == token))).collect();
        Ok(batch.items.iter().map(|item| item.wants_logits.then(one_hot)).collect())
    }

    fn step(scheduler: &mut Scheduler, now: Instant) -> Vec<(Seq, Decision)> {
        let decisions = scheduler.admit(now, |_| false);
        apply(scheduler, &decisions);
        let batch = scheduler.plan();
        let outcome = logits(&batch, 3);
        let decisions = scheduler.resolve(batch, outcome);
        apply(scheduler, &decisions);
        decisions
    }

    proptest! {
        #[test]
        fn steps_keep_their_limits_and_everyone_ends(
            arrivals in prop::collection::vec((1usize..90, 1u32..12, 0usize..30), 1..40),
            max_running in 1usize..6, max_step_tokens in 1usize..40, cancelled in prop::collection::btree_set(0u64..40, 0..6),
        ) {
            let (mut scheduler, now) = (scheduler(max_running, max_step_tokens), Instant::now());
            let pool = BlockPool::new(1000, 16);
            let work: usize = arrivals.iter().map(|(len, new, _)| len + *new as usize).sum();
            let mut arrivals: Vec<_> = arrivals.into_iter().enumerate().collect();
            let (mut expected, mut ended) = (BTreeMap::<Seq, usize>::new(), BTreeSet::new());
            let mut next = 0;
            // Each step computes at least one token, and arrivals keep coming for 30 steps.
            for round in 0..work + 31 {
                arrivals.retain(|&(_, (len, new, at))| {
                    if at > round { return true; }
                    scheduler.enqueue(next, request(&pool, len, new));
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
                    let first_prefill = scheduler.running.iter().find(|(_, s)| s.request.queued_tokens() > 1);
                    let must = sequence.request.queued_tokens() == 1 || first_prefill.is_some_and(|(&s, _)| s == seq);
                    prop_assert!(!must || members.contains(&seq), "{} starves", seq);
                }
                for item in &batch.items {
                    let start = expected.insert(item.seq, item.start + item.tokens.len()).unwrap_or(0);
                    prop_assert_eq!(item.start, start, "a token is skipped or computed twice");
                }
                let outcome = logits(&batch, 3);
                let decisions = scheduler.resolve(batch, outcome);
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
        let broken: [fn(&Batch) -> StepOutcome; 5] = [
            |_| Ok(Vec::new()),
            |_| Err(EngineError::Executor("broken".into())),
            |batch| Ok(vec![None; batch.items.len()]),
            |batch| Ok(vec![Some(vec![0.0; VOCAB + 1]); batch.items.len()]),
            |batch| Ok(vec![Some(vec![f32::NAN; VOCAB]); batch.items.len()]),
        ];
        for broken in broken {
            let (mut scheduler, pool, now) = (scheduler(1, 8), BlockPool::new(100, 16), Instant::now());
            scheduler.enqueue(0, request(&pool, 4, 9));
            scheduler.enqueue(1, request(&pool, 4, 9));
            let decisions = scheduler.admit(now, |_| false);
            apply(&mut scheduler, &decisions);
            let batch = scheduler.plan();
            let outcome = broken(&batch);
            let decisions = scheduler.resolve(batch, outcome);
            assert!(matches!(decisions[..], [(0, Decision::Fail(EngineError::Executor(_)))]), "{decisions:?}");
            apply(&mut scheduler, &decisions);
            assert_eq!((scheduler.running(), scheduler.waiting()), (0, 1));
        }
    }
}
