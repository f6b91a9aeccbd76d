//! The way of one request through a decode node. Everything that a request holds lives in its future: dropping that at
//! any point cancels the hand-off, ends the sequence and returns the blocks. A `stop` ends it well at any point.
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use tandem_engine::{Drafts, FinishReason, KvLease, SequenceEvent, SequenceRequest, SequenceStream, TokenLogprob};
use tandem_kvtransfer::Incoming;
use tandem_node::call::Events;
use tandem_node::figures::{Answer, Copied};
use tandem_node::request::{context, top_logprobs, until_deadline};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::decode_event::Event;
use tandem_proto::v1::{self, DecodeEvent, DecodeStart, Finished, FirstToken, Reserved, Token};
use tandem_proto::{Error, ErrorKind, Incarnation, TraceContext};
use tandem_telemetry::{Kind, clock, within_request};

use crate::handoff::{self, Received, Terms};
use crate::stop::Stop;

/// A sender lets go of a hand-off that nobody needs; the router, which knows, says so over another connection.
const ROUTERS_WORD: Duration = Duration::from_secs(1);

/// Serves one call until its last event.
///
/// # Errors
/// What the call's status will be.
pub async fn serve(
    node: Arc<Node>,
    start: DecodeStart,
    lease: Duration,
    events: Events<DecodeEvent>,
    mut stop: Stop,
) -> Result<(), Error> {
    let accepted = clock::now();
    let spec = start.spec.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "`start` without a spec"))?;
    let request = CheckedRequest::check(spec, node.engine.spec())?.within_memory(node.engine.spec());
    let mut trace = node.trace(&request.state);
    trace.note_lines_of(request.parent);
    let generate = Generate { node: &node, request: &request, events: &events, accepted };
    let running = async {
        match start.local {
            Some(local) => generate.local(&local.traceparent, &mut stop, &mut trace).await,
            None => {
                let prefill = Incarnation(start.prefill_incarnation);
                let terms = Terms { prefill, transport: start.transport, lease };
                generate.disaggregated(terms, &start.request_traceparent, &mut stop, &mut trace).await
            }
        }
    };
    let running = async {
        let result = until_deadline(request.deadline, running).await;
        result.inspect_err(|error| {
            tracing::info!(request = request.id, kind = ?error.kind, error = error.message, "call failed");
        })
    };
    let result = within_request(request.parent, running).await;
    if let Err(error) = &result {
        trace.fail(&error.message);
    }
    result
}

struct Generate<'a> {
    node: &'a Node,
    request: &'a CheckedRequest,
    events: &'a Events<DecodeEvent>,
    accepted: Instant,
}

/// An answer whose first token is here.
#[derive(Clone, Copy)]
struct Begun {
    first: Instant,
    /// Time in the node's queues so far.
    queued: Duration,
}

