//! Memory for weights: on huge pages where the system has them. Kernels walk through more of it than the
//! processor has page table entries at hand, and a walk through the page table costs as much as the bytes it finds.
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

const PAGE_BYTES: usize = 4096;

/// Zeroed bytes that begin at a page, as packed weights should: a vector or a row of a tile is then one line of cache
/// and never two. A page takes memory, on the socket of the thread that does so, when it is first written.
pub(super) struct WeightMemory {
    map: MmapMut,
    bytes: usize,
}

impl WeightMemory {
    /// # Panics
    /// If the system has no such memory to give.
    pub fn zeroed(bytes: usize) -> Self {
        let map = MmapMut::map_anon(bytes.max(1));
        let mut map = map.unwrap_or_else(|error| panic!("no memory of {bytes} bytes for weights: {error}"));
        prefer_huge_pages(&mut map);
        Self { map, bytes }
    }
}

impl Deref for WeightMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[..self.bytes]
    }
}

impl DerefMut for WeightMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.bytes]
    }
}

/// A wish, for pages that are not touched yet: small ones serve as well.
fn prefer_huge_pages<T>(memory: &mut [T]) {
    let range = memory.as_mut_ptr_range();
    let (start, end) = (range.start.addr().next_multiple_of(PAGE_BYTES), range.end.addr() / PAGE_BYTES * PAGE_BYTES);
    if let Some(bytes) = end.checked_sub(start).filter(|bytes| *bytes > 0) {
        // SAFETY: whole pages inside the memory; the advice changes no content.
        unsafe { libc::madvise(range.start.with_addr(start).cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sizes_are_zero() {
        for size in [0, 1, 511, 512, 5000, 1 << 17] {
            let memory = WeightMemory::zeroed(size * 8);
            assert!(memory.len() == size * 8 && memory.iter().all(|byte| *byte == 0));
            assert_eq!(memory.as_ptr().addr() % 64, 0);
        }
    }
}
