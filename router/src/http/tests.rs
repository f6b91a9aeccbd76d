//! Answers as clients see them, from scripted events: no nodes, no sockets.
mod other_parsers;

use std::sync::Arc;

use axum::body::to_bytes;
use axum::response::{IntoResponse, Response};
use futures::stream::{self, BoxStream, StreamExt};
use serde_json::{Value, json};
use tandem_proto::v1::{FinishReason, Timings, TokenLogprob};
use tandem_proto::{Error, ErrorKind};

use super::answer::{collect, whole};
use super::fields::Fields;
use super::kind::Kind;
use super::logprobs::Spell;
use super::options::Options;
use super::sse::{Encoder, PromptInfo, respond};
use super::types::Head;
use crate::generation::{GenerationEvent, Usage};
use crate::text::TokenText;

type Events = BoxStream<'static, Result<GenerationEvent, Error>>;

fn token(index: u32, id: u32, text: &str) -> Result<GenerationEvent, Error> {
    let top = vec![top(id, -0.5), top(9, -1.5)];
    Ok(GenerationEvent::Token { id, text: text.into(), logprob: -0.5, top, index, cached: 1 })
}

fn top(token_id: u32, logprob: f32) -> TokenLogprob {
    TokenLogprob { token_id, logprob, token: Vec::new() }
}

/// Token 5 is written "t5".
fn spell() -> Spell {
    Arc::new(|id| TokenText { bytes: format!("t{id}").into_bytes(), control: false })
}

fn finish(reason: FinishReason, text: &str, completion: u32) -> Result<GenerationEvent, Error> {
    Ok(GenerationEvent::Finish {
        reason,
        text: text.into(),
        usage: Usage { prompt: 3, completion, cached: 1 },
        timings: Box::new(Timings { ttft_ms: 12.5, ..Timings::default() }),
        trace_id: "cafe".into(),
    })
}

fn options(json: &str) -> Options {
    Options::parse(&Fields::parse(json).unwrap(), Kind::Completion).unwrap()
}

fn encoder(kind: Kind, options: &Options, echoes: &[Option<&str>]) -> Encoder {
    let info = |echo: &Option<&str>| PromptInfo { echo: echo.map(Arc::from), tokens: 3, choice: 0 };
    Encoder::new(Head::new(kind, "r1", "m", 7), options, echoes.iter().map(info).collect(), &spell())
}

fn answer(events: Vec<Result<GenerationEvent, Error>>) -> Events {
    stream::iter(events).boxed()
}

async fn body(response: Response) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

/// The data of every event; `[DONE]` as a string.
async fn events(response: Response) -> Vec<Value> {
    let text = body(response).await;
    assert!(text.ends_with("\n\n"));
    text.trim_end()
        .split("\n\n")
        .map(|event| event.strip_prefix("data: ").expect(event))
        .map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into()))
        .collect()
}

const PLAIN: &str = r#"{"stream": true}"#;

#[tokio::test]
async fn a_chat_streams_one_token_a_chunk_and_the_role_with_the_first() {
    let options = options(r#"{"stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true}"#);
    let script = vec![token(0, 5, "Hé"), token(1, 6, ""), token(2, 2, "y"), finish(FinishReason::Stop, "!", 3)];
    let response = respond(encoder(Kind::Chat, &options, &[None]), vec![answer(script)]).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let events = events(response).await;
    let choices: Vec<&Value> = events[..4].iter().map(|event| &event["choices"][0]).collect();
    assert_eq!(
        events[0],
        json!({
            "id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 7, "model": "m", "usage": null,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hé"}, "logprobs": null,
                "finish_reason": null, "token_ids": [5]}],
        })
    );
    assert_eq!((&choices[1]["delta"], &choices[1]["token_ids"]), (&json!({"content": ""}), &json!([6])));
    assert_eq!((&choices[3]["delta"], &choices[3]["finish_reason"]), (&json!({"content": "!"}), &json!("stop")));
    assert_eq!(events[4]["choices"], json!([]));
    assert_eq!(
        events[4]["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 1}})
    );
    assert_eq!(events[5], "[DONE]");
    assert_eq!(events.len(), 6);
}

