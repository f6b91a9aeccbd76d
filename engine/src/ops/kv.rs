//! The paged KV arena as the kernels see it: where a head of a token lies, and writing it. Layout of a block:
//! `[layer][K|V][kv_head][token / 16]`, and within such a sub-block of 16 tokens, which the kernels take at a time, for
//! f32 `[token][head_dim]`. For bf16 the values stand as the dot products of `attention/in_bf16.rs` take them, which
//! sum over two neighbours in each 32-bit lane: K sums over dimensions, so it is `[head_dim / 2][token][2]`, V sums
//! over tokens, so it is `[token / 2][head_dim][2]` (that file has the pictures). For int8 the values stand in the same
//! orders, one byte each, and behind them the 16 tokens' scales in bf16. Who owns which block is `blocks.rs`'s matter.
//!
//! **8-bit numbers.** A token's K (and V) of a head has one scale, its greatest magnitude / 127 rounded to bf16; a
//! value is `integer · scale`, exact in f32, and off by half a scale at most (more only where the scale is subnormal).
//! So tokens can be written one by one: none changes what another's bytes mean. A scale that is zero makes all values
//! zero. NaN or an infinity among the values becomes the scale, and that token's whole head reads as NaN; other tokens
//! and heads do not notice.
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use tandem_memory::{HostMemory, KvMemory};

use super::pool;
use super::simd::LANES;
use crate::numerics::{KvDtype, KvOrder};
use crate::step::Place;

/// Tokens of a sub-block: one vector of attention scores. A block is one or more.
pub const SUB_BLOCK_TOKENS: usize = LANES;

/// One huge page: what the system gives a thread that touches it first.
const TOUCH_BYTES: usize = 2 << 20;

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
    /// Tokens of a block; a multiple of 16.
    pub block_tokens: usize,
}

impl KvLayout {
    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.sub_blocks() * self.sub_block_bytes()
    }

    /// How the values of a block lie, by name.
    pub fn order(&self) -> KvOrder {
        match self.dtype {
            KvDtype::F32 => KvOrder::F32Rows,
            KvDtype::Bf16 => KvOrder::Bf16Pairs,
            KvDtype::Int8 => KvOrder::Int8Pairs,
        }
    }

    /// Bytes of a sub-block's K or V of one head.
    pub(super) fn sub_block_bytes(&self) -> usize {
        SUB_BLOCK_TOKENS * self.dtype.head_bytes(self.head_dim)
    }

    fn sub_blocks(&self) -> usize {
        self.block_tokens / SUB_BLOCK_TOKENS
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    K,
    V,
}

/// The memory and its layout.
#[derive(Clone)]
pub struct KvArena {
    memory: Arc<HostMemory>,
    layout: KvLayout,
}

impl KvArena {
    /// Views `memory` as blocks of `layout`. `None` if the layout's sizes do not suit the kernels or the memory is not
    /// a whole number of blocks.
    pub fn new(memory: Arc<HostMemory>, layout: KvLayout) -> Option<Self> {
        let fits = layout.block_bytes() > 0
            && layout.head_dim.is_multiple_of(LANES)
            && layout.block_tokens.is_multiple_of(SUB_BLOCK_TOKENS)
            && memory.bytes().is_multiple_of(layout.block_bytes());
        fits.then_some(Self { memory, layout })
    }

    /// The layout.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Blocks of the arena.
    pub fn blocks(&self) -> usize {
        self.memory.bytes() / self.layout.block_bytes()
    }

    /// The memory.
    pub fn memory(&self) -> Arc<dyn KvMemory> {
        self.memory.clone()
    }

