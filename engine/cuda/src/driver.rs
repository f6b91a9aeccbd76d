//! The functions of the driver, of its compiler and of cuBLASLt that the owners call, looked up by name at first use.
//! Types and the libraries' names are cudarc's. Its functions are not called: they give statuses as values of an
//! `enum`, for which a number that this version does not know would be undefined behaviour, and newer drivers have such
//! numbers. Here a status is the integer that it is. A function that a driver lacks is an error, where cudarc panics.
//!
//! Whoever calls has asked before whether the library is there: [`crate::device::driver`],
//! [`crate::nvrtc::nvrtc_version`], [`crate::cublaslt::cublaslt_version`].
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::ptr;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cuda;
use cudarc::nvrtc::sys as nvrtc;

/// What a function answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub c_uint);

/// A call that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The function.
    pub call: &'static str,
    /// `None`: the library has no such function.
    pub status: Option<Status>,
}

/// Functions of a library: each fails with what is not [`Status::SUCCESS`].
macro_rules! functions {
    ($library:path; $(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {$(
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the library's own name and parameters")]
        pub(crate) unsafe fn $name($($arg: $type),*) -> Result<(), Failure> {
            use std::sync::OnceLock;
            type Function = unsafe extern "C" fn($($type),*) -> c_uint;
            static FOUND: OnceLock<Option<Function>> = OnceLock::new();
            let call = stringify!($name);
            // SAFETY: the library's function of this name has these parameters, by its header.
            let find = || unsafe { $library().get::<Function>(call.as_bytes()) }.ok().map(|found| *found);
            let Some(function) = *FOUND.get_or_init(find) else { return Err(Failure { call, status: None }) };
            // SAFETY: what the arguments must be is the caller's promise.
            match Status(unsafe { function($($arg),*) }) {
                Status::SUCCESS => Ok(()),
                status => Err(Failure { call, status: Some(status) }),
            }
        }
    )*};
}

functions! {
    cuda::culib;
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut cuda::CUdevice, ordinal: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: cuda::CUdevice_attribute, device: cuda::CUdevice);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: cuda::CUdevice);
    fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: cuda::CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: cuda::CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut cuda::CUcontext, device: cuda::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: cuda::CUdevice);
    fn cuCtxSetCurrent(context: cuda::CUcontext);
    fn cuCtxSynchronize();
    fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut cuda::CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: cuda::CUdeviceptr);
    fn cuMemsetD8_v2(address: cuda::CUdeviceptr, value: c_uchar, bytes: usize);
    fn cuMemcpyHtoD_v2(to: cuda::CUdeviceptr, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: cuda::CUdeviceptr, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: cuda::CUdeviceptr, from: *const c_void, bytes: usize, stream: cuda::CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: cuda::CUdeviceptr, bytes: usize, stream: cuda::CUstream);
    fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(start: *mut c_void);
    fn cuModuleLoadData(module: *mut cuda::CUmodule, image: *const c_void);
    fn cuModuleGetFunction(function: *mut cuda::CUfunction, module: cuda::CUmodule, name: *const c_char);
    fn cuModuleUnload(module: cuda::CUmodule);
    fn cuFuncSetAttribute(function: cuda::CUfunction, attribute: cuda::CUfunction_attribute, value: c_int);
    fn cuFuncGetParamInfo(function: cuda::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    fn cuLaunchKernelEx(
        config: *const cuda::CUlaunchConfig, function: cuda::CUfunction, arguments: *mut *mut c_void,
        more: *mut *mut c_void,
    );
    fn cuStreamCreate(stream: *mut cuda::CUstream, flags: c_uint);
    fn cuStreamSynchronize(stream: cuda::CUstream);
    fn cuStreamQuery(stream: cuda::CUstream);
    fn cuStreamWaitEvent(stream: cuda::CUstream, event: cuda::CUevent, flags: c_uint);
    fn cuStreamDestroy_v2(stream: cuda::CUstream);
    fn cuEventCreate(event: *mut cuda::CUevent, flags: c_uint);
    fn cuEventRecord(event: cuda::CUevent, stream: cuda::CUstream);
    fn cuEventSynchronize(event: cuda::CUevent);
    fn cuEventDestroy_v2(event: cuda::CUevent);
    fn cuStreamBeginCapture_v2(stream: cuda::CUstream, mode: cuda::CUstreamCaptureMode);
    fn cuStreamEndCapture(stream: cuda::CUstream, graph: *mut cuda::CUgraph);
    fn cuGraphInstantiateWithFlags(executable: *mut cuda::CUgraphExec, graph: cuda::CUgraph, flags: c_ulonglong);
    fn cuGraphLaunch(executable: cuda::CUgraphExec, stream: cuda::CUstream);
    fn cuGraphExecDestroy(executable: cuda::CUgraphExec);
    fn cuGraphDestroy(graph: cuda::CUgraph);
    fn cuGetErrorName(status: c_uint, text: *mut *const c_char);
    fn cuGetErrorString(status: c_uint, text: *mut *const c_char);
}

functions! {
    nvrtc::culib;
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut nvrtc::nvrtcProgram, source: *const c_char, name: *const c_char, headers: c_int,
        header_texts: *const *const c_char, header_names: *const *const c_char,
    );
    fn nvrtcCompileProgram(program: nvrtc::nvrtcProgram, count: c_int, options: *const *const c_char);
    fn nvrtcGetCUBINSize(program: nvrtc::nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: nvrtc::nvrtcProgram, image: *mut c_char);
    fn nvrtcGetProgramLogSize(program: nvrtc::nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: nvrtc::nvrtcProgram, log: *mut c_char);
    fn nvrtcDestroyProgram(program: *mut nvrtc::nvrtcProgram);
}

