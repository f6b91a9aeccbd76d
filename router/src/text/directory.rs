//! What the router reads of a safetensors directory: `config.json`, `tokenizer.json`, and, where they are there,
//! `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja`. The weights are digested only.
use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tandem_proto::model;

use super::{Digest, ModelText};
use crate::model_file::{self, ModelTextError};
use crate::template::ChatTemplate;
use crate::tokenizer::{SpecialNames, Tokenizer};

#[derive(Deserialize)]
struct ConfigJson {
    max_position_embeddings: u32,
    vocab_size: u32,
    eos_token_id: Option<OneOrMore>,
}

#[derive(Default, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<OneOrMore>,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<SpecialToken>,
    eos_token: Option<SpecialToken>,
    add_bos_token: Option<bool>,
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Described { content: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// Reads the directory.
///
/// # Errors
/// A missing, damaged or unsupported file, by name.
pub(super) fn load(directory: &Path, wanted: Digest) -> Result<ModelText, ModelTextError> {
    let config: ConfigJson = required(&directory.join("config.json"))?;
    let generation: GenerationConfig = optional(&directory.join("generation_config.json"))?;
    let described: TokenizerConfig = optional(&directory.join("tokenizer_config.json"))?;
    // The first one, as the nodes take it: both must name the same.
    let ends: Vec<u32> = ids(config.eos_token_id);
    let eos = *ends.first().ok_or_else(|| damaged(&directory.join("config.json"), "no eos_token_id"))?;
    let text = |token: Option<SpecialToken>| {
        token.map(|token| match token {
            SpecialToken::Text(text) | SpecialToken::Described { content: text } => text,
        })
    };
    let (bos_text, eos_text) = (text(described.bos_token), text(described.eos_token));
    let names = SpecialNames { bos: bos_text.clone(), add_bos: described.add_bos_token, eos };
    let context_len = config.max_position_embeddings;
    let tokenizer = Tokenizer::from_json(&directory.join("tokenizer.json"), config.vocab_size, context_len, &names)?;
    let named = eos_text.as_deref().and_then(|text| tokenizer.special_id(text));
    let also_eos = ends.into_iter().chain(ids(generation.eos_token_id)).chain(named);
    let template = match template(directory, described.chat_template)? {
        Some(source) => {
            let (bos, eos) = (bos_text.unwrap_or_default(), eos_text.unwrap_or_default());
            Some(ChatTemplate::compile(&source, &bos, &eos)?)
        }
        None => None,
    };
    Ok(ModelText {
        model_name: directory.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned()),
        context_len,
        eos,
        also_eos: super::others(eos, also_eos, tokenizer.vocab_size()),
        digest: match wanted {
            Digest::Whole => digest(directory)?,
            Digest::LeftOut => 0,
        },
        tokenizer,
        template,
    })
}

/// The file of its own goes before the one in the tokenizer's configuration.
fn template(directory: &Path, inline: Option<Templates>) -> Result<Option<String>, ModelTextError> {
    let path = directory.join("chat_template.jinja");
    if path.exists() {
        let source = std::fs::read_to_string(&path);
        return source.map(Some).map_err(|source| ModelTextError::Unreadable { path, source });
    }
    Ok(match inline {
        Some(Templates::One(source)) => Some(source),
        Some(Templates::Named(all)) => all.into_iter().find(|t| t.name == "default").map(|t| t.template),
        None => None,
    })
}

/// As `tandem_proto::model` defines it.
fn digest(directory: &Path) -> Result<u64, ModelTextError> {
    let unreadable = |source| ModelTextError::Unreadable { path: directory.to_owned(), source };
    let mut parts = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if model::is_part(&name) {
            parts.insert(name, model_file::digest(&entry.path())?);
        }
    }
    Ok(model::digest(&parts))
}

fn ids(ids: Option<OneOrMore>) -> Vec<u32> {
    match ids {
        Some(OneOrMore::One(id)) => vec![id],
        Some(OneOrMore::More(ids)) => ids,
        None => Vec::new(),
    }
}

fn required<T: DeserializeOwned>(path: &Path) -> Result<T, ModelTextError> {
    let text = std::fs::read(path).map_err(|source| ModelTextError::Unreadable { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|error| damaged(path, &error.to_string()))
}

fn optional<T: DeserializeOwned + Default>(path: &Path) -> Result<T, ModelTextError> {
    if path.exists() { required(path) } else { Ok(T::default()) }
}

fn damaged(path: &Path, reason: &str) -> ModelTextError {
    ModelTextError::Damaged { path: path.to_owned(), reason: reason.to_owned() }
}
