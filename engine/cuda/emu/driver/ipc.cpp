// Memory of one process in another: cuIpc*, and what pointers are: cuPointerGetAttribute.
//
// All device memory is one file; a handle names the process, its descriptor of the file, and the piece.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "driver.h"

namespace emu {

constexpr char HANDLE_MAGIC[8] = "EMUCUDA";

struct IpcHandle {
    char magic[8];
    std::int32_t process, file;
    std::uint64_t offset, mapping_bytes, begin_in_mapping, bytes;
    char unused[16];
};
static_assert(sizeof(IpcHandle) == 64, "CUipcMemHandle has 64 bytes");

EMU_API int cuIpcGetMemHandle(IpcHandle* out, DevicePointer start) {
    ENTER_READY;
    const Allocation* found = find_allocation(start);
    if (!found || found->kind != MemoryKind::Device)
        return fail(INVALID_VALUE, "cuIpcGetMemHandle: the address is not in memory of cuMemAlloc");
    *out = IpcHandle{};
    memcpy(out->magic, HANDLE_MAGIC, sizeof out->magic);
    out->process = getpid();
    out->file = device_memory_file();
    out->offset = found->offset;
    out->mapping_bytes = found->mapping_bytes;
    out->begin_in_mapping = found->begin - found->mapping;
    out->bytes = found->bytes;
    return SUCCESS;
}

EMU_API int cuIpcOpenMemHandle_v2(DevicePointer* out, IpcHandle handle, unsigned) {
    ENTER_READY;
    if (memcmp(handle.magic, HANDLE_MAGIC, sizeof handle.magic) != 0) return INVALID_HANDLE;
    if (handle.process == getpid())
        return fail(INVALID_CONTEXT, "cuIpcOpenMemHandle in the process that made the handle");
    if (is_due(Fault::IpcOpen)) return fail(MAPPING_FAILED, "planned fault: opening another process's memory");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return fail(MAPPING_FAILED, "cuIpcOpenMemHandle: the other process is gone, or out of reach");
    Status status =
        add_ipc_mapping(out, file, handle.offset, handle.mapping_bytes, handle.begin_in_mapping, handle.bytes);
    close(file);
    return status;
}

EMU_API int cuIpcCloseMemHandle(DevicePointer start) {
    ENTER;
    return remove_ipc_mapping(start);
}

// ---------------------------------------------------------------------------------------------------------- attributes

enum PointerAttribute {
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    SYNC_MEMOPS = 6,
    BUFFER_ID = 7,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    IS_LEGACY_IPC_CAPABLE = 10,
    RANGE_BEGIN = 11,
    RANGE_BYTES = 12,
    IS_MAPPED = 13,
    ALLOWED_HANDLE_TYPES = 14,
    MEMPOOL = 17,
};
constexpr unsigned TYPE_HOST = 1, TYPE_DEVICE = 2;

template <class T>
static Status answer(void* out, T value) {
    memcpy(out, &value, sizeof value);
    return SUCCESS;
}

static Status attribute(void* out, int which, DevicePointer address, const Allocation& of) {
    Context* context = driver.contexts[static_cast<std::size_t>(of.device)];
    bool is_device = of.is_on_device();
    switch (which) {
        case CONTEXT:
            return answer<void*>(out, context);
        case MEMORY_TYPE:
            return answer(out, is_device ? TYPE_DEVICE : TYPE_HOST);
        case DEVICE_POINTER:
            return answer(out, address);
        case HOST_POINTER:
            return is_device ? INVALID_VALUE : answer(out, address);
        case SYNC_MEMOPS:
            return answer(out, 0u);
        case BUFFER_ID:
            return answer<unsigned long long>(out, of.number);
        case IS_MANAGED:
            return answer(out, 0u);
        case DEVICE_ORDINAL:
            return answer(out, of.device);
        case IS_LEGACY_IPC_CAPABLE:
            return answer(out, of.kind == MemoryKind::Device ? 1u : 0u);
        case RANGE_BEGIN:
            return answer<DevicePointer>(out, of.begin);
        case RANGE_BYTES:
            return answer<std::size_t>(out, of.bytes);
        case IS_MAPPED:
            return answer(out, 1u);
        case ALLOWED_HANDLE_TYPES:
            return answer(out, 0ull);
        // UCX asks whether memory is a pool's, which cuda_ipc cannot share.
        case MEMPOOL:
            return answer<void*>(out, of.kind == MemoryKind::Pool ? context : nullptr);
        default:
            return INVALID_VALUE;
    }
}

EMU_API int cuPointerGetAttribute(void* out, int which, DevicePointer address) {
    ENTER;
    const Allocation* found = find_allocation(address);
    return found ? attribute(out, which, address, *found) : INVALID_VALUE;
}

// Of an unknown address this one answers zeros instead of an error.
EMU_API int cuPointerGetAttributes(unsigned count, const int* which, void** out, DevicePointer address) {
    ENTER;
    const Allocation* found = find_allocation(address);
    for (unsigned i = 0; i < count; i++) {
        if (found) {
            attribute(out[i], which[i], address, *found);
        } else if (which[i] == MEMORY_TYPE || which[i] == IS_MANAGED) {
            answer(out[i], 0u);
        }
    }
    return SUCCESS;
}

EMU_API int cuPointerSetAttribute(const void*, int, DevicePointer) {
    ENTER;
    return SUCCESS;
}

}  // namespace emu
