//! `POST /v1/chat/completions`: messages, rendered with the model's own template.
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde_json::value::RawValue;
use tandem_proto::Error;
use tandem_proto::v1::ChatMessage;
use tandem_telemetry::clock;

use super::answer::{Encoded, Job, answer};
use super::error::ApiError;
use super::fields::{AtMost, Fields, Neutral, value};
use super::kind::Kind;
use super::options::Options;
use super::{Caller, auth, body, check_model};
use crate::api::Service;
use crate::text::ModelText;

/// Of an answer.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("tool_choice", Neutral::Text("none")),
    ("function_call", Neutral::Text("none")),
    ("audio", Neutral::Empty),
    ("echo", Neutral::Flag(false)),
];

/// Of the rendering of messages, wherever messages are given.
const UNSUPPORTED_RENDERING: &[(&str, Neutral)] = &[
    ("tools", Neutral::Empty),
    ("functions", Neutral::Empty),
    ("chat_template", Neutral::Empty),
    ("chat_template_kwargs", Neutral::Empty),
    ("documents", Neutral::Empty),
    ("add_generation_prompt", Neutral::Flag(true)),
    ("continue_final_message", Neutral::Flag(false)),
    ("add_special_tokens", Neutral::Flag(false)),
];

/// The handler.
pub(super) async fn handle(
    State(service): State<Service>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    auth::admit(&service, &caller)?;
    let job = job(&service, body).await.inspect_err(|error| service.refused(error.kind()))?;
    answer(&service, &caller, job).await
}

async fn job(service: &Service, body: Body) -> Result<Job, ApiError> {
    let json = body::read(service.intake(), body).await?;
    let (received, bytes) = (clock::now(), json.len());
    let work = move |model: &ModelText| {
        let Chat { options, messages } = parse(&json)?;
        check_model(model, options.model.as_deref())?;
        let prompts = vec![Encoded { ids: model.encode_chat(&messages)?, echo: None }];
        Ok::<_, ApiError>(Job { kind: Kind::Chat, options, prompts, received })
    };
    service.with_model(bytes, work).await
}

/// A checked request.
#[derive(Debug)]
struct Chat {
    options: Options,
    messages: Vec<ChatMessage>,
}

fn parse(json: &str) -> Result<Chat, Error> {
    let fields = Fields::parse(json)?;
    fields.refuse(UNSUPPORTED)?;
    Ok(Chat { messages: messages(&fields)?, options: Options::parse(&fields, Kind::Chat)? })
}

/// Messages of one chat at most, and parts of a message.
const MAX_MESSAGES: usize = 16_384;

/// The `messages` field, each content as one text.
///
/// # Errors
/// `InvalidArgument` for anything but text (it names the message by its number), and for a field that asks for another
/// rendering than the template's.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Vec<ChatMessage>, Error> {
    fields.refuse(UNSUPPORTED_RENDERING)?;
    let raw = fields.raw("messages").ok_or_else(|| Error::invalid("messages", "messages is missing"))?;
    let AtMost(messages) = value::<AtMost<&RawValue, MAX_MESSAGES>>("messages", raw)?;
    messages.into_iter().enumerate().map(|(index, raw)| message(index, raw.get())).collect()
}

fn message(index: usize, raw: &str) -> Result<ChatMessage, Error> {
    let wrong = |what: String| Error::invalid("messages", format!("messages[{index}]{what}"));
    if !raw.starts_with('{') {
        return Err(wrong(" must be an object with `role` and `content`".into()));
    }
    let fields = Fields::parse(raw).map_err(|error| wrong(format!(": {}", error.message)))?;
    let role = fields.get::<String>("role").ok().flatten();
    let role = role.ok_or_else(|| wrong(".role must be a string".into()))?;
    if fields.raw("tool_calls").is_some_and(|calls| calls != "[]") {
        return Err(wrong(".tool_calls is not supported".into()));
    }
    let content = match fields.raw("content") {
        None => return Err(wrong(" has no content".into())),
        Some(text) if text.starts_with('"') => value("messages", text)?,
        Some(parts) if parts.starts_with('[') => {
            let AtMost(parts) = value::<AtMost<&RawValue, MAX_MESSAGES>>("messages", parts)?;
            let texts = parts.iter().map(|part| part_text(part.get()).map_err(&wrong));
            texts.collect::<Result<Vec<_>, Error>>()?.join("\n")
        }
        Some(_) => return Err(wrong(".content must be a string or an array of text parts".into())),
    };
    Ok(ChatMessage { role, content })
}

/// The text of a content part, or what is wrong with it.
fn part_text(raw: &str) -> Result<String, String> {
    let no_part = || ".content has a part that is no object with a `type`".to_owned();
    let fields = Fields::parse(raw).map_err(|_| no_part())?;
    let kind: String = fields.get("type").ok().flatten().ok_or_else(no_part)?;
    if kind != "text" {
        let kind: String = kind.chars().take(40).collect();
        return Err(format!(".content has a part of type {kind:?}; only \"text\" is supported"));
    }
    let text = fields.get("text").ok().flatten();
    text.ok_or_else(|| ".content has a part of type \"text\" without a string `text`".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_messages(messages: &str) -> Result<Chat, Error> {
        parse(&format!(r#"{{"messages": {messages}}}"#))
    }

    #[test]
    fn content_is_text_or_text_parts() {
        let chat = parse_messages(
            r#"[{"role": "system", "content": "\u00e9", "name": "x"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]"#,
        )
        .unwrap();
        let contents: Vec<&str> = chat.messages.iter().map(|message| message.content.as_str()).collect();
        assert_eq!(contents, ["é", "a\nb"]);
    }

    #[test]
    fn wrong_messages_name_the_field() {
        for messages in [
            "null",
            "1",
            r#""hi""#,
            r#"[{"content": "x"}]"#,
            r#"[{"role": "user"}]"#,
            r#"[{"role": 1, "content": "x"}]"#,
            r#"[{"role": "user", "content": 5}]"#,
            r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#,
            r#"[{"role": "assistant", "content": "x", "tool_calls": [{}]}]"#,
        ] {
            assert_eq!(parse_messages(messages).expect_err(messages).param, Some("messages"), "{messages}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong_with_which_message() {
        let good = r#"{"role": "user", "content": "x"}"#;
        for (second, why) in [
            (r#""hi""#, "messages[1] must be an object with `role` and `content`"),
            (r#"{"content": "x"}"#, "messages[1].role must be a string"),
            (r#"{"role": "user", "content": 5}"#, "messages[1].content must be a string or an array of text parts"),
            (r#"{"role": "user", "content": [{"type": "text"}]}"#, "of type \"text\" without a string `text`"),
            (r#"{"role": "user", "content": [{"type": "image_url"}]}"#, "only \"text\" is supported"),
            (r#"{"role": "user", "content": ["x"]}"#, "no object with a `type`"),
        ] {
            let error = parse_messages(&format!("[{good}, {second}]")).unwrap_err();
            assert!(error.message.contains(why), "{second}: {}", error.message);
        }
    }

    #[test]
    fn tools_are_refused() {
        let user = r#""messages": [{"role": "user", "content": "x"}]"#;
        for (field, param) in [(r#""tools": [{}]"#, "tools"), (r#""tool_choice": "auto""#, "tool_choice")] {
            assert_eq!(parse(&format!("{{{user}, {field}}}")).unwrap_err().param, Some(param));
        }
        assert!(parse(&format!("{{{user}, \"tools\": []}}")).is_ok());
    }
}
