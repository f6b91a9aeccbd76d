//! The configuration in the `config.json` of a safetensors directory, as `transformers` writes it, old and new forms.
use std::path::Path;

use serde::Deserialize;

use super::{Family, LlamaConfig};
use crate::models::rope::{Rope, RopePairs, RopeScaling};

/// No count in a configuration is larger; products of two of them fit a usize.
const MAX_COUNT: usize = u32::MAX as usize;

/// The default of `max_window_layers` in `transformers` (Qwen2Config, Qwen3Config).
const MAX_WINDOW_LAYERS: usize = 28;

#[derive(Deserialize)]
struct ConfigJson {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    /// Until transformers 4.
    rope_scaling: Option<RopeJson>,
    /// Since transformers 5, with the base in it.
    rope_parameters: Option<RopeJson>,
    partial_rotary_factor: Option<f32>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    /// Of Qwen2: the layers from this one on have the window.
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    quantization_config: Option<serde_json::Value>,
    eos_token_id: Option<OneOrMore>,
}

#[derive(Deserialize)]
struct RopeJson {
    rope_type: Option<String>,
    /// The older name; some files have both.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

impl LlamaConfig {
    /// From the text of the `config.json` in `directory`.
    ///
    /// # Errors
    /// A message about the file: no such JSON, another architecture, missing or contradictory numbers, or what the
    /// kernels do not do.
    pub fn from_json(text: &[u8], directory: &Path) -> Result<Self, String> {
        // The architecture first: another one's keys say nothing to us.
        let value: serde_json::Value = serde_json::from_slice(text).map_err(|error| format!("no JSON: {error}"))?;
        let family = Family::named(value["model_type"].as_str().unwrap_or("(none)"))?;
        let json: ConfigJson = serde_json::from_value(value).map_err(|error| error.to_string())?;
        json.refusal().map_or(Ok(()), Err)?;
        let heads = json.num_attention_heads;
        let layers = json.num_hidden_layers;
        Self {
            name: directory.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned()),
            layers,
            hidden: json.hidden_size,
            heads,
            kv_heads: json.num_key_value_heads.unwrap_or(heads),
            head_dim: json.head_dim.unwrap_or(json.hidden_size / heads.max(1)),
            feed_forward: json.intermediate_size,
            vocab_size: json.vocab_size,
            rope: json.rope()?,
            norm_eps: json.rms_norm_eps,
            windows: json.windows()?,
            qkv_bias: family.qkv_bias,
            qk_norm: family.qk_norm,
            tied: json.tie_word_embeddings.unwrap_or(false),
            max_context_tokens: json.max_position_embeddings,
            eos_token_id: json.eos()?,
        }
        .checked()
    }
}

impl ConfigJson {
    /// What would make other results than ours.
    fn refusal(&self) -> Option<String> {
        let counts = [self.hidden_size, self.intermediate_size, self.num_attention_heads, self.vocab_size];
        let counts = counts.into_iter().chain([self.max_position_embeddings, self.head_dim.unwrap_or(0)]);
        if counts.chain(self.num_key_value_heads).any(|count| count > MAX_COUNT) || self.num_hidden_layers > 1 << 16 {
            return Some("a size is impossibly large".into());
        }
        if self.attention_bias || self.mlp_bias {
            return Some(format!("attention_bias or mlp_bias of {} is not supported", self.model_type));
        }
        if let Some(activation) = self.hidden_act.as_deref().filter(|name| *name != "silu") {
            return Some(format!("the activation {activation} is not supported"));
        }
        if self.quantization_config.as_ref().is_some_and(|config| !config.is_null()) {
            return Some("quantized safetensors are not supported: use the plain checkpoint or a GGUF file".into());
        }
        let partial = self.partial_rotary_factor.filter(|part| *part != 1.0);
        partial.map(|part| format!("rotating {part} of a head is not supported"))
    }

