//! The driver's receiving half: which endpoint a hand-off came from, and where its ranges go. The rules are the
//! registry's; an address from the wire is never used, a range's place comes from its claim.
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, PROTOCOL_VERSION};

use super::desk::Desk;
use super::hello::{Hello, HelloError};
use super::ids::EndpointId;
use super::inbox::Descriptor;
use super::one_copy::announcement;
use crate::error::Refusal;
use crate::registry::Claim;
use crate::wire::{Answer, DataHeader, HEADER_BYTES, Header};

/// Hand-offs announced and not yet forgotten.
const MAX_HANDOFFS: usize = 16 * 1024;
/// Frames of a refused hand-off that were under way still get the right answer.
const REMEMBER_REFUSED: Duration = Duration::from_secs(10);

/// Hand-offs that come to this node.
#[derive(Default)]
pub(super) struct Receiving {
    handoffs: HashMap<HandoffId, Inbound>,
    /// Of receives that failed; dropped with their endpoint.
    failed: Vec<(EndpointId, Claim)>,
}

struct Inbound {
    endpoint: EndpointId,
    forget_at: Option<Instant>,
}

/// What a closed endpoint leaves.
pub(super) struct Leftovers {
    pub(super) handoffs: Vec<HandoffId>,
    pub(super) claims: Vec<Claim>,
}

impl Receiving {
    pub(super) fn uses(&self, endpoint: EndpointId) -> bool {
        self.handoffs.values().any(|inbound| inbound.endpoint == endpoint && inbound.forget_at.is_none())
    }

    /// Some hand-off is not over.
    pub(super) fn is_busy(&self) -> bool {
        self.handoffs.values().any(|inbound| inbound.forget_at.is_none())
    }

    pub(super) fn hold(&mut self, endpoint: EndpointId, claim: Claim) {
        self.failed.push((endpoint, claim));
    }

    pub(super) fn forget(&mut self, endpoint: EndpointId) -> Leftovers {
        let of = |inbound: &Inbound| inbound.endpoint == endpoint;
        let handoffs = self.handoffs.extract_if(|_, inbound| of(inbound)).map(|(handoff, _)| handoff).collect();
        let claims = self.failed.extract_if(.., |(id, _)| *id == endpoint).map(|(_, claim)| claim).collect();
        Leftovers { handoffs, claims }
    }

    pub(super) fn sweep(&mut self, now: Instant) {
        self.handoffs.retain(|_, inbound| inbound.forget_at.is_none_or(|at| now < at));
    }

    /// The answered are remembered only while nobody else needs the room.
    fn has_room(&mut self) -> bool {
        if self.handoffs.len() >= MAX_HANDOFFS {
            self.handoffs.retain(|_, inbound| inbound.forget_at.is_none());
        }
        self.handoffs.len() < MAX_HANDOFFS
    }

    /// Frames of the hand-off come from `endpoint`.
    pub(super) fn list(&mut self, handoff: HandoffId, endpoint: EndpointId) {
        self.handoffs.insert(handoff, Inbound { endpoint, forget_at: None });
    }

    fn endpoint(&self, handoff: HandoffId) -> Option<EndpointId> {
        self.handoffs.get(&handoff).map(|inbound| inbound.endpoint)
    }

    fn forget_later(&mut self, handoff: HandoffId) {
        if let Some(inbound) = self.handoffs.get_mut(&handoff) {
            inbound.forget_at = Some(Instant::now() + REMEMBER_REFUSED);
        }
    }
}

