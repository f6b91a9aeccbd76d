//! `POST /v1/completions`: one or several prompts, as text or token ids.
use std::fmt::Formatter;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use tandem_proto::Error;
use tandem_telemetry::clock;

use super::answer::{Encoded, Job, answer};
use super::error::ApiError;
use super::fields::{AtMost, Fields, Neutral, seeded, value};
use super::ids::{AtMostIds, Ids};
use super::kind::Kind;
use super::options::Options;
use super::{Caller, auth, body, check_model};
use crate::api::Service;
use crate::flow::check;
use crate::text::{ModelText, SpecialTokens};

/// Prompts of one request at most.
const MAX_PROMPTS: usize = 64;
const UNSUPPORTED: &[(&str, Neutral)] =
    &[("suffix", Neutral::Empty), ("top_logprobs", Neutral::Number(0.0)), ("add_special_tokens", Neutral::Flag(true))];

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
        let Completion { options, prompts, echo } = parse(&json, model)?;
        check_model(model, options.model.as_deref())?;
        let prompts = prompts.into_iter().map(|prompt| prompt.encode(model, echo)).collect::<Result<_, _>>()?;
        Ok::<_, ApiError>(Job { kind: Kind::Completion, options, prompts, received })
    };
    service.with_model(bytes, work).await
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
                Encoded { ids, echo: echo.then(|| text.into()) }
            }
            Self::Ids(ids) => Encoded { echo: echo.then(|| model.decode(&ids).into()), ids },
        })
    }
}

fn parse(json: &str, model: &ModelText) -> Result<Completion, Error> {
    let fields = Fields::parse(json)?;
    fields.refuse(UNSUPPORTED)?;
    let options = Options::parse(&fields, Kind::Completion)?;
    let raw = fields.raw("prompt").ok_or_else(|| Error::invalid("prompt", "prompt is missing"))?;
    let prompts = prompts(raw, model)?;
    if prompts.is_empty() {
        return Err(Error::invalid("prompt", format!("no prompts; 1 to {MAX_PROMPTS} are possible")));
    }
    let echo = fields.flag("echo")?;
    if echo && options.logprobs {
        return Err(Error::invalid("echo", "echo with logprobs is not supported: prompts have no logprobs"));
    }
    Ok(Completion { options, prompts, echo })
}

/// The four forms are told apart by their first characters, so that errors are about the form that was meant.
fn prompts(raw: &str, model: &ModelText) -> Result<Vec<PromptInput>, Error> {
    let mut characters = raw.chars().filter(|c| !c.is_ascii_whitespace());
    let texts = |texts: AtMost<String, MAX_PROMPTS>| texts.0.into_iter().map(PromptInput::Text).collect();
    let within = |ids: Ids| match ids.given > ids.kept.len() {
        true => Err(check::too_long(ids.given, model)),
        false => Ok(PromptInput::Ids(ids.kept)),
    };
    let most = model.context_len as usize;
    match (characters.next(), characters.next()) {
        (Some('"'), _) => Ok(vec![PromptInput::Text(value("prompt", raw)?)]),
        (Some('['), Some('"' | ']')) => Ok(texts(value("prompt", raw)?)),
        (Some('['), Some('[')) => seeded("prompt", raw, Lists { most })?.into_iter().map(within).collect(),
        (Some('['), _) => Ok(vec![within(seeded("prompt", raw, AtMostIds { most })?)?]),
        _ => {
            let message = "prompt must be a string, strings, token ids, or lists of token ids";
            Err(Error::invalid("prompt", message))
        }
    }
}

/// Reads [`Ids`] of at most [`MAX_PROMPTS`] prompts.
struct Lists {
    most: usize,
}

impl<'de> DeserializeSeed<'de> for Lists {
    type Value = Vec<Ids>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Ids>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Lists {
    type Value = Vec<Ids>;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("lists of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<Ids>, A::Error> {
        let mut lists = Vec::new();
        while let Some(ids) = items.next_element_seed(AtMostIds { most: self.most })? {
            if lists.len() == MAX_PROMPTS {
                return Err(A::Error::custom(format!("more than {MAX_PROMPTS} prompts")));
            }
            lists.push(ids);
        }
        Ok(lists)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::tests::fakes;

    fn parse(json: &str) -> Result<Completion, Error> {
        super::parse(json, &fakes::model())
    }

    #[test]
    fn ids_beyond_the_context_are_counted_and_not_kept() {
        let ids = |count: usize| vec!["7"; count].join(",");
        let read = |raw: &str| seeded("prompt", raw, AtMostIds { most: 4 }).unwrap();
        assert_eq!(read(&format!("[{}]", ids(4))), Ids { kept: vec![7; 4], given: 4 });
        let many = read(&format!("[{}]", ids(1_000_000)));
        assert_eq!((many.kept.capacity(), many.given), (4, 1_000_000));
        for prompt in [format!("[{}]", ids(100_000)), format!("[[1],[{}]]", ids(100_000))] {
            let error = parse(&format!(r#"{{"prompt": {prompt}, "n": 128}}"#)).unwrap_err();
            assert_eq!(error.param, Some("prompt"));
            assert!(error.message.starts_with("the prompt has 100000 tokens, the context of"), "{error}");
        }
    }

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
