//! The driver's receiving half: which endpoint a hand-off came from, and where its ranges go. The rules are the
//! registry's; an address from the wire is never used, a range's place comes from its claim.
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tandem_proto::{HandoffId, PROTOCOL_VERSION};

use super::budget::Budget;
use super::desk::Desk;
use super::hello::{self, About, AboutError};
use super::ids::EndpointId;
use super::inbox::Descriptor;
use super::one_copy::announcement;
use crate::error::Refusal;
use crate::handshake::{Hello, Nonces, Way};
use crate::registry::{Authenticated, Claim};
use crate::wire::{Answer, DataHeader, HEADER_BYTES, Header};

/// Hand-offs announced and not yet forgotten.
const MAX_HANDOFFS: usize = 16 * 1024;
/// Frames of a refused hand-off that were under way still get the right answer.
const REMEMBER_REFUSED: Duration = Duration::from_secs(10);

/// Hand-offs that come to this node.
pub(super) struct Receiving {
    handoffs: HashMap<HandoffId, Inbound>,
    /// Payloads that were announced, and may be written where their claims say.
    landing: Budget<(Descriptor, Claim)>,
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
    /// Payloads that nobody will receive.
    pub(super) descriptors: Vec<Descriptor>,
}

impl Receiving {
    /// With at most `landing_bytes` under way at once.
    pub(super) fn new(landing_bytes: usize) -> Self {
        Self { handoffs: HashMap::new(), landing: Budget::new(landing_bytes), failed: Vec::new() }
    }

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
        let failed = self.failed.extract_if(.., |(id, _)| *id == endpoint).map(|(_, claim)| claim);
        let (descriptors, mut claims): (_, Vec<Claim>) = self.landing.forget(endpoint).into_iter().unzip();
        claims.extend(failed);
        Leftovers { handoffs, claims, descriptors }
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
    /// Somebody announces a hand-off. The hello reaches nothing before its hand-off's key was proved: no endpoint is
    /// made for anybody else. `busy`: other endpoints that the node needs.
    pub(super) fn on_hello(
        &mut self,
        desk: &mut Desk,
        protocol: u32,
        payload: &[u8],
        busy: impl Fn(EndpointId) -> bool,
    ) {
        if protocol != PROTOCOL_VERSION {
            return refuse_hello(desk, &AboutError::Protocol(protocol));
        }
        let Some(hello) = Hello::parse(payload).filter(|_| payload.len() <= hello::MAX_BYTES) else {
            return refuse_hello(desk, &AboutError::Malformed);
        };
        let about = About::parse(hello.about, &desk.build_id, &desk.key);
        let authenticated = match desk.registry().authenticate(&hello) {
            Ok(authenticated) => authenticated,
            Err(refusal) => {
                refuse_hello(desk, &refusal);
                // Told if there is an endpoint to it anyway.
                if let Some(known) = about.ok().and_then(|about| desk.endpoints.known(&about.address)) {
                    let answer = Header::Answer(hello.handoff, Answer::Refused(refusal));
                    desk.post_frame(known, answer, Vec::new());
                }
                return;
            }
        };
        let about = match about {
            Ok(about) => about,
            Err(error) => return refuse_hello(desk, &error),
        };
        let endpoint = match desk.answer_to(&about.address, &about.origin, |id| self.uses(id) || busy(id)) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                tracing::warn!(handoff = %hello.handoff, "cannot connect back to the KV sender: {error}");
                desk.registry().violation();
                return;
            }
        };
        // Refused hand-offs are not listed: a flood of hellos for nothing takes no room from others.
        match self.welcomes(desk, endpoint, hello.handoff, &authenticated) {
            Ok(()) => {
                self.list(hello.handoff, endpoint);
                let nonces = Nonces { sender: hello.nonce, receiver: rand::random() };
                let origin = desk.origin(endpoint).encode();
                let counters = desk.registry().counters().clone();
                let (way, header) = match desk.one_copy.map(endpoint, about.origin.memory, &counters) {
                    true => (Way::Copied, Header::WillCopy(hello.handoff)),
                    false => (Way::Sent, Header::Welcome(hello.handoff)),
                };
                let welcome = authenticated.secret().welcome(way, nonces, hello.about, &origin);
                desk.post_frame(endpoint, header, welcome);
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
            Ok(claim) if desk.takes(claim.runs()) => {
                self.landing.announce(endpoint, length, (descriptor, claim));
                self.land(desk);
            }
            // The ticket has said where to cut. Dropping the claim fails the hand-off.
            Ok(_cut_elsewhere) => {
                desk.registry().violation();
                desk.release(descriptor);
            }
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

    /// Posts the payloads whose turn it is. Their deadlines begin here.
    pub(super) fn land(&mut self, desk: &mut Desk) {
        while let Some((endpoint, (descriptor, claim))) = self.landing.next() {
            if desk.endpoints.get(endpoint).is_some() {
                let peak = &desk.registry().counters().landing_peak_bytes;
                peak.fetch_max(self.landing.under_way_bytes() as u64, Relaxed);
                desk.receive(endpoint, descriptor, claim);
            } else {
                // It is closing: what would land now would have to be waited for.
                self.ended(endpoint, &claim);
                desk.release(descriptor);
                self.hold(endpoint, claim);
            }
        }
    }

    /// A payload is here, or will not come: another one may have its turn.
    pub(super) fn ended(&mut self, from: EndpointId, claim: &Claim) {
        self.landing.ended(from, usize::try_from(claim.bytes()).unwrap_or(usize::MAX));
    }

    /// The worker ends: nothing of what waits will be posted.
    pub(super) fn dismiss_all(&mut self, desk: &mut Desk) {
        for (endpoint, (descriptor, claim)) in self.landing.forget_all() {
            desk.release(descriptor);
            self.hold(endpoint, claim);
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

    /// Opens a hand-off for `endpoint`. Refusals are counted.
    fn welcomes(
        &mut self,
        desk: &Desk,
        endpoint: EndpointId,
        handoff: HandoffId,
        authenticated: &Authenticated,
    ) -> Result<(), Refusal> {
        let refusal = match self.endpoint(handoff) {
            Some(known) if known != endpoint => Refusal::WrongPeer,
            _ if self.has_room() => return desk.registry().open(endpoint.into(), authenticated),
            _ => Refusal::Overloaded,
        };
        desk.registry().counters().count_refusal(refusal);
        Err(refusal)
    }
}

fn refuse_hello(desk: &Desk, why: &dyn std::fmt::Display) {
    tracing::debug!("KV hello refused: {why}");
    desk.registry().counters().rejected_hellos.fetch_add(1, Relaxed);
    desk.registry().violation();
}
