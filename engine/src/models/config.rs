//! What a network is, whichever kind of file says it: one configuration for all families. [`gguf`] and [`json`] fill it
//! in; [`super::llama`] builds the network from it.
mod gguf;
mod json;

use super::rope::{Rope, RopePairs};

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The file's own name for it, or the file's name.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// K and V heads; divide the query heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub feed_forward: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// How Q and K turn.
    pub rope: Rope,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Of each layer: how many keys a row sees, itself included; `None`: all up to its own.
    pub windows: Vec<Option<usize>>,
    /// Q, K and V have biases.
    pub qkv_bias: bool,
    /// Each head of Q and K is normed before it turns.
    pub qk_norm: bool,
    /// The embedding is the output matrix, too.
    pub tied: bool,
    /// Longest sequence that the model was made for.
    pub max_context_tokens: usize,
    /// Ends a sequence.
    pub eos_token_id: u32,
}

/// What sets a family apart. The forward pass knows no family, only what this table makes of it.
struct Family {
    /// `general.architecture` or `model_type`.
    name: &'static str,
    qkv_bias: bool,
    qk_norm: bool,
    /// In a GGUF file; safetensors have halves throughout.
    gguf_pairs: RopePairs,
}

const FAMILIES: [Family; 4] = [
    Family { name: "llama", qkv_bias: false, qk_norm: false, gguf_pairs: RopePairs::Neighbours },
    Family { name: "mistral", qkv_bias: false, qk_norm: false, gguf_pairs: RopePairs::Neighbours },
    Family { name: "qwen2", qkv_bias: true, qk_norm: false, gguf_pairs: RopePairs::Halves },
    Family { name: "qwen3", qkv_bias: false, qk_norm: true, gguf_pairs: RopePairs::Halves },
];

impl Family {
    fn named(name: &str) -> Result<&'static Self, String> {
        FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            format!("the architecture is {name}; only {} can be served", known.join(", "))
        })
    }
}

impl LlamaConfig {
    /// Values of a row of Q, K and V.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Values of a row of Q, and of what attention gives.
    pub fn attended_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Why no network of these sizes can be built or computed.
    fn problem(&self) -> Option<String> {
        let zero = [self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.max_context_tokens];
        let contradiction = zero.contains(&0)
            || !self.heads.is_multiple_of(self.kv_heads)
            || self.windows.len() != self.layers
            || self.windows.contains(&Some(0))
            || self.eos_token_id as usize >= self.vocab_size
            || !self.norm_eps.is_finite();
        if contradiction {
            return Some(format!("the sizes in the metadata contradict each other: {self:?}"));
        }
        let kernels_want = [("heads", self.head_dim), ("a row", self.hidden), ("a feed-forward", self.feed_forward)];
        let odd = kernels_want.into_iter().find(|(_, size)| *size == 0 || !size.is_multiple_of(16));
        if let Some((what, size)) = odd {
            return Some(format!("{what} of {size} values: the kernels want multiples of 16"));
        }
        self.rope.problem(self.head_dim)
    }

    fn checked(self) -> Result<Self, String> {
        self.problem().map_or(Ok(self), Err)
    }
}
