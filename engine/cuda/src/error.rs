//! The crate's one error: what the driver or the compiler answered, sorted by what the caller does next. A status that
//! the context does not survive ([`CudaError::Lost`]) ends the process; everything else fails the one call.
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use tandem_engine::EngineError;

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

/// Success, or the error that `status` of the driver's function `call` means.
pub(crate) fn check(call: &'static str, status: CUresult) -> Result<(), CudaError> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(failed(call, DriverError(status))),
    }
}

/// The error that a failed call of the driver means.
pub(crate) fn failed(call: &'static str, error: DriverError) -> CudaError {
    let status = format!("{:?}", error.0);
    let meaning = error.error_string().map_or_else(|_| "no description".into(), |text| text.to_string_lossy().into());
    match is_sticky(error.0) {
        true => CudaError::Lost { call, status, meaning },
        false => CudaError::Driver { call, status, meaning },
    }
}

/// Statuses that leave the context "in an inconsistent state" by the driver's reference: all further work answers the
/// same, until the process is launched again.
fn is_sticky(status: CUresult) -> bool {
    use CUresult as Status;
    matches!(
        status,
        Status::CUDA_ERROR_ECC_UNCORRECTABLE
            | Status::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Status::CUDA_ERROR_ILLEGAL_ADDRESS
            | Status::CUDA_ERROR_LAUNCH_TIMEOUT
            | Status::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Status::CUDA_ERROR_ASSERT
            | Status::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Status::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Status::CUDA_ERROR_MISALIGNED_ADDRESS
            | Status::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Status::CUDA_ERROR_INVALID_PC
            | Status::CUDA_ERROR_LAUNCH_FAILED
            | Status::CUDA_ERROR_DEINITIALIZED
            | Status::CUDA_ERROR_UNKNOWN
    )
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

    #[test]
    fn statuses_that_a_context_does_not_survive_are_known() {
        assert!(is_sticky(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) && is_sticky(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        for survived in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_INVALID_VALUE] {
            assert!(!is_sticky(survived));
        }
    }
}
