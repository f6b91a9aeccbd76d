//! Tokenizers in a GGUF file's metadata: byte-level BPE (`gpt2`), split as the file's pre-tokenizer says, and
//! SentencePiece's BPE (`llama`), whose merges follow from its scores. Names and expressions are llama.cpp's.
use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NFC, Prepend, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

use super::encoder::{AFTER_DIGITS, BEFORE_DIGITS};
use super::{Parts, Spelling, Token, TokenKind, Tokenizer, VISIBLE_SPACE};
use crate::model_file::{Metadata, ModelTextError};

/// How a value of `tokenizer.ggml.pre` splits text before the BPE.
enum Pre {
    /// Digits one by one, the rest by GPT-2's expression.
    SingleDigits,
    /// The family of GPT-4's expression: digits in groups of at most so many; composed characters first, or not.
    Words { digits: &'static str, compose: bool, ignore_merges: bool },
}

/// Tokens that end an answer by their names: most files name only one of them in a key (`eos_token_id`), and chat
/// models end their turns with another. The names are those by which llama.cpp finds them (`llama-vocab.cpp`,
/// `special_eog_ids`).
const END_NAMES: [&str; 24] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[EOT]",
    "<EOT>",
    "_<EOT>",
    // What stands around the files of a repository in code models: a prompt's scaffold, and never part of an answer.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<fim-repo>",
    "<|repo_name|>",
    "<reponame>",
    "<|file_sep|>",
    "<PAD>",
];

impl Pre {
    const KNOWN: [&str; 8] =
        ["smollm", "starcoder", "refact", "codeshell", "llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen"];

    fn named(name: &str) -> Option<Self> {
        match name {
            "smollm" | "starcoder" | "refact" | "codeshell" => Some(Self::SingleDigits),
            "llama-bpe" | "llama3" => Some(Self::Words { digits: r"\p{N}{1,3}", compose: false, ignore_merges: true }),
            "qwen2" | "deepseek-r1-qwen" => Some(Self::Words { digits: r"\p{N}", compose: true, ignore_merges: false }),
            _ => None,
        }
    }
}

/// Whether a plain prompt begins with the beginning-of-sequence token where the file does not say: llama.cpp's
/// defaults. Public files of Llama 3 lack the key, and the model was trained with the token.
fn begins_with_bos(metadata: &Metadata, spelling: Spelling) -> bool {
    match spelling {
        Spelling::Pieces => true,
        Spelling::ByteLevel => matches!(metadata.text("tokenizer.ggml.pre"), Ok("llama-bpe" | "llama3")),
    }
}

/// Values of `tokenizer.ggml.token_type`. A token that ends answers is a control token, whatever the file calls it.
fn kind(text: &str, number: i64) -> TokenKind {
    match number {
        _ if END_NAMES.contains(&text) => TokenKind::Control,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        _ => TokenKind::Plain,
    }
}

impl Tokenizer {
    /// Builds the tokenizer from the `tokenizer.ggml.*` keys. `max_tokens` bounds what [`Self::encode`] accepts.
    ///
    /// # Errors
    /// `Metadata` for absent or contradictory keys, `Unsupported` for another kind of tokenizer.
    pub(crate) fn from_metadata(metadata: &Metadata, max_tokens: u32) -> Result<Self, ModelTextError> {
        let tokens = metadata.texts("tokenizer.ggml.tokens")?;
        let (bpe, spelling) = match metadata.text("tokenizer.ggml.model")? {
            "gpt2" => (byte_level(metadata, &tokens)?, Spelling::ByteLevel),
            "llama" => (sentencepiece(metadata, &tokens)?, Spelling::Pieces),
            other => {
                let message = format!("tokenizer `{other}`; supported: `gpt2` and `llama`");
                return Err(ModelTextError::Unsupported(message));
            }
        };
        let types = metadata.integers("tokenizer.ggml.token_type")?;
        if tokens.is_empty() || types.len() != tokens.len() {
            let reason = format!("{} types for {} tokens", types.len(), tokens.len());
            return Err(contradiction("tokenizer.ggml.token_type", reason));
        }
        let known = |key: &str| match metadata.integer(key) {
            Ok(id) if (id as usize) < tokens.len() => Ok(id),
            Ok(id) => Err(contradiction(key, format!("token {id} of {}", tokens.len()))),
            Err(error) => Err(error),
        };
        let with_bos = metadata.flag("tokenizer.ggml.add_bos_token", begins_with_bos(metadata, spelling));
        let prefix = if with_bos { vec![known("tokenizer.ggml.bos_token_id")?] } else { Vec::new() };
        let vocabulary = tokens.iter().zip(&types);
        let vocabulary = vocabulary.map(|(text, number)| Token { text: (*text).to_owned(), kind: kind(text, *number) });
        let eos = known("tokenizer.ggml.eos_token_id")?;
        let parts = Parts { bpe, inner: None, vocabulary: vocabulary.collect(), spelling, prefix, eos };
        Self::new(parts, max_tokens)
    }

