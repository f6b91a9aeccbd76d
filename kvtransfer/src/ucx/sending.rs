//! The driver's sending half: announces a hand-off, posts its ranges, and holds the seal until UCX has delivered them
//! all, or the receiver has copied them all itself (`one_copy/`). UCX does not promise that messages arrive in order, so nothing may depend on what is still under way: whoever
//! opens a hand-off gets it when the receiver has answered the hello, and no range can overtake that.
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::HandoffId;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use ucx_sys::ucp_dt_iov;

use super::address::CheckedAddress;
use super::driver::{Driver, Opened};
use super::endpoints::EndpointId;
use super::hello::Hello;
use super::one_copy::announcement;
use super::operations::{SendWork, Work};
use crate::arena::Run;
use crate::error::{TransferError, TransferErrorKind};
use crate::mutation::Mutation;
use crate::transport::{BlockOwner, Faults};
use crate::wire::{Answer, DataHeader, Header};

/// Credit goes back when this part of it has come together, or when there is nothing else to do.
const CREDIT_SHARE: usize = 8;

/// Hand-offs that leave this node.
#[derive(Default)]
pub(super) struct Sending {
    handoffs: HashMap<HandoffId, Outbound>,
    returning: Returning,
}

/// Credit of ranges that have left. It goes back in one go, since each time may wake somebody on a core that copies.
#[derive(Default)]
struct Returning {
    permits: Vec<OwnedSemaphorePermit>,
    bytes: usize,
}

/// How ranges get to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// UCX moves them.
    Rendezvous,
    /// They are announced, and the receiver copies them out of our memory.
    OneCopy,
}

struct Outbound {
    endpoint: EndpointId,
    way: Way,
    in_flight: usize,
    /// Announced, and not copied yet: the blocks stay.
    uncopied: Uncopied,
    seal: Option<Vec<u8>>,
    /// Faults that are still to be made.
    faults: Faults,
    /// Until the receiver's welcome.
    announced: Option<Announced>,
}

#[derive(Default)]
struct Uncopied {
    ranges: Vec<(DataHeader, SendWork)>,
    /// The receiver is given up when none of them is copied until then.
    due: Option<Instant>,
}

/// A hand-off that its receiver may not know yet.
struct Announced {
    opened: Opened,
    reply: Reply,
    /// Given up then.
    until: Instant,
}

type Reply = oneshot::Sender<Result<Opened, TransferError>>;

impl Sending {
    pub(super) fn uses(&self, endpoint: EndpointId) -> bool {
        self.handoffs.values().any(|outbound| outbound.endpoint == endpoint)
    }

    pub(super) fn forget(&mut self, endpoint: EndpointId, why: &TransferError) {
        let of = |outbound: &Outbound| outbound.endpoint == endpoint;
        self.handoffs.extract_if(|_, outbound| of(outbound)).for_each(|(_, outbound)| outbound.fail(why));
    }

    /// Whoever waits for credit may push again.
    pub(super) fn return_credit(&mut self) {
        self.returning = Returning::default();
    }

    /// Endpoints whose receiver copies nothing of what was announced.
    pub(super) fn overdue(&self, now: Instant) -> Vec<EndpointId> {
        let late = |outbound: &&Outbound| outbound.uncopied.due.is_some_and(|due| now >= due);
        self.handoffs.values().filter(late).map(|outbound| outbound.endpoint).collect()
    }

    fn unwelcome(&self, now: Instant) -> Vec<HandoffId> {
        let late = |outbound: &Outbound| outbound.announced.as_ref().is_some_and(|announced| now >= announced.until);
        self.handoffs.iter().filter(|(_, outbound)| late(outbound)).map(|(handoff, _)| *handoff).collect()
    }
}

impl Outbound {
    /// Tells whoever still waits for the welcome; an open hand-off hears of its end by its answer.
    fn fail(self, why: &TransferError) {
        if let Some(announced) = self.announced {
            // Somebody who does not wait any more need not know.
            let _ = announced.reply.send(Err(why.clone()));
        }
    }
}

