//! Our answers, read by types that somebody else wrote from OpenAI's specification: `async-openai`.
use async_openai::error::WrappedError;
use async_openai::types::chat::{
    CreateChatCompletionResponse, CreateChatCompletionStreamResponse, FinishReason as TheirReason, Role,
};
use async_openai::types::completions::CreateCompletionResponse;
use serde::de::DeserializeOwned;

use super::*;

const EVERYTHING: &str = r#"{"stream": true, "logprobs": 2, "return_token_ids": true,
    "stream_options": {"include_usage": true, "continuous_usage_stats": true, "include_timings": true}}"#;

fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
}

async fn streamed(kind: Kind, options: &Options) -> Vec<Value> {
    let encoder = Encoder::new(Head::new(kind, "r1", "m", 7), options, two(), &spell());
    let mut events = events(respond(encoder, vec![script(), script()]).await.unwrap()).await;
    assert_eq!(events.pop(), Some(json!("[DONE]")));
    events
}

async fn all_at_once(kind: Kind, options: &Options) -> Value {
    let answers = [collect(script()).await.unwrap(), collect(script()).await.unwrap()];
    let head = Head::new(kind, "r1", "m", 7);
    serde_json::from_str(&body(whole(&head, options, two(), &answers, &spell())).await).unwrap()
}

#[tokio::test]
async fn a_chat() {
    let options = options(EVERYTHING);
    let whole: CreateChatCompletionResponse = read(&all_at_once(Kind::Chat, &options).await);
    assert_eq!((whole.object.as_str(), whole.choices.len()), ("chat.completion", 2));
    let choice = &whole.choices[1];
    assert_eq!((choice.index, choice.message.content.as_deref()), (1, Some("ab")));
    assert_eq!((&choice.message.role, &choice.finish_reason), (&Role::Assistant, &Some(TheirReason::Length)));
    let logprobs = choice.logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref()).unwrap();
    assert_eq!((logprobs.len(), logprobs[0].token.as_str(), logprobs[0].top_logprobs.len()), (2, "t5", 2));
    let usage = whole.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (3, 4, 7));
    assert_eq!(usage.prompt_tokens_details.unwrap().cached_tokens, Some(1));

    let chunks: Vec<CreateChatCompletionStreamResponse> =
        streamed(Kind::Chat, &options).await.iter().map(read).collect();
    let mut texts = [String::new(), String::new()];
    for choice in chunks.iter().flat_map(|chunk| &chunk.choices) {
        texts[choice.index as usize] += choice.delta.content.as_deref().unwrap_or_default();
    }
    assert_eq!(texts, ["ab", "ab"]);
    assert!(chunks.iter().all(|chunk| chunk.object == "chat.completion.chunk" && chunk.id == chunks[0].id));
    let last = chunks.last().unwrap();
    assert_eq!((last.choices.len(), last.usage.as_ref().unwrap().completion_tokens), (0, 4));
}

#[tokio::test]
async fn a_completion() {
    let options = options(EVERYTHING);
    let whole: CreateCompletionResponse = read(&all_at_once(Kind::Completion, &options).await);
    let choice = &whole.choices[0];
    assert_eq!((choice.text.as_str(), choice.finish_reason.is_some()), ("ab", true));
    let logprobs = choice.logprobs.as_ref().unwrap();
    assert_eq!((logprobs.tokens.len(), logprobs.text_offset.as_slice()), (2, &[0, 2][..]));

    let chunks: Vec<CreateCompletionResponse> = streamed(Kind::Completion, &options).await.iter().map(read).collect();
    let text: String = chunks.iter().flat_map(|chunk| &chunk.choices).map(|choice| choice.text.as_str()).collect();
    assert_eq!((text.len(), chunks.last().unwrap().usage.as_ref().unwrap().prompt_tokens), (4, 3));
}

#[tokio::test]
async fn a_plain_stream_has_no_more_than_was_asked_for() {
    let chunks: Vec<CreateChatCompletionStreamResponse> =
        streamed(Kind::Chat, &options(PLAIN)).await.iter().map(read).collect();
    assert!(chunks.iter().all(|chunk| chunk.usage.is_none() && chunk.choices.len() == 1));
    assert!(chunks.iter().flat_map(|chunk| &chunk.choices).all(|choice| choice.logprobs.is_none()));
}

#[tokio::test]
async fn errors() {
    let failure = || Err(Error::new(ErrorKind::Overloaded, "full"));
    let early = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(vec![failure()])]).await;
    let early = body(early.unwrap_err().into_response()).await;
    let error = serde_json::from_str::<WrappedError>(&early).unwrap().error;
    assert_eq!((error.message.as_str(), error.code.as_deref()), ("full", Some("overloaded")));
    let script = vec![token(0, 5, "a"), failure()];
    let late = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(script)]).await.unwrap();
    let error: WrappedError = read(&events(late).await[1]);
    assert_eq!(error.error.r#type.as_deref(), Some("rate_limit_error"));
}
