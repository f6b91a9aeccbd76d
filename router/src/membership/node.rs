//! One life of a node, as running requests hold it: what it said when it joined, the way to it, and its death.
use std::sync::OnceLock;

use tandem_proto::{Incarnation, Life, v1};
use tokio_util::sync::CancellationToken;

use super::node_client::NodeClient;
use super::now::Work;
use crate::select::Role;

/// One life of a node: its session with this router. Its channel goes with it.
#[derive(Debug)]
pub struct Node {
    /// Key in the table; never used twice.
    pub session: u64,
    /// What it does.
    pub role: Role,
    /// What it said when it registered.
    pub info: v1::Register,
    /// What it did so far.
    pub work: Work,
    client: NodeClient,
    pub(super) dead: CancellationToken,
    pub(super) why: OnceLock<String>,
}

impl Node {
    /// Which process of the node this is.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.info.incarnation)
    }

    /// Which session of this router with it.
    pub fn life(&self) -> Life {
        Life(self.info.life)
    }

    /// The way to the node; its connection is made at the first call.
    pub fn client(&self) -> NodeClient {
        self.client.clone()
    }

    /// Waits for the node's death, and says what it died of.
    pub async fn died(&self) -> String {
        self.dead.cancelled().await;
        self.why.get().cloned().unwrap_or_default()
    }

    pub(super) fn new(session: u64, role: Role, info: v1::Register, client: NodeClient) -> Self {
        let (work, dead) = (Work::default(), CancellationToken::new());
        Self { session, role, info, work, client, dead, why: OnceLock::new() }
    }

    /// Ends its calls: wakes all requests that have it.
    pub(super) fn end(&self, why: String) {
        // A node is taken out of the table once.
        let _ = self.why.set(why);
        self.dead.cancel();
    }
}
