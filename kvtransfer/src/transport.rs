//! The transport that nodes use, as one object-safe trait, and what goes in and out of it.
//!
//! # How a backend plugs in
//!
//! Rules live in common code; a backend only moves frames (`wire.rs`: a 32-byte header, and a payload for some).
//!
//! **Receiving.** The backend owns an [`Arc<Registry>`](crate::registry::Registry), made with an
//! [`PeerLink`](crate::registry::PeerLink) that can send a header to a peer without blocking, and end its connection.
//! `Transport::accept` is `Incoming::accept(registry, grant, info, address)`. A sender opens its hand-off by a hello
//! (`handshake.rs`): `registry.authenticate(hello)` first, which costs nobody anything, then whatever the backend needs
//! to know the peer, then `registry.open(peer, authenticated)`; answer with the welcome. For each frame of a peer (a
//! [`PeerId`](crate::terms::PeerId) of the backend's choice, one per connection or endpoint, never reused):
//!
//! - data: `registry.claim(peer, header, payload_len)`. `Ok(claim)`: write the payload to `claim.runs()` of the arena,
//!   then `claim.written()`; dropping the claim instead says that the range failed. `Err(_)`: discard the payload; the
//!   refusal was already sent.
//! - keep-alive: `registry.keep_alive(peer, handoff)`.
//! - seal: `registry.seal(peer, handoff, payload)`.
//! - cancel: `registry.cancelled_by(peer, handoff)`.
//! - peer gone: when no write of that peer can touch the arena any more, `registry.fence(peer)`; before that, for each
//!   of its hand-offs, `registry.lost_by(peer, handoff)` where its writes may go on.
//! - garbage: `registry.violation()`, and close the connection.
//!
//! While a `Claim` lives, its blocks stay out of the pool, whatever happens to the hand-off.
//!
//! **Sending.** The backend owns an [`Arc<PendingAnswers>`](crate::outgoing::PendingAnswers). `Transport::open` checks
//! the ticket with [`read_ticket`], finds or makes the connection, says hello with the ticket's [`Secret`], checks the
//! welcome, and returns
//! `Outgoing::new(link, pending.register(peer, handoff)?, ..)` where `link` is its
//! [`SendLink`](crate::outgoing::SendLink). An answer frame goes to `pending.answer(peer, handoff, answer)`, a lost
//! peer to `pending.peer_gone(peer, why)` (a peer lost before `register` is the backend's to notice).
//! [`Faults`](crate::terms::Faults) are applied by the backend to the bytes that leave.
//!
//! Everything else (waiting, deadlines, verification, coalescing, counters, cancellation by `Drop`) is common.
//! A backend joins the conformance suite by one constructor in `tests/conformance.rs`.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures::future::BoxFuture;
use tandem_proto::{HandoffId, Incarnation, v1};

use crate::arena::Arena;
use crate::build_id::difference;
use crate::counters::Counters;
use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::Secret;
use crate::incoming::Incoming;
use crate::joints::Joints;
use crate::outgoing::Outgoing;
use crate::terms::{CheckedTicket, Grant};

/// One per node. Methods need a tokio runtime.
pub trait Transport: Send + Sync {
    /// Backend, name for people, and the build id that must be equal on both ends.
    fn info(&self) -> v1::TransportInfo;

    /// Where senders reach this node; opaque, travels in tickets.
    fn address(&self) -> Vec<u8>;

    /// Counts since start.
    fn counters(&self) -> Arc<Counters>;

    /// Why it cannot move KV any more, for good: a node whose transport has failed must leave. `None`: it works.
    fn failed(&self) -> Option<String>;

    /// Receiving side: lets one sender fill the grant's blocks.
    ///
    /// # Errors
    /// `Refused` for a used id or blocks that are not the arena's, `Overloaded` when too many grants are out.
    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError>;

    /// Sending side: connects to the ticket's receiver.
    ///
    /// # Errors
    /// `Incompatible` when the builds or block sizes differ, `PeerGone`, `Timeout`, `Io`.
    fn open<'a>(&'a self, ticket: &'a v1::Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>>;
}

/// What every backend's `open` does with a ticket before it connects: a refused one is counted.
///
/// # Errors
/// Those of [`check_ticket`] and [`Secret::of`], and of `address`, which reads the backend's own part.
pub fn read_ticket<A>(
    ticket: &v1::Ticket,
    ours: &v1::TransportInfo,
    arena: &Arena,
    counters: &Counters,
    address: impl FnOnce(&[u8]) -> Result<A, TransferError>,
) -> Result<(CheckedTicket, Secret, A), TransferError> {
    let read = || {
        let checked = check_ticket(ticket, ours, arena)?;
        Ok((checked, Secret::of(ticket)?, address(&ticket.address)?))
    };
    read().inspect_err(|_| _ = counters.rejected_tickets.fetch_add(1, Relaxed))
}

/// Checks of a ticket that do not depend on the backend.
///
/// # Errors
/// `Incompatible` when transport builds or block sizes differ, `Io` for a ticket that cannot be one.
pub fn check_ticket(
    ticket: &v1::Ticket,
    ours: &v1::TransportInfo,
    arena: &Arena,
) -> Result<CheckedTicket, TransferError> {
    let incompatible = |message| Err(TransferError::new(TransferErrorKind::Incompatible, message));
    let theirs = ticket.transport.clone().unwrap_or_default();
    if (&theirs.backend, &theirs.build_id) != (&ours.backend, &ours.build_id) {
        return incompatible(format!(
            "the KV receiver is of another build: {}",
            difference(&ours.build_id, &theirs.build_id)
        ));
    }
    if ticket.block_bytes != arena.block_bytes() as u64 {
        return incompatible(format!(
            "KV blocks differ: ours have {} bytes, the receiver's {}",
            arena.block_bytes(),
            ticket.block_bytes
        ));
    }
    let units = u8::try_from(ticket.units.max(1)).ok().filter(|units| arena.divides_into(*units));
    let Some(units) = units else {
        return incompatible(format!(
            "KV blocks of {} bytes do not come in {} units",
            ticket.block_bytes, ticket.units
        ));
    };
    let handoff = HandoffId::from_wire(&ticket.handoff_id)
        .map_err(|error| TransferError::new(TransferErrorKind::Io, error.message))?;
    let lease = Duration::from_millis(u64::from(ticket.lease_ms));
    let joints = Joints::parse(&ticket.joints, ticket.blocks)?;
    Ok(CheckedTicket { handoff, blocks: ticket.blocks, units, joints, lease })
}

/// Checks of a ticket that the sending node makes, which alone knows who it is.
///
/// # Errors
/// `Incompatible` when the ticket is for another incarnation or another layout.
pub fn check_identity(ticket: &v1::Ticket, incarnation: Incarnation, digest: u64) -> Result<(), TransferError> {
    if ticket.prefill_incarnation != incarnation.0 {
        let message = "the ticket is for another incarnation of this node";
        return Err(TransferError::new(TransferErrorKind::Incompatible, message));
    }
    if ticket.compatibility_digest != digest {
        let message = "the receiver's model, arithmetic, KV dtype or layout, or version of Tandem differs from ours: run \
                       one version with one model and the same flags on all nodes";
        return Err(TransferError::new(TransferErrorKind::Incompatible, message));
    }
    Ok(())
}
