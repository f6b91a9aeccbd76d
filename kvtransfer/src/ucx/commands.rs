//! What the process and the driver's thread say to each other: commands, the reply to one that opens a hand-off, and
//! what both ends hold. Knows no UCX object.
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tandem_proto::HandoffId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::address::{AddressKey, CheckedAddress};
use super::ids::EndpointId;
use super::queue::Queue;
use crate::arena::{Arena, Run};
use crate::error::TransferError;
use crate::handshake::Secret;
use crate::outgoing::{AnswerSlot, PendingAnswers};
use crate::registry::Registry;
use crate::terms::BlockOwner;
use crate::wire::{Answer, DataHeader};

/// What the rest of the process asks of the driver.
pub(super) enum Command {
    /// Connect, announce a hand-off, and reply when it is welcome.
    Open {
        handoff: HandoffId,
        address: CheckedAddress,
        secret: Secret,
        reply: oneshot::Sender<Result<Opened, TransferError>>,
    },
    /// Send a range.
    Push { endpoint: EndpointId, range: DataHeader, runs: Vec<Run>, owner: BlockOwner, credit: OwnedSemaphorePermit },
    /// Tell the receiver that more is to come.
    KeepAlive { endpoint: EndpointId, handoff: HandoffId },
    /// Send the seal when all ranges are over.
    Seal { handoff: HandoffId, payload: Vec<u8> },
    /// Tell the receiver that nothing more comes.
    Cancel { handoff: HandoffId },
    /// Close a peer whose writes overstay.
    CutOff { endpoint: EndpointId },
    /// Tell the senders that these ranges were copied out of their memory.
    Copied { ranges: Vec<(EndpointId, DataHeader)> },
    /// Tell the sender how it ended.
    Answer { endpoint: EndpointId, handoff: HandoffId, answer: Answer },
}

/// An announced hand-off.
pub(super) struct Opened {
    pub(super) endpoint: EndpointId,
    pub(super) credit: Arc<Semaphore>,
    pub(super) answer: AnswerSlot,
}

/// What driver and transport share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) arena: Arc<Arena>,
    pub(super) registry: Arc<Registry>,
    pub(super) pending: Arc<PendingAnswers>,
    pub(super) queue: Arc<Queue<Command>>,
    /// Of the worker, with what tags it; written by the driver.
    pub(super) address: Arc<Mutex<Option<(CheckedAddress, AddressKey)>>>,
    /// Why the thread ended.
    pub(super) failure: Arc<OnceLock<String>>,
}

impl Shared {
    /// As it travels.
    pub(super) fn address(&self) -> Vec<u8> {
        self.at_address(<[u8]>::to_vec)
    }

    /// Nobody changes the address meanwhile: what is granted under it is known to whoever changes it.
    pub(super) fn at_address<T>(&self, then: impl FnOnce(&[u8]) -> T) -> T {
        let address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        then(&address.as_ref().map(|(address, key)| address.sealed(key)).unwrap_or_default())
    }

    pub(super) fn set_address(&self, address: CheckedAddress, key: AddressKey) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = Some((address, key));
    }

    /// What UCX has begun on a device does not end with its requests, nor with its worker: waits for all of it. To be
    /// called when it begins no more, before blocks go back.
    pub(super) fn settle(&self) {
        self.arena.memory().settle();
    }
}
