//! The engine's one error, shaped by what the caller does next, and its mapping to the error that other processes see.
use tandem_proto::{Error, ErrorKind};

use crate::footprint::Misfit;

/// Why the engine refused or gave up a sequence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The request is wrong; the same request will always fail.
    #[error("{0}")]
    InvalidArgument(String),
    /// No room now, nothing was started: try later or elsewhere.
    #[error("{0}")]
    Overloaded(String),
    /// The sequence's deadline passed before it finished.
    #[error("the deadline passed")]
    DeadlineExceeded,
    /// The executor failed on a step that held this sequence: its KV is not to be trusted, run it again elsewhere.
    #[error("the executor failed: {0}")]
    Executor(String),
    /// The device that computes is lost to this process: all KV is, and no step can be run again here. The engine
    /// stops, and its process has to end.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    /// The engine is shut down or broken and will take no more work.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
    /// The model's files cannot be served.
    #[error("cannot load the model: {0}")]
    Model(String),
    /// The model takes more memory than there is; nothing of it was read.
    #[error("{0}")]
    DoesNotFit(Misfit),
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        let kind = match error {
            EngineError::InvalidArgument(_) => ErrorKind::InvalidArgument,
            EngineError::Overloaded(_) => ErrorKind::Overloaded,
            EngineError::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            EngineError::Executor(_) | EngineError::DeviceLost(_) | EngineError::Stopped(_) => ErrorKind::Unavailable,
            EngineError::Model(_) | EngineError::DoesNotFit(_) => ErrorKind::Internal,
        };
        Error::new(kind, error.to_string())
    }
}
