//! One process of the simulated router: the real service, flow, membership and selection.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tandem_proto::v1::membership_server::MembershipServer;
use tandem_router::api::Service;
use tandem_router::limits::Limits;
use tandem_router::membership::{Expected, Membership, NodeClient};
use tandem_router::text::ModelText;
use tandem_telemetry::Exporter;
use tonic::Status;
use tonic::service::Routes;
use tower::service_fn;

use crate::node::{NodeProcess, endpoint};
use crate::process::Process;
use crate::schedule::Schedule;

/// Silence after which a node is dead.
pub const LEASE: Duration = Duration::from_millis(600);

/// The nodes' present processes, by endpoint.
pub type Directory = Arc<Mutex<BTreeMap<String, Weak<NodeProcess>>>>;

/// A running router.
pub struct RouterProcess {
    pub process: Process,
    pub service: Service,
}

impl RouterProcess {
    pub fn start(schedule: &Schedule, text: Arc<ModelText>, nodes: Directory) -> Arc<Self> {
        let process = Process::default();
        let expected = Expected { model_digest: text.digest, eos_token_id: text.eos };
        let router = process.clone();
        let membership = Membership::new(expected, LEASE).in_process(move |register| {
            let nodes = nodes.lock().unwrap_or_else(PoisonError::into_inner);
            let node = nodes.get(&register.endpoint).and_then(Weak::upgrade);
            node.map_or_else(nobody, |node| node.calls(router.clone()))
        });
        let membership = membership.with_local_prefill(schedule.local_prefill);
        process.spawn(membership.clone().watch());
        let limits = Limits {
            max_inflight: schedule.max_inflight,
            max_queue: schedule.max_queue,
            // Every other cluster waits on its nodes, so that their own queues are seen full too.
            node_queue: if schedule.max_queue.is_multiple_of(2) { u32::from(u16::MAX) } else { 1 },
            max_request: Duration::from_secs(20),
            ..Limits::default()
        };
        let service = Service::new(text, membership, Exporter::disabled(), limits, "router".to_owned());
        Arc::new(Self { process, service })
    }

    /// What nodes call.
    pub fn routes(&self) -> Routes {
        Routes::new(MembershipServer::new(self.service.join_service()))
    }
}

/// Says where a node's present process is.
pub fn enter(nodes: &Directory, node: &Arc<NodeProcess>) {
    nodes.lock().unwrap_or_else(PoisonError::into_inner).insert(endpoint(node.name), Arc::downgrade(node));
}

fn nobody() -> NodeClient {
    NodeClient::new(service_fn(async |_| Err(Status::unavailable("connection refused"))))
}
