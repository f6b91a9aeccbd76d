//! The manifest of a hand-off: made from the sender's arena, checked against the receiver's.
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use tandem_proto::{HandoffId, v1};
use xxhash_rust::xxh3::Xxh3;

use crate::arena::Arena;
use crate::error::Refusal;
use crate::transport::Expected;
use crate::wire::DataHeader;

/// The checksums of a hand-off's blocks, taken piece by piece as the pieces become final: what is hashed while others are
/// still computed, or still on their way, need not be hashed at the end. The result is that of hashing whole blocks,
/// whatever the cut.
pub struct Manifest {
    arena: Arc<Arena>,
    blocks: Vec<u32>,
    units: u8,
    sums: Vec<Sum>,
    /// Pieces that came before the one that precedes them, by block index.
    early: BTreeSet<(u32, u8, u8)>,
}

/// How far a block is hashed.
enum Sum {
    Nothing,
    /// Up to this unit.
    Part(u8, Box<Xxh3>),
    Whole(u64),
}

impl Manifest {
    /// Of `blocks` of `arena` in hand-off order, each of `units` equal pieces (a number that divides them:
    /// [`Arena::units_for`]; another one counts as 1).
    pub fn new(arena: Arc<Arena>, blocks: Vec<u32>, units: u8) -> Self {
        let units = if arena.divides_into(units) { units } else { 1 };
        let sums = blocks.iter().map(|_| Sum::Nothing).collect();
        Self { arena, blocks, units, sums, early: BTreeSet::new() }
    }

    /// These units of the blocks with these indices are final: hashes them, or notes them until those before them came.
    /// What the hand-off does not have is ignored, and so is what was covered before. Blocks the thread for as long as
    /// hashing takes, some 100 µs a MiB.
    pub fn cover(&mut self, blocks: Range<u32>, units: Range<u8>) {
        let units = units.start..units.end.min(self.units);
        for index in blocks.start..blocks.end.min(self.blocks.len() as u32) {
            self.cover_block(index, units.clone());
        }
    }

    /// The pieces of a range that has landed.
    pub(crate) fn cover_range(&mut self, range: DataHeader) {
        if let Some(units) = range.units.of(self.units) {
            self.cover(range.first..range.first.saturating_add(range.count), units);
        }
    }

    /// One checksum per block, after hashing what is left.
    pub fn finish(mut self) -> Vec<u64> {
        self.cover(0..self.blocks.len() as u32, 0..self.units);
        let whole = |sum: &Sum| if let Sum::Whole(sum) = sum { *sum } else { 0 };
        self.sums.iter().map(whole).collect()
    }

    /// A block's units are hashed in their order.
    fn cover_block(&mut self, index: u32, mut units: Range<u8>) {
        loop {
            let hashed = self.hashed(index);
            if units.start > hashed {
                if !units.is_empty() {
                    self.early.insert((index, units.start, units.end));
                }
                return;
            }
            if units.end > hashed {
                self.hash(index, hashed..units.end);
            }
            let Some(next) = self.early.range((index, 0, 0)..=(index, u8::MAX, u8::MAX)).next().copied() else {
                return;
            };
            if next.1 > self.hashed(index) {
                return;
            }
            self.early.remove(&next);
            units = next.1..next.2;
        }
    }

    fn hashed(&self, index: u32) -> u8 {
        match &self.sums[index as usize] {
            Sum::Nothing => 0,
            Sum::Part(hashed, _) => *hashed,
            Sum::Whole(_) => self.units,
        }
    }

    /// `units` are those that come next.
    fn hash(&mut self, index: u32, units: Range<u8>) {
        let (sum, block) = (&mut self.sums[index as usize], self.blocks[index as usize]);
        if units == (0..self.units) {
            *sum = Sum::Whole(self.arena.checksum(block));
            return;
        }
        let mut hasher = match std::mem::replace(sum, Sum::Nothing) {
            Sum::Part(_, hasher) => hasher,
            Sum::Nothing | Sum::Whole(_) => Box::default(),
        };
        self.arena.hash(&mut hasher, block, self.arena.slice(self.units, &units));
        *sum = if units.end == self.units { Sum::Whole(hasher.digest()) } else { Sum::Part(units.end, hasher) };
    }
}

