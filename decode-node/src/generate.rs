//! The way of one request through a decode node. Everything that a request holds lives in its future: dropping that at
//! any point cancels the hand-off, ends the sequence and returns the blocks. A `stop` ends it well at any point.
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use tandem_engine::{FinishReason, KvLease, SequenceEvent, SequenceRequest};
use tandem_kvtransfer::Incoming;
use tandem_node::call::Events;
use tandem_node::request::{context, top_logprobs, until_deadline};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::decode_event::Event;
use tandem_proto::v1::{self, DecodeEvent, DecodeStart, Finished, RequestSpec, Reserved, Token};
use tandem_proto::{Error, ErrorKind, Incarnation};
use tandem_telemetry::{Kind, clock};

use crate::handoff::{self, Received};
use crate::service::Stop;

/// A sender lets go of a hand-off that nobody needs; the router, which knows, says so over another connection.
const ROUTERS_WORD: Duration = Duration::from_secs(1);

/// A reader at 100 ms a token, the router's measure of smoothness, notices a longer gap.
const STALL: Duration = Duration::from_millis(100);

/// Serves one call of `Decode.Generate` until its last event.
///
/// # Errors
/// What the call's status will be.
pub async fn disaggregated(
    node: Arc<Node>,
    start: DecodeStart,
    lease: Duration,
    events: Events<DecodeEvent>,
    mut stop: Stop,
) -> Result<(), Error> {
    let accepted = clock::now();
    let spec = start.spec.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "`start` without a spec"))?;
    let request = CheckedRequest::check(spec, node.engine.spec())?;
    let mut trace = node.trace();
    let generate = Generate { node: &node, request: &request, events: &events };
    let grant = GrantTerms { prefill: Incarnation(start.prefill_incarnation), lease, accepted };
    let running = generate.disaggregated(grant, &start.route_traceparent, &mut stop, &mut trace);
    let result = until_deadline(request.deadline, running).await;
    if let Err(error) = &result {
        trace.fail(&error.message);
    }
    result
}

/// Serves one call of `Decode.Local`: the whole request here.
///
/// # Errors
/// What the call's status will be.
pub async fn local(node: Arc<Node>, spec: RequestSpec, events: Events<DecodeEvent>) -> Result<(), Error> {
    let accepted = clock::now();
    let request = CheckedRequest::check(spec, node.engine.spec())?;
    let mut trace = node.trace();
    let generate = Generate { node: &node, request: &request, events: &events };
    let result = until_deadline(request.deadline, generate.local(accepted, &mut trace)).await;
    if let Err(error) = &result {
        trace.fail(&error.message);
    }
    result
}

struct Generate<'a> {
    node: &'a Node,
    request: &'a CheckedRequest,
    events: &'a Events<DecodeEvent>,
}

struct GrantTerms {
    prefill: Incarnation,
    lease: Duration,
    accepted: Instant,
}

