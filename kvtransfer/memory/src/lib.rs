//! KV memory: the bytes that an engine computes on and a transport moves. It is the one thing that the two share, so it
//! depends on neither. Who may write which bytes when, is the matter of its users.
//!
//! - [`KvMemory`]: what both sides may do with it, wherever it lies.
//! - [`HostMemory`] (`host.rs`): main memory, in whole pages, as atomic words.
//! - [`PeerMemory`] (`peer.rs`): that of another process, to be read and nothing else.
//! - `xxh3.rs`, `xxh3_avx2.rs`: their hash, in one pass with a copy. Only these files have `unsafe`.
#![deny(unsafe_code)]

mod host;
mod peer;
mod xxh3;
#[cfg(target_arch = "x86_64")]
mod xxh3_avx2;

use std::sync::atomic::AtomicU64;

pub use host::HostMemory;
pub use peer::{Copy, PeerMemory, Share};

/// Bytes of a word: ranges begin and end at whole ones.
pub const WORD_BYTES: usize = 8;

/// The KV memory of one engine, alive until its last owner lets go.
///
/// Copies to and from a device can fail, those of main memory cannot; so the methods have no errors. After a failure
/// the bytes are anything, and digests are random numbers. Checksums then do not match: whoever verifies refuses them.
pub trait KvMemory: Send + Sync {
    /// Its size, a multiple of [`WORD_BYTES`].
    fn bytes(&self) -> usize;

    /// Where it lies, for those who address it themselves: kernels, and libraries that register it.
    fn place(&self) -> Place<'_>;

    /// How another process of this host maps it to read; `None`: not at all.
    fn share(&self) -> Option<Share> {
        None
    }

    /// Copies `out.len()` bytes from `at` on. Blocks the thread for as long as that takes.
    ///
    /// # Panics
    /// When the range leaves the memory, or `at` or the length is no multiple of [`WORD_BYTES`]: bugs of the caller.
    fn read(&self, at: usize, out: &mut [u8]);

    /// Copies `bytes` to `at`; the mirror of [`KvMemory::read`].
    ///
    /// # Panics
    /// As there.
    fn write(&self, at: usize, bytes: &[u8]);

    /// XXH3-64 (without a seed) of each of `pieces`, computed where the memory is. Blocks the thread.
    ///
    /// # Panics
    /// As [`KvMemory::read`], and when `out` has another length than `pieces`.
    fn digests(&self, pieces: &[Run], out: &mut [u64]);

    /// Lets libraries that move it find its device on the calling thread. Of main memory there is nothing to do.
    ///
    /// # Errors
    /// A sentence about the device.
    fn bind(&self) -> Result<(), String> {
        Ok(())
    }

    /// Waits for all that this process has asked its device to do, by whatever library: none of it writes here
    /// afterwards. Blocks the thread. The processor's own writes are over when they return.
    fn settle(&self) {}

    /// Why nothing can be done with it any more, when its device is gone: the process has to end.
    fn lost(&self) -> Option<&str> {
        None
    }
}

/// Where KV memory lies.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// In main memory. Whoever touches it beside others does so as these atomic words (or parts of them).
    Host(&'a [AtomicU64]),
    /// On a CUDA device.
    Cuda {
        /// Number of the device in this process.
        device: u32,
        /// Device address of the first byte.
        address: u64,
    },
}

impl<'a> Place<'a> {
    /// The words, if the processor can read them.
    pub fn host(self) -> Option<&'a [AtomicU64]> {
        match self {
            Self::Host(words) => Some(words),
            Self::Cuda { .. } => None,
        }
    }
}

/// Adjacent bytes of KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte, counted from the memory's start; a multiple of [`WORD_BYTES`].
    pub at: usize,
    /// Length; a multiple of [`WORD_BYTES`].
    pub bytes: usize,
}

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is no multiple of [`WORD_BYTES`].
    #[error("{0} bytes are no whole number of 64-bit words")]
    Uneven(usize),
    /// The system refuses.
    #[error("the system has no {bytes} bytes of memory for it: {source}")]
    Refused {
        /// What was asked for.
        bytes: usize,
        /// What it says.
        source: std::io::Error,
    },
}
