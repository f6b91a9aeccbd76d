//! Token ids ↔ bytes, from a GGUF file's own metadata. Byte-level BPE as llama.cpp's `smollm` pre-tokenizer does it;
//! any other kind is refused rather than approximated. Knows no chat and no streams: see [`crate::template`] for the
//! former and [`crate::text`] for both.
use std::collections::HashMap;
use std::sync::Arc;

use tandem_proto::{Error, ErrorKind};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use crate::text::{Metadata, ModelTextError};

/// Values of `tokenizer.ggml.pre` whose text is split as here: digits one by one, the rest by GPT-2's expression.
const PRE_TOKENIZERS: [&str; 4] = ["smollm", "starcoder", "refact", "codeshell"];
/// Values of `tokenizer.ggml.token_type`.
const TYPE_CONTROL: i64 = 3;
const TYPE_USER_DEFINED: i64 = 4;

/// What text that spells a control token (`<|im_end|>`) becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The control token, as in a prompt whose author writes the whole sequence.
    Parse,
    /// Ordinary text.
    AsText,
}

/// Encoder and vocabulary of one model.
pub struct Tokenizer {
    bpe: tokenizers::Tokenizer,
    pieces: Arc<Pieces>,
    specials: Specials,
    bos: Option<u32>,
    eos: u32,
    max_text_bytes: usize,
}

impl Tokenizer {
    /// Builds the tokenizer from the `tokenizer.ggml.*` keys. `max_tokens` bounds what [`Self::encode`] accepts.
    ///
    /// # Errors
    /// `Metadata` for absent or contradictory keys, `Unsupported` for another kind of tokenizer.
    pub(crate) fn from_metadata(metadata: &Metadata, max_tokens: u32) -> Result<Self, ModelTextError> {
        let (model, pre) = (metadata.text("tokenizer.ggml.model")?, metadata.text("tokenizer.ggml.pre")?);
        if model != "gpt2" || !PRE_TOKENIZERS.contains(&pre) {
            return Err(ModelTextError::Unsupported(format!(
                "tokenizer `{model}` with pre-tokenizer `{pre}`; supported: `gpt2` with one of {PRE_TOKENIZERS:?}"
            )));
        }
        let tokens = metadata.texts("tokenizer.ggml.tokens")?;
        let types = metadata.integers("tokenizer.ggml.token_type")?;
        if tokens.is_empty() || types.len() != tokens.len() {
            return Err(contradiction(
                "tokenizer.ggml.token_type",
                format!("{} types for {} tokens", types.len(), tokens.len()),
            ));
        }
        let known = |key: &str| match metadata.integer(key) {
            Ok(id) if (id as usize) < tokens.len() => Ok(id),
            Ok(id) => Err(contradiction(key, format!("token {id} of {}", tokens.len()))),
            Err(error) => Err(error),
        };
        let pieces = Pieces::new(&tokens, &types);
        let max_text_bytes = (max_tokens as usize).saturating_mul(pieces.longest());
        Ok(Self {
            bpe: byte_level_bpe(&tokens, &metadata.texts("tokenizer.ggml.merges")?)?,
            pieces: Arc::new(pieces),
            specials: Specials::new(&tokens, &types),
            bos: if metadata.flag("tokenizer.ggml.add_bos_token") {
                Some(known("tokenizer.ggml.bos_token_id")?)
            } else {
                None
            },
            eos: known("tokenizer.ggml.eos_token_id")?,
            max_text_bytes,
        })
    }

