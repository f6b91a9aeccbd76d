//! A connection of a `MemNetwork` on which a test says what it likes: frames as bytes, well made or not.
use std::sync::PoisonError;

use super::{Link, MemNetwork};
use crate::error::{Refusal, TransferError};
use crate::registry::PeerLink;
use crate::terms::PeerId;
use crate::wire::Header;

/// Frames as bytes, unchecked; closed when dropped. What cannot be read closes it too.
pub struct RawLink {
    pub(super) network: MemNetwork,
    pub(super) peer: PeerId,
}

impl RawLink {
    /// The receiver reads the payload of a hello. Whether it took it.
    pub fn hello(&self, payload: &[u8]) -> Result<(), Refusal> {
        self.network.hello(self.peer, payload).map(|_| ())
    }

    /// The receiver reads a frame.
    ///
    /// # Errors
    /// `PeerGone` when the link is closed.
    pub fn send(&self, header: &[u8], payload: &[u8]) -> Result<(), TransferError> {
        let Link { receiver, cut, .. } = self.network.link(self.peer)?;
        let registry = &receiver.registry;
        match Header::parse(header) {
            Some(Header::Data(range)) => {
                // A refusal needs no more: there is nothing to discard.
                let Ok(claim) = registry.claim(self.peer, range, payload.len() as u64) else { return Ok(()) };
                let (mut rest, cut) = (payload, cut.lock().unwrap_or_else(PoisonError::into_inner));
                for run in claim.runs().iter().take_while(|_| !*cut) {
                    let (now, later) = rest.split_at(run.bytes);
                    claim.arena().write(run.at, now);
                    rest = later;
                }
                claim.written();
            }
            Some(Header::Seal(handoff)) => registry.seal(self.peer, handoff, payload),
            Some(Header::Cancel(handoff)) if payload.is_empty() => registry.cancelled_by(self.peer, handoff),
            Some(Header::KeepAlive(handoff)) if payload.is_empty() => registry.keep_alive(self.peer, handoff),
            _ => {
                registry.violation();
                self.network.cut_off(self.peer);
            }
        }
        Ok(())
    }
}

impl Drop for RawLink {
    fn drop(&mut self) {
        self.network.cut_off(self.peer);
    }
}
