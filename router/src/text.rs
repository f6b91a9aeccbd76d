//! Text in and out of a model: everything that the router knows of a model file.
//!
//! - [`crate::model_file`]: the GGUF header. `directory.rs`: the files of a safetensors directory.
//! - [`crate::tokenizer`]: token ids ↔ bytes. [`crate::template`]: chats.
//! - [`TextStream`]: token by token back into text.
mod directory;
mod stream;

use std::path::Path;

use tandem_gguf::split;
use tandem_proto::v1::ChatMessage;
use tandem_proto::{Error, ErrorKind};

pub use stream::{TextStep, TextStream};

use crate::model_file::{self, Metadata, ModelTextError};
use crate::template::ChatTemplate;
pub use crate::tokenizer::SpecialTokens;
use crate::tokenizer::Tokenizer;

/// How one token is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText {
    /// Perhaps a part of a character.
    pub bytes: Vec<u8>,
    /// The bytes are a control token's name, and no text.
    pub control: bool,
}

/// Tokenizer, chat template and identity of one model.
pub struct ModelText {
    /// The name of the file (without `.gguf` and the number of a part, and telling more than most files'
    /// `general.name`) or of the directory; `--served-model-name` replaces it.
    pub model_name: String,
    /// Tokens of prompt and answer together at most.
    pub context_len: u32,
    /// The token that ends an answer.
    pub eos: u32,
    /// Further tokens that do.
    also_eos: Vec<u32>,
    /// XXH3-64 of the file; of several parts and of a directory what `tandem_proto::model` defines.
    pub digest: u64,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

/// Whether a model's files are read to their ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digest {
    /// To know whose tokens these are.
    Whole,
    /// It is 0 then.
    LeftOut,
}

impl ModelText {
    /// Reads the header of a GGUF file (the first of several), or the texts of a safetensors directory, and digests the
    /// whole. Blocks for as long as the disk takes.
    ///
    /// # Errors
    /// A missing, damaged, truncated or unsupported file; the message names it and says why.
    pub fn load(path: &Path) -> Result<Self, ModelTextError> {
        Self::read(path, Digest::Whole)
    }

    /// Whether [`Self::load`] would take it, without a look at the weights.
    ///
    /// # Errors
    /// As there.
    pub fn check(path: &Path) -> Result<(), ModelTextError> {
        Self::read(path, Digest::LeftOut).map(drop)
    }

    fn read(path: &Path, digest: Digest) -> Result<Self, ModelTextError> {
        if path.is_dir() { directory::load(path, digest) } else { Self::from_gguf(path, digest) }
    }

    fn from_gguf(path: &Path, digest: Digest) -> Result<Self, ModelTextError> {
        let (metadata, paths) = Metadata::read(path)?;
        let architecture = metadata.text("general.architecture")?;
        let context_len = metadata.integer(&format!("{architecture}.context_length"))?;
        let tokenizer = Tokenizer::from_metadata(&metadata, context_len)?;
        let template = match metadata.text("tokenizer.chat_template") {
            Ok(source) => {
                let printed = |key| metadata.integer(key).ok().and_then(|id| tokenizer.special_text(id)).unwrap_or("");
                let (bos, eos) = (printed("tokenizer.ggml.bos_token_id"), printed("tokenizer.ggml.eos_token_id"));
                Some(ChatTemplate::compile(source, bos, eos)?)
            }
            Err(_) => None,
        };
        Ok(Self {
            model_name: split::model_name(&path.file_stem().unwrap_or_default().to_string_lossy()).to_owned(),
            context_len,
            eos: tokenizer.eos(),
            also_eos: others(
                tokenizer.eos(),
                ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"]
                    .into_iter()
                    .filter_map(|key| metadata.integer(key).ok())
                    .chain(tokenizer.ends_by_name()),
                tokenizer.vocab_size(),
            ),
            digest: match digest {
                Digest::Whole => model_file::digest_of_parts(&paths)?,
                Digest::LeftOut => 0,
            },
            tokenizer,
            template,
        })
    }

    /// Token ids of a prompt.
    ///
    /// # Errors
    /// `InvalidArgument` when the text is too long for any tokenization of it to fit the context; a returned prompt
    /// may still be longer than `context_len`.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(text, specials)
    }

    /// Token ids of a chat, up to where the assistant's answer begins. Control tokens come from the template alone.
    ///
    /// # Errors
    /// `InvalidArgument` for messages that the template cannot render, or a model without a template.
    pub fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, Error> {
        let template = self.template.as_ref().ok_or_else(|| {
            let message = format!("model {} has no chat template: use a plain prompt", self.model_name);
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        let rendered = template.render(&self.tokenizer, messages)?;
        self.tokenizer.encode_guarded(&rendered.text, rendered.guard)
    }

    /// Starts turning generated tokens into text that ends before the first of the `stop` strings.
    pub fn decoder(&self, stop: &[String]) -> TextStream {
        TextStream::new(self.tokenizer.pieces().clone(), stop)
    }

    /// The text of all `ids`; control tokens and ids outside the vocabulary have none, invalid bytes become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let pieces = self.tokenizer.pieces();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| pieces.get(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// How one token is written, whether or not it is text.
    pub fn token(&self, id: u32) -> TokenText {
        match self.tokenizer.pieces().get(id) {
            [] => TokenText { bytes: self.tokenizer.special_text(id).unwrap_or("").into(), control: true },
            bytes => TokenText { bytes: bytes.to_vec(), control: false },
        }
    }

    /// The tokens at which a node stops, besides `eos`: what the request asks for, and the model's other ends unless it
    /// ignores those.
    pub fn stop_token_ids(&self, asked: &[u32], ignore_eos: bool) -> Vec<u32> {
        let own: &[u32] = if ignore_eos { &[] } else { &self.also_eos };
        let new = own.iter().filter(|id| !asked.contains(id));
        asked.iter().chain(new).copied().collect()
    }

    /// Number of token ids: valid ones are below it.
    pub fn vocab_size(&self) -> u32 {
        self.tokenizer.vocab_size()
    }
}

/// What is left of `ends` without `eos`, repetitions and ids outside the vocabulary.
fn others(eos: u32, ends: impl Iterator<Item = u32>, vocab_size: u32) -> Vec<u32> {
    let mut others: Vec<u32> = ends.filter(|id| *id != eos && *id < vocab_size).collect();
    others.sort_unstable();
    others.dedup();
    others
}