    /// Token ids of `text`, with the beginning-of-sequence token where the model wants one.
    ///
    /// # Errors
    /// `InvalidArgument` for a text so long that no tokenization of it fits the context.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::from_iter(self.bos);
        self.encode_parts(text, specials, None, &mut ids)?;
        Ok(ids)
    }

    /// Token ids of a rendered chat: control tokens are parsed, then `guard` (see [`Self::guarded`]) is taken out.
    /// No beginning-of-sequence token is added: the template writes it.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(crate) fn encode_guarded(&self, text: &str, guard: char) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        self.encode_parts(text, SpecialTokens::Parse, Some(guard), &mut ids)?;
        Ok(ids)
    }

    /// `content` with `guard` put into everything that spells a control token, or that could spell one together with
    /// the text behind it.
    pub(crate) fn guarded(&self, content: &str, guard: char) -> String {
        let mut guarded = String::with_capacity(content.len() + 16);
        for (at, character) in content.char_indices() {
            guarded.push(character);
            if self.specials.may_begin(&content[at..]) {
                guarded.push(guard);
            }
        }
        guarded
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> u32 {
        self.pieces.len()
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The text of a token as the vocabulary writes it, for templates that print it.
    pub(crate) fn special_text(&self, id: u32) -> Option<&str> {
        self.specials.tokens.iter().find(|token| token.id == id).map(|token| token.text.as_str())
    }

    /// The bytes of every token.
    pub(crate) fn pieces(&self) -> &Arc<Pieces> {
        &self.pieces
    }

    fn encode_parts(
        &self,
        text: &str,
        specials: SpecialTokens,
        guard: Option<char>,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if text.len() > self.max_text_bytes {
            let message = format!(
                "a text of {} bytes cannot fit the model's context (at most {} bytes)",
                text.len(),
                self.max_text_bytes
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let mut plain_from = 0;
        let mut at = 0;
        while at < text.len() {
            match self.specials.longest_match(&text.as_bytes()[at..], specials) {
                Some(token) => {
                    self.encode_plain(&text[plain_from..at], guard, ids)?;
                    ids.push(token.id);
                    at += token.text.len();
                    plain_from = at;
                }
                None => at += 1,
            }
        }
        self.encode_plain(&text[plain_from..], guard, ids)
    }

    fn encode_plain(&self, text: &str, guard: Option<char>, ids: &mut Vec<u32>) -> Result<(), Error> {
        let unguarded = guard.filter(|guard| text.contains(*guard)).map(|guard| text.replace(guard, ""));
        let text = unguarded.as_deref().unwrap_or(text);
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self
            .bpe
            .encode_fast(text, false)
            .map_err(|error| Error::new(ErrorKind::Internal, format!("the tokenizer failed: {error}")))?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

/// The bytes that each token stands for, in one allocation.
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// `vocabulary + 1` offsets into `bytes`.
    starts: Vec<u32>,
}

impl Pieces {
    fn new(tokens: &[&str], types: &[i64]) -> Self {
        let byte_of = byte_alphabet();
        let mut pieces = Self { bytes: Vec::new(), starts: vec![0] };
        for (token, kind) in tokens.iter().zip(types) {
            match *kind {
                // Control tokens are no text.
                TYPE_CONTROL => {}
                TYPE_USER_DEFINED => pieces.bytes.extend_from_slice(token.as_bytes()),
                _ => match token.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                    Some(bytes) => pieces.bytes.extend(bytes),
                    None => pieces.bytes.extend_from_slice(token.as_bytes()),
                },
            }
            // GGUF caps strings at 1 GiB and the header was read from one file: a vocabulary beyond 4 GiB saturates.
            pieces.starts.push(u32::try_from(pieces.bytes.len()).unwrap_or(u32::MAX));
        }
        pieces
    }

    #[cfg(test)]
    pub fn from_pieces(pieces: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut all = Self { bytes: Vec::new(), starts: vec![0] };
        for piece in pieces {
            all.bytes.extend(piece);
            all.starts.push(all.bytes.len() as u32);
        }
        all
    }

    /// Bytes of a token; none for an id outside the vocabulary.
    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    fn len(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).unwrap_or(u32::MAX)
    }

    fn longest(&self) -> usize {
        // Control tokens have no bytes here but are spelled in prompts: 64 covers them.
        self.starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0).max(64)
    }
}

struct SpecialToken {
    text: String,
    id: u32,
    control: bool,
}

/// Tokens that are found in text before the BPE sees it.
struct Specials {
    /// Longest first.
    tokens: Vec<SpecialToken>,
    first_byte: [bool; 256],
}

impl Specials {
    fn new(tokens: &[&str], types: &[i64]) -> Self {
        let mut found: Vec<SpecialToken> = (0u32..)
            .zip(tokens.iter().zip(types))
            .filter(|(_, (text, kind))| !text.is_empty() && [TYPE_CONTROL, TYPE_USER_DEFINED].contains(kind))
            .map(|(id, (text, kind))| SpecialToken { text: (*text).to_owned(), id, control: *kind == TYPE_CONTROL })
            .collect();
        found.sort_by_key(|token| std::cmp::Reverse(token.text.len()));
        let mut first_byte = [false; 256];
        for token in &found {
            first_byte[usize::from(token.text.as_bytes()[0])] = true;
        }
        Self { tokens: found, first_byte }
    }

    fn longest_match(&self, text: &[u8], specials: SpecialTokens) -> Option<&SpecialToken> {
        if !self.first_byte[usize::from(*text.first()?)] {
            return None;
        }
        let visible = |token: &&SpecialToken| specials == SpecialTokens::Parse || !token.control;
        self.tokens.iter().filter(visible).find(|token| text.starts_with(token.text.as_bytes()))
    }

    /// Whether a control token stands at the start of `text`, or would if the right text followed.
    fn may_begin(&self, text: &str) -> bool {
        text.as_bytes().first().is_some_and(|byte| self.first_byte[usize::from(*byte)])
            && self
                .tokens
                .iter()
                .any(|token| token.control && (text.starts_with(&token.text) || token.text.starts_with(text)))
    }
}

fn byte_level_bpe(tokens: &[&str], merges: &[&str]) -> Result<tokenizers::Tokenizer, ModelTextError> {
    let vocabulary: HashMap<String, u32> = tokens.iter().map(|token| (*token).to_owned()).zip(0u32..).collect();
    let merges = merges
        .iter()
        .map(|merge| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| contradiction("tokenizer.ggml.merges", "a merge without two parts".into()))?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
        .build()
        .map_err(|error| contradiction("tokenizer.ggml.merges", error.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Digits(Digits::new(true)),
        PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, true)),
    ])));
    Ok(tokenizer)
}

fn contradiction(key: &str, reason: String) -> ModelTextError {
    ModelTextError::Metadata { key: key.to_owned(), reason }
}

/// The characters that stand for bytes in a byte-level vocabulary
/// (`bytes_to_unicode` of <https://github.com/openai/gpt-2/blob/master/src/encoder.py>).
fn byte_alphabet() -> HashMap<char, u8> {
    let mut spare = 256..;
    (0..=255u8)
        .filter_map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable { u32::from(byte) } else { spare.next()? };
            Some((char::from_u32(code)?, byte))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::*;

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
        values.insert("tokenizer.ggml.pre".into(), Value::String("llama-bpe".into()));
        assert!(build(values).err().unwrap().to_string().contains("llama-bpe"));
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
