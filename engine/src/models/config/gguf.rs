//! The configuration in a GGUF file's metadata.
use super::{Family, LlamaConfig};
use crate::error::EngineError;
use crate::models::gguf::GgufFile;
use crate::models::rope::{Rope, RopeScaling};
use crate::models::weights::Weights;

/// Tensor of one divisor a frequency (Llama 3.1's scaling).
const FREQUENCY_FACTORS: &str = "rope_freqs.weight";

impl LlamaConfig {
    /// From the metadata of a GGUF file.
    ///
    /// # Errors
    /// `Model` for another architecture, for missing or contradictory numbers, and for what the kernels do not do.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, EngineError> {
        let architecture = file.text("general.architecture").unwrap_or("(none)");
        let family = Family::named(architecture).map_err(|why| file.error(why))?;
        let key = |name: &str| format!("{}.{name}", family.name);
        // Mixtral's files have the architecture `llama`.
        if let Some(experts) = file.optional_number(&key("expert_count")).filter(|&experts| experts > 0) {
            return Err(file.error(format_args!("a mixture of {experts} experts is not supported")));
        }
        let (hidden, heads) = (file.number(&key("embedding_length"))?, file.number(&key("attention.head_count"))?);
        let head_dim = file.optional_number(&key("attention.key_length")).unwrap_or(hidden / heads.max(1));
        let layers = file.number(&key("block_count"))?;
        let rotated = file.optional_number(&key("rope.dimension_count")).unwrap_or(head_dim);
        if rotated != head_dim {
            return Err(file.error(format_args!("rotating {rotated} of a head's {head_dim} values is not supported")));
        }
        let window = file.optional_number(&key("attention.sliding_window")).filter(|&window| window > 0);
        Self {
            name: file.name(),
            layers,
            hidden,
            heads,
            kv_heads: file.optional_number(&key("attention.head_count_kv")).unwrap_or(heads),
            head_dim,
            feed_forward: file.number(&key("feed_forward_length"))?,
            vocab_size: file.rows("token_embd.weight")?,
            rope: Rope {
                base: file.optional_float(&key("rope.freq_base")).unwrap_or(10_000.0),
                scaling: scaling(file, key, head_dim)?,
                pairs: family.gguf_pairs,
            },
            norm_eps: file.optional_float(&key("attention.layer_norm_rms_epsilon")).ok_or_else(|| {
                file.error(format_args!("no {} in the metadata", key("attention.layer_norm_rms_epsilon")))
            })?,
            // A file of absurdly many layers fails at the first tensor that it does not have.
            windows: vec![window; layers.min(file.tensors())],
            qkv_bias: family.qkv_bias,
            qk_norm: family.qk_norm,
            tied: !file.has_tensor("output.weight"),
            max_context_tokens: file.number(&key("context_length"))?,
            eos_token_id: file.number("tokenizer.ggml.eos_token_id")? as u32,
        }
        .checked()
        .map_err(|why| file.error(why))
    }
}

fn scaling(file: &GgufFile, key: impl Fn(&str) -> String, head_dim: usize) -> Result<RopeScaling, EngineError> {
    match file.text(&key("rope.scaling.type")).unwrap_or("none") {
        "none" if file.has_tensor(FREQUENCY_FACTORS) => {
            Ok(RopeScaling::Factors(file.tensor(FREQUENCY_FACTORS, &[head_dim / 2])?.values()))
        }
        "none" => Ok(RopeScaling::None),
        "linear" => {
            let factor = file.optional_float(&key("rope.scaling.factor"));
            factor.map(RopeScaling::Linear).ok_or_else(|| file.error("linear RoPE scaling without its factor"))
        }
        other => Err(file.error(format_args!("RoPE scaling of the type {other} is not supported"))),
    }
}
