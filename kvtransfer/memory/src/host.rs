//! KV memory in main memory: an anonymous mapping, so that it begins at a page, lies on huge pages where the system has
//! them, and each page is taken from the memory of the socket whose thread touches it first.
//!
//! Memory that another process may read ([`HostMemory::shareable`]) is a file without a name instead (memfd), sealed so
//! that it keeps its size and that nobody else can ever map it to write. Huge pages of files are an administrator's
//! choice that is off nearly everywhere, so they are asked for one by one (`MADV_COLLAPSE`), as pages are touched.
//!
//! Why so: kernels take whole cache lines. Words of a reference-counted slice began 32 bytes into one, and every vector
//! lay in two lines, which cost attention 10 % at a context of 1,024. They also walk through more memory than the
//! processor has page table entries at hand.
#![allow(unsafe_code)]
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use xxhash_rust::xxh3::Xxh3;

use crate::peer::Share;
use crate::xxh3::xxh3;
use crate::{KvMemory, MemoryError, Place, Run, WORD_BYTES};

/// The smallest that a system has: none is missed by steps of so much.
const PAGE_BYTES: usize = 4 << 10;
/// On x86-64, and on aarch64 with pages of 4 KiB.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Copied through while hashing: stays in the first-level cache.
const SCRATCH_BYTES: usize = 16 << 10;

/// Main memory as atomic words: an engine thread, a socket thread, a library that writes as a device does, and a
/// verifier may touch it together without undefined behaviour.
#[derive(Debug)]
pub struct HostMemory {
    _mapping: Mapping,
    /// What the words are the content of, when others may map it.
    file: Option<File>,
    /// First word, inside the mapping.
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to the value and is touched as atomic words only, see `HostMemory::words`.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory, none of whose pages is there yet: [`HostMemory::touch`]. It begins at a page, from 2 MiB on at a
    /// huge one.
    ///
    /// # Errors
    /// [`MemoryError`] when `bytes` is no multiple of [`WORD_BYTES`], or the system refuses.
    pub fn zeroed(bytes: usize) -> Result<Arc<Self>, MemoryError> {
        if !bytes.is_multiple_of(WORD_BYTES) {
            return Err(MemoryError::Uneven(bytes));
        }
        let memory = Self::map(bytes).map_err(|source| MemoryError::Refused { bytes, source })?;
        Ok(Arc::new(memory))
    }

    /// As [`HostMemory::zeroed`], and processes of the same user on this host can map it to read
    /// ([`PeerMemory`](crate::PeerMemory)). Where the system has no such memory, it is private.
    ///
    /// # Errors
    /// As [`HostMemory::zeroed`].
    pub fn shareable(bytes: usize) -> Result<Arc<Self>, MemoryError> {
        let mut memory = Self::zeroed(bytes)?;
        let file = memory.replace_by_file();
        match (Arc::get_mut(&mut memory), file) {
            (Some(shared), Ok(file)) => shared.file = Some(file),
            // Other pages: those may be half replaced.
            _ => memory = Self::zeroed(bytes)?,
        }
        Ok(memory)
    }

    /// Memory that holds `words`.
    ///
    /// # Errors
    /// As [`HostMemory::zeroed`].
    pub fn holding(words: &[u64]) -> Result<Arc<Self>, MemoryError> {
        let memory = Self::zeroed(size_of_val(words))?;
        memory.words().iter().zip(words).for_each(|(to, word)| to.store(*word, Relaxed));
        Ok(memory)
    }

    /// All of it.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `start` and `words` are inside the mapping (see `map`), which lives as long as `self`; it begins as
        // zeros, which are words, and nothing in this process has another reference to it.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    /// Makes the pages of these bytes exist, in the memory that is next to the calling thread. Content stays as it is,
    /// so several threads may do that at any time. Bytes beyond the end are ignored.
    pub fn touch(&self, range: Range<usize>) {
        let first = range.start / PAGE_BYTES * PAGE_BYTES;
        for at in (first..range.end.min(self.bytes())).step_by(PAGE_BYTES) {
            // A write of what is there. `fetch_or(0)` may become a load, which leaves the page unallocated.
            let _ = self.words()[at / WORD_BYTES].compare_exchange(0, 0, Relaxed, Relaxed);
            if self.file.is_some() && at.is_multiple_of(HUGE_PAGE_BYTES) {
                self.collapse(at);
            }
        }
    }

