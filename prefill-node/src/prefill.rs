//! The way of one request through a prefill node, in two halves that run side by side: this one computes the prompt and
//! says its first token; the other one (`delivery.rs`) hears of tickets and moves the KV. They share what is computed
//! so far, and who wants it.
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tandem_engine::{KvLease, SequenceEvent, SequenceRequest, StepShape, TokenLogprob};
use tandem_node::call::Events;
use tandem_node::request::{top_logprobs, until_deadline};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::prefill_event::Event;
use tandem_proto::v1::{Delivered, FirstToken, PrefillEvent, RequestSpec};
use tandem_proto::{Error, ErrorKind, TraceContext};
use tandem_telemetry::{Kind, clock, within_request};
use tokio::sync::watch;

use crate::commands::Commands;
use crate::delivery::Deliveries;
use crate::groups::{LayerCost, layer_groups};
use crate::handoff::{First, Kv, Sender};
use crate::link::{Links, Receiver};
use crate::plan::Progress;
use crate::pressure::{GivingWay, Pressure};
use crate::settings::{Push, Settings};

/// What all requests of a node share.
#[derive(Clone)]
pub struct Shared {
    /// The node.
    pub node: Arc<Node>,
    /// What it was told.
    pub settings: Settings,
    /// Who waits for blocks.
    pub pressure: Pressure,
    /// How fast KV leaves.
    pub links: Arc<Mutex<Links>>,
}

/// Whose ticket wants a prompt's KV.
type Wanted = Option<Receiver>;

/// Serves one call until its last event.
///
/// # Errors
/// What the call's status will be. Whatever the outcome, blocks are back when the last holder lets go of them.
pub async fn run(
    shared: Shared,
    spec: RequestSpec,
    mut commands: Commands,
    events: Events<PrefillEvent>,
) -> Result<(), Error> {
    let accepted = clock::now();
    let node = &shared.node;
    let request = CheckedRequest::check(spec, node.engine.spec())?;
    let mut trace = node.trace(&request.state);
    let server = trace.open("prefill", Kind::Server, request.parent, accepted);
    trace.attr("tandem.request_id", request.id.as_str());
    trace.attr("tandem.prompt_tokens", request.prompt.len());
    let prefill = Prefill { shared: &shared, request: &request, server };
    trace.note_lines_of(request.parent);
    let running = async {
        let running = prefill.run(accepted, &mut commands, &events, &mut trace);
        let result = until_deadline(request.deadline, running).await;
        if let Err(error) = &result {
            tracing::info!(request = request.id, kind = ?error.kind, error = error.message, "call failed");
            trace.fail(&error.message);
        }
        result
    };
    within_request(request.parent, running).await
}

struct Prefill<'a> {
    shared: &'a Shared,
    request: &'a CheckedRequest,
    server: TraceContext,
}

/// What the forward pass leaves beside the KV.
struct Sampled {
    first: First,
    logprob: f32,
    top: Vec<TokenLogprob>,
}

