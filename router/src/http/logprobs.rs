//! Log probabilities in OpenAI's two forms: of chats and of completions. One entry for every generated token, the one
//! that ended the answer included, as in `token_ids` and `usage`. Pure.
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tandem_proto::v1;

use super::kind::Kind;
use crate::text::TokenText;

/// How a token is written.
pub(super) type Spell = Arc<dyn Fn(u32) -> TokenText + Send + Sync>;

/// JSON has no infinity: OpenAI's stand-in for what is as good as impossible.
const LEAST: f32 = -9999.0;

/// One token with what is known of its probability.
#[derive(Clone, Debug)]
pub(super) struct Scored {
    pub id: u32,
    pub logprob: f32,
    /// The likeliest in its place.
    pub top: Vec<v1::TokenLogprob>,
}

/// The value of `logprobs` in a choice.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Logprobs {
    Chat {
        content: Vec<ChatEntry>,
        /// Always `null`: nothing is refused.
        refusal: (),
    },
    Completion {
        tokens: Vec<String>,
        token_logprobs: Vec<f32>,
        /// The likeliest tokens and the chosen one.
        top_logprobs: Vec<BTreeMap<String, f32>>,
        /// Where each token begins, in characters from the beginning of the answer.
        text_offset: Vec<usize>,
    },
}

#[derive(Serialize)]
pub(super) struct ChatEntry {
    #[serde(flatten)]
    chosen: ChatToken,
    top_logprobs: Vec<ChatToken>,
}

#[derive(Serialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    /// `null` for control tokens, which are no text.
    bytes: Option<Vec<u8>>,
}

/// Writes one answer's entries, at once or token by token.
pub(super) struct Writer {
    kind: Kind,
    spell: Spell,
    /// Begun by the tokens so far.
    characters: usize,
}

impl Writer {
    pub fn new(kind: Kind, spell: Spell) -> Self {
        Self { kind, spell, characters: 0 }
    }

    /// The entries of the next tokens.
    pub fn write(&mut self, tokens: &[Scored]) -> Logprobs {
        match self.kind {
            Kind::Chat => {
                let content = tokens.iter().map(|token| ChatEntry {
                    chosen: self.chat_token(token.id, token.logprob),
                    top_logprobs: token.top.iter().map(|top| self.chat_token(top.token_id, top.logprob)).collect(),
                });
                Logprobs::Chat { content: content.collect(), refusal: () }
            }
            Kind::Completion => Logprobs::Completion {
                tokens: tokens.iter().map(|token| self.name(token.id)).collect(),
                token_logprobs: tokens.iter().map(|token| token.logprob.max(LEAST)).collect(),
                top_logprobs: tokens.iter().map(|token| self.likeliest(token)).collect(),
                text_offset: tokens.iter().map(|token| self.offset(token.id)).collect(),
            },
        }
    }

    fn chat_token(&self, id: u32, logprob: f32) -> ChatToken {
        let TokenText { bytes, control } = (self.spell)(id);
        ChatToken { token: readable("", &bytes), logprob: logprob.max(LEAST), bytes: (!control).then_some(bytes) }
    }

    fn name(&self, id: u32) -> String {
        readable("bytes:", &(self.spell)(id).bytes)
    }

    fn likeliest(&self, token: &Scored) -> BTreeMap<String, f32> {
        let top = token.top.iter().map(|top| (top.token_id, top.logprob));
        // Several tokens may be written alike: the chosen one and then the likeliest stays.
        let top = top.collect::<Vec<_>>().into_iter().rev().chain([(token.id, token.logprob)]);
        top.map(|(id, logprob)| (self.name(id), logprob.max(LEAST))).collect()
    }

    /// A token that begins within a character begins where that character does.
    fn offset(&mut self, id: u32) -> usize {
        let TokenText { bytes, control } = (self.spell)(id);
        let continues = |byte: &u8| byte & 0xc0 == 0x80;
        let within = bytes.first().is_some_and(continues);
        let offset = if within { self.characters.saturating_sub(1) } else { self.characters };
        if !control {
            self.characters += bytes.iter().filter(|byte| !continues(byte)).count();
        }
        offset
    }
}

/// The token's text, or its bytes as OpenAI writes a part of a character: `\xe2\x82`.
fn readable(prefix: &str, bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(prefix.to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Tokens 1, 2 and 3 together are "a€", 4 ends the answer.
    fn spell() -> Spell {
        Arc::new(|id| match id {
            1 => TokenText { bytes: b"a\xe2".to_vec(), control: false },
            2 => TokenText { bytes: b"\x82".to_vec(), control: false },
            3 => TokenText { bytes: b"\xac".to_vec(), control: false },
            4 => TokenText { bytes: b"<end>".to_vec(), control: true },
            _ => TokenText { bytes: format!(" {id}").into_bytes(), control: false },
        })
    }

    fn scored(id: u32, logprob: f32, top: &[(u32, f32)]) -> Scored {
        let top = top.iter().map(|&(token_id, logprob)| v1::TokenLogprob { token_id, logprob, token: Vec::new() });
        Scored { id, logprob, top: top.collect() }
    }

    fn written(kind: Kind, tokens: &[Scored]) -> Value {
        serde_json::to_value(Writer::new(kind, spell()).write(tokens)).unwrap()
    }

    #[test]
    fn a_chat_s_form() {
        let tokens = [scored(9, -0.5, &[(9, -0.5), (4, -1.0)]), scored(1, f32::NEG_INFINITY, &[])];
        let expected = json!({"content": [
            {"token": " 9", "logprob": -0.5, "bytes": [32, 57], "top_logprobs": [
                {"token": " 9", "logprob": -0.5, "bytes": [32, 57]},
                {"token": "<end>", "logprob": -1.0, "bytes": null},
            ]},
            {"token": "\\x61\\xe2", "logprob": -9999.0, "bytes": [97, 226], "top_logprobs": []},
        ], "refusal": null});
        assert_eq!(written(Kind::Chat, &tokens), expected);
    }

    #[test]
    fn a_completion_s_form() {
        let tokens = [scored(9, -0.5, &[(8, -0.25), (9, -0.5)]), scored(8, -1.5, &[(9, -0.5)]), scored(4, -2.0, &[])];
        let expected = json!({
            "tokens": [" 9", " 8", "<end>"],
            "token_logprobs": [-0.5, -1.5, -2.0],
            "top_logprobs": [{" 8": -0.25, " 9": -0.5}, {" 8": -1.5, " 9": -0.5}, {"<end>": -2.0}],
            "text_offset": [0, 2, 4],
        });
        assert_eq!(written(Kind::Completion, &tokens), expected);
    }

    #[test]
    fn offsets_count_characters_over_all_parts() {
        let mut writer = Writer::new(Kind::Completion, spell());
        let mut offsets = Vec::new();
        for id in [1, 2, 3, 4, 9, 9] {
            let part = serde_json::to_value(writer.write(&[scored(id, -1.0, &[])])).unwrap();
            offsets.push(part["text_offset"][0].as_u64().unwrap());
            if id == 2 {
                assert_eq!(part["tokens"][0], "bytes:\\x82");
            }
        }
        assert_eq!(offsets, [0, 1, 1, 2, 2, 4]);
    }
}
