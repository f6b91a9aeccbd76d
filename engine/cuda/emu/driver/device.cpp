// Devices and their contexts: cuInit, cuDevice*, cuCtx*.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace emu {

// The program's device i is the machine's device visible[i].
static std::vector<int>& visible = forever<std::vector<int>>();

// Contexts of this thread, the current one last.
static thread_local Context* context_stack[32];
static thread_local unsigned context_count = 0;

Context* current_context() { return context_count ? context_stack[context_count - 1] : nullptr; }

bool is_context(const void* handle) {
    for (const Context* context : driver.contexts) {
        if (context == handle) return true;
    }
    return false;
}

// As the driver reads it: indices up to the first that is not one.
static void choose_visible_devices() {
    if (!settings.has_visible_devices) {
        for (int i = 0; i < settings.devices; i++) visible.push_back(i);
        return;
    }
    const char* rest = settings.visible_devices.c_str();
    while (*rest) {
        char* end;
        long index = strtol(rest, &end, 10);
        if (end == rest || index < 0 || index >= settings.devices) return;
        visible.push_back(static_cast<int>(index));
        if (*end != ',') return;
        rest = end + 1;
    }
}

static bool is_device(int device) { return device >= 0 && static_cast<std::size_t>(device) < visible.size(); }

EMU_API int cuInit(unsigned flags) {
    ENTER;
    if (flags) return INVALID_VALUE;
    if (driver.is_initialized) return SUCCESS;
    if (is_due(Fault::Init)) return fail(NO_DEVICE, "planned fault: cuInit");
    choose_visible_devices();
    if (visible.empty()) return fail(NO_DEVICE, "EMU_DEVICES or CUDA_VISIBLE_DEVICES leave no device");
    for (std::size_t i = 0; i < visible.size(); i++) {
        auto* context = new Context;
        context->device = static_cast<int>(i);
        context->legacy_stream = new_stream(context, true, 0);
        context->per_thread_stream = new_stream(context, true, 0);
        driver.contexts.push_back(context);
    }
    driver.is_initialized = true;
    return SUCCESS;
}

EMU_API int cuDriverGetVersion(int* version) {
    ENTER;
    *version = settings.driver_version;
    return SUCCESS;
}

EMU_API int cuDeviceGetCount(int* count) {
    ENTER;
    if (!driver.is_initialized) return NOT_INITIALIZED;
    *count = static_cast<int>(visible.size());
    return SUCCESS;
}

EMU_API int cuDeviceGet(int* device, int ordinal) {
    ENTER;
    if (!driver.is_initialized) return NOT_INITIALIZED;
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EMU_API int cuDeviceGetName(char* name, int bytes, int device) {
    ENTER;
    if (!is_device(device) || bytes <= 0) return INVALID_DEVICE;
    snprintf(name, static_cast<std::size_t>(bytes), "Tandem emulated GPU");
    return SUCCESS;
}

EMU_API int cuDeviceGetUuid_v2(char* uuid, int device) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    memcpy(uuid, "tandem-emulated", 15);
    uuid[15] = static_cast<char>('0' + visible[static_cast<std::size_t>(device)]);
    return SUCCESS;
}

EMU_API int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

EMU_API int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    *bytes = settings.memory_bytes;
    return SUCCESS;
}

constexpr int FIRST_PCI_BUS = 0xe0;

EMU_API int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
    ENTER;
    if (!is_device(device) || bytes <= 0) return INVALID_DEVICE;
    snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0",
             FIRST_PCI_BUS + visible[static_cast<std::size_t>(device)]);
    return SUCCESS;
}

EMU_API int cuDeviceGetByPCIBusId(int* device, const char* id) {
    ENTER;
    unsigned domain, bus, slot;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_VALUE;
    for (std::size_t i = 0; i < visible.size(); i++) {
        if (static_cast<int>(bus) != FIRST_PCI_BUS + visible[i]) continue;
        *device = static_cast<int>(i);
        return SUCCESS;
    }
    return INVALID_DEVICE;
}

// The numbers of an H100; CUdevice_attribute in cuda.h says what they mean.
static int attribute_value(int attribute, int device) {
    switch (attribute) {
        case 1:
            return 1024;  // MAX_THREADS_PER_BLOCK
        case 2:
        case 3:
            return 1024;  // MAX_BLOCK_DIM_X, _Y
        case 4:
            return 64;  // MAX_BLOCK_DIM_Z
        case 5:
            return 2147483647;  // MAX_GRID_DIM_X
        case 6:
        case 7:
            return 65535;  // MAX_GRID_DIM_Y, _Z
        case 8:
            return 49152;  // MAX_SHARED_MEMORY_PER_BLOCK
        case 9:
            return 65536;  // TOTAL_CONSTANT_MEMORY
        case 10:
            return 32;  // WARP_SIZE
        case 12:
        case 82:
            return 65536;  // MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR
        case 13:
            return 1980000;  // CLOCK_RATE, kHz
        case 15:
            return 1;  // GPU_OVERLAP
        case 16:
            return 132;  // MULTIPROCESSOR_COUNT
        case 19:
            return 1;  // CAN_MAP_HOST_MEMORY
        case 31:
            return 1;  // CONCURRENT_KERNELS
        case 33:
            return FIRST_PCI_BUS + visible[static_cast<std::size_t>(device)];  // PCI_BUS_ID
        case 36:
            return 2619000;  // MEMORY_CLOCK_RATE, kHz
        case 37:
            return 5120;  // GLOBAL_MEMORY_BUS_WIDTH, bits
        case 38:
            return 50 << 20;  // L2_CACHE_SIZE
        case 39:
            return 2048;  // MAX_THREADS_PER_MULTIPROCESSOR
        case 40:
            return 3;  // ASYNC_ENGINE_COUNT
        case 41:
            return 1;  // UNIFIED_ADDRESSING
        case 75:
            return settings.arch / 10;  // COMPUTE_CAPABILITY_MAJOR
        case 76:
            return settings.arch % 10;  // COMPUTE_CAPABILITY_MINOR
        case 78:
            return 1;  // STREAM_PRIORITIES_SUPPORTED
        case 81:
            return 233472;  // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        case 95:
            return 1;  // COOPERATIVE_LAUNCH
        case 97:
            return most_dynamic_shared();  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        case 115:
            return 1;  // MEMORY_POOLS_SUPPORTED
        case 117:
            return 1;  // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: by the call. WRITES_ORDERING (118) is none: it is needed.
        default:
            return 0;
    }
}

