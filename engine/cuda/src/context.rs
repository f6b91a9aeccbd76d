//! A device's primary context: what everything else on the device is made in. UCX and other libraries of the process
//! share it. The driver has a current context for each thread, so whoever works on a thread binds it there first.
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::device::Device;
use crate::error::{CudaError, failed};

/// The primary context of a device, held until the last of its owners is dropped.
#[derive(Debug)]
pub struct Context {
    device: Device,
    handle: sys::CUcontext,
}

// SAFETY: a context is the driver's, which takes calls about it from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Takes the device's primary context and makes it this thread's.
    ///
    /// # Errors
    /// Whatever the driver answers: the card's memory may be full, or another process has it for itself.
    pub fn of(device: &Device) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the handle came from `cuDeviceGet`.
        let handle = unsafe { result::primary_ctx::retain(device.handle) }
            .map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
        let context = Arc::new(Self { device: device.clone(), handle });
        context.bind()?;
        Ok(context)
    }

    /// Makes it the context of the calling thread; a matter of nanoseconds where it is already.
    ///
    /// # Errors
    /// When the driver has given the context up.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: retained until `self` is dropped.
        unsafe { result::ctx::set_current(self.handle) }.map_err(|error| failed("cuCtxSetCurrent", error))
    }

    /// Whose it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of the device that are free, and all.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().map_err(|error| failed("cuMemGetInfo", error))?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What is refused here cannot be mended: the process ends, or the context is lost already.
        // SAFETY: retained once by `of`; owners of things in it hold it, so none is left.
        let _ = unsafe { result::primary_ctx::release(self.device.handle) };
    }
}
