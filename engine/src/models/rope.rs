//! Rotary embedding (RoFormer, arXiv:2104.09864) as model files describe it: frequencies with their scaling, and the
//! order in which a file stores the values that turn together. Turning them is `ops::rows`' part.

/// How a model's heads turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f32,
    /// Change of the frequencies for contexts longer than those of the first training.
    pub scaling: RopeScaling,
    /// How the file orders the rows of Q and K.
    pub pairs: RopePairs,
}

/// Change of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All divided by a factor (position interpolation, arXiv:2306.15595).
    Linear(f32),
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between them.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low` are long.
        low: f32,
        /// Wavelengths below `original_context / high` are short.
        high: f32,
        /// Context of the first training.
        original_context: f32,
    },
    /// Each divided by its own factor: GGUF's `rope_freqs.weight`.
    Factors(Vec<f32>),
}

/// Which values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// 2i and 2i + 1: the paper's order, GGUF's for the architecture `llama`, and that of our kernels.
    Neighbours,
    /// i and i + head_dim / 2 ("neox"): safetensors checkpoints, and GGUF's other architectures.
    Halves,
}

impl Rope {
    /// Angle a position of each of a head's pairs.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain =
            (0..head_dim / 2).map(|pair| f64::from(self.base).powf(-2.0 * pair as f64 / head_dim as f64)).enumerate();
        plain.map(|(pair, frequency)| self.scaling.apply(pair, frequency)).collect()
    }

    /// Why these numbers give no frequencies for heads of `head_dim` values.
    pub fn problem(&self, head_dim: usize) -> Option<String> {
        let positive = |values: &[f32]| values.iter().all(|value| value.is_finite() && *value > 0.0);
        let sound = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear(factor) => positive(&[*factor]),
            RopeScaling::Llama3 { factor, low, high, original_context } => {
                positive(&[*factor, *low, *high, *original_context]) && low < high
            }
            RopeScaling::Factors(factors) => positive(factors) && factors.len() == head_dim / 2,
        };
        (!sound || !positive(&[self.base])).then(|| format!("impossible rotary embedding: {self:?}"))
    }

    /// How rows of Q and K are read so that the kernels' pairs stand together.
    pub fn row_order(&self, head_dim: usize) -> RowOrder {
        match self.pairs {
            RopePairs::Neighbours => RowOrder::AsStored,
            RopePairs::Halves => RowOrder::HalvesToNeighbours { head_dim },
        }
    }
}

impl RopeScaling {
    fn apply(&self, pair: usize, frequency: f64) -> f64 {
        match *self {
            Self::None => frequency,
            Self::Linear(factor) => frequency / f64::from(factor),
            Self::Llama3 { factor, low, high, original_context } => {
                let turns = f64::from(original_context) * frequency / std::f64::consts::TAU;
                let (low, high) = (f64::from(low), f64::from(high));
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / f64::from(factor) + kept * frequency
            }
            Self::Factors(ref factors) => frequency / f64::from(factors[pair]),
        }
    }
}

/// In which order the rows of a tensor are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As in the file.
    AsStored,
    /// Row i and row i + head_dim / 2 of each head become its rows 2i and 2i + 1. Scores do not change when Q and K
    /// change their order together, so one rotation serves both kinds of files.
    HalvesToNeighbours {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Which row of the file becomes the row `row`, of whole heads.
    pub fn stored(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::HalvesToNeighbours { head_dim } => {
                let (head, at) = (row / head_dim * head_dim, row % head_dim);
                head + at / 2 + at % 2 * (head_dim / 2)
            }
        }
    }

    /// The values of a vector, one a row.
    pub fn apply(self, values: &[f32]) -> Vec<f32> {
        (0..values.len()).map(|row| values[self.stored(row)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_neighbours_head_by_head() {
        let order = RowOrder::HalvesToNeighbours { head_dim: 4 };
        let rows: Vec<f32> = (0..8).map(|row| row as f32).collect();
        assert_eq!(order.apply(&rows), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(RowOrder::AsStored.apply(&rows), rows);
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 8192.0 };
        let rope = Rope { base: 500_000.0, scaling, pairs: RopePairs::Halves };
        let plain = Rope { scaling: RopeScaling::None, ..rope.clone() };
        let (scaled, plain) = (rope.frequencies(128), plain.frequencies(128));
        assert_eq!((scaled[0], scaled[63]), (plain[0], plain[63] / 8.0));
        // Wave 32 has 8192 * 500000^-0.5 / 2π = 1.84 turns in the context: 28 % kept.
        let kept = (8192.0 * 500_000f64.powf(-0.5) / std::f64::consts::TAU - 1.0) / 3.0;
        assert!((scaled[32] / plain[32] - ((1.0 - kept) / 8.0 + kept)).abs() < 1e-12);
    }

    #[test]
    fn impossible_numbers_are_seen() {
        let rope = |base, scaling| Rope { base, scaling, pairs: RopePairs::Halves };
        assert_eq!(rope(1e4, RopeScaling::Linear(4.0)).problem(16), None);
        for wrong in [
            rope(0.0, RopeScaling::None),
            rope(f32::NAN, RopeScaling::None),
            rope(1e4, RopeScaling::Linear(0.0)),
            rope(1e4, RopeScaling::Factors(vec![1.0; 7])),
            rope(1e4, RopeScaling::Llama3 { factor: 8.0, low: 4.0, high: 4.0, original_context: 8192.0 }),
        ] {
            assert!(wrong.problem(16).is_some(), "{wrong:?}");
        }
    }
}
