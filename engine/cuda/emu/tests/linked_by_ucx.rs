//! UCX's CUDA module links the driver: where a function is missing it cannot be opened, or ends the process at the
//! first call.
mod rig;

use cudarc::driver::sys;
use rig::Gpu;

/// What `libuct_cuda.so.0` of UCX 1.22.0 (PyPI's `libucx-cu13`) imports, by `nm -D --undefined-only`.
const IMPORTED: &str = "
    cuCtxGetCurrent cuCtxGetDevice cuCtxGetId cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid_v2 cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2 cuEventCreate cuEventDestroy_v2 cuEventQuery cuEventRecord
    cuGetErrorString cuGetProcAddress_v2 cuInit cuIpcCloseMemHandle cuIpcGetMemHandle cuIpcOpenMemHandle_v2
    cuMemAddressFree cuMemAddressReserve cuMemAllocManaged cuMemAlloc_v2 cuMemCreate cuMemExportToShareableHandle
    cuMemFree_v2 cuMemGetAddressRange_v2 cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle
    cuMemHostRegister_v2 cuMemHostUnregister cuMemImportFromShareableHandle cuMemMap cuMemPoolDestroy
    cuMemPoolExportPointer cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
    cuMemPoolSetAccess cuMemRangeGetAttribute cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap
    cuMemcpyAsync cuMemcpyDtoDAsync_v2 cuMemcpyHtoD_v2 cuPointerGetAttribute cuPointerGetAttributes
    cuPointerSetAttribute cuStreamAddCallback cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize";

#[test]
fn every_function_that_ucx_links_is_there() {
    let Some(_gpu) = Gpu::open() else { return };
    let found = |name: &&str| {
        // SAFETY: looked for, and never called.
        unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
    };
    let missing: Vec<&str> = IMPORTED.split_whitespace().filter(|name| !found(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
