//! Hashes and copies of blocks.
use tandem_cuda::kernels::blocks::{CopyBlocks, Piece, Xxh3, copy_blocks, xxh3};
use xxhash_rust::xxh3::xxh3_64;

use crate::gpu::{Gpu, Random};

#[test]
fn hashes_are_those_of_the_crate_for_all_lengths() {
    let Some(gpu) = Gpu::get() else { return };
    let mut random = Random(10);
    let words: Vec<u64> = (0..4096).map(|_| random.word()).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // Every length up to a leaf and a word more, at places that are aligned to words only; and some that are longer.
    let mut pieces: Vec<Piece> = (0..=513).map(|words| Piece { at: 8 * (words * 7 % 509), bytes: 8 * words }).collect();
    pieces.extend([(0, 8192), (8, 12_296), (16, 20_480), (0, 32_768)].map(|(at, bytes)| Piece { at, bytes }));
    let (memory, list) = (gpu.holding(&words), gpu.holding(&pieces));
    let digests = gpu.space::<u64>(pieces.len());
    let count = pieces.len();
    gpu.launch(xxh3(&Xxh3 { digests: digests.mem(), memory: memory.mem(), pieces: list.mem(), count }));
    for (got, piece) in gpu.read::<u64>(&digests).into_iter().zip(pieces) {
        let want = xxh3_64(&bytes[piece.at as usize..][..piece.bytes as usize]);
        assert_eq!(got, want, "{piece:?}");
    }
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
