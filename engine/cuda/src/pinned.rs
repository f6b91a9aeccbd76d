//! Host memory that the device copies from and to without the processor. Filled and read as plain bytes while no copy
//! of it is under way: who keeps to that says so at each access.
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver;
use crate::error::CudaError;
use crate::kernels::attention::Tile;
use crate::kernels::blocks::PieceRow;
use crate::kernels::choose::{Choice, Outcome};

/// Values that are plain bytes: any bytes are one, and all bytes of one are written.
///
/// # Safety
/// No padding, no pointers, no invalid bit patterns, an alignment of 16 at most.
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: a number of the machine.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: numbers, laid out as in C, and a word that fills what would be padding.
unsafe impl Plain for Choice {}
// SAFETY: as above.
unsafe impl Plain for Outcome {}
// SAFETY: four words, laid out as in C.
unsafe impl Plain for Tile {}
// SAFETY: three words, laid out as in C.
unsafe impl Plain for PieceRow {}

/// Page-locked memory of the host.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory of its owner alone, which the driver frees from any thread.
unsafe impl Send for Pinned {}
// SAFETY: shared references give addresses only; see `slice` for who reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory.
    ///
    /// # Errors
    /// Whatever the driver answers, such as that the system lets no more memory be locked.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        context.bind()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: allocates, readable by every context (flag portable); writes the one pointer.
        unsafe { driver::cuMemHostAlloc(&mut start, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) }?;
        let refused = || CudaError::Kernels("cuMemHostAlloc gave no memory".into());
        let start: NonNull<u8> = NonNull::new(start.cast()).ok_or_else(refused)?;
        // SAFETY: `bytes` bytes were allocated, page-aligned.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { context: Arc::clone(context), start, bytes })
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte, for the driver.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// `count` values from byte `at` on.
    ///
    /// # Safety
    /// No copy to this memory is under way on any stream.
    ///
    /// # Panics
    /// If they leave the memory or `at` is no multiple of their size.
    pub unsafe fn slice<T: Plain>(&self, at: usize, count: usize) -> &[T] {
        self.check::<T>(at, count);
        // SAFETY: in range and aligned, any bytes are a `T`, and by the caller nothing writes them.
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(at).cast(), count) }
    }

    /// Likewise, to be written.
    ///
    /// # Safety
    /// No copy from or to this memory is under way on any stream.
    ///
    /// # Panics
    /// As [`Pinned::slice`].
    pub unsafe fn slice_mut<T: Plain>(&mut self, at: usize, count: usize) -> &mut [T] {
        self.check::<T>(at, count);
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(at).cast(), count) }
    }

    fn check<T>(&self, at: usize, count: usize) {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| at.checked_add(bytes));
        let fits = end.is_some_and(|end| end <= self.bytes) && at.is_multiple_of(align_of::<T>());
        assert!(fits, "values out of range of pinned memory");
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated by `new` and freed once; users wait for the streams that copy it before they let it go.
        let _ = unsafe { driver::cuMemFreeHost(self.start.as_ptr().cast::<c_void>()) };
    }
}