impl Generate<'_> {
    async fn disaggregated(
        &self,
        terms: GrantTerms,
        route: &str,
        stop: &mut Stop,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let route = if route.is_empty() { self.request.parent } else { context(route) };
        trace.open("kv.reserve", Kind::Internal, route, terms.accepted);
        let lease = tokio::select! {
            biased;
            lease = self.reserve() => lease?,
            () = stop.without_handoff() => return self.finish(v1::FinishReason::Stop, 0, clock::now(), trace).await,
        };
        let incoming = handoff::grant(self.node, self.request, terms.prefill, &lease, terms.lease)?;
        self.node.figures.awaited(self.request.prompt.len().saturating_sub(lease.cached_tokens()));
        let (ticket, granted) = (incoming.ticket(), clock::now());
        trace.attr("tandem.kv.blocks", lease.blocks().len());
        trace.attr("tandem.kv.blocks_reused", ticket.held_blocks);
        trace.close(granted);
        // Until the seal tells the real parent and start.
        let transfer = trace.open("kv.transfer", Kind::Consumer, route, granted);
        let (blocks, held_blocks) = (ticket.held_blocks + ticket.blocks, ticket.held_blocks);
        self.send(Event::Reserved(Reserved { blocks, held_blocks, ticket: ticket.encode_to_vec() })).await?;
        let Some(received) = self.receive(incoming, granted, stop, trace).await? else {
            trace.discard();
            return self.finish(v1::FinishReason::Stop, 0, clock::now(), trace).await;
        };
        let verified_at = received.verified.verified_at;
        trace.close(verified_at);
        self.send(Event::Verified(received.event(self.node, transfer))).await?;
        let came = self.request.prompt.len().saturating_sub(lease.cached_tokens());
        self.node.figures.received(came, received.verified.bytes, received.verified.blocks, received.copy());
        let first_token = received.verified.seal.first_token;
        self.node.work.count_tokens(self.request.prompt.len(), 1);
        if let Some(reason) = self.request.finished_by(first_token) {
            return self.finish(reason, 0, verified_at, trace).await;
        }
        self.decode(self.request.after_first(first_token, lease), verified_at, stop, trace).await
    }

    /// The prompt's KV; `None` when the answer is over without it.
    async fn receive(
        &self,
        incoming: Incoming,
        granted: Instant,
        stop: &mut Stop,
        trace: &mut Trace,
    ) -> Result<Option<Received>, Error> {
        let received = tokio::select! {
            biased;
            received = handoff::receive(self.node, self.request, incoming, granted, trace) => received,
            () = stop.without_handoff() => return Ok(None),
        };
        match received {
            Err(error) if error.kind == ErrorKind::Cancelled => {
                let stopped = tokio::time::timeout(ROUTERS_WORD, stop.said()).await;
                stopped.map(|_| None).map_err(|_| error)
            }
            received => received.map(Some),
        }
    }

    async fn local(&self, accepted: Instant, trace: &mut Trace) -> Result<(), Error> {
        let lease = self.reserve().await?;
        self.node.work.count_tokens(self.request.prompt.len(), 0);
        self.decode(self.request.from_prompt(lease, self.request.max_tokens), accepted, &mut Stop::never(), trace).await
    }

    /// Room for everything that the request may come to hold, so that it never stops half-way for want of blocks. What
    /// the prefix cache has of the prompt is shared; the prefill node fills the rest of the prompt's blocks.
    async fn reserve(&self) -> Result<Arc<KvLease>, Error> {
        let lease = self.request.reserve(&self.node.engine, self.request.worst_case_kv_tokens()).await?;
        self.node.figures.looked_up(self.request.prompt.len(), lease.cached_tokens());
        Ok(lease)
    }

    /// Runs the sequence and sends its tokens, one message a step.
    async fn decode(
        &self,
        sequence: SequenceRequest,
        start: Instant,
        stop: &mut Stop,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let server = trace.open("decode", Kind::Server, self.request.parent, start);
        trace.attr("tandem.request_id", self.request.id.as_str());
        trace.open("decode.queue", Kind::Internal, server, start);
        // The first token of a whole request here is not late after another one.
        let (mut tokens, mut last) = (0_u32, (sequence.computed > 0).then_some(start));
        // Of a prompt that came by a hand-off, the prefill node says what was cached.
        let whole = sequence.computed < self.request.prompt.len();
        let cached_tokens = if whole { u32::try_from(sequence.lease.cached_tokens()).unwrap_or(u32::MAX) } else { 0 };
        let mut sequence = self.node.engine.submit(sequence)?;
        loop {
            let event = tokio::select! {
                biased;
                _ = stop.said() => {
                    // The engine's next step is without it.
                    drop(sequence);
                    let now = clock::now();
                    trace.event("stopped", now, [("tokens", tokens.into())]);
                    return self.finish(v1::FinishReason::Stop, cached_tokens, now, trace).await;
                }
                event = sequence.next() => event,
            };
            let Some(event) = event else { break };
            match event {
                SequenceEvent::Started { at } => trace.close(at),
                // Nobody asked.
                SequenceEvent::LayersDone { .. } => {}
                SequenceEvent::ChunkDone { tokens, at } => trace.event("chunk.done", at, [("tokens", tokens.into())]),
                SequenceEvent::Token { id, logprob, top, at } => {
                    if tokens == 0 {
                        trace.event("first_step", at, []);
                    }
                    stalled(trace, "engine", last.unwrap_or(at), at);
                    if let Some(last) = last {
                        let gap = at.saturating_duration_since(last);
                        self.node.figures.inter_token_seconds.observe(gap.as_secs_f64());
                    }
                    (tokens, last) = (tokens + 1, Some(at));
                    self.node.work.count_tokens(0, 1);
                    let sending = clock::now();
                    let token = Token { token_id: id, logprob, top_logprobs: top_logprobs(top) };
                    self.send(Event::Token(token)).await?;
                    stalled(trace, "reader", sending, clock::now());
                }
                SequenceEvent::Finished { reason, at } => {
                    trace.attr("tandem.tokens", tokens);
                    let time = at.saturating_duration_since(start);
                    self.node.figures.decode_seconds.observe(time.as_secs_f64());
                    return self.finish(wire(reason), cached_tokens, at, trace).await;
                }
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the sequence without a reason"))
    }

    async fn finish(
        &self,
        reason: v1::FinishReason,
        cached_tokens: u32,
        at: Instant,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let spans = trace.finish(at);
        self.send(Event::Finished(Finished { reason: reason.into(), spans, cached_tokens })).await
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        self.events.send(DecodeEvent { event: Some(event) }).await
    }
}

/// Notes a gap between tokens that a reader notices. `cause` is who made it: the engine that computed no step for this
/// sequence, or a reader who took no token.
fn stalled(trace: &mut Trace, cause: &'static str, from: Instant, to: Instant) {
    let gap = to.saturating_duration_since(from);
    if gap > STALL {
        trace.event("stall", to, [("gap_ms", (gap.as_secs_f64() * 1e3).into()), ("cause", cause.into())]);
    }
}

fn wire(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
    }
}