    /// The memory as its words.
    pub fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    /// Makes the arena's pages exist. The pool's threads take pieces in turn, so that the arena lies in the memory of
    /// all the sockets that they run on: any of them may read any sequence.
    pub fn touch(&self) {
        pool::for_each(self.memory.bytes().div_ceil(TOUCH_BYTES), |i| {
            self.memory.touch(i * TOUCH_BYTES..(i + 1) * TOUCH_BYTES);
        });
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
        let (slot, dim) = (place.slot % SUB_BLOCK_TOKENS, self.layout.head_dim);
        assert!(place.slot < self.layout.block_tokens && values.len() == dim);
        let to = self.sub_block(&[place.block], place.slot / SUB_BLOCK_TOKENS, layer, part, head).cast_mut();
        // SAFETY: a sub-block is 16 × head_dim values of the layout's type (and for int8 16 scales), aligned to 8
        // bytes, in an arena that lives; all indices are below that. Atomic stores, because other threads write other
        // tokens of the same words. Nobody reads the layer of a block that is written here: a transfer, which reads in
        // words of 64 bits, begins with a layer when all its tokens are written, or with the whole block when the step
        // has ended.
        unsafe {
            match (self.layout.dtype, part) {
                (KvDtype::F32, _) => {
                    for (i, value) in values.iter().enumerate() {
                        let to = to.cast::<u32>().add(slot * dim + i);
                        AtomicU32::from_ptr(to).store(value.to_bits(), Ordering::Relaxed);
                    }
                }
                (KvDtype::Bf16, Part::K) => {
                    for (c, chunk) in values.chunks(LANES).enumerate() {
                        for (i, two) in rounded(chunk).as_chunks::<2>().0.iter().enumerate() {
                            let word = u32::from(two[0]) | u32::from(two[1]) << 16;
                            let to = to.cast::<u32>().add((c * LANES / 2 + i) * SUB_BLOCK_TOKENS + slot);
                            AtomicU32::from_ptr(to).store(word, Ordering::Relaxed);
                        }
                    }
                }
                (KvDtype::Bf16, Part::V) => {
                    let row = to.cast::<u16>().add(slot / 2 * dim * 2 + slot % 2);
                    for (c, chunk) in values.chunks(LANES).enumerate() {
                        for (i, value) in rounded(chunk).into_iter().enumerate() {
                            AtomicU16::from_ptr(row.add(2 * (c * LANES + i))).store(value, Ordering::Relaxed);
                        }
                    }
                }
                (KvDtype::Int8, part) => write_int8(to, slot, part, values),
            }
        }
    }

    /// K or V of one head of the positions `16 * index ..` of a sequence in `blocks`: `16 × head_dim` values in the
    /// order of the layout, and the scales of 8-bit ones. Valid as long as the arena lives.
    ///
    /// # Panics
    /// If an argument is out of range.
    pub(super) fn sub_block(&self, blocks: &[u32], index: usize, layer: usize, part: Part, head: usize) -> *const u8 {
        let (sub_blocks, bytes) = (self.layout.sub_blocks(), self.layout.sub_block_bytes());
        let at = self.head_offset(blocks[index / sub_blocks], layer, part, head) + index % sub_blocks * bytes;
        let words = &self.words()[at / 8..(at + bytes) / 8];
        words.as_ptr().cast()
    }

    fn head_offset(&self, block: u32, layer: usize, part: Part, head: usize) -> usize {
        let KvLayout { layers, kv_heads, .. } = self.layout;
        assert!((block as usize) < self.blocks() && layer < layers && head < kv_heads);
        let index = (layer * 2 + usize::from(part == Part::V)) * kv_heads + head;
        block as usize * self.layout.block_bytes() + index * self.layout.sub_blocks() * self.layout.sub_block_bytes()
    }
}

/// 16 values to bf16, to the nearest, ties to even; without branches, so that the compiler takes them together.
#[inline(always)]
fn rounded(values: &[f32]) -> [u16; LANES] {
    std::array::from_fn(|i| {
        let bits = values[i].to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        // A NaN keeps its sign and stays one.
        (if is_nan { bits >> 16 | 0x40 } else { nearest }) as u16
    })
}

/// # Safety
/// `to` is a sub-block of 8-bit numbers, as for [`KvArena::write_head`]'s other types.
unsafe fn write_int8(to: *mut u8, slot: usize, part: Part, values: &[f32]) {
    let (dim, scale) = (values.len(), scale_of(values));
    let byte = |value: f32| quantized(value, scale.to_f32()).cast_unsigned();
    // SAFETY: 16 × head_dim numbers, then 16 scales, all aligned to their own sizes.
    unsafe {
        let scales = to.add(SUB_BLOCK_TOKENS * dim).cast::<u16>();
        AtomicU16::from_ptr(scales.add(slot)).store(scale.to_bits(), Ordering::Relaxed);
        match part {
            Part::K => {
                for (i, two) in values.chunks_exact(2).enumerate() {
                    let word = u16::from_le_bytes([byte(two[0]), byte(two[1])]);
                    let to = to.cast::<u16>().add(i * SUB_BLOCK_TOKENS + slot);
                    AtomicU16::from_ptr(to).store(word, Ordering::Relaxed);
                }
            }
            Part::V => {
                for (i, value) in values.iter().enumerate() {
                    let to = to.add((slot / 2 * dim + i) * 2 + slot % 2);
                    AtomicU8::from_ptr(to).store(byte(*value), Ordering::Relaxed);
                }
            }
        }
    }
}

