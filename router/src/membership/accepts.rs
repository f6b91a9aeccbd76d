//! What a request that runs wants of the nodes of its next attempt, and why it has none yet. Plain data; the table
//! decides by it.
use crate::select::NoPair;

/// What a request that runs takes of the nodes for its next attempt, by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepts {
    /// Nodes against which more speaks than load.
    pub unsound: bool,
    /// Nodes without room for it: it waits there.
    pub without_room: bool,
    /// Requests that may wait on a node that has room.
    pub node_queue: u32,
}

/// Why such a request has no nodes yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotYet {
    /// There is no plan.
    NoPair(NoPair),
    /// More than load speaks against all of them.
    Unsound,
    /// Of those against which least speaks, none has room.
    NoRoom,
}

impl From<NoPair> for NotYet {
    fn from(none: NoPair) -> Self {
        Self::NoPair(none)
    }
}
