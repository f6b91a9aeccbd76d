// Copies and fills.
//
// A pinned source is read when the copy runs, a pageable one at the call, as a driver stages it. A copy to pageable
// memory synchronizes. In a capture pageable memory is refused: a card may take it, but what replays later is not what
// the program meant.
#include <algorithm>
#include <cstring>

#include "../runtime/checker.h"
#include "driver.h"

namespace emu {

static void* device_memory(DevicePointer start) { return reinterpret_cast<void*>(start); }

static Status stay_inside(DevicePointer start, std::size_t bytes, const char* what) {
    if (device_range(start, bytes)) return SUCCESS;
    if (find_freed(start).is_freed) return fail(INVALID_VALUE, std::string(what) + ": the memory has been freed");
    const Allocation* found = find_allocation(start);
    if (!found) return fail(INVALID_VALUE, std::string(what) + ": the address is in no allocation");
    return fail(INVALID_VALUE, std::string(what) + ": " + std::to_string(bytes) + " bytes at offset " +
                                   std::to_string(start - found->begin) + " of an allocation of " +
                                   std::to_string(found->bytes));
}

// What writes `bytes` at `to`; 0 bytes: nothing on the device.
static Operation work_of(Stream* stream, DevicePointer to, std::size_t bytes, std::function<void()> work) {
    Operation operation;
    Context* context = stream->context;
    operation.run = [work = std::move(work), context, to, bytes] {
        if (is_due(Fault::Copy)) return fail_for_good(context, ECC_UNCORRECTABLE, "planned fault: copy");
        work();
        mark_written(to, bytes);
        return SUCCESS;
    };
    return operation;
}

// Runs the queue up to here and answers what went wrong.
static Status finish(Stream* stream) {
    drain(stream);
    return stream->context->sticky;
}

static Status refuse_synchronous(Stream* stream, const char* what) {
    if (stream->capture) return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, what);
    return refuse_during_capture(what);
}

static Status to_device(DevicePointer to, const void* from, std::size_t bytes, Stream* stream, bool is_async) {
    if (!bytes) return SUCCESS;
    REQUIRE(stay_inside(to, bytes, "copy to the device, destination"));
    if (!is_async) REQUIRE(refuse_synchronous(stream, "synchronous copy to the device"));
    bool pinned = is_pinned(from, bytes);
    if (stream->capture && !pinned)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "capture of a copy from pageable memory");
    if (pinned) {
        REQUIRE(enqueue(stream, work_of(stream, to, bytes, [=] { memcpy(device_memory(to), from, bytes); })));
    } else {
        auto* first = static_cast<const unsigned char*>(from);
        auto staged = std::make_shared<std::vector<unsigned char>>(first, first + bytes);
        REQUIRE(enqueue(stream, work_of(stream, to, bytes, [=] { memcpy(device_memory(to), staged->data(), bytes); })));
    }
    return is_async ? SUCCESS : finish(stream);
}

static Status to_host(void* to, DevicePointer from, std::size_t bytes, Stream* stream, bool is_async) {
    if (!bytes) return SUCCESS;
    REQUIRE(stay_inside(from, bytes, "copy from the device, source"));
    if (!is_async) REQUIRE(refuse_synchronous(stream, "synchronous copy from the device"));
    bool pinned = is_pinned(to, bytes);
    if (stream->capture && !pinned)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "capture of a copy to pageable memory");
    REQUIRE(enqueue(stream, work_of(stream, 0, 0, [=] { memcpy(to, device_memory(from), bytes); })));
    return is_async && pinned ? SUCCESS : finish(stream);
}

static Status between(DevicePointer to, DevicePointer from, std::size_t bytes, Stream* stream) {
    if (!bytes) return SUCCESS;
    REQUIRE(stay_inside(to, bytes, "copy on the device, destination"));
    REQUIRE(stay_inside(from, bytes, "copy on the device, source"));
    return enqueue(stream, work_of(stream, to, bytes, [=] { memmove(device_memory(to), device_memory(from), bytes); }));
}

template <class T>
static Status fill(DevicePointer to, T value, std::size_t count, Stream* stream) {
    if (!count) return SUCCESS;
    REQUIRE(stay_inside(to, count * sizeof(T), "memset"));
    if (to % sizeof(T)) return fail(INVALID_VALUE, "memset: the address is not aligned to its element");
    return enqueue(stream, work_of(stream, to, count * sizeof(T), [=] {
                       auto* first = static_cast<T*>(device_memory(to));
                       std::fill(first, first + count, value);
                   }));
}

static Stream* legacy() { return current_context()->legacy_stream; }

EMU_API int cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t bytes) {
    ENTER_READY;
    return to_device(to, from, bytes, legacy(), false);
}

EMU_API int cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? to_device(to, from, bytes, stream, true) : INVALID_HANDLE;
}

EMU_API int cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t bytes) {
    ENTER_READY;
    return to_host(to, from, bytes, legacy(), false);
}

EMU_API int cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? to_host(to, from, bytes, stream, true) : INVALID_HANDLE;
}

EMU_API int cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, std::size_t bytes) {
    ENTER_READY;
    return between(to, from, bytes, legacy());
}

EMU_API int cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? between(to, from, bytes, stream) : INVALID_HANDLE;
}

// One address space: the addresses say which kind of copy it is.
static Status any_copy(DevicePointer to, DevicePointer from, std::size_t bytes, Stream* stream, bool is_async) {
    bool to_is_device = device_range(to, bytes) != nullptr && !is_pinned(device_memory(to), bytes);
    bool from_is_device = device_range(from, bytes) != nullptr && !is_pinned(device_memory(from), bytes);
    if (to_is_device && from_is_device) {
        REQUIRE(between(to, from, bytes, stream));
        return is_async ? SUCCESS : finish(stream);
    }
    if (to_is_device) return to_device(to, device_memory(from), bytes, stream, is_async);
    if (from_is_device) return to_host(device_memory(to), from, bytes, stream, is_async);
    return fail(INVALID_VALUE, "cuMemcpy: neither address is in device memory");
}

EMU_API int cuMemcpy(DevicePointer to, DevicePointer from, std::size_t bytes) {
    ENTER_READY;
    return any_copy(to, from, bytes, legacy(), false);
}

EMU_API int cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? any_copy(to, from, bytes, stream, true) : INVALID_HANDLE;
}

EMU_API int cuMemcpyPeerAsync(DevicePointer to, void*, DevicePointer from, void*, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? between(to, from, bytes, stream) : INVALID_HANDLE;
}

EMU_API int cuMemsetD8_v2(DevicePointer to, unsigned char value, std::size_t count) {
    ENTER_READY;
    return fill<unsigned char>(to, value, count, legacy());
}

EMU_API int cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t count, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? fill<unsigned char>(to, value, count, stream) : INVALID_HANDLE;
}

EMU_API int cuMemsetD32_v2(DevicePointer to, unsigned value, std::size_t count) {
    ENTER_READY;
    return fill<unsigned>(to, value, count, legacy());
}

EMU_API int cuMemsetD32Async(DevicePointer to, unsigned value, std::size_t count, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    return stream ? fill<unsigned>(to, value, count, stream) : INVALID_HANDLE;
}

}  // namespace emu
