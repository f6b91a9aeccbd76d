//! How much memory a model takes, and whether the machine has so much: known before a weight is read. Plain numbers in,
//! a verdict out. What weights take is added up in `models/sizes.rs`, [`crate::memory`] asks the machine, and
//! [`crate::cpu::ModelLoader`] brings them together.
use std::fmt;

/// Of the available memory, one part in so many stays for everything else: allocators, buffers of connections, the
/// system.
const RESERVED_PART: u64 = 8;

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
    /// Of weights that take so many bytes, and of the largest step.
    pub fn new(weights: u64, step: StepSize) -> Self {
        Self { weights, workspace: step.bytes() }
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
             --max-num-batched-tokens), or a smaller quantization of the model (all types stay about \
             as small as they are, but Q2_K and Q3_K take 4 bytes a weight, or 2 with --batch-invariant false)",
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

    const GIB: u64 = 1 << 30;

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
    fn numbers_of_a_damaged_header_do_not_overflow() {
        let step = StepSize { tokens: 2, sequences: 3, token_values: 10, vocabulary: 5 };
        assert_eq!(Footprint::new(7, step), Footprint { weights: 7, workspace: 4 * (2 * 10 + 3 * 5) });
        let step = StepSize { tokens: u64::MAX, sequences: u64::MAX, token_values: u64::MAX, vocabulary: u64::MAX };
        let footprint = Footprint::new(u64::MAX, step);
        assert!(footprint.check(u64::MAX, Some(u64::MAX)).is_err());
    }
}
