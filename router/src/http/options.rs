//! What `/v1/completions` and `/v1/chat/completions` have in common: the fields that say how to generate. Pure.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use tandem_proto::sampling::MAX_TOP_LOGPROBS;
use tandem_proto::{Error, MAX_PRIORITY, TraceContext, v1};

use super::Caller;
use super::fields::{AtMost, Fields, Integer, Neutral, one_or_many};
use super::kind::Kind;
use crate::generation::{GenerationRequest, MAX_CHOICES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKENS};

/// Known fields that would change the answer and are not implemented.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("prompt_logprobs", Neutral::Flag(false)),
    ("bad_words", Neutral::Empty),
    ("allowed_token_ids", Neutral::Empty),
    ("logits_processors", Neutral::Empty),
    ("use_beam_search", Neutral::Flag(false)),
    ("include_stop_str_in_output", Neutral::Flag(false)),
    ("skip_special_tokens", Neutral::Flag(true)),
    ("guided_json", Neutral::Empty),
    ("guided_regex", Neutral::Empty),
    ("guided_choice", Neutral::Empty),
    ("guided_grammar", Neutral::Empty),
    ("structured_outputs", Neutral::Empty),
    ("truncate_prompt_tokens", Neutral::Nothing),
    ("return_tokens_as_token_ids", Neutral::Flag(false)),
    ("detokenize", Neutral::Flag(true)),
    ("spaces_between_special_tokens", Neutral::Flag(true)),
    ("logprob_token_ids", Neutral::Empty),
    ("kv_transfer_params", Neutral::Empty),
    ("modalities", Neutral::Only("text")),
    ("web_search_options", Neutral::Nothing),
    ("prediction", Neutral::Nothing),
    ("reasoning_effort", Neutral::Text("none")),
    ("thinking_token_budget", Neutral::Nothing),
    ("length_penalty", Neutral::Number(1.0)),
    ("early_stopping", Neutral::Flag(false)),
];

/// Items of a list that are read at all; the lists' own limits are below it, with better words.
const MANY: usize = 1024;

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Options {
    pub model: Option<String>,
    pub max_tokens: Option<u32>,
    /// Without its seed.
    sampling: v1::Sampling,
    seed: Option<u64>,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    /// Higher first, unlike the field.
    priority: i32,
    /// Of all prompts of the call.
    cache_salt: Arc<str>,
    /// Answers to each prompt.
    pub n: u32,
    /// Log probabilities with every token.
    pub logprobs: bool,
    /// Send tokens as they come.
    pub stream: bool,
    /// A last chunk with the token counts.
    pub include_usage: bool,
    /// Token counts so far in every chunk.
    pub continuous_usage: bool,
    /// Milliseconds of every phase, in the last chunk or beside the whole answer.
    pub include_timings: bool,
    /// `token_ids` in every choice.
    pub return_token_ids: bool,
}

impl Options {
    /// Reads and checks the fields.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field.
    pub fn parse(fields: &Fields<'_>, kind: Kind) -> Result<Self, Error> {
        fields.refuse(UNSUPPORTED)?;
        refuse_response_format(fields)?;
        // OpenAI's newer name wins.
        let max_tokens = match fields.integer("max_completion_tokens")? {
            Some(limit) => Some(limit),
            None => fields.integer("max_tokens")?,
        };
        let stream_options = match fields.raw("stream_options") {
            Some(raw) => Some(Fields::parse(raw).map_err(|_| Error::invalid("stream_options", "not an object"))?),
            None => None,
        };
        let stream_flag = |name| stream_options.as_ref().map_or(Ok(false), |options| options.flag(name));
        let top_logprobs = match kind {
            Kind::Chat => chat_logprobs(fields)?,
            Kind::Completion => completion_logprobs(fields)?,
        };
        Ok(Self {
            model: fields.get("model")?,
            max_tokens,
            sampling: sampling(fields, top_logprobs.unwrap_or(0))?,
            seed: seed(fields)?,
            stop: stop(fields)?,
            stop_token_ids: stop_token_ids(fields)?,
            ignore_eos: fields.flag("ignore_eos")?,
            priority: priority(fields)?,
            cache_salt: fields.get::<String>("cache_salt")?.unwrap_or_default().into(),
            n: choices(fields)?,
            logprobs: top_logprobs.is_some(),
            stream: fields.flag("stream")?,
            include_usage: stream_flag("include_usage")?,
            continuous_usage: stream_flag("continuous_usage_stats")?,
            include_timings: stream_flag("include_timings")?,
            return_token_ids: fields.flag("return_token_ids")?,
        })
    }

