//! Is our own shared-memory queue still alive? Senders of UCX's shared memory take a slot of the receiver's queue, fill
//! it and then mark it as full. One that is killed (or frozen) in between leaves a slot that never becomes full, and
//! the receiver waits for it for ever, deaf to every other peer. UCX cannot see that. So a second worker of ours sends
//! the first one a frame: after each lost peer and before anybody learns of the loss, and every second while peers are
//! connected, since a peer that freezes is not lost. If the frame does not arrive, the driver replaces its worker.
//! Measured with UCX 1.13.1: about one SIGKILL in ten of a peer that was sending.
//!
//! The second worker lives as long as the first: making one takes milliseconds, in which no transfer would go on. Both
//! are on one thread and share its inbox; what the second one does has ids that are in no table.
use std::rc::Rc;
use std::time::{Duration, Instant};

use tandem_proto::HandoffId;

use super::address::CheckedAddress;
use super::ids::{EndpointId, OperationId};
use super::owners::{Context, Endpoint, Worker};
use super::result::{Posted, UcxError};
use crate::wire::Header;

/// Both workers are on one thread, so the frame takes microseconds; a queue full of other frames takes longer.
const AFTER_LOSS: Duration = Duration::from_millis(300);
/// Without a loss the queue may wait for a peer that the machine does not let run.
const ROUTINE: Duration = Duration::from_secs(5);
/// And as many turns, because a busy machine may not let this thread run.
const MIN_TURNS: u32 = 200;
/// More than a ring holds.
const TEND_TURNS: usize = 64;
/// Between two probes without a loss.
const EVERY: Duration = Duration::from_secs(1);

/// Sends frames to our own worker, one at a time.
pub(super) struct Prober {
    endpoint: Option<Endpoint>,
    worker: Rc<Worker>,
    /// Of frames that UCX did not send at once: it may look at them until the worker's end. A frame that stays under
    /// way ends both workers, so they are few.
    headers: Vec<Vec<u8>>,
    /// In front of the number of each frame: nobody else can name one.
    name: [u8; 8],
    sent: u64,
    flight: Option<Flight>,
    last: Instant,
}

struct Flight {
    until: Instant,
    turns: u32,
}

impl Prober {
    /// One for the worker of `address`.
    pub(super) fn new(context: &Rc<Context>, address: &CheckedAddress, now: Instant) -> Result<Self, UcxError> {
        let worker = Worker::create(context)?;
        let endpoint = Some(Endpoint::connect(&worker, address, EndpointId::NONE)?);
        Ok(Self { endpoint, worker, headers: Vec::new(), name: rand::random(), sent: 0, flight: None, last: now })
    }

    /// A frame is under way.
    pub(super) fn is_flying(&self) -> bool {
        self.flight.is_some()
    }

    /// It is time for one, though nothing was lost.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.is_flying() && now.duration_since(self.last) >= EVERY
    }

    /// Sends one. False: UCX does not take it.
    pub(super) fn send(&mut self, after_loss: bool, now: Instant) -> bool {
        self.sent += 1;
        self.last = now;
        let header = Header::Cancel(self.handoff()).encode().to_vec();
        let Some(endpoint) = &self.endpoint else { return false };
        // SAFETY: the header is heap memory; unless it has left, it stays until the worker is destroyed.
        match unsafe { endpoint.send_frame(&header[..], &[], OperationId::NONE) } {
            Ok(Posted::Done) => {}
            Ok(Posted::Pending(_)) => self.headers.push(header),
            Err(error) => {
                tracing::warn!(%error, "cannot probe the UCX worker");
                return false;
            }
        }
        self.flight = Some(Flight { until: now + if after_loss { AFTER_LOSS } else { ROUTINE }, turns: 0 });
        true
    }

    /// Something was lost while a frame is under way: it need not be waited for that long.
    pub(super) fn hurry(&mut self, now: Instant) {
        if let Some(flight) = &mut self.flight {
            flight.until = flight.until.min(now + AFTER_LOSS);
        }
    }

    /// Whether this hand-off, cancelled by nobody, is the frame under way.
    pub(super) fn is_own(&self, handoff: HandoffId) -> bool {
        self.is_flying() && handoff == self.handoff()
    }

    /// The frame under way is here.
    pub(super) fn arrived(&mut self) {
        self.flight = None;
    }

    /// Takes what UCX's keepalive has written into the second worker's ring. Once a probe has met a full ring, the two
    /// workers know each other, and UCX tells this one every second that the other lives. A probe that arrives at once
    /// leaves this one no turn. Eight such words unread, and the driver would wait for room, awake, for ever.
    pub(super) fn tend(&self) {
        for _ in 0..TEND_TURNS {
            if !self.worker.progress() {
                break;
            }
        }
    }

    /// Lets it fly. False: it did not arrive in time.
    pub(super) fn progress(&mut self, now: Instant) -> bool {
        let Some(flight) = &mut self.flight else { return true };
        flight.turns += 1;
        self.worker.progress();
        now < flight.until || flight.turns < MIN_TURNS
    }

    /// The hand-off that the last frame cancels. Real ones are 128 random bits.
    fn handoff(&self) -> HandoffId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.name);
        id[8..].copy_from_slice(&self.sent.to_le_bytes());
        HandoffId(id)
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        // Before the worker, and the worker before the headers.
        self.endpoint = None;
    }
}