impl Driver {
    pub(super) fn open_handoff(&mut self, handoff: HandoffId, address: &CheckedAddress, reply: Reply) {
        let opened = match self.announce(handoff, address) {
            Ok(opened) => opened,
            Err(error) => {
                // Somebody who does not wait any more need not know.
                let _ = reply.send(Err(error));
                return;
            }
        };
        let endpoint = opened.endpoint;
        let announced = Some(Announced { opened, reply, until: Instant::now() + self.config.stall_timeout });
        let (way, uncopied) = (Way::Rendezvous, Uncopied::default());
        let faults = self.config.faults;
        let outbound = Outbound { endpoint, way, in_flight: 0, uncopied, seal: None, faults, announced };
        self.sending.handoffs.insert(handoff, outbound);
        let hello = Hello::encode(handoff, &self.build_id, self.one_copy.share(), &self.shared.address());
        self.post_frame(endpoint, Header::hello(), hello);
    }

    pub(super) fn on_welcome(&mut self, handoff: HandoffId, way: Way) {
        let Some(outbound) = self.sending.handoffs.get_mut(&handoff) else { return };
        let Some(announced) = outbound.announced.take() else { return };
        outbound.way = way;
        if let Err(Ok(unwanted)) = announced.reply.send(Ok(announced.opened)) {
            drop(unwanted);
            self.cancel(handoff);
        }
    }

    /// The receiver may be frozen, or cannot read the hello. Other hand-offs have deadlines of their own.
    pub(super) fn give_up_unwelcome(&mut self, now: Instant) {
        for handoff in self.sending.unwelcome(now) {
            let why = TransferError::new(TransferErrorKind::Timeout, "the KV receiver does not answer");
            self.cancel_because(handoff, &why);
        }
    }

    pub(super) fn push(
        &mut self,
        to: EndpointId,
        range: DataHeader,
        runs: &[Run],
        owner: BlockOwner,
        credit: OwnedSemaphorePermit,
    ) {
        let Some(outbound) = self.sending.handoffs.get_mut(&range.handoff) else { return };
        let faults = std::mem::take(&mut outbound.faults);
        outbound.in_flight += 1;
        if outbound.way == Way::OneCopy {
            return self.announce_range(to, range, &announcement::altered(runs, faults), owner, credit);
        }
        let altered = self.altered(runs, faults);
        let source = match altered.as_slice() {
            [] => self.region.vector(runs),
            bytes => vec![ucp_dt_iov { buffer: bytes.as_ptr().cast::<c_void>().cast_mut(), length: bytes.len() }],
        };
        let header = Header::Data(range).encode().to_vec();
        let region = altered.is_empty().then_some(&self.region);
        let operation = self.operations.next_id();
        let Some(entry) = self.endpoints.get(to) else { return };
        let send = Box::new(SendWork { handoff: range.handoff, header, source, altered, _owner: owner, credit });
        // SAFETY: header, source and altered bytes are heap memory of `send`, the blocks are its owner's; the table of
        // operations keeps it until the callback came or the endpoint is closed.
        let posted = unsafe { entry.endpoint.send_range(&send.header[..], region, &send.source, operation) };
        self.keep(to, operation, posted, Work::Send(send));
    }

    /// Tells the receiver where in our memory a range is.
    fn announce_range(
        &mut self,
        to: EndpointId,
        range: DataHeader,
        runs: &[Run],
        owner: BlockOwner,
        credit: OwnedSemaphorePermit,
    ) {
        let Some(outbound) = self.sending.handoffs.get_mut(&range.handoff) else { return };
        let _owner = if self.config.mutation == Mutation::FreeAnnounced { Arc::new(()) } else { owner };
        let (header, source, altered) = Default::default();
        let work = SendWork { handoff: range.handoff, header, source, altered, _owner, credit };
        outbound.uncopied.ranges.push((range, work));
        outbound.uncopied.due = Some(Instant::now() + self.config.stall_timeout);
        self.post_frame(to, Header::Ready(range), announcement::encode(runs));
    }