    fn rope(&self) -> Result<Rope, String> {
        let json = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let scaling = match json {
            None => RopeScaling::None,
            Some(json) => {
                let need = |value: Option<f32>, key: &str| value.ok_or_else(|| format!("RoPE scaling without {key}"));
                match json.rope_type.as_deref().or(json.old_type.as_deref()).unwrap_or("default") {
                    "default" => RopeScaling::None,
                    "linear" => RopeScaling::Linear(need(json.factor, "factor")?),
                    "llama3" => RopeScaling::Llama3 {
                        factor: need(json.factor, "factor")?,
                        low: need(json.low_freq_factor, "low_freq_factor")?,
                        high: need(json.high_freq_factor, "high_freq_factor")?,
                        original_context: need(
                            json.original_max_position_embeddings,
                            "original_max_position_embeddings",
                        )?,
                    },
                    other => return Err(format!("RoPE scaling of the type {other} is not supported")),
                }
            }
        };
        let base = json.and_then(|json| json.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        Ok(Rope { base, scaling, pairs: RopePairs::Halves })
    }

    fn windows(&self) -> Result<Vec<Option<usize>>, String> {
        let window = self.sliding_window.filter(|_| self.use_sliding_window.unwrap_or(self.model_type == "mistral"));
        let layer = |index: usize| match self.layer_types.as_ref().map(|types| types.get(index).map(String::as_str)) {
            Some(Some("sliding_attention")) => self.sliding_window.map(Some).ok_or("no sliding_window".to_owned()),
            Some(Some("full_attention")) => Ok(None),
            Some(other) => Err(format!("layer {index} has the attention type {other:?}")),
            None if self.model_type == "mistral" => Ok(window),
            None => Ok(window.filter(|_| index >= self.max_window_layers.unwrap_or(MAX_WINDOW_LAYERS))),
        };
        (0..self.num_hidden_layers).map(layer).collect()
    }

    /// The first one where there are several: the router asks for the others as stop tokens.
    fn eos(&self) -> Result<u32, String> {
        let first = match &self.eos_token_id {
            Some(OneOrMore::One(id)) => Some(*id),
            Some(OneOrMore::More(ids)) => ids.first().copied(),
            None => None,
        };
        first.ok_or_else(|| "no eos_token_id".into())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn base(model_type: &str) -> Value {
        json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "hidden_act": "silu", "eos_token_id": 2,
        })
    }

    fn read(base: Value, change: Value) -> Result<LlamaConfig, String> {
        let (mut json, Value::Object(change)) = (base, change) else { panic!("an object") };
        json.as_object_mut().expect("an object").extend(change);
        LlamaConfig::from_json(json.to_string().as_bytes(), Path::new("/models/tiny"))
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = read(base("llama"), json!({})).expect("read");
        assert_eq!((config.name.as_str(), config.kv_heads, config.head_dim), ("tiny", 4, 16));
        assert_eq!((config.rope.base, config.tied, config.windows), (10_000.0, false, vec![None; 3]));
        let qwen = read(base("qwen3"), json!({"head_dim": 32, "eos_token_id": [7, 8]})).expect("read");
        assert_eq!((qwen.head_dim, qwen.attended_width(), qwen.eos_token_id), (32, 128, 7));
        assert!(qwen.qk_norm && !qwen.qkv_bias);
    }

    #[test]
    fn windows_of_each_family() {
        let windows = |model, change| read(base(model), change).expect("read").windows;
        assert_eq!(windows("mistral", json!({"sliding_window": 24})), [Some(24); 3]);
        assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 3]);
        assert_eq!(windows("qwen2", json!({"sliding_window": 24})), [None; 3]);
        let some = json!({"sliding_window": 24, "use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(windows("qwen2", some), [None, None, Some(24)]);
        let deep = json!({"sliding_window": 24, "use_sliding_window": true, "num_hidden_layers": 30});
        assert_eq!(windows("qwen2", deep)[27..], [None, Some(24), Some(24)]);
        let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        let listed = json!({"sliding_window": 24, "layer_types": types});
        assert_eq!(windows("qwen3", listed), [Some(24), None, Some(24)]);
    }

    #[test]
    fn rope_in_its_old_and_new_form() {
        let llama3 = |key: &str| {
            json!({key: {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_theta": 5e5}, "rope_theta": 5e5})
        };
        let (old, new) = (read(base("llama"), llama3("rope_scaling")), read(base("llama"), llama3("rope_parameters")));
        let (old, new) = (old.expect("read"), new.expect("read"));
        assert_eq!((old.rope.base, &old.rope), (5e5, &new.rope));
        assert!(matches!(old.rope.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
        let linear = read(base("llama"), json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).expect("read");
        assert_eq!(linear.rope.scaling, RopeScaling::Linear(2.0));
    }

    #[test]
    fn what_cannot_be_served_is_named() {
        for (change, word) in [
            (json!({"model_type": "mamba"}), "mamba"),
            (json!({"hidden_size": "many"}), "many"),
            (json!({"hidden_size": 0}), "contradict"),
            (json!({"hidden_size": 1u64 << 40}), "large"),
            (json!({"head_dim": 24}), "24"),
            (json!({"num_key_value_heads": 3}), "contradict"),
            (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "yarn"),
            (json!({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}), "low_freq_factor"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"attention_bias": true}), "attention_bias"),
            (json!({"quantization_config": {"quant_method": "fp8"}}), "quantized"),
            (json!({"layer_types": ["full_attention"]}), "layer 1"),
            (json!({"eos_token_id": null}), "eos_token_id"),
            (json!({"eos_token_id": 300}), "contradict"),
            (json!({"partial_rotary_factor": 0.5}), "0.5"),
        ] {
            let why = read(base("llama"), change.clone()).expect_err("refused");
            assert!(why.contains(word), "{change}: {why}");
        }
    }
}
