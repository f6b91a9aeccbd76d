//! Memory for weights: on huge pages where the system has them. Kernels walk through more of it than the
//! processor has page table entries at hand, and a walk through the page table costs as much as the bytes it finds.
use std::ops::{Deref, DerefMut};

const PAGE_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;

/// Bytes that begin at a cache line, as packed weights should: a vector or a row of a tile is then one line and never two.
pub(super) struct Lines(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

impl Lines {
    /// # Panics
    /// If `bytes` is no whole number of lines.
    pub fn zeroed(bytes: usize) -> Self {
        assert!(bytes.is_multiple_of(LINE_BYTES));
        let mut lines = Vec::with_capacity(bytes / LINE_BYTES);
        prefer_huge_pages(lines.spare_capacity_mut());
        lines.resize(bytes / LINE_BYTES, Line([0; LINE_BYTES]));
        Self(lines)
    }
}

impl Deref for Lines {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a line is 64 bytes without padding, and a vector's elements lie together.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * LINE_BYTES) }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and every byte is a valid one.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * LINE_BYTES) }
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
            let lines = Lines::zeroed(size * LINE_BYTES);
            assert!(lines.len() == size * LINE_BYTES && lines.iter().all(|byte| *byte == 0));
            assert_eq!(lines.as_ptr().addr() % LINE_BYTES, 0);
        }
    }
}
