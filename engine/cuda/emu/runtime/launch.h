// What the driver calls to run a grid, and what it must say about the library that the kernel comes from.
#pragma once
#include <cstdint>
#include <string>

#include "../driver/status.h"
#include "kernel_types.h"

namespace emu {

// A loaded shared object of kernels.
struct KernelLibrary {
    void* handle = nullptr;
    std::string path;
    std::uintptr_t begin = 0, end = 0;  // its addresses
    void* (*shared_probe)() = nullptr;  // makes this thread's __shared__ variables exist
    std::size_t shared_bytes = 0;       // of all its __shared__ variables together
    bool is_checked = false;            // compiled with the checker's callbacks
};

struct Launch {
    const Kernel* kernel = nullptr;
    const KernelLibrary* library = nullptr;
    dim3 grid{}, block{};
    unsigned dynamic_bytes = 0;
    int device = 0;
    void** arguments = nullptr;
};

// How kernels run; set before the first launch or between two.
struct LaunchOptions {
    std::uint64_t seed = 0;  // 0: lanes and blocks in ascending order
    unsigned threads = 1;    // of the system, over the blocks
    bool poison = true;      // shared memory begins as NaN
    unsigned watchdog_s = 60;
};
extern LaunchOptions launch_options;

// Counts since the process began, read by tests.
struct LaunchCounts {
    std::uint64_t launches = 0, blocks = 0, threads = 0;
};
extern LaunchCounts launch_counts;

// Faults of kernels become errors of a launch, those of the host get a word before they end the process. For this
// thread and, once, for the process; run_grid does it by itself.
void install_fault_handlers();

// Runs the whole grid. On an error `message` names kernel, block, thread and line.
Status run_grid(const Launch& launch, std::string& message);

}  // namespace emu
