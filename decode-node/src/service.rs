//! The gRPC service: one call is one request; closing it cancels the request. What happens in between is `generate.rs`.
use std::sync::Arc;
use std::time::Duration;

use tandem_node::Node;
use tandem_node::call::{self, EventStream};
use tandem_proto::v1::decode_command::Command;
use tandem_proto::v1::decode_server::{self, DecodeServer};
use tandem_proto::v1::{DecodeCommand, DecodeEvent, DecodeStart, DecodeStop};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::generate;

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
        let (node, lease) = (self.node.clone(), self.lease);
        let events = call::spawn(&self.node.work, start(request.into_inner()), move |(start, stop), events| {
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

/// The router's word that the answer is complete without more tokens.
pub struct Stop {
    /// `None`: nothing more is coming.
    commands: Option<Streaming<DecodeCommand>>,
    said: Option<DecodeStop>,
}

impl Stop {
    fn from_router(commands: Streaming<DecodeCommand>) -> Self {
        Self { commands: Some(commands), said: None }
    }

    /// Ready once it was said, and from then on. A router that closes its side has not said it. Cancel-safe.
    pub async fn said(&mut self) -> DecodeStop {
        loop {
            if let Some(stop) = self.said {
                return stop;
            }
            let Some(commands) = &mut self.commands else { return std::future::pending().await };
            match commands.message().await {
                Ok(Some(DecodeCommand { command: Some(Command::Stop(stop)) })) => self.said = Some(stop),
                Ok(Some(_)) => {}
                // The end of the call itself is seen where its events go.
                Ok(None) | Err(_) => self.commands = None,
            }
        }
    }

    /// Ready once it was said that no KV will come either. Cancel-safe.
    pub async fn without_handoff(&mut self) {
        if !self.said().await.no_handoff {
            std::future::pending().await
        }
    }
}