    /// Late ones (of a hand-off that was cancelled here) are normal.
    pub(super) fn on_copied(&mut self, range: DataHeader) {
        let Some(outbound) = self.sending.handoffs.get_mut(&range.handoff) else { return };
        let uncopied = &mut outbound.uncopied;
        let Some(at) = uncopied.ranges.iter().position(|(announced, _)| *announced == range) else {
            return self.shared.registry.violation();
        };
        let (_, work) = uncopied.ranges.remove(at);
        let is_more = !uncopied.ranges.is_empty();
        uncopied.due = is_more.then(|| Instant::now() + self.config.stall_timeout);
        self.range_sent(work);
    }

    pub(super) fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) {
        if let Some(outbound) = self.sending.handoffs.get_mut(&handoff) {
            outbound.seal = Some(payload);
            self.send_ready_seal(handoff);
        }
    }

    pub(super) fn cancel(&mut self, handoff: HandoffId) {
        self.cancel_because(handoff, &TransferError::peer_gone("the KV transport took leave of its peers"));
    }

    fn cancel_because(&mut self, handoff: HandoffId, why: &TransferError) {
        if let Some(outbound) = self.sending.handoffs.remove(&handoff) {
            self.post_frame(outbound.endpoint, Header::Cancel(handoff), Vec::new());
            outbound.fail(why);
        }
    }

    /// At shutdown.
    pub(super) fn cancel_all(&mut self) {
        let handoffs: Vec<_> = self.sending.handoffs.keys().copied().collect();
        handoffs.into_iter().for_each(|handoff| self.cancel(handoff));
    }

    pub(super) fn range_sent(&mut self, send: SendWork) {
        let returning = &mut self.sending.returning;
        returning.bytes += send.credit.num_permits();
        returning.permits.push(send.credit);
        if returning.bytes >= self.config.credit_bytes / CREDIT_SHARE {
            self.sending.return_credit();
        }
        if let Some(outbound) = self.sending.handoffs.get_mut(&send.handoff) {
            outbound.in_flight = outbound.in_flight.saturating_sub(1);
            self.send_ready_seal(send.handoff);
        }
    }

    /// Late answers (of a hand-off that was cancelled here) are normal.
    pub(super) fn on_answer(&mut self, handoff: HandoffId, answer: Answer) {
        if let Some(outbound) = self.sending.handoffs.remove(&handoff) {
            self.shared.pending.answer(outbound.endpoint.into(), handoff, answer);
            outbound.fail(&match answer {
                Answer::Refused(refusal) => refusal.into(),
                Answer::Ack => TransferError::new(TransferErrorKind::Io, "the receiver answered before the seal"),
            });
        }
    }

    fn announce(&mut self, handoff: HandoffId, address: &CheckedAddress) -> Result<Opened, TransferError> {
        let (operations, sending, receiving) = (&self.operations, &self.sending, &self.receiving);
        let busy = |id| operations.is_busy(id) || sending.uses(id) || receiving.uses(id);
        let endpoint = self.endpoints.connect(address, Instant::now(), busy)?;
        let credit = self.endpoints.get(endpoint).map(|entry| entry.credit.clone());
        let credit = credit.ok_or_else(|| TransferError::peer_gone("the KV peer is gone"))?;
        let answer = self.shared.pending.register(endpoint.into(), handoff)?;
        Ok(Opened { endpoint, credit, answer })
    }

    fn send_ready_seal(&mut self, handoff: HandoffId) {
        let Some(outbound) = self.sending.handoffs.get_mut(&handoff).filter(|outbound| outbound.in_flight == 0) else {
            return;
        };
        if let Some(payload) = outbound.seal.take() {
            let endpoint = outbound.endpoint;
            self.post_frame(endpoint, Header::Seal(handoff), payload);
        }
    }

    /// The runs' bytes with the faults applied; empty without faults.
    fn altered(&self, runs: &[Run], faults: Faults) -> Vec<u8> {
        if faults == Faults::default() {
            return Vec::new();
        }
        let arena = &self.shared.arena;
        let mut bytes = vec![0; runs.iter().map(|run| run.bytes).sum()];
        arena.gather(runs, 0, &mut bytes);
        if faults.flip_byte {
            bytes[0] ^= 1;
        }
        if faults.truncate_push {
            bytes.truncate(bytes.len().saturating_sub(8));
        }
        bytes
    }
}
