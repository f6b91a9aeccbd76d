//! Why a file of lines cannot be read: one form for recorded runs and for traces.
use std::path::PathBuf;

/// Why a file of lines cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// No such file, or it cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A line that is not what belongs there.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
}
