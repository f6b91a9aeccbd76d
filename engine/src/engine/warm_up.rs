//! The first steps of an engine, before there is work: they bring the weights into memory, so that no request waits for the
//! disk, and they teach the step model, so that whoever plans does not begin with a guess. A model that cannot compute shows
//! it here, and not in somebody's request. No sequence and no cached block comes of them.
use std::sync::Arc;

use crate::blocks::BlockPool;
use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, EngineSpec};

/// Tokens of the longest prompt. Enough to tell the cost of a token from that of a step.
const PROMPT: usize = 256;
/// Where a part of a prompt ends that has others before it. Enough to tell the cost of what is attended to from that of a token:
/// predictions for long prompts hang on it.
const CONTEXT: usize = 2048;
/// Sequences that decode together.
const DECODING: usize = 8;
/// The first time a step's memory is touched does not count: each kind of step is run so often.
const ROUNDS: usize = 2;

/// Prompts of two lengths, a part of a long one, many sequences that decode, and one. Smaller where the pool or a step has no
/// room for these. What the parts before a position would have computed is whatever the memory holds.
///
/// # Errors
/// `Overloaded` when the pool has no block left for it.
pub(super) fn batches(pool: &BlockPool, spec: &EngineSpec, max_step_tokens: usize) -> Result<Vec<Batch>, EngineError> {
    let decoding = DECODING.min(max_step_tokens).min(pool.free() / 2).max(1);
    let room = pool.free().saturating_sub(decoding).max(1) * pool.block_tokens();
    let context = CONTEXT.min(room).min(spec.max_context_tokens).max(1);
    let tokens = PROMPT.min(max_step_tokens).min(context).max(1);
    let long = Arc::new(pool.try_reserve(pool.blocks_for(context))?);
    let short: Vec<_> = (0..decoding).map(|_| pool.try_reserve(1).map(Arc::new)).collect::<Result<_, _>>()?;

    let item = |seq: usize, start: usize, tokens: usize, blocks: &Arc<_>| BatchItem {
        seq: seq as u64,
        tokens: (0..tokens).map(|token| (token % spec.vocab_size) as u32).collect(),
        start,
        blocks: Arc::clone(blocks),
        wants_logits: true,
    };
    let of = |items| Batch { items };
    let one = |tokens: usize, end: usize| of(vec![item(0, end - tokens, tokens, &long)]);
    let many = short.iter().enumerate().map(|(seq, blocks)| item(seq, 0, 1, blocks)).collect();
    let quarter = tokens.div_ceil(4);
    let kinds =
        [one(tokens, tokens), one(quarter, quarter), one(tokens.div_ceil(2), context), of(many), one(1, context)];
    Ok(std::iter::repeat_n(kinds, ROUNDS).flatten().collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Executor, SimulatedConfig, SimulatedExecutor};

    proptest! {
        #[test]
        fn steps_fit_whatever_the_engine_has(free in 0usize..64, step in 0usize..600, context in 1usize..2000) {
            let executor = SimulatedExecutor::new(&SimulatedConfig::default()).unwrap();
            let spec = EngineSpec { max_context_tokens: context, ..executor.spec().clone() };
            let pool = BlockPool::new(free, spec.block_tokens);
            if let Ok(batches) = batches(&pool, &spec, step) {
                for item in batches.iter().flat_map(|batch| &batch.items) {
                    let end = item.start + item.tokens.len();
                    prop_assert!(end <= context.min(item.blocks.capacity_tokens()) && !item.tokens.is_empty());
                }
                prop_assert!(batches.iter().all(|batch| batch.tokens() <= step.max(1)));
            } else {
                prop_assert!(free < 2);
            }
            prop_assert_eq!((pool.free(), pool.cached()), (free, 0));
        }
    }
}