EMU_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    *value = attribute_value(attribute, device);
    return SUCCESS;
}

// Devices reach each other through the host only.
EMU_API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    ENTER;
    if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
    *can = 0;
    return SUCCESS;
}

// ----------------------------------------------------------------------------------------------------------- contexts

EMU_API int cuDevicePrimaryCtxRetain(void** out, int device) {
    ENTER;
    if (!driver.is_initialized) return NOT_INITIALIZED;
    if (!is_device(device)) return INVALID_DEVICE;
    Context* context = driver.contexts[static_cast<std::size_t>(device)];
    context->references++;
    *out = context;
    return SUCCESS;
}

EMU_API int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    Context* context = driver.contexts[static_cast<std::size_t>(device)];
    if (!context->references) return INVALID_CONTEXT;
    context->references--;
    return SUCCESS;
}

EMU_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    const Context* context = driver.contexts[static_cast<std::size_t>(device)];
    if (flags) *flags = context->flags;
    *is_active = context->references > 0;
    return SUCCESS;
}

EMU_API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    ENTER;
    if (!is_device(device)) return INVALID_DEVICE;
    driver.contexts[static_cast<std::size_t>(device)]->flags = flags;
    return SUCCESS;
}

EMU_API int cuCtxGetCurrent(void** out) {
    ENTER;
    *out = current_context();
    return SUCCESS;
}

EMU_API int cuCtxSetCurrent(void* handle) {
    ENTER;
    if (handle && !is_context(handle)) return INVALID_CONTEXT;
    if (context_count) context_count--;
    if (handle) context_stack[context_count++] = static_cast<Context*>(handle);
    return SUCCESS;
}

EMU_API int cuCtxPushCurrent_v2(void* handle) {
    ENTER;
    if (!is_context(handle)) return INVALID_CONTEXT;
    if (context_count == sizeof context_stack / sizeof *context_stack) return INVALID_VALUE;
    context_stack[context_count++] = static_cast<Context*>(handle);
    return SUCCESS;
}

EMU_API int cuCtxPopCurrent_v2(void** out) {
    ENTER;
    if (!context_count) return INVALID_CONTEXT;
    if (out) *out = current_context();
    context_count--;
    return SUCCESS;
}

// What came from a network card is visible here at once; the call is counted.
static unsigned long long flushes = 0;
unsigned long long flush_count() { return flushes; }

EMU_API int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER_READY;
    if (target != 0 || (scope != 100 && scope != 200)) return INVALID_VALUE;
    flushes++;
    return SUCCESS;
}

EMU_API int cuCtxGetDevice(int* device) {
    ENTER;
    if (!current_context()) return INVALID_CONTEXT;
    *device = current_context()->device;
    return SUCCESS;
}

EMU_API int cuCtxGetId(void* handle, unsigned long long* id) {
    ENTER;
    const Context* context = handle ? static_cast<Context*>(handle) : current_context();
    if (!context || !is_context(context)) return INVALID_CONTEXT;
    *id = static_cast<unsigned long long>(context->device) + 1;
    return SUCCESS;
}

EMU_API int cuCtxGetApiVersion(void*, unsigned* version) {
    ENTER;
    *version = 3020;
    return SUCCESS;
}

EMU_API int cuCtxSetFlags(unsigned flags) {
    ENTER;
    if (!current_context()) return INVALID_CONTEXT;
    current_context()->flags = flags;
    return SUCCESS;
}

EMU_API int cuCtxGetFlags(unsigned* flags) {
    ENTER;
    if (!current_context()) return INVALID_CONTEXT;
    *flags = current_context()->flags;
    return SUCCESS;
}

EMU_API int cuCtxSetLimit(int, std::size_t) {
    ENTER;
    return SUCCESS;
}

EMU_API int cuCtxGetLimit(std::size_t* value, int) {
    ENTER;
    *value = STACK_BYTES;
    return SUCCESS;
}

EMU_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

EMU_API int cuCtxSynchronize() {
    ENTER_READY;
    REQUIRE(refuse_during_capture("cuCtxSynchronize"));
    drain_all(current_context());
    return current_context()->sticky;
}

}  // namespace emu
