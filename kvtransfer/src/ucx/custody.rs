//! When may the blocks of a lost peer go back to their pool? When nobody can write into them any more; and what to do
//! until then. One pure machine: what was seen comes in, a [`Verdict`] goes out, and `driver.rs` acts on it. Knows no
//! UCX, no clock and no block.
//!
//! ```text
//!            UCX has closed it      the probe is back
//! open ────────────► closed ──────────────► decided ──┬──► Free: fence, the blocks go back
//!                                                     └──► Quarantine ──┬── its receives ended, or
//!                                                                       │   its process did ──► Free
//!                                                                       └── overstayed ───────► Replace
//! ```
//! - UCX's errors are no evidence: it has called a living peer dead. What counts is that no receive is open, that our
//!   kernel says that the process has ended (`process.rs`), or, where bytes come over a connection, that UCX has
//!   confirmed its close, which ends the connection's writes on our side.
//! - Shared memory has no connection that could end: a frozen peer that wakes up goes on where it stood.
//! - A deaf worker is replaced before anything is decided (`probe.rs`): a probe that was sent after the loss has to
//!   come back first.
//! - Replacing the worker ends every write, and every hand-off of every peer. So a peer that is quarantined and
//!   overstays has some patience, while others still have something under way.
use std::collections::BTreeMap;

use super::ids::EndpointId;

/// How often the writes of a quarantined peer may overstay while others use the worker.
const PATIENCE: u32 = 2;

/// How a peer's bytes come into our memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// Through queues that it can write to for as long as it lives.
    SharedMemory,
    /// Over a connection, which has an end.
    Connection,
}

/// A closed endpoint, or one that UCX did not close in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) id: EndpointId,
    /// UCX confirmed it.
    pub(super) confirmed: bool,
}

/// What is known of a closed endpoint when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Receives of it that UCX has not ended.
    pub(super) receives: usize,
    /// Its process has ended, by our kernel's word.
    pub(super) ended: bool,
}

/// What to do about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nobody can write: its blocks go back.
    Free,
    /// Somebody may: its blocks stay where they are.
    Quarantine,
    /// Its endpoint is open: close it, and decide then.
    CutOff,
    /// Only another worker ends its writes.
    Replace,
}

/// All closed endpoints that are not free.
#[derive(Debug)]
pub(super) struct Custody {
    medium: Medium,
    /// Wait for a probe that is not sent yet, for the one under way, and for nothing more.
    lost: Vec<Closed>,
    probed: Vec<Closed>,
    due: Vec<Closed>,
    /// In quarantine, and how often each has overstayed.
    quarantined: BTreeMap<EndpointId, u32>,
    /// A bug: an endpoint that UCX has closed is free.
    #[cfg(test)]
    trusts_ucx: bool,
}

impl Custody {
    pub(super) fn new(medium: Medium) -> Self {
        Self {
            medium,
            lost: Vec::new(),
            probed: Vec::new(),
            due: Vec::new(),
            quarantined: BTreeMap::new(),
            #[cfg(test)]
            trusts_ucx: false,
        }
    }

    #[cfg(test)]
    pub(super) fn planted(medium: Medium) -> Self {
        Self { trusts_ucx: true, ..Self::new(medium) }
    }

    /// UCX is done with an endpoint.
    pub(super) fn closed(&mut self, closed: Closed) {
        match self.medium {
            Medium::SharedMemory => self.lost.push(closed),
            // No queue of a connection is shared with others.
            Medium::Connection => self.due.push(closed),
        }
    }

    /// A loss waits for a probe.
    pub(super) fn wants_probe(&self) -> bool {
        !self.lost.is_empty()
    }

    /// A probe was sent: it answers for all losses so far. Or none can be sent, which is no reason to wait.
    pub(super) fn probe_sent(&mut self) {
        self.probed.append(&mut self.lost);
    }

    /// The worker is not deaf.
    pub(super) fn probe_back(&mut self) {
        self.due.append(&mut self.probed);
    }

    /// The next one to decide about. It counts as waiting until [`Custody::decide`].
    pub(super) fn due(&self) -> Option<Closed> {
        self.due.last().copied()
    }

    /// What becomes of a closed endpoint: `Free` or `Quarantine`.
    pub(super) fn decide(&mut self, closed: Closed, facts: Facts) -> Verdict {
        self.due.retain(|due| due.id != closed.id);
        let connection_ended = self.medium == Medium::Connection && closed.confirmed;
        #[cfg(test)]
        let connection_ended = connection_ended || self.trusts_ucx;
        if connection_ended || self.nobody_writes(facts) {
            return Verdict::Free;
        }
        self.quarantined.insert(closed.id, 0);
        Verdict::Quarantine
    }

    /// Something may have changed for one in quarantine: `Free` or `Quarantine`.
    pub(super) fn look_again(&mut self, id: EndpointId, facts: Facts) -> Verdict {
        if !self.nobody_writes(facts) {
            return Verdict::Quarantine;
        }
        self.quarantined.remove(&id);
        Verdict::Free
    }

    /// Its writes did not end within their grace. `is_open`: its endpoint is; `others`: other peers use the worker.
    pub(super) fn overstayed(&mut self, id: EndpointId, is_open: bool, others: bool, facts: Facts) -> Verdict {
        if is_open {
            return Verdict::CutOff;
        }
        // Closing, or waiting for its probe: it will be decided.
        if self.is_waiting(id) {
            return Verdict::Quarantine;
        }
        if self.look_again(id, facts) == Verdict::Free {
            return Verdict::Free;
        }
        let Some(overstays) = self.quarantined.get_mut(&id) else { return Verdict::Quarantine };
        *overstays += 1;
        if others && *overstays <= PATIENCE { Verdict::Quarantine } else { Verdict::Replace }
    }

    /// Closed and not decided about.
    pub(super) fn is_waiting(&self, id: EndpointId) -> bool {
        [&self.lost, &self.probed, &self.due].into_iter().flatten().any(|closed| closed.id == id)
    }

    /// Something is.
    pub(super) fn has_waiting(&self) -> bool {
        ![&self.lost, &self.probed, &self.due].into_iter().all(Vec::is_empty)
    }

    /// In quarantine.
    pub(super) fn quarantined(&self) -> Vec<EndpointId> {
        self.quarantined.keys().copied().collect()
    }

    /// The worker is gone, and every write with it: all that are known here are free.
    pub(super) fn replaced(&mut self) -> Vec<EndpointId> {
        let waiting = [&mut self.lost, &mut self.probed, &mut self.due].into_iter().flat_map(std::mem::take);
        let mut all: Vec<EndpointId> = waiting.map(|closed| closed.id).collect();
        all.extend(std::mem::take(&mut self.quarantined).into_keys());
        all
    }

    fn nobody_writes(&self, facts: Facts) -> bool {
        // What a dead peer had left in a socket may still be read into a connection's receives.
        facts.receives == 0 || (self.medium == Medium::SharedMemory && facts.ended)
    }
}

#[cfg(test)]
#[path = "custody_tests.rs"]
mod tests;
