//! The paged KV arena as the kernels see it: where a head of a token lies, and writing it. Layout of a block:
//! `[layer][K|V][kv_head][token][head_dim]`. Who owns which block is `blocks.rs`'s matter.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::simd::LANES;
use crate::executor::KvDtype;

/// Tokens of a block: one vector of attention scores.
pub const KV_BLOCK_TOKENS: usize = LANES;

/// The sizes that give a block's bytes their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Transformer layers.
    pub layers: usize,
    /// K (and V) heads of a layer.
    pub kv_heads: usize,
    /// Values of a head; a multiple of 16.
    pub head_dim: usize,
    /// Number format.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.head_bytes()
    }

    fn head_bytes(&self) -> usize {
        KV_BLOCK_TOKENS * self.head_dim * self.dtype.size_bytes()
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    K,
    V,
}

/// Where a token's KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Arena block.
    pub block: u32,
    /// Token within it.
    pub slot: usize,
}

/// The memory and its layout.
#[derive(Clone)]
pub struct KvArena {
    words: Arc<[AtomicU64]>,
    layout: KvLayout,
}

impl KvArena {
    /// Views `words` as blocks of `layout`. `None` if the layout's sizes do not suit the kernels or the words are not a
    /// whole number of blocks.
    pub fn new(words: Arc<[AtomicU64]>, layout: KvLayout) -> Option<Self> {
        let fits = layout.block_bytes() > 0
            && layout.head_dim.is_multiple_of(LANES)
            && (words.len() * 8).is_multiple_of(layout.block_bytes());
        fits.then_some(Self { words, layout })
    }

    /// The layout.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Blocks of the arena.
    pub fn blocks(&self) -> usize {
        self.words.len() * 8 / self.layout.block_bytes()
    }

    /// The memory.
    pub fn words(&self) -> &Arc<[AtomicU64]> {
        &self.words
    }

    /// Writes a layer's K and V of several tokens. Row `i` of `rows` is `stride` values whose last
    /// `2 * kv_heads * head_dim` are K's heads and V's heads; it goes to `places[i]`.
    ///
    /// # Panics
    /// If a place, the layer, or the lengths are out of range.
    pub fn write(&self, layer: usize, rows: &[f32], stride: usize, places: &[Place]) {
        let KvLayout { kv_heads, head_dim, .. } = self.layout;
        assert!(rows.len() == places.len() * stride && stride >= 2 * kv_heads * head_dim);
        let at_k = stride - 2 * kv_heads * head_dim;
        rows.par_chunks_exact(stride).with_min_len(16).zip(places).for_each(|(row, place)| {
            for (i, head) in row[at_k..].chunks_exact(head_dim).enumerate() {
                let part = if i < kv_heads { Part::K } else { Part::V };
                self.write_head(self.head_offset(place.block, layer, part, i % kv_heads), place.slot, head);
            }
        });
    }

    fn write_head(&self, head_bytes_at: usize, slot: usize, values: &[f32]) {
        assert!(slot < KV_BLOCK_TOKENS);
        let dtype = self.layout.dtype;
        let first = (head_bytes_at + slot * values.len() * dtype.size_bytes()) / 8;
        let words = &self.words[first..first + values.len() * dtype.size_bytes() / 8];
        match dtype {
            KvDtype::F32 => {
                for (word, pair) in words.iter().zip(values.chunks_exact(2)) {
                    let (low, high) = (u64::from(pair[0].to_bits()), u64::from(pair[1].to_bits()));
                    word.store(low | high << 32, Ordering::Relaxed);
                }
            }
            KvDtype::Bf16 => {
                for (word, four) in words.iter().zip(values.chunks_exact(4)) {
                    let bits = |i: usize| u64::from(half::bf16::from_f32(four[i]).to_bits());
                    word.store(bits(0) | bits(1) << 16 | bits(2) << 32 | bits(3) << 48, Ordering::Relaxed);
                }
            }
        }
    }

    /// `block_tokens × head_dim` values, row-major. Valid as long as the arena lives.
    ///
    /// # Panics
    /// If an argument is out of range.
    pub(super) fn head(&self, block: u32, layer: usize, part: Part, head: usize) -> *const u8 {
        let at = self.head_offset(block, layer, part, head);
        let words = &self.words[at / 8..(at + self.layout.head_bytes()) / 8];
        words.as_ptr().cast()
    }

    fn head_offset(&self, block: u32, layer: usize, part: Part, head: usize) -> usize {
        let KvLayout { layers, kv_heads, .. } = self.layout;
        assert!((block as usize) < self.blocks() && layer < layers && head < kv_heads);
        let index = (layer * 2 + usize::from(part == Part::V)) * kv_heads + head;
        block as usize * self.layout.block_bytes() + index * self.layout.head_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_block_layer_part_head_token_dim() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 16, dtype: KvDtype::F32 };
        let words = (0..layout.block_bytes() / 8 * 4).map(|_| AtomicU64::new(0)).collect();
        let arena = KvArena::new(words, layout).expect("fits");
        assert_eq!((arena.blocks(), layout.block_bytes()), (4, 2 * 2 * 3 * 16 * 16 * 4));
        let row: Vec<f32> = (0..7 + 96).map(|i| i as f32).collect();
        arena.write(1, &row, row.len(), &[Place { block: 2, slot: 5 }]);
        // V of head 1, value 3.
        let at = (((2 * 2 + 1) * 2 + 1) * 3 + 1) * 256 + 5 * 16 + 3;
        let word = arena.words()[at / 2].load(Ordering::Relaxed);
        assert_eq!(f32::from_bits((word >> (32 * (at % 2))) as u32), (7 + 48 + 16 + 3) as f32);
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 16, dtype: KvDtype::Bf16 };
        let words = (0..layout.block_bytes() / 8).map(|_| AtomicU64::new(0)).collect();
        let arena = KvArena::new(words, layout).expect("fits");
        let ties = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff].map(f32::from_bits);
        let row: Vec<f32> = (0..32).map(|i| ties[i % 4]).collect();
        arena.write(0, &row, 32, &[Place { block: 0, slot: 0 }]);
        assert_eq!(arena.words()[0].load(Ordering::Relaxed), 0x3f80_3f81_3f82_3f80);
    }
}
