//! A hand-off's part of a connection of a `MemNetwork`: a queue of frames, and the task that carries them to the
//! receiver's registry.
//! Frames that were queued arrive even when the sender has let go of them meanwhile; their blocks are kept for so long.
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_proto::HandoffId;
use tokio::sync::mpsc;

use super::weather::{Fate, Frame, Window};
use super::{Link, MemFaults, MemNetwork, gone};
use crate::arena::{Arena, Run};
use crate::error::TransferError;
use crate::outgoing::SendLink;
use crate::terms::{BlockOwner, Faults, PeerId};
use crate::wire::DataHeader;

const SCRATCH_BYTES: usize = 64 << 10;
/// Frames in flight: a sender that is faster than its receiver waits.
const QUEUED_FRAMES: usize = 4;

/// The sending end.
pub struct MemLink {
    frames: mpsc::Sender<Queued>,
    network: MemNetwork,
    peer: PeerId,
}

enum Queued {
    Data { range: DataHeader, runs: Vec<Run>, _owner: BlockOwner },
    Seal { handoff: HandoffId, payload: Vec<u8> },
    KeepAlive(HandoffId),
    Cancel(HandoffId),
}

impl MemLink {
    pub fn open(network: MemNetwork, peer: PeerId, handoff: HandoffId, arena: Arc<Arena>, faults: MemFaults) -> Self {
        let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
        let carrier = Carrier { network: network.clone(), peer, handoff, arena, faults };
        tokio::spawn(carrier.carry(queue));
        Self { frames, network, peer }
    }

    async fn queue(&self, frame: Queued) -> Result<(), TransferError> {
        self.network.link(self.peer)?;
        self.frames.send(frame).await.map_err(|_| gone())
    }
}

impl SendLink for MemLink {
    fn max_range_bytes(&self) -> usize {
        1 << 20
    }

    fn push(
        &mut self,
        range: DataHeader,
        runs: Vec<Run>,
        owner: BlockOwner,
    ) -> BoxFuture<'_, Result<(), TransferError>> {
        self.queue(Queued::Data { range, runs, _owner: owner }).boxed()
    }

    fn keep_alive(&mut self, handoff: HandoffId) -> BoxFuture<'_, Result<(), TransferError>> {
        self.queue(Queued::KeepAlive(handoff)).boxed()
    }

    fn seal(&mut self, handoff: HandoffId, payload: Vec<u8>) -> BoxFuture<'_, Result<(), TransferError>> {
        self.queue(Queued::Seal { handoff, payload }).boxed()
    }

    fn cancel(&mut self, handoff: HandoffId) {
        // With a full queue the end of the connection, right behind it, says the same.
        let _ = self.frames.try_send(Queued::Cancel(handoff));
    }
}

/// What carries the frames of a hand-off.
struct Carrier {
    network: MemNetwork,
    peer: PeerId,
    handoff: HandoffId,
    arena: Arc<Arena>,
    faults: MemFaults,
}

impl Carrier {
    async fn carry(mut self, mut queue: mpsc::Receiver<Queued>) {
        while let Some(frame) = queue.recv().await {
            if self.deliver(frame).await.is_err() {
                // Cut: both ends know.
                return;
            }
        }
        match self.travel(Frame::Close).await {
            Ok(Fate::Severed) => self.network.lose(self.peer),
            Ok(_) => self.network.leave(self.peer, self.handoff),
            Err(_) => {}
        }
    }

    async fn deliver(&mut self, frame: Queued) -> Result<(), TransferError> {
        let kind = match &frame {
            Queued::Data { .. } => Frame::Data,
            Queued::Seal { .. } => Frame::Seal,
            Queued::KeepAlive(_) => Frame::KeepAlive,
            Queued::Cancel(_) => Frame::Cancel,
        };
        let fate = self.travel(kind).await?;
        let Fate::Arrived { flip, truncate } = fate else {
            if fate == Fate::Severed {
                self.network.lose(self.peer);
            }
            return Ok(());
        };
        let link = self.network.link(self.peer)?;
        match frame {
            Queued::Data { range, runs, .. } => {
                let asked = std::mem::take(&mut self.faults.send);
                let faults =
                    Faults { flip_byte: asked.flip_byte || flip, truncate_push: asked.truncate_push || truncate };
                self.write(&link, range, &runs, faults).await
            }
            Queued::Seal { .. } if self.faults.drop_seal => Ok(()),
            Queued::Seal { handoff, payload } => {
                link.receiver.registry.seal(self.peer, handoff, &payload);
                Ok(())
            }
            Queued::KeepAlive(handoff) => {
                link.receiver.registry.keep_alive(self.peer, handoff);
                Ok(())
            }
            Queued::Cancel(handoff) => {
                link.receiver.registry.cancelled_by(self.peer, handoff);
                Ok(())
            }
        }
    }

    async fn travel(&self, frame: Frame) -> Result<Fate, TransferError> {
        if !self.faults.delay.is_zero() && frame == Frame::Data {
            tokio::time::sleep(self.faults.delay).await;
        }
        let link = self.network.link(self.peer)?;
        match &self.network.weather {
            Some(weather) => Ok(weather.travel(link.sender.address, link.receiver.address, frame).await),
            None => Ok(Fate::UNHARMED),
        }
    }

    async fn write(&self, link: &Link, range: DataHeader, runs: &[Run], faults: Faults) -> Result<(), TransferError> {
        let bytes: usize = runs.iter().map(|run| run.bytes).sum();
        let len = bytes - if faults.truncate_push { 8 } else { 0 };
        // A refusal reaches this hand-off through its answer.
        let Ok(claim) = link.receiver.registry.claim(self.peer, range, len as u64) else { return Ok(()) };
        let mut scratch = vec![0; SCRATCH_BYTES.min(bytes)];
        let mut sent = 0;
        for to in claim.runs() {
            self.pass(link, Window::Writing).await;
            let mut offset = 0;
            while offset < to.bytes {
                let chunk = SCRATCH_BYTES.min(to.bytes - offset);
                let chunk = &mut scratch[..chunk];
                self.arena.gather(runs, sent, chunk);
                chunk[0] ^= u8::from(faults.flip_byte && sent == 0);
                link.write(&claim, to.at + offset, chunk)?;
                offset += chunk.len();
                sent += chunk.len();
            }
        }
        self.pass(link, Window::Written).await;
        claim.written();
        Ok(())
    }

    async fn pass(&self, link: &Link, window: Window) {
        match &self.network.weather {
            Some(weather) => weather.pass(link.sender.address, link.receiver.address, window).await,
            None => tokio::task::yield_now().await,
        }
    }
}
