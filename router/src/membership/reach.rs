//! How a call reaches a node: over a connection ([`super::wire`]), or, in simulations and tests, by a
//! service in this process. Callers see a tower service either way.
use std::fmt;
use std::sync::Arc;

use http::uri::Authority;
use tandem_proto::v1;
use tonic::Status;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;

use super::wire::Wire;

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
    pub fn reach(&self, info: &v1::Register, endpoint: Authority) -> Reach {
        match self {
            Self::ByEndpoint => Reach::Network(Wire::new(endpoint)),
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
    Network(Wire),
    InProcess(Calls),
}

impl Reach {
    /// Needs a tokio runtime.
    pub fn calls(&self) -> Calls {
        match self {
            Self::Network(wire) => Calls::new(wire.clone()),
            Self::InProcess(calls) => calls.clone(),
        }
    }
}
