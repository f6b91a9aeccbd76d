//! A streamed answer as server-sent events: one token a chunk, then the reason it ended, the counts if asked for, and
//! `[DONE]`. After a failure the stream ends with an error event and without `[DONE]`.
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream::{Stream, StreamExt};
use http::header;
use tandem_proto::{Error, ErrorKind};

use super::error::ApiError;
use super::kind::Kind;
use super::logprobs::{Scored, Spell, Writer};
use super::options::Options;
use super::timings::{self, Timed};
use super::types::{Choice, Head, Message, Part, finish_reason, sum};
use crate::api::merged;
use crate::generation::{GenerationEvent, Usage};

/// An event with a token and without extras is not longer.
const USUAL_EVENT_BYTES: usize = 320;
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Starts the response once the first event is there, so that what fails before it still gets its HTTP status.
///
/// # Errors
/// The failure of the first prompt that has anything to say.
pub(super) async fn respond<S>(mut encoder: Encoder, answers: Vec<S>) -> Result<Response, ApiError>
where
    S: Stream<Item = Result<GenerationEvent, Error>> + Send + Unpin + 'static,
{
    let mut events = merged(answers);
    let first = match events.next().await {
        Some((_, Err(error))) => return Err(error.into()),
        first => first,
    };
    // Dropped with the connection: that cancels every prompt still running.
    let body = async_stream::stream! {
        let mut next = first;
        while let Some((choice, event)) = next {
            match event {
                Ok(event) => yield Ok::<_, Infallible>(encoder.event(choice as usize, event)),
                Err(error) => {
                    yield Ok(failure(error));
                    return;
                }
            }
            next = events.next().await;
        }
        yield Ok(encoder.end());
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would collect the tokens otherwise.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// Events of all answers to bytes; pure.
pub(super) struct Encoder {
    kind: Kind,
    /// What every chunk begins with: its fields of the head, as an object that lacks its end.
    opening: Vec<u8>,
    include_usage: bool,
    continuous_usage: bool,
    include_timings: bool,
    return_token_ids: bool,
    choices: Vec<Progress>,
}

/// How far one answer is.
struct Progress {
    /// Its number among those of its prompt.
    choice: u32,
    /// When they are wanted.
    logprobs: Option<Writer>,
    /// The prompt's text, sent before the first token.
    echo: Option<Arc<str>>,
    started: bool,
    usage: Usage,
    /// Once it has ended.
    timed: Option<Timed>,
}

/// What is to be known of one answer's prompt.
#[derive(Clone)]
pub(super) struct PromptInfo {
    /// The prompt's text, to be repeated before the answer.
    pub echo: Option<Arc<str>>,
    pub tokens: usize,
    /// The answer's number among those of the prompt.
    pub choice: u32,
}

impl Encoder {
    pub fn new(head: Head, options: &Options, prompts: Vec<PromptInfo>, spell: &Spell) -> Self {
        let kind = head.kind;
        let progress = |prompt: PromptInfo| Progress {
            choice: prompt.choice,
            logprobs: options.logprobs.then(|| Writer::new(kind, Arc::clone(spell))),
            echo: prompt.echo,
            started: false,
            timed: None,
            usage: Usage { prompt: u32::try_from(prompt.tokens).unwrap_or(u32::MAX), ..Usage::default() },
        };
        Self {
            kind: head.kind,
            opening: opening(&head),
            include_usage: options.include_usage,
            continuous_usage: options.continuous_usage,
            include_timings: options.include_timings,
            return_token_ids: options.return_token_ids,
            choices: prompts.into_iter().map(progress).collect(),
        }
    }

    /// The chunk for one event of answer `index`.
    pub fn event(&mut self, index: usize, event: GenerationEvent) -> Bytes {
        let Some(progress) = self.choices.get_mut(index) else { return Bytes::new() };
        let mut choice = Choice { index, ..Choice::default() };
        let (text, id) = match event {
            GenerationEvent::Token { id, text, logprob, top, cached, .. } => {
                progress.usage.completion += 1;
                progress.usage.cached = cached;
                choice.logprobs = progress.logprobs.as_mut().map(|writer| writer.write(&[Scored { id, logprob, top }]));
                (text, Some(id))
            }
            GenerationEvent::Finish { reason, text, usage, timings, trace_id } => {
                progress.usage = usage;
                progress.timed = Some(Timed { timings, trace_id });
                choice.finish_reason = Some(finish_reason(reason));
                (text, None)
            }
        };
        let text = match progress.echo.take() {
            Some(prompt) => [&*prompt, &text].concat(),
            None => text,
        };
        let first = !std::mem::replace(&mut progress.started, true);
        match self.kind {
            Kind::Completion => choice.text = Some(text),
            Kind::Chat => {
                // The role travels with the first token, never before it.
                let content = (id.is_some() || !text.is_empty()).then_some(text);
                choice.delta = Some(Message { role: first.then_some("assistant"), content });
            }
        }
        let ids: &[u32] = id.as_slice();
        choice.token_ids = self.return_token_ids.then_some(ids);
        let usage = if self.continuous_usage { Some(Some(progress.usage)) } else { self.include_usage.then_some(None) };
        self.chunk(&Part::new(&[choice], usage, None))
    }

    /// What follows the last event: counts and `[DONE]`, or an error if an answer just stopped.
    pub fn end(&self) -> Bytes {
        if !self.choices.iter().all(|progress| progress.timed.is_some()) {
            return failure(Error::new(ErrorKind::Internal, "the answer ended without a reason"));
        }
        let mut bytes = Vec::new();
        if self.include_usage || self.include_timings {
            let usage = || Some(sum(self.choices.iter().map(|progress| (progress.choice, progress.usage))));
            let timings = || timings::tandem(self.choices.iter().filter_map(|progress| progress.timed.as_ref()));
            let last = Part::new(&[], self.include_usage.then(usage), self.include_timings.then(timings));
            bytes.extend_from_slice(&self.chunk(&last));
        }
        bytes.extend_from_slice(DONE);
        bytes.into()
    }

    fn chunk(&self, part: &Part<'_>) -> Bytes {
        let mut bytes = Vec::with_capacity(USUAL_EVENT_BYTES);
        bytes.extend_from_slice(&self.opening);
        let joint = bytes.len();
        // Strings, integers and lists of them cannot fail to serialize into memory.
        if serde_json::to_writer(&mut bytes, part).is_err() {
            return failure(Error::new(ErrorKind::Internal, "the answer cannot be written as JSON"));
        }
        // One object of two.
        debug_assert_eq!(bytes[joint], b'{');
        bytes[joint] = b',';
        bytes.extend_from_slice(b"\n\n");
        bytes.into()
    }
}

fn opening(head: &Head) -> Vec<u8> {
    let mut bytes = b"data: ".to_vec();
    // Two strings, a word and a number cannot fail to serialize into memory.
    let _ = serde_json::to_writer(&mut bytes, &head.of_chunks());
    let end = bytes.pop();
    debug_assert_eq!(end, Some(b'}'));
    bytes
}

fn failure(error: Error) -> Bytes {
    format!("data: {}\n\n", ApiError::from(error).json()).into()
}