impl Prefill<'_> {
    async fn run(
        &self,
        accepted: Instant,
        commands: &mut Commands,
        events: &Events<PrefillEvent>,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let Shared { node, settings, links, .. } = self.shared;
        let (kv, wanted) = (watch::Sender::new(Kv::default()), watch::Sender::new(None));
        let sender = Sender { node, request: self.request, server: self.server, settings: *settings, links };
        let delivery = Deliveries::new(&sender, events, kv.subscribe(), &wanted, settings.redeliver_wait);
        let mut delivered = tokio::select! {
            biased;
            // Complete with its first token: nothing is delivered.
            complete = self.compute(accepted, &kv, wanted.subscribe(), events, trace) => {
                complete.map(|()| Delivered::default())
            }
            delivered = delivery.run(commands) => delivered,
        }?;
        delivered.spans.extend(trace.finish(clock::now()));
        events.send(event(Event::Delivered(delivered))).await
    }

    /// Computes the prompt, tells the client its first token, and keeps the KV for whoever wants it. Under pressure KV
    /// that nobody wants is given up, and computed again when somebody does. Ends when the answer is this one token.
    async fn compute(
        &self,
        accepted: Instant,
        kv: &watch::Sender<Kv>,
        mut wanted: watch::Receiver<Wanted>,
        events: &Events<PrefillEvent>,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let (mut queued, mut told) = (accepted, None);
        loop {
            trace.open("prefill.queue", Kind::Internal, self.server, queued);
            events.member().reads(self.request.prompt.len());
            let lease = self.reserve(&mut wanted).await?;
            let cached_tokens = lease.cached_tokens();
            events.member().reads(self.request.prompt.len().saturating_sub(cached_tokens));
            let figures = &self.shared.node.figures;
            figures.looked_up(self.request.prompt.len(), cached_tokens);
            figures.preemptions.inc_by(u64::from(told.is_some()));
            let progress = Progress { tokens: cached_tokens, layers: 0 };
            kv.send_replace(Kv { lease: Some(lease.clone()), progress, told: told.is_some(), ..Kv::default() });
            let Sampled { first, logprob, top } = self.forward(lease, kv, &wanted, trace).await?;
            events.member().has_read();
            if let Some(told) = told {
                check_same(told, first.token)?;
            } else {
                let finished = self.request.finished_by(first.token);
                let event = Event::FirstToken(FirstToken {
                    token_id: first.token,
                    logprob,
                    finished: finished.map(Into::into),
                    cached_tokens: u32::try_from(cached_tokens).unwrap_or(u32::MAX),
                    top_logprobs: top_logprobs(top),
                });
                events.send(self::event(event)).await?;
                if finished.is_some() {
                    return Ok(());
                }
            }
            told = Some(first.token);
            // Only now: a delivery must not overtake the first token.
            kv.send_modify(|kv| (kv.first, kv.told) = (Some(first), true));
            let giving_way = self.pressed(&mut wanted).await;
            kv.send_replace(Kv { told: true, ..Kv::default() });
            trace.event("blocks.yielded", clock::now(), []);
            giving_way.done().await;
            until(&mut wanted, true).await;
            queued = clock::now();
        }
    }

    /// Waits for the prompt's blocks; while it does so with a ticket, others give way.
    async fn reserve(&self, wanted: &mut watch::Receiver<Wanted>) -> Result<Arc<KvLease>, Error> {
        let mut reserving = pin!(self.request.reserve(&self.shared.node.engine, self.request.prompt.len()));
        loop {
            // Who finds room at once puts nobody under pressure.
            tokio::select! {
                biased;
                lease = &mut reserving => return lease,
                () = std::future::ready(()) => {}
            }
            let now = wanted.borrow_and_update().is_some();
            let _pressure = now.then(|| self.shared.pressure.add());
            tokio::select! {
                biased;
                lease = &mut reserving => return lease,
                () = until(wanted, !now) => {}
            }
        }
    }

    /// Reads the prompt into the blocks of `lease`, and says in `kv` how far it is.
    async fn forward(
        &self,
        lease: Arc<KvLease>,
        kv: &watch::Sender<Kv>,
        wanted: &watch::Receiver<Wanted>,
        trace: &mut Trace,
    ) -> Result<Sampled, Error> {
        let (cached, report_layers) = (lease.cached_tokens(), self.groups(&lease, wanted.borrow().as_ref()));
        let request = SequenceRequest { report_layers, ..self.request.from_prompt(lease, 1) };
        let mut sequence = self.shared.node.engine.submit(request)?;
        while let Some(event) = sequence.next().await {
            match event {
                SequenceEvent::Started { at } => {
                    trace.close(at);
                    let forward = trace.open("prefill.forward", Kind::Internal, self.server, at);
                    trace.attr("tandem.cached_tokens", cached);
                    kv.send_modify(|kv| kv.forward = Some(forward));
                }
                SequenceEvent::ChunkDone { tokens, at } => {
                    trace.event("chunk.done", at, [("tokens", tokens.into())]);
                    kv.send_modify(|kv| kv.progress = Progress { tokens, layers: 0 });
                }
                // A sequence of one new token does not grow: on this node nobody has to give way.
                SequenceEvent::Preempted { .. } | SequenceEvent::Resumed { .. } => {
                    return Err(Error::new(ErrorKind::Internal, "the engine took a prompt's blocks away"));
                }
                SequenceEvent::LayersDone { layers, .. } => kv.send_modify(|kv| kv.progress.layers = layers),
                SequenceEvent::Token { id, logprob, top, at, .. } => {
                    trace.close(at);
                    return Ok(Sampled { first: First { token: id, at }, logprob, top });
                }
                SequenceEvent::Finished { .. } => break,
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the prompt without a token"))
    }

    /// After which layers of the last chunk something shall leave. Guessed before it is known how the prompt will be
    /// cut and who else is in its steps, and perhaps before it is known who wants it: a wrong guess costs a few frames.
    fn groups(&self, lease: &KvLease, receiver: Option<&Receiver>) -> Vec<usize> {
        let Shared { node, settings, links, .. } = self.shared;
        let spec = node.engine.spec();
        let one = self.request.max_tokens == 1;
        if one || settings.push == Push::Whole || node.arena.units() == 1 {
            return Vec::new();
        }
        let (tokens, cached) = (self.request.prompt.len(), lease.cached_tokens());
        let last_chunk = (tokens - cached - 1) % node.max_step_tokens.max(1) + 1;
        let start = tokens - last_chunk;
        let step_ms = node.engine.load().step_cost.predict_ms(StepShape::prompt(start, last_chunk));
        let (blocks, final_before) = (tokens.div_ceil(spec.block_tokens), start / spec.block_tokens);
        layer_groups(&LayerCost {
            layers: spec.layers,
            layer_bytes: (blocks - final_before) * spec.block_bytes / spec.layers,
            total_bytes: blocks * spec.block_bytes,
            compute: Duration::from_secs_f64((step_ms / 1e3 / spec.layers as f64).clamp(0.0, 3600.0)),
            bytes_per_second: links.lock().unwrap_or_else(PoisonError::into_inner).bytes_per_second(receiver),
        })
    }

    /// Ready when blocks that nobody wants are needed by those who have a ticket.
    async fn pressed(&self, wanted: &mut watch::Receiver<Wanted>) -> GivingWay {
        loop {
            until(wanted, false).await;
            tokio::select! {
                biased;
                () = until(wanted, true) => {}
                giving_way = self.shared.pressure.felt() => return giving_way,
            }
        }
    }
}

/// Ready when somebody wants the KV, or (`value` is false) nobody does.
async fn until(wanted: &mut watch::Receiver<Wanted>, value: bool) {
    if wanted.wait_for(|wanted| wanted.is_some() == value).await.is_err() {
        // The other half has ended, and with it the call.
        std::future::pending().await
    }
}

/// The client has the `first` token already: an answer that goes on after another one would be of two minds.
fn check_same(first: u32, again: u32) -> Result<(), Error> {
    if first == again {
        return Ok(());
    }
    let message = format!("the prompt was computed twice, with first token {first} and then {again}");
    Err(Error::new(ErrorKind::Internal, message))
}

fn event(event: Event) -> PrefillEvent {
    PrefillEvent { event: Some(event) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_is_computed_twice_has_one_first_token() {
        assert!(check_same(7, 7).is_ok());
        assert_eq!(check_same(7, 8).map_err(|error| error.kind), Err(ErrorKind::Internal));
    }
}
