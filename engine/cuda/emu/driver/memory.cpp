// Memory of devices and pinned memory of the host.
//
// Device memory is one file without a name (memfd), mapped piece by piece into one reserved range: another process can
// map it (ipc.cpp). An allocation ends at a guard page, begins as NaN (0xff), and its addresses are never given again:
// what is freed faults for ever. Overruns of less than 256 bytes are the checker's: allocations are aligned as a
// card's.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../runtime/checker.h"
#include "driver.h"

namespace emu {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t ALIGNMENT = 256;
constexpr std::uintptr_t RANGE_BEGIN = 0x300000000000;
constexpr std::size_t RANGE_BYTES = 1ull << 40;

static auto& allocations = forever<std::map<std::uintptr_t, Allocation*>>();  // by first address
struct FreedRange {
    std::uintptr_t end;
    std::size_t bytes;
    std::uint64_t number;
};
static auto& freed_ranges = forever<std::map<std::uintptr_t, FreedRange>>();
static std::size_t range_used = 0;
static std::uint64_t next_number = 1;

static std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
static void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// ------------------------------------------------------------------------------------------------------------- look-up

const Allocation* allocation_below(std::uintptr_t address) {
    auto next = allocations.upper_bound(address);
    return next == allocations.begin() ? nullptr : std::prev(next)->second;
}

const Allocation* find_allocation(std::uintptr_t address) {
    const Allocation* below = allocation_below(address);
    return below && address < below->end() ? below : nullptr;
}

Freed find_freed(std::uintptr_t address) {
    auto next = freed_ranges.upper_bound(address);
    if (next == freed_ranges.begin()) return {};
    const FreedRange& range = std::prev(next)->second;
    if (address >= range.end) return {};
    return {true, range.bytes, range.number};
}

const Allocation* device_range(DevicePointer start, std::size_t bytes) {
    const Allocation* found = find_allocation(start);
    return found && bytes <= found->end() - start ? found : nullptr;
}

bool is_pinned(const void* start, std::size_t bytes) {
    const Allocation* found = device_range(reinterpret_cast<std::uintptr_t>(start), bytes);
    return found && (found->kind == MemoryKind::Pinned || found->kind == MemoryKind::Registered);
}

std::size_t live_allocations() { return allocations.size(); }

// -------------------------------------------------------------------------------------------------------- strict mode

static void protect_all(int protection) {
    for (const auto& [_, allocation] : allocations) {
        if (allocation->is_on_device()) mprotect(pointer(allocation->mapping), allocation->mapping_bytes, protection);
    }
}
// The handler says what the host touched.
static void prepare_strict() {
    static bool is_prepared = false;
    if (!is_prepared) install_fault_handlers();
    is_prepared = true;
}

void open_device_memory() {
    if (settings.is_strict) protect_all(PROT_READ | PROT_WRITE);
}
void close_device_memory() {
    if (settings.is_strict) protect_all(PROT_NONE);
}
void set_strict(bool is_strict) {
    settings.is_strict = is_strict;
    protect_all(is_strict ? PROT_NONE : PROT_READ | PROT_WRITE);
}

// ------------------------------------------------------------------------------------------------------ device memory

int device_memory_file() {
    static int file = [] {
        int made = memfd_create("emulated-device-memory", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, RANGE_BYTES) != 0) {
            perror("emulated driver: no file for device memory");
            abort();
        }
        return made;
    }();
    return file;
}

