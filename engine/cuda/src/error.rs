//! The crate's one error: what the driver or the compiler answered, sorted by what the caller does next. A status that
//! the context does not survive ([`CudaError::Lost`]) ends the process; everything else fails the one call.
use tandem_engine::EngineError;

use crate::driver::{Failure, Status};

/// Why something on a device did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, no device of that number, or none that can be used: a sentence for whoever set it up.
    #[error("{0}")]
    Unavailable(String),
    /// The device has not so much memory left; nothing was allocated.
    #[error("the GPU has no {wanted} for {what}: {free} of its {total} are free", wanted = gib(*wanted), free = gib(*free),
        total = gib(*total))]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that the device says are free.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// The context is broken: every later call fails as well, and device memory holds anything. The process has to end.
    #[error("the GPU is lost to this process: {call} answered {status}: {meaning}")]
    Lost {
        /// The driver's function; what it reports may have happened before.
        call: &'static str,
        /// The status by name.
        status: String,
        /// The driver's sentence about it.
        meaning: String,
    },
    /// Another refusal of the driver.
    #[error("{call} failed with {status}: {meaning}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The status by name.
        status: String,
        /// The driver's sentence about it.
        meaning: String,
    },
    /// cuBLASLt refused a call; what was queued before is as it was.
    #[error("{call} failed with {status} of cuBLASLt")]
    CublasLt {
        /// The library's function.
        call: &'static str,
        /// The status by name.
        status: String,
    },
    /// Kernels cannot be compiled or loaded.
    #[error("{0}")]
    Kernels(String),
}

impl CudaError {
    /// Whether nothing on this device can go on in this process.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Lost { .. } => Self::DeviceLost(error.to_string()),
            other => Self::Executor(other.to_string()),
        }
    }
}

impl From<Failure> for CudaError {
    fn from(Failure { call, status }: Failure) -> Self {
        let call = call.trim_end_matches("_v2");
        let Some(status) = status else {
            return Self::Unavailable(format!("the NVIDIA driver has no {call}: update the driver"));
        };
        let (name, meaning) = status.explained();
        match status.is_sticky() {
            true => Self::Lost { call, status: name, meaning },
            false => Self::Driver { call, status: name, meaning },
        }
    }
}

impl Failure {
    /// Whether it is this status.
    pub fn is(&self, status: Status) -> bool {
        self.status == Some(status)
    }
}

/// `12.50 GiB`.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_device_ends_the_process_and_other_failures_do_not() {
        let lost = CudaError::Lost { call: "cuStreamSynchronize", status: "X".into(), meaning: "gone".into() };
        assert!(lost.is_lost());
        assert!(matches!(EngineError::from(lost), EngineError::DeviceLost(why) if why.contains("cuStreamSynchronize")));
        let full = CudaError::OutOfMemory { what: "weights", wanted: 3 << 29, free: 1 << 30, total: 4 << 30 };
        assert!(!full.is_lost());
        assert_eq!(full.to_string(), "the GPU has no 1.50 GiB for weights: 1.00 GiB of its 4.00 GiB are free");
        assert!(matches!(EngineError::from(full), EngineError::Executor(_)));
    }
}
