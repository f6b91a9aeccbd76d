//! The way of one request through a prefill node. The forward pass starts at once; the ticket may come before, during
//! or after it, and the connection to the decode node is opened as soon as it does.
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Instant;

use tandem_engine::{KvLease, SequenceEvent, TokenLogprob};
use tandem_node::call::Events;
use tandem_node::request::{top_logprobs, until_deadline};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::prefill_event::Event;
use tandem_proto::v1::{Delivered, FirstToken, PrefillEvent};
use tandem_proto::{Error, ErrorKind, TraceContext};
use tandem_telemetry::{Kind, clock};

use crate::handoff::Handoff;
use crate::pressure::Pressure;
use crate::service::{Commands, Word};

/// Serves one call until its last event.
///
/// # Errors
/// What the call's status will be. Whatever the outcome, blocks are back when the last holder lets go of them.
pub async fn run(
    node: Arc<Node>,
    pressure: Pressure,
    mut commands: Commands,
    events: Events<PrefillEvent>,
) -> Result<(), Error> {
    let accepted = clock::now();
    let request = CheckedRequest::check(commands.start().await?, node.engine.spec())?;
    let mut trace = node.trace();
    let server = trace.open("prefill", Kind::Server, request.parent, accepted);
    trace.attr("tandem.request_id", request.id.as_str());
    trace.attr("tandem.prompt_tokens", request.prompt.len());
    let prefill = Prefill { node: &node, pressure: &pressure, request: &request, server };
    let result = until_deadline(request.deadline, prefill.run(accepted, &mut commands, &events, &mut trace)).await;
    if let Err(error) = &result {
        trace.fail(&error.message);
    }
    result
}

struct Prefill<'a> {
    node: &'a Arc<Node>,
    pressure: &'a Pressure,
    request: &'a CheckedRequest,
    server: TraceContext,
}

/// What the forward pass leaves: a token, and the prompt's KV.
struct Computed {
    token: u32,
    logprob: f32,
    top: Vec<TokenLogprob>,
    lease: Arc<KvLease>,
    forward: TraceContext,
}

/// Where the KV goes.
enum Way<'a> {
    To(Box<Handoff<'a>>),
    /// Nowhere: the answer is complete.
    Nowhere,
    /// The router will not say it any more.
    Unknown,
}

/// Outcome of [`Prefill::connect`].
type Connected<'a> = Result<Way<'a>, Error>;

impl Prefill<'_> {
    async fn run(
        &self,
        accepted: Instant,
        commands: &mut Commands,
        events: &Events<PrefillEvent>,
        trace: &mut Trace,
    ) -> Result<(), Error> {
        let mut connecting = pin!(self.connect(commands));
        let mut handoff = None;
        let mut computed = self.compute(accepted, connecting.as_mut(), &mut handoff, trace).await?;
        let finished = self.request.finished_by(computed.token);
        let first = FirstToken {
            token_id: computed.token,
            logprob: computed.logprob,
            finished: finished.map(Into::into),
            cached_tokens: u32::try_from(computed.lease.cached_tokens()).unwrap_or(u32::MAX),
            top_logprobs: top_logprobs(std::mem::take(&mut computed.top)),
        };
        events.send(event(Event::FirstToken(first))).await?;
        if finished.is_some() {
            return nothing_delivered(events, trace).await;
        }
        if handoff.is_none() {
            tokio::select! {
                biased;
                connected = &mut connecting => handoff = Some(connected?),
                () = self.pressure.felt() => {
                    trace.event("blocks.yielded", clock::now(), []);
                    let told = computed.token;
                    drop(computed);
                    handoff = Some(connecting.as_mut().await?);
                    if matches!(handoff, Some(Way::Nowhere)) {
                        return nothing_delivered(events, trace).await;
                    }
                    let again = self.compute(clock::now(), connecting, &mut handoff, trace).await?;
                    check_same(told, again.token)?;
                    computed = again;
                }
            }
        }
        let handoff = match handoff {
            Some(Way::To(handoff)) => handoff,
            Some(Way::Nowhere) => return nothing_delivered(events, trace).await,
            Some(Way::Unknown) | None => {
                let message = "the router closed its side of the call before it sent a ticket";
                return Err(Error::new(ErrorKind::Cancelled, message));
            }
        };
        let handoff_id = handoff.id().to_vec();
        let receipt = handoff.deliver(computed.token, computed.lease, computed.forward, trace).await?;
        let delivered = Delivered {
            bytes: receipt.bytes,
            blocks: receipt.blocks,
            descriptors: receipt.descriptors,
            transfer_ms: receipt.elapsed.as_secs_f64() * 1e3,
            spans: trace.finish(clock::now()),
            handoff_id,
        };
        events.send(event(Event::Delivered(delivered))).await
    }

    /// Waits for the ticket and opens the way to the node that granted it.
    async fn connect<'c>(&'c self, commands: &mut Commands) -> Connected<'c> {
        match commands.word().await? {
            Word::Deliver(ticket) => Ok(Way::To(Box::new(Handoff::open(self.node, self.request, ticket).await?))),
            Word::Stop => Ok(Way::Nowhere),
            Word::Closed => Ok(Way::Unknown),
        }
    }

    /// Reserves the prompt's blocks and fills them, while the ticket may come into `handoff`. A ticket that cannot be
    /// used ends the request at once, not after the forward pass.
    async fn compute<'c>(
        &self,
        queued: Instant,
        mut connecting: Pin<&mut impl Future<Output = Connected<'c>>>,
        handoff: &mut Option<Way<'c>>,
        trace: &mut Trace,
    ) -> Result<Computed, Error> {
        trace.open("prefill.queue", Kind::Internal, self.server, queued);
        let mut reserving = pin!(self.request.reserve(&self.node.engine, self.request.prompt.len()));
        let lease = loop {
            let _pressure = handoff.as_ref().map(|_| self.pressure.add());
            tokio::select! {
                biased;
                lease = &mut reserving => break lease?,
                connected = &mut connecting, if handoff.is_none() => *handoff = Some(connected?),
            }
        };
        let mut forward = pin!(self.forward(lease, trace));
        loop {
            tokio::select! {
                biased;
                connected = &mut connecting, if handoff.is_none() => *handoff = Some(connected?),
                computed = &mut forward => return computed,
            }
        }
    }

    /// Reads the prompt into the blocks of `lease`.
    async fn forward(&self, lease: Arc<KvLease>, trace: &mut Trace) -> Result<Computed, Error> {
        let mut sequence = self.node.engine.submit(self.request.from_prompt(lease.clone(), 1))?;
        let mut forward = self.server;
        while let Some(event) = sequence.next().await {
            match event {
                SequenceEvent::Started { at } => {
                    trace.close(at);
                    forward = trace.open("prefill.forward", Kind::Internal, self.server, at);
                    trace.attr("tandem.cached_tokens", lease.cached_tokens());
                }
                SequenceEvent::ChunkDone { tokens, at } => {
                    trace.event("chunk.done", at, [("tokens", tokens.into())]);
                }
                SequenceEvent::Token { id, logprob, top, at } => {
                    trace.close(at);
                    return Ok(Computed { token: id, logprob, top, lease, forward });
                }
                SequenceEvent::Finished { .. } => break,
                SequenceEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::new(ErrorKind::Internal, "the engine ended the prompt without a token"))
    }
}

/// The last message of an answer that was complete with its first token.
async fn nothing_delivered(events: &Events<PrefillEvent>, trace: &mut Trace) -> Result<(), Error> {
    let spans = trace.finish(clock::now());
    events.send(event(Event::Delivered(Delivered { spans, ..Delivered::default() }))).await
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
