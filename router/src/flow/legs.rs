//! The two calls of a request. A leg is a stream of the node's events; dropping it resets the call, which cancels the
//! work on the node. Opening is part of the stream, so that a slow connect of one leg never delays the other.
use std::pin::Pin;

use futures::Stream;
use tandem_proto::v1::{self, decode_command, prefill_command};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use super::timeline::Phase;
use crate::membership::Node;

/// Events of one leg. After an error or the end nothing follows.
pub type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The prefill call.
pub struct PrefillLeg {
    /// What the node says.
    pub events: Events<v1::PrefillEvent>,
    commands: mpsc::Sender<v1::PrefillCommand>,
}

impl PrefillLeg {
    /// Starts the computation at once; the ticket follows by [`Self::deliver`].
    pub fn open(node: &Node, spec: v1::RequestSpec) -> Self {
        // Room for both commands that a request ever sends.
        let (commands, outbound) = mpsc::channel(2);
        let start = v1::PrefillCommand { command: Some(prefill_command::Command::Start(spec)) };
        // The channel is new and has room.
        let _ = commands.try_send(start);
        let mut client = v1::prefill_client::PrefillClient::new(node.channel())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let events = async_stream::try_stream! {
            let mut inbound = client.prefill(Request::new(ReceiverStream::new(outbound))).await?.into_inner();
            while let Some(event) = inbound.message().await? {
                yield event;
            }
        };
        Self { events: Box::pin(events), commands }
    }

    /// Hands decode's ticket over. A call that has ended says so in its events.
    pub fn deliver(&self, ticket: Vec<u8>) {
        let deliver = v1::Deliver { ticket };
        let _ =
            self.commands.try_send(v1::PrefillCommand { command: Some(prefill_command::Command::Deliver(deliver)) });
    }
}

/// The decode call.
pub struct DecodeLeg {
    /// What the node says.
    pub events: Events<v1::DecodeEvent>,
    /// Open as long as the leg: a closed command stream would look like a client that left.
    _commands: mpsc::Sender<v1::DecodeCommand>,
}

impl DecodeLeg {
    /// Asks for a reservation at once.
    pub fn open(node: &Node, start: v1::DecodeStart) -> Self {
        let (commands, outbound) = mpsc::channel(1);
        let _ = commands.try_send(v1::DecodeCommand { command: Some(decode_command::Command::Start(start)) });
        let mut client = v1::decode_client::DecodeClient::new(node.channel())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let events = async_stream::try_stream! {
            let mut inbound = client.generate(Request::new(ReceiverStream::new(outbound))).await?.into_inner();
            while let Some(event) = inbound.message().await? {
                yield event;
            }
        };
        Self { events: Box::pin(events), _commands: commands }
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
