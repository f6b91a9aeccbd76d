//! Bytes that begin at a cache line, as packed weights should: a vector or a row of a tile is then one line and never two.
use std::ops::{Deref, DerefMut};

const LINE_BYTES: usize = 64;

/// Whole cache lines, seen as bytes.
pub(super) struct Lines(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

impl Lines {
    /// # Panics
    /// If `bytes` is no whole number of lines.
    pub fn zeroed(bytes: usize) -> Self {
        assert!(bytes.is_multiple_of(LINE_BYTES));
        Self(vec![Line([0; LINE_BYTES]); bytes / LINE_BYTES])
    }

    /// All bytes of the parts, one after another.
    pub fn concatenated<'a>(parts: impl Iterator<Item = &'a Self>) -> Self {
        Self(parts.flat_map(|part| part.0.iter().copied()).collect())
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
