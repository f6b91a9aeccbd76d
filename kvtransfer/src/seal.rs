//! The manifest of a hand-off: made from the sender's arena, checked against the receiver's.
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tandem_memory::WORD_BYTES;
use tandem_proto::hash::checksum_of_leaves;
use tandem_proto::{HandoffId, SequenceHash, v1};

use crate::arena::{Arena, Run};
use crate::error::Refusal;
use crate::terms::Expected;
use crate::wire::DataHeader;

/// The checksums of a hand-off's blocks, taken piece by piece as the pieces become final, in any order: what is hashed
/// while others are still computed, or still on their way, need not be hashed at the end. The result is that of hashing
/// whole blocks, whatever the cut, since the leaves of a checksum depend on the layout alone.
pub struct Manifest {
    arena: Arc<Arena>,
    blocks: Vec<u32>,
    /// Pieces that a block becomes final in: 1, its layers, or 0: the pieces are none of these, and blocks are hashed
    /// at the end.
    units: u8,
    sums: Vec<Sum>,
}

/// What of a block is hashed.
enum Sum {
    Nothing,
    /// These of its leaves, and how many of its units are left.
    Part(Vec<Option<u64>>, u8),
    Whole(u64),
}

/// Units to be hashed together: a device takes a list of leaves at once.
#[derive(Default)]
struct Batch {
    /// Block index and unit.
    units: Vec<(u32, u8)>,
    /// Leaves of the units, as many of each.
    leaves: Vec<Run>,
}

/// Of the processor. Memory on huge pages may have such ones beneath, where the machine is a guest.
const PAGE_BYTES: usize = 4096;
/// 64 MiB of KV.
const MOST_LEAVES: usize = 16 << 10;

impl Manifest {
    /// Of `blocks` of `arena` in hand-off order, each of `units` equal pieces: 1, or [`Arena::units`].
    pub fn new(arena: Arc<Arena>, blocks: Vec<u32>, units: u8) -> Self {
        let units = if units == 1 || usize::from(units) == arena.layers() { units } else { 0 };
        let sums = blocks.iter().map(|_| Sum::Nothing).collect();
        Self { arena, blocks, units, sums }
    }

    /// These units of the blocks with these indices are final: hashes them. What the hand-off does not have is ignored,
    /// and so is what was covered before. Blocks the thread for as long as hashing takes, some 100 µs a MiB.
    pub fn cover(&mut self, blocks: Range<u32>, units: Range<u8>) {
        self.cover_all([(blocks, units)]);
    }

    /// The pieces of ranges that have landed: together, as each time that a device is asked takes it 30 µs.
    pub(crate) fn cover_ranges(&mut self, ranges: impl IntoIterator<Item = DataHeader>) {
        let of = self.units;
        let pieces =
            |range: DataHeader| Some((range.first..range.first.saturating_add(range.count), range.units.of(of)?));
        self.cover_all(ranges.into_iter().filter_map(pieces));
    }

    fn cover_all(&mut self, pieces: impl IntoIterator<Item = (Range<u32>, Range<u8>)>) {
        let mut batch = Batch::default();
        for (blocks, units) in pieces {
            for index in blocks.start..blocks.end.min(self.blocks.len() as u32) {
                self.add(index, units.clone(), &mut batch);
                if batch.leaves.len() >= MOST_LEAVES {
                    self.hash(std::mem::take(&mut batch));
                }
            }
        }
        self.hash(batch);
    }

    /// To a batch what of a block is not hashed yet.
    fn add(&self, index: u32, units: Range<u8>, batch: &mut Batch) {
        for unit in units.start..units.end.min(self.units) {
            if !self.is_hashed(index, unit) {
                batch.units.push((index, unit));
                batch.leaves.extend(self.arena.leaves(self.blocks[index as usize], self.layers(unit)));
            }
        }
    }

    /// The pieces of a range whose leaves were hashed as they were copied, in the order of the payload. What does not
    /// fit is left to be hashed.
    pub(crate) fn note_range(&mut self, range: DataHeader, leaves: &[u64]) {
        let units = range.units.of(self.units).unwrap_or(0..0);
        let blocks = range.first..range.first.saturating_add(range.count).min(self.blocks.len() as u32);
        let pieces = blocks.flat_map(|index| units.clone().map(move |unit| (index, unit)));
        if self.units == 0 || leaves.len() != range.count as usize * units.len() * self.leaves_of_unit() {
            return;
        }
        for ((index, unit), leaves) in pieces.zip(leaves.chunks(self.leaves_of_unit())) {
            self.note(index, unit, leaves);
        }
    }

