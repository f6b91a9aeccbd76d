//! The KV arena on a device: one allocation for the life of the process, and what transports do with it from their own
//! threads. Copies go through pinned memory in pieces of a bounded size, on streams of their own beside the
//! computation; digests are computed where the bytes are, after what network cards have written there is in its place.
//!
//! The trait that transports use knows no errors, as main memory has none. A copy or a hash that fails is logged. What
//! it should have read is anything then, and a digest is a random number: the checksums of the hand-off do not match,
//! it is refused, and the router plans anew. Where the device is lost, [`KvMemory::lost`] says why, and the process
//! ends.
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use tandem_memory::{KvMemory, Place, Run, WORD_BYTES};

use crate::buffer::Buffer;
use crate::context::Context;
use crate::error::CudaError;
use crate::lane::Lane;
use crate::loaded::Kernels;

/// Copies of so many threads run side by side, others wait.
const LANES: usize = 4;

/// KV memory of a device.
pub struct CudaMemory {
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    arena: Buffer,
    /// Without what lies behind the blocks: see [`CudaMemory::new`].
    bytes: usize,
    idle: Mutex<Vec<Lane>>,
    returned: Condvar,
    /// Why the device is lost.
    lost: OnceLock<String>,
}

impl CudaMemory {
    /// Zeroed memory of `bytes`, with `behind` further ones that transports do not see: where padding rows of a step
    /// have their K and V.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] when the device has not so much, and as [`Pinned::new`].
    pub fn new(
        context: &Arc<Context>,
        kernels: &Arc<Kernels>,
        bytes: usize,
        behind: usize,
    ) -> Result<Arc<Self>, CudaError> {
        let all = bytes.saturating_add(behind);
        let arena = Buffer::zeroed(context, "the KV arena", all)?;
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            kernels: Arc::clone(kernels),
            arena,
            bytes,
            idle: Mutex::new((0..LANES).map(|_| Lane::new(context)).collect::<Result<_, _>>()?),
            returned: Condvar::new(),
            lost: OnceLock::new(),
        }))
    }

    /// All of it, with what lies behind.
    pub fn arena(&self) -> &Buffer {
        &self.arena
    }

    /// Whether `work` succeeds.
    fn with_lane(&self, what: &str, work: impl FnOnce(&mut Lane) -> Result<(), CudaError>) -> bool {
        let mut lane = self.take_lane();
        let outcome = self.context.bind().and_then(|()| work(&mut lane));
        // A copy may be under way after an error: nobody else may have the lane's memory before it has ended.
        let ended = lane.stream.synchronize();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        self.returned.notify_one();
        outcome.and(ended).inspect_err(|error| self.failed(what, error)).is_ok()
    }

    fn failed(&self, what: &str, error: &CudaError) {
        tracing::error!(%error, "KV memory of the GPU: {what} failed");
        if error.is_lost() {
            // The first reason is the one that counts.
            let _ = self.lost.set(error.to_string());
        }
    }

    fn take_lane(&self) -> Lane {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match idle.pop() {
                Some(lane) => return lane,
                None => idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn check(&self, at: usize, bytes: usize) {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "range out of range of the KV memory");
        assert!(at.is_multiple_of(WORD_BYTES) && bytes.is_multiple_of(WORD_BYTES), "unaligned range of KV memory");
    }
}

impl KvMemory for CudaMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn place(&self) -> Place<'_> {
        Place::Cuda { device: self.context.device().number, address: self.arena.mem().address }
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.check(at, out.len());
        self.with_lane("a read", |lane| lane.read(&self.arena, at, out));
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        self.with_lane("a write", |lane| lane.write(&self.arena, at, bytes));
    }

    fn digests(&self, pieces: &[Run], out: &mut [u64]) {
        assert_eq!(pieces.len(), out.len(), "a digest for each piece");
        pieces.iter().for_each(|piece| self.check(piece.at, piece.bytes));
        let hashed = self.with_lane("a hash", |lane| {
            self.context.flush_foreign_writes()?;
            lane.digests(&self.arena, &self.kernels, pieces, out)
        });
        if !hashed {
            let random = RandomState::new();
            out.iter_mut().enumerate().for_each(|(at, digest)| *digest = random.hash_one(at));
        }
    }

    fn bind(&self) -> Result<(), String> {
        self.context.bind().map_err(|error| error.to_string())
    }

    fn settle(&self) {
        if let Err(error) = self.context.synchronize() {
            self.failed("a wait for its copies", &error);
        }
    }

    fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }
}
