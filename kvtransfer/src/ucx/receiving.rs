//! The driver's receiving half: which endpoint a hand-off came from, and where its ranges go. The rules are the
//! registry's; an address from the wire is never used, a range's place comes from its claim.
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, PROTOCOL_VERSION};

use super::driver::Driver;
use super::endpoints::EndpointId;
use super::hello::{Hello, HelloError};
use super::inbox::Descriptor;
use super::one_copy::announcement;
use super::probe::PROBE;
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
pub(super) struct Held {
    pub(super) handoffs: Vec<HandoffId>,
    pub(super) claims: Vec<Claim>,
}

impl Receiving {
    pub(super) fn uses(&self, endpoint: EndpointId) -> bool {
        self.handoffs.values().any(|inbound| inbound.endpoint == endpoint && inbound.forget_at.is_none())
    }

    pub(super) fn hold(&mut self, endpoint: EndpointId, claim: Claim) {
        self.failed.push((endpoint, claim));
    }

    pub(super) fn forget(&mut self, endpoint: EndpointId) -> Held {
        let of = |inbound: &Inbound| inbound.endpoint == endpoint;
        let handoffs = self.handoffs.extract_if(|_, inbound| of(inbound)).map(|(handoff, _)| handoff).collect();
        let claims = self.failed.extract_if(.., |(id, _)| *id == endpoint).map(|(_, claim)| claim).collect();
        Held { handoffs, claims }
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

impl Driver {
    pub(super) fn on_hello(&mut self, protocol: u32, payload: &[u8]) {
        let hello = Hello::parse(payload, &self.build_id, &self.key);
        let build = if protocol == PROTOCOL_VERSION { Ok(()) } else { Err(HelloError::Build) };
        let hello = match build.and(hello) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::debug!("KV hello refused: {error}");
                self.shared.registry.counters().rejected_hello_addresses.fetch_add(1, Relaxed);
                self.shared.registry.violation();
                return;
            }
        };
        let (operations, sending, receiving) = (&self.operations, &self.sending, &self.receiving);
        let busy = |id| operations.is_busy(id) || sending.uses(id) || receiving.uses(id);
        let endpoint = match self.endpoints.connect(&hello.address, Instant::now(), busy) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                tracing::warn!(handoff = %hello.handoff, "cannot connect back to the KV sender: {error}");
                self.shared.registry.violation();
                return;
            }
        };
        // Refused hand-offs are not listed: a flood of hellos for nothing takes no room from others.
        let answer = match self.welcomes(endpoint, hello.handoff) {
            Ok(()) => {
                self.receiving.list(hello.handoff, endpoint);
                match self.one_copy.map(endpoint, hello.memory, self.shared.registry.counters()) {
                    true => Header::WillCopy(hello.handoff),
                    false => Header::Welcome(hello.handoff),
                }
            }
            // Told, or it would wait for its lease.
            Err(refusal) => Header::Answer(hello.handoff, Answer::Refused(refusal)),
        };
        self.post_frame(endpoint, answer, Vec::new());
    }

    /// Whether a hand-off may come from `endpoint`. Refusals are counted.
    fn welcomes(&mut self, endpoint: EndpointId, handoff: HandoffId) -> Result<(), Refusal> {
        let registry = &self.shared.registry;
        registry.admits(endpoint.into(), handoff)?;
        let refusal = match self.receiving.endpoint(handoff) {
            Some(known) if known != endpoint => Refusal::WrongPeer,
            _ if self.receiving.has_room() => return Ok(()),
            _ => Refusal::Overloaded,
        };
        registry.counters().count_refusal(refusal);
        Err(refusal)
    }

    pub(super) fn on_range(&mut self, header: &[u8; HEADER_BYTES], length: usize, descriptor: Descriptor) {
        let Some(Header::Data(range)) = Header::parse(header) else {
            self.shared.registry.violation();
            self.release(descriptor);
            return;
        };
        // Not one that overtook its hello: senders wait for the welcome.
        let Some(endpoint) = self.receiving.endpoint(range.handoff) else {
            self.shared.registry.violation();
            self.release(descriptor);
            return;
        };
        match self.shared.registry.claim(endpoint.into(), range, length as u64) {
            Ok(claim) => self.receive(endpoint, descriptor, claim),
            // The registry has answered.
            Err(_) => self.release(descriptor),
        }
    }

    /// A range is final in the memory of a sender that we map: it is copied on another thread.
    pub(super) fn on_ready(&mut self, range: DataHeader, payload: &[u8]) {
        let registry = &self.shared.registry;
        // As in `on_range`.
        let Some(endpoint) = self.receiving.endpoint(range.handoff) else { return registry.violation() };
        let source = announcement::parse(payload);
        let Some((memory, source)) = source.and_then(|source| self.one_copy.memory(endpoint, source)) else {
            return registry.unreadable(endpoint.into(), range.handoff);
        };
        let bytes = source.iter().map(|run| run.bytes as u64).sum();
        // The registry has answered what it refuses.
        if let Ok(claim) = registry.claim(endpoint.into(), range, bytes) {
            self.one_copy.copy(endpoint, claim, memory, source);
        }
    }

    pub(super) fn on_seal(&mut self, handoff: HandoffId, payload: &[u8]) {
        match self.receiving.endpoint(handoff) {
            Some(endpoint) => self.shared.registry.seal(endpoint.into(), handoff, payload),
            None => self.shared.registry.violation(),
        }
    }

    pub(super) fn on_keep_alive(&mut self, handoff: HandoffId) {
        match self.receiving.endpoint(handoff) {
            Some(endpoint) => self.shared.registry.keep_alive(endpoint.into(), handoff),
            None => self.shared.registry.violation(),
        }
    }

    pub(super) fn on_cancel(&mut self, handoff: HandoffId) {
        if handoff == PROBE {
            self.probe = None;
            return;
        }
        if let Some(endpoint) = self.receiving.endpoint(handoff) {
            self.shared.registry.cancelled_by(endpoint.into(), handoff);
            self.receiving.forget_later(handoff);
        }
    }

    /// At shutdown: senders would wait for their lease otherwise.
    pub(super) fn refuse_all(&mut self) {
        let open = self.receiving.handoffs.iter().filter(|(_, inbound)| inbound.forget_at.is_none());
        let open: Vec<_> = open.map(|(handoff, inbound)| (*handoff, inbound.endpoint)).collect();
        for (handoff, endpoint) in open {
            self.answer(endpoint, handoff, Answer::Refused(Refusal::Cancelled));
        }
    }

    pub(super) fn answer(&mut self, to: EndpointId, handoff: HandoffId, answer: Answer) {
        self.post_frame(to, Header::Answer(handoff, answer), Vec::new());
        self.receiving.forget_later(handoff);
    }
}
