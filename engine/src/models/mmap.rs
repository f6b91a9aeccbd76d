//! A weights file as bytes. The one place outside `ops` with `unsafe`: mapping a file trusts that nobody truncates or
//! rewrites it while it is mapped.
use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::EngineError;

/// Maps the file at `path`.
///
/// # Errors
/// `Model` when it cannot be opened, is empty, or cannot be mapped.
pub fn map(path: &Path) -> Result<Mmap, EngineError> {
    let fail = |why: &dyn std::fmt::Display| EngineError::Model(format!("{}: {why}", path.display()));
    let file = File::open(path).map_err(|error| fail(&error))?;
    let metadata = file.metadata().map_err(|error| fail(&error))?;
    if !metadata.is_file() {
        return Err(fail(&"is no regular file"));
    }
    if metadata.len() == 0 {
        return Err(fail(&"the file is empty"));
    }
    // SAFETY: read-only, and dropped when loading ends. That no other process shortens a model file while a node starts
    // is the operator's part; a model is replaced by renaming a new file over it.
    unsafe { Mmap::map(&file) }.map_err(|error| fail(&error))
}
