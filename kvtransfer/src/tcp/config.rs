//! How the tcp backend behaves.
use std::time::Duration;

use tandem_proto::PROTOCOL_VERSION;

use super::sealing::Protection;
use crate::build_id::ENCRYPTED;
use crate::session::DEFAULT_GRACE;
use crate::terms::Faults;

/// How the tcp backend behaves.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// For connecting and for the hello.
    pub connect_timeout: Duration,
    /// A peer that takes or sends nothing for so long in the middle of a frame is dead.
    pub stall_timeout: Duration,
    /// Writes of a peer into the blocks of an aborted hand-off end within this time, or its connection is.
    pub grace: Duration,
    /// Faults of what this node sends.
    pub faults: Faults,
    /// Equal on all nodes; part of the build id.
    pub protection: Protection,
    /// Where peers connect to, as host:port, when that is not where this node listens (a published container port).
    pub advertise: Option<String>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(5),
            grace: DEFAULT_GRACE,
            faults: Faults::default(),
            protection: Protection::Bound,
            advertise: None,
        }
    }
}

impl TcpConfig {
    /// Equal on nodes that understand each other.
    pub(super) fn build_id(&self) -> String {
        match self.protection {
            Protection::Bound => format!("tcp/{PROTOCOL_VERSION}"),
            Protection::Encrypted => format!("tcp/{PROTOCOL_VERSION}{ENCRYPTED}"),
        }
    }
}