    /// One huge page instead of the small ones from `at` on, next to where the first of them is: a wish.
    fn collapse(&self, at: usize) {
        if at + HUGE_PAGE_BYTES <= self.bytes() {
            let start = self.words()[at / WORD_BYTES..].as_ptr().cast_mut().cast();
            // SAFETY: a range of the mapping that begins at a page; the content stays as it is.
            unsafe { libc::madvise(start, HUGE_PAGE_BYTES, libc::MADV_COLLAPSE) };
        }
    }

    /// Puts the pages of a new, sealed file where the words are; nothing has touched them yet.
    fn replace_by_file(&self) -> io::Result<File> {
        let length = self.bytes().max(1).next_multiple_of(PAGE_BYTES);
        // SAFETY: a name that ends with a zero.
        let descriptor =
            unsafe { libc::memfd_create(c"tandem-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(length as u64)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let start = self.start.as_ptr().cast();
        // SAFETY: replaces whole pages of our own mapping, zeros by zeros, and nobody has a reference to them yet.
        let mapped = unsafe { libc::mmap(start, length, access, kind, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A wish, as in `map`.
        // SAFETY: the range that was mapped above.
        unsafe { libc::madvise(start, length, libc::MADV_HUGEPAGE) };
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
        // SAFETY: an open descriptor and a number.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
            // Its pages serve; but others could write into what they map.
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(file),
        }
    }

    fn map(bytes: usize) -> io::Result<Self> {
        let slack = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 0 };
        let mapping = Mapping::new(bytes.max(1).checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?)?;
        let base = mapping.base.addr().get();
        let offset = if slack > 0 { base.next_multiple_of(slack) - base } else { 0 };
        // SAFETY: `offset` is below `slack`, and the mapping is `slack` longer than the words.
        let start = unsafe { mapping.base.byte_add(offset) };
        if slack > 0 {
            // A wish: small pages serve as well, so what it returns does not matter.
            // SAFETY: a range of the mapping that begins at a page; the advice changes no content.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { _mapping: mapping, file: None, start: start.cast(), words: bytes / WORD_BYTES })
    }

    fn words_of(&self, at: usize, bytes: usize) -> &[AtomicU64] {
        assert!(at.is_multiple_of(WORD_BYTES) && bytes.is_multiple_of(WORD_BYTES), "unaligned range of KV memory");
        &self.words()[at / WORD_BYTES..][..bytes / WORD_BYTES]
    }

    fn digest(&self, piece: Run, scratch: &mut [u8; SCRATCH_BYTES]) -> u64 {
        // One call over contiguous bytes is faster than the same hash in pieces.
        if let Some(bytes) = scratch.get_mut(..piece.bytes) {
            self.read(piece.at, bytes);
            return xxh3(bytes);
        }
        let (mut hasher, mut done) = (Xxh3::new(), 0);
        while done < piece.bytes {
            let bytes = &mut scratch[..SCRATCH_BYTES.min(piece.bytes - done)];
            self.read(piece.at + done, bytes);
            hasher.update(bytes);
            done += bytes.len();
        }
        hasher.digest()
    }
}

impl KvMemory for HostMemory {
    fn bytes(&self) -> usize {
        self.words * WORD_BYTES
    }

    fn place(&self) -> Place<'_> {
        Place::Host(self.words())
    }

    fn share(&self) -> Option<Share> {
        let file = self.file.as_ref()?;
        Some(Share {
            process: std::process::id(),
            descriptor: u32::try_from(file.as_raw_fd()).ok()?,
            inode: file.metadata().ok()?.ino(),
            bytes: self.bytes() as u64,
        })
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let words = self.words_of(at, out.len());
        for (bytes, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let words = self.words_of(at, bytes.len());
        for (bytes, word) in bytes.as_chunks().0.iter().zip(words) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    fn digests(&self, pieces: &[Run], out: &mut [u64]) {
        assert_eq!(pieces.len(), out.len(), "a digest for each piece");
        let mut scratch = [0; SCRATCH_BYTES];
        for (piece, digest) in pieces.iter().zip(out) {
            *digest = self.digest(*piece, &mut scratch);
        }
    }
}

/// Pages of this process.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

impl Mapping {
    fn new(length: usize) -> io::Result<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new pages wherever the system likes; no existing memory is involved.
        let base = unsafe { libc::mmap(null_mut(), length, access, kind, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with these values and unmapped once; references into it borrow from its owner, and libraries
        // that have its address hold an `Arc` of that.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn memory_is_zero_and_begins_at_a_page() {
        for bytes in [0, 8, 4096, 40_000, HUGE_PAGE_BYTES - 8, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 8] {
            let memory = HostMemory::zeroed(bytes).expect("little");
            assert_eq!((memory.bytes(), memory.words().len()), (bytes, bytes / 8));
            let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
            assert_eq!(memory.words().as_ptr().addr() % align, 0, "{bytes} bytes");
            assert!(memory.words().iter().all(|word| word.load(Relaxed) == 0));
            assert_eq!(memory.place().host().map(<[_]>::len), Some(bytes / 8));
        }
    }

    #[test]
    fn shareable_memory_is_memory_as_any_other() {
        for bytes in [0, 8, 40_000, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 8] {
            let memory = HostMemory::shareable(bytes).expect("little");
            memory.touch(0..bytes / 2);
            memory.touch(bytes / 2..bytes);
            assert!(memory.words().iter().all(|word| word.swap(7, Relaxed) == 0));
            assert_eq!(resident(&memory), memory.bytes().div_ceil(PAGE_BYTES));
            memory.touch(0..bytes);
            assert!(memory.words().iter().all(|word| word.load(Relaxed) == 7), "content is kept");
        }
    }

    #[test]
    fn what_the_system_has_not_is_an_error() {
        for bytes in [usize::MAX - 7, usize::MAX / 16 * 8, 1 << 60] {
            assert!(matches!(HostMemory::zeroed(bytes), Err(MemoryError::Refused { .. })), "{bytes}");
        }
        assert!(matches!(HostMemory::zeroed(12), Err(MemoryError::Uneven(12))));
    }

    #[test]
    fn touched_pages_exist_and_keep_their_content() {
        let memory = HostMemory::zeroed(2 * HUGE_PAGE_BYTES + 24).expect("little");
        assert_eq!(resident(&memory), 0, "nothing is there before");
        memory.write(HUGE_PAGE_BYTES, &[7; 8]);
        let half = memory.bytes() / 2;
        thread::scope(|scope| {
            scope.spawn(|| memory.touch(0..half));
            scope.spawn(|| memory.touch(half..usize::MAX));
        });
        assert_eq!(resident(&memory), memory.bytes().div_ceil(PAGE_BYTES));
        let is_kept = |(i, word): (usize, &AtomicU64)| (word.load(Relaxed) == 0) == (i != HUGE_PAGE_BYTES / WORD_BYTES);
        assert!(memory.words().iter().enumerate().all(is_kept));
    }

    /// Pages that are there.
    fn resident(memory: &HostMemory) -> usize {
        let mut pages = vec![0; memory.bytes().div_ceil(PAGE_BYTES)];
        let start = memory.words().as_ptr().cast_mut().cast();
        // SAFETY: pages of the mapping, and a byte for each.
        let status = unsafe { libc::mincore(start, memory.bytes(), pages.as_mut_ptr()) };
        assert_eq!(status, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    proptest! {
        #[test]
        fn bytes_are_read_and_hashed_as_they_were_written(
            words in 1usize..6000, at in 0usize..6000, seed: u64,
            pieces in prop::collection::vec((0usize..6000, 0usize..6000), 0..8),
        ) {
            let memory = HostMemory::holding(&vec![u64::MAX; 6000]).expect("little");
            let at = at.min(6000 - words) * WORD_BYTES;
            let byte = |i: usize| ((i as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
            let bytes: Vec<u8> = (0..words * WORD_BYTES).map(byte).collect();
            memory.write(at, &bytes);
            let mut all = vec![0; memory.bytes()];
            memory.read(0, &mut all);
            prop_assert_eq!(&all[at..at + bytes.len()], &bytes[..]);
            let outside = all[..at].iter().chain(&all[at + bytes.len()..]);
            prop_assert!(outside.into_iter().all(|byte| *byte == u8::MAX));
            let pieces: Vec<Run> = pieces.into_iter().map(|(a, b)| {
                Run { at: a.min(b) * WORD_BYTES, bytes: a.abs_diff(b) * WORD_BYTES }
            }).collect();
            let mut digests = vec![0; pieces.len()];
            memory.digests(&pieces, &mut digests);
            let of = |piece: &Run| xxhash_rust::xxh3::xxh3_64(&all[piece.at..piece.at + piece.bytes]);
            prop_assert_eq!(digests, pieces.iter().map(of).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "unaligned")]
    fn a_range_of_half_words_is_a_bug() {
        HostMemory::zeroed(64).expect("little").read(4, &mut [0; 8]);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_range_outside_is_a_bug() {
        HostMemory::zeroed(64).expect("little").write(64, &[0; 8]);
    }
}
