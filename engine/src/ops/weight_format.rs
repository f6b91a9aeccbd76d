//! Number formats of packed weights, and how they lie.
//!
//! ```text
//! matrix        | panel: columns 0 .. 32 | panel: columns 32 .. 64 | ...       the last one filled up with zeros
//! panel         | super-block | super-block | ...
//! super-block   | scales and offsets | block | ...         one block, or of K-quants eight, which share the scales
//! block         32 k of the 32 columns                                             the last one likewise filled up
//!
//!            scales and offsets        block                                                            bytes
//! f32, f16                             k 0: c0 c1 ... c31 | k 1: c0 c1 ... c31 | ... | k 31: c0 c1 ... c31
//! bf16                                 16 rows of pairs                                              2,048
//! Q8_0       32 scales                 8 rows of two pairs                                      64 + 1,024
//! Q4_1       32 scales | 32 offsets    4 rows of nibbles                                         128 + 512
//! Q5_1       32 scales | 32 offsets    fifth bits | 4 rows of nibbles                            128 + 640
//! Q4_K       32 scales | 32 offsets    32 pairs of factors | 4 rows of nibbles         128 + 8 × (64 + 512)
//! Q5_K       32 scales | 32 offsets    32 pairs of factors | fifth bits | 4 rows       128 + 8 × (64 + 640)
//! Q6_K       32 scales                 32 pairs of factors | twice: upper bits | 2 rows  64 + 8 × (64 + 768)
//!
//! a row         left half | right half: 64 bytes each, 16 columns (the panel's left or right ones)
//!
//! pairs         a pair of k in each lane of 32 bits; of two pairs (Q8_0) 16 lanes of 16 bits, then 16 more
//!
//!                           c0            c1                   c15
//!                        low   high    low   high           low   high
//!          row 0         k0    k1      k0    k1     ...     k0    k1
//!          row 1         k2    k3      k2    k3     ...     k2    k3
//!           ...
//!          row 15        k30   k31     k30   k31    ...     k30   k31
//!
//! nibbles       four pairs of k in each lane of 32 bits. Row r of a column:
//!
//!          bits          0-3     4-7     8-11    12-15   16-19   20-23   24-27   28-31
//!          k             8r      8r+2    8r+4    8r+6    8r+1    8r+3    8r+5    8r+7
//!
//! fifth bits    a row, with a lane of 32 bits for each column. That of a nibble in row r at the bits 8b .. 8b+4 is bit
//!               8b + 2r, at 8b+4 .. 8b+8 it is bit 8b + 2r + 1
//!
//! upper bits    a row, with two bits for each nibble of the two rows behind it, r (0 or 2) and r+1, at twice the
//!               place: 8b and 8b + 2, for row r+1 8b + 4 and 8b + 6
//! ```
//!
//! Pairs, because the instructions of `bf16_gemm.rs` and `tiles.rs` take two `k` at a time: a vector's 32-bit lane
//! belongs to a column and has the even `k` low, the odd `k` high. The halves of bf16 are two tiles of AMX, each every
//! other line of the block. Fifth and upper bits lie so that a rotation puts those of four nibbles in place, one above
//! each.
//!
//! Kernels read a panel from its first line to its last, because the processor foresees no other order. (A tile of bf16
//! takes the even or the odd lines of a block.) With the left half of a block before the right one, one row times bf16
//! weights took 1.3 times as long on two cores of an AMD EPYC (Zen 4).
//!
//! Scales and offsets are f16, one a column. A weight is `scale * q + offset`; of Q4_K and Q5_K scale and offset have
//! factors below 64 (GGML subtracts minimums: the offset is negated); a weight of Q6_K is
//! `scale * factor * (q - 32)`, its factors those of the first and the last 16 `k`. Factors take a byte each: Q4_K,
//! Q5_K and Q6_K have 4.63, 5.63 and 6.56 bits a weight, in GGML's files 4.5, 5.5 and 6.56. Q4_0 and Q5_0 are kept as
//! Q4_1 and Q5_1.
use tandem_gguf::TensorType;

use super::prefetch::{CacheLevel, prefetch_every};
use super::simd::{Isa, LANES};

/// Output columns of a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// `k`s of a block; also the quantization group of most formats. Those of 256 have a scale for each 32, or 16.
pub(super) const BLOCK: usize = 32;
/// The bf16 number below which `x` and weights count as zero where there are tiles: 2⁻⁵⁰, by its bits.
pub(super) const TINY: u16 = 0x2680;

/// Number format of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Plain f32.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// GGML's Q4_1: `d * q + m`, q in 0..16, groups of 32. Also its Q4_0, `d * (q - 8)`.
    Q4_1,
    /// GGML's Q5_1: `d * q + m`, q in 0..32, groups of 32. Also its Q5_0, `d * (q - 16)`.
    Q5_1,
    /// GGML's Q8_0: `d * q`, q an i8, groups of 32.
    Q8_0,
    /// GGML's Q4_K: `d * s * q - e * m`, q in 0..16, s and m in 0..64 for each 32.
    Q4K,
    /// GGML's Q5_K: the same, q in 0..32.
    Q5K,
    /// GGML's Q6_K: `d * s * (q - 32)`, q in 0..64, s an i8 for each 16.
    Q6K,
}

