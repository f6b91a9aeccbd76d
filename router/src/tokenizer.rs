//! Token ids ↔ bytes. What a tokenizer is made of comes from a GGUF file's metadata (`gguf.rs`) or from a
//! `tokenizer.json` (`json.rs`); any other kind is refused rather than approximated. `encoder.rs` remembers what it
//! made of words. Knows no chat and no streams: see [`crate::template`] for the former and [`crate::text`] for both.
mod encoder;
mod gguf;
mod json;
mod specials;
mod words;

use std::collections::HashMap;
use std::sync::Arc;

use tandem_proto::{Error, ErrorCode, ErrorKind};

use encoder::Encoder;
pub(crate) use json::SpecialNames;
use specials::{Found, Specials};

use crate::model_file::ModelTextError;

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
    bpe: Encoder,
    inner: Option<Encoder>,
    pieces: Arc<Pieces>,
    specials: Specials,
    prefix: Vec<u32>,
    eos: u32,
    max_text_bytes: usize,
}

/// What a tokenizer is made of.
struct Parts {
    /// Encodes text that spells no special token.
    bpe: tokenizers::Tokenizer,
    /// The same for text that does not begin the prompt, where that makes a difference.
    inner: Option<tokenizers::Tokenizer>,
    /// By id.
    vocabulary: Vec<Token>,
    spelling: Spelling,
    /// Stands before a prompt that no chat template wrote.
    prefix: Vec<u32>,
    eos: u32,
}

struct Token {
    text: String,
    kind: TokenKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Plain,
    /// No text; parsed from a prompt only where its author may write control tokens.
    Control,
    /// Text with an id of its own.
    UserDefined,
}

/// How plain tokens write bytes.
#[derive(Clone, Copy)]
enum Spelling {
    /// A printable character for each byte (GPT-2).
    ByteLevel,
    /// Text with a visible space, `<0x0A>` for single bytes (SentencePiece).
    Pieces,
}

impl Tokenizer {
    /// `max_tokens` bounds what [`Self::encode`] accepts.
    fn new(parts: Parts, max_tokens: u32) -> Result<Self, ModelTextError> {
        let Parts { bpe, inner, vocabulary, spelling, prefix, eos } = parts;
        let (bpe, inner) = (Encoder::new(bpe), inner.map(Encoder::new));
        let pieces = Pieces::new(&vocabulary, spelling);
        // A normalizer composes characters: at most three become one.
        let per_token = pieces.longest() * if bpe.normalizes() { 3 } else { 1 };
        Ok(Self {
            bpe,
            inner,
            pieces: Arc::new(pieces),
            specials: Specials::new(vocabulary).map_err(|error| ModelTextError::Metadata {
                key: "special tokens".to_owned(),
                reason: error.to_string(),
            })?,
            prefix,
            eos,
            max_text_bytes: (max_tokens as usize).saturating_mul(per_token),
        })
    }

    /// Token ids of `text`, with the beginning-of-sequence token where the model wants one.
    ///
    /// # Errors
    /// `InvalidArgument` for a text so long that no tokenization of it fits the context.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<u32>, Error> {
        let mut ids = self.prefix.clone();
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
        let starts = self.specials.control_starts(content);
        let mut guarded = String::with_capacity(content.len() + 16);
        for (at, character) in content.char_indices() {
            guarded.push(character);
            if starts[at] {
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
        self.specials.text(id)
    }

    /// The id of the special token that is written so.
    pub(crate) fn special_id(&self, text: &str) -> Option<u32> {
        self.specials.id(text)
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
            let error = Error::new(ErrorKind::InvalidArgument, message);
            return Err(error.with_code(ErrorCode::ContextLengthExceeded));
        }
        let mut plain_from = 0;
        for Found { place, id } in self.specials.find(text, specials) {
            self.encode_plain(&text[plain_from..place.start], plain_from == 0, guard, ids)?;
            ids.push(id);
            plain_from = place.end;
        }
        self.encode_plain(&text[plain_from..], plain_from == 0, guard, ids)
    }

    fn encode_plain(&self, text: &str, first: bool, guard: Option<char>, ids: &mut Vec<u32>) -> Result<(), Error> {
        let unguarded = guard.filter(|guard| text.contains(*guard)).map(|guard| text.replace(guard, ""));
        let text = unguarded.as_deref().unwrap_or(text);
        let bpe = self.inner.as_ref().filter(|_| !first).unwrap_or(&self.bpe);
        bpe.encode(text, ids).map_err(|error| Error::new(ErrorKind::Internal, format!("the tokenizer failed: {error}")))
    }
}

/// The bytes that each token stands for, in one allocation.
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// `vocabulary + 1` offsets into `bytes`.
    starts: Vec<u32>,
}

impl Pieces {
    fn new(vocabulary: &[Token], spelling: Spelling) -> Self {
        let byte_of = byte_alphabet();
        let mut pieces = Self { bytes: Vec::new(), starts: vec![0] };
        for Token { text, kind } in vocabulary {
            match (kind, spelling) {
                // Control tokens are no text.
                (TokenKind::Control, _) => {}
                (TokenKind::UserDefined, _) => pieces.bytes.extend_from_slice(text.as_bytes()),
                (TokenKind::Plain, Spelling::ByteLevel) => {
                    match text.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                        Some(bytes) => pieces.bytes.extend(bytes),
                        None => pieces.bytes.extend_from_slice(text.as_bytes()),
                    }
                }
                (TokenKind::Plain, Spelling::Pieces) => match single_byte(text) {
                    Some(byte) => pieces.bytes.push(byte),
                    None => pieces.bytes.extend_from_slice(text.replace(VISIBLE_SPACE, " ").as_bytes()),
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

/// SentencePiece's space.
const VISIBLE_SPACE: char = '\u{2581}';

/// The byte that `<0x0A>` stands for.
fn single_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
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
