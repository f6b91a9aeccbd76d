//! What UCX works on, each with everything it may touch: header, payload, blocks, claim. An entry leaves when its
//! callback came, or when its endpoint is closed; a request that UCX lost names an id that is no longer here, and harms
//! nobody.
use std::collections::HashMap;
use std::time::Instant;

use tandem_proto::HandoffId;
use tokio::sync::OwnedSemaphorePermit;
use ucx_sys::ucp_dt_iov;

use super::ids::{EndpointId, OperationId};
use super::result::Request;
use crate::registry::Claim;
use crate::terms::BlockOwner;

/// One send or receive in flight.
pub(super) struct Operation {
    pub(super) endpoint: EndpointId,
    /// The endpoint is given up when it is not over by then; `None`: that has happened, and did not end it.
    pub(super) deadline: Option<Instant>,
    pub(super) request: Option<Request>,
    pub(super) cargo: Cargo,
}

/// What an operation does and what it keeps. Heap memory: it stays in place when the entry moves, and UCX may point to
/// it all the while, as a `Vec` allows and a `Box`, which claims its content with each move, does not.
pub(super) enum Cargo {
    /// A header with a small payload.
    Frame { header: Vec<u8>, payload: Vec<u8> },
    /// A range of blocks leaves.
    Send(Box<SendCargo>),
    /// A range of blocks arrives.
    Receive { claim: Claim, target: Vec<ucp_dt_iov> },
    /// UCX lost the request, and may one day look at the header; the blocks are free.
    Lost { _header: Vec<u8>, _payload: Vec<u8>, _target: Vec<ucp_dt_iov> },
}

/// A range on its way out.
pub(super) struct SendCargo {
    pub(super) handoff: HandoffId,
    pub(super) header: Vec<u8>,
    pub(super) source: Vec<ucp_dt_iov>,
    /// A changed copy of the range, for injected faults.
    pub(super) altered: Vec<u8>,
    pub(super) _owner: BlockOwner,
    pub(super) credit: OwnedSemaphorePermit,
}

/// All operations in flight.
#[derive(Default)]
pub(super) struct Operations {
    last_id: u64,
    table: HashMap<OperationId, Operation>,
    /// Until when operations may take on endpoints that have shown progress; until they are closed.
    extended: HashMap<EndpointId, Instant>,
    lost: usize,
}

impl Operations {
    /// An id for an operation that is about to be posted.
    pub(super) fn next_id(&mut self) -> OperationId {
        self.last_id += 1;
        OperationId(self.last_id)
    }

    pub(super) fn insert(&mut self, id: OperationId, operation: Operation) {
        self.table.insert(id, operation);
    }

    /// The callback came. `None`: it was given up before.
    pub(super) fn complete(&mut self, id: OperationId) -> Option<Operation> {
        let operation = self.table.remove(&id)?;
        self.lost -= usize::from(matches!(operation.cargo, Cargo::Lost { .. }));
        Some(operation)
    }

    /// The worker was destroyed: UCX touches nothing any more.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        self.extended.clear();
        self.lost = 0;
    }

    /// Nothing is in flight, lost requests aside.
    pub(super) fn is_idle(&self) -> bool {
        self.table.len() == self.lost
    }

    pub(super) fn is_busy(&self, endpoint: EndpointId) -> bool {
        self.live().any(|operation| operation.endpoint == endpoint)
    }

    /// Something came through on this endpoint: what is behind it has until `deadline` as well.
    pub(super) fn progressed(&mut self, endpoint: EndpointId, deadline: Instant) {
        self.extended.insert(endpoint, deadline);
    }

    /// Endpoints with an operation past its deadline, and no progress that extended it.
    pub(super) fn overdue(&self, now: Instant) -> Vec<EndpointId> {
        let extended = |endpoint| self.extended.get(&endpoint).is_some_and(|until| now < *until);
        let late = self.live().filter(|operation| {
            operation.deadline.is_some_and(|deadline| now >= deadline) && !extended(operation.endpoint)
        });
        late.map(|operation| operation.endpoint).collect()
    }

    /// Receives of an endpoint that UCX has not ended.
    pub(super) fn receives(&self, endpoint: EndpointId) -> usize {
        let of =
            |operation: &&Operation| operation.endpoint == endpoint && matches!(operation.cargo, Cargo::Receive { .. });
        self.table.values().filter(of).count()
    }

    /// The endpoint is closed, but UCX did not complete these, and nobody can write into them: they give up their
    /// blocks and keep what UCX might look at.
    pub(super) fn abandon(&mut self, endpoint: EndpointId) {
        self.extended.remove(&endpoint);
        let of = self.table.values_mut().filter(|operation| operation.endpoint == endpoint);
        for operation in of.filter(|operation| !matches!(operation.cargo, Cargo::Lost { .. })) {
            self.lost += 1;
            operation.cargo.lose();
        }
    }

    /// As [`Operations::abandon`], while somebody may still write: receives stay whole. Reading late harms nobody.
    pub(super) fn quarantine(&mut self, endpoint: EndpointId) {
        self.extended.remove(&endpoint);
        for operation in self.table.values_mut().filter(|operation| operation.endpoint == endpoint) {
            match operation.cargo {
                Cargo::Receive { .. } => operation.deadline = None,
                Cargo::Lost { .. } => {}
                Cargo::Frame { .. } | Cargo::Send(_) => {
                    self.lost += 1;
                    operation.cargo.lose();
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_extended(&self, endpoint: EndpointId) -> bool {
        self.extended.contains_key(&endpoint)
    }

    fn live(&self) -> impl Iterator<Item = &Operation> {
        self.table.values().filter(|operation| !matches!(operation.cargo, Cargo::Lost { .. }))
    }
}

impl Cargo {
    /// Drops owner, credit and claim.
    fn lose(&mut self) {
        let (mut _header, mut _payload, mut _target) = Default::default();
        match self {
            Self::Frame { header, payload } => {
                (_header, _payload) = (std::mem::take(header), std::mem::take(payload));
            }
            Self::Send(send) => {
                (_header, _payload) = (std::mem::take(&mut send.header), std::mem::take(&mut send.altered));
                _target = std::mem::take(&mut send.source);
            }
            Self::Receive { target, .. } => _target = std::mem::take(target),
            Self::Lost { .. } => return,
        }
        *self = Self::Lost { _header, _payload, _target };
    }
}
