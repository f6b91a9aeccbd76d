//! The first steps of an engine, before there is work: they bring the weights into memory, so that no request waits for
//! the disk, and they teach the step model, so that whoever plans does not begin with a guess. A model that cannot
//! compute shows it here, and not in somebody's request. No sequence and no cached block comes of them.
//!
//! **What is learnt.** Steps of a few kinds run in rounds. The first round, of the small kinds alone, touches memory,
//! starts threads and wakes the processor: it does not count. Of the others each kind's shortest step counts, as
//! whatever else runs on the machine only makes a step longer. A kind is left out once its shortest time was seen
//! twice, and rounds end when all are.
use std::sync::Arc;
use std::time::Duration;

use crate::blocks::BlockPool;
use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Choose, EngineSpec, Seq, Tokens};
use crate::sampling::SamplingParams;

/// Tokens of the longest prompt. Enough to tell the cost of a token from that of a step, and no more: prompts are most
/// of a warm-up's time.
const PROMPT: usize = 96;
/// Where a part of a prompt ends that has others before it. Enough to tell the cost of what is attended to from that of
/// a token: predictions for long prompts hang on it.
const CONTEXT: usize = 2048;
/// Sequences that decode together.
pub(super) const DECODING: usize = 8;
/// Rounds at most.
const MOST_ROUNDS: usize = 8;
/// No further round begins after so much time in steps: a large model's second round must do.
const MOST_TIME: Duration = Duration::from_secs(10);
/// Times so near to each other are the same.
const ALIKE: f64 = 1.1;

/// Prompts of two lengths, a part of a long one; many sequences that decode, and one with and without a context: each
/// term of the step model has steps that differ in it. Smaller where the pool or a step
/// has no room for these. What the parts before a position would have computed is whatever the memory holds.
///
/// # Errors
/// `Overloaded` when the pool has no block left for it.
pub(super) fn kinds(pool: &BlockPool, spec: &EngineSpec, max_step_tokens: usize) -> Result<Vec<Batch>, EngineError> {
    let decoding = DECODING.min(max_step_tokens).min(pool.free() / 2).max(1);
    let room = pool.free().saturating_sub(decoding).max(1) * pool.block_tokens();
    let context = CONTEXT.min(room).min(spec.max_context_tokens).max(1);
    let tokens = PROMPT.min(max_step_tokens).min(context).max(1);
    let long = Arc::new(pool.try_reserve(pool.blocks_for(context))?);
    let short: Vec<_> = (0..decoding).map(|_| pool.try_reserve(1).map(Arc::new)).collect::<Result<_, _>>()?;

    let sampling = Arc::new(SamplingParams::GREEDY);
    let item = |seq: usize, start: usize, tokens: usize, blocks: &Arc<_>| BatchItem {
        // No sequence of the engine has such a number, which counts from below.
        seq: Seq::MAX - seq as Seq,
        tokens: Tokens::Given((0..tokens).map(|token| (token % spec.vocab_size) as u32).collect()),
        start,
        blocks: Arc::clone(blocks),
        choose: Some(Choose {
            sampling: Arc::clone(&sampling),
            uniform: 0.0,
            forbidden: None,
            history: None,
            drafts: Vec::new(),
        }),
    };
    let of = |items| Batch { items, report_layers: Vec::new() };
    let one = |tokens: usize, end: usize| of(vec![item(0, end - tokens, tokens, &long)]);
    let many = short.iter().enumerate().map(|(seq, blocks)| item(seq, 0, 1, blocks)).collect();
    let quarter = tokens.div_ceil(4);
    let prompts = [one(tokens, tokens), one(quarter, quarter), one(tokens.div_ceil(2), context)];
    Ok(prompts.into_iter().chain([of(many), one(1, context), one(1, 1)]).collect())
}

/// What the steps of each kind took, round after round. Pure.
pub(super) struct Rounds {
    /// Of the rounds that count, by kind.
    took: Vec<Vec<Duration>>,
    begun: usize,
    spent: Duration,
}

impl Rounds {
    pub fn of(kinds: usize) -> Self {
        Self { took: vec![Vec::new(); kinds], begun: 0, spent: Duration::ZERO }
    }

    /// Whether another round is worth its time; it begins then.
    pub fn next(&mut self) -> bool {
        let enough = match self.begun {
            0 | 1 => self.took.is_empty(),
            begun => begun == MOST_ROUNDS || self.spent >= MOST_TIME || self.took.iter().all(|took| is_sure(took)),
        };
        self.begun += usize::from(!enough);
        !enough
    }

    /// Whether the present round counts. One that does not is for the memory, the threads and the clock: it can do with
    /// the kinds of few tokens, which touch all weights as well.
    pub fn counts(&self) -> bool {
        self.begun > 1
    }

    /// Whether a step of this kind has something to teach yet, in a round that counts.
    pub fn wants(&self, kind: usize) -> bool {
        !is_sure(&self.took[kind])
    }

