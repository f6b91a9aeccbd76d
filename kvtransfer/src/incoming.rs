//! The receiving end of a hand-off as a node holds it: wait, verify, answer. The one place where verification happens.
use std::sync::Arc;

use tandem_proto::{HandoffId, v1};

use crate::clock;
use crate::error::{Refusal, TransferError, TransferErrorKind};
use crate::landing::{Arrival, Batch, Piece};
use crate::registry::Registry;
use crate::seal::{self, Manifest};
use crate::session::Arrived;
use crate::terms::{Expected, Grant, Verified};

/// A granted hand-off. Dropping it at any time cancels it: the sender is told, and the owner of the blocks is released
/// as soon as no writer can touch them.
pub struct Incoming {
    registry: Arc<Registry>,
    handoff: HandoffId,
    ticket: v1::Ticket,
    blocks: Arc<[u32]>,
    arrival: Arrival,
    /// What the sender is told if this is dropped before the end.
    on_drop: Refusal,
}

impl Incoming {
    /// `Transport::accept` of every backend.
    ///
    /// # Errors
    /// As there.
    pub fn accept(
        registry: &Arc<Registry>,
        grant: Grant,
        info: v1::TransportInfo,
        address: Vec<u8>,
    ) -> Result<Self, TransferError> {
        let (handoff, blocks) = (grant.handoff, grant.blocks.as_slice().into());
        let (ticket, arrival) = registry.accept(grant, info, address)?;
        Ok(Self { registry: registry.clone(), handoff, ticket, blocks, arrival, on_drop: Refusal::Cancelled })
    }

    /// What the sender needs to fill the blocks.
    pub fn ticket(&self) -> v1::Ticket {
        self.ticket.clone()
    }

    /// Waits for the seal and all blocks, then checks incarnations, prompt, sequence hashes and every block's checksum,
    /// and answers the sender. Only after `Ok` may the blocks be read. Pieces are hashed while others are on their way:
    /// call it soon after the grant.
    ///
    /// # Errors
    /// `Timeout` when the sender was silent for the lease, `PeerGone`, `Cancelled` by the sender, `Corrupt` or
    /// `Refused` by the rules.
    pub async fn verified(mut self, expected: Expected) -> Result<Verified, TransferError> {
        let (arrived, manifest) = self.arrived().await?;
        let (last, ticket, seal) = (self.arrival.landing.take(), self.ticket.clone(), arrived.seal.clone());
        let left = last.bytes as usize;
        let mutation = self.registry.mutation();
        let check = move || match seal::verify(&seal, &ticket, &expected, || cover(manifest, last).finish()) {
            Err(Refusal::Corrupt(_)) if mutation.skips_checksum() => Ok(()),
            checked => checked,
        };
        let checked = self.registry.hash(left, check).await.unwrap_or(Err(Refusal::WriteFailed));
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
            descriptors: self.arrival.landing.ranges(),
            first_arrival: arrived.first_arrival,
            last_arrival: arrived.last_arrival,
            copying: arrived.copying,
            landed: arrived.landed,
            verified_at: clock::now(),
            seal: arrived.seal,
        })
    }

    /// Hashes what has landed, a batch at a time, until all is there or the hand-off is over.
    async fn arrived(&mut self) -> Result<(Arrived, Manifest), TransferError> {
        let units = u8::try_from(self.ticket.units).unwrap_or(1);
        let mut manifest = Manifest::new(self.registry.arena().clone(), self.blocks.to_vec(), units);
        loop {
            tokio::select! {
                biased;
                arrived = &mut self.arrival.whole => {
                    let shut_down = || TransferError::new(TransferErrorKind::Cancelled, "the KV transport shut down");
                    return Ok((arrived.map_err(|_| shut_down())??, manifest));
                }
                () = self.arrival.landing.enough() => {}
            }
            let landed = self.arrival.landing.take();
            // To touch takes as long as to hash some megabytes.
            let bytes = if landed.touches { usize::MAX } else { landed.bytes as usize };
            manifest = self.registry.hash(bytes, move || cover(manifest, landed)).await?;
        }
    }
}

fn cover(mut manifest: Manifest, landed: Batch) -> Manifest {
    let (unhashed, hashed): (Vec<Piece>, Vec<Piece>) =
        landed.pieces.into_iter().partition(|piece| piece.leaves.is_empty());
    hashed.iter().for_each(|piece| manifest.note_range(piece.range, &piece.leaves));
    manifest.cover_ranges(unhashed.iter().map(|piece| piece.range));
    if landed.touches {
        manifest.touch();
    }
    manifest
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // Nothing to end after success: ids are single use.
        self.registry.abort(self.handoff, self.on_drop);
    }
}
