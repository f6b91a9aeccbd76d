//! Weights as the kernels of [`super::matmul`] read them, and the packing of a model file's rows into that layout:
//! panel by panel on all threads, straight from the file's bytes. No copy of a whole tensor is made in between.
//!
//! ```text
//! matrix   | panel: columns 0 .. 32 | panel: columns 32 .. 64 | ...        the last one filled up with zeros
//! panel    | block: k 0 .. 32 | block: k 32 .. 64 | ...                    likewise
//!
//! block of                                                                                              bytes
//! f32, f16   k 0: c0 c1 ... c31 | k 1: c0 c1 ... c31 | ... | k 31: c0 c1 ... c31
//! bf16       left half | right half                                                                     2,048
//! Q8_0       32 scales | left half | right half                                                    64 + 1,024
//! Q4_1       32 scales | 32 offsets | nibbles                                                       128 + 512
//! Q5_1       32 scales | 32 offsets | nibbles | fifth bits                                    128 + 512 + 128
//! Q4_K       32 scales | 32 offsets | 32 pairs of factors | nibbles                            128 + 64 + 512
//! Q5_K       32 scales | 32 offsets | 32 pairs of factors | nibbles | fifth bits         128 + 64 + 512 + 128
//! Q6_K       32 scales | 32 pairs of factors | nibbles | upper bits                       64 + 64 + 512 + 256
//!
//! a half of bf16, Q8_0   16 columns (the panel's left or right ones), a pair of k in each lane: 16 rows of 16 lanes
//!
//!                           c0            c1                   c15
//!                        low   high    low   high           low   high
//!          pair 0        k0    k1      k0    k1     ...     k0    k1
//!          pair 1        k2    k3      k2    k3     ...     k2    k3
//!           ...
//!          pair 15       k30   k31     k30   k31    ...     k30   k31
//!
//! nibbles       of the left half, then of the right: four pairs of k in each lane of 32 bits, 4 rows of 16 lanes.
//!               Row r of a column:
//!
//!          bits          0-3     4-7     8-11    12-15   16-19   20-23   24-27   28-31
//!          k             8r      8r+2    8r+4    8r+6    8r+1    8r+3    8r+5    8r+7
//!
//! fifth bits    of the left half, then of the right: a lane of 32 bits for each column. That of a nibble in row r at
//!               the bits 8b .. 8b+4 is bit 8b + 2r, at 8b+4 .. 8b+8 it is bit 8b + 2r + 1
//!
//! upper bits    two for each nibble, 2 rows of 16 lanes a half: those of rows r and r+1 (r = 0, 2) together, at twice
//!               the place: 8b and 8b + 2, for row r+1 8b + 4 and 8b + 6
//! ```
//!
//! Pairs, because the instructions of `bf16_gemm.rs` and `tiles.rs` take two `k` at a time: a vector's 32-bit lane
//! belongs to a column and has the even `k` low, the odd `k` high. A half of bf16 is a tile of AMX as it lies there.
//! Fifth and upper bits lie so that a rotation puts those of four nibbles in place, one above each.
//!
//! Scales and offsets are f16, one a column. A weight is `scale * q + offset`; of Q4_K and Q5_K scale and offset have
//! factors below 64 (GGML subtracts minimums: the offset is negated); a weight of Q6_K is
//! `scale * factor * (q - 32)`, its factors those of the first and the last 16 `k`. GGML has scales and offsets of
//! 256 `k` where these blocks have them again every 32: Q4_K, Q5_K and Q6_K take 5.5, 6.5 and 7 bits a weight, not
//! 4.5, 5.5 and 6.56. Q4_0 and Q5_0 are kept as Q4_1 and Q5_1.
//!
//! `blocks.rs` puts weights where these pictures say. Read `matmul.rs` next.
use std::sync::atomic::{AtomicBool, Ordering};

use tandem_gguf::TensorType;

