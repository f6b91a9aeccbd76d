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
constexpr std::size_t GRANULE = 2;
constexpr std::size_t WIDEST_ACCESS = 16;

enum class Conflict { None, Thread, Block };

// The access that is about to happen, in the terms of a Cell.
struct Attempt {
    std::uint32_t launch, block;
    std::uint16_t who, warp;
    std::uint16_t barrier_epoch, warp_epoch;
};

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

static void remember(Access& access, const Attempt& now, std::uint8_t bytes, bool is_atomic) {
    access = {now.launch, now.block, now.who, now.barrier_epoch, now.warp_epoch, bytes, is_atomic};
}

// Reads of one epoch are kept together: a later write must come after all of them.
static void remember_read(Access& read, const Attempt& now, std::uint8_t bytes, bool is_atomic) {
    bool is_same_epoch = read.who && read.launch == now.launch && read.block == now.block &&
                         read.barrier_epoch == now.barrier_epoch && read.who != now.who;
    if (!is_same_epoch) {
        remember(read, now, bytes, is_atomic);
        return;
    }
    std::uint16_t warp_epoch = read.warp_epoch > now.warp_epoch ? read.warp_epoch : now.warp_epoch;
    bool is_same_warp = is_of_warp(read.who, now.warp);
    bool is_ordered = is_same_warp && now.warp_epoch > read.warp_epoch;
    std::uint16_t who = is_ordered     ? now.who
                        : is_same_warp ? static_cast<std::uint16_t>(SEVERAL_OF_WARP | now.warp)
                                       : SEVERAL_WARPS;
    std::uint8_t both = is_ordered ? bytes : static_cast<std::uint8_t>(read.bytes | bytes);
    read = {now.launch, now.block, who, now.barrier_epoch, warp_epoch, both, read.is_atomic && is_atomic};
}

static std::string name_of(std::uint16_t who) {
    if (who == SEVERAL_WARPS) return "threads of several warps";
    if (who & SEVERAL_OF_WARP) return "several threads of warp " + std::to_string(who & ~SEVERAL_OF_WARP);
    return "thread " + std::to_string(who - 1);
}

[[noreturn]] static void report(Worker* worker, Fiber* fiber, Status status, const std::string& what,
                                std::uintptr_t address, std::size_t bytes, const void* program_counter) {
    char text[64];
    snprintf(text, sizeof text, ", %zu bytes at 0x%zx, ", bytes, address);
    // The instruction before the one to which the callback returns.
    std::string place = program_counter ? source_line(static_cast<const char*>(program_counter) - 1)
                        : fiber->site   ? fiber->site
                                        : "an unknown place";
    stop(worker, fiber, status, what + text + place);
}

// ------------------------------------------------------------------------------------------------ which memory it is

struct Shadow {
    Cell* cells = nullptr;  // of the granule that has the address; null: nothing to check
    bool is_shared = false;
};

static Shadow shadow_of_global(Worker* worker, Fiber* fiber, std::uintptr_t address, std::size_t bytes, bool is_write,
                               const void* program_counter) {
    const Allocation* allocation = worker->last_allocation;
    if (!allocation || address - allocation->begin >= allocation->bytes) allocation = find_allocation(address);
    const char* verb = is_write ? "write" : "read";
    if (!allocation) {
        if (address >= worker->library->begin && address < worker->library->end) return {};  // constants
        const Allocation* below = allocation_below(address);
        std::string what = std::string(verb) + " outside of every allocation: host memory?";
        if (find_freed(address).is_freed) {
            what = std::string("use after free: ") + verb + " of freed memory";
        } else if (below && address - below->end() < 4096) {
            what = std::string(verb) + " past the end of an allocation of " + std::to_string(below->bytes) + " bytes";
        }
        report(worker, fiber, ILLEGAL_ADDRESS, what, address, bytes, program_counter);
    }
    worker->last_allocation = allocation;
    if (address + bytes > allocation->end())
        report(worker, fiber, ILLEGAL_ADDRESS,
               std::string(verb) + " past the end of an allocation of " + std::to_string(allocation->bytes) + " bytes",
               address, bytes, program_counter);
    if (allocation->is_on_device() && allocation->device != worker->device)
        report(worker, fiber, ILLEGAL_ADDRESS, std::string(verb) + " of another device's memory", address, bytes,
               program_counter);
    if (!allocation->shadow) return {};
    return {allocation->shadow + (address - allocation->begin) / GRANULE, false};
}

