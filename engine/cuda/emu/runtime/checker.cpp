// The access checker: see checker.h for what it takes for a race.
#include "checker.h"

#include <cstdio>
#include <string>

#include "allocation.h"
#include "worker.h"

namespace emu {

bool is_checking = false;

constexpr std::uint16_t SEVERAL_OF_WARP = 0x8000;  // | warp
constexpr std::uint16_t SEVERAL_WARPS = 0xffff;
constexpr std::uint32_t SEVERAL_BLOCKS = 0xffffffff;
constexpr std::size_t GRANULE = 2;
constexpr std::size_t WIDEST_ACCESS = 16;

enum class Conflict { None, Thread, Block };

// The access that is about to happen, and what a Cell would remember of it.
struct Attempt {
    Worker* worker;
    Fiber* fiber;
    std::uintptr_t address;
    std::size_t bytes;
    AccessKind kind;
    const void* program_counter;
    bool is_shared = false;
    std::uint32_t launch = 0, block = 0;
    std::uint16_t who = 0, warp = 0, barrier_epoch = 0, warp_epoch = 0;
    std::uint32_t code = 0;

    bool is_write() const { return kind != ACCESS_READ && kind != ACCESS_ATOMIC_READ; }
    bool is_atomic() const { return kind == ACCESS_ATOMIC_READ || kind == ACCESS_ATOMIC_WRITE; }
    std::string verb() const { return is_write() ? "write" : "read"; }
};

[[noreturn]] static void report(const Attempt& now, Status status, const std::string& what) {
    char text[64];
    snprintf(text, sizeof text, ", %zu bytes at 0x%zx, ", now.bytes, now.address);
    // The instruction before the one to which the callback returns.
    std::string place =
        now.program_counter ? source_line(static_cast<const char*>(now.program_counter) - 1) : place_of(now.fiber);
    stop(now.worker, now.fiber, status, what + text + place);
}

static bool is_of_warp(std::uint16_t who, std::uint16_t warp) {
    if (who == SEVERAL_WARPS) return false;
    return (who & SEVERAL_OF_WARP ? who & ~SEVERAL_OF_WARP : (who - 1) / static_cast<int>(WARP)) == warp;
}

static Conflict conflict(const Access& earlier, const Attempt& now) {
    if (!earlier.who || earlier.launch != now.launch) return Conflict::None;
    if (earlier.block != now.block) return Conflict::Block;
    if (earlier.who == now.who || earlier.barrier_epoch != now.barrier_epoch) return Conflict::None;
    if (is_of_warp(earlier.who, now.warp) && now.warp_epoch > earlier.warp_epoch) return Conflict::None;
    return Conflict::Thread;
}

static void remember(Access& access, const Attempt& now, std::uint8_t bytes) {
    access = {now.launch, now.block,       now.who, now.barrier_epoch, now.warp_epoch, now.code,
              bytes,      now.is_atomic(), false};
}

// Reads of one epoch are kept together: a later write must come after all of them.
static void remember_read(Access& read, const Attempt& now, std::uint8_t bytes) {
    if (read.who && read.launch == now.launch && read.block != now.block) {
        std::uint8_t both = static_cast<std::uint8_t>(read.bytes | bytes);
        remember(read, now, both);
        read.block = SEVERAL_BLOCKS;
        return;
    }
    bool is_same_epoch = read.who && read.launch == now.launch && read.block == now.block &&
                         read.barrier_epoch == now.barrier_epoch && read.who != now.who;
    if (!is_same_epoch) {
        remember(read, now, bytes);
        return;
    }
    std::uint16_t warp_epoch = read.warp_epoch > now.warp_epoch ? read.warp_epoch : now.warp_epoch;
    bool is_same_warp = is_of_warp(read.who, now.warp);
    bool is_ordered = is_same_warp && now.warp_epoch > read.warp_epoch;
    std::uint16_t who = is_ordered     ? now.who
                        : is_same_warp ? static_cast<std::uint16_t>(SEVERAL_OF_WARP | now.warp)
                                       : SEVERAL_WARPS;
    std::uint8_t both = is_ordered ? bytes : static_cast<std::uint8_t>(read.bytes | bytes);
    read = {now.launch, now.block, who,  now.barrier_epoch,
            warp_epoch, now.code,  both, read.is_atomic && now.is_atomic(),
            false};
}

// "thread 63 in norm.cu:40"
static std::string author_of(const Attempt& now, const Access& access) {
    std::string who = "thread " + std::to_string(access.who - 1);
    if (access.who == SEVERAL_WARPS) {
        who = "threads of several warps";
    } else if (access.who & SEVERAL_OF_WARP) {
        who = "several threads of warp " + std::to_string(access.who & ~SEVERAL_OF_WARP);
    }
    if (access.block == SEVERAL_BLOCKS) {
        who = "several blocks";
    } else if (access.block && access.block != now.block) {
        who = "block " + std::to_string(access.block - 1) + ", " + who;
    }
    if (access.code)
        who += " in " + source_line(reinterpret_cast<const void*>(now.worker->library->begin + access.code));
    return who;
}

// ------------------------------------------------------------------------------------------------ which memory it is

[[noreturn]] static void report_no_allocation(const Attempt& now) {
    report(now, ILLEGAL_ADDRESS, now.verb() + ": " + describe_address(now.worker, now.address));
}

// The cell of the granule that has the address, or null where there is nothing to compare with.
static Cell* global_cell(const Attempt& now) {
    Worker* worker = now.worker;
    const Allocation* allocation = worker->last_allocation;
    if (!allocation || now.address - allocation->begin >= allocation->bytes) allocation = find_allocation(now.address);
    if (!allocation) {
        if (now.address >= worker->library->begin && now.address < worker->library->end) return nullptr;  // constants
        report_no_allocation(now);
    }
    worker->last_allocation = allocation;
    if (now.address + now.bytes > allocation->end())
        report(now, ILLEGAL_ADDRESS,
               now.verb() + " past the end of an allocation of " + std::to_string(allocation->bytes) + " bytes");
    if (allocation->is_on_device() && allocation->device != worker->device)
        report(now, ILLEGAL_ADDRESS, now.verb() + " of another device's memory");
    return allocation->shadow ? allocation->shadow + (now.address - allocation->begin) / GRANULE : nullptr;
}

// Static shared memory has its cells behind those of dynamic shared memory.
static Cell* shared_cell(const Attempt& now) {
    Worker* worker = now.worker;
    if (!worker->is_dynamic_shared(now.address)) {
        std::size_t offset = now.address - reinterpret_cast<std::uintptr_t>(worker->static_shared);
        return &worker->shared_shadow[(worker->dynamic_bytes + 1) / GRANULE + offset / GRANULE];
    }
    std::size_t offset = now.address - reinterpret_cast<std::uintptr_t>(worker->dynamic);
    if (offset + now.bytes > worker->dynamic_bytes)
        report(now, ILLEGAL_ADDRESS,
               "access past " + std::to_string(worker->dynamic_bytes) + " bytes of dynamic shared memory");
    return &worker->shared_shadow[offset / GRANULE];
}

// ------------------------------------------------------------------------------------------------------- the check

// Which bytes of granule `index` of an access it touches: one bit each.
static std::uint8_t touched(const Attempt& now, std::size_t index) {
    std::uintptr_t granule = (now.address & ~(GRANULE - 1)) + index * GRANULE, end = now.address + now.bytes;
    bool low = granule >= now.address && granule < end, high = granule + 1 >= now.address && granule + 1 < end;
    return static_cast<std::uint8_t>(low | high << 1);
}

static void compare(const Attempt& now, const Access& earlier, const char* earlier_verb, std::uint8_t bytes) {
    if (!(earlier.bytes & bytes) || (earlier.is_atomic && now.is_atomic())) return;
    Conflict found = conflict(earlier, now);
    if (found == Conflict::None) return;
    report(now, LAUNCH_FAILED,
           std::string("race in ") + (now.is_shared ? "shared" : "global") + " memory: " + now.verb() + " after a " +
               earlier_verb + " by " + author_of(now, earlier) + ", with no barrier between them");
}

static void check_cell(const Attempt& now, Cell& cell, std::uint8_t bytes) {
    if (cell.write.is_on_its_way && cell.write.launch == now.launch && now.kind != ACCESS_COPY_ENDS)
        report(now, LAUNCH_FAILED,
               now.verb() + " of shared memory to which a cp.async of " + author_of(now, cell.write) +
                   " is still on its way: no cp_async_wait for it");
    compare(now, cell.write, "write", bytes);
    if (!now.is_write()) {
        remember_read(cell.read, now, bytes);
        return;
    }
    compare(now, cell.read, "read", bytes);
    remember(cell.write, now, bytes);
    cell.write.is_on_its_way = now.kind == ACCESS_COPY_BEGINS;
}

void check_access(Worker* worker, Fiber* fiber, std::uintptr_t address, std::size_t bytes, AccessKind kind,
                  const void* program_counter) {
    if (!is_checking || !bytes || !worker->library->is_checked || worker->owns_stack(address)) return;
    // blockIdx and the like.
    if (address - reinterpret_cast<std::uintptr_t>(static_cast<Block*>(worker)) < sizeof(Worker)) return;
    Attempt now{worker, fiber, address, bytes, kind, program_counter};
    now.is_shared = worker->is_dynamic_shared(address) || worker->is_static_shared(address);
    now.launch = now.is_shared ? worker->block_serial : worker->launch_number;
    now.block = now.is_shared ? 0 : worker->block_number + 1;
    now.who = static_cast<std::uint16_t>(fiber->linear + 1);
    now.warp = static_cast<std::uint16_t>(fiber->warp);
    now.barrier_epoch = fiber->barrier_epoch;
    now.warp_epoch = fiber->warp_epoch;
    auto caller = reinterpret_cast<std::uintptr_t>(program_counter ? program_counter : fiber->caller);
    if (caller > worker->library->begin && caller < worker->library->end)
        now.code = static_cast<std::uint32_t>(caller - 1 - worker->library->begin);
    Cell* cells = now.is_shared ? shared_cell(now) : global_cell(now);
    bool is_power = (bytes & (bytes - 1)) == 0;
    if (is_power && bytes <= WIDEST_ACCESS && address % bytes != 0)
        report(now, MISALIGNED_ADDRESS, "misaligned access");
    if (!cells) return;
    std::size_t granules = ((address & (GRANULE - 1)) + bytes + GRANULE - 1) / GRANULE;
    for (std::size_t i = 0; i < granules; i++) check_cell(now, cells[i], touched(now, i));
}

// All take the largest epoch + 1, so that "later than" means "after a synchronization in which both took part".
void synchronize_warp(Worker* worker, unsigned warp, std::uint32_t lanes) {
    std::uint16_t latest = 0;
    for (std::uint32_t rest = lanes; rest; rest &= rest - 1) {
        Fiber* fiber = worker->fiber(warp * WARP + static_cast<unsigned>(__builtin_ctz(rest)));
        if (fiber->warp_epoch > latest) latest = fiber->warp_epoch;
    }
    for (std::uint32_t rest = lanes; rest; rest &= rest - 1)
        worker->fiber(warp * WARP + static_cast<unsigned>(__builtin_ctz(rest)))->warp_epoch =
            static_cast<std::uint16_t>(latest + 1);
}

}  // namespace emu