/// A seal over `blocks` of the sender's arena, in hand-off order, answering `ticket`. The caller adds first token,
/// sampler position, traceparent and post time. Hashes all bytes at once ([`Manifest`] does it piece by piece): call it where
/// blocking is allowed, and before or while pushing, never after the blocks were given back.
pub fn seal_for(
    arena: &Arena,
    blocks: &[u32],
    ticket: &v1::Ticket,
    prompt_tokens: u32,
    sequence_hashes: Vec<u64>,
) -> v1::Seal {
    v1::Seal {
        handoff_id: ticket.handoff_id.clone(),
        prefill_incarnation: ticket.prefill_incarnation,
        decode_incarnation: ticket.decode_incarnation,
        prompt_tokens,
        sequence_hashes,
        checksums: blocks.iter().map(|block| arena.checksum(*block)).collect(),
        ..Default::default()
    }
}

/// Everything that must hold before anybody reads the blocks. `checksums` are those of the blocks in the arena, one each;
/// they are asked for last.
pub(crate) fn verify(
    seal: &v1::Seal,
    ticket: &v1::Ticket,
    expected: &Expected,
    checksums: impl FnOnce() -> Vec<u64>,
) -> Result<(), Refusal> {
    if HandoffId::from_wire(&seal.handoff_id).is_err() || seal.handoff_id != ticket.handoff_id {
        return Err(Refusal::Malformed);
    }
    let incarnations = |s: (u64, u64)| s == (ticket.prefill_incarnation, ticket.decode_incarnation);
    if !incarnations((seal.prefill_incarnation, seal.decode_incarnation)) {
        return Err(Refusal::WrongIncarnation);
    }
    if seal.prompt_tokens != expected.prompt_tokens {
        return Err(Refusal::WrongPrompt);
    }
    let n = ticket.blocks as usize;
    if seal.sequence_hashes.len() != n || seal.checksums.len() != n || expected.sequence_hashes.len() != n {
        return Err(Refusal::WrongPrompt);
    }
    let differs = seal.sequence_hashes.iter().zip(&expected.sequence_hashes).position(|(a, b)| a != b);
    if let Some(index) = differs {
        return Err(Refusal::WrongSequence(index as u32));
    }
    let corrupt = seal.checksums.iter().zip(checksums()).position(|(sum, ours)| *sum != ours);
    corrupt.map_or(Ok(()), |index| Err(Refusal::Corrupt(index as u32)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_memory::HostMemory;

    use super::*;

    proptest! {
        /// Pieces in any order, some twice, some missing, some of no block at all.
        #[test]
        fn the_checksums_are_those_of_whole_blocks_whatever_the_cut(
            units in 1u8..7, pieces in prop::collection::vec((0u32..6, 0u32..6, 0u8..8, 0u8..8), 0..40),
        ) {
            let block_bytes = usize::from(units) * 24;
            let words: Vec<u64> = (0..10 * block_bytes as u64 / 8).collect();
            let arena = Arena::new(HostMemory::holding(&words).expect("little"), block_bytes, units.into());
            let blocks = vec![3, 1, 9, 4];
            let mut manifest = Manifest::new(arena.clone(), blocks.clone(), units);
            for (first, count, start, end) in pieces {
                manifest.cover(first..first + count, start..end);
            }
            let whole: Vec<u64> = blocks.iter().map(|block| arena.checksum(*block)).collect();
            prop_assert_eq!(manifest.finish(), whole);
        }
    }

    #[test]
    fn what_was_covered_is_not_hashed_again() {
        let words: Vec<u64> = (0..16).collect();
        let arena = Arena::new(HostMemory::holding(&words).expect("little"), 64, 4);
        let before = arena.checksum(0);
        let mut manifest = Manifest::new(arena.clone(), vec![0, 1], 4);
        manifest.cover(0..1, 2..4);
        manifest.cover(0..1, 0..2);
        arena.copy_in(0, 0, &[7; 64]);
        arena.copy_in(1, 0, &[7; 64]);
        assert_eq!(manifest.finish(), vec![before, arena.checksum(1)]);
    }
}
