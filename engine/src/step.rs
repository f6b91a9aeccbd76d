//! A step as executors compute it: the tokens of all sequences stacked into rows, and for each row where it stands and
//! where its K and V go. The same for every device. It is also where a batch is checked against the model's limits and
//! the arena, so that no kernel has to.
use std::collections::HashSet;

use crate::error::EngineError;
use crate::executor::{Batch, BatchItem, Draft, EngineSpec, Tokens};

/// A step's tokens, all sequences stacked. Its memory is kept from step to step.
#[derive(Debug, Default)]
pub struct Step {
    /// One a row.
    pub tokens: Vec<u32>,
    /// Of each row in its sequence.
    pub positions: Vec<usize>,
    /// Where each row's K and V go.
    pub places: Vec<Place>,
    /// The sequences' blocks.
    pub blocks: Vec<u32>,
    /// Which rows and which blocks are of one sequence: one for each item.
    pub chunks: Vec<Chunk>,
    /// Rows whose logits are wanted; ascending.
    pub logits_of: Vec<usize>,
    /// After how many layers somebody waits.
    pub report_layers: Vec<usize>,
    /// Blocks that it writes.
    written: HashSet<u32>,
}

/// Where a token's KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Arena block.
    pub block: u32,
    /// Token within it.
    pub slot: usize,
}

/// The rows of a step that belong to one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// First of the sequence's blocks in [`Step::blocks`].
    pub first_block: usize,
    /// Number of blocks; position `p` lies in the block `p / block_tokens` of them.
    pub blocks: usize,
    /// First row in the step's matrices.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Position of the first row.
    pub start: usize,
}

impl Step {
    /// Stacks the items of `batch`; `last` is the token that stands for [`Tokens::Last`] of the item with that index.
    ///
    /// # Errors
    /// `InvalidArgument` for tokens, positions or blocks that do not fit the model, the lease or the arena.
    pub fn lay_out(
        &mut self,
        batch: &Batch,
        spec: &EngineSpec,
        last: impl Fn(usize) -> Option<u32>,
    ) -> Result<(), EngineError> {
        self.clear();
        self.report_layers.extend_from_slice(&batch.report_layers);
        for (index, item) in batch.items.iter().enumerate() {
            let (last, first_row) = (last(index), self.tokens.len());
            self.tokens.extend_from_slice(match &item.tokens {
                Tokens::Given(tokens) => tokens,
                Tokens::Last => last.as_slice(),
            });
            self.tokens.extend(item.drafts().iter().map(|Draft { token, .. }| token));
            check(item, &self.tokens[first_row..], spec, &mut self.written).map_err(|problem| {
                EngineError::InvalidArgument(format!("sequence {} in a step: {problem}", item.seq))
            })?;
            self.add(item, first_row, spec.block_tokens);
        }
        Ok(())
    }

    /// The rows of `chunk` whose logits are wanted.
    pub fn choosing(&self, chunk: &Chunk) -> &[usize] {
        let before = |end: usize| self.logits_of.partition_point(|&row| row < end);
        &self.logits_of[before(chunk.first_row)..before(chunk.first_row + chunk.rows)]
    }

    /// Whether somebody waits for the KV of the first `layers` layers.
    pub fn reports(&self, layers: usize) -> bool {
        self.report_layers.contains(&layers)
    }

    fn clear(&mut self) {
        let Self { tokens, positions, places, blocks, chunks, logits_of, report_layers, written } = self;
        tokens.clear();
        positions.clear();
        places.clear();
        blocks.clear();
        chunks.clear();
        logits_of.clear();
        report_layers.clear();
        written.clear();
    }

    /// The item whose tokens are the rows from `first_row` on.
    fn add(&mut self, item: &BatchItem, first_row: usize, block_tokens: usize) {
        let Self { tokens, positions, places, blocks, chunks, logits_of, .. } = self;
        let (own, start, rows) = (item.blocks.blocks(), item.start, tokens.len() - first_row);
        chunks.push(Chunk { first_block: blocks.len(), blocks: own.len(), first_row, rows, start });
        blocks.extend(own);
        for position in start..start + rows {
            positions.push(position);
            places.push(Place { block: own[position / block_tokens], slot: position % block_tokens });
        }
        let choices = item.choose.as_ref().map_or(0, |choose| 1 + choose.drafts.len());
        logits_of.extend(first_row + rows - choices..first_row + rows);
    }
}

/// `tokens` are those of the item, its drafts among them; `written` are the blocks that items before it write.
fn check(item: &BatchItem, tokens: &[u32], spec: &EngineSpec, written: &mut HashSet<u32>) -> Result<(), String> {
    let (blocks, end) = (item.blocks.blocks(), item.start.checked_add(tokens.len()));
    let Some(end) = end.filter(|&end| end > item.start && end <= spec.max_context_tokens) else {
        return Err(format!("no tokens or more than the model's {}", spec.max_context_tokens));
    };
    if end > blocks.len() * spec.block_tokens {
        return Err(format!("{end} tokens do not fit {} blocks", blocks.len()));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= spec.vocab_size) {
        return Err(format!("token {token} is not in the vocabulary"));
    }
    let own = &blocks[..end.div_ceil(spec.block_tokens)];
    if let Some(block) = own.iter().find(|&&block| block as usize >= spec.total_blocks) {
        return Err(format!("block {block} is not in the arena"));
    }
    let mut target = own[item.start / spec.block_tokens..].iter();
    match target.find(|&&block| !written.insert(block)) {
        Some(block) => Err(format!("block {block} is written twice")),
        None => Ok(()),
    }
}
