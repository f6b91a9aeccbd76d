//! A device's primary context: what everything else on the device is made in. UCX and other libraries of the process
//! share it. The driver has a current context for each thread, so whoever works on a thread binds it there first.
use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::device::Device;
use crate::driver;
use crate::error::CudaError;

const TARGET_CURRENT_CONTEXT: c_uint =
    sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as c_uint;
const TO_OWNER: c_uint = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as c_uint;

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
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle came from `cuDeviceGet`; writes the one pointer.
        unsafe { driver::cuDevicePrimaryCtxRetain(&mut handle, device.handle) }?;
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
        unsafe { driver::cuCtxSetCurrent(self.handle) }.map_err(CudaError::from)
    }

    /// Whose it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for all of its work.
    ///
    /// # Errors
    /// What a kernel or copy of this context came to.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: of the context that is bound.
        unsafe { driver::cuCtxSynchronize() }.map_err(CudaError::from)
    }

    /// Lets kernels that are launched from now on see what network cards have written before. Nothing to do where a
    /// device keeps that order by itself.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub(crate) fn flush_foreign_writes(&self) -> Result<(), CudaError> {
        if !self.device.needs_flush {
            return Ok(());
        }
        self.bind()?;
        let (target, scope) = (TARGET_CURRENT_CONTEXT, TO_OWNER);
        // SAFETY: two numbers of the driver's, about the context that is bound.
        unsafe { driver::cuFlushGPUDirectRDMAWrites(target, scope) }.map_err(CudaError::from)
    }

    /// Bytes of the device that are free, and all.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes the two numbers.
        unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What is refused here cannot be mended: the process ends, or the context is lost already.
        // SAFETY: retained once by `of`; owners of things in it hold it, so none is left.
        let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(self.device.handle) };
    }
}
