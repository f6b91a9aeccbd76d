//! Main memory of another process of this host, mapped to be read: one copy instead of the two of a queue between
//! processes, and by the one whose memory is written. Nobody writes into another's memory, so nobody has to be fenced.
//!
//! The other process names a descriptor of its own ([`Share`]), which is found under `/proc`. Why not a socket that
//! hands it over: the kernel lets in who may read that process anyway (same user, same pid namespace, as UCX's own
//! shared memory demands), nothing listens, and a frozen peer cannot keep anybody waiting.
//!
//! What the name leads to is not believed: it must be a file of our user with that inode, sealed against shrinking (a
//! page beyond its end would kill the reader), and every offset is checked against the length that was mapped.
#![allow(unsafe_code)]
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::xxh3::xxh3;
#[cfg(target_arch = "x86_64")]
use crate::xxh3_avx2;
use crate::{Run, WORD_BYTES};

/// Copied through, so that what is hashed is what is written, whatever the other process does meanwhile.
const SCRATCH_BYTES: usize = 4 << 10;

/// How a process names its memory to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Process id.
    pub process: u32,
    /// Its descriptor of the memory.
    pub descriptor: u32,
    /// Of the memory: descriptors and process ids are used again.
    pub inode: u64,
    /// Size, a multiple of [`WORD_BYTES`].
    pub bytes: u64,
}

/// A piece to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// First byte in the other process's memory, a multiple of [`WORD_BYTES`].
    pub from: usize,
    /// Where it goes, and how much it is: at most 4,096 bytes.
    pub to: Run,
}

/// A read-only mapping. It keeps the memory when its process is gone.
#[derive(Debug)]
pub struct PeerMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the value, and is only read, see `PeerMemory::copy`.
unsafe impl Send for PeerMemory {}
// SAFETY: as above.
unsafe impl Sync for PeerMemory {}

impl PeerMemory {
    /// Maps what another process has named. Does not wait for it.
    ///
    /// # Errors
    /// What the system says, or `InvalidData`: it is not what was named, or could shrink.
    pub fn map(share: Share) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", share.process, share.descriptor);
        // A path alone: opening some other process's pipe or device would be felt there.
        let named = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
        let found = named.metadata()?;
        // SAFETY: no argument, no failure.
        let user = unsafe { libc::geteuid() };
        let bytes = usize::try_from(share.bytes).ok().filter(|bytes| bytes.is_multiple_of(WORD_BYTES) && *bytes > 0);
        let bytes = bytes.filter(|_| found.is_file() && found.ino() == share.inode && found.uid() == user);
        let bytes = bytes.filter(|_| found.len() >= share.bytes).ok_or(io::ErrorKind::InvalidData)?;
        let file = File::open(format!("/proc/self/fd/{}", named.as_raw_fd()))?;
        if !is_sealed(file.as_raw_fd()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: new pages wherever the system likes, which can be read and nothing else.
        let start = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }

    /// These bytes lie inside.
    pub fn contains(&self, run: Run) -> bool {
        run.at.is_multiple_of(WORD_BYTES) && run.at.checked_add(run.bytes).is_some_and(|end| end <= self.bytes)
    }

