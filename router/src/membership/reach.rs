//! How a call reaches a node: over a connection ([`super::wire`]), or, in simulations and tests, by a service in this
//! process. Callers see a tower service either way.
use std::fmt;
use std::sync::Arc;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue};
use tandem_ports::{JOIN_HEADER, NodeTls, PeerRole, Wanted};
use tandem_proto::{LIFE_HEADER, Life, v1};
use tonic::Status;
use tonic::body::Body;
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

use super::wire::Wire;
use crate::select::Role;

/// Carries calls to one node. Clones share the way.
pub type Calls = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// How nodes are reached that join.
#[derive(Clone)]
pub(super) enum Reaching {
    /// At their endpoints.
    Network {
        /// In each call's head: the cluster's own know each other by it.
        token: Option<HeaderValue>,
        /// What connections are within.
        tls: Option<NodeTls>,
    },
    InProcess(Arc<dyn Fn(&v1::Register) -> Calls + Send + Sync>),
}

impl Default for Reaching {
    fn default() -> Self {
        Self::Network { token: None, tls: None }
    }
}

impl Reaching {
    /// The same, within TLS if there is one.
    pub fn within(self, tls: Option<&NodeTls>) -> Self {
        match self {
            Self::Network { token, .. } => Self::Network { token, tls: tls.cloned() },
            Self::InProcess(find) => Self::InProcess(find),
        }
    }

    /// The way to the node that registers so. Each call says of which life it is.
    pub fn reach(&self, info: &v1::Register, role: Role, endpoint: Authority) -> Calls {
        let mut head = HeaderMap::new();
        // Hexadecimal digits are a value.
        let life = HeaderValue::from_str(&Life(info.life).to_string());
        life.into_iter().for_each(|life| drop(head.insert(HeaderName::from_static(LIFE_HEADER), life)));
        match self {
            Self::Network { token, tls } => {
                token.iter().for_each(|token| drop(head.insert(JOIN_HEADER, token.clone())));
                let wanted = || Wanted::Node { role: peer_role(role), node_id: info.node_id.clone() };
                Calls::new(Wire::new(endpoint, head, tls.clone().map(|tls| (tls, wanted()))))
            }
            Self::InProcess(find) => Calls::new(find(info).map_request(move |mut request: http::Request<Body>| {
                request.headers_mut().extend(head.clone());
                request
            })),
        }
    }
}

/// The role as certificates name it.
pub(super) fn peer_role(role: Role) -> PeerRole {
    match role {
        Role::Prefill => PeerRole::Prefill,
        Role::Decode => PeerRole::Decode,
    }
}

impl fmt::Debug for Reaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network { .. } => "Network",
            Self::InProcess(_) => "InProcess",
        })
    }
}
