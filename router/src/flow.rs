//! One request, from admission to the last token. This file is the orchestration: it moves events between two calls and
//! one client, and decides nothing that can be decided elsewhere. Every wait in it is bounded by the request's deadline,
//! by [`Limits::silence`], or by a node's death.
//!
//! - [`admission`]: who may start. [`legs`]: the two calls. [`exchange`]: what they may say (pure).
//! - [`timeline`]: the phases that the client waits for (pure). [`record`]: timings and spans (pure).
pub mod admission;
pub mod exchange;
pub mod legs;
pub mod record;
pub mod timeline;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tandem_proto::{Error, ErrorKind, v1};
use tandem_telemetry::{Exporter, clock};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use admission::Admission;

use crate::api::{self, GenerationEvent, GenerationRequest, Usage};
use crate::membership::{Membership, Node, Route};
use crate::metrics::Metrics;
use crate::select::NoPair;
use crate::text::ModelText;
use crate::traces::Traces;
use admission::{Entry, Slot};
use exchange::{Exchange, Step};
use legs::{DecodeLeg, PrefillLeg, Rest};
use record::{Chosen, Identities, Record};
use timeline::{Phase, Timeline};

/// Events that wait for a slow client; beyond them the decode call is not read either.
pub const CLIENT_QUEUE_EVENTS: usize = 64;
/// How long a finished answer waits for the prefill node's last message, which carries its spans.
const LAST_SPANS: Duration = Duration::from_millis(50);
/// How long nodes that were stopped have for their reports, while the client already has its end.
const STOPPED_SPANS: Duration = Duration::from_secs(1);

/// The bounds of all waits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests that run at the same time.
    pub max_inflight: u32,
    /// Requests that wait for one of them to end.
    pub max_queue: usize,
    /// Deadline of a request that brings none.
    pub max_request: Duration,
    /// Neither leg says anything for so long: the request fails.
    pub silence: Duration,
    /// The client takes nothing for so long: the request is cancelled.
    pub client_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_inflight: 512,
            max_queue: 256,
            max_request: Duration::from_secs(600),
            silence: Duration::from_secs(120),
            client_stall: Duration::from_secs(30),
        }
    }
}

/// What all requests share.
pub struct Shared {
    /// Tokens to text.
    pub model: Arc<ModelText>,
    /// The nodes.
    pub membership: Membership,
    /// Spans to the collector.
    pub exporter: Exporter,
    /// Spans for people without a collector.
    pub traces: Traces,
    /// Counters.
    pub metrics: Metrics,
    /// The queue.
    pub admission: Admission,
    /// Bounds.
    pub limits: Limits,
    /// This router's name in traces.
    pub instance: String,
}

type Client = mpsc::Sender<Result<GenerationEvent, Error>>;

/// Checks the request, takes its place in the queue, and lets it run on a task of its own until `cancel` fires.
///
/// # Errors
/// As [`api::Service::generate`].
pub fn start(
    shared: &Arc<Shared>,
    request: GenerationRequest,
    client: Client,
    cancel: CancellationToken,
) -> Result<Identities, Error> {
    let entry = check(&request, &shared.model)
        .and_then(|()| if shared.membership.has_pair() { Ok(()) } else { Err(no_pair(shared)) })
        .and_then(|()| shared.admission.enter())
        .inspect_err(|error| shared.metrics.refused(error.kind))?;
    let identities = Identities::draw(request.parent, &mut rand::rng());
    let record = Record {
        api: request.api,
        model: shared.model.model_name.clone(),
        request_id: request.request_id.clone(),
        prompt_tokens: u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX),
        max_tokens: request.max_tokens,
        sampling: request.sampling.clone(),
        identities,
        timeline: Timeline::new(request.received),
        tokens: Vec::new(),
        chosen: None,
        verified: None,
        ended: request.received,
    };
    let exchange = Exchange::new(request.max_tokens);
    let run = Run { shared: Arc::clone(shared), request, record, exchange, client, slot: None };
    tokio::spawn(run.until_the_end(entry, cancel));
    Ok(identities)
}

/// Why an answer ended well, and the text that was still held back.
struct Answered {
    reason: v1::FinishReason,
    text: String,
    /// Legs that have not reported.
    rest: Option<Rest>,
}

