//! The gRPC service: one call is one request; closing it cancels the request. What happens in between is `prefill.rs`.
use std::sync::Arc;

use tandem_node::Node;
use tandem_node::call::{self, EventStream};
use tandem_proto::MAX_MESSAGE_BYTES;
use tandem_proto::v1::prefill_server::{self, PrefillServer};
use tandem_proto::v1::{PrefillCommand, PrefillEvent};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::commands::Commands;
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
    let shared = Shared { node, settings, pressure: Pressure::default(), links: Arc::default() };
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
        let life = call::life(request.metadata())?;
        let (shared, start) = (self.shared.clone(), Commands::start(request.into_inner()));
        let events = call::spawn(&self.shared.node.work, life, start, move |(spec, commands), events| {
            prefill::run(shared, spec, commands, events)
        })?;
        Ok(Response::new(events))
    }
}