impl Receiving {
    /// Somebody announces a hand-off. `busy`: other endpoints that the node needs.
    pub(super) fn on_hello(
        &mut self,
        desk: &mut Desk,
        protocol: u32,
        payload: &[u8],
        busy: impl Fn(EndpointId) -> bool,
    ) {
        let hello = Hello::parse(payload, &desk.build_id, &desk.key);
        let build = if protocol == PROTOCOL_VERSION { Ok(()) } else { Err(HelloError::Build) };
        let hello = match build.and(hello) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::debug!("KV hello refused: {error}");
                desk.registry().counters().rejected_hello_addresses.fetch_add(1, Relaxed);
                desk.registry().violation();
                return;
            }
        };
        let endpoint = match desk.answer_to(&hello.address, &hello.origin, |id| self.uses(id) || busy(id)) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                tracing::warn!(handoff = %hello.handoff, "cannot connect back to the KV sender: {error}");
                desk.registry().violation();
                return;
            }
        };
        // Refused hand-offs are not listed: a flood of hellos for nothing takes no room from others.
        match self.welcomes(desk, endpoint, hello.handoff) {
            Ok(()) => {
                self.list(hello.handoff, endpoint);
                let origin = desk.origin(endpoint).encode().to_vec();
                let counters = desk.shared.registry.counters().clone();
                let welcome = match desk.one_copy.map(endpoint, hello.origin.memory, &counters) {
                    true => Header::WillCopy(hello.handoff),
                    false => Header::Welcome(hello.handoff),
                };
                desk.post_frame(endpoint, welcome, origin);
            }
            // Told, or it would wait for its lease.
            Err(refusal) => {
                let answer = Header::Answer(hello.handoff, Answer::Refused(refusal));
                desk.post_frame(endpoint, answer, Vec::new());
            }
        }
    }

    pub(super) fn on_range(
        &mut self,
        desk: &mut Desk,
        header: &[u8; HEADER_BYTES],
        length: usize,
        descriptor: Descriptor,
    ) {
        let parsed = Header::parse(header);
        // Not one that overtook its hello: senders wait for the welcome.
        let known = match parsed {
            Some(Header::Data(range)) => self.endpoint(range.handoff).map(|endpoint| (range, endpoint)),
            _ => None,
        };
        let Some((range, endpoint)) = known else {
            desk.registry().violation();
            desk.release(descriptor);
            return;
        };
        match desk.registry().claim(endpoint.into(), range, length as u64) {
            Ok(claim) => desk.receive(endpoint, descriptor, claim),
            // The registry has answered.
            Err(_) => desk.release(descriptor),
        }
    }

    /// A range is final in the memory of a sender that we map: it is copied on another thread.
    pub(super) fn on_ready(&self, desk: &Desk, range: DataHeader, payload: &[u8]) {
        let registry = desk.registry();
        // As in `on_range`.
        let Some(endpoint) = self.endpoint(range.handoff) else { return registry.violation() };
        let source = announcement::parse(payload);
        let Some((memory, source)) = source.and_then(|source| desk.one_copy.memory(endpoint, source)) else {
            return registry.unreadable(endpoint.into(), range.handoff);
        };
        let bytes = source.iter().map(|run| run.bytes as u64).sum();
        // The registry has answered what it refuses.
        if let Ok(claim) = registry.claim(endpoint.into(), range, bytes) {
            desk.one_copy.copy(endpoint, claim, memory, source);
        }
    }

    pub(super) fn on_seal(&mut self, desk: &Desk, handoff: HandoffId, payload: &[u8]) {
        match self.endpoint(handoff) {
            Some(endpoint) => desk.registry().seal(endpoint.into(), handoff, payload),
            None => desk.registry().violation(),
        }
    }

    pub(super) fn on_keep_alive(&mut self, desk: &Desk, handoff: HandoffId) {
        match self.endpoint(handoff) {
            Some(endpoint) => desk.registry().keep_alive(endpoint.into(), handoff),
            None => desk.registry().violation(),
        }
    }

    pub(super) fn on_cancel(&mut self, desk: &Desk, handoff: HandoffId) {
        if let Some(endpoint) = self.endpoint(handoff) {
            desk.registry().cancelled_by(endpoint.into(), handoff);
            self.forget_later(handoff);
        }
    }

    /// At shutdown: senders would wait for their lease otherwise.
    pub(super) fn refuse_all(&mut self, desk: &mut Desk) {
        let open = self.handoffs.iter().filter(|(_, inbound)| inbound.forget_at.is_none());
        let open: Vec<_> = open.map(|(handoff, inbound)| (*handoff, inbound.endpoint)).collect();
        for (handoff, endpoint) in open {
            self.answer(desk, endpoint, handoff, Answer::Refused(Refusal::Cancelled));
        }
    }

    pub(super) fn answer(&mut self, desk: &mut Desk, to: EndpointId, handoff: HandoffId, answer: Answer) {
        desk.post_frame(to, Header::Answer(handoff, answer), Vec::new());
        self.forget_later(handoff);
    }

    /// Whether a hand-off may come from `endpoint`. Refusals are counted.
    fn welcomes(&mut self, desk: &Desk, endpoint: EndpointId, handoff: HandoffId) -> Result<(), Refusal> {
        desk.registry().admits(endpoint.into(), handoff)?;
        let refusal = match self.endpoint(handoff) {
            Some(known) if known != endpoint => Refusal::WrongPeer,
            _ if self.has_room() => return Ok(()),
            _ => Refusal::Overloaded,
        };
        desk.registry().counters().count_refusal(refusal);
        Err(refusal)
    }
}