    /// Copies each piece to its place in `to`, and hashes it on the way: XXH3-64 (without a seed) of what was written.
    ///
    /// # Panics
    /// When a piece leaves either memory, is longer than 4,096 bytes or not of whole words, or `digests` has another
    /// length than `pieces`: who takes offsets from another process checks them ([`PeerMemory::contains`]).
    pub fn copy(&self, pieces: &[Copy], to: &[AtomicU64], digests: &mut [u64]) {
        assert_eq!(pieces.len(), digests.len(), "a digest for each piece");
        let mut scratch = Scratch([0; SCRATCH_BYTES]);
        for (piece, digest) in pieces.iter().zip(digests) {
            let Run { at, bytes } = piece.to;
            assert!(self.contains(Run { at: piece.from, bytes }), "a piece outside the peer's memory");
            assert!(at.is_multiple_of(WORD_BYTES) && bytes.is_multiple_of(WORD_BYTES), "unaligned range of KV memory");
            // SAFETY: inside the mapping, as asserted.
            let from = unsafe { self.start.add(piece.from) };
            let to = &to[at / WORD_BYTES..][..bytes / WORD_BYTES];
            // SAFETY: so many bytes are there, as above.
            *digest = match unsafe { stream(from, to) } {
                Some(digest) => digest,
                // SAFETY: as above.
                None => unsafe { copy_through(&mut scratch.0[..bytes], from, to) },
            };
        }
        fence();
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        // SAFETY: mapped with these values and unmapped once; nobody borrows from it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// In the first-level cache.
struct Scratch([u8; SCRATCH_BYTES]);

/// Copies a piece past the caches and hashes it in the same pass: a copy through them would read each line before it is
/// overwritten, a third of its traffic. `None`: the processor cannot, or the piece is none for it.
///
/// # Safety
/// There are as many bytes at `from` as in `to`. Its process may write there meanwhile: each byte is read once.
unsafe fn stream(from: NonNull<u8>, to: &[AtomicU64]) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        let to_bytes = to.as_ptr().cast_mut().cast::<u8>();
        let is_aligned = (from.addr().get() | to_bytes.addr()).is_multiple_of(32);
        if is_aligned && xxh3_avx2::takes(size_of_val(to)) {
            // SAFETY: the caller's promise, and what was checked. Others touch the words as atomics, or not at all:
            // their range is claimed.
            return Some(unsafe { xxh3_avx2::copy_hashed(from.as_ptr(), to_bytes, size_of_val(to)) });
        }
    }
    None
}

/// Copies a piece through `scratch`, which is as long, so that what is hashed there is what is written.
///
/// # Safety
/// There are so many bytes at `from`. Its process may write there meanwhile: the bytes are then some bytes, each of
/// which is a value.
unsafe fn copy_through(scratch: &mut [u8], from: NonNull<u8>, to: &[AtomicU64]) -> u64 {
    // SAFETY: the caller's promise, and a slice that nobody else has.
    unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *scratch).cast(), scratch.len()) };
    for (bytes, word) in scratch.as_chunks().0.iter().zip(to) {
        word.store(u64::from_ne_bytes(*bytes), Relaxed);
    }
    xxh3(scratch)
}

