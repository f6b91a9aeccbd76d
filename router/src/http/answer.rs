//! From checked options and encoded prompts to the response, whole or streamed, for both endpoints.
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;
use futures::{Stream, StreamExt};
use tandem_proto::v1::FinishReason;
use tandem_proto::{Error, ErrorKind};

use super::error::ApiError;
use super::kind::Kind;
use super::logprobs::{Scored, Spell, Writer};
use super::options::{Options, Prompt};
use super::sse::{self, Encoder, PromptInfo};
use super::timings::{self, Timed};
use super::types::{Choice, Head, Message, finish_reason, sum, unix_seconds};
use super::{Caller, traceparent};
use crate::api::Service;
use crate::generation::{GenerationEvent, GenerationRequest, MAX_CHOICES, Usage};

/// A prompt as its endpoint understood it.
pub(super) struct Encoded {
    pub ids: Vec<u32>,
    /// The prompt's text, to be repeated before the answer.
    pub echo: Option<Arc<str>>,
}

/// One request with everything that its endpoint found out.
pub(super) struct Job {
    pub kind: Kind,
    pub options: Options,
    pub prompts: Vec<Encoded>,
    pub received: Instant,
}

/// Generates and answers.
///
/// # Errors
/// Whatever happens before the first byte is sent.
pub(super) async fn answer(service: &Service, caller: &Caller, job: Job) -> Result<Response, ApiError> {
    let head = Head::new(job.kind, &caller.request_id, &service.model().model_name, unix_seconds());
    let checked = Checked::of(service, caller, job).inspect_err(|error| service.refused(error.kind))?;
    let Checked { options, requests, infos } = checked;
    // What the flow refuses, it counts itself.
    let streams = service.generate_all(requests)?;
    // The requests go first: what follows is of use when there are tokens.
    tokio::task::yield_now().await;
    let model = Arc::clone(service.model());
    let spell: Spell = Arc::new(move |id| model.token(id));
    let response = if options.stream {
        sse::respond(Encoder::new(head, &options, infos, &spell), streams).await
    } else {
        let answers = try_join_all(streams.into_iter().map(collect)).await;
        answers.map(|answers| whole(&head, &options, infos, &answers, &spell)).map_err(ApiError::from)
    };
    // From here on the request has a trace, whatever became of it.
    let mut response = response.unwrap_or_else(ApiError::into_response);
    response.headers_mut().extend(traceparent(caller.root));
    Ok(response)
}

/// All prompts are known to be good before the first one starts.
struct Checked {
    options: Options,
    /// One for each answer.
    requests: Vec<GenerationRequest>,
    /// Of the same.
    infos: Vec<PromptInfo>,
}

impl Checked {
    fn of(service: &Service, caller: &Caller, job: Job) -> Result<Self, Error> {
        let Job { kind, options, prompts, received } = job;
        let (several, n) = (prompts.len() > 1, options.n);
        if prompts.len() * n as usize > MAX_CHOICES as usize {
            let message = format!("{} prompts with n = {n} are more than {MAX_CHOICES} answers", prompts.len());
            return Err(Error::invalid("n", message));
        }
        prompts.iter().try_for_each(|prompt| service.check_prompt(&prompt.ids))?;
        let (mut infos, mut requests) = (Vec::new(), Vec::new());
        for (index, Encoded { ids, echo }) in prompts.into_iter().enumerate() {
            let max_tokens = service.resolve_max_tokens(options.max_tokens, ids.len())?;
            let request_id = if several { format!("{}-{index}", caller.request_id) } else { caller.request_id.clone() };
            let info = PromptInfo { echo, tokens: ids.len(), choice: 0 };
            infos.extend((0..n).map(|choice| PromptInfo { choice, ..info.clone() }));
            let root = Some(caller.root).filter(|_| index == 0);
            let prompt = Prompt { request_id, ids: ids.into(), max_tokens, received, root };
            // Of each prompt its own: two equal ones are two questions.
            let seed = rand::random();
            requests.extend(options.request(caller, prompt, seed, kind.operation()).choices(n));
        }
        Ok(Self { options, requests, infos })
    }
}

/// One complete answer.
pub(super) struct Collected {
    pub text: String,
    pub ids: Vec<u32>,
    /// The same tokens.
    pub scored: Vec<Scored>,
    pub reason: FinishReason,
    pub usage: Usage,
    pub timed: Timed,
}

