//! The way of one request through a decode node. Everything that a request holds lives in its future: dropping that at
//! any point cancels the hand-off, ends the sequence and returns the blocks.
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use tandem_engine::{FinishReason, KvLease, SequenceEvent, SequenceRequest};
use tandem_node::call::Events;
use tandem_node::request::{context, top_logprobs, until_deadline};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::decode_event::Event;
use tandem_proto::v1::{self, DecodeEvent, DecodeStart, Finished, RequestSpec, Reserved, Token};
use tandem_proto::{Error, ErrorKind, Incarnation};
use tandem_telemetry::Kind;

use crate::handoff;

/// Serves one call of `Decode.Generate` until its last event.
///
/// # Errors
/// What the call's status will be.
pub async fn disaggregated(
    node: Arc<Node>,
    start: DecodeStart,
    lease: Duration,
    events: Events<DecodeEvent>,
) -> Result<(), Error> {
    let accepted = Instant::now();
    let spec = start.spec.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "`start` without a spec"))?;
    let request = CheckedRequest::check(spec, node.engine.spec())?;
    let mut trace = node.trace();
    let generate = Generate { node: &node, request: &request, events: &events };
    let grant = GrantTerms { prefill: Incarnation(start.prefill_incarnation), lease, accepted };
    let running = generate.disaggregated(grant, &start.route_traceparent, &mut trace);
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
    let accepted = Instant::now();
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
    async fn disaggregated(&self, terms: GrantTerms, route: &str, trace: &mut Trace) -> Result<(), Error> {
        let route = if route.is_empty() { self.request.parent } else { context(route) };
        trace.open("kv.reserve", Kind::Internal, route, terms.accepted);
        let lease = self.reserve().await?;
        let incoming = handoff::grant(self.node, self.request, terms.prefill, &lease, terms.lease)?;
        let (ticket, granted) = (incoming.ticket(), Instant::now());
        trace.attr("tandem.kv.blocks", lease.blocks().len());
        trace.close(granted);
        // Until the seal tells the real parent and start.
        trace.open("kv.transfer", Kind::Consumer, route, granted);
        self.send(Event::Reserved(Reserved { blocks: ticket.blocks, ticket: ticket.encode_to_vec() })).await?;
        let received = handoff::receive(self.node, self.request, incoming, granted, trace).await?;
        let verified_at = received.verified.verified_at;
        trace.close(verified_at);
        self.send(Event::Verified(received.event(self.node))).await?;
        let first_token = received.verified.seal.first_token;
        if let Some(reason) = self.request.finished_by(first_token) {
            let spans = trace.finish(verified_at);
            return self.send(Event::Finished(Finished { reason: reason.into(), spans })).await;
        }
        self.decode(self.request.after_first(first_token, lease), verified_at, trace).await
    }

    async fn local(&self, accepted: Instant, trace: &mut Trace) -> Result<(), Error> {
        let lease = self.reserve().await?;
        self.decode(self.request.from_prompt(lease, self.request.max_tokens), accepted, trace).await
    }

    /// Room for everything that the request may come to hold, so that it never stops half-way for want of blocks.
    async fn reserve(&self) -> Result<Arc<KvLease>, Error> {
        let pool = self.node.engine.pool();
        let blocks = pool.blocks_for(self.request.worst_case_kv_tokens());
        Ok(Arc::new(pool.reserve(blocks).await?))
    }

    /// Runs the sequence and sends its tokens, one message a step.
    async fn decode(&self, sequence: SequenceRequest, start: Instant, trace: &mut Trace) -> Result<(), Error> {
        let server = trace.open("decode", Kind::Server, self.request.parent, start);
        trace.attr("tandem.request_id", self.request.id.as_str());
        trace.open("decode.queue", Kind::Internal, server, start);
        let mut sequence = self.node.engine.submit(sequence)?;
        let mut tokens = 0_u32;
        while let Some(event) = sequence.next().await {
            match event {
                SequenceEvent::Started { at } => trace.close(at),
                SequenceEvent::ChunkDone { tokens, at } => trace.event("chunk.done", at, [("tokens", tokens.into())]),
                SequenceEvent::Token { id, logprob, top, at } => {
                    if tokens == 0 {
                        trace.event("first_step", at, []);
                    }
                    tokens += 1;
                    let token = Token { token_id: id, logprob, top_logprobs: top_logprobs(top) };
                    self.send(Event::Token(token)).await?;
                }
                SequenceEvent::Finished { reason, at } => {
                    trace.attr("tandem.tokens", tokens);
                    let spans = trace.finish(at);
                    return self.send(Event::Finished(Finished { reason: wire(reason).into(), spans })).await;
                }
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the sequence without a reason"))
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        self.events.send(DecodeEvent { event: Some(event) }).await
    }
}

fn wire(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
    }
}