static bool reserve_range() {
    static void* range = mmap(pointer(RANGE_BEGIN), RANGE_BYTES, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return range == pointer(RANGE_BEGIN);
}

static std::size_t shadow_bytes(const Allocation* allocation) { return (allocation->bytes / 2 + 1) * sizeof(Cell); }

static void add_shadow(Allocation* allocation) {
    if (!is_checking) return;
    void* cells = mmap(nullptr, shadow_bytes(allocation), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells != MAP_FAILED) allocation->shadow = static_cast<Cell*>(cells);
}

static void forget(Allocation* allocation) {
    if (allocation->shadow) munmap(allocation->shadow, shadow_bytes(allocation));
    allocations.erase(allocation->begin);
    delete allocation;
}

static Status allocate(DevicePointer* out, std::size_t bytes, MemoryKind kind) {
    if (!bytes) return INVALID_VALUE;
    Context* context = current_context();
    if (is_due(Fault::Alloc)) return fail(OUT_OF_MEMORY, "planned fault: allocation");
    if (context->used_bytes + bytes > settings.memory_bytes)
        return fail(OUT_OF_MEMORY, "the emulated device has " + std::to_string(settings.memory_bytes) +
                                       " bytes, of which " + std::to_string(context->used_bytes) + " are used");
    if (!reserve_range()) return fail(OUT_OF_MEMORY, "the address range of device memory is taken");
    std::size_t span = round_up(bytes, ALIGNMENT), pages = round_up(span, PAGE);
    if (range_used + pages + PAGE > RANGE_BYTES) return fail(OUT_OF_MEMORY, "the address range is used up");
    std::uintptr_t mapping = RANGE_BEGIN + range_used;
    std::size_t offset = range_used;
    if (mmap(pointer(mapping), pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, device_memory_file(),
             static_cast<off_t>(offset)) == MAP_FAILED)
        return fail(OUT_OF_MEMORY, "mmap refused the allocation");
    range_used += pages + PAGE;  // the page behind stays without access
    auto* allocation = new Allocation;
    allocation->begin = mapping + pages - span;
    allocation->bytes = bytes;
    allocation->mapping = mapping;
    allocation->mapping_bytes = pages;
    allocation->offset = offset;
    allocation->kind = kind;
    allocation->device = context->device;
    allocation->number = next_number++;
    if (bytes <= settings.poison_bytes) memset(pointer(allocation->begin), 0xff, span);
    add_shadow(allocation);
    allocations[allocation->begin] = allocation;
    context->used_bytes += bytes;
    if (settings.is_strict) {
        prepare_strict();
        mprotect(pointer(mapping), pages, PROT_NONE);
    }
    *out = allocation->begin;
    return SUCCESS;
}

static Status release(DevicePointer start) {
    auto found = allocations.find(start);
    if (found == allocations.end() ||
        (found->second->kind != MemoryKind::Device && found->second->kind != MemoryKind::Pool))
        return fail(INVALID_VALUE, "cuMemFree of an address that no allocation begins at");
    Allocation* allocation = found->second;
    driver.contexts[static_cast<std::size_t>(allocation->device)]->used_bytes -= allocation->bytes;
    freed_ranges[allocation->mapping] = {allocation->mapping + allocation->mapping_bytes + PAGE, allocation->bytes,
                                         allocation->number};
    mmap(pointer(allocation->mapping), allocation->mapping_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    fallocate(device_memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(allocation->offset),
              static_cast<off_t>(allocation->mapping_bytes));
    forget(allocation);
    return SUCCESS;
}

EMU_API int cuMemAlloc_v2(DevicePointer* out, std::size_t bytes) {
    ENTER_READY;
    REQUIRE(refuse_during_capture("cuMemAlloc"));
    return allocate(out, bytes, MemoryKind::Device);
}

EMU_API int cuMemFree_v2(DevicePointer start) {
    ENTER;
    if (!start) return SUCCESS;
    REQUIRE(entry.ready_without_context());
    REQUIRE(refuse_during_capture("cuMemFree"));
    drain_all();
    return release(start);
}

EMU_API int cuMemAllocAsync(DevicePointer* out, std::size_t bytes, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "cuMemAllocAsync in a capture: not emulated");
    return allocate(out, bytes, MemoryKind::Pool);
}

EMU_API int cuMemFreeAsync(DevicePointer start, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "cuMemFreeAsync in a capture: not emulated");
    if (!find_allocation(start)) return fail(INVALID_VALUE, "cuMemFreeAsync of an unknown address");
    Operation operation;
    operation.run = [start] { return release(start); };
    return enqueue(stream, std::move(operation));
}

EMU_API int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    ENTER_READY;
    std::size_t used = current_context()->used_bytes;
    *total = settings.memory_bytes;
    *free = *total > used ? *total - used : 0;
    return SUCCESS;
}

EMU_API int cuMemGetAddressRange_v2(DevicePointer* begin, std::size_t* bytes, DevicePointer address) {
    ENTER;
    const Allocation* found = find_allocation(address);
    if (!found) return NOT_FOUND;
    if (begin) *begin = found->begin;
    if (bytes) *bytes = found->bytes;
    return SUCCESS;
}

// ------------------------------------------------------------------------------------------------------ pinned memory

static void add_host_allocation(std::uintptr_t begin, std::size_t bytes, std::size_t mapping_bytes, MemoryKind kind) {
    auto* allocation = new Allocation;
    allocation->begin = allocation->mapping = begin;
    allocation->bytes = bytes;
    allocation->mapping_bytes = mapping_bytes;
    allocation->kind = kind;
    allocation->number = next_number++;
    allocations[begin] = allocation;
}