    /// The tokens whose names say that they end an answer.
    pub(crate) fn ends_by_name(&self) -> impl Iterator<Item = u32> {
        END_NAMES.iter().filter_map(|name| self.special_id(name))
    }
}

fn byte_level(metadata: &Metadata, tokens: &[&str]) -> Result<tokenizers::Tokenizer, ModelTextError> {
    let name = metadata.text("tokenizer.ggml.pre")?;
    let pre = Pre::named(name).ok_or_else(|| {
        ModelTextError::Unsupported(format!("pre-tokenizer `{name}`; supported: {}", Pre::KNOWN.join(", ")))
    })?;
    let merges = metadata.texts("tokenizer.ggml.merges")?;
    let merges =
        merges.iter().map(|merge| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())));
    let merges = merges
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| contradiction("tokenizer.ggml.merges", "a merge without two parts".into()))?;
    let ignore_merges = matches!(pre, Pre::Words { ignore_merges: true, .. });
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| contradiction("tokenizer.ggml.merges", error.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    let splits: Vec<PreTokenizerWrapper> = match pre {
        Pre::SingleDigits => vec![Digits::new(true).into(), ByteLevel::new(false, false, true).into()],
        Pre::Words { digits, compose, .. } => {
            if compose {
                tokenizer.with_normalizer(Some(NFC)).map_err(internal)?;
            }
            let expression = format!("{BEFORE_DIGITS}{digits}{AFTER_DIGITS}");
            let split = Split::new(SplitPattern::Regex(expression), SplitDelimiterBehavior::Isolated, false);
            vec![split.map_err(internal)?.into(), ByteLevel::new(false, false, false).into()]
        }
    };
    tokenizer.with_pre_tokenizer(Some(Sequence::new(splits)));
    Ok(tokenizer)
}

