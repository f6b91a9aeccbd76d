//! One copy on one host. UCX's shared memory is a queue: the sender copies in, the receiver copies out. Where the
//! receiver can map the sender's memory, to read, it copies by itself what the sender announces as final: one copy, on
//! the receiver's core, and nobody writes into another's memory. So a dead sender cannot write late and a frozen one
//! keeps no blocks; to fence is to stop reading.
//!
//! The sender's hello names its memory; `WillCopy` instead of `Welcome` says that the receiver has mapped it. `Ready`
//! announces a range (`announcement.rs`), `Copied` lets the sender's blocks go; everything else of a hand-off is as
//! ever, and on UCX. The leaves of the checksums are hashed in the same pass (`copier.rs`): what was hashed is what
//! was written, whatever the sender's memory holds by then. A receiver that cannot map is a receiver as any other, and
//! counted.
//!
//! Why not UCX's own `ucp_rkey_ptr`: its mapping can be written, its memory lies on small pages, which copies more
//! slowly, and its key is read by a parser that knows no length (docs/benchmarks/transfer.md).
pub(super) mod announcement;
mod copier;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tandem_memory::{PeerMemory, Run, Share};

pub(super) use self::copier::Report;
use self::copier::{Copier, Job};
use super::ids::EndpointId;
use super::profile::{UcxConfig, UcxProfile};
use crate::arena::Arena;
use crate::counters::Counters;
use crate::registry::Claim;

/// What one node has of it; belongs to the driver.
pub(super) struct OneCopy {
    /// Our memory, for those to whom we send.
    share: Option<Share>,
    /// None: ours is memory that the processor cannot write, or it is switched off.
    copier: Option<Copier>,
    /// Of the peers that send to us, while their endpoint is open.
    mapped: HashMap<EndpointId, Arc<PeerMemory>>,
}

impl OneCopy {
    /// `report` is told of the ranges that were copied, some at a time.
    pub(super) fn start(arena: &Arena, config: &UcxConfig, report: Report) -> std::io::Result<Self> {
        let mapped = HashMap::new();
        if !config.one_copy || config.profile != UcxProfile::Shm {
            return Ok(Self { share: None, copier: None, mapped });
        }
        let copies = arena.memory().place().host().is_some();
        let copier = if copies { Some(Copier::start(report, config.mutation)?) } else { None };
        Ok(Self { share: arena.memory().share(), copier, mapped })
    }

    /// Whoever receives from here can do so.
    pub(super) fn is_possible(&self) -> bool {
        self.share.is_some()
    }

    /// How receivers map our memory.
    pub(super) fn share(&self) -> Option<Share> {
        self.share
    }

    /// Maps the memory of a sender, once for each endpoint. Whether ranges are to be announced.
    pub(super) fn map(&mut self, endpoint: EndpointId, share: Option<Share>, counters: &Counters) -> bool {
        let (Some(share), Some(_)) = (share, &self.copier) else { return false };
        if self.mapped.contains_key(&endpoint) {
            return true;
        }
        match PeerMemory::map(share) {
            Ok(memory) => {
                self.mapped.insert(endpoint, Arc::new(memory));
                true
            }
            Err(error) => {
                tracing::warn!(peer = endpoint.0, %error, "cannot map the memory of a KV sender: its KV is copied twice");
                counters.unmapped_peers.fetch_add(1, Relaxed);
                false
            }
        }
    }

    /// The memory of a sender, if these runs of it exist.
    pub(super) fn memory(&self, endpoint: EndpointId, runs: Vec<Run>) -> Option<(Arc<PeerMemory>, Vec<Run>)> {
        let memory = self.mapped.get(&endpoint)?;
        runs.iter().all(|run| memory.contains(*run)).then(|| (memory.clone(), runs))
    }

    /// Copies what `source` names to where the claim says, on another thread; both have as many bytes, and the memory
    /// has them. A claim fails when its pieces are cut in two, and when there is no place for it.
    pub(super) fn copy(&self, from: EndpointId, claim: Claim, memory: Arc<PeerMemory>, source: Vec<Run>) {
        let piece_bytes = claim.bytes() / u64::from(claim.range().count.max(1));
        if source.iter().any(|run| !(run.bytes as u64).is_multiple_of(piece_bytes)) {
            claim.counters().protocol_errors.fetch_add(1, Relaxed);
            return;
        }
        if let Some(copier) = &self.copier {
            copier.submit(Job { from, claim, memory, source });
        }
    }

    /// The thread that copies has work: the core that it runs on may be the driver's, too.
    pub(super) fn is_busy(&self) -> bool {
        self.copier.as_ref().is_some_and(Copier::is_busy)
    }

    /// Nothing of this sender is read any more when this returns, after a quarter of a megabyte at most. What was not
    /// copied is given back.
    pub(super) fn stop(&mut self, endpoint: EndpointId) -> Vec<Claim> {
        self.mapped.remove(&endpoint);
        self.copier.as_ref().map(|copier| copier.stop(endpoint)).unwrap_or_default()
    }
}
