// An emulated libnvidia-ml.so.1: the part that UCX asks for. Devices without NVLink and fabric.
#include <cstdlib>
#include <cstring>

#define NVML_API extern "C" __attribute__((visibility("default")))

namespace emu {

enum NvmlReturn { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

static unsigned device_count() {
    const char* text = getenv("EMU_DEVICES");
    return text && *text ? static_cast<unsigned>(atoi(text)) : 1;
}

NVML_API int nvmlInit_v2() { return NVML_SUCCESS; }
NVML_API int nvmlInit() { return NVML_SUCCESS; }
NVML_API int nvmlShutdown() { return NVML_SUCCESS; }
NVML_API const char* nvmlErrorString(int result) {
    return result == NVML_SUCCESS ? "Success" : result == NVML_NOT_SUPPORTED ? "Not Supported" : "Invalid Argument";
}

NVML_API int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = device_count();
    return NVML_SUCCESS;
}

// A device's handle is its number + 1.
NVML_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    if (index >= device_count()) return NVML_INVALID_ARGUMENT;
    *device = reinterpret_cast<void*>(static_cast<unsigned long>(index) + 1);
    return NVML_SUCCESS;
}
NVML_API int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

// "0000:E1:00.0" is device 1: device.cpp counts buses from 0xe0.
NVML_API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
    const char* bus = strchr(id, ':');
    long number = bus ? strtol(bus + 1, nullptr, 16) - 0xe0 : -1;
    return number < 0 ? NVML_INVALID_ARGUMENT : nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(number), device);
}
NVML_API int nvmlDeviceGetHandleByUUID(const char*, void** device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }

NVML_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_NOT_SUPPORTED; }
NVML_API int nvmlDeviceGetNvLinkState(void*, unsigned, int* state) {
    *state = 0;
    return NVML_SUCCESS;
}
NVML_API int nvmlDeviceGetNvLinkVersion(void*, unsigned, unsigned*) { return NVML_NOT_SUPPORTED; }
NVML_API int nvmlDeviceGetFieldValues(void*, int, void*) { return NVML_NOT_SUPPORTED; }
NVML_API int nvmlDeviceGetGpuFabricInfo(void*, void*) { return NVML_NOT_SUPPORTED; }
NVML_API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NVML_NOT_SUPPORTED; }
NVML_API int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* generation) {
    *generation = 5;
    return NVML_SUCCESS;
}
NVML_API int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* lanes) {
    *lanes = 16;
    return NVML_SUCCESS;
}

}  // namespace emu
