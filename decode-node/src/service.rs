//! The gRPC service: one call is one request; closing it cancels the request. What happens in between is `generate.rs`.
use std::sync::Arc;
use std::time::Duration;

use tandem_node::Node;
use tandem_node::call::{self, EventStream};
use tandem_proto::v1::decode_command::Command;
use tandem_proto::v1::decode_server::{self, DecodeServer};
use tandem_proto::v1::{DecodeCommand, DecodeEvent, DecodeStart};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::generate;
use crate::stop::Stop;

/// Name of the service in health checks.
pub const SERVICE_NAME: &str = <DecodeServer<DecodeService> as NamedService>::NAME;

/// The service over a started node; `lease` is how long a prefill node may be silent in a hand-off.
pub fn routes(node: Arc<Node>, lease: Duration) -> Routes {
    let strangers = node.strangers.clone();
    let server = DecodeServer::new(DecodeService { node, lease });
    let server = server.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES);
    Routes::new(strangers.around(server))
}

/// Serves `tandem.v1.Decode`.
pub struct DecodeService {
    node: Arc<Node>,
    lease: Duration,
}

#[tonic::async_trait]
impl decode_server::Decode for DecodeService {
    type GenerateStream = EventStream<DecodeEvent>;

    async fn generate(
        &self,
        request: Request<Streaming<DecodeCommand>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (node, lease, life) = (self.node.clone(), self.lease, call::life(request.metadata())?);
        let start = start(request.into_inner());
        let events = call::spawn(&self.node.work, life, start, move |(start, stop), events| {
            generate::serve(node, start, lease, events, stop)
        })?;
        Ok(Response::new(events))
    }
}

async fn start(mut commands: Streaming<DecodeCommand>) -> Result<(DecodeStart, Stop), Error> {
    match commands.message().await?.and_then(|message| message.command) {
        Some(Command::Start(start)) => Ok((start, Stop::from_router(commands))),
        Some(Command::Stop(_)) | None => {
            Err(Error::new(ErrorKind::InvalidArgument, "the first message of a call must be `start`"))
        }
    }
}