functions! {
    lt::culib;
    fn cublasLtCreate(handle: *mut lt::cublasLtHandle_t);
    fn cublasLtDestroy(handle: lt::cublasLtHandle_t);
    fn cublasLtMatmulDescCreate(
        descriptor: *mut lt::cublasLtMatmulDesc_t, compute: lt::cublasComputeType_t, scale: lt::cudaDataType,
    );
    fn cublasLtMatmulDescSetAttribute(
        descriptor: lt::cublasLtMatmulDesc_t, attribute: lt::cublasLtMatmulDescAttributes_t, value: *const c_void,
        bytes: usize,
    );
    fn cublasLtMatmulDescDestroy(descriptor: lt::cublasLtMatmulDesc_t);
    fn cublasLtMatrixLayoutCreate(
        layout: *mut lt::cublasLtMatrixLayout_t, kind: lt::cudaDataType, rows: u64, columns: u64, stride: i64,
    );
    fn cublasLtMatrixLayoutDestroy(layout: lt::cublasLtMatrixLayout_t);
    fn cublasLtMatmulPreferenceCreate(preference: *mut lt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: lt::cublasLtMatmulPreference_t, attribute: lt::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void, bytes: usize,
    );
    fn cublasLtMatmulPreferenceDestroy(preference: lt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: lt::cublasLtHandle_t, descriptor: lt::cublasLtMatmulDesc_t, a: lt::cublasLtMatrixLayout_t,
        b: lt::cublasLtMatrixLayout_t, c: lt::cublasLtMatrixLayout_t, d: lt::cublasLtMatrixLayout_t,
        preference: lt::cublasLtMatmulPreference_t, asked: c_int, results: *mut HeuristicResult, count: *mut c_int,
    );
    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const lt::cublasLtMatmulAlgo_t, attribute: lt::cublasLtMatmulAlgoConfigAttributes_t,
        value: *mut c_void, bytes: usize, written: *mut usize,
    );
    fn cublasLtMatmul(
        handle: lt::cublasLtHandle_t, descriptor: lt::cublasLtMatmulDesc_t, alpha: *const c_void, a: *const c_void,
        a_layout: lt::cublasLtMatrixLayout_t, b: *const c_void, b_layout: lt::cublasLtMatrixLayout_t,
        beta: *const c_void, c: *const c_void, c_layout: lt::cublasLtMatrixLayout_t, d: *mut c_void,
        d_layout: lt::cublasLtMatrixLayout_t, algorithm: *const lt::cublasLtMatmulAlgo_t, workspace: *mut c_void,
        workspace_bytes: usize, stream: cuda::CUstream,
    );
}

/// `cublasLtGetVersion`, which answers its number and no status: major * 10,000 + minor * 100 + patch since version 12.
/// `None`: the library has no such function.
pub(crate) unsafe fn cublas_lt_version() -> Option<usize> {
    type Function = unsafe extern "C" fn() -> usize;
    // SAFETY: the library's function of this name has no parameters, by its header.
    unsafe { lt::culib().get::<Function>(b"cublasLtGetVersion").ok().map(|function| function()) }
}

/// `cublasLtMatmulHeuristicResult_t`, with the status as the integer that it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HeuristicResult {
    pub algorithm: lt::cublasLtMatmulAlgo_t,
    pub workspace_bytes: usize,
    pub state: c_uint,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

impl Status {
    pub const SUCCESS: Self = Self(0);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NO_DEVICE: Self = Self(100);
    pub const NOT_FOUND: Self = Self(500);
    /// NVRTC's: it does not find what it is made of.
    pub const NVRTC_BUILTIN_OPERATION_FAILURE: Self = Self(7);
    /// cuBLASLt's: it has no way to compute this.
    pub const CUBLAS_NOT_SUPPORTED: Self = Self(15);

    /// Whether the context does not survive it. The driver's reference says of such statuses that they leave the
    /// process "in an inconsistent state": all further work answers the same, until it is launched again.
    pub fn is_sticky(self) -> bool {
        match self.0 {
            // Deinitialized; uncorrectable errors of memory and of NVLink; unknown.
            4 | 214 | 220 | 999 => true,
            // What kernels come to. Of a number that is not known here nobody can say that the context survives it.
            700..=799 => !REFUSALS.contains(&self.0),
            _ => false,
        }
    }

    /// The driver's name for it and its sentence about it. It has none for numbers that it does not know itself.
    pub fn explained(self) -> (String, String) {
        let text = |ask: unsafe fn(c_uint, *mut *const c_char) -> Result<(), Failure>| {
            let mut text = ptr::null();
            // SAFETY: takes any number and writes the one pointer: to a text of the driver's that stays, or to nothing.
            unsafe { ask(self.0, &mut text) }.ok().filter(|()| !text.is_null())?;
            // SAFETY: as above.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(cuGetErrorName).unwrap_or_else(|| format!("status {}", self.0));
        (name, text(cuGetErrorString).unwrap_or_else(|| "no description".into()))
    }
}

/// Those of the statuses from 700 on that refuse a call, and nothing has happened: too many resources or blocks,
/// textures, access to peers, a context that is active, host memory registered or not.
const REFUSALS: [c_uint; 9] = [701, 703, 704, 705, 708, 711, 712, 713, 720];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_that_a_context_does_not_survive_are_known() {
        // Illegal address, timeout, assertion, failed launch, one of CUDA 13, and one of a later version.
        assert!([700, 702, 710, 719, 721, 4, 214, 999, 777].map(Status).into_iter().all(Status::is_sticky));
        // Invalid value, no memory, out of resources, already registered, too large, and numbers of nobody.
        assert!(![1, 2, 701, 712, 720, 500, 901, 4242, u32::MAX].map(Status).into_iter().any(Status::is_sticky));
    }
}
