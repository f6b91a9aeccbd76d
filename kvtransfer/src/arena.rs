//! KV memory as blocks: which bytes are block `b`, or some layers of it, and their checksum. The memory itself is an
//! engine's ([`KvMemory`]); who may write which block when is `session.rs`'s matter.
use std::ops::Range;
use std::sync::Arc;

use tandem_memory::{KvMemory, WORD_BYTES};
use tandem_proto::hash::{LEAF_BYTES, checksum_of_leaves};

pub use tandem_memory::Run;

/// The same part of every block of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Bytes from the block's start.
    pub offset: usize,
    /// Bytes of the part.
    pub bytes: usize,
}

/// A KV arena: block `b` is the `block_bytes` bytes at `b * block_bytes`, its layers one after the other.
pub struct Arena {
    memory: Arc<dyn KvMemory>,
    block_bytes: usize,
    layers: usize,
}

impl Arena {
    /// The memory that an engine computes on, as blocks of `layers` equal layers. Where they are no whole words each, a
    /// block is one layer.
    ///
    /// # Panics
    /// When `block_bytes` is not a positive multiple of 8, or there are more than `u32::MAX` blocks: bugs of the
    /// caller.
    pub fn new(memory: Arc<dyn KvMemory>, block_bytes: usize, layers: usize) -> Arc<Self> {
        assert!(block_bytes > 0 && block_bytes.is_multiple_of(WORD_BYTES), "block of {block_bytes} bytes");
        assert!(u32::try_from(memory.bytes() / block_bytes).is_ok(), "too many blocks");
        let divides = layers > 0 && block_bytes.is_multiple_of(layers.saturating_mul(WORD_BYTES));
        Arc::new(Self { memory, block_bytes, layers: if divides { layers } else { 1 } })
    }

    /// The memory itself; backends register it with their library.
    pub fn memory(&self) -> &Arc<dyn KvMemory> {
        &self.memory
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Whole blocks of the arena.
    pub fn blocks(&self) -> u32 {
        (self.memory.bytes() / self.block_bytes) as u32
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// A block divides into `units` equal pieces of whole words.
    pub fn divides_into(&self, units: u8) -> bool {
        units > 0 && self.block_bytes.is_multiple_of(usize::from(units) * WORD_BYTES)
    }

    /// How many units a block may be sent in: one a layer, or one at all where there are more layers than a frame can
    /// count.
    pub fn units(&self) -> u8 {
        u8::try_from(self.layers).unwrap_or(1)
    }

    /// Units `range` of a block of `units` (which divide it, [`Arena::divides_into`]).
    pub fn slice(&self, units: u8, range: &Range<u8>) -> Slice {
        let unit_bytes = self.block_bytes / usize::from(units.max(1));
        Slice { offset: usize::from(range.start) * unit_bytes, bytes: range.len() * unit_bytes }
    }

    /// The slice of each of `blocks`, in their order, neighbours joined.
    pub fn runs(&self, blocks: &[u32], slice: Slice) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for &block in blocks {
            let at = block as usize * self.block_bytes + slice.offset;
            match runs.last_mut() {
                Some(run) if run.at + run.bytes == at => run.bytes += slice.bytes,
                _ => runs.push(Run { at, bytes: slice.bytes }),
            }
        }
        runs
    }

    /// The run lies inside the arena.
    pub fn contains(&self, run: Run) -> bool {
        run.at.checked_add(run.bytes).is_some_and(|end| end <= self.bytes())
    }

    /// Copies `out.len()` bytes from `at` on.
    ///
    /// # Panics
    /// When the range leaves the arena, or `at` or the length is no multiple of 8: ranges come from checked grants.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.memory.read(at, out);
    }