    /// Reads a word of each page of the blocks that are whole. A long prompt's first blocks landed seconds ago, and in
    /// a virtual machine the first access after such a time can be slow. Where this was not done while the last tokens
    /// were computed, the first decode step after 8,000 tokens took up to twice as long as the second.
    pub(crate) fn touch(&self) {
        let Some(words) = self.arena.memory().place().host() else { return };
        let whole = self.blocks.iter().zip(&self.sums).filter(|(_, sum)| matches!(sum, Sum::Whole(_)));
        for (block, _) in whole {
            let start = *block as usize * self.arena.block_bytes();
            let pages = (start..start + self.arena.block_bytes()).step_by(PAGE_BYTES);
            pages.for_each(|at| _ = black_box(words[at / WORD_BYTES].load(Relaxed)));
        }
    }

    /// One checksum per block, after hashing what is left.
    pub fn finish(mut self) -> Vec<u64> {
        self.units = self.units.max(1);
        self.cover(0..self.blocks.len() as u32, 0..self.units);
        let whole = |sum: &Sum| if let Sum::Whole(sum) = sum { *sum } else { 0 };
        self.sums.iter().map(whole).collect()
    }

    fn layers(&self, unit: u8) -> Range<usize> {
        let (unit, layers) = (usize::from(unit), self.arena.layers() / usize::from(self.units));
        unit * layers..(unit + 1) * layers
    }

    fn leaves_of_unit(&self) -> usize {
        self.arena.layers() / usize::from(self.units) * self.arena.leaves_of_layer()
    }

    fn is_hashed(&self, index: u32, unit: u8) -> bool {
        match &self.sums[index as usize] {
            Sum::Nothing => false,
            Sum::Part(leaves, _) => leaves[usize::from(unit) * self.leaves_of_unit()].is_some(),
            Sum::Whole(_) => true,
        }
    }

    fn hash(&mut self, batch: Batch) {
        if batch.units.is_empty() {
            return;
        }
        let mut digests = vec![0; batch.leaves.len()];
        self.arena.memory().digests(&batch.leaves, &mut digests);
        for ((index, unit), leaves) in batch.units.into_iter().zip(digests.chunks(self.leaves_of_unit())) {
            self.note(index, unit, leaves);
        }
    }

    /// A unit's leaves, the first time.
    fn note(&mut self, index: u32, unit: u8, hashed: &[u64]) {
        if self.is_hashed(index, unit) {
            return;
        }
        let (per_unit, block_bytes) = (self.leaves_of_unit(), self.arena.block_bytes());
        let sum = &mut self.sums[index as usize];
        if self.units == 1 {
            *sum = Sum::Whole(checksum_of_leaves(hashed, block_bytes));
            return;
        }
        if let Sum::Nothing = sum {
            *sum = Sum::Part(vec![None; per_unit * usize::from(self.units)], self.units);
        }
        let Sum::Part(leaves, left) = sum else { return };
        let of_unit = &mut leaves[usize::from(unit) * per_unit..][..per_unit];
        of_unit.iter_mut().zip(hashed).for_each(|(leaf, hashed)| *leaf = Some(*hashed));
        *left -= 1;
        if *left == 0 {
            let leaves: Vec<u64> = leaves.iter().flatten().copied().collect();
            *sum = Sum::Whole(checksum_of_leaves(&leaves, block_bytes));
        }
    }
}

/// A seal over `blocks` of the sender's arena, in hand-off order, answering `ticket`, whose layout must be the sender's
/// (`check_identity`). The caller adds first token, sampler position, traceparent and post time. Hashes all bytes at
/// once ([`Manifest`] does it piece by piece): call it where blocking is allowed, and before or while pushing, never
/// after the blocks were given back.
pub fn seal_for(
    arena: &Arena,
    blocks: &[u32],
    ticket: &v1::Ticket,
    prompt_tokens: u32,
    sequence_hashes: Vec<SequenceHash>,
) -> v1::Seal {
    v1::Seal {
        handoff_id: ticket.handoff_id.clone(),
        prefill_incarnation: ticket.prefill_incarnation,
        decode_incarnation: ticket.decode_incarnation,
        compatibility_digest: ticket.compatibility_digest,
        prompt_tokens,
        sequence_hashes: SequenceHash::all_to_wire(&sequence_hashes),
        checksums: blocks.iter().map(|block| arena.checksum(*block)).collect(),
        ..Default::default()
    }
}

