//! How much memory a model takes, added up from what its file says of its tensors, and whether the machine has so much:
//! known before a weight is read. Pure, numbers in and a verdict out: [`crate::memory`] asks the machine, and
//! [`crate::cpu::ModelLoader`] brings the two together.
use std::fmt;

use tandem_gguf::TensorType;

use crate::ops::lookup::RowTable;
use crate::ops::packed::{WeightFormat, packed_bytes};
use crate::ops::simd::Isa;

/// Of the available memory, one part in so many stays for everything else: allocators, buffers of connections, the
/// system.
const RESERVED_PART: u64 = 8;

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

/// The sizes that a step's intermediate matrices follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens of a step at most.
    pub tokens: u64,
    /// Sequences of a step at most: each has logits.
    pub sequences: u64,
    /// Values of all intermediate matrices of one token.
    pub token_values: u64,
    /// Logits of a sequence.
    pub vocabulary: u64,
}

impl StepSize {
    fn bytes(self) -> u64 {
        let values = self.tokens.saturating_mul(self.token_values);
        values.saturating_add(self.sequences.saturating_mul(self.vocabulary)).saturating_mul(4)
    }
}

/// Bytes that a model takes beside its KV arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Weights, as they are kept while the model serves. They take no more while they are read: what is unpacked is a
    /// row for each thread, and the file's pages are the system's to take back.
    pub weights: u64,
    /// Intermediate matrices and logits of the largest step.
    pub workspace: u64,
}

impl Footprint {
    /// Of a model whose kernels are those of `isa`, which round weights, or keep some of them twice.
    pub fn of(tensors: &[TensorSize], isa: Isa, step: StepSize) -> Self {
        let has_head = tensors.iter().any(|tensor| tensor.purpose == Purpose::Head);
        let sum = |bytes: &dyn Fn(&TensorSize) -> u64| {
            tensors.iter().fold(0u64, |sum, tensor| sum.saturating_add(bytes(tensor)))
        };
        Self { weights: sum(&|tensor| tensor.kept(isa, has_head)), workspace: step.bytes() }
    }

    /// What weights and workspace leave of `memory` for a KV arena.
    pub fn left_for_kv(&self, memory: u64) -> u64 {
        usable(memory).saturating_sub(self.weights).saturating_sub(self.workspace)
    }

    /// Whether the machine can hold the model with `kv` bytes of KV arena. The arena comes when the weights are read.
    /// What the system does not tell does not stop anybody: the allocation itself may.
    ///
    /// # Errors
    /// The numbers, when it cannot.
    pub fn check(&self, kv: u64, available: Option<u64>) -> Result<(), Misfit> {
        let Some(available) = available else { return Ok(()) };
        let serving = self.weights.saturating_add(self.workspace).saturating_add(kv);
        match serving <= usable(available) {
            true => Ok(()),
            false => Err(Misfit { footprint: *self, kv, available }),
        }
    }
}

/// What of `available` bytes may be filled.
pub fn usable(available: u64) -> u64 {
    available - available / RESERVED_PART
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
        let format = WeightFormat::kept(dtype, isa);
        let second = match isa.has_tiles() && format != WeightFormat::Bf16 {
            true => packed_bytes(WeightFormat::Bf16, columns, k),
            false => 0,
        };
        packed_bytes(format, columns, k).saturating_add(second)
    }
}

