//! `POST /v1/completions`: one or several prompts, as text or token ids.
use tandem_telemetry::clock;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use tandem_proto::Error;

use super::answer::{Encoded, Job, answer};
use super::error::ApiError;
use super::fields::{Fields, Neutral, value};
use super::options::Options;
use super::types::Kind;
use super::{Caller, body, check_model};
use crate::api::Service;
use crate::text::{ModelText, SpecialTokens};

/// Prompts of one request at most.
const MAX_PROMPTS: usize = 64;
const UNSUPPORTED: &[(&str, Neutral)] = &[("suffix", Neutral::Empty), ("top_logprobs", Neutral::Number(0.0))];

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
    let Completion { options, prompts, echo } = parse(&json)?;
    check_model(service, options.model.as_deref())?;
    let bytes = json.len();
    let encode = move |model: &ModelText| prompts.into_iter().map(|prompt| prompt.encode(model, echo)).collect();
    let prompts = service.with_model(bytes, encode).await?;
    Ok(Job { kind: Kind::Completion, options, prompts, received })
}

/// A checked request.
#[derive(Debug, PartialEq)]
struct Completion {
    options: Options,
    prompts: Vec<PromptInput>,
    echo: bool,
}

#[derive(Debug, PartialEq)]
enum PromptInput {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptInput {
    fn encode(self, model: &ModelText, echo: bool) -> Result<Encoded, Error> {
        Ok(match self {
            // Who writes a raw prompt writes the control tokens too.
            Self::Text(text) => {
                let ids =
                    model.encode(&text, SpecialTokens::Parse).map_err(|e| Error { param: Some("prompt"), ..e })?;
                Encoded { ids, echo: echo.then_some(text) }
            }
            Self::Ids(ids) => Encoded { echo: echo.then(|| model.decode(&ids)), ids },
        })
    }
}

fn parse(json: &str) -> Result<Completion, Error> {
    let fields = Fields::parse(json)?;
    fields.refuse(UNSUPPORTED)?;
    let raw = fields.raw("prompt").ok_or_else(|| Error::invalid("prompt", "prompt is missing"))?;
    let prompts = prompts(raw)?;
    if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
        return Err(Error::invalid("prompt", format!("{} prompts; 1 to {MAX_PROMPTS} are possible", prompts.len())));
    }
    let (options, echo) = (Options::parse(&fields, Kind::Completion)?, fields.flag("echo")?);
    if echo && options.logprobs {
        return Err(Error::invalid("echo", "echo with logprobs is not supported: prompts have no logprobs"));
    }
    Ok(Completion { options, prompts, echo })
}

/// The four forms are told apart by their first characters, so that errors are about the form that was meant.
fn prompts(raw: &str) -> Result<Vec<PromptInput>, Error> {
    let mut characters = raw.chars().filter(|c| !c.is_ascii_whitespace());
    let texts = |texts: Vec<String>| texts.into_iter().map(PromptInput::Text).collect();
    Ok(match (characters.next(), characters.next()) {
        (Some('"'), _) => vec![PromptInput::Text(value("prompt", raw)?)],
        (Some('['), Some('"' | ']')) => texts(value("prompt", raw)?),
        (Some('['), Some('[')) => value::<Vec<Vec<u32>>>("prompt", raw)?.into_iter().map(PromptInput::Ids).collect(),
        (Some('['), _) => vec![PromptInput::Ids(value("prompt", raw)?)],
        _ => {
            let message = "prompt must be a string, strings, token ids, or lists of token ids";
            return Err(Error::invalid("prompt", message));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_four_forms_of_a_prompt() {
        let text = |text: &str| PromptInput::Text(text.into());
        for (raw, expected) in [
            (r#""a""#, vec![text("a")]),
            (r#"["a", "b"]"#, vec![text("a"), text("b")]),
            ("[1, 2]", vec![PromptInput::Ids(vec![1, 2])]),
            ("[ [1], [2, 3]]", vec![PromptInput::Ids(vec![1]), PromptInput::Ids(vec![2, 3])]),
        ] {
            assert_eq!(parse(&format!(r#"{{"prompt": {raw}}}"#)).unwrap().prompts, expected);
        }
    }

    #[test]
    fn other_prompts_are_refused() {
        let many = format!("[{}\"x\"]", "\"x\",".repeat(64));
        for raw in ["null", "1", "{}", "[]", "[-1]", "[1.5]", "[1, \"a\"]", "[\"a\", 1]", "[[1], 2]", "[null]", &many] {
            let error = parse(&format!(r#"{{"prompt": {raw}}}"#)).expect_err(raw);
            assert_eq!((error.kind, error.param), (tandem_proto::ErrorKind::InvalidArgument, Some("prompt")), "{raw}");
        }
        assert_eq!(parse("{}").unwrap_err().param, Some("prompt"));
        for (fields, param) in [
            (r#""suffix": "b""#, "suffix"),
            (r#""top_logprobs": 2"#, "top_logprobs"),
            (r#""echo": true, "logprobs": 1"#, "echo"),
        ] {
            assert_eq!(parse(&format!(r#"{{"prompt": "a", {fields}}}"#)).unwrap_err().param, Some(param));
        }
    }
}