use super::blocks::{put_bf16, put_row, read_column};
use super::pool;
use super::simd::{Isa, LANES};
use super::weight_memory::WeightMemory;

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

    pub(super) const fn block_bytes(self) -> usize {
        self.header_bytes()
            + match self {
                Self::F32 => BLOCK * PANEL * 4,
                Self::F16 | Self::Bf16 => BLOCK * PANEL * 2,
                Self::Q8_0 => BLOCK * PANEL,
                Self::Q4_1 | Self::Q4K => NIBBLES_BYTES,
                Self::Q5_1 | Self::Q5K => NIBBLES_BYTES + BLOCK * PANEL / 8,
                Self::Q6K => NIBBLES_BYTES + BLOCK * PANEL / 4,
            }
    }

    /// Of scales, offsets and factors: where a block's integers begin.
    pub(super) const fn header_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Q8_0 => PANEL * 2,
            Self::Q4_1 | Self::Q5_1 | Self::Q6K => PANEL * 4,
            Self::Q4K | Self::Q5K => PANEL * 6,
        }
    }
}

/// Of a block's nibbles: fifth and upper bits stand behind them.
pub(super) const NIBBLES_BYTES: usize = BLOCK * PANEL / 2;

/// Bytes of a packed matrix; the largest number where that is more than there are.
pub fn packed_bytes(format: WeightFormat, columns: u64, k: u64) -> u64 {
    let blocks = columns.div_ceil(PANEL as u64).saturating_mul(k.div_ceil(BLOCK as u64));
    blocks.saturating_mul(format.block_bytes() as u64)
}

/// A row of a tensor, as its file has it: an output column of the product.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// One that [`dequantize`] unpacks.
    pub dtype: TensorType,
    /// Of the whole row.
    pub bytes: &'a [u8],
}

/// `W`, `columns` × `k` (the row-major `[out, in]` of the model file), in the layout that the kernels read.
pub struct PackedMatrix {
    format: WeightFormat,
    columns: usize,
    k: usize,
    bytes: WeightMemory,
}