/// A model that the machine cannot hold, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// What it takes.
    pub footprint: Footprint,
    /// Bytes of the KV arena.
    pub kv: u64,
    /// Bytes that the machine has.
    pub available: u64,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
        let Self { footprint: Footprint { weights, workspace }, kv, available } = *self;
        write!(
            f,
            "the model does not fit into memory: weights {}, KV arena {}, workspace {}; of {} available {} may be filled. \
             Choose a smaller KV arena (--kv-memory, --kv-blocks), fewer sequences and tokens in a step (--max-num-seqs, \
             --max-num-batched-tokens), or a smaller quantization of the model (BF16, F16, Q8_0 and Q4_1 stay as small as \
             they are; all others take 4 bytes a weight, or 2 with --batch-invariant false)",
            gib(weights),
            gib(kv),
            gib(workspace),
            gib(available),
            gib(usable(available)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::IsaChoice;

    const GIB: u64 = 1 << 30;
    const NO_STEP: StepSize = StepSize { tokens: 0, sequences: 0, token_values: 0, vocabulary: 0 };

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
        let step = StepSize { tokens: 2, sequences: 3, token_values: 10, vocabulary: 5 };
        let footprint = Footprint::of(&tensors, exact(), step);
        let layers = 96 * 64 / 32 * 34 + 4 * 64 * 64 + 4 * 64 + 4 * 32 * 256;
        assert_eq!(footprint.weights, 2 * 320 * 64 + layers);
        assert_eq!(footprint.workspace, 4 * (2 * 10 + 3 * 5));
        // Beside a head, an embedding stays as its file has it.
        let quantized = matrix(Purpose::Embedding, 100, 256, TensorType::Q4_K);
        let head = matrix(Purpose::Head, 64, 256, TensorType::BF16);
        let apart = Footprint::of(&[quantized, head], exact(), NO_STEP);
        assert_eq!(apart.weights, 100 * 144 + 64 * 256 * 2);
        assert_eq!(Footprint::of(&[quantized], exact(), NO_STEP).weights, 4 * 128 * 256);
    }

    #[test]
    fn what_has_two_bytes_keeps_them_and_kernels_that_round_keep_no_more() {
        for (dtype, exact) in [(TensorType::F32, 4), (TensorType::F16, 2), (TensorType::BF16, 2), (TensorType::Q6_K, 4)]
        {
            let tensors = [matrix(Purpose::Layer, 64, 256, dtype)];
            for isa in Isa::available() {
                let bytes = if isa.rounds() { 2 } else { exact };
                let Footprint { weights, .. } = Footprint::of(&tensors, isa, NO_STEP);
                assert_eq!(weights, bytes * 64 * 256, "{dtype} {}", isa.name());
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named_with_every_number() {
        let footprint = Footprint { weights: 4 * GIB, workspace: GIB / 2 };
        assert_eq!(footprint.check(2 * GIB, None), Ok(()));
        // 8 of which 7 may be filled: weights, workspace and 2.5.
        assert_eq!(footprint.check(5 * GIB / 2, Some(8 * GIB)), Ok(()));
        assert_eq!(footprint.left_for_kv(8 * GIB), 5 * GIB / 2);
        let misfit = footprint.check(5 * GIB / 2 + 1, Some(8 * GIB)).expect_err("a byte too many").to_string();
        for word in [
            "weights 4.00 GiB",
            "KV arena 2.50 GiB",
            "workspace 0.50 GiB",
            "8.00 GiB available",
            "7.00 GiB may",
            "--kv-memory",
            "--kv-blocks",
            "--max-num-seqs",
            "quantization",
        ] {
            assert!(misfit.contains(word), "{word}: {misfit}");
        }
        // The weights alone are too much, whatever the arena.
        assert!(footprint.check(0, Some(5 * GIB)).is_err());
        assert_eq!(footprint.left_for_kv(4 * GIB), 0);
    }

    #[test]
    fn sizes_of_a_damaged_header_do_not_overflow() {
        let tensors = [matrix(Purpose::Embedding, u64::MAX, u64::MAX, TensorType::Q8_0); 2];
        let step = StepSize { tokens: u64::MAX, sequences: u64::MAX, token_values: u64::MAX, vocabulary: u64::MAX };
        let footprint = Footprint::of(&tensors, exact(), step);
        assert!(footprint.check(u64::MAX, Some(u64::MAX)).is_err());
    }
}
