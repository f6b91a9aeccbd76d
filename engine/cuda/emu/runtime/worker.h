// Inside the runtime: a worker runs the blocks of a launch, one at a time, on fibers of one thread of the system.
//
// fiber.cpp has stacks and the switch, scheduler.cpp decides who runs next and what a barrier is, collective.cpp is the
// warp's arithmetic, async_copy.cpp cp.async, checker.cpp the access checker, fault.cpp signals, launch.cpp the grid.
#pragma once
#include <time.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../driver/status.h"
#include "kernel_types.h"
#include "launch.h"

namespace emu {

constexpr unsigned WARP = 32;
constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned MOST_WARPS = MOST_THREADS / WARP;

struct Cell;        // checker.h
struct Allocation;  // allocation.h

struct AsyncCopy {
    unsigned char* destination;
    const unsigned char* source;
    unsigned valid_bytes;
    std::int32_t group;
    const char* site;
    const void* caller;
    bool has_landed;
};

// What stopped a block from outside its own flow: a signal. Its text is composed when the block has been left.
struct Interruption {
    int signal = 0;
    std::uintptr_t address = 0;
    std::uintptr_t stack_pointer = 0;
    const void* program_counter = nullptr;
};

struct Worker : Block {
    // Stacks: `capacity` of them; the block has `count` threads in `warps` warps.
    char* stacks = nullptr;
    unsigned capacity = 0, count = 0, warps = 0, alive = 0;
    Fiber* running = nullptr;
    void* scheduler_stack = nullptr;  // where launch.cpp waits for the end of the block
    bool is_in_kernel = false;

    // One bit a lane: may run, exists, has exited, waits in a collective.
    std::uint32_t runnable[MOST_WARPS], existing[MOST_WARPS], exited[MOST_WARPS], gathered[MOST_WARPS];
    std::uint32_t runnable_warps = 0;  // one bit a warp
    unsigned current_warp = 0;

    // The barrier that is filling.
    unsigned at_barrier = 0;
    const char* barrier_site = nullptr;
    int barrier_sum = 0, barrier_result = 0;

    // The launch.
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    const KernelLibrary* library = nullptr;
    int device = 0;
    std::uint32_t launch_number = 0, block_number = 0, block_serial = 0;
    bool is_random = false;
    std::uint64_t random_state = 0;

    // Shared memory: the library's thread-local image, and a mapping whose end is a guard page.
    unsigned char* static_shared = nullptr;
    unsigned char* dynamic_mapping = nullptr;
    std::size_t dynamic_capacity = 0;

    std::vector<std::vector<AsyncCopy>> copies;  // of each thread

    // The first error of the launch in this worker.
    Status status = SUCCESS;
    std::string message;
    Interruption interruption;
    volatile bool is_out_of_time = false;
    bool has_timer = false;
    timer_t timer{};
    unsigned watchdog_s = 0;

    // The checker's.
    std::vector<Cell> shared_shadow;
    const Allocation* last_allocation = nullptr;

    Fiber* fiber(unsigned linear) const {
        return fiber_of_stack(reinterpret_cast<std::uintptr_t>(stacks) + linear * STACK_BYTES);
    }
    static Worker* of(Fiber* fiber) { return static_cast<Worker*>(fiber->block); }
    std::uint64_t random() {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return random_state;
    }
    bool owns_stack(std::uintptr_t address) const {
        return address - reinterpret_cast<std::uintptr_t>(stacks) < capacity * STACK_BYTES;
    }
    bool is_dynamic_shared(std::uintptr_t address) const {
        return address - reinterpret_cast<std::uintptr_t>(dynamic) < dynamic_bytes;
    }
    bool is_static_shared(std::uintptr_t address) const {
        return static_shared && address - reinterpret_cast<std::uintptr_t>(static_shared) < library->shared_bytes;
    }
    bool is_shared(const void* start, std::size_t bytes) const {
        std::uintptr_t first = reinterpret_cast<std::uintptr_t>(start), last = first + bytes - 1;
        return (is_dynamic_shared(first) && is_dynamic_shared(last)) ||
               (is_static_shared(first) && is_static_shared(last));
    }
};

// The worker of this thread while it runs a block.
// Initial-exec: a signal handler reads it, and may not allocate.
extern thread_local Worker* this_worker __attribute__((tls_model("initial-exec")));

// fiber.cpp
extern "C" void emu_switch(void** save_stack_pointer, void* load_stack_pointer);
void reserve_stacks(Worker* worker, unsigned count);
void prepare_fiber(Worker* worker, unsigned linear, void (*entry)());

// scheduler.cpp
void run_block(Worker* worker, bool poison);
void park(Worker* worker, Fiber* fiber);
void wake(Worker* worker, unsigned warp, std::uint32_t lanes);
// Remembers the first error, with the kernel, block and thread; `fiber` may be null.
void note(Worker* worker, Fiber* fiber, Status status, const std::string& what);
// Leaves the block for good: the fibers' stacks are not unwound.
[[noreturn]] void abandon(Worker* worker);
[[noreturn]] void stop(Worker* worker, Fiber* fiber, Status status, const std::string& what);

// collective.cpp
void execute_collective(Worker* worker, unsigned warp, int kind, std::uint32_t mask);
// d[16][8] += a[16][16] * b[16][8], as mma.m16n8k16 adds.
void multiply_set(const float (*a)[16], const float (*b)[8], float (*d)[8]);

// fault.cpp
void start_watchdog(Worker* worker, unsigned seconds);
void stop_watchdog(Worker* worker);
void explain_interruption(Worker* worker);
// "attention.cu:123" of an address in a kernel library.
std::string source_line(const void* program_counter);
// The same of the collective in which a fiber is.
std::string place_of(const Fiber* fiber);
// What an address is that a kernel may not touch.
std::string describe_address(const Worker* worker, std::uintptr_t address);

}  // namespace emu