/// What was stored past the caches is seen by others before anything that follows.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// It cannot get shorter.
fn is_sealed(file: RawFd) -> bool {
    // SAFETY: an open descriptor.
    let seals = unsafe { libc::fcntl(file, libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::io::ErrorKind;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::{HostMemory, KvMemory};

    fn shared(words: usize) -> (std::sync::Arc<HostMemory>, Share) {
        let memory = HostMemory::shareable(words * 8).expect("little");
        memory.words().iter().enumerate().for_each(|(i, word)| word.store(i as u64 * 0x9e37_79b9, Relaxed));
        let share = memory.share().expect("a system with memfd");
        (memory, share)
    }

    proptest! {
        #[test]
        fn pieces_are_copied_and_hashed_and_nothing_else_changes(
            pieces in prop::collection::vec((0usize..2000, 0usize..2000, 0usize..=512), 0..20),
        ) {
            let (from, share) = shared(3000);
            let peer = PeerMemory::map(share).expect("our own");
            let to = HostMemory::holding(&vec![u64::MAX; 3000]).expect("little");
            let mut expected = vec![u64::MAX; 3000];
            let pieces: Vec<Copy> = pieces.into_iter().map(|(from, at, words)| {
                Copy { from: from * 8, to: Run { at: at * 8, bytes: words * 8 } }
            }).collect();
            let mut digests = vec![0; pieces.len()];
            peer.copy(&pieces, to.words(), &mut digests);
            for (piece, digest) in pieces.iter().zip(digests) {
                let mut bytes = vec![0; piece.to.bytes];
                from.read(piece.from, &mut bytes);
                prop_assert_eq!(digest, xxh3_64(&bytes));
                for i in 0..piece.to.bytes / 8 {
                    expected[piece.to.at / 8 + i] = from.words()[piece.from / 8 + i].load(Relaxed);
                }
            }
            prop_assert_eq!(to.words().iter().map(|word| word.load(Relaxed)).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn the_other_end_sees_what_is_written_later_and_keeps_it_when_its_owner_is_gone() {
        let (from, share) = shared(16);
        let peer = PeerMemory::map(share).expect("our own");
        from.write(8, &[5; 8]);
        drop(from);
        let (to, mut digest) = (HostMemory::zeroed(8).expect("little"), [0]);
        peer.copy(&[Copy { from: 8, to: Run { at: 0, bytes: 8 } }], to.words(), &mut digest);
        assert_eq!((to.words()[0].load(Relaxed), digest[0]), (0x0505_0505_0505_0505, xxh3_64(&[5; 8])));
        assert!(PeerMemory::map(share).is_err(), "its descriptor is closed");
    }

    #[test]
    fn another_file_than_was_named_is_refused() {
        let (_memory, share) = shared(1024);
        let refused = |share| PeerMemory::map(share).expect_err("not what was named").kind();
        assert_eq!(refused(Share { inode: share.inode + 1, ..share }), ErrorKind::InvalidData);
        assert_eq!(refused(Share { bytes: share.bytes + 8, ..share }), ErrorKind::InvalidData);
        assert_eq!(refused(Share { bytes: share.bytes - 4, ..share }), ErrorKind::InvalidData);
        assert_eq!(refused(Share { bytes: 0, ..share }), ErrorKind::InvalidData);
        assert_eq!(refused(Share { descriptor: u32::MAX, ..share }), ErrorKind::NotFound);
        assert_eq!(refused(Share { process: u32::MAX, ..share }), ErrorKind::NotFound);
        // A file that could shrink, honestly named.
        let file = tempfile();
        file.set_len(4096).expect("room");
        let inode = file.metadata().expect("open").ino();
        let descriptor = file.as_raw_fd() as u32;
        assert_eq!(refused(Share { descriptor, inode, bytes: 4096, ..share }), ErrorKind::InvalidData);
    }

    #[test]
    fn nobody_else_can_map_it_to_write() {
        let (_memory, share) = shared(1024);
        let path = format!("/proc/self/fd/{}", share.descriptor);
        let file = File::options().read(true).write(true).open(path).expect("our own");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new pages, or none.
        let mapped = unsafe { libc::mmap(null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_eq!(mapped, libc::MAP_FAILED);
        assert!(file.set_len(0).is_err(), "and it keeps its size");
    }

    #[test]
    fn what_lies_outside_is_not_inside() {
        let (_memory, share) = shared(512);
        let peer = PeerMemory::map(share).expect("our own");
        let contains = |at, bytes| peer.contains(Run { at, bytes });
        assert!(contains(0, 4096) && contains(4096, 0) && contains(4088, 8));
        assert!(!contains(4096, 8) && !contains(8, 4096) && !contains(usize::MAX - 7, 8) && !contains(4, 8));
    }

    #[test]
    #[should_panic(expected = "outside the peer's memory")]
    fn a_piece_outside_is_a_bug() {
        let (memory, share) = shared(512);
        let peer = PeerMemory::map(share).expect("our own");
        peer.copy(&[Copy { from: 8, to: Run { at: 0, bytes: 4096 } }], memory.words(), &mut [0]);
    }

    fn tempfile() -> File {
        use std::os::fd::FromRawFd;
        // SAFETY: a name that ends with a zero; the descriptor is new.
        unsafe { File::from_raw_fd(libc::memfd_create(c"plain".as_ptr(), libc::MFD_CLOEXEC)) }
    }
}