static Shadow shadow_of(Worker* worker, Fiber* fiber, std::uintptr_t address, std::size_t bytes, bool is_write,
                        const void* program_counter) {
    if (worker->is_dynamic_shared(address)) {
        std::size_t offset = address - reinterpret_cast<std::uintptr_t>(worker->dynamic);
        if (offset + bytes > worker->dynamic_bytes)
            report(worker, fiber, ILLEGAL_ADDRESS,
                   "access past " + std::to_string(worker->dynamic_bytes) + " bytes of dynamic shared memory", address,
                   bytes, program_counter);
        return {&worker->shared_shadow[offset / GRANULE], true};
    }
    if (worker->is_static_shared(address)) {
        std::size_t offset = address - reinterpret_cast<std::uintptr_t>(worker->static_shared);
        return {&worker->shared_shadow[(worker->dynamic_bytes + 1) / GRANULE + offset / GRANULE], true};
    }
    return shadow_of_global(worker, fiber, address, bytes, is_write, program_counter);
}

// ------------------------------------------------------------------------------------------------------- the check

// Which bytes of its granule `index` an access touches: one bit each.
static std::uint8_t touched(std::uintptr_t address, std::size_t bytes, std::size_t index) {
    std::uintptr_t first = address & ~(GRANULE - 1), granule = first + index * GRANULE;
    std::uint8_t low = granule >= address && granule < address + bytes;
    std::uint8_t high = granule + 1 >= address && granule + 1 < address + bytes;
    return static_cast<std::uint8_t>(low | high << 1);
}

static void check_cell(Worker* worker, Fiber* fiber, Cell& cell, const Attempt& now, std::uint8_t bytes,
                       AccessKind kind, bool is_shared, std::uintptr_t address, std::size_t length,
                       const void* program_counter) {
    bool is_write = kind == ACCESS_WRITE || kind == ACCESS_ATOMIC_WRITE;
    bool is_atomic = kind == ACCESS_ATOMIC_READ || kind == ACCESS_ATOMIC_WRITE;
    auto clash = [&](const Access& earlier, const char* earlier_verb) {
        if (!(earlier.bytes & bytes) || (earlier.is_atomic && is_atomic)) return;
        Conflict found = conflict(earlier, now);
        if (found == Conflict::None) return;
        std::string who = found == Conflict::Block
                              ? "block " + std::to_string(earlier.block - 1) + " (" + name_of(earlier.who) + ")"
                              : name_of(earlier.who);
        report(worker, fiber, LAUNCH_FAILED,
               std::string("race in ") + (is_shared ? "shared" : "global") +
                   " memory: " + (is_write ? "write" : "read") + " after a " + earlier_verb + " by " + who +
                   " with no barrier between them",
               address, length, program_counter);
    };
    clash(cell.write, "write");
    if (is_write) clash(cell.read, "read");
    if (is_write) {
        remember(cell.write, now, bytes, is_atomic);
    } else {
        remember_read(cell.read, now, bytes, is_atomic);
    }
}

void check_access(Worker* worker, Fiber* fiber, std::uintptr_t address, std::size_t bytes, AccessKind kind,
                  const void* program_counter) {
    if (!is_checking || !bytes || !worker->library->is_checked || worker->owns_stack(address)) return;
    // blockIdx and the like.
    if (address - reinterpret_cast<std::uintptr_t>(static_cast<Block*>(worker)) < sizeof(Worker)) return;
    bool is_write = kind == ACCESS_WRITE || kind == ACCESS_ATOMIC_WRITE;
    Shadow shadow = shadow_of(worker, fiber, address, bytes, is_write, program_counter);
    bool is_power = (bytes & (bytes - 1)) == 0;
    if (is_power && bytes <= WIDEST_ACCESS && address % bytes != 0)
        report(worker, fiber, MISALIGNED_ADDRESS, "misaligned access", address, bytes, program_counter);
    if (!shadow.cells) return;
    Attempt now{
        shadow.is_shared ? worker->block_serial : worker->launch_number,
        shadow.is_shared ? 0 : worker->block_number + 1,
        static_cast<std::uint16_t>(fiber->linear + 1),
        static_cast<std::uint16_t>(fiber->warp),
        fiber->barrier_epoch,
        fiber->warp_epoch,
    };
    std::size_t granules = ((address & (GRANULE - 1)) + bytes + GRANULE - 1) / GRANULE;
    for (std::size_t i = 0; i < granules; i++)
        check_cell(worker, fiber, shadow.cells[i], now, touched(address, bytes, i), kind, shadow.is_shared, address,
                   bytes, program_counter);
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
