// What a test chooses, by environment variables at the first call or by emu_set afterwards, and the planned faults.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace emu {

// When the operations of a stream run.
enum class Order {
    Late,    // when somebody synchronizes or polls: a missing wait is an error each time
    Eager,   // at once
    Random,  // seeded: at any time between the two
};

struct Settings {
    int devices = 1;                          // EMU_DEVICES
    std::size_t memory_bytes = 4ull << 30;    // EMU_MEMORY_MB, of each device
    int arch = 90;                            // EMU_ARCH: compute capability * 10
    int driver_version = 13000;               // EMU_DRIVER_VERSION, as cuDriverGetVersion answers
    Order order = Order::Late;                // EMU_ORDER=late|eager|random
    bool is_strict = false;                   // EMU_STRICT_HOST: the host cannot touch device memory
    bool is_checked = false;                  // EMU_CHECK: kernels of the checked library
    std::size_t poison_bytes = 256ull << 20;  // EMU_POISON_MB: larger allocations begin as zeros
    bool is_verbose = false;                  // EMU_LOG: calls that fail are printed
    std::string visible_devices;              // CUDA_VISIBLE_DEVICES
    bool has_visible_devices = false;
    std::string planted;      // EMU_PLANTED: kernel <planted>_<name> of libplanted.so takes the place of <name>
    int submit_status = 701;  // what a planned fault of kind submit answers: out of resources
};
extern Settings& settings;
void read_settings();

// The planned faults. EMU_FAIL=alloc:7,copy:2 lets the seventh allocation and the second copy fail.
enum class Fault {
    Init,         // init: cuInit finds no device
    Alloc,        // alloc: cuMemAlloc, cuMemAllocAsync: out of memory
    HostAlloc,    // host_alloc: cuMemHostAlloc, cuMemHostRegister: out of memory
    Submit,       // submit: cuLaunchKernel, cuGraphLaunch refuse: out of resources
    Launch,       // launch: the kernel or graph goes wrong when it runs: sticky
    Copy,         // copy: a copy or memset goes wrong when it runs: sticky
    Capture,      // capture: cuStreamEndCapture finds it invalidated
    Instantiate,  // instantiate: cuGraphInstantiate is out of memory
    Module,       // module: cuModuleLoadData finds the image invalid
    Compile,      // compile: nvrtcCompileProgram fails
    IpcOpen,      // ipc_open: cuIpcOpenMemHandle cannot map
    Matmul,       // matmul: cublasLtMatmul refuses
    Count,
};
// Counts one more of this kind; true if it is the one that fails.
bool is_due(Fault fault);

}  // namespace emu
