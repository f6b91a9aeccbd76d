//! The paged KV arena as the kernels see it: where a head of a token lies, and writing it. Layout of a block:
//! `[layer][K|V][kv_head]`, then for f32 `[token][head_dim]`. For bf16 the values stand as the dot products of `dots.rs`
//! take them, which sum over two neighbours in each 32-bit lane: K sums over dimensions, so it is
//! `[head_dim / 2][token][2]`, V sums over tokens, so it is `[token / 2][head_dim][2]`. Who owns which block is
//! `blocks.rs`'s matter.
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::pool;
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
        pool::for_each_run(places.len(), 16, |run| {
            for (row, place) in rows[run.start * stride..run.end * stride].chunks_exact(stride).zip(&places[run]) {
                for (i, head) in row[at_k..].chunks_exact(head_dim).enumerate() {
                    let part = if i < kv_heads { Part::K } else { Part::V };
                    self.write_head(place, layer, part, i % kv_heads, head);
                }
            }
        });
    }

    fn write_head(&self, place: &Place, layer: usize, part: Part, head: usize, values: &[f32]) {
        let (slot, dim) = (place.slot, self.layout.head_dim);
        assert!(slot < KV_BLOCK_TOKENS && values.len() == dim);
        let to = self.head(place.block, layer, part, head).cast_mut();
        let round = |value: f32| half::bf16::from_f32(value).to_bits();
        // SAFETY: `head` is 16 × head_dim values of the layout's type, aligned to 8 bytes, in an arena that lives; all
        // indices are below that. Atomic stores, because a transfer may read other tokens of the block meanwhile.
        unsafe {
            match (self.layout.dtype, part) {
                (KvDtype::F32, _) => {
                    for (i, value) in values.iter().enumerate() {
                        let to = to.cast::<u32>().add(slot * dim + i);
                        AtomicU32::from_ptr(to).store(value.to_bits(), Ordering::Relaxed);
                    }
                }
                (KvDtype::Bf16, Part::K) => {
                    for (i, two) in values.chunks_exact(2).enumerate() {
                        let word = u32::from(round(two[0])) | u32::from(round(two[1])) << 16;
                        let to = to.cast::<u32>().add(i * KV_BLOCK_TOKENS + slot);
                        AtomicU32::from_ptr(to).store(word, Ordering::Relaxed);
                    }
                }
                (KvDtype::Bf16, Part::V) => {
                    for (i, value) in values.iter().enumerate() {
                        let to = to.cast::<u16>().add((slot / 2 * dim + i) * 2 + slot % 2);
                        AtomicU16::from_ptr(to).store(round(*value), Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// `block_tokens × head_dim` values, in the order of the layout. Valid as long as the arena lives.
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
        // Two dimensions of token 0, and nothing of token 1 yet.
        assert_eq!(arena.words()[0].load(Ordering::Relaxed), 0x3f82_3f80);
        assert_eq!(arena.words()[8].load(Ordering::Relaxed), 0x3f80_3f81);
        arena.write(0, &row, 32, &[Place { block: 0, slot: 1 }]);
        assert_eq!(arena.words()[0].load(Ordering::Relaxed), 0x3f82_3f80_3f82_3f80);
        // V: the same dimension of both tokens.
        assert_eq!(arena.words()[64].load(Ordering::Relaxed), 0x3f82_3f82_3f80_3f80);
    }
}
