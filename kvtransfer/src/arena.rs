//! KV memory: `blocks × block_bytes` bytes held as atomic words, so that an engine thread, a socket thread and a
//! verifier may touch it together without undefined behaviour. Who may write which block when is `session.rs`'s matter.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use xxhash_rust::xxh3::Xxh3;

const WORD_BYTES: usize = 8;
/// Copied through while hashing: stays in the first-level cache.
const SCRATCH_BYTES: usize = 16 << 10;

/// Adjacent blocks of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Id of the first block.
    pub first: u32,
    /// Number of blocks.
    pub count: u32,
}

/// A KV arena: block `b` is the `block_bytes` bytes at `b * block_bytes`.
pub struct Arena {
    words: Arc<[AtomicU64]>,
    block_bytes: usize,
}

impl Arena {
    /// Wraps memory that the engine allocated.
    ///
    /// # Panics
    /// When `block_bytes` is not a positive multiple of 8, or there are more than `u32::MAX` blocks: bugs of the caller.
    pub fn new(words: Arc<[AtomicU64]>, block_bytes: usize) -> Arc<Self> {
        assert!(block_bytes > 0 && block_bytes.is_multiple_of(WORD_BYTES), "block of {block_bytes} bytes");
        assert!(u32::try_from(words.len() * WORD_BYTES / block_bytes).is_ok(), "too many blocks");
        Arc::new(Self { words, block_bytes })
    }

    /// The memory itself; backends register it with their library.
    pub fn words(&self) -> &Arc<[AtomicU64]> {
        &self.words
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Whole blocks of the arena.
    pub fn blocks(&self) -> u32 {
        (self.words.len() * WORD_BYTES / self.block_bytes) as u32
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.words.len() * WORD_BYTES
    }

    /// Bytes of `run`.
    pub fn run_bytes(&self, run: Run) -> usize {
        run.count as usize * self.block_bytes
    }

    /// The run lies inside the arena.
    pub fn contains(&self, run: Run) -> bool {
        run.first.checked_add(run.count).is_some_and(|end| end <= self.blocks())
    }

    /// Copies `out.len()` bytes, `offset` bytes after the start of block `first`, possibly across following blocks.
    ///
    /// # Panics
    /// When the range leaves the arena, or offset or length is no multiple of 8: ranges come from checked grants.
    pub fn copy_out(&self, first: u32, offset: usize, out: &mut [u8]) {
        let words = &self.words[self.word_range(first, offset, out.len())];
        let (chunks, _) = out.as_chunks_mut::<WORD_BYTES>();
        for (chunk, word) in chunks.iter_mut().zip(words) {
            *chunk = word.load(Relaxed).to_ne_bytes();
        }
    }

    /// Copies `out.len()` bytes, `offset` bytes after the start of `runs` taken as one piece.
    ///
    /// # Panics
    /// As [`Arena::copy_out`].
    pub fn gather(&self, runs: &[Run], mut offset: usize, mut out: &mut [u8]) {
        for run in runs {
            let bytes = self.run_bytes(*run);
            if offset >= bytes {
                offset -= bytes;
                continue;
            }
            let (now, later) = out.split_at_mut(out.len().min(bytes - offset));
            self.copy_out(run.first, offset, now);
            (offset, out) = (0, later);
        }
        assert!(out.is_empty(), "the runs are shorter");
    }

    /// Copies `bytes` into the arena; the mirror of [`Arena::copy_out`].
    ///
    /// # Panics
    /// As [`Arena::copy_out`].
    pub fn copy_in(&self, first: u32, offset: usize, bytes: &[u8]) {
        let words = &self.words[self.word_range(first, offset, bytes.len())];
        let (chunks, _) = bytes.as_chunks::<WORD_BYTES>();
        for (chunk, word) in chunks.iter().zip(words) {
            word.store(u64::from_ne_bytes(*chunk), Relaxed);
        }
    }

    /// XXH3-64 of a block's bytes, equal to `tandem_proto::hash::checksum` of a copy of them.
    pub fn checksum(&self, block: u32) -> u64 {
        let mut hasher = Xxh3::new();
        let mut scratch = [0; SCRATCH_BYTES];
        let mut offset = 0;
        while offset < self.block_bytes {
            let chunk = &mut scratch[..SCRATCH_BYTES.min(self.block_bytes - offset)];
            self.copy_out(block, offset, chunk);
            hasher.update(chunk);
            offset += chunk.len();
        }
        hasher.digest()
    }

    fn word_range(&self, first: u32, offset: usize, len: usize) -> std::ops::Range<usize> {
        assert!(offset.is_multiple_of(WORD_BYTES) && len.is_multiple_of(WORD_BYTES), "unaligned copy");
        let start = (first as usize * self.block_bytes + offset) / WORD_BYTES;
        start..start + len / WORD_BYTES
    }
}

/// Joins neighbours of `blocks` into runs.
pub fn coalesce(blocks: &[u32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &block in blocks {
        match runs.last_mut() {
            Some(run) if run.first.checked_add(run.count) == Some(block) => run.count += 1,
            _ => runs.push(Run { first: block, count: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn arena(blocks: usize, block_bytes: usize) -> Arc<Arena> {
        Arena::new((0..blocks * block_bytes / 8).map(|_| AtomicU64::new(0)).collect(), block_bytes)
    }

    #[test]
    fn checksum_is_that_of_the_bytes() {
        for block_bytes in [8, 4096, SCRATCH_BYTES, SCRATCH_BYTES + 8, 100_000] {
            let arena = arena(3, block_bytes);
            let bytes: Vec<u8> = (0..block_bytes).map(|i| (i * 31 % 251) as u8).collect();
            arena.copy_in(1, 0, &bytes);
            assert_eq!(arena.checksum(1), tandem_proto::hash::checksum(&bytes));
            let mut back = vec![0; block_bytes];
            arena.copy_out(1, 0, &mut back);
            assert_eq!(back, bytes);
            arena.copy_out(2, 0, &mut back);
            assert!(back.iter().all(|byte| *byte == 0), "the neighbour is untouched");
        }
    }

    proptest! {
        #[test]
        fn runs_expand_to_the_same_blocks_and_bytes(
            blocks in prop::collection::vec(0u32..20, 0..60), offset in 0usize..16, len in 0usize..40,
        ) {
            let runs = coalesce(&blocks);
            let back: Vec<u32> = runs.iter().flat_map(|run| run.first..run.first + run.count).collect();
            prop_assert_eq!(&back, &blocks);
            // Block `b` holds two words: 2b, 2b + 1.
            let arena = Arena::new((0..40).map(AtomicU64::new).collect(), 16);
            let words: Vec<u64> = blocks.iter().flat_map(|block| [u64::from(*block) * 2, u64::from(*block) * 2 + 1]).collect();
            let offset = offset.min(words.len());
            let expected: Vec<u8> = words[offset..].iter().take(len).flat_map(|word| word.to_ne_bytes()).collect();
            let mut gathered = vec![0; expected.len()];
            arena.gather(&runs, offset * 8, &mut gathered);
            prop_assert_eq!(gathered, expected);
        }
    }
}