impl WeightFormat {
    /// In which weights of a file's type are kept. Kernels that do not round keep every value: what has a format here
    /// stays in it, all else is unpacked to f32. Kernels that round to bf16 anyway have it so in memory.
    pub fn kept(dtype: TensorType, isa: Isa) -> Self {
        match dtype {
            TensorType::Q4_0 | TensorType::Q4_1 => Self::Q4_1,
            TensorType::Q5_0 | TensorType::Q5_1 => Self::Q5_1,
            TensorType::Q8_0 => Self::Q8_0,
            TensorType::Q4_K => Self::Q4K,
            TensorType::Q5_K => Self::Q5K,
            TensorType::Q6_K => Self::Q6K,
            TensorType::BF16 => Self::Bf16,
            _ if isa.rounds() => Self::Bf16,
            TensorType::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    /// Of a block, without the scales and offsets in front of it.
    pub(super) const fn block_bytes(self) -> usize {
        self.factors_bytes()
            + match self {
                Self::F32 => BLOCK * PANEL * 4,
                Self::F16 | Self::Bf16 => BLOCK * PANEL * 2,
                Self::Q8_0 => BLOCK * PANEL,
                Self::Q4_1 | Self::Q4K => NIBBLES_BYTES,
                Self::Q5_1 | Self::Q5K => NIBBLES_BYTES + BLOCK * PANEL / 8,
                Self::Q6K => NIBBLES_BYTES + BLOCK * PANEL / 4,
            }
    }

    /// Of a block's factors: where its integers begin.
    pub(super) const fn factors_bytes(self) -> usize {
        if self.blocks_together() > 1 { PANEL * 2 } else { 0 }
    }

    /// Of the scales and offsets that a super-block begins with.
    pub(super) const fn scales_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Q8_0 | Self::Q6K => PANEL * 2,
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => PANEL * 4,
        }
    }

    /// Blocks of a super-block.
    pub(super) const fn blocks_together(self) -> usize {
        if matches!(self, Self::Q4K | Self::Q5K | Self::Q6K) { 8 } else { 1 }
    }

    pub(super) const fn super_block_bytes(self) -> usize {
        self.scales_bytes() + self.blocks_together() * self.block_bytes()
    }

    /// Of a panel of so many `k`.
    pub(super) const fn panel_bytes(self, k: usize) -> usize {
        k.div_ceil(BLOCK).div_ceil(self.blocks_together()) * self.super_block_bytes()
    }

    /// Where in a panel the scales of a block begin, and where the block does.
    pub(super) const fn places(self, block: usize) -> [usize; 2] {
        let (before, inside) = (block / self.blocks_together(), block % self.blocks_together());
        let scales = before * self.super_block_bytes();
        [scales, scales + self.scales_bytes() + inside * self.block_bytes()]
    }

    /// Where a row of a half's nibbles begins behind the block's factors.
    #[inline(always)]
    pub(super) const fn nibbles_at(self, half: usize, row: usize) -> usize {
        let (before, together) = self.upper_and_rows();
        ((row / together + 1) * before + 2 * row + half) * LANE_ROW_BYTES
    }

    /// Where the bits above the nibbles of a row begin, likewise, if the format has any.
    #[inline(always)]
    pub(super) const fn upper_at(self, half: usize, row: usize) -> usize {
        let (before, together) = self.upper_and_rows();
        (row / together * (before + 2 * together) + half) * LANE_ROW_BYTES
    }

    /// How many rows of lanes with upper bits, those of both halves, stand before so many rows of nibbles.
    #[inline(always)]
    const fn upper_and_rows(self) -> (usize, usize) {
        match self {
            Self::Q5_1 | Self::Q5K => (2, 4),
            Self::Q6K => (2, 2),
            _ => (0, 4),
        }
    }

    /// A block of the panel; one that may lie behind it if nobody reads it.
    #[inline(always)]
    pub(super) const fn block(self, panel: *const u8, block: usize) -> Block {
        let [scales, numbers] = self.places(block);
        Block { scales: panel.wrapping_add(scales), numbers: panel.wrapping_add(numbers) }
    }

    /// Asks memory for one in `every` line of a block, which may lie behind the panel, and with the first of a
    /// super-block for its scales.
    #[inline(always)]
    pub(super) fn ask_for(self, every: usize, to: CacheLevel, panel: *const u8, block: usize) {
        let Block { scales, numbers } = self.block(panel, block);
        if block.is_multiple_of(self.blocks_together()) {
            prefetch_every(every, to, scales, self.scales_bytes());
        }
        prefetch_every(every, to, numbers, self.block_bytes());
    }
}

/// A block of a panel.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Scales and offsets, as far as the format has them.
    pub scales: *const u8,
    /// Factors, where the format has them, and integers; or plain numbers.
    pub numbers: *const u8,
}

/// Of a block's nibbles.
const NIBBLES_BYTES: usize = BLOCK * PANEL / 2;
/// Of 16 lanes of 32 bits.
const LANE_ROW_BYTES: usize = LANES * 4;

/// Bytes of a packed matrix; the largest number where that is more than there are.
pub fn packed_bytes(format: WeightFormat, columns: u64, k: u64) -> u64 {
    let super_blocks = k.div_ceil((BLOCK * format.blocks_together()) as u64);
    columns.div_ceil(PANEL as u64).saturating_mul(super_blocks).saturating_mul(format.super_block_bytes() as u64)
}

/// A row of a tensor, as its file has it: an output column of the product.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// One that [`dequantize`] unpacks.
    pub dtype: TensorType,
    /// Of the whole row.
    pub bytes: &'a [u8],
}
