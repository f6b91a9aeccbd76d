//! Weights as the kernels of [`super::matmul`] read them.
//! `weight_format.rs` has the layouts' pictures, `blocks.rs` puts weights where these say.
//!
//! A model file's rows are packed panel by panel on all threads, straight from the file's bytes. No copy of a whole
//! tensor is made in between. Read `matmul.rs` next.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use half::f16;
use tandem_gguf::TensorType;

use super::blocks::{greatest_possible, multiply_scales, put_bf16, put_row, read_column};
use super::pool;
use super::simd::Isa;
pub(super) use super::weight_format::{BLOCK, PANEL, TINY};
pub use super::weight_format::{Row, WeightFormat, packed_bytes};
use super::weight_memory::WeightMemory;

/// `W`, `columns` × `k` (the row-major `[out, in]` of the model file), in the layout that the kernels read.
pub struct PackedMatrix {
    format: WeightFormat,
    columns: usize,
    k: usize,
    /// The binary exponent by which the scales in memory are greater than the file's.
    lifted: i32,
    bytes: WeightMemory,
}

impl PackedMatrix {
    /// Packs `columns` rows of length `k`, on all threads of the current pool. `format` is what [`WeightFormat::kept`]
    /// gives for the rows' types, or f32 or bf16. What GGML itself never writes becomes f32: Q8_0 with a weight of
    /// -128, since the kernels of `bf16_gemm.rs` take magnitudes up to 127; Q4_0 and Q5_0 with scales that are no
    /// numbers or so great that their offset is none.
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
    /// they have tiles, `bf16_k32.rs` says how.
    pub fn fitted(self, isa: Isa) -> Self {
        let fitted = if isa.rounds() { self.rounded() } else { self };
        match fitted.format {
            _ if !isa.has_tiles() => fitted,
            WeightFormat::Bf16 => fitted.without_tiny(),
            _ => fitted.lifted_up(),
        }
    }

    /// Of bf16, with zeros for what is below 2⁻⁵⁰.
    fn without_tiny(mut self) -> Self {
        self.for_each_super_block(|block| {
            for weight in block.as_chunks_mut::<2>().0 {
                if u16::from_ne_bytes(*weight) & 0x7fff < TINY {
                    *weight = [0; 2];
                }
            }
        });
        self
    }

    /// Of quantized weights, with scales as great as f16 has them without an overflow in any weight. In bf16 if there
    /// are such already, or scales that are no numbers.
    fn lifted_up(mut self) -> Self {
        let (format, greatest) = (self.format, AtomicU32::new(0));
        self.for_each_super_block(|block| {
            // By bits, as there.
            greatest.fetch_max(greatest_possible(format, block).to_bits(), Ordering::Relaxed);
        });
        let greatest = f32::from_bits(greatest.into_inner());
        if greatest > f16::MAX.to_f32() || greatest.is_nan() {
            return self.to_bf16().without_tiny();
        }
        // 2¹⁵ is in f16, 2¹⁶ is not.
        let exponent = if greatest == 0.0 { 0 } else { greatest.log2().floor() as i32 };
        self.lifted = (14 - exponent).max(0);
        let factor = 2f32.powi(self.lifted);
        self.for_each_super_block(|block| multiply_scales(format, block, factor));
        self
    }

    /// On all threads.
    fn for_each_super_block(&mut self, f: impl Fn(&mut [u8]) + Sync) {
        let bytes = self.format.super_block_bytes();
        let mut panels: Vec<&mut [u8]> = self.bytes.chunks_exact_mut(self.format.panel_bytes(self.k).max(1)).collect();
        pool::for_each_of(&mut panels, |_, panel| panel.chunks_exact_mut(bytes).for_each(&f));
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
        let mut panels: Vec<&mut [u8]> = bytes.chunks_exact_mut(format.panel_bytes(k).max(1)).collect();
        pool::for_each_of(&mut panels, |index, panel| {
            let mut values = vec![0.0; k];
            for (column, n) in (index * PANEL..columns.min((index + 1) * PANEL)).enumerate() {
                put(panel, column, n, &mut values);
            }
        });
        Self { format, columns, k, lifted: 0, bytes }
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

    /// The binary exponent by which the weights in memory are greater than they should be.
    pub(super) fn lifted(&self) -> i32 {
        self.lifted
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
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            read_column(self.format, self.panel(n / PANEL), block, n % PANEL, out);
        }
        if self.lifted != 0 {
            let factor = 2f32.powi(-self.lifted);
            out.iter_mut().for_each(|weight| *weight *= factor);
        }
    }

    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let bytes = self.format.panel_bytes(self.k);
        &self.bytes[panel * bytes..][..bytes]
    }
}
