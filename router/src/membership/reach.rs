//! How a call reaches a node: over a gRPC connection that is made at its first call, or, in simulations and tests, by a
//! service in this process. Callers see a tower service either way.
use std::fmt;
use std::sync::{Arc, OnceLock};

use tandem_proto::v1;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

/// Carries calls to one node. Clones share the way.
pub type Calls = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// How nodes are reached that join.
#[derive(Clone, Default)]
pub(super) enum Reaching {
    #[default]
    ByEndpoint,
    InProcess(Arc<dyn Fn(&v1::Register) -> Calls + Send + Sync>),
}

impl Reaching {
    pub fn reach(&self, info: &v1::Register, endpoint: Endpoint) -> Reach {
        match self {
            Self::ByEndpoint => Reach::Network { endpoint: Box::new(endpoint), calls: OnceLock::new() },
            Self::InProcess(find) => Reach::InProcess(find(info)),
        }
    }
}

impl fmt::Debug for Reaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ByEndpoint => "ByEndpoint",
            Self::InProcess(_) => "InProcess",
        })
    }
}

/// The way to one incarnation of a node.
#[derive(Debug)]
pub(super) enum Reach {
    Network { endpoint: Box<Endpoint>, calls: OnceLock<Calls> },
    InProcess(Calls),
}

impl Reach {
    /// Needs a tokio runtime.
    pub fn calls(&self) -> Calls {
        match self {
            Self::Network { endpoint, calls } => {
                let connect = || endpoint.connect_lazy().map_err(|error| Status::from_error(Box::new(error)));
                calls.get_or_init(|| Calls::new(connect())).clone()
            }
            Self::InProcess(calls) => calls.clone(),
        }
    }
}
