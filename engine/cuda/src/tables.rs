//! Block tables on the device: which blocks each sequence has. A row stays from step to step, and only what its lease
//! has got since is uploaded. Rows of sequences that are in no step of late are taken where there are too few.
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use tandem_engine::{Batch, Seq};

use crate::buffer::Buffer;
use crate::error::CudaError;
use crate::pinned::Pinned;
use crate::plan::Span;
use crate::stream::Stream;

/// All rows.
pub(crate) struct Tables {
    rows: Rows,
    /// The rows once more, as the device will have them when all that is queued has run.
    mirror: Vec<u32>,
    /// Blocks of a row.
    width: usize,
}

impl Tables {
    /// `count` rows of `width` blocks.
    pub fn new(count: usize, width: usize) -> Self {
        Self { rows: Rows::new(count), mirror: vec![0; count * width], width }
    }

    /// Makes the device's rows, in `span` of `workspace`, those of the batch's sequences; gives each item's row. What
    /// changes is uploaded from `pinned`, as large as all rows, of which no copy is under way.
    pub fn update(
        &mut self,
        batch: &Batch,
        workspace: &Buffer,
        span: Span,
        stream: &Stream,
        pinned: &mut Pinned,
        of_items: &mut Vec<u32>,
    ) -> Result<(), CudaError> {
        of_items.clear();
        let present: HashSet<Seq> = batch.items.iter().map(|item| item.seq).collect();
        for item in &batch.items {
            let blocks = item.blocks.blocks();
            let blocks = &blocks[..blocks.len().min(self.width)];
            let refused = || CudaError::Kernels(format!("{} sequences in a step are too many", batch.items.len()));
            let row = self.rows.of(item.seq, &present).ok_or_else(refused)?;
            let first = row as usize * self.width;
            let mirror = &mut self.mirror[first..first + self.width];
            let changed = self.rows.change(item.seq, mirror, blocks);
            if !changed.is_empty() {
                let (from, bytes) = ((first + changed.start) * 4, changed.len() * 4);
                // SAFETY: no copy is under way, by the caller, but those of other rows of this step.
                unsafe { pinned.slice_mut(from, changed.len()) }.copy_from_slice(&mirror[changed.clone()]);
                workspace.upload(span.at + from, pinned, from, bytes, stream)?;
                self.rows.uploaded(item.seq, changed.end);
            }
            of_items.push(row);
        }
        Ok(())
    }

    /// The sequence has ended.
    pub fn forget(&mut self, seq: Seq) {
        self.rows.forget(seq);
    }
}

/// Who has which row.
#[derive(Debug)]
struct Rows {
    owners: HashMap<Seq, Row>,
    free: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    index: u32,
    /// Blocks that the device has.
    uploaded: usize,
}

impl Rows {
    fn new(count: usize) -> Self {
        Self { owners: HashMap::new(), free: (0..count as u32).rev().collect() }
    }

    /// The row of `seq`, which may be one of a sequence that is not among `present`.
    fn of(&mut self, seq: Seq, present: &HashSet<Seq>) -> Option<u32> {
        if let Some(row) = self.owners.get(&seq) {
            return Some(row.index);
        }
        if self.free.is_empty() {
            let absent = self.owners.keys().find(|owner| !present.contains(owner)).copied()?;
            self.forget(absent);
        }
        let index = self.free.pop()?;
        self.owners.insert(seq, Row { index, uploaded: 0 });
        Some(index)
    }

    /// Writes `blocks` into the row; which part of it the device has not. Until that is [`Rows::uploaded`], it has none
    /// of what comes behind the part's beginning.
    fn change(&mut self, seq: Seq, mirror: &mut [u32], blocks: &[u32]) -> Range<usize> {
        let Some(row) = self.owners.get_mut(&seq) else { return 0..0 };
        let known = row.uploaded.min(blocks.len());
        let same = mirror[..known].iter().zip(blocks).take_while(|(have, want)| have == want).count();
        if same < blocks.len() {
            row.uploaded = same;
            mirror[same..blocks.len()].copy_from_slice(&blocks[same..]);
        }
        same..blocks.len()
    }

    fn uploaded(&mut self, seq: Seq, blocks: usize) {
        if let Some(row) = self.owners.get_mut(&seq) {
            row.uploaded = blocks;
        }
    }

    fn forget(&mut self, seq: Seq) {
        self.free.extend(self.owners.remove(&seq).map(|row| row.index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_lease_has_got_since_is_uploaded() {
        let (mut rows, mut mirror, present) = (Rows::new(2), vec![0; 8], HashSet::from([7]));
        assert_eq!(rows.of(7, &present), Some(0));
        assert_eq!(rows.change(7, &mut mirror, &[5, 6]), 0..2);
        // The upload did not happen: all of it once more.
        assert_eq!(rows.change(7, &mut mirror, &[5, 6]), 0..2);
        rows.uploaded(7, 2);
        assert_eq!(rows.change(7, &mut mirror, &[5, 6]), 2..2);
        assert_eq!(rows.change(7, &mut mirror, &[5, 6, 9]), 2..3);
        rows.uploaded(7, 3);
        // Preempted, and back with other blocks; a shorter lease is a part of what is there.
        assert_eq!(rows.change(7, &mut mirror, &[5, 8, 9]), 1..3);
        assert_eq!(&mirror[..3], &[5, 8, 9]);
        rows.uploaded(7, 3);
        assert_eq!(rows.change(7, &mut mirror, &[5]), 1..1);
    }

    #[test]
    fn rows_of_the_absent_are_taken_and_others_are_not() {
        let (mut rows, both) = (Rows::new(2), HashSet::from([1, 2]));
        assert_eq!((rows.of(1, &both), rows.of(2, &both)), (Some(0), Some(1)));
        let three = HashSet::from([1, 2, 3]);
        assert_eq!(rows.of(3, &three), None, "all are in the step");
        assert_eq!(rows.of(3, &HashSet::from([3, 1])), Some(1));
        rows.forget(3);
        rows.forget(3);
        assert_eq!(rows.of(2, &both), Some(1));
        assert_eq!(rows.change(2, &mut [4, 4], &[4]), 0..1, "another's blocks are no one's");
    }
}