/// Everything that must hold before anybody reads the blocks. `checksums` are those of the blocks in the arena, one
/// each; they are asked for last. A mismatch names the block and not the leaf: the leaves' hashes are not in the seal,
/// which would grow from 24 bytes a block to 1/512 of all bytes, and whoever gets the refusal sends or computes whole
/// blocks anyway.
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
    if seal.compatibility_digest != ticket.compatibility_digest {
        return Err(Refusal::WrongLayout);
    }
    if seal.prompt_tokens != expected.prompt_tokens {
        return Err(Refusal::WrongPrompt);
    }
    let n = ticket.blocks as usize;
    let sequence_hashes = SequenceHash::all_from_wire(&seal.sequence_hashes).map_err(|_| Refusal::Malformed)?;
    if sequence_hashes.len() != n || seal.checksums.len() != n || expected.sequence_hashes.len() != n {
        return Err(Refusal::WrongPrompt);
    }
    let differs = sequence_hashes.iter().zip(&expected.sequence_hashes).position(|(a, b)| a != b);
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
    use crate::wire::Units;

    proptest! {
        /// Pieces in any order, some twice, some missing, some of no block at all; `units` are the layers, the whole
        /// block, or what no grant has.
        #[test]
        fn the_checksums_are_those_of_whole_blocks_whatever_the_cut(
            layers in 1u8..7, layer_words in prop_oneof![1usize..4, 500usize..1030], granted in 0u8..3,
            pieces in prop::collection::vec((0u32..6, 0u32..6, 0u8..8, 0u8..8), 0..40),
        ) {
            let block_bytes = usize::from(layers) * layer_words * 8;
            let words: Vec<u64> = (0..10 * block_bytes as u64 / 8).collect();
            let arena = Arena::new(HostMemory::holding(&words).expect("little"), block_bytes, layers.into());
            let blocks = vec![3, 1, 9, 4];
            let units = [1, layers, 5][usize::from(granted)];
            let mut manifest = Manifest::new(arena.clone(), blocks.clone(), units);
            for (first, count, start, end) in pieces {
                manifest.cover(first..first + count, start..end);
            }
            let expected = blocks.iter().map(|block| {
                let bytes: Vec<u8> = words[*block as usize * block_bytes / 8..][..block_bytes / 8]
                    .iter().flat_map(|word| word.to_ne_bytes()).collect();
                tandem_proto::hash::block_checksum(&bytes, layers.into())
            });
            prop_assert_eq!(manifest.finish(), expected.collect::<Vec<_>>());
        }
    }

    /// Of three layers, each of two leaves.
    #[test]
    fn leaves_hashed_on_their_way_are_taken_as_they_are() {
        let words: Vec<u64> = (0..6 * 3 * 600).collect();
        let arena = Arena::new(HostMemory::holding(&words).expect("little"), 3 * 4800, 3);
        for units in [1, 3] {
            let mut manifest = Manifest::new(arena.clone(), vec![4, 2], units);
            let mut leaves = vec![0; 6];
            arena.memory().digests(&arena.leaves(2, 0..3).collect::<Vec<_>>(), &mut leaves);
            let range = DataHeader { handoff: HandoffId([0; 16]), first: 1, count: 1, units: Units::ALL };
            manifest.note_range(range, &leaves[1..]);
            manifest.note_range(DataHeader { first: 7, ..range }, &leaves);
            manifest.note_range(range, &leaves);
            let before = vec![arena.checksum(4), arena.checksum(2)];
            arena.copy_in(2, 0, &[7; 64]);
            assert_eq!(manifest.finish(), before);
            arena.copy_in(2, 0, &words[2 * 1800..][..8].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>());
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

    /// A sender whose ticket names other pieces, which it would otherwise take for the whole block.
    #[test]
    fn pieces_of_another_cut_are_hashed_at_the_end() {
        let arena = Arena::new(HostMemory::zeroed(128).expect("little"), 64, 4);
        for units in [0, 2, 8] {
            let mut manifest = Manifest::new(arena.clone(), vec![1], units);
            manifest.cover(0..1, 0..1);
            arena.copy_in(1, 0, &[units; 64]);
            assert_eq!(manifest.finish(), vec![arena.checksum(1)]);
        }
    }
}
