//! The gRPC service: one call is one request; closing it cancels the request. What happens in between is `prefill.rs`.
use std::sync::Arc;

use prost::Message;
use tandem_node::Node;
use tandem_node::call::{self, EventStream};
use tandem_proto::v1::prefill_command::Command;
use tandem_proto::v1::prefill_server::{self, PrefillServer};
use tandem_proto::v1::{PrefillCommand, PrefillEvent, RequestSpec, Ticket};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::prefill::{self, Shared};
use crate::pressure::Pressure;
use crate::settings::Settings;

/// Name of the service in health checks.
pub const SERVICE_NAME: &str = <PrefillServer<PrefillService> as NamedService>::NAME;

/// The service over a started node, as it is without flags.
pub fn routes(node: Arc<Node>) -> Routes {
    routes_with(node, Settings::default())
}

/// As [`routes`], told otherwise.
pub fn routes_with(node: Arc<Node>, settings: Settings) -> Routes {
    let strangers = node.strangers.clone();
    let shared = Shared { node, settings, pressure: Pressure::default(), link: Arc::default() };
    let server = PrefillServer::new(PrefillService { shared });
    let server = server.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES);
    Routes::new(strangers.around(server))
}

/// Serves `tandem.v1.Prefill`.
pub struct PrefillService {
    shared: Shared,
}

#[tonic::async_trait]
impl prefill_server::Prefill for PrefillService {
    type PrefillStream = EventStream<PrefillEvent>;

    async fn prefill(
        &self,
        request: Request<Streaming<PrefillCommand>>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let (shared, start) = (self.shared.clone(), Commands::start(request.into_inner()));
        let events = call::spawn(&self.shared.node.work, start, move |(spec, commands), events| {
            prefill::run(shared, spec, commands, events)
        })?;
        Ok(Response::new(events))
    }
}

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
    async fn start(mut stream: Streaming<PrefillCommand>) -> Result<(RequestSpec, Self), Error> {
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
