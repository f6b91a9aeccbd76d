//! Compiled kernels in a context, and launching them. A launch names its arguments with their types; how many there are
//! and how large is compared with what the compiled kernel says of itself, as the driver takes bare pointers.
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver::{self, Status};
use crate::error::CudaError;
use crate::kernels::launch::{Launch, MOST_ARGUMENTS};
use crate::stream::Stream;

/// Dynamic shared memory above this is given to kernels that ask for it.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// The first cards on which a launch may begin before the one before has ended.
const HOPPER: (i32, i32) = (9, 0);

/// A compiled image in a context.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
}

// SAFETY: the driver takes calls about a module from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin, or whatever image the driver takes.
    ///
    /// # Errors
    /// [`CudaError::Driver`] for an image of another architecture, or none at all.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>, CudaError> {
        context.bind()?;
        // Text images end in a zero by the driver's rule; to others it does no harm.
        let image = [image, &[0]].concat();
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image is there until the call returns, its formats tell their lengths; writes the one pointer.
        unsafe { driver::cuModuleLoadData(&mut handle, image.as_ptr().cast()) }?;
        Ok(Arc::new(Self { context: Arc::clone(context), handle }))
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// [`CudaError::Kernels`] when there is none.
    pub fn function(self: &Arc<Self>, name: &'static str) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Kernels(format!("{name:?} is no kernel's name")))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module is loaded until `self` is dropped, the text outlives the call; writes the one pointer.
        unsafe { driver::cuModuleGetFunction(&mut handle, self.handle, text.as_ptr()) }.map_err(
            |failure| match failure.is(Status::NOT_FOUND) {
                true => CudaError::Kernels(format!("there is no kernel {name}")),
                false => failure.into(),
            },
        )?;
        let begins_early = self.context.device().capability >= HOPPER;
        Ok(Function { module: Arc::clone(self), handle, name, parameters: parameters(handle), begins_early })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: loaded by `load` and unloaded once; functions hold the module.
        let _ = unsafe { driver::cuModuleUnload(self.handle) };
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    /// Keeps it loaded.
    module: Arc<Module>,
    handle: sys::CUfunction,
    name: &'static str,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
    /// Its launches may begin before those before them in their stream have ended.
    begins_early: bool,
}

// SAFETY: a function belongs to its module, and is launched by calls that any thread may make.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Lets launches have up to so much dynamic shared memory: more than 48 KiB must be asked for, once.
    ///
    /// # Errors
    /// When the device has not so much.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes <= SHARED_WITHOUT_ASKING {
            return Ok(());
        }
        self.module.context.bind()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded; the attribute takes any number and answers.
        unsafe { driver::cuFuncSetAttribute(self.handle, attribute, bytes.cast_signed()) }.map_err(CudaError::from)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Queues a launch of it.
    ///
    /// # Errors
    /// [`CudaError::Kernels`] for other arguments than the kernel has; whatever the driver answers.
    ///
    /// # Safety
    /// What the arguments point to is device memory that stays until the stream has done the launch, and holds what the
    /// kernel takes it for: indices in it are in range. Nothing else writes there meanwhile.
    pub unsafe fn launch(&self, stream: &Stream, launch: &Launch) -> Result<(), CudaError> {
        let args = launch.args();
        if !args.iter().map(|arg| arg.bytes()).eq(self.parameters.iter().copied()) {
            let (name, has) = (self.name, &self.parameters);
            return Err(CudaError::Kernels(format!(
                "kernel {name} has parameters of {has:?} bytes, and gets {args:?}"
            )));
        }
        let mut values = [0u64; MOST_ARGUMENTS];
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        for ((value, pointer), arg) in values.iter_mut().zip(&mut pointers).zip(args) {
            *value = arg.word();
            *pointer = (&raw mut *value).cast();
        }
        let &Launch { grid: [x, y, z], block, shared_bytes, .. } = launch;
        // Kernels wait by themselves for the launches before (`wait_for_launches_before` in `device.cuh`).
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.handle(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.begins_early),
        };
        // SAFETY: the function is loaded; each argument is a readable value of the size that the kernel says, which the
        // driver copies before it returns; what they point to is the caller's promise.
        unsafe { driver::cuLaunchKernelEx(&config, self.handle, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .map_err(CudaError::from)
    }
}

/// Sizes of a kernel's parameters.
fn parameters(function: sys::CUfunction) -> Vec<usize> {
    let size = |index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; beyond its last parameter the driver answers that there is none.
        unsafe { driver::cuFuncGetParamInfo(function, index, &mut offset, &mut size) }.ok().map(|()| size)
    };
    (0..=MOST_ARGUMENTS).map_while(size).collect()
}
