//! One endpoint per peer address, bounded, made on demand and never repaired: an endpoint that failed is closed by
//! force, and the next hand-off gets a new one with a new id. Knows no frame and no hand-off.
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use ucx_sys::{UCS_ERR_CONNECTION_RESET, UCS_ERR_FAILURES, UCS_ERR_NOT_CONNECTED, ucs_status_t};

use super::address::CheckedAddress;
use super::custody::Closed;
use super::ids::EndpointId;
use super::origin::{Generation, Origin};
use super::owners::{Closing, Endpoint, Worker};
use crate::error::{TransferError, TransferErrorKind};

/// UCX closes within milliseconds, or not at all when it lost a request to a dead peer.
const CLOSE_TIMEOUT_DEAD: Duration = Duration::from_millis(500);
/// The same for a peer that may live.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// An open endpoint.
pub(super) struct Entry {
    pub(super) endpoint: Endpoint,
    /// Bytes that may still be put in flight.
    pub(super) credit: Arc<Semaphore>,
    /// The peer's own end, when it has said which.
    pub(super) paired: Option<Generation>,
    address: CheckedAddress,
    used: Instant,
}

/// Why an endpoint is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// UCX found the peer's process or connection dead. It has been wrong: this says how long a close may take, and not
    /// whether the peer still writes.
    Dead,
    /// We do not want it any more; the peer may live.
    GivenUp,
}

impl Loss {
    /// What a failed call or operation says about the peer.
    pub(super) fn of(status: ucs_status_t) -> Self {
        let found_dead =
            [UCS_ERR_CONNECTION_RESET, UCS_ERR_NOT_CONNECTED].contains(&status) || UCS_ERR_FAILURES.contains(&status);
        if found_dead { Self::Dead } else { Self::GivenUp }
    }
}

struct Leaving {
    id: EndpointId,
    closing: Closing,
    since: Instant,
    loss: Loss,
}

/// All endpoints of a worker.
pub(super) struct Endpoints {
    worker: Rc<Worker>,
    open: HashMap<EndpointId, Entry>,
    by_address: HashMap<CheckedAddress, EndpointId>,
    closing: Vec<Leaving>,
    credit_bytes: usize,
    /// Open at once.
    most: usize,
    last_id: u64,
}

impl Endpoints {
    pub(super) fn new(worker: Rc<Worker>, credit_bytes: usize, most: usize) -> Self {
        let (open, by_address, closing) = (HashMap::new(), HashMap::new(), Vec::new());
        Self { worker, open, by_address, closing, credit_bytes, most, last_id: 0 }
    }

    /// The endpoint to `address`, new if there is none. When all places are taken, the longest unused one that is not
    /// `busy` makes room.
    pub(super) fn connect(
        &mut self,
        address: &CheckedAddress,
        now: Instant,
        busy: impl Fn(EndpointId) -> bool,
    ) -> Result<EndpointId, TransferError> {
        if let Some(id) = self.by_address.get(address)
            && let Some(entry) = self.open.get_mut(id)
        {
            entry.used = now;
            return Ok(*id);
        }
        if self.open.len() >= self.most {
            let idle = self.open.iter().filter(|(id, _)| !busy(**id)).min_by_key(|(_, entry)| entry.used);
            let idle = idle.map(|(id, _)| *id);
            let full = || TransferError::new(TransferErrorKind::Overloaded, "too many KV peers at once");
            self.close(idle.ok_or_else(full)?, Loss::GivenUp, now);
        }
        self.last_id += 1;
        let id = EndpointId(self.last_id);
        let endpoint = Endpoint::connect(&self.worker, address, id)?;
        let credit = Arc::new(Semaphore::new(self.credit_bytes));
        self.open.insert(id, Entry { endpoint, credit, paired: None, address: address.clone(), used: now });
        self.by_address.insert(address.clone(), id);
        Ok(id)
    }

    /// The open endpoint to `address`, if there is one.
    pub(super) fn known(&self, address: &CheckedAddress) -> Option<EndpointId> {
        self.by_address.get(address).copied()
    }

    /// The endpoint to `address` that answers to one which the peer does not have any more. Not the one that the peer
    /// has just replaced its own end for.
    pub(super) fn stale(&self, address: &CheckedAddress, origin: &Origin) -> Option<EndpointId> {
        let id = *self.by_address.get(address)?;
        let paired = self.open.get(&id)?.paired?;
        (paired != origin.generation && origin.paired != Some(Generation(id.0))).then_some(id)
    }

    /// The peer's end of an endpoint is this one.
    pub(super) fn pair(&mut self, id: EndpointId, generation: Generation) {
        if let Some(entry) = self.open.get_mut(&id) {
            entry.paired = Some(generation);
        }
    }

    /// The peer has replaced its end of an endpoint since it said which that is.
    pub(super) fn is_outdated(&self, id: EndpointId, generation: Generation) -> bool {
        self.open.get(&id).and_then(|entry| entry.paired).is_some_and(|paired| paired != generation)
    }

    /// Whom an endpoint leads to.
    pub(super) fn address(&self, id: EndpointId) -> Option<CheckedAddress> {
        self.open.get(&id).map(|entry| entry.address.clone())
    }

    /// Starts anew on another worker, and returns all that belongs to the old one. Ids go on, none is used twice.
    pub(super) fn reset(&mut self, worker: Rc<Worker>) -> Self {
        let (credit_bytes, most, last_id) = (self.credit_bytes, self.most, self.last_id);
        std::mem::replace(self, Self { last_id, ..Self::new(worker, credit_bytes, most) })
    }

    /// Open and closing ones.
    pub(super) fn all(&self) -> Vec<EndpointId> {
        self.open.keys().copied().chain(self.closing.iter().map(|leaving| leaving.id)).collect()
    }

    /// Open or closing.
    pub(super) fn has(&self, id: EndpointId) -> bool {
        self.open.contains_key(&id) || self.closing.iter().any(|leaving| leaving.id == id)
    }

    pub(super) fn get(&self, id: EndpointId) -> Option<&Entry> {
        self.open.get(&id)
    }

    /// Starts to close; [`Endpoints::take_closed`] reports the end. False: it is not open.
    pub(super) fn close(&mut self, id: EndpointId, loss: Loss, now: Instant) -> bool {
        let Some(entry) = self.open.remove(&id) else { return false };
        self.by_address.remove(&entry.address);
        entry.credit.close();
        self.closing.push(Leaving { id, closing: entry.endpoint.close(), since: now, loss });
        true
    }

    /// None is open.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Something is still closing.
    pub(super) fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// Those that UCX has closed, or does not close in time. `has_ended`: their process has, whatever they were closed
    /// for.
    pub(super) fn take_closed(&mut self, now: Instant, has_ended: impl Fn(EndpointId) -> bool) -> Vec<Closed> {
        let mut closed = Vec::new();
        self.closing.retain(|leaving| {
            let confirmed = leaving.closing.is_closed();
            let is_dead = leaving.loss == Loss::Dead || has_ended(leaving.id);
            let timeout = if is_dead { CLOSE_TIMEOUT_DEAD } else { CLOSE_TIMEOUT };
            let over = confirmed || now.duration_since(leaving.since) > timeout;
            if over {
                closed.push(Closed { id: leaving.id, confirmed });
            }
            !over
        });
        closed
    }
}
