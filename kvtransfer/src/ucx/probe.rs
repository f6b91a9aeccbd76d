//! Is our own shared-memory queue still alive? Senders of UCX's shared memory take a slot of the receiver's queue, fill
//! it and then mark it as full. One that is killed (or frozen) in between leaves a slot that never becomes full, and
//! the receiver waits for it for ever, deaf to every other peer. UCX cannot see that, so after each lost peer, and
//! before anybody learns of the loss, a second worker of ours sends the first one a frame; if it does not arrive, the
//! driver replaces its worker. Measured with UCX 1.13.1: about one SIGKILL in ten of a peer that was sending.
use std::rc::Rc;
use std::time::{Duration, Instant};

use tandem_proto::HandoffId;

use super::address::CheckedAddress;
use super::ids::{EndpointId, OperationId};
use super::owners::{Context, Endpoint, Worker};
use super::result::UcxError;
use crate::wire::Header;

/// The hand-off that a probe cancels. Real ones are 128 random bits.
pub(super) const PROBE: HandoffId = HandoffId(*b"tandem ucx probe");
/// Both workers are on one thread, so the frame takes microseconds; a queue full of other frames takes longer.
const TIMEOUT: Duration = Duration::from_millis(300);
/// And as many turns, because a busy machine may not let this thread run.
const MIN_TURNS: u32 = 200;

/// A frame to ourselves that has not arrived yet.
pub(super) struct Probe {
    endpoint: Option<Endpoint>,
    worker: Rc<Worker>,
    _header: Vec<u8>,
    until: Instant,
    turns: u32,
}

impl Probe {
    /// Sends it to the worker of `address`.
    pub(super) fn start(context: &Rc<Context>, address: &CheckedAddress, now: Instant) -> Result<Self, UcxError> {
        let worker = Worker::create(context)?;
        let endpoint = Endpoint::connect(&worker, address, EndpointId::NONE)?;
        let header = Header::Cancel(PROBE).encode().to_vec();
        // SAFETY: the header is heap memory that lives until the worker is destroyed.
        unsafe { endpoint.send_frame(&header[..], &[], OperationId::NONE)? };
        Ok(Self { endpoint: Some(endpoint), worker, _header: header, until: now + TIMEOUT, turns: 0 })
    }

    /// Lets it fly. False: it did not arrive in time.
    pub(super) fn progress(&mut self, now: Instant) -> bool {
        self.turns += 1;
        self.worker.progress();
        now < self.until || self.turns < MIN_TURNS
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Before the worker, and the worker before the header.
        self.endpoint = None;
    }
}
