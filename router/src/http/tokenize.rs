//! `POST /tokenize` and `/detokenize`, with vLLM's fields.
use axum::body::Body;
use axum::extract::State;
use axum::{Extension, Json};
use serde_json::{Value, json};
use tandem_proto::Error;

use super::error::ApiError;
use super::fields::{Fields, Neutral};
use super::{Caller, body, chat, check_model};
use crate::api::Service;
use crate::text::{ModelText, SpecialTokens};

/// Fields of vLLM's that would change the result.
const UNSUPPORTED: &[(&str, Neutral)] = &[("add_special_tokens", Neutral::Flag(true))];

/// `{"prompt": text}` or `{"messages": […]}` to `{"tokens": […], "count", "max_model_len"}`, and `"token_strs"` where
/// `return_token_strs` asks for them. Costs one of the requests that the caller's key may have in a minute.
pub(super) async fn tokenize(
    State(service): State<Service>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    service.charge(&caller.tenant)?;
    let json = body::read(service.intake(), body).await?;
    service.with_model(json.len(), move |model| tokens_of(model, &json)).await
}

fn tokens_of(model: &ModelText, json: &str) -> Result<Json<Value>, ApiError> {
    let fields = Fields::parse(json)?;
    check_model(model, fields.get::<String>("model")?.as_deref())?;
    let tokens = match fields.get::<String>("prompt")? {
        Some(text) => {
            fields.refuse(UNSUPPORTED)?;
            model.encode(&text, SpecialTokens::Parse)?
        }
        None if fields.raw("messages").is_some() => model.encode_chat(&chat::messages(&fields)?)?,
        None => return Err(Error::invalid("prompt", "prompt or messages is missing").into()),
    };
    let mut answer = json!({"count": tokens.len(), "max_model_len": model.context_len});
    if fields.flag("return_token_strs")? {
        let text = |id: &u32| String::from_utf8_lossy(&model.token(*id).bytes).into_owned();
        answer["token_strs"] = tokens.iter().map(text).collect();
    }
    answer["tokens"] = tokens.into();
    Ok(Json(answer))
}

/// `{"tokens": […]}` to `{"prompt": text}`. Costs what [`tokenize`] costs.
pub(super) async fn detokenize(
    State(service): State<Service>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    service.charge(&caller.tenant)?;
    let json = body::read(service.intake(), body).await?;
    service.with_model(json.len(), move |model| text_of(model, &json)).await
}

fn text_of(model: &ModelText, json: &str) -> Result<Json<Value>, ApiError> {
    let fields = Fields::parse(json)?;
    check_model(model, fields.get::<String>("model")?.as_deref())?;
    let tokens: Vec<u32> = fields.get("tokens")?.ok_or_else(|| Error::invalid("tokens", "tokens is missing"))?;
    let vocabulary = model.vocab_size();
    if let Some(id) = tokens.iter().find(|id| **id >= vocabulary) {
        let message = format!("token id {id} is outside the vocabulary of {vocabulary}");
        return Err(Error::invalid("tokens", message).into());
    }
    Ok(Json(json!({"prompt": model.decode(&tokens)})))
}