/// One running request.
struct Run {
    shared: Arc<Shared>,
    request: GenerationRequest,
    record: Record,
    exchange: Exchange,
    client: Client,
    /// Given back when the last word is with the client: the drain waits for it.
    slot: Option<Slot>,
}

impl Run {
    async fn until_the_end(mut self, entry: Entry, cancel: CancellationToken) {
        let limit = self.request.received + self.shared.limits.max_request;
        let deadline = self.request.deadline.map_or(limit, |deadline| deadline.min(limit));
        // Leaving this block without an answer drops both legs, which cancels the work on both nodes.
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::new(ErrorKind::Cancelled, "the client went away")),
            () = tokio::time::sleep_until(deadline.into()) => Err(Error::new(ErrorKind::DeadlineExceeded, String::new())),
            outcome = self.answer(entry, deadline) => outcome,
        };
        let phase = self.record.timeline.phase().as_str();
        let outcome = outcome.map_err(|error| match error.kind {
            ErrorKind::DeadlineExceeded if error.message.is_empty() => {
                Error { message: format!("the deadline passed during {phase}"), ..error }
            }
            _ => error,
        });
        self.conclude(outcome).await;
    }

    async fn answer(&mut self, entry: Entry, deadline: Instant) -> Result<Answered, Error> {
        self.slot = Some(entry.admitted().await?);
        self.record.timeline.end_phase(clock::now());
        let route = self.route()?;
        let prefill = PrefillLeg::open(&route.prefill, self.spec(Phase::Prefill, deadline));
        let decode = DecodeLeg::open(
            &route.decode,
            v1::DecodeStart {
                spec: Some(self.spec(Phase::Decode, deadline)),
                prefill_incarnation: route.prefill.info.incarnation,
                route_traceparent: self.record.identities.of(Phase::Route).to_string(),
            },
        );
        self.record.timeline.end_phase(clock::now());
        self.relay(&route, prefill, decode).await
    }

    fn route(&mut self) -> Result<Route, Error> {
        let routed = self.shared.membership.route(self.record.prompt_tokens, self.request.max_tokens);
        let route = routed.map_err(|why| refusal(&why))?;
        self.record.chosen = Some(Chosen {
            prefill: route.prefill.info.node_id.clone(),
            decode: route.decode.info.node_id.clone(),
            candidates: route.candidates.clone(),
            at: clock::now(),
        });
        Ok(route)
    }

    /// Moves events until the answer is complete or a leg fails.
    async fn relay(
        &mut self,
        route: &Route,
        mut prefill: PrefillLeg,
        mut decode: DecodeLeg,
    ) -> Result<Answered, Error> {
        let text = self.shared.model.decoder(&self.request.stop);
        let mut text = text.not_within(self.request.sampling.min_tokens);
        let silence = self.shared.limits.silence;
        let (mut prefill_died, mut decode_died) =
            (std::pin::pin!(route.prefill.died()), std::pin::pin!(route.decode.died()));
        let mut prefill_open = true;
        loop {
            let step = tokio::select! {
                why = &mut decode_died => return Err(self.lost(&route.decode, &why)),
                why = &mut prefill_died, if self.exchange.needs_prefill() => return Err(self.lost(&route.prefill, &why)),
                event = prefill.events.next(), if prefill_open => match event {
                    Some(Ok(event)) => self.exchange.on_prefill(event).map_err(|e| self.failed(&route.prefill, &e))?,
                    // Decode has all it needs: what is missing now is only prefill's report.
                    ended if !self.exchange.needs_prefill() => {
                        tracing::debug!(?ended, "prefill leg ended");
                        prefill_open = false;
                        Step::Wait
                    }
                    ended => return Err(self.failed(&route.prefill, &cause(ended))),
                },
                event = decode.events.next(), if self.exchange.takes_decode() => match event {
                    Some(Ok(event)) => self.exchange.on_decode(event).map_err(|e| self.failed(&route.decode, &e))?,
                    ended => return Err(self.failed(&route.decode, &cause(ended))),
                },
                () = tokio::time::sleep(silence) => return Err(self.silent(route)),
            };
            match step {
                Step::Wait => {}
                Step::Deliver(ticket) => prefill.deliver(ticket),
                Step::Verified => self.verified(),
                Step::Token { id, logprob, top, finished } => {
                    let step = text.push(id);
                    let stopped = step.stopped.then_some(v1::FinishReason::Stop);
                    let index = self.record.completion_tokens();
                    self.send_token(GenerationEvent::Token { id, text: step.text, logprob, top, index }).await?;
                    self.verified();
                    if let Some(reason) = stopped.or(finished) {
                        decode.stop(finished.is_some() || !self.exchange.hands_off());
                        if !self.exchange.hands_off() {
                            prefill.stop();
                        }
                        self.complete();
                        if finished.is_some() {
                            self.last_spans(&mut prefill).await;
                        }
                        let prefill = (prefill_open && self.exchange.delivered.is_none()).then_some(prefill);
                        let rest = Some(Rest { prefill, decode });
                        return Ok(Answered { reason, text: text.finish(), rest });
                    }
                }
                Step::Finished(reason) => {
                    self.complete();
                    self.last_spans(&mut prefill).await;
                    return Ok(Answered { reason, text: text.finish(), rest: None });
                }
            }
        }
    }

    async fn send_token(&mut self, token: GenerationEvent) -> Result<(), Error> {
        self.send(Ok(token)).await?;
        let now = clock::now();
        if self.record.tokens.is_empty() {
            self.record.timeline.end_phase(now);
        }
        self.record.tokens.push(now);
        Ok(())
    }

    async fn send(&self, event: Result<GenerationEvent, Error>) -> Result<(), Error> {
        let stall = self.shared.limits.client_stall;
        match tokio::time::timeout(stall, self.client.send(event)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Error::new(ErrorKind::Cancelled, "the client went away")),
            Err(_) => Err(Error::new(ErrorKind::Cancelled, format!("the client took nothing for {stall:?}"))),
        }
    }

    /// The transfer is over for the client when decode has verified *and* the first token is out.
    fn verified(&mut self) {
        let Record { timeline, verified, .. } = &mut self.record;
        if self.exchange.verified.is_some() && timeline.phase() == Phase::Transfer {
            timeline.end_phase(clock::now());
            verified.clone_from(&self.exchange.verified);
        }
    }

    /// The client has every token.
    fn complete(&mut self) {
        self.record.ended = clock::now();
        if self.record.timeline.phase() == Phase::Decode {
            self.record.timeline.end_phase(self.record.ended);
        }
    }

    /// Prefill's last message carries its spans and is nearly always there already.
    async fn last_spans(&mut self, prefill: &mut PrefillLeg) {
        let exchange = &mut self.exchange;
        let last = async {
            while exchange.delivered.is_none()
                && let Some(Ok(event)) = prefill.events.next().await
                && exchange.on_prefill(event).is_ok()
            {}
        };
        let _ = tokio::time::timeout(LAST_SPANS, last).await;
    }

    /// Spans, metrics, and the last word to the client, in this order: who has the answer can look at its trace. Only
    /// what stopped nodes have to report comes behind it.
    async fn conclude(mut self, mut outcome: Result<Answered, Error>) {
        let rest = outcome.as_mut().ok().and_then(|answered| answered.rest.take());
        if outcome.is_err() {
            self.record.ended = clock::now();
        }
        let (shared, record) = (&self.shared, &self.record);
        let reason = outcome.as_ref().map(|answered| answered.reason);
        let own = record.spans(&shared.instance, reason);
        if record.identities.root.sampled || reason.is_err() {
            own.iter().for_each(|span| shared.exporter.export(span.clone()));
        }
        let trace_id = record.identities.root.trace_id;
        shared.traces.finish(trace_id, own.into_iter().chain(std::mem::take(&mut self.exchange.spans)));
        shared.metrics.ended(record, reason);
        if let Err(error) = &outcome {
            let (request, phase) = (&record.request_id, record.timeline.phase().as_str());
            tracing::info!(request, phase, kind = ?error.kind, error = error.message, "request failed");
        }
        let last = outcome.map(|answered| GenerationEvent::Finish {
            reason: answered.reason,
            text: answered.text,
            usage: Usage {
                prompt: record.prompt_tokens,
                completion: record.completion_tokens(),
                // A node's word: never more than there is.
                cached: self.exchange.cached_tokens.min(record.prompt_tokens),
            },
            timings: Box::new(record.timings()),
            trace_id: record.identities.root.trace_id_hex(),
        });
        // A client that left does not miss it.
        let _ = self.send(last).await;
        drop(self.client);
        if let Some(rest) = rest {
            self.shared.traces.complete(trace_id, rest.spans(STOPPED_SPANS).await);
        }
        drop(self.slot);
    }

    fn spec(&self, phase: Phase, deadline: Instant) -> v1::RequestSpec {
        v1::RequestSpec {
            request_id: self.request.request_id.clone(),
            prompt: self.request.prompt_ids.clone(),
            sampling: Some(self.request.sampling.clone()),
            max_tokens: self.request.max_tokens,
            ignore_eos: self.request.ignore_eos,
            stop_token_ids: self.shared.model.stop_token_ids(&self.request.stop_token_ids, self.request.ignore_eos),
            deadline_unix_ns: clock().unix_ns(deadline),
            traceparent: self.record.identities.of(phase).to_string(),
            output_tokens: 0,
        }
    }

    fn failed(&self, node: &Node, cause: &Error) -> Error {
        legs::failed(node, self.record.timeline.phase(), cause, !self.record.tokens.is_empty())
    }

    fn lost(&self, node: &Node, why: &str) -> Error {
        self.failed(node, &Error::new(ErrorKind::Unavailable, format!("the node was lost, {why}")))
    }

    fn silent(&self, route: &Route) -> Error {
        let waits_for_prefill = self.exchange.needs_prefill();
        let node = if waits_for_prefill { &route.prefill } else { &route.decode };
        let why = format!("it said nothing for {:?}", self.shared.limits.silence);
        self.failed(node, &Error::new(ErrorKind::Unavailable, why))
    }
}