EMU_API int cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
    ENTER_READY;
    REQUIRE(refuse_during_capture("cuMemHostAlloc"));
    if (!bytes) return INVALID_VALUE;
    if (is_due(Fault::HostAlloc)) return fail(OUT_OF_MEMORY, "planned fault: allocation of pinned memory");
    std::size_t pages = round_up(bytes, PAGE);
    void* mapping = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return fail(OUT_OF_MEMORY, "no memory for a pinned allocation");
    if (bytes <= settings.poison_bytes) memset(mapping, 0xff, pages);
    add_host_allocation(reinterpret_cast<std::uintptr_t>(mapping), bytes, pages, MemoryKind::Pinned);
    *out = mapping;
    return SUCCESS;
}

EMU_API int cuMemAllocHost_v2(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

EMU_API int cuMemFreeHost(void* start) {
    ENTER;
    auto found = allocations.find(reinterpret_cast<std::uintptr_t>(start));
    if (found == allocations.end() || found->second->kind != MemoryKind::Pinned)
        return fail(INVALID_VALUE, "cuMemFreeHost of an address that no allocation begins at");
    drain_all();
    munmap(start, found->second->mapping_bytes);
    forget(found->second);
    return SUCCESS;
}

EMU_API int cuMemHostRegister_v2(void* start, std::size_t bytes, unsigned) {
    ENTER_READY;
    REQUIRE(refuse_during_capture("cuMemHostRegister"));
    auto begin = reinterpret_cast<std::uintptr_t>(start);
    if (!bytes || !start) return INVALID_VALUE;
    if (is_due(Fault::HostAlloc)) return fail(OUT_OF_MEMORY, "planned fault: registration of host memory");
    const Allocation* below = allocation_below(begin + bytes - 1);
    if (below && below->end() > begin)
        return fail(HOST_MEMORY_ALREADY_REGISTERED, "cuMemHostRegister: a part of the range is known already");
    add_host_allocation(begin, bytes, bytes, MemoryKind::Registered);
    return SUCCESS;
}

EMU_API int cuMemHostUnregister(void* start) {
    ENTER;
    auto found = allocations.find(reinterpret_cast<std::uintptr_t>(start));
    if (found == allocations.end() || found->second->kind != MemoryKind::Registered) return HOST_MEMORY_NOT_REGISTERED;
    drain_all();
    forget(found->second);
    return SUCCESS;
}

EMU_API int cuMemHostGetDevicePointer_v2(DevicePointer* out, void* start, unsigned) {
    ENTER;
    if (!is_pinned(start, 1)) return INVALID_VALUE;
    *out = reinterpret_cast<std::uintptr_t>(start);
    return SUCCESS;
}

EMU_API int cuMemHostGetFlags(unsigned* flags, void* start) {
    ENTER;
    if (!is_pinned(start, 1)) return INVALID_VALUE;
    *flags = 0;
    return SUCCESS;
}

// --------------------------------------------------------------------------------------------------- mappings of
// others

Status add_ipc_mapping(DevicePointer* out, int file, std::uint64_t offset, std::size_t mapping_bytes,
                       std::size_t begin_in_mapping, std::size_t bytes) {
    void* mapping = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
    if (mapping == MAP_FAILED) return fail(MAPPING_FAILED, "cuIpcOpenMemHandle: mmap refused");
    auto* allocation = new Allocation;
    allocation->mapping = reinterpret_cast<std::uintptr_t>(mapping);
    allocation->mapping_bytes = mapping_bytes;
    allocation->begin = allocation->mapping + begin_in_mapping;
    allocation->bytes = bytes;
    allocation->kind = MemoryKind::Ipc;
    allocation->device = current_context()->device;
    allocation->number = next_number++;
    add_shadow(allocation);
    allocations[allocation->begin] = allocation;
    if (settings.is_strict) mprotect(mapping, mapping_bytes, PROT_NONE);
    *out = allocation->begin;
    return SUCCESS;
}

Status remove_ipc_mapping(DevicePointer start) {
    auto found = allocations.find(start);
    if (found == allocations.end() || found->second->kind != MemoryKind::Ipc)
        return fail(INVALID_VALUE, "cuIpcCloseMemHandle of an address that was not opened");
    drain_all();
    munmap(pointer(found->second->mapping), found->second->mapping_bytes);
    forget(found->second);
    return SUCCESS;
}

}  // namespace emu
