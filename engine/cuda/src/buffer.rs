//! Device memory: one `cuMemAlloc` each, never of a pool, so that it can be shared with other processes and registered
//! for RDMA. And the copies between it and the host.
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{self, Status};
use crate::error::CudaError;
use crate::kernels::launch::Mem;
use crate::pinned::Pinned;
use crate::stream::Stream;

/// Memory of the device.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// Memory that holds anything; `what` it is for is said where there is none left.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] with the device's numbers.
    pub fn new(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self, CudaError> {
        context.bind()?;
        // The driver refuses to allocate nothing.
        let mut address = 0;
        // SAFETY: allocates; what it holds is read by kernels that were told what to read. Writes the one address.
        unsafe { driver::cuMemAlloc_v2(&mut address, bytes.max(1)) }.map_err(|failure| {
            if !failure.is(Status::OUT_OF_MEMORY) {
                return failure.into();
            }
            let (free, total) = context.memory().unwrap_or_default();
            CudaError::OutOfMemory { what, wanted: bytes as u64, free, total }
        })?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Zeroed memory. Waits for that.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn zeroed(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self, CudaError> {
        let buffer = Self::new(context, what, bytes)?;
        // SAFETY: the range is the buffer.
        unsafe { driver::cuMemsetD8_v2(buffer.address, 0, bytes.max(1)) }?;
        // Such a fill is asynchronous to the host, and to streams that do not wait for the default one.
        context.synchronize()?;
        Ok(buffer)
    }

    /// A copy of `values`. Waits for it.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn holding<T: Copy>(context: &Arc<Context>, what: &'static str, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::new(context, what, size_of_val(values))?;
        // SAFETY: the buffer is as long as the values, which the call has read when it returns.
        unsafe { driver::cuMemcpyHtoD_v2(buffer.address, values.as_ptr().cast(), size_of_val(values)) }?;
        // They may still be on their way from the driver's own memory, which streams do not wait for: seen on a card.
        context.synchronize()?;
        Ok(buffer)
    }

    /// All of it, for kernels.
    pub fn mem(&self) -> Mem {
        Mem::new(self.address, self.bytes)
    }

    /// `bytes` of it from `at` on.
    ///
    /// # Panics
    /// If they leave the buffer.
    pub fn part(&self, at: usize, bytes: usize) -> Mem {
        assert!(at <= self.bytes && bytes <= self.bytes - at, "a part out of range");
        Mem::new(self.address + at as u64, bytes)
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queues a copy of `bytes` from byte `from_at` of `from` on. Whoever changes `from` waits for the stream first.
    ///
    /// # Errors
    /// Whatever the driver answers.
    ///
    /// # Panics
    /// If either is shorter.
    pub fn upload(
        &self,
        at: usize,
        from: &Pinned,
        from_at: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.check(at, bytes, from, from_at);
        // SAFETY: both ranges are inside their owners, who wait for the stream before they free.
        unsafe {
            let (to, from) = (self.address + at as u64, from.as_ptr().add(from_at));
            driver::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.handle())
        }
        .map_err(CudaError::from)
    }

    /// Queues a copy of `bytes` to byte `to_at` of `to` on. Whoever reads `to` waits for the stream first.
    ///
    /// # Errors
    /// Whatever the driver answers.
    ///
    /// # Panics
    /// If either is shorter.
    pub fn download(
        &self,
        at: usize,
        to: &Pinned,
        to_at: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.check(at, bytes, to, to_at);
        // SAFETY: as in `upload`.
        unsafe {
            let (to, from) = (to.as_ptr().add(to_at), self.address + at as u64);
            driver::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.handle())
        }
        .map_err(CudaError::from)
    }

    fn check(&self, at: usize, bytes: usize, pinned: &Pinned, pinned_at: usize) {
        let inside = |at: usize, all: usize| at <= all && bytes <= all - at;
        assert!(inside(at, self.bytes) && inside(pinned_at, pinned.bytes()), "a copy out of range");
    }

    /// Copies what is at `at` into `out`, and waits. For tests and tools: a step has pinned memory for it.
    ///
    /// # Errors
    /// Whatever the driver answers, to earlier work of the context as well.
    ///
    /// # Panics
    /// If the range leaves the buffer.
    pub fn read<T: Copy>(&self, at: usize, out: &mut [T]) -> Result<(), CudaError> {
        let bytes = size_of_val(out);
        assert!(at <= self.bytes && bytes <= self.bytes - at, "a copy out of range");
        // Streams here do not wait for the default one, nor does it for them.
        self.context.synchronize()?;
        // SAFETY: the range is inside; what `T` makes of the bytes is the caller's, who knows what was written there.
        unsafe { driver::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), self.address + at as u64, bytes) }
            .map_err(CudaError::from)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated by `new` and freed once; the driver waits for work that is queued.
        let _ = unsafe { driver::cuMemFree_v2(self.address) };
    }
}