    /// The request for one prompt. `seed` is used when the client sent none.
    pub fn request(&self, caller: &Caller, prompt: Prompt, seed: u64, api: &'static str) -> GenerationRequest {
        GenerationRequest {
            request_id: prompt.request_id,
            prompt_ids: prompt.ids,
            max_tokens: prompt.max_tokens,
            sampling: v1::Sampling { seed: self.seed.unwrap_or(seed), ..self.sampling.clone() },
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            stop: self.stop.clone(),
            priority: self.priority,
            tenant: caller.tenant.clone(),
            cache_salt: Arc::clone(&self.cache_salt),
            deadline: caller.deadline(prompt.received),
            parent: caller.parent.clone(),
            root: prompt.root,
            received: prompt.received,
            api,
        }
    }
}

/// One prompt of a request, encoded.
pub(super) struct Prompt {
    pub request_id: String,
    pub ids: Arc<[u32]>,
    pub max_tokens: u32,
    pub received: Instant,
    /// Of the first prompt of a call: its span.
    pub root: Option<TraceContext>,
}

fn refuse_response_format(fields: &Fields<'_>) -> Result<(), Error> {
    let Some(raw) = fields.raw("response_format") else { return Ok(()) };
    let wrong = |_| Error::invalid("response_format", "response_format must be an object");
    match Fields::parse(raw).map_err(wrong)?.get::<String>("type") {
        Ok(Some(kind)) if kind == "text" => Ok(()),
        _ => Err(Error::invalid("response_format", "response_format other than {\"type\": \"text\"} is not supported")),
    }
}

