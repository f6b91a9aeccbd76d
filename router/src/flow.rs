//! One request, from admission to the last token. This file is the orchestration: it moves events between the nodes of
//! a plan and one client, gives the request to others when a node fails, and decides nothing that can be decided
//! elsewhere. Every wait in it is bounded by the request's deadline, by [`Limits::silence`], by [`Limits::replan`], or
//! by a node's death.
//!
//! - [`check`]: what a request must be (pure). [`admit`]: its place. [`crate::admission`]: who may start.
//! - [`progress`]: the request and its answer so far (pure).
//! - [`attempt`]: the nodes of a plan and the calls to them; [`legs`]: the calls; [`attempt_protocol`]: which events
//!   they may bring (pure).
//! - [`replan`]: whether there is another attempt (pure). [`next_attempt`]: how it comes about. [`find_nodes`]: the
//!   search for its nodes. [`retry_budget`]: how many requests may be there at once.
//! - `conclusion.rs`: the end of a request. [`refused`]: what is left of one that never ran.
//! - [`crate::record`]: what is known of it at its end: phases, pace, timings and spans (pure).
pub mod admit;
pub mod attempt;
pub mod attempt_protocol;
pub mod check;
mod conclusion;
pub mod find_nodes;
pub mod legs;
pub mod next_attempt;
pub mod progress;
pub mod refused;
pub mod replan;
pub mod retry_budget;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{CacheSalt, Error, ErrorKind, TraceContext, v1};
use tandem_telemetry::{Exporter, Notes, clock, within_request};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use crate::admission::cache_salt::CacheSalts;
use crate::admission::{Admission, ENDING, Entered, REASONS, Reason, Slot};
use crate::caller::Parent;
use crate::capacity::Demand;
use crate::failure::{BOUNDS, Bound, CAUSES, Cause, Failure};
use crate::generation::{GenerationEvent, GenerationRequest};
use crate::limits::{CurrentLimits, Limits};
use crate::membership::{Membership, Route};
use crate::metrics::{Labels, Metrics};
use crate::record::drafts::Drafts;
use crate::record::timeline::{Phase, Timeline};
use crate::record::token_pace::{Arrivals, TokenPace};
use crate::record::{Chosen, Identities, Names, Record};
use crate::select::{NoPair, Plan, Wish};
use crate::text::{ModelText, TextStream};
use crate::traces::{Traces, append_pack};
use attempt::{Attempt, Happening};
use attempt_protocol::{AttemptProtocol, Step};
use legs::Rest;
use progress::Progress;
use replan::Replan;
use retry_budget::{RetryBudget, Retrying};

/// Events that wait for a slow client; beyond them the decode call is not read either.
pub const CLIENT_QUEUE_EVENTS: usize = 64;

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
    /// Of traces that begin here, the share that is sampled.
    pub sample_ratio: f64,
    /// Counters.
    pub metrics: Metrics,
    /// The queue.
    pub admission: Admission,
    /// What keeps tenants' cached prompts apart.
    pub cache_salts: CacheSalts,
    /// How many requests may be retries.
    pub retry_budget: RetryBudget,
    /// Bounds.
    pub limits: CurrentLimits,
    /// This router's name in traces.
    pub instance: Arc<str>,
    /// Fires when the process ends: no request goes on.
    pub ending: CancellationToken,
}

impl Shared {
    /// Requests that may reuse each other's KV have the same.
    fn cache_salt(&self, request: &GenerationRequest) -> CacheSalt {
        self.cache_salts.of(&request.tenant, &request.cache_salt)
    }

    /// The span of a whole request, under the client's if there is one; that one's word on sampling counts.
    pub fn root(&self, parent: Option<&Parent>) -> TraceContext {
        let rng = &mut rand::rng();
        match parent {
            Some(parent) => parent.span.child(rng),
            None => TraceContext::root_sampled(self.sample_ratio, rng),
        }
    }
}

/// What the flow gives metrics for labels.
pub fn labels() -> Labels {
    Labels {
        refusals: REASONS.map(Reason::as_str).into(),
        causes: CAUSES.map(Cause::as_str).into(),
        bounds: BOUNDS.map(Bound::as_str).into(),
    }
}

type Client = mpsc::Sender<Result<GenerationEvent, Error>>;