impl PackedMatrix {
    /// Packs `columns` rows of length `k`, on all threads of the current pool. `format` is what [`WeightFormat::kept`]
    /// gives for the rows' types, or f32 or bf16. What GGML itself never writes becomes f32: Q8_0 with a weight of -128,
    /// since the kernels of `bf16_gemm.rs` take magnitudes up to 127; Q4_0 and Q5_0 with scales that are no numbers or
    /// so great that their offset is none.
    ///
    /// # Panics
    /// If a row does not have `k` values, or of another type than `format` can hold.
    pub fn pack<'a>(format: WeightFormat, columns: usize, k: usize, row: &(dyn Fn(usize) -> Row<'a> + Sync)) -> Self {
        let in_range = AtomicBool::new(true);
        let packed = Self::filled(format, columns, k, |panel, column, n, values| {
            if !put_row(format, panel, column, row(n), values) {
                in_range.store(false, Ordering::Relaxed);
            }
        });
        if in_range.into_inner() { packed } else { Self::pack(WeightFormat::F32, columns, k, row) }
    }

    /// All rows of a tensor, which lie together.
    ///
    /// # Panics
    /// As [`Self::pack`]; if `raw` is no whole number of rows.
    pub fn from_raw(format: WeightFormat, dtype: TensorType, raw: &[u8], k: usize) -> Self {
        let group = dtype.group().expect("a type that we unpack");
        assert!(k > 0 && k.is_multiple_of(group.values as usize));
        let row_bytes = k / group.values as usize * group.bytes as usize;
        assert!(raw.len().is_multiple_of(row_bytes));
        let row = |n: usize| Row { dtype, bytes: &raw[n * row_bytes..][..row_bytes] };
        Self::pack(format, raw.len() / row_bytes, k, &row)
    }

    /// Packs f32 rows of length `k`.
    ///
    /// # Panics
    /// If `weights` is not a whole number of rows.
    pub fn from_f32(weights: &[f32], k: usize) -> Self {
        let raw: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        Self::from_raw(WeightFormat::F32, TensorType::F32, &raw, k)
    }

    /// Packs GGML Q4_1 rows.
    ///
    /// # Panics
    /// If `k` is no multiple of 32 or `raw` is not a whole number of rows.
    pub fn from_q4_1(raw: &[u8], k: usize) -> Self {
        Self::from_raw(WeightFormat::Q4_1, TensorType::Q4_1, raw, k)
    }

    /// Packs GGML Q8_0 rows.
    ///
    /// # Panics
    /// If `k` is no multiple of 32 or `raw` is not a whole number of rows.
    pub fn from_q8_0(raw: &[u8], k: usize) -> Self {
        Self::from_raw(WeightFormat::Q8_0, TensorType::Q8_0, raw, k)
    }

    /// The same matrix as `isa`'s kernels want it: where those round to bf16 anyway, f32 weights are kept in it; where
    /// they have tiles, weights below 2⁻⁵⁰ are zero.
    pub fn fitted(self, isa: Isa) -> Self {
        let mut fitted = if isa.rounds() { self.rounded() } else { self };
        if isa.has_tiles() && fitted.format == WeightFormat::Bf16 {
            fitted.forget_tiny();
        }
        fitted
    }

    /// Of a matrix in bf16, see `bf16_k32.rs`. Others have nothing so small: f16 and their multiples.
    fn forget_tiny(&mut self) {
        let panel_bytes = self.k.div_ceil(BLOCK) * self.format.block_bytes();
        let mut panels: Vec<&mut [u8]> = self.bytes.chunks_exact_mut(panel_bytes.max(1)).collect();
        pool::for_each_of(&mut panels, |_, panel| {
            for weight in panel.as_chunks_mut::<2>().0 {
                if u16::from_ne_bytes(*weight) & 0x7fff < TINY {
                    *weight = [0; 2];
                }
            }
        });
    }

    /// The same matrix with f32 and f16 weights rounded to bf16; other formats stay.
    pub fn rounded(self) -> Self {
        if matches!(self.format, WeightFormat::F32 | WeightFormat::F16) { self.to_bf16() } else { self }
    }

    fn to_bf16(&self) -> Self {
        Self::filled(WeightFormat::Bf16, self.columns, self.k, |panel, column, n, values| {
            self.column(n, values);
            put_bf16(panel, column, values);
        })
    }

    /// Calls `put` for each output column, on all threads: its panel, its place there, its number, and memory for `k`
    /// values.
    fn filled(
        format: WeightFormat,
        columns: usize,
        k: usize,
        put: impl Fn(&mut [u8], usize, usize, &mut [f32]) + Sync,
    ) -> Self {
        let mut bytes = WeightMemory::zeroed(packed_bytes(format, columns as u64, k as u64) as usize);
        let panel_bytes = k.div_ceil(BLOCK) * format.block_bytes();
        let mut panels: Vec<&mut [u8]> = bytes.chunks_exact_mut(panel_bytes.max(1)).collect();
        pool::for_each_of(&mut panels, |index, panel| {
            let mut values = vec![0.0; k];
            for (column, n) in (index * PANEL..columns.min((index + 1) * PANEL)).enumerate() {
                put(panel, column, n, &mut values);
            }
        });
        Self { format, columns, k, bytes }
    }

    /// Output columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Input length.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Bytes in memory.
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Writes the `k` weights of output column `n` as f32.
    ///
    /// # Panics
    /// If `n` is no column or `out` is not `k` long.
    pub fn column(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.columns && out.len() == self.k);
        let blocks = self.panel(n / PANEL).chunks_exact(self.format.block_bytes());
        for (block, out) in blocks.zip(out.chunks_mut(BLOCK)) {
            read_column(self.format, block, n % PANEL, out);
        }
    }

    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let bytes = self.k.div_ceil(BLOCK) * self.format.block_bytes();
        &self.bytes[panel * bytes..][..bytes]
    }
}
