//! Weights as the kernels of [`super::matmul`] read them, and the packing of a model file's rows into that layout:
//! panel by panel on all threads, straight from the file's bytes. No copy of a whole tensor is made in between.
//!
//! ```text
//! matrix   | panel: columns 0 .. 32 | panel: columns 32 .. 64 | ...        the last one filled up with zeros
//! panel    | block: k 0 .. 32 | block: k 32 .. 64 | ...                    likewise
//!
//! block of f32, f16      k 0: c0 c1 ... c31 | k 1: c0 c1 ... c31 | ... | k 31: c0 c1 ... c31
//! block of bf16          left half | right half             2,048 bytes
//! block of Q8_0          32 scales | left half | right half 64 + 1,024 bytes
//! block of Q4_1          32 scales | 32 offsets | left half | right half    64 + 64 + 512 bytes
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
//! a half of Q4_1         16 columns, four pairs of k in each lane of 32 bits: 4 rows of 16 lanes. Row r of a column:
//!
//!          bits          0-3     4-7     8-11    12-15   16-19   20-23   24-27   28-31
//!          k             8r      8r+2    8r+4    8r+6    8r+1    8r+3    8r+5    8r+7
//! ```
//!
//! Pairs, because the instructions of `bf16_gemm.rs` and `tiles.rs` take two `k` at a time: a vector's 32-bit lane
//! belongs to a column and has the even `k` low, the odd `k` high. A half of bf16 is a tile of AMX as it lies there.
//! Scales and offsets are f16, one a column.
//!
//! Read `matmul.rs` next.
use std::sync::atomic::{AtomicBool, Ordering};

use tandem_gguf::TensorType;

use super::dequantize::dequantize;
use super::pool;
use super::simd::{Isa, LANES};
use super::weight_memory::WeightMemory;

/// Output columns of a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// `k`s of a block; also the quantization group of Q4_1 and Q8_0.
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
    /// GGML's Q4_1: `d * q + m`, q in 0..16, groups of 32.
    Q4_1,
    /// GGML's Q8_0: `d * q`, q an i8, groups of 32.
    Q8_0,
}

impl WeightFormat {
    /// In which weights of a file's type are kept. Kernels that do not round keep every value: what has a format here
    /// stays in it, all else is unpacked to f32. Kernels that round to bf16 anyway have it so in memory.
    pub fn kept(dtype: TensorType, isa: Isa) -> Self {
        match dtype {
            TensorType::Q4_1 => Self::Q4_1,
            TensorType::Q8_0 => Self::Q8_0,
            TensorType::BF16 => Self::Bf16,
            _ if isa.rounds() => Self::Bf16,
            TensorType::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    pub(super) const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => BLOCK * PANEL * 4,
            Self::F16 | Self::Bf16 => BLOCK * PANEL * 2,
            Self::Q4_1 => PANEL * 4 + BLOCK * LANES,
            Self::Q8_0 => PANEL * 2 + BLOCK * PANEL,
        }
    }
}

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
    /// gives for the rows' types, or f32 or bf16. Q8_0 with a weight of -128, which GGML itself never writes, becomes
    /// f32: the kernels of `bf16_gemm.rs` take magnitudes up to 127.
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
        let f16 = |at: usize| half::f16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32();
        let column = n % PANEL;
        for (kk, weight) in out.iter_mut().enumerate() {
            let (at, inner) = (self.block_at(n, kk), kk % BLOCK);
            *weight = match self.format {
                WeightFormat::F32 => {
                    let at = at + (inner * PANEL + column) * 4;
                    f32::from_ne_bytes([self.bytes[at], self.bytes[at + 1], self.bytes[at + 2], self.bytes[at + 3]])
                }
                WeightFormat::F16 => f16(at + (inner * PANEL + column) * 2),
                WeightFormat::Bf16 => {
                    let at = at + pair_at(column, inner) * 2;
                    half::bf16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32()
                }
                WeightFormat::Q4_1 => {
                    let (byte, shift) = nibble_at(column, inner);
                    let nibble = self.bytes[at + PANEL * 4 + byte] >> shift & 15;
                    f32::from(nibble) * f16(at + column * 2) + f16(at + PANEL * 2 + column * 2)
                }
                WeightFormat::Q8_0 => {
                    let byte = self.bytes[at + PANEL * 2 + pair_at(column, inner)];
                    f32::from(byte as i8) * f16(at + column * 2)
                }
            };
        }
    }

    fn block_at(&self, column: usize, k: usize) -> usize {
        (column / PANEL * self.k.div_ceil(BLOCK) + k / BLOCK) * self.format.block_bytes()
    }

    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let bytes = self.k.div_ceil(BLOCK) * self.format.block_bytes();
        &self.bytes[panel * bytes..][..bytes]
    }
}

