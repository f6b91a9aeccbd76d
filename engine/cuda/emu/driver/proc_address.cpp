// How cudart and UCX find the driver's functions.
#include <dlfcn.h>

#include "driver.h"

namespace emu {

enum QueryResult { FOUND = 0, SYMBOL_NOT_FOUND = 1 };

EMU_API int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* result) {
    // Functions of newer versions have a suffix; the newest that is here is meant.
    for (const char* suffix : {"_v3", "_v2", ""}) {
        Dl_info info;
        if (!dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info)) break;
        static void* own = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
        *function = own ? dlsym(own, (std::string(name) + suffix).c_str()) : nullptr;
        if (!*function) continue;
        if (result) *result = FOUND;
        return SUCCESS;
    }
    *function = nullptr;
    if (result) *result = SYMBOL_NOT_FOUND;
    return NOT_FOUND;
}

EMU_API int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// What UCX, cudart and cudarc ask for and take another way without: virtual memory management, pools of one's own,
// managed and foreign memory, cooperative launches, contexts other than the primary one.
#define NOT_EMULATED(name) \
    EMU_API int name() { return NOT_SUPPORTED; }
NOT_EMULATED(cuCtxCreate_v3)
NOT_EMULATED(cuCtxCreate_v4)
NOT_EMULATED(cuCtxDisablePeerAccess)
NOT_EMULATED(cuDestroyExternalMemory)
NOT_EMULATED(cuDeviceGetDefaultMemPool)
NOT_EMULATED(cuDeviceGetMemPool)
NOT_EMULATED(cuDeviceSetMemPool)
NOT_EMULATED(cuExternalMemoryGetMappedBuffer)
NOT_EMULATED(cuImportExternalMemory)
NOT_EMULATED(cuLaunchCooperativeKernel)
NOT_EMULATED(cuMemAddressFree)
NOT_EMULATED(cuMemAddressReserve)
NOT_EMULATED(cuMemAdvise_v2)
NOT_EMULATED(cuMemAllocFromPoolAsync)
NOT_EMULATED(cuMemAllocManaged)
NOT_EMULATED(cuMemCreate)
NOT_EMULATED(cuMemExportToShareableHandle)
NOT_EMULATED(cuMemGetAllocationGranularity)
NOT_EMULATED(cuMemGetAllocationPropertiesFromHandle)
NOT_EMULATED(cuMemGetHandleForAddressRange)
NOT_EMULATED(cuMemImportFromShareableHandle)
NOT_EMULATED(cuMemMap)
NOT_EMULATED(cuMemPoolCreate)
NOT_EMULATED(cuMemPoolDestroy)
NOT_EMULATED(cuMemPoolExportPointer)
NOT_EMULATED(cuMemPoolExportToShareableHandle)
NOT_EMULATED(cuMemPoolGetAttribute)
NOT_EMULATED(cuMemPoolImportFromShareableHandle)
NOT_EMULATED(cuMemPoolImportPointer)
NOT_EMULATED(cuMemPoolSetAccess)
NOT_EMULATED(cuMemPoolSetAttribute)
NOT_EMULATED(cuMemPoolTrimTo)
NOT_EMULATED(cuMemPrefetchAsync_v2)
NOT_EMULATED(cuMemRangeGetAttribute)
NOT_EMULATED(cuMemRelease)
NOT_EMULATED(cuMemRetainAllocationHandle)
NOT_EMULATED(cuMemSetAccess)
NOT_EMULATED(cuMemUnmap)
NOT_EMULATED(cuModuleLoad)
NOT_EMULATED(cuOccupancyAvailableDynamicSMemPerBlock)
NOT_EMULATED(cuOccupancyMaxPotentialBlockSize)
NOT_EMULATED(cuOccupancyMaxPotentialBlockSizeWithFlags)
NOT_EMULATED(cuStreamAttachMemAsync)

EMU_API int cuCtxEnablePeerAccess(void*, unsigned) { return PEER_ACCESS_UNSUPPORTED; }

EMU_API int cuProfilerStart() { return SUCCESS; }
EMU_API int cuProfilerStop() { return SUCCESS; }

}  // namespace emu