/// The fields of `Sampling`, within the ranges that every edge has; token ids are checked where the vocabulary is
/// known.
fn sampling(fields: &Fields<'_>, top_logprobs: u32) -> Result<v1::Sampling, Error> {
    let number = |name| Ok::<f32, Error>(fields.get::<f64>(name)?.unwrap_or(0.0) as f32);
    let temperature = fields.number("temperature", "between 0 and 2", |t| (0.0..=2.0).contains(&t))?;
    // 0 is no way of saying "off" here, as it is in `Sampling`.
    let top_p = fields.number("top_p", "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?;
    let repetition = fields.number("repetition_penalty", "above 0", |penalty| penalty > 0.0)?;
    let sampling = v1::Sampling {
        temperature: temperature.unwrap_or(1.0) as f32,
        top_p: top_p.unwrap_or(1.0) as f32,
        top_k: top_k(fields)?,
        seed: 0,
        min_p: number("min_p")?,
        repetition_penalty: repetition.unwrap_or(1.0) as f32,
        presence_penalty: number("presence_penalty")?,
        frequency_penalty: number("frequency_penalty")?,
        logit_bias: logit_bias(fields)?,
        min_tokens: fields.integer("min_tokens")?.unwrap_or(0),
        top_logprobs,
    };
    sampling.check(u32::MAX)?;
    Ok(sampling)
}

/// Token ids are strings here, because JSON has no other keys.
fn logit_bias(fields: &Fields<'_>) -> Result<HashMap<u32, f32>, Error> {
    let biases: HashMap<String, f32> = fields.get("logit_bias")?.unwrap_or_default();
    let bias = |(token, bias): (String, f32)| match token.parse::<u32>() {
        Ok(token) => Ok((token, bias)),
        Err(_) => {
            let token: String = token.chars().take(40).collect();
            Err(Error::invalid("logit_bias", format!("logit_bias: {token:?} is no token id")))
        }
    };
    biases.into_iter().map(bias).collect()
}

/// `best_of` other than `n` would mean to generate more answers than are sent.
fn choices(fields: &Fields<'_>) -> Result<u32, Error> {
    let n = fields.integer::<u32>("n")?.unwrap_or(1);
    if n == 0 || n > MAX_CHOICES {
        return Err(Error::invalid("n", format!("n must be 1 to {MAX_CHOICES}, not {n}")));
    }
    match fields.integer::<u32>("best_of")? {
        Some(best_of) if best_of != n => {
            let message =
                format!("best_of {best_of} is not supported: leave it out, or make it equal to n, which is {n}");
            Err(Error::invalid("best_of", message))
        }
        _ => Ok(n),
    }
}

/// `logprobs: true` and `top_logprobs: n`; how many of the likeliest tokens are wanted, if log probabilities are.
fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, Error> {
    let (wanted, top) = (fields.flag("logprobs")?, fields.integer::<u32>("top_logprobs")?);
    match top {
        Some(1..) if !wanted => Err(Error::invalid("top_logprobs", "top_logprobs needs logprobs to be true")),
        _ => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// `logprobs: n`.
fn completion_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, Error> {
    if fields.raw("logprobs") == Some("false") {
        return Ok(None);
    }
    let top = fields.integer::<u32>("logprobs")?;
    match top {
        Some(n) if n > MAX_TOP_LOGPROBS => {
            Err(Error::invalid("logprobs", format!("logprobs must be 0 to {MAX_TOP_LOGPROBS}, not {n}")))
        }
        _ => Ok(top),
    }
}

/// -1 and 0 mean off, as vLLM's clients write it.
fn top_k(fields: &Fields<'_>) -> Result<u32, Error> {
    match fields.integer::<i64>("top_k")? {
        None | Some(-1) => Ok(0),
        // More than there are tokens are all of them.
        Some(k @ 0..) => Ok(u32::try_from(k).unwrap_or(u32::MAX)),
        Some(k) => Err(Error::invalid("top_k", format!("top_k must be -1 or more, not {k}"))),
    }
}

/// Any 64-bit integer; a negative one is another name for its two's complement.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, Error> {
    match fields.get::<serde_json::Number>("seed")? {
        None => Ok(None),
        Some(number) => number
            .as_u64()
            .or_else(|| number.as_i64().map(i64::cast_unsigned))
            .or_else(|| Integer::deserialize(&number).ok().map(|Integer(whole)| whole.cast_unsigned()))
            .map(Some)
            .ok_or_else(|| Error::invalid("seed", format!("seed must be a 64-bit integer, not {number}"))),
    }
}

/// vLLM's field, with vLLM's meaning: lower ones go first.
fn priority(fields: &Fields<'_>) -> Result<i32, Error> {
    match fields.integer::<i32>("priority")? {
        Some(asked) if asked.unsigned_abs() > MAX_PRIORITY.unsigned_abs() => {
            let message = format!("priority must be -{MAX_PRIORITY} to {MAX_PRIORITY}, lower ones first, not {asked}");
            Err(Error::invalid("priority", message))
        }
        asked => Ok(-asked.unwrap_or(0)),
    }
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, Error> {
    let stop = fields.raw("stop").map_or(Ok(Vec::new()), |raw| one_or_many::<MANY>("stop", raw))?;
    if stop.len() > MAX_STOP_STRINGS {
        return Err(Error::invalid("stop", format!("{} stop strings; {MAX_STOP_STRINGS} at most", stop.len())));
    }
    if stop.iter().any(|text| text.is_empty() || text.len() > MAX_STOP_BYTES) {
        return Err(Error::invalid("stop", format!("a stop string has 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(stop)
}

fn stop_token_ids(fields: &Fields<'_>) -> Result<Vec<u32>, Error> {
    let ids = fields.get::<AtMost<u32, MANY>>("stop_token_ids")?.map(|ids| ids.0).unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        return Err(Error::invalid("stop_token_ids", format!("{} ids; {MAX_STOP_TOKENS} at most", ids.len())));
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_proto::ErrorKind;

    use super::*;
    use crate::admission::Tenant;

    fn root() -> TraceContext {
        TraceContext::root(&mut rand::rng())
    }

    fn parse(json: &str) -> Result<Options, Error> {
        Options::parse(&Fields::parse(json).unwrap(), Kind::Completion)
    }

    fn parse_chat(json: &str) -> Result<Options, Error> {
        Options::parse(&Fields::parse(json).unwrap(), Kind::Chat)
    }

    #[test]
    fn defaults_are_openai_s() {
        let options = parse("{}").unwrap();
        let sampling =
            v1::Sampling { temperature: 1.0, top_p: 1.0, repetition_penalty: 1.0, ..v1::Sampling::default() };
        assert_eq!((options.sampling, options.n, options.logprobs), (sampling, 1, false));
        assert_eq!((options.max_tokens, options.seed, options.stream), (None, None, false));
        assert!(options.stop.is_empty() && !options.ignore_eos && !options.include_usage);
    }

    #[test]
    fn a_salt_is_text() {
        assert_eq!(&*parse("{}").unwrap().cache_salt, "");
        assert_eq!(&*parse(r#"{"cache_salt": "mine"}"#).unwrap().cache_salt, "mine");
        assert_eq!(parse(r#"{"cache_salt": 7}"#).unwrap_err().param, Some("cache_salt"));
    }

    /// vLLM's and OpenAI's fields that are not implemented are refused by their names, and let through where they ask
    /// for what happens anyway.
    #[test]
    fn what_would_change_the_answer_is_not_ignored() {
        for (field, value) in [
            ("truncate_prompt_tokens", "2"),
            ("return_tokens_as_token_ids", "true"),
            ("detokenize", "false"),
            ("logprob_token_ids", "[1]"),
            ("kv_transfer_params", r#"{"a": 1}"#),
            ("modalities", r#"["audio"]"#),
            ("web_search_options", "{}"),
            ("prediction", "{}"),
            ("prompt_logprobs", "true"),
            ("guided_json", r#"{"type": "object"}"#),
        ] {
            let error = parse(&format!(r#"{{"{field}": {value}}}"#)).expect_err(field);
            assert_eq!((error.kind, error.param), (ErrorKind::InvalidArgument, Some(field)));
        }
        for (field, value) in
            [("truncate_prompt_tokens", "null"), ("detokenize", "true"), ("modalities", r#"["text"]"#)]
        {
            assert!(parse(&format!(r#"{{"{field}": {value}}}"#)).is_ok(), "{field}: {value}");
        }
    }

    #[test]
    fn a_top_k_above_any_vocabulary_means_all_tokens() {
        let top_k = |raw: &str| parse(&format!(r#"{{"top_k": {raw}}}"#)).map(|options| options.sampling.top_k);
        assert_eq!((top_k("1000000000000"), top_k("-1"), top_k("40.0")), (Ok(u32::MAX), Ok(0), Ok(40)));
        assert_eq!(top_k("-2").unwrap_err().param, Some("top_k"));
    }

    #[test]
    fn a_seed_may_be_written_as_a_float() {
        let seed = |raw: &str| parse(&format!(r#"{{"seed": {raw}}}"#)).map(|options| options.seed);
        assert_eq!((seed("1.0"), seed("-1"), seed("1e2")), (Ok(Some(1)), Ok(Some(u64::MAX)), Ok(Some(100))));
        assert_eq!(seed("1.5").unwrap_err().param, Some("seed"));
    }

    #[test]
    fn everything_reaches_the_request() {
        let options = parse(
            r#"{"max_tokens": 5, "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 40, "seed": -1,
                "stop": "END", "stop_token_ids": [4, 5], "ignore_eos": true, "stream": true, "unknown": [{}],
                "stream_options": {"include_usage": true}, "return_token_ids": true, "n": 2, "best_of": 2, "min_p": 0.25,
                "logit_bias": {"5": -100, "7": 1.5}, "repetition_penalty": 1.5, "presence_penalty": -2,
                "frequency_penalty": 2, "min_tokens": 3, "logprobs": 4, "priority": -4}"#,
        )
        .unwrap();
        assert!(options.stream && options.include_usage && !options.continuous_usage && options.return_token_ids);
        assert!(
            !options.include_timings
                && parse(r#"{"stream_options": {"include_timings": true}}"#).unwrap().include_timings
        );
        assert_eq!(options.max_tokens, Some(7));
        let received = Instant::now();
        let timeout = Some(Duration::from_millis(1500));
        let caller = Caller {
            request_id: "r".into(),
            parent: None,
            root: root(),
            timeout,
            tenant: Tenant::named("team").unwrap(),
        };
        let prompt =
            Prompt { request_id: "r-0".into(), ids: [1, 2].into(), max_tokens: 7, received, root: Some(caller.root) };
        let request = options.request(&caller, prompt, 9, "chat");
        assert_eq!((request.request_id.as_str(), request.prompt_ids.len(), request.max_tokens), ("r-0", 2, 7));
        let sampling = v1::Sampling {
            temperature: 0.0,
            top_p: 0.5,
            top_k: 40,
            seed: u64::MAX,
            min_p: 0.25,
            repetition_penalty: 1.5,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: [(5, -100.0), (7, 1.5)].into(),
            min_tokens: 3,
            top_logprobs: 4,
        };
        assert_eq!(request.sampling, sampling);
        assert_eq!((options.n, options.logprobs), (2, true));
        let names = |n| request.clone().choices(n).into_iter().map(|one| (one.request_id, one.sampling.seed));
        assert_eq!(names(1).collect::<Vec<_>>(), [("r-0".to_owned(), u64::MAX)]);
        let both = [("r-0-0".to_owned(), u64::MAX), ("r-0-1".to_owned(), 0)];
        assert_eq!(names(2).collect::<Vec<_>>(), both, "seeds wrap around");
        assert_eq!((request.stop, request.stop_token_ids), (vec!["END".to_owned()], vec![4, 5]));
        assert_eq!(request.deadline, Some(received + Duration::from_millis(1500)));
        assert!(request.ignore_eos);
        assert_eq!((request.priority, &**request.tenant.name()), (4, "team"), "lower is more urgent in vLLM's field");
    }

    #[test]
    fn an_absent_seed_is_drawn_by_the_edge() {
        let caller =
            Caller { request_id: "r".into(), parent: None, root: root(), timeout: None, tenant: Tenant::default() };
        let prompt =
            Prompt { request_id: "r".into(), ids: [1].into(), max_tokens: 1, received: Instant::now(), root: None };
        assert_eq!(parse("{}").unwrap().request(&caller, prompt, 9, "chat").sampling.seed, 9);
    }

    #[test]
    fn wrong_values_name_their_field() {
        for (json, param) in [
            (r#"{"max_tokens": -1}"#, "max_tokens"),
            (r#"{"max_tokens": 1.5}"#, "max_tokens"),
            (r#"{"max_completion_tokens": "5"}"#, "max_completion_tokens"),
            (r#"{"temperature": -0.1}"#, "temperature"),
            (r#"{"temperature": 1e999}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"seed": 1.5}"#, "seed"),
            (r#"{"priority": 11}"#, "priority"),
            (r#"{"priority": -2147483648}"#, "priority"),
            (r#"{"priority": "high"}"#, "priority"),
            (r#"{"stop": 5}"#, "stop"),
            (r#"{"stop": ["a", "b", "c", "d", "e"]}"#, "stop"),
            (r#"{"stop": [""]}"#, "stop"),
            (r#"{"stop_token_ids": [-1]}"#, "stop_token_ids"),
            (r#"{"stream": "yes"}"#, "stream"),
            (r#"{"stream_options": 1}"#, "stream_options"),
            (r#"{"model": 1}"#, "model"),
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 129}"#, "n"),
            (r#"{"best_of": 2}"#, "best_of"),
            (r#"{"n": 2, "best_of": 1}"#, "best_of"),
            (r#"{"logprobs": true}"#, "logprobs"),
            (r#"{"logprobs": 21}"#, "logprobs"),
            (r#"{"presence_penalty": 2.5}"#, "presence_penalty"),
            (r#"{"frequency_penalty": -2.5}"#, "frequency_penalty"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"repetition_penalty": 1e300}"#, "repetition_penalty"),
            (r#"{"logit_bias": {"5": 101}}"#, "logit_bias"),
            (r#"{"logit_bias": {"five": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"-1": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": [1]}"#, "logit_bias"),
            (r#"{"min_p": 1.1}"#, "min_p"),
            (r#"{"min_p": "a"}"#, "min_p"),
            (r#"{"min_tokens": -1}"#, "min_tokens"),
            (r#"{"prompt_logprobs": 1}"#, "prompt_logprobs"),
            (r#"{"use_beam_search": true}"#, "use_beam_search"),
            (r#"{"bad_words": ["x"]}"#, "bad_words"),
            (r#"{"response_format": {"type": "json_object"}}"#, "response_format"),
        ] {
            let error = parse(json).expect_err(json);
            assert_eq!((error.kind, error.param), (tandem_proto::ErrorKind::InvalidArgument, Some(param)), "{json}");
        }
        assert!(parse(r#"{"response_format": {"type": "text"}, "stop": null, "top_k": -1}"#).is_ok());
    }

    #[test]
    fn logprobs_are_asked_for_in_two_ways() {
        let asked = |options: Result<Options, Error>| {
            options.map(|options| (options.logprobs, options.sampling.top_logprobs)).map_err(|error| error.param)
        };
        assert_eq!(asked(parse(r#"{"logprobs": 0}"#)), Ok((true, 0)));
        assert_eq!(asked(parse(r#"{"logprobs": false}"#)), Ok((false, 0)));
        assert_eq!(asked(parse_chat(r#"{"logprobs": true}"#)), Ok((true, 0)));
        assert_eq!(asked(parse_chat(r#"{"logprobs": true, "top_logprobs": 20}"#)), Ok((true, 20)));
        assert_eq!(asked(parse_chat(r#"{"logprobs": false, "top_logprobs": 0}"#)), Ok((false, 0)));
        for (json, param) in [
            (r#"{"logprobs": true, "top_logprobs": 21}"#, "top_logprobs"),
            (r#"{"top_logprobs": 2}"#, "top_logprobs"),
            (r#"{"logprobs": 2}"#, "logprobs"),
        ] {
            assert_eq!(asked(parse_chat(json)), Err(Some(param)), "{json}");
        }
    }
}