/// Lets a request that has its place run on a task of its own until `cancel` fires.
pub fn start(
    shared: &Arc<Shared>,
    request: GenerationRequest,
    entry: Entered,
    client: Client,
    cancel: CancellationToken,
) -> Identities {
    let limits = shared.limits.get();
    let deadline = admit::deadline(&limits, &request);
    let parent = request.parent.as_ref();
    let root = request.root.unwrap_or_else(|| shared.root(parent));
    let identities = Identities::draw(root, parent.map(|parent| parent.span), &mut rand::rng());
    // Boxed: it goes from here to the list of traces.
    let record = Box::new(Record {
        api: request.api,
        model: shared.model.model_name.clone(),
        request_id: request.request_id.clone(),
        prompt_tokens: u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX),
        max_tokens: request.max_tokens,
        // The ring keeps it, and the bias of three hundred tokens is told nowhere.
        sampling: v1::Sampling { logit_bias: HashMap::new(), ..request.sampling.clone() },
        identities,
        state: parent.map(|parent| parent.state.clone()).unwrap_or_default(),
        timeline: Timeline::new(request.received),
        pace: TokenPace::default(),
        chosen: None,
        replans: Vec::new(),
        verified: None,
        drafts: Drafts::default(),
        notes: Vec::new(),
        cached_tokens: 0,
        ended: request.received,
    });
    let cache_salt = shared.cache_salt(&request);
    let run = Box::new(Run {
        deadline,
        replan: Replan::new(limits.max_attempts, limits.replan, jitter(&request)),
        limits,
        retrying: None,
        progress: Progress::new(request, cache_salt, &shared.model, tpot_objective(shared)),
        shared: Arc::clone(shared),
        notes: Notes::of(root),
        record,
        arrivals: Arrivals::default(),
        spans: Vec::new(),
        client,
        slot: None,
    });
    // Boxed: on its way to the reactor a task is copied whole, five times.
    tokio::spawn(within_request(root, Box::pin(run.until_the_end(entry, cancel))));
    identities
}

/// What makes its pauses differ from those of others, and the same whenever it runs again.
fn jitter(request: &GenerationRequest) -> u64 {
    xxh3_64(request.request_id.as_bytes())
}

/// Why an answer ended well, and the text that was still held back.
struct Answered {
    reason: v1::FinishReason,
    text: String,
    /// Legs that have not reported.
    rest: Option<Rest>,
}

/// How an attempt ended.
enum End {
    /// The client has every token.
    Complete { reason: v1::FinishReason, by: By },
    /// Another attempt may go on.
    Failed(Failure),
}

/// Who ended an answer.
enum By {
    /// Decode, which has said all that it has to say.
    Decode,
    /// Prefill: its token was all of it.
    Prefill,
    /// This side, by a stop string.
    Router,
}

/// One running request. It is boxed, and so is each of its futures that begins after the last token or a failure: a
/// task's future is as large as all that it may ever wait for, and is copied whole on its way to the reactor.
struct Run {
    shared: Arc<Shared>,
    /// Those that held when it began.
    limits: Arc<Limits>,
    /// What is logged of it.
    notes: Notes,
    /// The answer so far: what the next attempt goes on from.
    progress: Progress,
    deadline: Instant,
    /// What is known till now; the pace when it has ended.
    record: Box<Record>,
    arrivals: Arrivals,
    replan: Replan,
    /// It is a retry, and the client has no token of it yet.
    retrying: Option<Retrying>,
    /// The nodes', of all attempts, packed.
    spans: Vec<u8>,
    client: Client,
    /// Given back when the last word is with the client: the drain waits for it.
    slot: Option<Slot>,
}

