//! How a call reaches a node: over a connection ([`super::wire`]), or, in simulations and tests, by a service in this
//! process. Callers see a tower service either way.
use std::fmt;
use std::sync::Arc;

use http::HeaderValue;
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
    /// With this in each call's head: the cluster's own know each other by it.
    WithToken(HeaderValue),
    InProcess(Arc<dyn Fn(&v1::Register) -> Calls + Send + Sync>),
}

impl Reaching {
    /// The way to the incarnation that registers so.
    pub fn reach(&self, info: &v1::Register, endpoint: Authority) -> Calls {
        match self {
            Self::ByEndpoint => Calls::new(Wire::new(endpoint, None)),
            Self::WithToken(token) => Calls::new(Wire::new(endpoint, Some(token.clone()))),
            Self::InProcess(find) => find(info),
        }
    }
}

impl fmt::Debug for Reaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ByEndpoint => "ByEndpoint",
            Self::WithToken(_) => "WithToken",
            Self::InProcess(_) => "InProcess",
        })
    }
}