impl Generate<'_> {
    async fn disaggregated(&self, terms: Terms, route: &str, stop: &mut Stop, trace: &mut Trace) -> Result<(), Error> {
        let route = self.parent(route);
        trace.open("kv.reserve", Kind::Internal, route, self.accepted);
        let lease = tokio::select! {
            biased;
            lease = self.reserve() => lease?,
            () = stop.without_handoff() => return self.finish(v1::FinishReason::Stop, clock::now(), trace).await,
        };
        let incoming = handoff::grant(self.node, self.request, &terms, &lease)?;
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
            return self.finish(v1::FinishReason::Stop, clock::now(), trace).await;
        };
        let verified_at = received.verified.verified_at;
        trace.close(verified_at);
        self.send(Event::Verified(received.event(transfer))).await?;
        let came = self.request.prompt.len().saturating_sub(lease.cached_tokens());
        self.node.figures.received(&Copied {
            tokens: came,
            bytes: received.verified.bytes,
            descriptors: received.verified.descriptors,
            time: received.copy(),
            trace_id: self.request.parent.trace_id,
        });
        let first_token = received.verified.seal.first_token;
        self.node.work.count_tokens(self.request.prompt.len(), 1);
        let begun = Begun { first: verified_at, queued: granted.saturating_duration_since(self.accepted) };
        if let Some(reason) = self.request.finished_by(first_token) {
            self.answered(reason, begun, (1, verified_at), verified_at);
            return self.finish(reason, verified_at, trace).await;
        }
        self.decode(self.request.after_first(first_token, lease), begun, stop, trace).await
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

    /// The whole request here. Its first half has the spans that it would have on a prefill node.
    async fn local(&self, parent: &str, stop: &mut Stop, trace: &mut Trace) -> Result<(), Error> {
        let server = trace.open("prefill", Kind::Server, self.parent(parent), self.accepted);
        trace.attr("tandem.request_id", self.request.id.as_str());
        trace.attr("tandem.prompt_tokens", self.request.prompt.len());
        trace.open("prefill.queue", Kind::Internal, server, self.accepted);
        self.events.member().reads(self.request.prompt.len());
        let lease = tokio::select! {
            biased;
            lease = self.reserve() => lease?,
            _ = stop.said() => return self.finish(v1::FinishReason::Stop, clock::now(), trace).await,
        };
        let cached_tokens = u32::try_from(lease.cached_tokens()).unwrap_or(u32::MAX);
        self.events.member().reads(self.request.prompt.len().saturating_sub(lease.cached_tokens()));
        let mut sequence = self.node.engine.submit(self.request.from_prompt(lease, self.request.max_tokens))?;
        let begun = tokio::select! {
            biased;
            begun = self.read(&mut sequence, cached_tokens, server, trace) => Some(begun?),
            _ = stop.said() => None,
        };
        let Some(begun) = begun else {
            return self.finish(v1::FinishReason::Stop, clock::now(), trace).await;
        };
        self.open_decode(begun.first, trace);
        self.relay(sequence, begun, stop, trace).await
    }

    /// Reads the prompt and sends the first token.
    async fn read(
        &self,
        sequence: &mut SequenceStream,
        cached_tokens: u32,
        server: TraceContext,
        trace: &mut Trace,
    ) -> Result<Begun, Error> {
        let mut queued = Duration::ZERO;
        while let Some(event) = sequence.next().await {
            match event {
                SequenceEvent::Started { at } => {
                    queued = at.saturating_duration_since(self.accepted);
                    trace.close(at);
                    trace.open("prefill.forward", Kind::Internal, server, at);
                    trace.attr("tandem.cached_tokens", cached_tokens);
                }
                // Nobody asked.
                SequenceEvent::LayersDone { .. } => {}
                SequenceEvent::Preempted { at } => trace.event("preempted", at, [("tokens", 0_u32.into())]),
                SequenceEvent::Resumed { at } => trace.event("resumed", at, []),
                SequenceEvent::ChunkDone { tokens, at } => trace.event("chunk.done", at, [("tokens", tokens.into())]),
                SequenceEvent::Token { id, logprob, top, at, .. } => {
                    // The forward pass, and the span of the prompt's half of the call.
                    trace.close(at);
                    trace.close(at);
                    self.events.member().has_read();
                    self.node.work.count_tokens(self.request.prompt.len(), 1);
                    let top_logprobs = top_logprobs(top);
                    let first = FirstToken { token_id: id, logprob, finished: None, cached_tokens, top_logprobs };
                    self.send(Event::FirstToken(first)).await?;
                    return Ok(Begun { first: at, queued });
                }
                SequenceEvent::Finished { .. } => break,
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the prompt without a token"))
    }

    /// Room for the prompt and its first token. What the prefix cache has of the prompt is shared; the prefill node
    /// fills the rest of the prompt's blocks, and the engine takes those of the answer as it grows.
    async fn reserve(&self) -> Result<Arc<KvLease>, Error> {
        let lease = self.request.reserve(&self.node.engine, self.request.first_kv_tokens()).await?;
        self.node.figures.looked_up(self.request.prompt.len(), lease.cached_tokens());
        Ok(lease)
    }

    /// Runs a sequence whose prompt is verified.
    async fn decode(
        &self,
        sequence: SequenceRequest,
        begun: Begun,
        stop: &mut Stop,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let server = self.open_decode(begun.first, trace);
        trace.open("decode.queue", Kind::Internal, server, begun.first);
        self.relay(self.node.engine.submit(sequence)?, begun, stop, trace).await
    }

    fn open_decode(&self, start: Instant, trace: &mut Trace) -> TraceContext {
        let server = trace.open("decode", Kind::Server, self.request.parent, start);
        trace.attr("tandem.request_id", self.request.id.as_str());
        server
    }

    /// Sends the tokens behind the first one, one message a step.
    async fn relay(
        &self,
        mut sequence: SequenceStream,
        mut begun: Begun,
        stop: &mut Stop,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let (mut tokens, mut last, mut all) = (0_u32, begun.first, Drafts::default());
        loop {
            let event = tokio::select! {
                biased;
                _ = stop.said() => {
                    // The engine's next step is without it.
                    drop(sequence);
                    let now = clock::now();
                    trace.event("stopped", now, [("tokens", tokens.into())]);
                    with_drafts(trace, all);
                    self.answered(v1::FinishReason::Stop, begun, (tokens + 1, last), now);
                    return self.finish(v1::FinishReason::Stop, now, trace).await;
                }
                event = sequence.next() => event,
            };
            let Some(event) = event else { break };
            match event {
                SequenceEvent::Started { at } => {
                    begun.queued += at.saturating_duration_since(begun.first);
                    trace.close(at);
                }
                // Nobody asked.
                SequenceEvent::LayersDone { .. } => {}
                SequenceEvent::Preempted { at } => trace.event("preempted", at, [("tokens", tokens.into())]),
                SequenceEvent::Resumed { at } => trace.event("resumed", at, []),
                SequenceEvent::ChunkDone { tokens, at } => trace.event("chunk.done", at, [("tokens", tokens.into())]),
                SequenceEvent::Token { id, logprob, top, drafts, at } => {
                    if tokens == 0 {
                        trace.event("first_step", at, []);
                    }
                    self.stalled(trace, "engine", last, at);
                    let gap = at.saturating_duration_since(last);
                    self.node.figures.next_token(gap, self.request.parent.trace_id);
                    (tokens, last) = (tokens + 1, at);
                    self.node.work.count_tokens(0, 1);
                    self.node.figures.drafted(drafts);
                    all += drafts;
                    let sending = clock::now();
                    self.send(Event::Token(wire_token(id, logprob, top, drafts))).await?;
                    self.stalled(trace, "reader", sending, clock::now());
                }
                SequenceEvent::Finished { reason, at } => {
                    trace.attr("tandem.tokens", tokens);
                    with_drafts(trace, all);
                    self.answered(wire(reason), begun, (tokens + 1, last), at);
                    return self.finish(wire(reason), at, trace).await;
                }
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the sequence without a reason"))
    }

    /// Counts an answer that ended well after so many tokens, the last of them at that time.
    fn answered(&self, reason: v1::FinishReason, begun: Begun, (tokens, last): (u32, Instant), ended: Instant) {
        let (Begun { first, queued }, accepted) = (begun, self.accepted);
        let (prompt_tokens, trace_id) = (self.request.prompt.len(), self.request.parent.trace_id);
        let answer = Answer { prompt_tokens, tokens, accepted, queued, first, last, ended, trace_id };
        self.node.figures.answers.count(&answer, reason);
    }

    async fn finish(&self, reason: v1::FinishReason, at: Instant, trace: &mut Trace) -> Result<(), Error> {
        let spans = trace.finish(at);
        self.send(Event::Finished(Finished { reason: reason.into(), spans })).await
    }

    /// The span that `traceparent` names; without it that of the request.
    fn parent(&self, traceparent: &str) -> TraceContext {
        if traceparent.is_empty() { self.request.parent } else { context(traceparent) }
    }

    /// Notes a gap between tokens that a reader notices. `cause` is who made it: the engine that computed no step for
    /// this sequence, or a reader who took no token.
    fn stalled(&self, trace: &mut Trace, cause: &'static str, from: Instant, to: Instant) {
        let gap = to.saturating_duration_since(from);
        if gap > self.request.stall {
            trace.event("stall", to, [("gap_ms", (gap.as_secs_f64() * 1e3).into()), ("cause", cause.into())]);
        }
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        self.events.send(DecodeEvent { event: Some(event) }).await
    }
}

fn with_drafts(trace: &mut Trace, Drafts { drafted, accepted }: Drafts) {
    trace.attr("tandem.drafted_tokens", drafted);
    trace.attr("tandem.accepted_tokens", accepted);
}

fn wire_token(token_id: u32, logprob: f32, top: Vec<TokenLogprob>, drafts: Drafts) -> Token {
    let Drafts { drafted: drafted_tokens, accepted: accepted_tokens } = drafts;
    Token { token_id, logprob, top_logprobs: top_logprobs(top), drafted_tokens, accepted_tokens }
}

fn wire(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
    }
}