    /// Copies `bytes` into the arena; the mirror of [`Arena::read`].
    ///
    /// # Panics
    /// As there.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.memory.write(at, bytes);
    }

    /// Copies `out.len()` bytes, `offset` bytes after the start of block `first`, possibly across following blocks.
    ///
    /// # Panics
    /// As [`Arena::read`].
    pub fn copy_out(&self, first: u32, offset: usize, out: &mut [u8]) {
        self.read(first as usize * self.block_bytes + offset, out);
    }

    /// Copies `bytes` into the arena; the mirror of [`Arena::copy_out`].
    ///
    /// # Panics
    /// As [`Arena::read`].
    pub fn copy_in(&self, first: u32, offset: usize, bytes: &[u8]) {
        self.write(first as usize * self.block_bytes + offset, bytes);
    }

    /// Copies `out.len()` bytes, `offset` bytes after the start of `runs` taken as one piece.
    ///
    /// # Panics
    /// As [`Arena::read`], and when the runs are shorter.
    pub fn gather(&self, runs: &[Run], mut offset: usize, mut out: &mut [u8]) {
        for run in runs {
            if offset >= run.bytes {
                offset -= run.bytes;
                continue;
            }
            let (now, later) = out.split_at_mut(out.len().min(run.bytes - offset));
            self.read(run.at + offset, now);
            (offset, out) = (0, later);
        }
        assert!(out.is_empty(), "the runs are shorter");
    }

    /// Copies `bytes` in, `offset` bytes after the start of `runs` taken as one piece; the mirror of [`Arena::gather`].
    ///
    /// # Panics
    /// As there.
    pub fn scatter(&self, runs: &[Run], mut offset: usize, mut bytes: &[u8]) {
        for run in runs {
            if offset >= run.bytes {
                offset -= run.bytes;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(run.bytes - offset));
            self.write(run.at + offset, now);
            (offset, bytes) = (0, later);
        }
        assert!(bytes.is_empty(), "the runs are shorter");
    }

    /// The checksum of a block, as [`tandem_proto::hash::block_checksum`] defines it.
    pub fn checksum(&self, block: u32) -> u64 {
        let pieces: Vec<Run> = self.leaves(block, 0..self.layers).collect();
        let mut leaves = vec![0; pieces.len()];
        self.memory.digests(&pieces, &mut leaves);
        checksum_of_leaves(&leaves, self.block_bytes)
    }

    /// Layers of a block.
    pub(crate) fn layers(&self) -> usize {
        self.layers
    }

    /// Leaves of a layer.
    pub(crate) fn leaves_of_layer(&self) -> usize {
        self.layer_bytes().div_ceil(LEAF_BYTES)
    }

    /// The leaves of these layers of a block, in their order: what its checksum is made from.
    pub(crate) fn leaves(&self, block: u32, layers: Range<usize>) -> impl Iterator<Item = Run> {
        let (layer_bytes, start) = (self.layer_bytes(), block as usize * self.block_bytes);
        layers.flat_map(move |layer| {
            let (at, end) = (start + layer * layer_bytes, start + (layer + 1) * layer_bytes);
            (at..end).step_by(LEAF_BYTES).map(move |at| Run { at, bytes: LEAF_BYTES.min(end - at) })
        })
    }

    fn layer_bytes(&self) -> usize {
        self.block_bytes / self.layers
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_memory::HostMemory;

    use super::*;

    #[test]
    fn checksum_is_that_of_the_bytes() {
        for (block_bytes, layers) in [(8, 1), (4096, 1), (3 * 4104, 3), (600 * 8, 600), (100_000, 7), (368_640, 30)] {
            let arena = Arena::new(HostMemory::zeroed(3 * block_bytes).expect("little"), block_bytes, layers);
            let bytes: Vec<u8> = (0..block_bytes).map(|i| (i * 31 % 251) as u8).collect();
            arena.copy_in(1, 0, &bytes);
            assert_eq!(arena.checksum(1), tandem_proto::hash::block_checksum(&bytes, layers), "{block_bytes} {layers}");
            let mut back = vec![0; block_bytes];
            arena.copy_out(1, 0, &mut back);
            assert_eq!(back, bytes);
            arena.copy_out(2, 0, &mut back);
            assert!(back.iter().all(|byte| *byte == 0), "the neighbour is untouched");
        }
    }

    #[test]
    fn blocks_divide_into_equal_pieces_of_whole_words_or_not_at_all() {
        let of = |block_bytes, layers| Arena::new(HostMemory::zeroed(8192).expect("little"), block_bytes, layers);
        let layers = [1, 2, 3, 5, 6, 10, 15, 30];
        assert_eq!(layers.map(|layers| usize::from(of(240, layers).units())), layers);
        assert_eq!([0, 4, 7, 12, 60, 256, 1 << 40, usize::MAX].map(|layers| of(240, layers).units()), [1; 8]);
        assert_eq!(of(2048, 256).units(), 1, "more than a frame can count");
        assert_eq!(of(240, 6).slice(6, &(2..5)), Slice { offset: 80, bytes: 120 });
    }

    proptest! {
        #[test]
        fn runs_are_the_slices_of_the_blocks_in_order(
            blocks in prop::collection::vec(0u32..20, 0..60), units in 1u8..5, cut in (0u8..5, 0u8..5),
            offset in 0usize..16, len in 0usize..80,
        ) {
            // Block `b` holds `units` words from `b * units` on.
            let words: Vec<u64> = (0..20 * u64::from(units)).collect();
            let arena = Arena::new(HostMemory::holding(&words).expect("little"), usize::from(units) * 8, units.into());
            let range = cut.0.min(cut.1).min(units)..cut.0.max(cut.1).min(units);
            let runs = arena.runs(&blocks, arena.slice(units, &range));
            let word = |block: u32, unit: u8| u64::from(block) * u64::from(units) + u64::from(unit);
            let words: Vec<u64> = blocks.iter().flat_map(|block| range.clone().map(|unit| word(*block, unit))).collect();
            prop_assert_eq!(runs.iter().map(|run| run.bytes).sum::<usize>(), words.len() * 8);
            prop_assert!(runs.windows(2).all(|pair| pair[0].at + pair[0].bytes != pair[1].at || pair[0].bytes == 0));
            let offset = offset.min(words.len());
            let expected: Vec<u8> = words[offset..].iter().take(len).flat_map(|word| word.to_ne_bytes()).collect();
            let mut gathered = vec![0; expected.len()];
            arena.gather(&runs, offset * 8, &mut gathered);
            prop_assert_eq!(gathered, expected);
        }
    }
}
