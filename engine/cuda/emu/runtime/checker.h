// The access checker: which thread touched which byte since the last barrier.
//
// Kernels of the checked library are compiled with -fsanitize=thread; the compiler then calls a function before each
// access (tsan_callbacks.cpp; libtsan is not linked). Each granule of two bytes of shared and global memory has a Cell.
// Two accesses of different threads, one of them a write, are a race unless a barrier of the block, or a
// synchronization of their warp, lies between them. Nothing orders two blocks of one launch. Shuffles and products
// order nothing: a card does not promise it either.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Worker;
struct Fiber;

// The last write and the last reads of a granule.
struct Access {
    std::uint32_t launch = 0, block = 0;  // of shared memory: the block's serial number, 0
    std::uint16_t who = 0;                // a thread + 1; or SEVERAL_OF_WARP | warp; or SEVERAL_WARPS
    std::uint16_t barrier_epoch = 0, warp_epoch = 0;
    std::uint32_t code = 0;  // where, from the beginning of the library; 0: not known
    std::uint8_t bytes = 0;  // which of the two
    bool is_atomic = false;
    bool is_on_its_way = false;  // a copy of cp.async that nobody has waited for
};
struct Cell {
    Access write, read;
};

// A copy of cp.async owns its destination from its beginning to the wait: nobody may touch it between them.
enum AccessKind {
    ACCESS_READ,
    ACCESS_WRITE,
    ACCESS_ATOMIC_READ,
    ACCESS_ATOMIC_WRITE,
    ACCESS_COPY_BEGINS,
    ACCESS_COPY_ENDS,
};

// True once a checked library has been loaded; from then on allocations have shadows.
extern bool is_checking;

// Stops the block with an error if the access is wrong. `program_counter` null: the fiber's site says where.
void check_access(Worker* worker, Fiber* fiber, std::uintptr_t address, std::size_t bytes, AccessKind kind,
                  const void* program_counter);

// __syncwarp of these lanes.
void synchronize_warp(Worker* worker, unsigned warp, std::uint32_t lanes);

}  // namespace emu
