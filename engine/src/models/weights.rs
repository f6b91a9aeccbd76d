//! What a network asks a model's files for: tensors by name, as they lie there. What they become in memory is the
//! matter of whoever computes: the CPU's part is `packing.rs`; another device can take the same bytes.
use std::ops::Deref;

use tandem_gguf::TensorType;

use super::mmap::Map;
use super::reading::Reading;
use super::sizes::TensorSize;
use crate::error::EngineError;
use crate::ops::dequantize::dequantize;

/// Tensors by name. The names are GGUF's (`blk.0.attn_q.weight`), whatever the source calls them.
pub trait Weights: Sync {
    /// A tensor whose shape is `dims`, the outermost first (`[out, in]` of a matrix).
    ///
    /// # Errors
    /// `Model` when there is no such tensor of this shape, wholly in its file, in a type that we read.
    fn tensor(&self, name: &str, dims: &[usize]) -> Result<RawTensor<'_>, EngineError>;

    /// What the headers say of the tensors that a network needs, in any order. Nothing of it is checked against the
    /// files.
    fn sizes(&self) -> Vec<TensorSize>;

    /// All that a network needs was read: a tensor that nobody asked for (a bias, a frequency table) would change the
    /// results.
    ///
    /// # Errors
    /// `Model`, naming such a tensor.
    fn finish(&self) -> Result<(), EngineError>;
}

/// A tensor in its file. Dropping it says that it was read, and gives the pages of the file back to the system.
pub struct RawTensor<'a> {
    dtype: TensorType,
    dims: Vec<usize>,
    bytes: &'a [u8],
    file: &'a Map,
    reading: &'a Reading,
}

impl<'a> RawTensor<'a> {
    /// Of `bytes`, a piece of `file`: whole rows of whole groups, as many as `dims` says.
    pub(super) fn new(dtype: TensorType, dims: &[usize], bytes: &'a [u8], file: &'a Map, reading: &'a Reading) -> Self {
        Self { dtype, dims: dims.into(), bytes, file, reading }
    }

    /// Number format, one of [`crate::ops::dequantize::SUPPORTED`].
    pub fn dtype(&self) -> TensorType {
        self.dtype
    }

    /// Sizes, the outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Bytes of a row, whole groups.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len() / self.dims[..self.dims.len() - 1].iter().product::<usize>().max(1)
    }

    /// All values as f32: small tensors only.
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.dims.iter().product()];
        dequantize(self.dtype, self.bytes, &mut values);
        values
    }
}

impl Deref for RawTensor<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl Drop for RawTensor<'_> {
    fn drop(&mut self) {
        self.file.let_go_of(self.bytes);
        self.reading.done(self.bytes.len());
    }
}