/// Puts a row into its column of a panel, `values` being memory for the row. False for a Q8_0 weight of -128.
fn put_row(format: WeightFormat, panel: &mut [u8], column: usize, row: Row<'_>, values: &mut [f32]) -> bool {
    match (format, row.dtype) {
        (WeightFormat::Bf16, TensorType::BF16) => put_bf16_bytes(panel, column, row.bytes),
        (WeightFormat::F16, TensorType::F16) => put_by_row(panel, column, row.bytes.as_chunks::<2>().0),
        (WeightFormat::Q4_1, TensorType::Q4_1) => put_q4_1(panel, column, row.bytes),
        (WeightFormat::Q8_0, TensorType::Q8_0) => return put_q8_0(panel, column, row.bytes),
        (WeightFormat::F32, TensorType::F32) => put_by_row(panel, column, row.bytes.as_chunks::<4>().0),
        (WeightFormat::F32, dtype) => {
            dequantize(dtype, row.bytes, values);
            for (kk, value) in values.iter().enumerate() {
                put_at(panel, column, kk, value.to_ne_bytes());
            }
        }
        (WeightFormat::Bf16, dtype) => {
            dequantize(dtype, row.bytes, values);
            put_bf16(panel, column, values);
        }
        (format, dtype) => panic!("weights of the type {dtype} are not kept in {format:?}"),
    }
    true
}

/// In the layout of rows of 32 columns.
fn put_by_row<const N: usize>(panel: &mut [u8], column: usize, values: &[[u8; N]]) {
    values.iter().enumerate().for_each(|(kk, value)| put_at(panel, column, kk, *value));
}

fn put_at<const N: usize>(panel: &mut [u8], column: usize, kk: usize, value: [u8; N]) {
    panel[(kk * PANEL + column) * N..][..N].copy_from_slice(&value);
}

fn put_bf16(panel: &mut [u8], column: usize, values: &[f32]) {
    for (kk, &value) in values.iter().enumerate() {
        let at = kk / BLOCK * WeightFormat::Bf16.block_bytes() + pair_at(column, kk % BLOCK) * 2;
        panel[at..at + 2].copy_from_slice(&half::bf16::from_f32(value).to_ne_bytes());
    }
}

/// Pair by pair, as they lie in the file.
fn put_bf16_bytes(panel: &mut [u8], column: usize, row: &[u8]) {
    let (pairs, last) = row.as_chunks::<4>();
    let at = |pair: usize| pair * 2 / BLOCK * WeightFormat::Bf16.block_bytes() + pair_at(column, pair * 2 % BLOCK) * 2;
    for (index, pair) in pairs.iter().enumerate() {
        panel[at(index)..][..4].copy_from_slice(pair);
    }
    if !last.is_empty() {
        panel[at(pairs.len())..][..last.len()].copy_from_slice(last);
    }
}

/// A group's scale or offset. Of NaNs only one: of another, cut off to bf16, an infinity could be left.
fn scale(file: [u8; 2]) -> [u8; 2] {
    let scale = half::f16::from_le_bytes(file);
    if scale.is_nan() { half::f16::NAN.to_le_bytes() } else { file }
}

/// Groups of f16 scale, f16 minimum, 16 bytes whose low nibbles are the first 16 weights.
fn put_q4_1(panel: &mut [u8], column: usize, row: &[u8]) {
    let blocks = panel.chunks_exact_mut(WeightFormat::Q4_1.block_bytes());
    for (group, block) in row.as_chunks::<20>().0.iter().zip(blocks) {
        block[column * 2..][..2].copy_from_slice(&scale([group[0], group[1]]));
        block[PANEL * 2 + column * 2..][..2].copy_from_slice(&scale([group[2], group[3]]));
        for kk in 0..BLOCK {
            let byte = group[4 + kk % 16];
            let nibble = if kk < 16 { byte & 15 } else { byte >> 4 };
            let (at, shift) = nibble_at(column, kk);
            block[PANEL * 4 + at] |= nibble << shift;
        }
    }
}

/// Groups of f16 scale and 32 i8. False when one is -128.
fn put_q8_0(panel: &mut [u8], column: usize, row: &[u8]) -> bool {
    let blocks = panel.chunks_exact_mut(WeightFormat::Q8_0.block_bytes());
    let mut in_range = true;
    for (group, block) in row.as_chunks::<34>().0.iter().zip(blocks) {
        block[column * 2..][..2].copy_from_slice(&scale([group[0], group[1]]));
        for kk in 0..BLOCK {
            in_range &= group[2 + kk] != 0x80;
            block[PANEL * 2 + pair_at(column, kk)] = group[2 + kk];
        }
    }
    in_range
}

/// Index of a weight among the 1,024 of its block, in a format of pairs.
fn pair_at(column: usize, k: usize) -> usize {
    ((column / LANES * BLOCK / 2 + k / 2) * LANES + column % LANES) * 2 + k % 2
}

/// Byte and shift of a 4-bit weight in its block. A lane of 32 bits holds the column's next four pairs, a nibble each
/// in both of its halves.
fn nibble_at(column: usize, k: usize) -> (usize, u32) {
    let bit = k / 2 % 4 * 4;
    let byte = (column / LANES * 4 + k / 8) * LANES * 4 + column % LANES * 4 + k % 2 * 2 + bit / 8;
    (byte, (bit % 8) as u32)
}
