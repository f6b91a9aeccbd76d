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

// What UCX and cudart ask for and take another way without: virtual memory management, pools to export, managed memory.
#define NOT_EMULATED(name) \
    EMU_API int name() { return NOT_SUPPORTED; }
NOT_EMULATED(cuMemAddressFree)
NOT_EMULATED(cuMemAddressReserve)
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
NOT_EMULATED(cuMemPoolImportFromShareableHandle)
NOT_EMULATED(cuMemPoolImportPointer)
NOT_EMULATED(cuMemPoolSetAccess)
NOT_EMULATED(cuMemRangeGetAttribute)
NOT_EMULATED(cuMemRelease)
NOT_EMULATED(cuMemRetainAllocationHandle)
NOT_EMULATED(cuMemSetAccess)
NOT_EMULATED(cuMemUnmap)

EMU_API int cuProfilerStart() { return SUCCESS; }
EMU_API int cuProfilerStop() { return SUCCESS; }

}  // namespace emu
