//! The two calls of a request. A leg is a stream of the node's events; dropping it resets the call, which cancels the
//! work on the node. Opening is part of the stream, so that a slow connect of one leg never delays the other.
use std::pin::Pin;
use std::time::Duration;

use futures::stream::{BoxStream, Peekable};
use futures::{FutureExt, Stream, StreamExt};
use tandem_proto::v1::{self, decode_command, decode_event, prefill_command, prefill_event};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use crate::limits::MOST_ATTEMPTS;
use crate::membership::{Node, Unhurried};
use crate::record::timeline::Phase;

/// Events of one leg. After an error or the end nothing follows. What is said to the node leaves when they are polled.
pub type Events<T> = Peekable<BoxStream<'static, Result<T, Status>>>;

/// The way of words to a node. They are boxed: a channel makes room for 32 of them at once, and a request sends two or
/// three.
struct Commands<T>(mpsc::Sender<Box<T>>);

impl<T: Send + 'static> Commands<T> {
    /// With room for all that a request ever sends.
    fn new(room: usize) -> (Self, impl Stream<Item = T> + Send + 'static) {
        let (sender, receiver) = mpsc::channel(room);
        (Self(sender), ReceiverStream::new(receiver).map(|command| *command))
    }

    /// A call that has ended says so in its events.
    fn say(&self, command: T) {
        let _ = self.0.try_send(Box::new(command));
    }
}

/// The prefill call.
pub struct PrefillLeg {
    /// What the node says.
    pub events: Events<v1::PrefillEvent>,
    commands: Commands<v1::PrefillCommand>,
}

impl PrefillLeg {
    /// For a computation; the ticket follows by [`Self::deliver`].
    pub fn open(node: &Node, spec: v1::RequestSpec) -> Self {
        // A start, a ticket for each attempt, a stop.
        let (commands, outbound) = Commands::new(2 + MOST_ATTEMPTS as usize);
        commands.say(v1::PrefillCommand { command: Some(prefill_command::Command::Start(spec)) });
        let mut client = v1::prefill_client::PrefillClient::new(node.client())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let events = async_stream::try_stream! {
            let mut inbound = client.prefill(Request::new(outbound)).await?.into_inner();
            while let Some(event) = inbound.message().await? {
                yield event;
            }
        };
        Self { events: events.boxed().peekable(), commands }
    }

    /// Hands the call to its connection now.
    pub fn begin(&mut self) {
        push(&mut self.events);
    }

    /// Hands decode's ticket over, in place of an earlier one, at the next look at the events. A call that has ended
    /// says so in these.
    pub fn deliver(&self, ticket: Vec<u8>) {
        self.say(prefill_command::Command::Deliver(v1::Deliver { ticket }));
    }

    /// There will be no ticket: the answer is complete.
    pub fn stop(&mut self) {
        self.say(prefill_command::Command::Stop(v1::PrefillStop {}));
        push(&mut self.events);
    }

    fn say(&self, command: prefill_command::Command) {
        self.commands.say(v1::PrefillCommand { command: Some(command) });
    }
}

/// The decode call.
pub struct DecodeLeg {
    /// What the node says.
    pub events: Events<v1::DecodeEvent>,
    /// Open as long as the leg: a closed command stream would look like a client that left.
    commands: Commands<v1::DecodeCommand>,
}

impl DecodeLeg {
    /// For a reservation.
    pub fn open(node: &Node, start: v1::DecodeStart) -> Self {
        // A start and a stop.
        let (commands, outbound) = Commands::new(2);
        // Else the first token comes from the prefill node, which computes the prompt meanwhile.
        let waits = start.local.is_some();
        commands.say(v1::DecodeCommand { command: Some(decode_command::Command::Start(start)) });
        let mut client = v1::decode_client::DecodeClient::new(node.client())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let events = async_stream::try_stream! {
            let mut request = Request::new(outbound);
            if !waits {
                request.extensions_mut().insert(Unhurried);
            }
            let mut inbound = client.generate(request).await?.into_inner();
            while let Some(event) = inbound.message().await? {
                yield event;
            }
        };
        Self { events: events.boxed().peekable(), commands }
    }

    /// Hands the call to its connection now.
    pub fn begin(&mut self) {
        push(&mut self.events);
    }

    /// The answer is complete: the node ends its work well, and reports. With `no_handoff` it waits for no KV either.
    pub fn stop(&mut self, no_handoff: bool) {
        let stop = v1::DecodeStop { no_handoff };
        self.commands.say(v1::DecodeCommand { command: Some(decode_command::Command::Stop(stop)) });
        push(&mut self.events);
    }
}

/// Lets what was said leave now. Nothing is lost: an event that is there already stays, and the next look is woken as
/// ever.
fn push<T>(events: &mut Events<T>) {
    let _ = Pin::new(events).peek().now_or_never();
}

/// The legs of an answer that ended before its nodes did: what they have still to say are their spans.
pub struct Rest {
    /// `None` when it has reported already.
    pub prefill: Option<PrefillLeg>,
    /// Stopped; `None` when there was none.
    pub decode: Option<DecodeLeg>,
}

impl Rest {
    /// The nodes' spans, packed. A leg that does not report `within` this time is cancelled.
    pub async fn spans(self, within: Duration) -> Vec<u8> {
        let Self { prefill, decode } = self;
        let delivered = async {
            let mut prefill = prefill?;
            while let Some(Ok(event)) = prefill.events.next().await {
                if let Some(prefill_event::Event::Delivered(delivered)) = event.event {
                    return Some(delivered.spans);
                }
            }
            None
        };
        let finished = async {
            let mut decode = decode?;
            while let Some(Ok(event)) = decode.events.next().await {
                if let Some(decode_event::Event::Finished(finished)) = event.event {
                    return Some(finished.spans);
                }
            }
            None
        };
        let within = |report| tokio::time::timeout(within, report);
        let (delivered, finished) = tokio::join!(within(delivered.boxed()), within(finished.boxed()));
        [delivered, finished].map(|spans| spans.ok().flatten().unwrap_or_default()).concat()
    }
}

/// The client's error for a leg that failed: which node, when, and what the client can do.
pub fn failed(node: &Node, phase: Phase, cause: &Error, tokens_sent: bool) -> Error {
    use ErrorKind::*;
    let kind = match cause.kind {
        DeadlineExceeded => DeadlineExceeded,
        _ if tokens_sent => Aborted,
        kind @ (InvalidArgument | Overloaded) => kind,
        _ => Unavailable,
    };
    let (role, id) = (node.role.as_str(), &node.info.node_id);
    Error::new(kind, format!("{role} node {id} failed during {}: {}", phase.as_str(), cause.message))
}
