//! The driver's sending half: announces a hand-off, posts its ranges, and holds the seal until UCX has delivered them
//! all, or the receiver has copied them all itself (`one_copy/`). UCX does not promise that messages arrive in order,
//! so nothing may depend on what is still under way: whoever opens a hand-off gets it when the receiver has answered
//! the hello, and no range can overtake that.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::HandoffId;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::address::CheckedAddress;
use super::commands::Opened;
use super::desk::{Desk, Load};
use super::endpoints::Loss;
use super::ids::EndpointId;
use super::one_copy::announcement;
use super::operations::SendCargo;
use super::origin::Origin;
use crate::arena::{Arena, Run};
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::{Nonce, Secret, Way, Welcome};
use crate::terms::{BlockOwner, Faults};
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

struct Outbound {
    endpoint: EndpointId,
    /// How ranges get to the receiver, since its welcome.
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
    ranges: Vec<(DataHeader, SendCargo)>,
    /// The receiver is given up when none of them is copied until then.
    due: Option<Instant>,
}

/// A hand-off that its receiver may not know yet.
struct Announced {
    opened: Opened,
    reply: Reply,
    introduction: Introduction,
    /// Given up then.
    until: Instant,
}

/// What this end has said of itself in a hello: the welcome answers it.
struct Introduction {
    secret: Secret,
    nonce: Nonce,
    about: Vec<u8>,
}

impl Introduction {
    /// Where a welcome comes from, if it was made with the key, for this hello and this way.
    fn origin_of(&self, way: Way, welcome: &[u8]) -> Option<Origin> {
        let welcome = Welcome::parse(welcome)?;
        let (origin, rest) = Origin::parse(welcome.about)?;
        (rest.is_empty() && self.secret.welcomed(way, &welcome, self.nonce, &self.about)).then_some(origin)
    }
}

type Reply = oneshot::Sender<Result<Opened, TransferError>>;

impl Sending {
    pub(super) fn uses(&self, endpoint: EndpointId) -> bool {
        self.handoffs.values().any(|outbound| outbound.endpoint == endpoint)
    }

    /// Some hand-off is not over.
    pub(super) fn is_busy(&self) -> bool {
        !self.handoffs.is_empty()
    }

    pub(super) fn forget(&mut self, endpoint: EndpointId, why: &TransferError) {
        let of = |outbound: &Outbound| outbound.endpoint == endpoint;
        self.handoffs.extract_if(|_, outbound| of(outbound)).for_each(|(_, outbound)| outbound.fail(why));
    }

    /// Whoever waits for credit may push again.
    pub(super) fn return_credit(&mut self) {
        self.returning = Returning::default();
    }

    fn unwelcome(&self, now: Instant) -> Vec<HandoffId> {
        let late = |outbound: &Outbound| outbound.announced.as_ref().is_some_and(|announced| now >= announced.until);
        self.handoffs.iter().filter(|(_, outbound)| late(outbound)).map(|(handoff, _)| *handoff).collect()
    }
}

impl Uncopied {
    fn add(&mut self, range: DataHeader, owner: BlockOwner, credit: OwnedSemaphorePermit, due: Instant) {
        let (header, source, altered) = Default::default();
        let cargo = SendCargo { handoff: range.handoff, header, source, altered, _owner: owner, credit };
        self.ranges.push((range, cargo));
        self.due = Some(due);
    }

    /// The receiver has this one; `due` is for the others.
    fn take(&mut self, range: DataHeader, due: Instant) -> Option<SendCargo> {
        let at = self.ranges.iter().position(|(announced, _)| *announced == range)?;
        let (_, cargo) = self.ranges.remove(at);
        self.due = (!self.ranges.is_empty()).then_some(due);
        Some(cargo)
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

impl Sending {
    /// Announces a hand-off. `busy`: other endpoints that the node needs.
    pub(super) fn open_handoff(
        &mut self,
        desk: &mut Desk,
        handoff: HandoffId,
        address: &CheckedAddress,
        (secret, reply): (Secret, Reply),
        busy: impl Fn(EndpointId) -> bool,
    ) {
        let endpoint = match desk.connect(address, |id| self.uses(id) || busy(id)) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                // Somebody who does not wait any more need not know.
                let _ = reply.send(Err(error));
                return;
            }
        };
        self.announce(desk, handoff, endpoint, secret, reply);
    }