impl Run {
    async fn until_the_end(mut self: Box<Self>, entry: Entered, cancel: CancellationToken) {
        let ending = self.shared.ending.clone();
        // Leaving this block without an answer drops both legs, which cancels the work on both nodes.
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::new(ErrorKind::Cancelled, "the client went away")),
            () = ending.cancelled() => Err(Error::new(ErrorKind::Unavailable, ENDING)),
            () = tokio::time::sleep_until(self.deadline.into()) => {
                Err(Error::new(ErrorKind::DeadlineExceeded, String::new()))
            }
            outcome = self.answer(entry) => outcome,
        };
        let phase = self.record.timeline.phase().as_str();
        let outcome = outcome.map_err(|error| match error.kind {
            ErrorKind::DeadlineExceeded if error.message.is_empty() => {
                Error { message: format!("the deadline passed during {phase}"), ..error }
            }
            _ => error,
        });
        Box::pin(self.conclude(outcome)).await;
    }

    /// Attempt after attempt, until the answer is complete or there is no other attempt.
    async fn answer(&mut self, entry: Entered) -> Result<Answered, Error> {
        self.slot = Some(entry.admitted().await?);
        if self.shared.admission.has_tenants() {
            self.progress.hide_priority();
        }
        let now = clock::now();
        self.record.timeline.end_phase(now);
        let routed = self.shared.membership.route(&self.demand(), &Wish::default(), now);
        let route = routed.map_err(|why| refusal(&why)).inspect_err(|_| self.waited())?;
        self.record.timeline.end_phase(clock::now());
        let mut attempt = self.open(route);
        // The client waits for the call that computes the prompt: its connection writes before the decode call is
        // opened, and before the books are kept.
        tokio::task::yield_now().await;
        self.waited();
        self.chosen(&attempt.route, now);
        // One for all attempts: characters and stop strings go across their borders.
        let text = self.shared.model.decoder(&self.progress.request.stop);
        let mut text = text.not_within(self.progress.request.sampling.min_tokens);
        loop {
            let failure = match self.relay(&mut attempt, &mut text).await? {
                End::Complete { reason, by } => {
                    let rest = Box::pin(self.complete(attempt, by)).await;
                    return Ok(Answered { reason, text: text.finish(), rest });
                }
                End::Failed(failure) => failure,
            };
            if let Some(reason) = self.progress.is_complete() {
                let rest = Box::pin(self.complete(attempt, By::Router)).await;
                return Ok(Answered { reason, text: text.finish(), rest });
            }
            attempt = Box::pin(self.next_attempt(attempt, failure)).await?;
        }
    }

    /// All legs, for what is left of the answer.
    fn open(&self, route: Route) -> Attempt {
        let basis = self.progress.sent.len();
        let prompt = route.prefill.is_some().then(|| self.spec(Phase::Prefill, basis));
        let start = self.decode_start(&route, basis);
        Attempt::open(route, prompt, start, basis)
    }

    fn decode_start(&self, route: &Route, basis: usize) -> v1::DecodeStart {
        let now = self.record.timeline.phase();
        let local = || v1::LocalPrefill { traceparent: self.record.identities.of(now.max(Phase::Prefill)).to_string() };
        v1::DecodeStart {
            spec: Some(self.spec(Phase::Decode, basis)),
            prefill_incarnation: route.prefill.as_ref().map_or(0, |prefill| prefill.info.incarnation),
            request_traceparent: self.record.identities.root.to_string(),
            local: route.prefill.is_none().then(local),
            transport: route.way().map_or_else(String::new, |way| way.build_id.to_string()),
        }
    }

    /// What a leg is to do, with the first `basis` tokens of the answer in its prompt. Its span is a child of `phase`,
    /// or of the later one in which it is opened.
    fn spec(&self, phase: Phase, basis: usize) -> v1::RequestSpec {
        let parent = self.record.timeline.phase().max(phase);
        self.progress.spec(basis, self.record.identities.of(parent), self.deadline)
    }

    fn waited(&self) {
        let (priority, wait) = (self.progress.request.priority, self.record.timeline.length(Phase::Queue));
        // As clients count: lower ones first.
        self.shared.metrics.waited(-priority, wait, self.record.identities.root);
    }

    /// Notes how the first attempt came about.
    fn chosen(&mut self, route: &Route, at: Instant) {
        self.slot.iter().for_each(|slot| slot.claim().routed());
        self.record.chosen = Some(Chosen {
            nodes: Names::of(route),
            candidates: route.candidates.clone(),
            apart: Arc::clone(&route.apart),
            choice: *self.shared.membership.choice(),
            at,
        });
        self.shared.metrics.planned(route.plan());
    }

    /// What is left to do, as nodes are chosen for it.
    fn demand(&self) -> Demand {
        let Self { shared, progress, .. } = self;
        shared.membership.demand_of(&progress.prompt(), progress.left(), progress.cache_salt())
    }

    /// Moves events until the answer is complete or the attempt fails.
    ///
    /// # Errors
    /// What ends the request.
    async fn relay(&mut self, attempt: &mut Attempt, text: &mut TextStream) -> Result<End, Error> {
        loop {
            let happening = attempt.next(self.limits.silence).await;
            append_pack(&mut self.spans, std::mem::take(&mut attempt.protocol.spans));
            self.record.drafts.add(std::mem::take(&mut attempt.protocol.drafts));
            let step = match happening {
                Ok(Happening::Step(step)) => step,
                Ok(Happening::Sought(sought)) => {
                    self.go_on(attempt, *sought)?;
                    continue;
                }
                Err(failure) => return Ok(End::Failed(failure)),
            };
            match step {
                // The attempt itself has acted on the last three.
                Step::Wait | Step::LetGo | Step::Undelivered(_) | Step::Spent => {}
                Step::Deliver(ticket) => {
                    self.shared.metrics.awaited(self.travelling(attempt));
                    attempt.deliver(ticket);
                }
                Step::Verified => {
                    let (tokens, trace) = (self.travelling(attempt), self.record.identities.root);
                    attempt.protocol.verified.iter().for_each(|kv| self.shared.metrics.handed_off(kv, tokens, trace));
                    self.verified(&attempt.protocol);
                }
                Step::Token { id, logprob, top, finished } => {
                    let step = text.push(id);
                    let stopped = step.stopped.then_some(v1::FinishReason::Stop);
                    let index = self.arrivals.count();
                    if index == 0 {
                        // A node's word: never more than there is.
                        self.record.cached_tokens = attempt.protocol.cached_tokens.min(self.record.prompt_tokens);
                        attempt.route.prompt_computed(self.record.prompt_tokens - self.record.cached_tokens);
                    } else {
                        attempt.route.decode.work.generated();
                    }
                    let (text, cached) = (step.text, self.record.cached_tokens);
                    self.send_token(GenerationEvent::Token { id, text, logprob, top, index, cached }).await?;
                    self.progress.sent.push(id);
                    self.progressed(attempt);
                    if let Some(reason) = stopped.or(finished) {
                        let by = if finished.is_some() { By::Prefill } else { By::Router };
                        return Ok(End::Complete { reason, by });
                    }
                }
                Step::Finished(reason) => return Ok(End::Complete { reason, by: By::Decode }),
            }
        }
    }

    /// Tokens of this attempt's prompt whose KV has to come from the prefill node.
    fn travelling(&self, attempt: &Attempt) -> u64 {
        let held = u64::from(attempt.protocol.held_blocks) * u64::from(attempt.route.decode.info.block_tokens);
        (u64::from(self.record.prompt_tokens) + attempt.basis as u64).saturating_sub(held)
    }

    async fn send_token(&mut self, token: GenerationEvent) -> Result<(), Error> {
        send(&self.shared.metrics, self.limits.client_stall, &self.client, Ok(token)).await?;
        let now = clock::now();
        if self.arrivals.count() == 0 {
            self.record.timeline.end_phase(now);
            self.slot.iter().for_each(|slot| slot.first_token(now));
        }
        self.arrivals.push(now);
        let generated = self.arrivals.count();
        self.slot.iter_mut().for_each(|slot| slot.generated(generated));
        Ok(())
    }

    /// The client has another token. That ends an outage unless decode is still being sought.
    fn progressed(&mut self, attempt: &Attempt) {
        let first = self.progress.sent.len() == 1;
        if attempt.route.plan() == Plan::Local {
            self.nothing_to_transfer(first);
        }
        if !attempt.seeks_decode() {
            self.replan.progressed(clock::now());
            self.retrying = None;
        }
        self.verified(&attempt.protocol);
    }

    /// The node that sent the token goes on by itself. Where an attempt before it sent the first one, the client has
    /// waited for KV till now.
    fn nothing_to_transfer(&mut self, first: bool) {
        let timeline = &mut self.record.timeline;
        match timeline.phase() {
            Phase::Transfer if first => timeline.skip_phase(),
            Phase::Transfer => timeline.end_phase(clock::now()),
            _ => {}
        }
    }

    /// The transfer is over for the client when decode has verified *and* the first token is out.
    fn verified(&mut self, protocol: &AttemptProtocol) {
        let Record { timeline, verified, .. } = &mut *self.record;
        if protocol.verified.is_some() && timeline.phase() == Phase::Transfer {
            timeline.end_phase(clock::now());
            verified.clone_from(&protocol.verified);
        }
    }
}