#[tokio::test]
async fn usage_only_when_asked() {
    let script = vec![token(0, 5, "a"), finish(FinishReason::Length, "", 1)];
    let response = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(script.clone())]).await.unwrap();
    let plain = events(response).await;
    assert_eq!((plain.len(), plain.last().unwrap()), (3, &json!("[DONE]")));
    assert!(plain.iter().all(|event| event.get("usage").is_none()));
    assert_eq!(plain[1]["choices"][0]["delta"], json!({}));
    let each = options(r#"{"stream": true, "stream_options": {"continuous_usage_stats": true}}"#);
    let response = respond(encoder(Kind::Chat, &each, &[None]), vec![answer(script)]).await.unwrap();
    let events = events(response).await;
    assert_eq!(events[0]["usage"]["completion_tokens"], 1);
    for event in events.iter().filter(|event| event.is_object()) {
        assert_eq!(event["usage"]["prompt_tokens_details"]["cached_tokens"], 1, "as in every chunk: {event}");
    }
}

#[tokio::test]
async fn timings_only_when_asked_streamed_or_not() {
    let timed = options(r#"{"stream": true, "stream_options": {"include_timings": true}}"#);
    let response = respond(encoder(Kind::Chat, &timed, &[None]), vec![script()]).await.unwrap();
    let chunks = events(response).await;
    let last = &chunks[chunks.len() - 2];
    assert_eq!((&last["choices"], last.get("usage")), (&json!([]), None), "counts were not asked for");
    assert_eq!((&last["tandem"]["ttft_ms"], &last["tandem"]["trace_id"]), (&json!(12.5), &json!("cafe")));
    assert!(chunks[..chunks.len() - 2].iter().all(|chunk| chunk.get("tandem").is_none()));

    let answers = [collect(script()).await.unwrap(), collect(script()).await.unwrap()];
    let head = Head::new(Kind::Chat, "r1", "m", 7);
    let several: Value = serde_json::from_str(&body(whole(&head, &timed, two(), &answers, &spell())).await).unwrap();
    assert_eq!((&several["tandem"][0], &several["tandem"][1]["ttft_ms"]), (&last["tandem"], &json!(12.5)));
    let plain: Value =
        serde_json::from_str(&body(whole(&head, &options(PLAIN), two(), &answers, &spell())).await).unwrap();
    assert!(plain.get("tandem").is_none());
}

#[tokio::test]
async fn several_prompts_keep_their_numbers_and_echo_comes_once() {
    let one = |text: &str| answer(vec![token(0, 5, text), token(1, 6, text), finish(FinishReason::Length, "", 2)]);
    let options = options(r#"{"stream": true, "stream_options": {"include_usage": true}}"#);
    let encoder = encoder(Kind::Completion, &options, &[Some("P"), None]);
    let events = events(respond(encoder, vec![one("a"), one("b")]).await.unwrap()).await;
    let mut texts = [String::new(), String::new()];
    for choice in events.iter().filter_map(|event| event.get("choices")?.get(0)) {
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(texts, ["Paa", "bb"]);
    assert_eq!(events[events.len() - 2]["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn a_failure_before_the_first_token_is_a_status_and_later_an_event_without_done() {
    let failure = || Err(Error::new(ErrorKind::Unavailable, "gone"));
    let early = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(vec![failure()])]).await;
    assert_eq!(early.unwrap_err().into_response().status(), 503);
    let script = vec![token(0, 5, "a"), Err(Error::new(ErrorKind::Aborted, "gone"))];
    let late = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(script)]).await.unwrap();
    let late = events(late).await;
    assert_eq!((late.len(), &late[1]["error"]["code"]), (2, &json!("aborted")));
    let silent = respond(encoder(Kind::Chat, &options(PLAIN), &[None]), vec![answer(vec![token(0, 5, "a")])]).await;
    assert_eq!(events(silent.unwrap()).await[1]["error"]["code"], "internal_error");
}

#[tokio::test]
async fn a_whole_answer() {
    let script = || answer(vec![token(0, 5, "a"), token(1, 6, "b"), finish(FinishReason::Stop, "c", 2)]);
    for (kind, object, content) in
        [(Kind::Chat, "chat.completion", "message"), (Kind::Completion, "text_completion", "text")]
    {
        let answers = [collect(script()).await.unwrap()];
        let head = Head::new(kind, "r1", "m", 7);
        let prompts = vec![PromptInfo { echo: None, tokens: 3, choice: 0 }];
        let response = whole(&head, &options(r#"{"return_token_ids": true}"#), prompts, &answers, &spell());
        let answer: Value = serde_json::from_str(&body(response).await).unwrap();
        let text = if kind == Kind::Chat { json!({"role": "assistant", "content": "abc"}) } else { json!("abc") };
        assert_eq!((&answer["object"], &answer["choices"][0][content]), (&json!(object), &text));
        assert_eq!((&answer["choices"][0]["token_ids"], &answer["usage"]["total_tokens"]), (&json!([5, 6]), &json!(5)));
    }
    assert!(collect(answer(vec![token(0, 5, "a")])).await.is_err());
}

/// Two answers to one prompt.
fn two() -> Vec<PromptInfo> {
    (0..2).map(|choice| PromptInfo { echo: None, tokens: 3, choice }).collect()
}

fn script() -> Events {
    answer(vec![token(0, 5, "a"), token(1, 6, "b"), finish(FinishReason::Length, "", 2)])
}

#[tokio::test]
async fn several_answers_to_one_prompt_count_it_once() {
    let answers = [collect(script()).await.unwrap(), collect(script()).await.unwrap()];
    let head = Head::new(Kind::Chat, "r1", "m", 7);
    let options = options(r#"{"stream_options": {"include_usage": true}}"#);
    let whole: Value = serde_json::from_str(&body(whole(&head, &options, two(), &answers, &spell())).await).unwrap();
    assert_eq!((&whole["choices"][0]["index"], &whole["choices"][1]["index"]), (&json!(0), &json!(1)));
    assert_eq!(whole["choices"][1]["message"]["content"], "ab");
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1}});
    assert_eq!(whole["usage"], usage);
    let encoder = Encoder::new(head, &options, two(), &spell());
    let events = events(respond(encoder, vec![script(), script()]).await.unwrap()).await;
    assert_eq!(events[events.len() - 2]["usage"], usage);
    for index in 0..2 {
        let of = |event: &&Value| event["choices"][0]["index"] == index;
        let role = |event: &&Value| event["choices"][0]["delta"]["role"] == "assistant";
        assert_eq!(events.iter().filter(of).filter(role).count(), 1, "each answer begins with its role");
        let reasons = events.iter().filter(of).filter(|event| event["choices"][0]["finish_reason"] == "length");
        assert_eq!(reasons.count(), 1);
    }
}

#[tokio::test]
async fn logprobs_come_with_their_tokens() {
    let options = options(r#"{"logprobs": 2}"#);
    let completion = json!({"tokens": ["t5", "t6"], "token_logprobs": [-0.5, -0.5], "text_offset": [0, 2],
        "top_logprobs": [{"t5": -0.5, "t9": -1.5}, {"t6": -0.5, "t9": -1.5}]});
    let entry = |name: &str, logprob: f32| json!({"token": name, "logprob": logprob, "bytes": name.as_bytes()});
    let chat = |name: &str| {
        let mut chosen = entry(name, -0.5);
        chosen["top_logprobs"] = json!([entry(name, -0.5), entry("t9", -1.5)]);
        chosen
    };
    for (kind, expected) in
        [(Kind::Completion, completion), (Kind::Chat, json!({"content": [chat("t5"), chat("t6")], "refusal": null}))]
    {
        let prompt = || vec![PromptInfo { echo: None, tokens: 3, choice: 0 }];
        let (head, answers) = (Head::new(kind, "r1", "m", 7), [collect(script()).await.unwrap()]);
        let whole = body(whole(&head, &options, prompt(), &answers, &spell())).await;
        let whole: Value = serde_json::from_str(&whole).unwrap();
        assert_eq!(whole["choices"][0]["logprobs"], expected);

        let encoder = Encoder::new(head, &options, prompt(), &spell());
        let events = events(respond(encoder, vec![script()]).await.unwrap()).await;
        let parts: Vec<&Value> = events[..3].iter().map(|event| &event["choices"][0]["logprobs"]).collect();
        match kind {
            Kind::Completion => {
                assert_eq!((&parts[1]["tokens"], &parts[1]["text_offset"]), (&json!(["t6"]), &json!([2])));
            }
            Kind::Chat => assert_eq!(parts[1], &json!({"content": [chat("t6")], "refusal": null})),
        }
        assert_eq!(parts[2], &Value::Null, "the last chunk has no token");
    }
}
