//! From tensors in files to what the CPU's kernels read. Whole rows of several tensors become one matrix where these
//! are multiplied by the same input and kept in the same format, so that a step has one product instead of three.
use super::rope::RowOrder;
use super::weights::{RawTensor, Weights};
use crate::error::EngineError;
use crate::ops::lookup::RowTable;
use crate::ops::packed::{PackedMatrix, Row, WeightFormat};
use crate::ops::simd::Isa;

/// A matrix by name: its rows, and the order in which the kernels want them.
pub struct Part {
    /// GGUF's name.
    pub name: String,
    /// Output columns of the product.
    pub rows: usize,
    /// Whole heads of rows, where they change places.
    pub order: RowOrder,
}

/// Packs tensors for the kernels of one instruction set.
pub struct Packing<'a> {
    /// Where they are.
    pub weights: &'a dyn Weights,
    /// Whose kernels read them.
    pub isa: Isa,
}

impl Packing<'_> {
    /// A vector of `n` values.
    ///
    /// # Errors
    /// `Model` when there is no such tensor.
    pub fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, EngineError> {
        Ok(self.weights.tensor(name, &[n])?.values())
    }

    /// A matrix of `rows` × `k`.
    ///
    /// # Errors
    /// `Model` when there is no such tensor.
    pub fn matrix(&self, name: &str, rows: usize, k: usize) -> Result<PackedMatrix, EngineError> {
        let tensor = self.weights.tensor(name, &[rows, k])?;
        Ok(self.packed(&[(&tensor, RowOrder::AsStored)], k))
    }

    /// Matrices of the same input, `k` values: one where they are kept in the same format, or each its own.
    ///
    /// # Errors
    /// `Model` when there is no such tensor.
    pub fn matrices(&self, parts: &[Part], k: usize) -> Result<Vec<PackedMatrix>, EngineError> {
        let tensors: Vec<(RawTensor<'_>, RowOrder)> = parts
            .iter()
            .map(|part| Ok((self.weights.tensor(&part.name, &[part.rows, k])?, part.order)))
            .collect::<Result<_, EngineError>>()?;
        let all: Vec<_> = tensors.iter().map(|(tensor, order)| (tensor, *order)).collect();
        let format = |(tensor, _): &(&RawTensor<'_>, RowOrder)| WeightFormat::kept(tensor.dtype(), self.isa);
        let same = all.iter().all(|part| format(part) == format(&all[0]));
        Ok(if same { vec![self.packed(&all, k)] } else { all.iter().map(|part| self.packed(&[*part], k)).collect() })
    }

    /// Rows that are looked up by their number and never multiplied.
    ///
    /// # Errors
    /// `Model` when there is no such tensor.
    pub fn table(&self, name: &str, rows: usize, k: usize) -> Result<RowTable, EngineError> {
        let tensor = self.weights.tensor(name, &[rows, k])?;
        let row = |n: usize| row_of(&tensor, n);
        Ok(RowTable::new(RowTable::kept(tensor.dtype(), self.isa), rows, k, &row))
    }

    /// Of parts that are kept in the same format, one after another.
    fn packed(&self, parts: &[(&RawTensor<'_>, RowOrder)], k: usize) -> PackedMatrix {
        let columns = parts.iter().map(|(tensor, _)| tensor.dims()[0]).sum();
        let row = |n: usize| {
            let mut n = n;
            for (tensor, order) in parts {
                let rows = tensor.dims()[0];
                if n < rows {
                    return row_of(tensor, order.stored(n));
                }
                n -= rows;
            }
            unreachable!("columns are counted from the parts");
        };
        let format = WeightFormat::kept(parts[0].0.dtype(), self.isa);
        PackedMatrix::pack(format, columns, k, &row).fitted(self.isa)
    }
}

fn row_of<'a>(tensor: &'a RawTensor<'_>, n: usize) -> Row<'a> {
    let bytes = tensor.row_bytes();
    Row { dtype: tensor.dtype(), bytes: &tensor[n * bytes..][..bytes] }
}
