//! The client of a node: over a connection ([`super::wire`]) or, in simulations and tests, a service in this process.
//! Callers see a tower service either way.
use std::fmt;
use std::sync::Arc;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue};
use tandem_ports::{JoinTokens, NodeTls, PeerRole, Wanted};
use tandem_proto::{LIFE_HEADER, Life, v1};
use tonic::Status;
use tonic::body::Body;
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

use super::wire::Wire;
use crate::select::Role;

/// Carries calls to one node. Clones share the way.
pub type NodeClient = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// Makes the clients of nodes that join.
#[derive(Clone)]
pub(super) enum Connector {
    /// At their endpoints.
    Network {
        /// The first of them is in each call's head: the cluster's own know each other by it.
        tokens: Option<JoinTokens>,
        /// What connections are within.
        tls: Option<NodeTls>,
    },
    InProcess(Arc<dyn Fn(&v1::Register) -> NodeClient + Send + Sync>),
}

impl Default for Connector {
    fn default() -> Self {
        Self::Network { tokens: None, tls: None }
    }
}

impl Connector {
    /// The same, within TLS if there is one.
    pub fn within(self, tls: Option<&NodeTls>) -> Self {
        match self {
            Self::Network { tokens, .. } => Self::Network { tokens, tls: tls.cloned() },
            Self::InProcess(find) => Self::InProcess(find),
        }
    }

    /// The client of the node that registers so. Each call names the node's life.
    pub fn client(&self, info: &v1::Register, role: Role, endpoint: Authority) -> NodeClient {
        let mut head = HeaderMap::new();
        // Hexadecimal digits are a value.
        let life = HeaderValue::from_str(&Life(info.life).to_string());
        life.into_iter().for_each(|life| drop(head.insert(HeaderName::from_static(LIFE_HEADER), life)));
        match self {
            Self::Network { tokens, tls } => {
                let wanted = || Wanted::Node { role: peer_role(role), node_id: info.node_id.clone() };
                NodeClient::new(Wire::new(endpoint, (head, tokens.clone()), tls.clone().map(|tls| (tls, wanted()))))
            }
            Self::InProcess(find) => {
                NodeClient::new(find(info).map_request(move |mut request: http::Request<Body>| {
                    request.headers_mut().extend(head.clone());
                    request
                }))
            }
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

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network { .. } => "Network",
            Self::InProcess(_) => "InProcess",
        })
    }
}
