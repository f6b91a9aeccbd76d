// What the runtime must know about memory: the driver keeps the allocations (driver/memory.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Cell;

enum class MemoryKind {
    Device,      // cuMemAlloc
    Pool,        // cuMemAllocAsync
    Pinned,      // cuMemHostAlloc
    Registered,  // cuMemHostRegister
    Ipc,         // another process's, by cuIpcOpenMemHandle
};

struct Allocation {
    std::uintptr_t begin = 0;  // what the program got
    std::size_t bytes = 0;     // what it asked for
    std::uintptr_t mapping = 0;
    std::size_t mapping_bytes = 0;
    std::uint64_t offset = 0;  // in the file of device memory
    MemoryKind kind = MemoryKind::Device;
    int device = 0;
    std::uint64_t number = 0;  // counts up, never reused
    Cell* shadow = nullptr;

    std::uintptr_t end() const { return begin + bytes; }
    bool is_on_device() const {
        return kind == MemoryKind::Device || kind == MemoryKind::Pool || kind == MemoryKind::Ipc;
    }
};

// The allocation that has this byte, or null.
const Allocation* find_allocation(std::uintptr_t address);
// The live allocation at or below the address, or null: for messages.
const Allocation* allocation_below(std::uintptr_t address);
// "use after free: ..." if the address lies in memory that was freed, else empty.
struct Freed {
    bool is_freed = false;
    std::size_t bytes = 0;
    std::uint64_t number = 0;
};
Freed find_freed(std::uintptr_t address);

}  // namespace emu
