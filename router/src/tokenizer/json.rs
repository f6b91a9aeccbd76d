//! Tokenizers in a `tokenizer.json`, by the `tokenizers` crate that wrote it. Only the way from text to ids is its:
//! special tokens are found by us, because a message's text must not become one.
use std::path::Path;

use serde_json::Value;
use tokenizers::{AddedToken, ModelWrapper};

use super::{Parts, Spelling, Token, TokenKind, Tokenizer};
use crate::model_file::ModelTextError;

/// What the files beside a `tokenizer.json` say of its special tokens.
#[derive(Default)]
pub(crate) struct SpecialNames {
    /// Text of the beginning-of-sequence token.
    pub bos: Option<String>,
    /// Whether a prompt begins with it; `None`: as the `tokenizer.json` itself says.
    pub add_bos: Option<bool>,
    /// The token that ends a sequence.
    pub eos: u32,
}

impl Tokenizer {
    /// Builds the tokenizer from the file at `path`, for a model of `vocab_size` token ids. `max_tokens` bounds what
    /// [`Self::encode`] accepts.
    ///
    /// # Errors
    /// `Unreadable` or `Damaged` for a missing or damaged file, `Unsupported` for another kind of tokenizer.
    pub(crate) fn from_json(
        path: &Path,
        vocab_size: u32,
        max_tokens: u32,
        names: &SpecialNames,
    ) -> Result<Self, ModelTextError> {
        let damaged = |reason: String| ModelTextError::Damaged { path: path.to_owned(), reason };
        let text =
            std::fs::read(path).map_err(|source| ModelTextError::Unreadable { path: path.to_owned(), source })?;
        let whole = tokenizers::Tokenizer::from_bytes(&text).map_err(|error| damaged(error.to_string()))?;
        if !matches!(whole.get_model(), ModelWrapper::BPE(_)) {
            return Err(ModelTextError::Unsupported(format!("{} is no BPE tokenizer", path.display())));
        }
        let vocabulary = vocabulary(&whole, vocab_size).map_err(damaged)?;
        if names.eos as usize >= vocabulary.len() {
            return Err(damaged(format!("end-of-sequence token {} of {}", names.eos, vocabulary.len())));
        }
        let (bpe, inner) = plain(&whole).map_err(|error| damaged(error.to_string()))?;
        let prefix = prefix(&whole, names)?;
        let parts = Parts { bpe, inner, vocabulary, spelling: spelling(&whole)?, prefix, eos: names.eos };
        Self::new(parts, max_tokens)
    }
}

fn vocabulary(whole: &tokenizers::Tokenizer, vocab_size: u32) -> Result<Vec<Token>, String> {
    let all = whole.get_vocab(true);
    // A model's vocabulary may be padded beyond the tokenizer's, not the other way round.
    if let Some((text, id)) = all.iter().max_by_key(|(_, id)| **id).filter(|(_, id)| **id >= vocab_size) {
        return Err(format!("token {text:?} has the id {id}, but config.json a vocabulary of {vocab_size}"));
    }
    let unused = || Token { text: String::new(), kind: TokenKind::Plain };
    let mut vocabulary: Vec<Token> = (0..vocab_size).map(|_| unused()).collect();
    for (text, id) in all {
        vocabulary[id as usize].text = text;
    }
    for (id, added) in whole.get_added_tokens_decoder() {
        let AddedToken { content, single_word, lstrip, rstrip, special, .. } = added;
        if single_word || lstrip || rstrip {
            return Err(format!("added token {content:?} takes its surroundings along, which is not supported"));
        }
        if let Some(token) = vocabulary.get_mut(id as usize) {
            token.kind = if special { TokenKind::Control } else { TokenKind::UserDefined };
        }
    }
    Ok(vocabulary)
}

/// The tokenizer without its added tokens; and, where the first word of a text is treated in its own way, one for texts
/// that are not first.
pub(super) fn plain(
    whole: &tokenizers::Tokenizer,
) -> tokenizers::Result<(tokenizers::Tokenizer, Option<tokenizers::Tokenizer>)> {
    let mut first = tokenizers::Tokenizer::new(whole.get_model().clone());
    first.with_normalizer(whole.get_normalizer().cloned())?;
    first.with_pre_tokenizer(whole.get_pre_tokenizer().cloned());
    let written = serde_json::to_string(&whole.get_pre_tokenizer())?;
    let elsewhere = written.replace(r#""prepend_scheme":"first""#, r#""prepend_scheme":"never""#);
    if elsewhere == written {
        return Ok((first, None));
    }
    let mut inner = first.clone();
    inner.with_pre_tokenizer(serde_json::from_str::<Option<tokenizers::PreTokenizerWrapper>>(&elsewhere)?);
    Ok((first, Some(inner)))
}

/// What the file's post-processor puts before a text.
fn prefix(whole: &tokenizers::Tokenizer, names: &SpecialNames) -> Result<Vec<u32>, ModelTextError> {
    let unsupported = |error: tokenizers::Error| ModelTextError::Unsupported(error.to_string());
    let bos = names.bos.as_deref().and_then(|text| whole.token_to_id(text));
    match (names.add_bos, bos) {
        (Some(false), _) => return Ok(Vec::new()),
        (Some(true), Some(id)) => return Ok(vec![id]),
        _ => {}
    }
    let with = whole.encode_fast("a", true).map_err(unsupported)?;
    let without = whole.encode_fast("a", false).map_err(unsupported)?;
    match with.get_ids().strip_suffix(without.get_ids()) {
        Some(prefix) => Ok(prefix.to_vec()),
        None => Err(ModelTextError::Unsupported("a tokenizer that puts tokens behind a text".into())),
    }
}

fn spelling(whole: &tokenizers::Tokenizer) -> Result<Spelling, ModelTextError> {
    let decoder = serde_json::to_value(whole.get_decoder()).unwrap_or(Value::Null);
    if has_type(&decoder, "ByteLevel") {
        Ok(Spelling::ByteLevel)
    } else if has_type(&decoder, "ByteFallback") || has_type(&decoder, "Metaspace") {
        Ok(Spelling::Pieces)
    } else {
        Err(ModelTextError::Unsupported(format!("a tokenizer with the decoder {decoder}")))
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    match value {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|kind| kind == name) || fields.values().any(|v| has_type(v, name))
        }
        Value::Array(items) => items.iter().any(|item| has_type(item, name)),
        _ => false,
    }
}
