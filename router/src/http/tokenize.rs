//! `POST /tokenize` and `/detokenize`, with vLLM's fields.
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Value, json};
use tandem_proto::Error;

use super::error::ApiError;
use super::fields::Fields;
use super::{body, chat, check_model};
use crate::api::Service;
use crate::text::SpecialTokens;

/// `{"prompt": text}` or `{"messages": […]}` to `{"tokens": […], "count", "max_model_len"}`.
pub(super) async fn tokenize(State(service): State<Service>, body: Body) -> Result<Json<Value>, ApiError> {
    let json = body::read(body).await?;
    let fields = Fields::parse(&json)?;
    check_model(&service, fields.get::<String>("model")?.as_deref())?;
    let tokens = match fields.get::<String>("prompt")? {
        Some(text) => service.with_model(json.len(), move |m| m.encode(&text, SpecialTokens::Parse)).await?,
        None if fields.raw("messages").is_some() => {
            let messages = chat::messages(&fields)?;
            service.with_model(json.len(), move |model| model.encode_chat(&messages)).await?
        }
        None => return Err(Error::invalid("prompt", "prompt or messages is missing").into()),
    };
    let max_model_len = service.model().context_len;
    Ok(Json(json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens})))
}

/// `{"tokens": […]}` to `{"prompt": text}`.
pub(super) async fn detokenize(State(service): State<Service>, body: Body) -> Result<Json<Value>, ApiError> {
    let json = body::read(body).await?;
    let fields = Fields::parse(&json)?;
    check_model(&service, fields.get::<String>("model")?.as_deref())?;
    let tokens: Vec<u32> = fields.get("tokens")?.ok_or_else(|| Error::invalid("tokens", "tokens is missing"))?;
    let vocabulary = service.model().vocab_size();
    if let Some(id) = tokens.iter().find(|id| **id >= vocabulary) {
        let message = format!("token id {id} is outside the vocabulary of {vocabulary}");
        return Err(Error::invalid("tokens", message).into());
    }
    Ok(Json(json!({"prompt": service.model().decode(&tokens)})))
}
