//! Embeddings: rows of a matrix by their numbers, a token's row each. An embedding that is only looked up stays as its
//! file has it, row after row in the file's own type. One that is the output matrix, too, is packed for the product and
//! looked up there, column by column: a second copy would cost as much memory as it saves lines of cache.
use tandem_gguf::TensorType;

use super::dequantize::dequantize;
use super::packed::{PackedMatrix, Row};
use super::simd::Isa;
use super::weight_memory::WeightMemory;
use super::{Shared, pool};

/// Rows by number, in the type of their file.
pub struct RowTable {
    dtype: TensorType,
    rows: usize,
    /// Values of a row.
    k: usize,
    row_bytes: usize,
    bytes: WeightMemory,
}

impl RowTable {
    /// In which type a table is kept: its own. Where all else is rounded to bf16, so are rows of f32 and f16.
    pub fn kept(dtype: TensorType, isa: Isa) -> TensorType {
        match dtype {
            TensorType::F32 | TensorType::F16 if isa.rounds() => TensorType::BF16,
            _ => dtype,
        }
    }

    /// Bytes of a table; the largest number where that is more than there are.
    pub fn size_bytes(kept: TensorType, rows: u64, k: u64) -> u64 {
        let group = kept.group().map_or((1, u64::MAX), |group| (group.values, group.bytes));
        k.div_ceil(group.0).saturating_mul(group.1).saturating_mul(rows)
    }

    /// Of `rows` rows of `k` values, on all threads of the current pool.
    ///
    /// # Panics
    /// If a row does not have `k` values of a type that [`dequantize`] unpacks.
    pub fn new<'a>(kept: TensorType, rows: usize, k: usize, row: &(dyn Fn(usize) -> Row<'a> + Sync)) -> Self {
        let row_bytes = row_bytes(kept, k as u64).expect("whole groups in a row") as usize;
        let mut bytes = WeightMemory::zeroed(rows * row_bytes);
        let mut all: Vec<&mut [u8]> = bytes.chunks_mut(row_bytes * ROWS).collect();
        pool::for_each_of(&mut all, |index, chunk| {
            let mut values = vec![0.0; k];
            for (n, to) in (index * ROWS..rows).zip(chunk.chunks_exact_mut(row_bytes)) {
                let from = row(n);
                if from.dtype == kept {
                    to.copy_from_slice(from.bytes);
                } else {
                    dequantize(from.dtype, from.bytes, &mut values);
                    for (to, value) in to.as_chunks_mut::<2>().0.iter_mut().zip(&values) {
                        *to = half::bf16::from_f32(*value).to_le_bytes();
                    }
                }
            }
        });
        Self { dtype: kept, rows, k, row_bytes, bytes }
    }

    /// Writes the rows `numbers` into `out`, one after another, as f32.
    ///
    /// # Panics
    /// If there is no such row or `out` has another length.
    pub fn look_up(&self, numbers: &[u32], out: &mut [f32]) {
        for_each_row(numbers, self.k, out, |n, out| {
            assert!(n < self.rows);
            dequantize(self.dtype, &self.bytes[n * self.row_bytes..][..self.row_bytes], out);
        });
    }
}

impl PackedMatrix {
    /// As [`RowTable::look_up`], of output columns.
    ///
    /// # Panics
    /// If there is no such column or `out` has another length.
    pub fn look_up(&self, numbers: &[u32], out: &mut [f32]) {
        for_each_row(numbers, self.k(), out, |n, out| self.column(n, out));
    }
}

/// Rows that a task copies.
const ROWS: usize = 64;

/// On all threads of the current pool: a row of a large embedding is microseconds of cache misses.
fn for_each_row(numbers: &[u32], k: usize, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
    assert!(k > 0 && out.len() == numbers.len() * k);
    let first = Shared(out.as_mut_ptr());
    pool::for_each_run(numbers.len(), 1, |run| {
        for index in run {
            // SAFETY: `out` has `k` elements for each number, and the index is in this run only.
            let row = unsafe { std::slice::from_raw_parts_mut(first.get().add(index * k), k) };
            f(numbers[index] as usize, row);
        }
    });
}

fn row_bytes(dtype: TensorType, k: u64) -> Option<u64> {
    let group = dtype.group()?;
    k.is_multiple_of(group.values).then(|| (k / group.values).checked_mul(group.bytes))?
}
