//! Whether the run-time compiler of kernels is on this machine, asked before any is compiled: the bindings open its
//! library at first use and panic where there is none.
use std::ffi::c_int;

use cudarc::nvrtc::sys;

use crate::driver::{self, Failure, Status};
use crate::error::CudaError;

/// Its version: "13.0".
///
/// # Errors
/// [`CudaError::Kernels`] when it is not there, or does not answer.
pub fn nvrtc_version() -> Result<String, CudaError> {
    // SAFETY: opens a shared library by its system name and runs its initializers, which the CUDA toolkit's may be
    // trusted with: it is what this program was told to use.
    if !unsafe { sys::is_culib_present() } {
        let why = "no NVRTC: libnvrtc.so.13 (or .12), which compiles the kernels, is not on this machine";
        return Err(CudaError::Kernels(why.into()));
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: writes the two integers.
    unsafe { driver::nvrtcVersion(&mut major, &mut minor) }.map_err(compiler_failed)?;
    Ok(format!("{major}.{minor}"))
}

/// The error that a failed call of the compiler means.
pub(crate) fn compiler_failed(Failure { call, status }: Failure) -> CudaError {
    CudaError::Kernels(match status {
        Some(Status(status)) => format!("{call} failed with status {status} of NVRTC"),
        None => format!("this NVRTC has no {call}: CUDA 12 or newer is needed"),
    })
}