/// Why a leg's stream has no further event.
fn cause<T>(ended: Option<Result<T, tonic::Status>>) -> Error {
    match ended {
        Some(Err(status)) => status.into(),
        Some(Ok(_)) | None => Error::new(ErrorKind::Unavailable, "it ended the call too early"),
    }
}

fn no_pair(shared: &Shared) -> Error {
    // The cheapest request: its refusal is about the nodes alone.
    match shared.membership.route(1, 1) {
        Err(why) => refusal(&why),
        Ok(_) => Error::new(ErrorKind::Unavailable, "no pair of nodes was available; one has just come: try again"),
    }
}

fn refusal(why: &NoPair) -> Error {
    let kind = match why {
        NoPair::NoNode(_) | NoPair::Incompatible => ErrorKind::Unavailable,
        NoPair::TooLarge { .. } => ErrorKind::InvalidArgument,
    };
    Error::new(kind, why.to_string())
}

fn check(request: &GenerationRequest, model: &ModelText) -> Result<(), Error> {
    let (prompt, context) = (request.prompt_ids.len(), model.context_len as usize);
    if prompt == 0 {
        return Err(Error::invalid("prompt", "the prompt has no tokens"));
    }
    if let Some(id) = request.prompt_ids.iter().find(|id| **id >= model.vocab_size()) {
        let message = format!("token id {id} is outside the vocabulary of {} tokens", model.vocab_size());
        return Err(Error::invalid("prompt", message));
    }
    if prompt >= context {
        let message = format!("the prompt has {prompt} tokens, the context of {} holds {context}", model.model_name);
        return Err(Error::invalid("prompt", message));
    }
    if request.max_tokens == 0 || prompt + request.max_tokens as usize > context {
        let message =
            format!("max_tokens must be 1 to {}: the prompt has {prompt} of {context} tokens", context - prompt);
        return Err(Error::invalid("max_tokens", message));
    }
    request.sampling.check(model.vocab_size())?;
    request.sampling.check_min_tokens(request.max_tokens)?;
    let too_long = |text: &String| text.is_empty() || text.len() > api::MAX_STOP_BYTES;
    if request.stop.len() > api::MAX_STOP_STRINGS || request.stop.iter().any(too_long) {
        let (strings, bytes) = (api::MAX_STOP_STRINGS, api::MAX_STOP_BYTES);
        return Err(Error::invalid("stop", format!("at most {strings} stop strings of 1 to {bytes} bytes")));
    }
    if request.stop_token_ids.len() > api::MAX_STOP_TOKENS {
        return Err(Error::invalid("stop_token_ids", format!("at most {} stop tokens", api::MAX_STOP_TOKENS)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
