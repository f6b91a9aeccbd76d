//! How a call reaches a node: over a connection ([`super::wire`]), or, in simulations and tests, by a service in this
//! process. Callers see a tower service either way.
use std::fmt;
use std::sync::Arc;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue};
use tandem_ports::JOIN_HEADER;
use tandem_proto::{LIFE_HEADER, Life, v1};
use tonic::Status;
use tonic::body::Body;
use tower::ServiceExt;
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
    /// The way to the node that registers so. Each call says of which life it is.
    pub fn reach(&self, info: &v1::Register, endpoint: Authority) -> Calls {
        let mut head = HeaderMap::new();
        // Hexadecimal digits are a value.
        let life = HeaderValue::from_str(&Life(info.life).to_string());
        life.into_iter().for_each(|life| drop(head.insert(HeaderName::from_static(LIFE_HEADER), life)));
        if let Self::WithToken(token) = self {
            head.insert(JOIN_HEADER, token.clone());
        }
        match self {
            Self::ByEndpoint | Self::WithToken(_) => Calls::new(Wire::new(endpoint, head)),
            Self::InProcess(find) => Calls::new(find(info).map_request(move |mut request: http::Request<Body>| {
                request.headers_mut().extend(head.clone());
                request
            })),
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
