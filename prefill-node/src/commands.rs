//! The router's side of a call: its start, and what it says after that. Knows no request.
use prost::Message;
use tandem_proto::v1::prefill_command::Command;
use tandem_proto::v1::{PrefillCommand, RequestSpec, Ticket};
use tandem_proto::{Error, ErrorKind};
use tonic::Streaming;

/// What the router says after its start.
pub enum Word {
    /// Where the KV goes.
    Deliver(Ticket),
    /// Nowhere: the answer is complete.
    Stop,
    /// It closed its side.
    Closed,
}

/// The router's side of a call that has started: tickets.
pub struct Commands {
    stream: Streaming<PrefillCommand>,
}

impl Commands {
    /// The first message, and who hears the others.
    ///
    /// # Errors
    /// `InvalidArgument` when it is something else, and what the call failed of.
    pub async fn start(mut stream: Streaming<PrefillCommand>) -> Result<(RequestSpec, Self), Error> {
        match stream.message().await?.and_then(|message| message.command) {
            Some(Command::Start(spec)) => Ok((spec, Self { stream })),
            _ => Err(invalid("the first message of a call must be `start`")),
        }
    }

    /// The next message after the first. Cancel-safe.
    ///
    /// # Errors
    /// `InvalidArgument` when it is something else, and what the call failed of.
    pub async fn word(&mut self) -> Result<Word, Error> {
        let Some(message) = self.stream.message().await? else { return Ok(Word::Closed) };
        match message.command {
            Some(Command::Deliver(deliver)) => {
                let ticket = Ticket::decode(deliver.ticket.as_slice());
                ticket.map(Word::Deliver).map_err(|error| invalid(format!("the ticket is not readable: {error}")))
            }
            Some(Command::Stop(_)) => Ok(Word::Stop),
            _ => Err(invalid("after its start a call says `deliver` or `stop`")),
        }
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}
