//! What a request must be before it takes a place in the queue. Pure.
use tandem_proto::{Error, ErrorCode, MAX_PRIORITY};

use crate::admission::cache_salt;
use crate::generation::{GenerationRequest, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKENS};
use crate::text::ModelText;

/// Checks a prompt against the model.
///
/// # Errors
/// `InvalidArgument`: it is empty, fills the context, or has ids outside the vocabulary.
pub fn prompt(ids: &[u32], model: &ModelText) -> Result<(), Error> {
    let (tokens, context) = (ids.len(), model.context_len as usize);
    if tokens == 0 {
        return Err(Error::invalid("prompt", "the prompt is empty"));
    }
    if tokens >= context {
        return Err(too_long(tokens, model));
    }
    match ids.iter().find(|id| **id >= model.vocab_size()) {
        Some(id) => {
            let message = format!("token id {id} is outside the vocabulary of {} tokens", model.vocab_size());
            Err(Error::invalid("prompt", message))
        }
        None => Ok(()),
    }
}

/// What a prompt without room for an answer is told.
pub fn too_long(tokens: usize, model: &ModelText) -> Error {
    let (name, context) = (&model.model_name, model.context_len);
    let message = format!("the prompt has {tokens} tokens, the context of {name} holds {context}");
    Error::invalid("prompt", message).with_code(ErrorCode::ContextLengthExceeded)
}

/// Checks every field against the model.
///
/// # Errors
/// `InvalidArgument` naming the field.
pub fn check(request: &GenerationRequest, model: &ModelText) -> Result<(), Error> {
    self::prompt(&request.prompt_ids, model)?;
    let (prompt, context) = (request.prompt_ids.len(), model.context_len as usize);
    if request.max_tokens == 0 || prompt + request.max_tokens as usize > context {
        let message =
            format!("max_tokens must be 1 to {}: the prompt has {prompt} of {context} tokens", context - prompt);
        let error = Error::invalid("max_tokens", message);
        return Err(if request.max_tokens == 0 { error } else { error.with_code(ErrorCode::ContextLengthExceeded) });
    }
    let most = request.tenant.terms().max_priority;
    if request.priority < -MAX_PRIORITY || request.priority > most {
        // As the client counts: lower ones first.
        let (tenant, least, asked) = (request.tenant.name(), -most, request.priority.saturating_neg());
        let message =
            format!("priority must be {least} to {MAX_PRIORITY} for tenant {tenant:?}, lower ones first, not {asked}");
        return Err(Error::invalid("priority", message));
    }
    cache_salt::check(&request.cache_salt)?;
    request.sampling.check(model.vocab_size())?;
    request.sampling.check_min_tokens(request.max_tokens)?;
    let too_long = |text: &String| text.is_empty() || text.len() > MAX_STOP_BYTES;
    if request.stop.len() > MAX_STOP_STRINGS || request.stop.iter().any(too_long) {
        let (strings, bytes) = (MAX_STOP_STRINGS, MAX_STOP_BYTES);
        return Err(Error::invalid("stop", format!("at most {strings} stop strings of 1 to {bytes} bytes")));
    }
    if request.stop_token_ids.len() > MAX_STOP_TOKENS {
        return Err(Error::invalid("stop_token_ids", format!("at most {} stop tokens", MAX_STOP_TOKENS)));
    }
    Ok(())
}
