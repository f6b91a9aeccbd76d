//! `POST /v1/chat/completions`: messages, rendered with the model's own template.
use tandem_telemetry::clock;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::value::RawValue;
use tandem_proto::Error;
use tandem_proto::v1::ChatMessage;

use super::answer::{Encoded, Job, answer};
use super::error::ApiError;
use super::fields::{Fields, Neutral, value};
use super::options::Options;
use super::types::Kind;
use super::{Caller, body, check_model};
use crate::api::Service;

const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text("none")),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text("none")),
    ("audio", Neutral::Empty),
    ("chat_template", Neutral::Empty),
    ("chat_template_kwargs", Neutral::Empty),
    ("documents", Neutral::Empty),
    ("echo", Neutral::Flag(false)),
    ("add_generation_prompt", Neutral::Flag(true)),
    ("continue_final_message", Neutral::Flag(false)),
];

/// The handler.
pub(super) async fn handle(
    State(service): State<Service>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let job = job(&service, body).await.inspect_err(|error| service.refused(error.kind()))?;
    answer(&service, &caller, job).await
}

async fn job(service: &Service, body: Body) -> Result<Job, ApiError> {
    let json = body::read(body).await?;
    let received = clock::now();
    let Chat { options, messages } = parse(&json)?;
    check_model(service, options.model.as_deref())?;
    let ids = service.with_model(json.len(), move |model| model.encode_chat(&messages)).await?;
    let prompts = vec![Encoded { ids, echo: None }];
    Ok(Job { kind: Kind::Chat, options, prompts, received })
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

#[derive(Deserialize)]
struct RawMessage<'a> {
    role: String,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// The `messages` field, each content as one text.
///
/// # Errors
/// `InvalidArgument` for anything but text.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Vec<ChatMessage>, Error> {
    let raw = fields.raw("messages").ok_or_else(|| Error::invalid("messages", "messages is missing"))?;
    let messages: Vec<RawMessage<'_>> = value("messages", raw)?;
    messages.into_iter().map(message).collect()
}

fn message(message: RawMessage<'_>) -> Result<ChatMessage, Error> {
    if message.tool_calls.is_some_and(|calls| !matches!(calls.get(), "null" | "[]")) {
        return Err(Error::invalid("messages", "messages with tool_calls are not supported"));
    }
    let raw = message.content.map_or("null", RawValue::get);
    let content = match raw {
        "null" => return Err(Error::invalid("messages", "a message without content")),
        text if text.starts_with('"') => value("messages", text)?,
        parts => value::<Vec<Part>>("messages", parts)?
            .into_iter()
            .map(|part| match (part.kind.as_str(), part.text) {
                ("text", Some(text)) => Ok(text),
                (kind, _) => {
                    let kind: String = kind.chars().take(40).collect();
                    Err(Error::invalid("messages", format!("a content part of type {kind:?}; only text is supported")))
                }
            })
            .collect::<Result<Vec<_>, Error>>()?
            .join("\n"),
    };
    Ok(ChatMessage { role: message.role, content })
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
    fn tools_are_refused() {
        let user = r#""messages": [{"role": "user", "content": "x"}]"#;
        for (field, param) in [(r#""tools": [{}]"#, "tools"), (r#""tool_choice": "auto""#, "tool_choice")] {
            assert_eq!(parse(&format!("{{{user}, {field}}}")).unwrap_err().param, Some(param));
        }
        assert!(parse(&format!("{{{user}, \"tools\": []}}")).is_ok());
    }
}