/// Waits for the whole answer.
pub(super) async fn collect(
    mut events: impl Stream<Item = Result<GenerationEvent, Error>> + Unpin,
) -> Result<Collected, Error> {
    let (mut all, mut ids, mut scored) = (String::new(), Vec::new(), Vec::new());
    while let Some(event) = events.next().await {
        match event? {
            GenerationEvent::Token { id, text, logprob, top, .. } => {
                ids.push(id);
                scored.push(Scored { id, logprob, top });
                all += &text;
            }
            GenerationEvent::Finish { reason, text, usage, timings, trace_id } => {
                let timed = Timed { timings, trace_id };
                return Ok(Collected { text: all + &text, ids, scored, reason, usage, timed });
            }
        }
    }
    Err(Error::new(ErrorKind::Internal, "the answer ended without a reason"))
}

/// The body of a request that did not ask for a stream.
pub(super) fn whole<'a>(
    head: &'a Head,
    options: &Options,
    prompts: Vec<PromptInfo>,
    answers: &'a [Collected],
    spell: &Spell,
) -> Response {
    let numbers: Vec<u32> = prompts.iter().map(|prompt| prompt.choice).collect();
    let choice = |(index, (answer, prompt)): (usize, (&'a Collected, PromptInfo))| {
        let text = [prompt.echo.as_deref().unwrap_or_default(), &answer.text].concat();
        let (text, message) = match head.kind {
            Kind::Completion => (Some(text), None),
            Kind::Chat => (None, Some(Message { role: Some("assistant"), content: Some(text) })),
        };
        Choice {
            index,
            text,
            message,
            logprobs: options.logprobs.then(|| Writer::new(head.kind, Arc::clone(spell)).write(&answer.scored)),
            finish_reason: Some(finish_reason(answer.reason)),
            token_ids: options.return_token_ids.then_some(answer.ids.as_slice()),
            ..Choice::default()
        }
    };
    let choices: Vec<_> = answers.iter().zip(prompts).enumerate().map(choice).collect();
    let usage = sum(numbers.into_iter().zip(answers.iter().map(|answer| answer.usage)));
    let timings = || timings::tandem(answers.iter().map(|answer| &answer.timed));
    let tandem = options.include_timings.then(timings);
    Json(head.answer(&choices, usage, tandem)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Tenant;
    use crate::flow::tests::fakes;
    use crate::http::fields::Fields;
    use crate::limits::Limits;

    fn checked(json: &str, prompts: Vec<Vec<u32>>) -> Result<Checked, Error> {
        let root = tandem_proto::TraceContext::root(&mut rand::rng());
        let caller = Caller { request_id: "r".into(), parent: None, root, timeout: None, tenant: Tenant::default() };
        let options = Options::parse(&Fields::parse(json).unwrap(), Kind::Completion).unwrap();
        let prompts = prompts.into_iter().map(|ids| Encoded { ids, echo: None }).collect();
        let job = Job { kind: Kind::Completion, options, prompts, received: Instant::now() };
        Checked::of(&fakes::router(Limits::default()), &caller, job)
    }

    fn seeds(json: &str, prompts: usize) -> Vec<u64> {
        let checked = checked(json, vec![vec![1, 2]; prompts]).unwrap();
        checked.requests.iter().map(|request| request.sampling.seed).collect()
    }

    #[test]
    fn equal_prompts_of_one_call_have_seeds_of_their_own() {
        let drawn = seeds("{}", 2);
        assert_ne!(drawn[0], drawn[1]);
        assert_eq!(seeds(r#"{"seed": 7, "n": 2}"#, 2), [7, 8, 7, 8], "unless the client says which");
    }

    #[test]
    fn all_answers_share_their_prompt() {
        let checked = checked(r#"{"n": 128, "max_tokens": 1}"#, vec![vec![1; 200]]).unwrap();
        assert_eq!(checked.requests.len(), 128);
        assert!(checked.requests.iter().all(|one| Arc::ptr_eq(&one.prompt_ids, &checked.requests[0].prompt_ids)));
    }

    #[test]
    fn a_prompt_that_is_too_long_is_refused_before_it_is_multiplied() {
        let error = checked(r#"{"n": 128, "max_tokens": 1}"#, vec![vec![1; 5000]]).err().unwrap();
        assert_eq!(error.param, Some("prompt"));
    }
}