    /// The receiver knows the hand-off, and sends from this end of its own. A welcome that was not made with the
    /// hand-off's key is garbage: the receiver's own may still come.
    pub(super) fn on_welcome(&mut self, desk: &mut Desk, handoff: HandoffId, payload: &[u8], way: Way) {
        let Some(outbound) = self.handoffs.get_mut(&handoff) else { return };
        let endpoint = outbound.endpoint;
        let Some(announced) = &outbound.announced else { return };
        let Some(origin) = announced.introduction.origin_of(way, payload) else { return desk.registry().violation() };
        let Some(announced) = outbound.announced.take() else { return };
        outbound.way = way;
        if desk.endpoints.is_outdated(endpoint, origin.generation) {
            return self.announce_again(desk, handoff, endpoint, announced, &origin);
        }
        desk.meet(endpoint, &origin);
        if let Err(Ok(unwanted)) = announced.reply.send(Ok(announced.opened)) {
            drop(unwanted);
            self.cancel(desk, handoff);
        }
    }

    /// The receiver may be frozen, or cannot read the hello. Other hand-offs have deadlines of their own.
    pub(super) fn give_up_unwelcome(&mut self, desk: &mut Desk, now: Instant) {
        for handoff in self.unwelcome(now) {
            let why = TransferError::new(TransferErrorKind::Timeout, "the KV receiver does not answer");
            self.cancel_because(desk, handoff, &why);
        }
    }

    /// Gives up receivers that copy nothing of what was announced: frozen ones keep no blocks.
    pub(super) fn give_up_uncopied(&self, desk: &mut Desk, now: Instant) {
        let late = |outbound: &&Outbound| outbound.uncopied.due.is_some_and(|due| now >= due);
        for outbound in self.handoffs.values().filter(late) {
            let message = "a KV transfer took too long; the peer is given up";
            let why = TransferError::new(TransferErrorKind::Timeout, message);
            desk.lose(outbound.endpoint, Loss::GivenUp, why);
        }
    }

    pub(super) fn push(
        &mut self,
        desk: &mut Desk,
        to: EndpointId,
        range: DataHeader,
        runs: &[Run],
        (owner, credit): (BlockOwner, OwnedSemaphorePermit),
    ) {
        let Some(outbound) = self.handoffs.get_mut(&range.handoff) else { return };
        let faults = std::mem::take(&mut outbound.faults);
        outbound.in_flight += 1;
        if outbound.way == Way::Copied {
            let owner: BlockOwner = if desk.config.mutation.frees_announced() { Arc::new(()) } else { owner };
            outbound.uncopied.add(range, owner, credit, Instant::now() + desk.config.stall_timeout);
            let payload = announcement::encode(&announcement::altered(runs, faults));
            return desk.post_frame(to, Header::Ready(range), payload);
        }
        let altered = altered(&desk.shared.arena, runs, faults);
        desk.post_range(to, range, runs, Load { altered, owner, credit });
    }

    /// Late ones (of a hand-off that was cancelled here) are normal.
    pub(super) fn on_copied(&mut self, desk: &mut Desk, range: DataHeader) {
        let Some(outbound) = self.handoffs.get_mut(&range.handoff) else { return };
        match outbound.uncopied.take(range, Instant::now() + desk.config.stall_timeout) {
            Some(cargo) => self.range_sent(desk, cargo),
            None => desk.registry().violation(),
        }
    }

    pub(super) fn seal(&mut self, desk: &mut Desk, handoff: HandoffId, payload: Vec<u8>) {
        if let Some(outbound) = self.handoffs.get_mut(&handoff) {
            outbound.seal = Some(payload);
            self.send_ready_seal(desk, handoff);
        }
    }

    pub(super) fn cancel(&mut self, desk: &mut Desk, handoff: HandoffId) {
        self.cancel_because(desk, handoff, &TransferError::peer_gone("the KV transport took leave of its peers"));
    }

    /// At shutdown.
    pub(super) fn cancel_all(&mut self, desk: &mut Desk) {
        let handoffs: Vec<_> = self.handoffs.keys().copied().collect();
        handoffs.into_iter().for_each(|handoff| self.cancel(desk, handoff));
    }