/// What the 8-bit values of a token's head are multiples of. Rounded before anything is divided by it: what is read
/// back depends on the stored scale alone.
pub(super) fn scale_of(values: &[f32]) -> half::bf16 {
    // As integers, magnitudes have the order of the numbers, infinity and then NaN above all.
    let greatest = values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0);
    half::bf16::from_f32(f32::from_bits(greatest) / 127.0)
}

/// The nearest multiple of `scale`, ties to even; without a scale 0.
pub(super) fn quantized(value: f32, scale: f32) -> i8 {
    /// 1.5 · 2^23: what is added to it loses its fraction, rounded to nearest even (and libm is not called for it).
    const MAGIC: f32 = 12_582_912.0;
    // A scale was rounded by 2^-8 of itself at most, so that only those below the normal numbers reach the limits. The
    // cast makes 0 of the NaN that a division by a NaN gives, or of zero by zero.
    ((value / scale).clamp(-127.0, 127.0) + MAGIC - MAGIC) as i8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounding_is_that_of_half(bits in prop::collection::vec(any::<u32>(), LANES)) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let want: Vec<u16> = values.iter().map(|&value| half::bf16::from_f32(value).to_bits()).collect();
            prop_assert_eq!(&rounded(&values)[..], want);
        }
    }

    fn zeroed(blocks: usize, layout: KvLayout) -> KvArena {
        let memory = HostMemory::zeroed(blocks * layout.block_bytes()).expect("little");
        KvArena::new(memory, layout).expect("fits")
    }

    proptest! {
        /// What a vector of the kernels reads is one line of the cache and never two: of f32 and bf16 each head begins
        /// at one, of int8 each block and layer.
        #[test]
        fn blocks_begin_at_a_cache_line(
            layers in 1usize..5, kv_heads in 1usize..5, wide in 1usize..9, dtype in 0usize..3,
            block_tokens in 0usize..4,
        ) {
            const LINE_BYTES: usize = 64;
            let dtype = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8][dtype];
            let block_tokens = tandem_proto::BLOCK_TOKENS[block_tokens];
            let layout = KvLayout { layers, kv_heads, head_dim: wide * 16, dtype, block_tokens };
            let arena = zeroed(3, layout);
            arena.touch();
            prop_assert_eq!(arena.words().as_ptr().addr() % 4096, 0);
            prop_assert_eq!(layout.block_bytes() / layers % LINE_BYTES, 0);
            for i in 0..3 * layers * kv_heads {
                let (block, layer, head) = ((i / kv_heads / layers) as u32, i / kv_heads % layers, i % kv_heads);
                for part in [Part::K, Part::V] {
                    let is_first = head == 0 && part == Part::K;
                    let at = arena.sub_block(&[block], 0, layer, part, head).addr();
                    prop_assert!(at.is_multiple_of(LINE_BYTES) || (dtype == KvDtype::Int8 && !is_first), "{layout:?}");
                }
            }
        }
    }

    /// K and V of one head, read back.
    fn read_int8(arena: &KvArena, place: &Place) -> [Vec<f32>; 2] {
        let dim = arena.layout().head_dim;
        let bytes: Vec<u8> = arena.words().iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        [0, 1].map(|part| {
            let head_bytes = arena.layout().sub_block_bytes();
            let head = &bytes[(place.block as usize * 2 + part) * head_bytes..][..head_bytes];
            let scale = &head[SUB_BLOCK_TOKENS * dim + 2 * place.slot..];
            let scale = half::bf16::from_le_bytes([scale[0], scale[1]]).to_f32();
            let at = |i: usize| match part {
                0 => (i / 2 * SUB_BLOCK_TOKENS + place.slot) * 2 + i % 2,
                _ => (place.slot / 2 * dim + i) * 2 + place.slot % 2,
            };
            (0..dim).map(|i| f32::from(head[at(i)].cast_signed()) * scale).collect()
        })
    }

    fn int8_arena(blocks: usize, head_dim: usize) -> KvArena {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim, dtype: KvDtype::Int8, block_tokens: 16 };
        let memory = HostMemory::holding(&vec![u64::MAX; blocks * layout.block_bytes() / 8]).expect("little");
        KvArena::new(memory, layout).expect("fits")
    }

    proptest! {
        #[test]
        fn int8_is_off_by_half_a_scale_at_most_whoever_else_is_in_the_block(
            heads in prop::collection::vec((-100i32..100, any::<u64>()), 1..40), wide in 1usize..5,
        ) {
            let (dim, arena) = (wide * 16, int8_arena(3, wide * 16));
            let rows: Vec<Vec<f32>> = heads.iter().map(|&(exponent, seed)| {
                let value = |i: usize| {
                    let bits = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                    (bits as f32 / (1 << 23) as f32 - 1.0) * (exponent as f32).exp2()
                };
                (0..2 * dim).map(value).collect()
            }).collect();
            // From the last slot to the first, a token at a time: the order of writing does not matter.
            let place = |i: usize| Place { block: (2 - i / 16) as u32, slot: i % 16 };
            for (i, row) in rows.iter().enumerate().rev() {
                arena.write(0, row, 2 * dim, &[place(i)]);
            }
            for (i, row) in rows.iter().enumerate() {
                for (want, got) in row.chunks_exact(dim).zip(read_int8(&arena, &place(i))) {
                    let greatest = want.iter().fold(0.0f32, |greatest, x| x.abs().max(greatest));
                    for (want, got) in want.iter().zip(got) {
                        // The scale itself was rounded up by 2^-8 of itself at most.
                        prop_assert!((want - got).abs() <= greatest / 254.0 * (1.0 + 1.0 / 256.0), "{want} {got}");
                    }
                }
            }
        }
    }

    #[test]
    fn int8_rounds_to_nearest_even_and_lies_in_pairs() {
        let arena = int8_arena(1, 16);
        assert_eq!(arena.layout().block_bytes(), 2 * 16 * (16 + 2));
        // The scale is 1.
        let ties = [127.0, 0.5, 1.5, -2.5, -127.0, 3.49, -3.51, 0.0];
        let row: Vec<f32> = (0..32).map(|i| ties[i % 8]).collect();
        arena.write(0, &row, 32, &[Place { block: 0, slot: 0 }]);
        let [k, v] = read_int8(&arena, &Place { block: 0, slot: 0 });
        assert_eq!((&k, &k[..8]), (&v, &[127.0, 0.0, 2.0, -2.0, -127.0, 3.0, -4.0, 0.0][..]));
        let word = |i: usize| arena.words()[i].load(Ordering::Relaxed);
        // K: two dimensions of token 0, then nothing of token 1 yet. Scales come behind 256 values.
        assert_eq!((word(0), word(32)), (0xffff_ffff_ffff_007f, 0xffff_ffff_ffff_3f80));
        // V: a dimension of token 0, and nothing of token 1 yet.
        assert_eq!(word(36), 0xfffe_ff02_ff00_ff7f);
    }

    #[test]
    fn int8_keeps_zeros_and_confines_what_is_no_number() {
        let arena = int8_arena(1, 16);
        let mut rows = vec![1.0; 5 * 32];
        rows[..32].fill(0.0);
        (rows[32 + 3], rows[64 + 16 + 3], rows[64 + 7]) = (f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 4.0);
        rows[96..128].fill(f32::from_bits(1));
        let places: Vec<Place> = (0..5).map(|slot| Place { block: 0, slot }).collect();
        arena.write(0, &rows, 32, &places);
        let read = |slot: usize| read_int8(&arena, &places[slot]);
        let near = |head: &[f32], want: f32| head.iter().all(|x| (x - want).abs() < 0.005);
        assert_eq!(read(0), [vec![0.0; 16], vec![0.0; 16]]);
        let [k, v] = read(1);
        assert!(k.iter().all(|x| x.is_nan()) && near(&v, 1.0));
        let [k, v] = read(2);
        assert!(v.iter().all(|x| x.is_nan()) && near(&k[..7], 1.0) && k[7] == 0.0);
        assert_eq!(read(3), [vec![0.0; 16], vec![0.0; 16]]);
        assert!(read(4).iter().all(|head| near(head, 1.0)));
    }

    #[test]
    fn the_layout_is_block_layer_part_head_sub_block_token_dim() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 16, dtype: KvDtype::F32, block_tokens: 32 };
        let arena = zeroed(4, layout);
        assert_eq!((arena.blocks(), layout.block_bytes()), (4, 2 * 2 * 3 * 32 * 16 * 4));
        let row: Vec<f32> = (0..7 + 96).map(|i| i as f32).collect();
        arena.write(1, &row, row.len(), &[Place { block: 2, slot: 21 }]);
        // V of head 1, token 5 of the second sub-block, value 3.
        let at = (((2 * 2 + 1) * 2 + 1) * 3 + 1) * 512 + 256 + 5 * 16 + 3;
        let word = arena.words()[at / 2].load(Ordering::Relaxed);
        assert_eq!(f32::from_bits((word >> (32 * (at % 2))) as u32), (7 + 48 + 16 + 3) as f32);
        let arena_of = |block_tokens| KvArena::new(Arc::clone(&arena.memory), KvLayout { block_tokens, ..layout });
        assert!(arena_of(24).is_none() && arena_of(0).is_none() && arena_of(64).is_some());
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 16, dtype: KvDtype::Bf16, block_tokens: 16 };
        let arena = zeroed(1, layout);
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
