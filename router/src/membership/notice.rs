//! What the node table leaves to be done once its lock is released, see [`super::table_lock`].
use std::sync::Arc;
use std::time::Duration;

use super::Node;

/// What is left to do for a change of the table.
#[derive(Debug)]
pub(super) enum Notice {
    /// The node is dead, for this reason: its calls are to end.
    Gone(Arc<Node>, String),
    /// The node left, as it had announced.
    Drained(Arc<Node>),
    /// A node joined that pairs with no other one, for this reason if it is known.
    Alone(Arc<Node>, Option<Arc<str>>),
    /// The router stood still for so long; `over`: longer than the lease.
    StoodStill { stalled: Duration, over: bool },
    /// The node's breaker opened.
    RankedLast(Arc<Node>),
}

impl Notice {
    /// Logs it, and ends the calls of a node that is gone.
    pub fn tell(self) {
        match self {
            Self::Gone(node, why) => {
                tracing::warn!(node = node.info.node_id, life = %node.life(), why, "node gone");
                node.end(why);
            }
            Self::Drained(node) => {
                tracing::info!(node = node.info.node_id, incarnation = %node.incarnation(), "node drained");
            }
            Self::Alone(node, why) => {
                let why = why.as_deref().unwrap_or("no other node has its model, arithmetic and KV layout");
                tracing::warn!(
                    node = node.info.node_id,
                    "no node of the other role can share a request with it: {why}"
                );
            }
            Self::StoodStill { stalled, over } => tracing::warn!(
                stalled_ms = stalled.as_millis() as u64,
                over,
                "this router stood still: leases of its nodes are longer by that, or over"
            ),
            Self::RankedLast(node) => {
                tracing::warn!(node = node.info.node_id, "node failed requests in a row: it is ranked last for a time")
            }
        }
    }
}