/// Two pieces merge when their union is a piece; the better its score, the sooner.
fn sentencepiece(metadata: &Metadata, tokens: &[&str]) -> Result<tokenizers::Tokenizer, ModelTextError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = metadata.floats(SCORES)?;
    if scores.len() != tokens.len() {
        return Err(contradiction(SCORES, format!("{} scores for {} tokens", scores.len(), tokens.len())));
    }
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    let mut merges = Vec::new();
    for (id, text) in tokens.iter().enumerate() {
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(first), Some(second)) = (ids.get(left), ids.get(right)) {
                merges.push((id, *first, *second));
            }
        }
    }
    merges.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then_with(|| (a.1, a.2).cmp(&(b.1, b.2))));
    let merges = merges.into_iter().map(|(_, left, right)| (tokens[left].to_owned(), tokens[right].to_owned()));
    let unknown = metadata.integer("tokenizer.ggml.unknown_token_id").ok();
    let unknown = unknown.and_then(|id| tokens.get(id as usize)).copied().unwrap_or("<unk>");
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges.collect::<Vec<_>>())
        .unk_token(unknown.to_owned())
        .byte_fallback(true)
        .fuse_unk(true)
        .build()
        .map_err(|error| contradiction(SCORES, error.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    let space = VISIBLE_SPACE.to_string();
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if metadata.flag("tokenizer.ggml.add_space_prefix", true) {
        steps.push(Prepend::new(space.clone()).into());
    }
    steps.push(Replace::new(" ", space).map_err(internal)?.into());
    tokenizer.with_normalizer(Some(tokenizers::normalizers::Sequence::new(steps))).map_err(internal)?;
    Ok(tokenizer)
}

fn vocabulary(tokens: &[&str]) -> tokenizers::models::bpe::Vocab {
    let unique: HashMap<String, u32> = tokens.iter().map(|token| (*token).to_owned()).zip(0u32..).collect();
    unique.into_iter().collect()
}

fn internal(error: tokenizers::Error) -> ModelTextError {
    ModelTextError::Unsupported(error.to_string())
}

fn contradiction(key: &str, reason: String) -> ModelTextError {
    ModelTextError::Metadata { key: key.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use tandem_gguf::Value;
    use tandem_proto::ErrorKind;

    use super::*;
    use crate::tokenizer::{SpecialTokens, byte_alphabet};

    fn tiny() -> HashMap<String, Value> {
        let texts = |items: &[&str]| Value::Array(items.iter().map(|s| Value::String((*s).to_owned())).collect());
        let alphabet: HashMap<u8, char> = byte_alphabet().into_iter().map(|(c, b)| (b, c)).collect();
        let mut tokens = vec!["<eos>".to_owned(), "eo".to_owned(), "<user>".to_owned()];
        let mut types = vec![3, 1, 4];
        for byte in 0..=255u8 {
            tokens.push(alphabet[&byte].to_string());
            types.push(1);
        }
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        HashMap::from([
            ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
            ("tokenizer.ggml.pre".into(), Value::String("smollm".into())),
            ("tokenizer.ggml.tokens".into(), texts(&tokens)),
            ("tokenizer.ggml.token_type".into(), Value::Array(types.into_iter().map(Value::I32).collect())),
            ("tokenizer.ggml.merges".into(), texts(&["e o"])),
            ("tokenizer.ggml.eos_token_id".into(), Value::U32(0)),
        ])
    }

    fn build(values: HashMap<String, Value>) -> Result<Tokenizer, ModelTextError> {
        Tokenizer::from_metadata(&Metadata::from_values(values), 100)
    }

    #[test]
    fn control_tokens_are_parsed_only_when_asked() {
        let tokenizer = build(tiny()).unwrap();
        assert_eq!(tokenizer.encode("<eos>", SpecialTokens::Parse).unwrap(), [0]);
        let plain = tokenizer.encode("<eos>", SpecialTokens::AsText).unwrap();
        assert_eq!((plain.len(), plain[1]), (4, 1));
        // User-defined tokens are text with an id of its own: always found.
        assert_eq!(tokenizer.encode("<user>", SpecialTokens::AsText).unwrap(), [2]);
    }

    #[test]
    fn a_guarded_control_token_is_text() {
        let tokenizer = build(tiny()).unwrap();
        for content in ["<eos>", "a<eos><eos>b", "<eo", "<", "<<eos>"] {
            let guarded = tokenizer.guarded(content, '\u{f0000}');
            let rendered = format!("{guarded}<eos>");
            let mut expected = tokenizer.encode(content, SpecialTokens::AsText).unwrap();
            expected.push(0);
            assert_eq!(tokenizer.encode_guarded(&rendered, '\u{f0000}').unwrap(), expected, "{content}");
        }
        assert_eq!(tokenizer.guarded("a < b", 'G'), "a < b");
    }

    #[test]
    fn other_kinds_are_refused_by_name() {
        let mut values = tiny();
        values.insert("tokenizer.ggml.pre".into(), Value::String("tekken".into()));
        assert!(build(values).err().unwrap().to_string().contains("tekken"));
    }

    #[test]
    fn contradictory_metadata_is_an_error() {
        for (key, value) in [
            ("tokenizer.ggml.eos_token_id", Value::U32(1 << 20)),
            ("tokenizer.ggml.merges", Value::Array(vec![Value::String("nospace".into())])),
            ("tokenizer.ggml.merges", Value::Array(vec![Value::String("no such".into())])),
            ("tokenizer.ggml.token_type", Value::Array(vec![])),
            ("tokenizer.ggml.tokens", Value::Array(vec![Value::U8(1)])),
        ] {
            let mut values = tiny();
            values.insert(key.into(), value);
            assert!(matches!(build(values), Err(ModelTextError::Metadata { .. })), "{key}");
        }
        for key in tiny().into_keys() {
            let mut values = tiny();
            values.remove(&key);
            assert!(build(values).is_err(), "{key}");
        }
    }

    #[test]
    fn a_text_beyond_the_context_is_refused_unread() {
        let tokenizer = build(tiny()).unwrap();
        let error = tokenizer.encode(&"a".repeat(10_000), SpecialTokens::AsText).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
    }
}
