//! A directory in the form that `transformers` saves: `config.json` and one or more safetensors files, mapped
//! (<https://huggingface.co/docs/safetensors>). The `safetensors` crate checks the headers against the files; this file
//! knows the tensors' names in them. The tokenizer in the directory is the router's matter.
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use tandem_gguf::TensorType;
use tandem_proto::model;

use super::config::LlamaConfig;
use super::mmap::Map;
use super::reading::Reading;
use super::sizes::{Purpose, TensorSize};
use super::weights::{RawTensor, Weights};
use crate::error::EngineError;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// An open directory.
pub struct SafetensorsDirectory {
    path: PathBuf,
    config: LlamaConfig,
    shards: Vec<Shard>,
    /// Shard of each tensor, by the tensor's own name.
    tensors: HashMap<String, usize>,
    reading: Reading,
}

struct Shard {
    path: PathBuf,
    map: Map,
    /// Where the tensors' bytes begin.
    data_at: usize,
    metadata: Metadata,
}

impl SafetensorsDirectory {
    /// Reads the configuration, maps all shards and checks that they are whole.
    ///
    /// # Errors
    /// `Model`, naming the file that is missing, damaged or truncated, or what cannot be served.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let config_path = path.join(CONFIG);
        let text = std::fs::read(&config_path).map_err(|error| failure(&config_path, error))?;
        let config = LlamaConfig::from_json(&text, path).map_err(|error| failure(&config_path, error))?;
        let shards: Vec<Shard> =
            shard_names(path)?.into_iter().map(|name| Shard::open(path.join(name))).collect::<Result<_, _>>()?;
        let mut tensors = HashMap::new();
        for (index, shard) in shards.iter().enumerate() {
            for name in shard.metadata.tensors().into_keys() {
                if tensors.insert(name.clone(), index).is_some() {
                    return Err(failure(&shard.path, format_args!("tensor {name} is in another shard, too")));
                }
            }
        }
        let bytes = shards.iter().map(|shard| (shard.map.len() - shard.data_at) as u64).sum();
        Ok(Self { path: path.into(), config, shards, tensors, reading: Reading::new(bytes) })
    }

    /// What `config.json` says.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Digest of the directory's files.
    ///
    /// # Errors
    /// `Model` when one cannot be read.
    pub fn digest(&self) -> Result<u64, EngineError> {
        let mut files = BTreeMap::new();
        let entries = std::fs::read_dir(&self.path).map_err(|error| failure(&self.path, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| failure(&self.path, error))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if model::is_part(&name) {
                files.insert(name, Map::open(&entry.path())?.digest());
            }
        }
        Ok(model::digest(&files))
    }

    /// A tied head may be stored a second time; old checkpoints hold the rotary frequencies.
    fn is_unneeded(&self, name: &str) -> bool {
        name == "lm_head.weight" && self.config.tied || name.ends_with(".rotary_emb.inv_freq")
    }
}

impl Weights for SafetensorsDirectory {
    fn tensor(&self, name: &str, dims: &[usize]) -> Result<RawTensor<'_>, EngineError> {
        let stored = stored_name(name);
        let shard = self.tensors.get(&stored).map(|&index| &self.shards[index]);
        let shard = shard.ok_or_else(|| failure(&self.path, format_args!("no tensor {stored} in its safetensors")))?;
        let (info, bytes) = shard.tensor(&stored)?;
        if info.shape != dims {
            let is = &info.shape;
            let why = format_args!("tensor {stored} has the shape {is:?} instead of {dims:?}");
            return Err(failure(&shard.path, why));
        }
        let dtype = ggml_type(info.dtype).ok_or_else(|| {
            failure(&shard.path, format_args!("tensor {stored} has the unsupported type {:?}", info.dtype))
        })?;
        self.reading.begin(&stored);
        Ok(RawTensor::new(dtype, dims, bytes, &shard.map, &self.reading))
    }

    fn sizes(&self) -> Vec<TensorSize> {
        let size = |(name, info): (&str, &TensorInfo)| {
            let purpose = match name {
                "model.embed_tokens.weight" => Purpose::Embedding,
                "lm_head.weight" => Purpose::Head,
                _ => Purpose::Layer,
            };
            let dims: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
            TensorSize::of(purpose, &dims, ggml_type(info.dtype).unwrap_or(TensorType::F32))
        };
        let needed = self.tensors.iter().filter(|(name, _)| !self.is_unneeded(name));
        needed.filter_map(|(name, &shard)| Some(size((name, self.shards[shard].metadata.info(name)?)))).collect()
    }

    fn finish(&self) -> Result<(), EngineError> {
        match self.reading.finish(self.tensors.keys().map(String::as_str).filter(|name| !self.is_unneeded(name))) {
            Some(name) => Err(failure(&self.path, format_args!("tensor {name} is of no use to this architecture"))),
            None => Ok(()),
        }
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, EngineError> {
        let map = Map::open(&path)?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| failure(&path, format_args!("not a whole safetensors file, is it truncated? {error}")))?;
        Ok(Self { data_at: header + size_of::<u64>(), path, map, metadata })
    }

    fn tensor(&self, name: &str) -> Result<(&TensorInfo, &[u8]), EngineError> {
        let info = self.metadata.info(name);
        let found = info.and_then(|info| {
            let (from, to) = info.data_offsets;
            Some((info, self.map.get(self.data_at + from..self.data_at + to)?))
        });
        found.ok_or_else(|| failure(&self.path, format_args!("no tensor {name}")))
    }
}

/// The files that the index names, or the single one of a model without an index.
fn shard_names(directory: &Path) -> Result<BTreeSet<String>, EngineError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }

    let index_path = directory.join(INDEX);
    if !index_path.exists() {
        return Ok(BTreeSet::from([SINGLE.into()]));
    }
    let text = std::fs::read(&index_path).map_err(|error| failure(&index_path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| failure(&index_path, error))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    // What a digest does not cover must not be served.
    match shards.iter().find(|name| !model::is_part(name)) {
        Some(name) => Err(failure(&index_path, format_args!("{name:?} is no safetensors file of this directory"))),
        None if shards.is_empty() => Err(failure(&index_path, "names no file")),
        None => Ok(shards),
    }
}

/// GGML's name of a floating-point type. Whole tensors of the others (8 bits and less) have their scales elsewhere.
fn ggml_type(dtype: Dtype) -> Option<TensorType> {
    match dtype {
        Dtype::F32 => Some(TensorType::F32),
        Dtype::F16 => Some(TensorType::F16),
        Dtype::BF16 => Some(TensorType::BF16),
        _ => None,
    }
}

/// What `transformers` calls GGUF's `name`.
fn stored_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let parts: Vec<&str> = name.split('.').collect();
    let &["blk", layer, part, kind] = &parts[..] else { return name.into() };
    let part = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => other,
    };
    format!("model.layers.{layer}.{part}.{kind}")
}

fn failure(path: &Path, why: impl Display) -> EngineError {
    EngineError::Model(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated() {
        assert_eq!(stored_name("blk.12.attn_k.bias"), "model.layers.12.self_attn.k_proj.bias");
        assert_eq!(stored_name("blk.0.ffn_norm.weight"), "model.layers.0.post_attention_layernorm.weight");
        assert_eq!(stored_name("output.weight"), "lm_head.weight");
    }

    #[test]
    fn integers_are_no_weights() {
        assert_eq!(ggml_type(Dtype::BF16), Some(TensorType::BF16));
        assert_eq!(ggml_type(Dtype::I64), None);
    }
}
