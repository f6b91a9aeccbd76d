//! How much memory a model takes, added up from what its file says of its tensors, and whether the machine has so much:
//! known before a weight is read. Pure, numbers in and a verdict out: [`crate::memory`] asks the machine, and
//! [`crate::candle::ModelLoader`] brings the two together.
use std::fmt;

use crate::ops::matmul::{WeightFormat, packed_bytes};
use crate::ops::simd::Isa;

/// Of the available memory, one part in so many stays for everything else: allocators, buffers of connections, the system.
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
    /// In which a matrix is packed when it is read; `None` is a vector, kept in f32.
    pub format: Option<WeightFormat>,
    /// Bytes of a copy that reading makes before the values are numbers.
    pub copied: u64,
}

/// What a model uses a tensor for, as far as memory depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Rows are looked up by token; without a head it is the output matrix, too.
    Embedding,
    /// The output matrix.
    Head,
    /// Part of a layer: read beside others, then packed together with them.
    Layer,
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
    /// Weights, as they are kept while the model serves.
    pub weights: u64,
    /// The most that the weights take while they are read: before they are rounded, and with the copies in between.
    pub loading: u64,
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
        let passing = tensors.iter().map(TensorSize::passing).max().unwrap_or(0);
        let weights = sum(&|tensor| tensor.kept(isa, has_head));
        let loading = sum(&TensorSize::read).saturating_add(passing);
        Self { weights, loading: loading.max(weights), workspace: step.bytes() }
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
        match self.loading.max(serving) <= usable(available) {
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
    fn values(&self) -> u64 {
        self.columns.saturating_mul(self.k)
    }

    /// Packed as it is read, at first in the file's own format or in f32.
    fn read(&self) -> u64 {
        self.format.map_or(self.values().saturating_mul(4), |format| packed_bytes(format, self.columns, self.k))
    }

    /// While the model serves.
    fn kept(&self, isa: Isa, has_head: bool) -> u64 {
        let Some(format) = self.format else { return self.read() };
        let in_bf16 = || packed_bytes(WeightFormat::Bf16, self.columns, self.k);
        let only_looked_up = has_head && self.purpose == Purpose::Embedding;
        match format {
            WeightFormat::F32 if isa.rounds() => in_bf16(),
            WeightFormat::Q4_1 | WeightFormat::Q8_0 if isa.has_tiles() && !only_looked_up => {
                self.read().saturating_add(in_bf16())
            }
            _ => self.read(),
        }
    }

    /// What is in memory beside all that is kept while this tensor is read or, in a layer, joined with its neighbours (two
    /// of the feed-forward part's matrices are the largest that are).
    fn passing(&self) -> u64 {
        let unpacked = if self.format == Some(WeightFormat::F32) { self.values().saturating_mul(4) } else { 0 };
        let joined = if self.purpose == Purpose::Layer { self.read().saturating_mul(2) } else { 0 };
        self.copied.saturating_add(unpacked).max(joined)
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
        let Self { footprint: Footprint { weights, loading, workspace }, kv, available } = *self;
        write!(
            f,
            "the model does not fit into memory: weights {} ({} while they are read: all but Q4_1 and Q8_0 are unpacked to \
             4 bytes a weight first), KV arena {}, workspace {}; of {} available {} may be filled. Choose a smaller KV \
             arena (--kv-memory, --kv-blocks), fewer sequences and tokens in a step (--max-num-seqs, \
             --max-num-batched-tokens), or a smaller quantization of the model (Q4_1 and Q8_0 stay as small as they are)",
            gib(weights),
            gib(loading),
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

    fn matrix(purpose: Purpose, columns: u64, k: u64, format: WeightFormat, copied: u64) -> TensorSize {
        TensorSize { purpose, columns, k, format: Some(format), copied }
    }

    fn exact() -> Isa {
        Isa::choose(IsaChoice::Portable, true).expect("runs everywhere")
    }

    #[test]
    fn weights_are_counted_as_they_are_kept_and_as_they_are_read() {
        let vector = TensorSize { purpose: Purpose::Layer, columns: 1, k: 64, format: None, copied: 0 };
        let tensors = [
            // From half-precision numbers of 2 bytes.
            matrix(Purpose::Embedding, 320, 64, WeightFormat::F32, 2 * 320 * 64),
            matrix(Purpose::Layer, 96, 64, WeightFormat::Q8_0, 0),
            // Panels have 32 columns, blocks 32 values: this one is padded to 64 × 64.
            matrix(Purpose::Layer, 33, 33, WeightFormat::F32, 0),
            vector,
        ];
        let footprint =
            Footprint::of(&tensors, exact(), StepSize { tokens: 2, sequences: 3, token_values: 10, vocabulary: 5 });
        let kept = 4 * 320 * 64 + 96 * 64 / 32 * 34 + 4 * 64 * 64 + 4 * 64;
        assert_eq!(footprint.weights, kept);
        // The embedding's raw bytes and f32 beside the packed ones.
        assert_eq!(footprint.loading, kept + 2 * 320 * 64 + 4 * 320 * 64);
        assert_eq!(footprint.workspace, 4 * (2 * 10 + 3 * 5));
    }

    #[test]
    fn kernels_that_round_keep_half_but_read_all() {
        let tensors = [matrix(Purpose::Layer, 64, 64, WeightFormat::F32, 0)];
        for isa in Isa::available() {
            let Footprint { weights, loading, .. } = Footprint::of(&tensors, isa, NO_STEP);
            assert_eq!(
                (weights, loading),
                (if isa.rounds() { 2 } else { 4 } * 64 * 64, 3 * 4 * 64 * 64),
                "{}",
                isa.name()
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_named_with_every_number() {
        let footprint = Footprint { weights: 4 * GIB, loading: 6 * GIB, workspace: GIB / 2 };
        assert_eq!(footprint.check(2 * GIB, None), Ok(()));
        // 8 of which 7 may be filled: weights, workspace and 2.5.
        assert_eq!(footprint.check(5 * GIB / 2, Some(8 * GIB)), Ok(()));
        assert_eq!(footprint.left_for_kv(8 * GIB), 5 * GIB / 2);
        let misfit = footprint.check(5 * GIB / 2 + 1, Some(8 * GIB)).expect_err("a byte too many").to_string();
        for word in [
            "weights 4.00 GiB",
            "6.00 GiB while",
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
        // Reading alone is too much, whatever the arena.
        assert!(footprint.check(0, Some(6 * GIB)).is_err());
        assert_eq!(footprint.left_for_kv(4 * GIB), 0);
    }

    #[test]
    fn sizes_of_a_damaged_header_do_not_overflow() {
        let tensors = [matrix(Purpose::Layer, u64::MAX, u64::MAX, WeightFormat::F32, u64::MAX); 2];
        let step = StepSize { tokens: u64::MAX, sequences: u64::MAX, token_values: u64::MAX, vocabulary: u64::MAX };
        let footprint = Footprint::of(&tensors, exact(), step);
        assert!(footprint.check(u64::MAX, Some(u64::MAX)).is_err());
    }
}