    pub(super) fn range_sent(&mut self, desk: &mut Desk, send: SendCargo) {
        let returning = &mut self.returning;
        returning.bytes += send.credit.num_permits();
        returning.permits.push(send.credit);
        if returning.bytes >= desk.config.credit_bytes / CREDIT_SHARE {
            self.return_credit();
        }
        if let Some(outbound) = self.handoffs.get_mut(&send.handoff) {
            outbound.in_flight = outbound.in_flight.saturating_sub(1);
            self.send_ready_seal(desk, send.handoff);
        }
    }

    /// Late answers (of a hand-off that was cancelled here) are normal.
    pub(super) fn on_answer(&mut self, desk: &Desk, handoff: HandoffId, answer: Answer) {
        if let Some(outbound) = self.handoffs.remove(&handoff) {
            desk.shared.pending.answer(outbound.endpoint.into(), handoff, answer);
            outbound.fail(&match answer {
                Answer::Refused(refusal) => refusal.into(),
                Answer::Ack => TransferError::new(TransferErrorKind::Io, "the receiver answered before the seal"),
            });
        }
    }

    /// Says hello over `endpoint`.
    fn announce(&mut self, desk: &mut Desk, handoff: HandoffId, endpoint: EndpointId, secret: Secret, reply: Reply) {
        let opened = match open(desk, handoff, endpoint) {
            Ok(opened) => opened,
            Err(error) => {
                // As above.
                let _ = reply.send(Err(error));
                return;
            }
        };
        let introduction = Introduction { secret, nonce: rand::random(), about: desk.about(endpoint) };
        let hello = introduction.secret.hello(introduction.nonce, &introduction.about);
        let until = Instant::now() + desk.config.stall_timeout;
        let announced = Some(Announced { opened, reply, introduction, until });
        let (way, uncopied, faults) = (Way::Sent, Uncopied::default(), desk.config.faults);
        let outbound = Outbound { endpoint, way, in_flight: 0, uncopied, seal: None, faults, announced };
        self.handoffs.insert(handoff, outbound);
        desk.post_frame(endpoint, Header::hello(), hello);
    }

    /// What this endpoint sends leads to an end that the receiver has closed: another one takes its place. The others
    /// of its hand-offs are lost, and learn it now instead of by their deadlines.
    fn announce_again(
        &mut self,
        desk: &mut Desk,
        handoff: HandoffId,
        endpoint: EndpointId,
        announced: Announced,
        origin: &Origin,
    ) {
        self.handoffs.remove(&handoff);
        let Announced { opened, reply, introduction, .. } = announced;
        // Gives its place among the pending answers back.
        drop(opened);
        let Some(address) = desk.endpoints.address(endpoint) else {
            let _ = reply.send(Err(TransferError::peer_gone("the KV peer is gone")));
            return;
        };
        desk.lose(endpoint, Loss::GivenUp, TransferError::peer_gone("the KV receiver has connected anew"));
        match desk.connect(&address, |id| self.uses(id)) {
            Ok(endpoint) => {
                desk.meet(endpoint, origin);
                self.announce(desk, handoff, endpoint, introduction.secret, reply);
            }
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    fn cancel_because(&mut self, desk: &mut Desk, handoff: HandoffId, why: &TransferError) {
        if let Some(outbound) = self.handoffs.remove(&handoff) {
            desk.post_frame(outbound.endpoint, Header::Cancel(handoff), Vec::new());
            outbound.fail(why);
        }
    }

    fn send_ready_seal(&mut self, desk: &mut Desk, handoff: HandoffId) {
        let Some(outbound) = self.handoffs.get_mut(&handoff).filter(|outbound| outbound.in_flight == 0) else {
            return;
        };
        if let Some(payload) = outbound.seal.take() {
            let endpoint = outbound.endpoint;
            desk.post_frame(endpoint, Header::Seal(handoff), payload);
        }
    }
}

/// Begins to wait for the answer of a hand-off.
fn open(desk: &Desk, handoff: HandoffId, endpoint: EndpointId) -> Result<Opened, TransferError> {
    let credit = desk.endpoints.get(endpoint).map(|entry| entry.credit.clone());
    let credit = credit.ok_or_else(|| TransferError::peer_gone("the KV peer is gone"))?;
    let answer = desk.shared.pending.register(endpoint.into(), handoff)?;
    Ok(Opened { endpoint, credit, answer })
}

/// The runs' bytes with the faults applied; empty without faults.
fn altered(arena: &Arena, runs: &[Run], faults: Faults) -> Vec<u8> {
    if faults == Faults::default() {
        return Vec::new();
    }
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
