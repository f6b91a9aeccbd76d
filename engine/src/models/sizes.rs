//! How many bytes a model's weights take in memory, from what its file's headers say of its tensors and from the
//! formats in which the kernels keep them. `footprint.rs` goes on from there.
use tandem_gguf::TensorType;

use crate::ops::lookup::RowTable;
use crate::ops::packed::{WeightFormat, packed_bytes};
use crate::ops::simd::Isa;

/// A tensor, as the file's header has it. Sizes may be anything that a damaged header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSize {
    /// What the model uses it for.
    pub purpose: Purpose,
    /// Columns of the product, which are the rows in the file; 1 of a vector.
    pub columns: u64,
    /// Values of a row in the file.
    pub k: u64,
    /// In which the file has it.
    pub dtype: TensorType,
}

/// What a model uses a tensor for, as far as memory depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Rows are looked up by token; without a head it is the output matrix, too.
    Embedding,
    /// The output matrix.
    Head,
    /// A matrix of a layer.
    Layer,
    /// A norm's or a bias: kept in f32.
    Vector,
}

/// Bytes of all weights, for the kernels of `isa`, some of which round weights.
pub fn weights_bytes(tensors: &[TensorSize], isa: Isa) -> u64 {
    let has_head = tensors.iter().any(|tensor| tensor.purpose == Purpose::Head);
    tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.kept(isa, has_head)))
}

impl TensorSize {
    /// Of a tensor of these dimensions, the outermost first.
    pub fn of(purpose: Purpose, dims: &[u64], dtype: TensorType) -> Self {
        match *dims {
            [columns, k] => Self { purpose, columns, k, dtype },
            _ => {
                let k = dims.iter().fold(1, |values: u64, &dim| values.saturating_mul(dim));
                Self { purpose: Purpose::Vector, columns: 1, k, dtype }
            }
        }
    }

    /// While the model serves.
    fn kept(&self, isa: Isa, has_head: bool) -> u64 {
        let Self { purpose, columns, k, dtype } = *self;
        if purpose == Purpose::Vector {
            return columns.saturating_mul(k).saturating_mul(4);
        }
        if has_head && purpose == Purpose::Embedding {
            return RowTable::size_bytes(RowTable::kept(dtype, isa), columns, k);
        }
        packed_bytes(WeightFormat::kept(dtype, isa), columns, k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::IsaChoice;

    fn matrix(purpose: Purpose, columns: u64, k: u64, dtype: TensorType) -> TensorSize {
        TensorSize { purpose, columns, k, dtype }
    }

    fn exact() -> Isa {
        Isa::choose(IsaChoice::Portable, true).expect("runs everywhere")
    }

    #[test]
    fn weights_are_counted_as_they_are_kept() {
        let tensors = [
            matrix(Purpose::Embedding, 320, 64, TensorType::F16),
            matrix(Purpose::Layer, 96, 64, TensorType::Q8_0),
            // Panels have 32 columns, blocks 32 values: this one is padded to 64 × 64.
            matrix(Purpose::Layer, 33, 33, TensorType::F32),
            TensorSize::of(Purpose::Layer, &[64], TensorType::F16),
            matrix(Purpose::Layer, 32, 256, TensorType::Q4_K),
        ];
        let layers = 96 * 64 / 32 * 34 + 4 * 64 * 64 + 4 * 64 + 32 * 148;
        assert_eq!(weights_bytes(&tensors, exact()), 2 * 320 * 64 + layers);
        // Beside a head, an embedding stays as its file has it.
        let quantized = matrix(Purpose::Embedding, 100, 256, TensorType::Q4_K);
        let head = matrix(Purpose::Head, 64, 256, TensorType::BF16);
        assert_eq!(weights_bytes(&[quantized, head], exact()), 100 * 144 + 64 * 256 * 2);
        assert_eq!(weights_bytes(&[quantized], exact()), 128 * 148);
    }

    /// Bytes of 256 weights.
    #[test]
    fn what_is_small_stays_so_and_kernels_that_round_keep_no_more_than_two_bytes() {
        for (dtype, exact) in [
            (TensorType::F32, 1024),
            (TensorType::F16, 512),
            (TensorType::BF16, 512),
            (TensorType::Q4_0, 160),
            (TensorType::Q5_0, 192),
            (TensorType::Q5_1, 192),
            (TensorType::Q4_K, 148),
            (TensorType::Q5_K, 180),
            (TensorType::Q6_K, 210),
            (TensorType::Q3_K, 1024),
        ] {
            let tensors = [matrix(Purpose::Layer, 64, 256, dtype)];
            for isa in Isa::available() {
                let bytes = if isa.rounds() { exact.min(512) } else { exact };
                assert_eq!(weights_bytes(&tensors, isa), 64 * bytes, "{dtype} {}", isa.name());
            }
        }
    }

    #[test]
    fn sizes_of_a_damaged_header_do_not_overflow() {
        let tensors = [matrix(Purpose::Embedding, u64::MAX, u64::MAX, TensorType::Q8_0); 2];
        assert_eq!(weights_bytes(&tensors, exact()), u64::MAX);
    }
}
