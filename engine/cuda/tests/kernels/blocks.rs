//! Hashes and copies of blocks.
use tandem_cuda::kernels::blocks::{CopyBlocks, PieceRow, Xxh3, copy_blocks, xxh3};
use xxhash_rust::xxh3::xxh3_64;

use crate::gpu::{Gpu, Random};

#[test]
fn hashes_are_those_of_the_crate_for_all_lengths() {
    let Some(gpu) = Gpu::get() else { return };
    let mut random = Random(10);
    let words: Vec<u64> = (0..8192).map(|_| random.word()).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // Every length up to a leaf and a word more, at places that are aligned to words only; and some that are longer.
    let mut pieces: Vec<(u64, u64, u64)> = (0..=513).map(|words| (8 * (words * 7 % 509), 8 * words, 1)).collect();
    pieces.extend([(0, 8192, 1), (8, 12_296, 1), (16, 20_480, 1), (0, 32_768, 1)]);
    // Rows of several: leaves, words, and lengths of which every second one is not aligned to 16 bytes.
    pieces.extend([(4096, 4096, 13), (8, 8, 37), (24, 1032, 5), (8, 4104, 9), (0, 0, 3)]);
    let (mut rows, mut first) = (Vec::new(), 0);
    for &(at, bytes, count) in &pieces {
        rows.push(PieceRow { at, bytes, first });
        first += count;
    }
    let (memory, list, count) = (gpu.holding(&words), gpu.holding(&rows), first as usize);
    let digests = gpu.space::<u64>(count);
    let asked = Xxh3 { digests: digests.mem(), memory: memory.mem(), rows: list.mem(), row_count: rows.len(), count };
    gpu.launch(xxh3(&asked));
    let mut got = gpu.read::<u64>(&digests).into_iter();
    for (at, length, count) in pieces {
        for place in (0..count).map(|piece| at + piece * length) {
            let want = xxh3_64(&bytes[place as usize..][..length as usize]);
            assert_eq!(got.next(), Some(want), "{length} bytes at {place}");
        }
    }
    assert_eq!(got.next(), None);
}

#[test]
fn blocks_are_copied_and_nothing_else() {
    let Some(gpu) = Gpu::get() else { return };
    for block_bytes in [16, 4096, 36_880] {
        let (words, blocks) = (block_bytes / 8, 6);
        let mut random = Random(11);
        let mut values: Vec<u64> = (0..blocks * words).map(|_| random.word()).collect();
        let (memory, pairs) = (gpu.holding(&values), gpu.holding(&[[4u32, 0], [1, 3], [1, 5]]));
        gpu.launch(copy_blocks(&CopyBlocks { memory: memory.mem(), pairs: pairs.mem(), count: 3, block_bytes }));
        for (from, to) in [(4, 0), (1, 3), (1, 5)] {
            values.copy_within(from * words..(from + 1) * words, to * words);
        }
        assert_eq!(gpu.read::<u64>(&memory), values, "blocks of {block_bytes} bytes");
    }
}