/// What a reader wants between two tokens.
fn tpot_objective(shared: &Shared) -> Duration {
    Duration::from_secs_f64(shared.membership.choice().tpot_objective_ms / 1e3)
}

/// Waits for room with a slow client, within bounds.
async fn send(
    metrics: &Metrics,
    stall: Duration,
    client: &Client,
    event: Result<GenerationEvent, Error>,
) -> Result<(), Error> {
    let event = match client.try_send(event) {
        Ok(()) => return Ok(()),
        Err(TrySendError::Full(event) | TrySendError::Closed(event)) => event,
    };
    // Who did not take a token hears of its end in vain, too: that is the same stall.
    let first = event.is_ok();
    match Box::pin(tokio::time::timeout(stall, client.send(event))).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(Error::new(ErrorKind::Cancelled, "the client went away")),
        Err(_) => {
            if first {
                metrics.client_stalled();
            }
            Err(Error::new(ErrorKind::Cancelled, format!("the client took nothing for {stall:?}")))
        }
    }
}

fn refusal(why: &NoPair) -> Error {
    let kind = match why {
        NoPair::NoNode(_) | NoPair::Incompatible | NoPair::NoWay(_) | NoPair::OtherNumerics { .. } => {
            ErrorKind::Unavailable
        }
        NoPair::TooLarge { .. } => ErrorKind::InvalidArgument,
    };
    Error::new(kind, why.to_string())
}

#[cfg(test)]
pub(crate) mod tests;
