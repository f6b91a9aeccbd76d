//! `POST /tokenize` and `/detokenize`, with vLLM's fields. A body of 8 MB holds millions of tokens, so answers become
//! bytes on the worker and never a tree of JSON values.
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};
use tandem_proto::{Error, ErrorCode, ErrorKind};

use super::error::ApiError;
use super::fields::{Fields, Lent, Neutral, seeded};
use super::ids::AtMostIds;
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
) -> Result<Response, ApiError> {
    service.charge(&caller.tenant).inspect_err(|error| service.refused(error.kind))?;
    let refused = |error: &ApiError| service.refused(error.kind());
    let json = body::read(service.intake(), body).await.inspect_err(refused)?;
    service.with_model(json.len(), move |model| tokens_of(model, &json)).await.inspect_err(refused)
}

fn tokens_of(model: &ModelText, json: &str) -> Result<Response, ApiError> {
    let fields = Fields::parse(json)?;
    check_model(model, fields.get::<String>("model")?.as_deref())?;
    let tokens = match fields.get("prompt")? {
        Some(Lent(text)) => {
            fields.refuse(UNSUPPORTED)?;
            model.encode(&text, SpecialTokens::Parse)?
        }
        None if fields.raw("messages").is_some() => model.encode_chat(&chat::messages(&fields)?)?,
        None => return Err(Error::invalid("prompt", "prompt or messages is missing").into()),
    };
    let token_strs = fields.flag("return_token_strs")?.then(|| TokenStrs { model, tokens: &tokens });
    let (count, max_model_len) = (tokens.len(), model.context_len);
    answer(&Tokenized { count, max_model_len, token_strs, tokens: &tokens })
}

#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<TokenStrs<'a>>,
    tokens: &'a [u32],
}

/// The text of each token, written one at a time.
struct TokenStrs<'a> {
    model: &'a ModelText,
    tokens: &'a [u32],
}

impl Serialize for TokenStrs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut texts = serializer.serialize_seq(Some(self.tokens.len()))?;
        for id in self.tokens {
            texts.serialize_element(&String::from_utf8_lossy(&self.model.token(*id).bytes))?;
        }
        texts.end()
    }
}

fn answer(answer: &impl Serialize) -> Result<Response, ApiError> {
    let failed = |error| Error::new(ErrorKind::Internal, format!("the answer is no JSON: {error}"));
    let bytes = serde_json::to_vec(answer).map_err(failed)?;
    Ok(([(CONTENT_TYPE, "application/json")], bytes).into_response())
}

/// `{"tokens": […]}` to `{"prompt": text}`. Costs what [`tokenize`] costs.
pub(super) async fn detokenize(
    State(service): State<Service>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    service.charge(&caller.tenant).inspect_err(|error| service.refused(error.kind))?;
    let refused = |error: &ApiError| service.refused(error.kind());
    let json = body::read(service.intake(), body).await.inspect_err(refused)?;
    service.with_model(json.len(), move |model| text_of(model, &json)).await.inspect_err(refused)
}

fn text_of(model: &ModelText, json: &str) -> Result<Response, ApiError> {
    let fields = Fields::parse(json)?;
    check_model(model, fields.get::<String>("model")?.as_deref())?;
    let raw = fields.raw("tokens").ok_or_else(|| Error::invalid("tokens", "tokens is missing"))?;
    let ids = seeded("tokens", raw, AtMostIds { most: model.context_len as usize })?;
    let vocabulary = model.vocab_size();
    if let Some(id) = ids.kept.iter().find(|id| **id >= vocabulary) {
        let message = format!("token id {id} is outside the vocabulary of {vocabulary}");
        return Err(Error::invalid("tokens", message).into());
    }
    if ids.given > ids.kept.len() {
        let message = format!("{} tokens are more than the model's context of {}", ids.given, model.context_len);
        return Err(Error::invalid("tokens", message).with_code(ErrorCode::ContextLengthExceeded).into());
    }
    answer(&Detokenized { prompt: model.decode(&ids.kept) })
}

#[derive(Serialize)]
struct Detokenized {
    prompt: String,
}
