//! What two nodes must have in common to continue each other's answers bit for bit, by name: the order of additions in
//! which a node computes, the number format of its KV blocks and how their values lie. Plain names, no arithmetic:
//! `ops` computes in these orders, and [`crate::EngineSpec`] carries the names into the compatibility digest and the
//! node's registration.
//!
//! A kernel whose bits change, or a block whose bytes mean something else, gets a new name here. Nodes with different
//! names are never paired, so that a half-upgraded cluster refuses instead of mixing.

/// The order of a node's additions. Instruction sets that give the same bits share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// f32 throughout, each sum in one order, whatever else is in the batch and whatever the machine is.
    F32,
    /// Products and attention in AVX-512's bf16 dot products, f32 sums.
    Bf16Dots,
    /// Products and attention in the order of AMX's bf16 tiles: groups of 32 `k`, of each an even and an odd chain.
    /// How weights become bf16: `ops/bf16_k32.rs`.
    Bf16K32,
    /// CUDA: bf16 inputs, products in segments of 4,096 `k`, each a chain of `mma.m16n8k16` with f32 sums, segments
    /// added in their order; attention in partitions of 256 keys, merged in theirs (`kernels/attention.cu`).
    MmaK4096,
    /// No model: tokens are a hash of the KV.
    Simulated,
}

impl Arithmetic {
    /// The name that nodes compare.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16Dots => "bf16-dots",
            Self::Bf16K32 => "bf16-k32",
            Self::MmaK4096 => "mma-k4096",
            Self::Simulated => "simulated",
        }
    }
}

/// Number format of K and V in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 4 bytes a value.
    F32,
    /// bfloat16, 2 bytes a value.
    Bf16,
    /// Signed integers of 8 bits with one scale for each token and head, see `ops/kv.rs`.
    Int8,
}

impl KvDtype {
    /// As `--kv-dtype` writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of one token's K or V of one head.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::Bf16 => 2 * head_dim,
            Self::Int8 => head_dim + 2,
        }
    }
}

/// How the values of a KV block lie, their number format included. `ops/kv.rs` has the orders of the CPU's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// f32, `[token][head_dim]` for K and V.
    F32Rows,
    /// bf16, two neighbours of a sum in each 32-bit lane: K `[head_dim / 2][token][2]`, V `[token / 2][head_dim][2]`.
    Bf16Pairs,
    /// Integers of 8 bits in the order of [`KvOrder::Bf16Pairs`], and the 16 tokens' scales behind them.
    Int8Pairs,
    /// bf16, `[layer][K or V][kv_head][token][head_dim]`: CUDA's, whose tiles load rows of tokens.
    Bf16Tokens,
    /// Of [`crate::SimulatedExecutor`]: `[layer][token]`, each a run of 64-bit hashes.
    Hashes,
}

impl KvOrder {
    /// The name that nodes compare.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32Rows => "f32-rows",
            Self::Bf16Pairs => "bf16-pairs",
            Self::Int8Pairs => "int8-pairs",
            Self::Bf16Tokens => "bf16-tokens",
            Self::Hashes => "hashes",
        }
    }
}
