//! A peer's permission to write one range of a hand-off into the arena.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Registry;
use crate::arena::{Arena, Run};
use crate::counters::Counters;
use crate::session::{Pieces, State};
use crate::wire::DataHeader;

/// Permission to write one range now. Its blocks stay out of the pool while it lives.
#[must_use = "a dropped claim fails its hand-off"]
pub struct Claim {
    pub(super) registry: Arc<Registry>,
    pub(super) range: DataHeader,
    pub(super) pieces: Pieces,
    pub(super) runs: Vec<Run>,
    pub(super) len: u64,
    pub(super) open: bool,
}

impl Claim {
    /// Where in the arena to write, in the payload's order, neighbours joined.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Which range.
    pub fn range(&self) -> DataHeader {
        self.range
    }

    /// The leaves of its blocks' checksums, in the payload's order: all of its bytes.
    pub fn leaves(&self) -> Vec<Run> {
        let (arena, Pieces { blocks, units, of }) = (self.arena(), &self.pieces);
        let of_unit = arena.layers() / usize::from(*of);
        let layers = usize::from(units.start) * of_unit..usize::from(units.end) * of_unit;
        blocks.iter().flat_map(|block| arena.leaves(*block, layers.clone())).collect()
    }

    /// Its hand-off is not over yet: else nobody needs the bytes.
    pub fn is_wanted(&self) -> bool {
        let state = self.registry.lock().sessions.state(self.range.handoff);
        state.is_some_and(|state| state != State::Aborted)
    }

    /// Bytes of the range; equal to the runs' bytes.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// The arena to write to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.registry.arena
    }

    /// Counters of the transport.
    pub fn counters(&self) -> &Counters {
        &self.registry.counters
    }

    /// All bytes are in the arena.
    pub fn written(self) {
        self.written_and_hashed(Vec::new());
    }

    /// All bytes are in the arena, and their [`Claim::leaves`] have these hashes: they are not hashed again.
    pub fn written_and_hashed(mut self, leaves: Vec<u64>) {
        self.open = false;
        self.registry.written(self.range, self.len, leaves);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.registry.counters.open_writes.fetch_sub(1, Relaxed);
        if self.open {
            self.registry.failed(self.range.handoff);
        }
    }
}
