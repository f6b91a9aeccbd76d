//! Streams, and events that mark places in them. Work of one stream runs in its order; streams wait for each other by
//! events only.
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver;
use crate::error::CudaError;

/// A queue of work on the device.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: the driver takes calls about a stream from any thread; dropping waits for nothing.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// One that does not wait for the default stream, which nobody here uses.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let (mut handle, kind) = (std::ptr::null_mut(), sys::CUstream_flags::CU_STREAM_NON_BLOCKING);
        // SAFETY: writes the one pointer.
        unsafe { driver::cuStreamCreate(&mut handle, kind as u32) }?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// The device's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle, valid as long as `self`.
    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits until all of its work is done; tells of what failed in it.
    ///
    /// # Errors
    /// What a kernel or copy of this context came to, of whichever stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is there until `self` is dropped.
        unsafe { driver::cuStreamSynchronize(self.handle) }.map_err(CudaError::from)
    }

    /// What is queued from now on runs after `event`, of another stream.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are there; the driver keeps what it needs of the event.
        unsafe { driver::cuStreamWaitEvent(self.handle, event.handle, flags as u32) }.map_err(CudaError::from)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The driver lets work finish that is queued; its memory is the caller's matter. An error has nobody to go to.
        let _ = self.context.bind();
        // SAFETY: created by `new` and destroyed once.
        let _ = unsafe { driver::cuStreamDestroy_v2(self.handle) };
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: as of streams.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// One that is done until it is recorded, and keeps no time.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let (mut handle, kind) = (std::ptr::null_mut(), sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        // SAFETY: writes the one pointer.
        unsafe { driver::cuEventCreate(&mut handle, kind as u32) }?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Marks the end of what is queued in `stream` now.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are there and of one context.
        unsafe { driver::cuEventRecord(self.handle, stream.handle) }.map_err(CudaError::from)
    }

    /// Waits until the stream has come to it.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is there until `self` is dropped.
        unsafe { driver::cuEventSynchronize(self.handle) }.map_err(CudaError::from)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created by `new` and destroyed once; streams that wait for it have what they need.
        let _ = unsafe { driver::cuEventDestroy_v2(self.handle) };
    }
}
