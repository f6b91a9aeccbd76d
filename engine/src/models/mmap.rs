//! A weights file as bytes. The one place outside `ops` with `unsafe`: mapping a file trusts that nobody truncates or
//! rewrites it while it is mapped.
use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};
use xxhash_rust::xxh3::Xxh3;

use crate::error::EngineError;

/// Bytes that a digest has in memory at a time.
const PIECE_BYTES: usize = 32 << 20;

/// A mapped file, read-only.
pub struct Map(Mmap);

impl Map {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// `Model` when it cannot be opened, is empty, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let fail = |why: &dyn std::fmt::Display| EngineError::Model(format!("{}: {why}", path.display()));
        let file = File::open(path).map_err(|error| fail(&error))?;
        let metadata = file.metadata().map_err(|error| fail(&error))?;
        if !metadata.is_file() {
            return Err(fail(&"is no regular file"));
        }
        if metadata.len() == 0 {
            return Err(fail(&"the file is empty"));
        }
        // SAFETY: read-only, and dropped when loading ends. That no other process shortens a model file while a node
        // starts is the operator's part; a model is replaced by renaming a new file over it.
        unsafe { Mmap::map(&file) }.map(Self).map_err(|error| fail(&error))
    }

    /// XXH3-64 of the whole file. Reads it from its beginning to its end and keeps none of it in memory.
    pub fn digest(&self) -> u64 {
        let mut hasher = Xxh3::new();
        for piece in self.0.chunks(PIECE_BYTES) {
            hasher.update(piece);
            self.let_go_of(piece);
        }
        hasher.digest()
    }

    /// The pages of `piece` need not stay in memory. A model is then in memory once, as its weights are packed, and not
    /// a second time as its file's pages; the system keeps those as a cache for as long as it has room.
    pub fn let_go_of(&self, piece: &[u8]) {
        let start = piece.as_ptr().addr().checked_sub(self.0.as_ptr().addr());
        if let Some(start) = start.filter(|start| start + piece.len() <= self.0.len() && !piece.is_empty()) {
            // SAFETY: a read-only mapping of a file that nobody writes: a page that is read again is read from the file
            // and has the same bytes. It is advice: an error changes nothing.
            let _ = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, start, piece.len()) };
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_were_let_go_of_have_the_same_bytes() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..PIECE_BYTES + 12_345).map(|i| ((i * 31) >> 3) as u8).collect();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let map = Map::open(file.path()).unwrap();
        for (from, to) in [(0, 1), (4095, 8193), (5000, 5000), (0, bytes.len())] {
            map.let_go_of(&map[from..to]);
            assert!(map[..] == bytes[..]);
        }
        map.let_go_of(b"elsewhere");
        assert_eq!(map.digest(), xxhash_rust::xxh3::xxh3_64(&bytes));
    }
}
