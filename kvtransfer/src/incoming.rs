//! The receiving end of a hand-off as a node holds it: wait, verify, answer. The one place where verification happens.
use crate::clock;
use std::sync::Arc;

use tandem_proto::{HandoffId, v1};
use tokio::sync::oneshot;

use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::registry::Registry;
use crate::seal;
use crate::session::Arrived;
use crate::transport::{Expected, Verified};

/// A granted hand-off. Dropping it at any time cancels it: the sender is told, and the owner of the blocks is released
/// as soon as no writer can touch them.
pub struct Incoming {
    registry: Arc<Registry>,
    handoff: HandoffId,
    ticket: v1::Ticket,
    blocks: Arc<[u32]>,
    arrival: oneshot::Receiver<Result<Arrived, TransferError>>,
    /// What the sender is told if this is dropped before the end.
    on_drop: Refusal,
}

impl Incoming {
    pub(crate) fn new(
        registry: Arc<Registry>,
        handoff: HandoffId,
        ticket: v1::Ticket,
        blocks: Vec<u32>,
        arrival: oneshot::Receiver<Result<Arrived, TransferError>>,
    ) -> Self {
        Self { registry, handoff, ticket, blocks: blocks.into(), arrival, on_drop: Refusal::Cancelled }
    }

    /// What the sender needs to fill the blocks.
    pub fn ticket(&self) -> v1::Ticket {
        self.ticket.clone()
    }

    /// Waits for the seal and all blocks, then checks incarnations, prompt, sequence hashes and every block's checksum,
    /// and answers the sender. Only after `Ok` may the blocks be read.
    ///
    /// # Errors
    /// `Timeout` at the end of the lease, `PeerGone`, `Cancelled` by the sender, `Corrupt` or `Refused` by the rules.
    pub async fn verified(mut self, expected: Expected) -> Result<Verified, TransferError> {
        let arrived = self.arrived().await?;
        let (ticket, arena, blocks) = (self.ticket.clone(), self.registry.arena().clone(), self.blocks.clone());
        let seal = arrived.seal.clone();
        // Hashing megabytes would stall the runtime.
        let checked =
            tokio::task::spawn_blocking(move || seal::verify(&seal, &ticket, &expected, &arena, &blocks)).await;
        let checked = checked.unwrap_or(Err(Refusal::WriteFailed));
        if let Err(refusal) = checked {
            tracing::warn!(handoff = %self.handoff, reason = refusal.label(), "KV hand-off refused: {refusal}");
            self.on_drop = refusal;
            return Err(refusal.into());
        }
        if !self.registry.verified(self.handoff) {
            return Err(TransferError::peer_gone("the KV hand-off ended while it was verified"));
        }
        Ok(Verified {
            bytes: arrived.bytes,
            blocks: self.blocks.len() as u32,
            first_arrival: arrived.first_arrival,
            last_arrival: arrived.last_arrival,
            verified_at: clock::now(),
            seal: arrived.seal,
        })
    }
}

impl Incoming {
    /// Progress moves the deadline.
    async fn arrived(&mut self) -> Result<Arrived, TransferError> {
        let shut_down = || Err(TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down"));
        loop {
            let Some(deadline) = self.registry.deadline(self.handoff).filter(|deadline| clock::now() < *deadline)
            else {
                // Whatever ended it said so; else it was the lease.
                self.on_drop = Refusal::Expired;
                self.registry.expire();
                return self.arrival.try_recv().unwrap_or_else(|_| shut_down());
            };
            if let Ok(arrived) = tokio::time::timeout_at(deadline.into(), &mut self.arrival).await {
                return arrived.unwrap_or_else(|_| shut_down());
            }
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // Nothing to end after success: ids are single use.
        self.registry.abort(self.handoff, self.on_drop);
    }
}
