//! The JSON of answers: whole ones and the chunks of a stream, for both endpoints.
//! Reference: <https://platform.openai.com/docs/api-reference>; `token_ids` is vLLM's.
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;
use tandem_proto::v1::FinishReason;

use super::kind::Kind;
use super::logprobs::Logprobs;
use crate::generation::Usage;

/// What every chunk of one answer repeats.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub kind: Kind,
    id: String,
    created: u64,
    model: String,
}

impl Head {
    pub fn new(kind: Kind, request_id: &str, model: &str, created: u64) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        Self { kind, id: format!("{prefix}-{request_id}"), created, model: model.to_owned() }
    }

    /// A whole answer.
    pub fn answer<'a>(&'a self, choices: &'a [Choice<'a>], usage: Usage, tandem: Option<Value>) -> Answer<'a> {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        Answer { head: self.fields(object), part: Part::new(choices, Some(Some(usage)), tandem) }
    }

    /// The fields that all chunks of a streamed answer begin with.
    pub fn of_chunks(&self) -> HeadFields<'_> {
        self.fields(match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        })
    }

    fn fields(&self, object: &'static str) -> HeadFields<'_> {
        HeadFields { id: &self.id, object, created: self.created, model: &self.model }
    }
}

/// The outermost object.
#[derive(Serialize)]
pub(super) struct Answer<'a> {
    #[serde(flatten)]
    head: HeadFields<'a>,
    #[serde(flatten)]
    part: Part<'a>,
}

/// Its first fields.
#[derive(Serialize)]
pub(super) struct HeadFields<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
}

/// The fields after them, which differ from chunk to chunk.
#[derive(Serialize)]
pub(super) struct Part<'a> {
    choices: &'a [Choice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    /// See [`super::timings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    tandem: Option<Value>,
}

impl<'a> Part<'a> {
    /// `usage`: absent, `null`, or counts. `tandem`: where it was asked for.
    pub fn new(choices: &'a [Choice<'a>], usage: Option<Option<Usage>>, tandem: Option<Value>) -> Self {
        Self { choices, usage: usage.map(|usage| usage.map(UsageBody::from)), tandem }
    }
}

/// The answer to one prompt, or a part of it.
#[derive(Default, Serialize)]
pub(super) struct Choice<'a> {
    pub index: usize,
    /// Completions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Chats, whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
    /// Chats, in parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<Message>,
    /// `null` unless asked for.
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

/// A chat message or what a chunk adds to it.
#[derive(Default, Serialize)]
pub(super) struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

#[derive(Serialize)]
struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt.saturating_add(usage.completion),
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached },
        }
    }
}

/// The counts of several answers together. A prompt counts once, with its answer 0: each comes with its number.
pub(super) fn sum(answers: impl IntoIterator<Item = (u32, Usage)>) -> Usage {
    answers.into_iter().fold(Usage::default(), |sum, (choice, usage)| {
        let of_prompt = if choice == 0 { usage } else { Usage::default() };
        Usage {
            prompt: sum.prompt.saturating_add(of_prompt.prompt),
            completion: sum.completion.saturating_add(usage.completion),
            cached: sum.cached.saturating_add(of_prompt.cached),
        }
    })
}

/// OpenAI's word for why an answer ended.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::Unspecified => "stop",
    }
}

/// Now, as `created` fields have it.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