    /// A step of this kind took so long.
    pub fn note(&mut self, kind: usize, took: Duration) {
        self.spent += took;
        if self.counts() {
            self.took[kind].push(took);
        }
    }

    /// What a step of each kind takes.
    pub fn learnt(&self) -> impl Iterator<Item = Duration> {
        self.took.iter().filter_map(|took| took.iter().min().copied())
    }
}

/// Whether the shortest time was seen twice.
fn is_sure(took: &[Duration]) -> bool {
    let shortest = took.iter().min().map_or(0.0, Duration::as_secs_f64);
    took.iter().filter(|took| took.as_secs_f64() <= ALIKE * shortest).count() >= 2
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::step_model::{StepCost, StepModel, StepShape};
    use crate::{Executor, SimulatedConfig, SimulatedExecutor};

    const LAW: StepCost =
        StepCost { base_ms: 16.0, decode_token_ms: 0.5, decode_context_ms: 0.002, token_ms: 1.0, context_ms: 0.001 };

    /// Rounds in which a step takes `factor(round, kind)` times what it should; how many there were, and predictions of
    /// prompts and of decode steps as parts of what these take.
    fn warmed(factor: impl Fn(usize, usize) -> f64) -> (usize, Vec<f64>) {
        let decode =
            |decode_tokens, decode_context| StepShape { decode_tokens, decode_context, ..StepShape::default() };
        let prompts = [StepShape::prompt(0, 256), StepShape::prompt(0, 64), StepShape::prompt(1920, 128)];
        let decodes = [decode(8, 8), decode(1, 2048), decode(1, 1)];
        let kinds = [prompts, decodes].concat();
        let (mut rounds, mut model, mut count) = (Rounds::of(kinds.len()), StepModel::default(), 0);
        while rounds.next() {
            for (kind, shape) in kinds.iter().copied().enumerate() {
                if !rounds.wants(kind) {
                    continue;
                }
                let ms = LAW.predict_ms(shape) * factor(count, kind);
                rounds.note(kind, Duration::from_secs_f64(ms / 1e3));
            }
            count += 1;
        }
        for (shape, took) in kinds.into_iter().zip(rounds.learnt()) {
            model.observe(shape, took.as_secs_f64() * 1e3);
        }
        let prompts = [32, 64, 120, 200, 300, 400].map(|tokens| StepShape::prompt(0, tokens));
        let wanted = prompts.into_iter().chain([decode(1, 500), decode(4, 4000), decode(8, 2000)]);
        (count, wanted.map(|shape| model.cost().predict_ms(shape) / LAW.predict_ms(shape)).collect())
    }

    #[test]
    fn a_slow_beginning_is_not_believed() {
        for slow in [3.0, 1.7] {
            let noise = |round: usize, kind: usize| 1.0 + 0.02 * ((round * 3 + kind) % 4) as f64;
            let (rounds, ratios) = warmed(|round, kind| noise(round, kind) * if round == 0 { slow } else { 1.0 });
            assert_eq!(rounds, 3);
            assert!(ratios.iter().all(|ratio| (0.85..1.15).contains(ratio)), "{ratios:?}");
            // A neighbour that computes for three rounds, and is not the same in any two of them.
            let busy = |round: usize| [slow, 2.6, 2.1, 1.7].get(round).copied().unwrap_or(1.0);
            let (rounds, ratios) = warmed(|round, kind| noise(round, kind) * busy(round));
            assert!((5..=MOST_ROUNDS).contains(&rounds), "{rounds}");
            assert!(ratios.iter().all(|ratio| (0.85..1.15).contains(ratio)), "{ratios:?}");
        }
    }

    #[test]
    fn rounds_come_to_an_end() {
        assert_eq!(warmed(|round, kind| 1e-3 * (1 + round * 7 + kind * 3) as f64).0, MOST_ROUNDS);
        // A model so large that a round takes longer than all may: the first does not count, the second must do.
        let (rounds, ratios) = warmed(|_, _| 100.0);
        assert!(rounds == 2 && ratios.iter().all(|ratio| (99.0..101.0).contains(ratio)), "{rounds} {ratios:?}");
        assert!(!Rounds::of(0).next());
    }

    proptest! {
        #[test]
        fn steps_fit_whatever_the_engine_has(free in 0usize..64, step in 0usize..600, context in 1usize..2000) {
            let executor = SimulatedExecutor::new(&SimulatedConfig::default()).unwrap();
            let spec = EngineSpec { max_context_tokens: context, ..executor.spec().clone() };
            let pool = BlockPool::new(free, spec.block_tokens);
            if let Ok(batches) = kinds(&pool, &spec, step) {
                for item in batches.iter().flat_map(|batch| &batch.items) {
                    prop_assert!(item.end() <= context.min(item.blocks.capacity_tokens()) && item.tokens.len() > 0);
                }
                prop_assert!(batches.iter().all(|batch| batch.tokens() <= step.max(1)));
            } else {
                prop_assert!(free < 2);
            }
            prop_assert_eq!((pool.free(), pool.cached()), (free, 0));
        }
    }
}
