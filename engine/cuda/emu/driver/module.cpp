// Modules, functions, launches.
//
// An image is what the emulated NVRTC made (nvrtc.cpp): a line with the target, then names of kernels.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "image.h"
#include "kernel_library.h"

namespace emu {

struct Module;
struct Function {
    KernelEntry entry;
    Module* module;
    int most_dynamic;
};
struct Module {
    Context* context;
    std::vector<std::string> names;
    std::map<std::string, Function*> functions;
};
static auto& modules = forever<std::set<Module*>>();
static auto& functions = forever<std::set<Function*>>();

std::size_t live_modules() { return modules.size(); }

constexpr int DYNAMIC_WITHOUT_OPT_IN = 48 * 1024;

int most_dynamic_shared() {
    switch (settings.arch) {
        case 80:
        case 87:
            return 163 * 1024;
        case 86:
        case 89:
        case 120:
            return 99 * 1024;
        case 75:
            return 64 * 1024;
        default:
            return 227 * 1024;
    }
}

// ------------------------------------------------------------------------------------------------------------- modules

// Machine code runs on its own major version, from its minor version up; PTX on everything newer.
static bool runs_here(const Image& image) {
    if (image.is_virtual) return image.arch <= settings.arch;
    return image.arch / 10 == settings.arch / 10 && image.arch <= settings.arch;
}

EMU_API int cuModuleLoadData(void** out, const void* bytes) {
    ENTER_READY;
    if (is_due(Fault::Module)) return fail(INVALID_IMAGE, "planned fault: the image of a module");
    Image image;
    if (!read_image(static_cast<const char*>(bytes), &image))
        return fail(INVALID_IMAGE, "not an image of the emulated NVRTC: the emulated driver cannot run machine code");
    if (!runs_here(image))
        return fail(NO_BINARY_FOR_GPU, "the image is for " + std::to_string(image.arch) + ", the device is " +
                                           std::to_string(settings.arch));
    auto* module = new Module{current_context(), image.kernels, {}};
    modules.insert(module);
    *out = module;
    return SUCCESS;
}

EMU_API int cuModuleLoadDataEx(void** out, const void* bytes, unsigned, int*, void**) {
    return cuModuleLoadData(out, bytes);
}

EMU_API int cuModuleUnload(void* handle) {
    ENTER;
    auto found = modules.find(static_cast<Module*>(handle));
    if (found == modules.end()) return INVALID_HANDLE;
    drain_all();
    Module* module = *found;
    modules.erase(found);
    for (const auto& [_, function] : module->functions) {
        functions.erase(function);
        delete function;
    }
    delete module;
    return SUCCESS;
}

EMU_API int cuModuleGetFunction(void** out, void* handle, const char* name) {
    ENTER_READY;
    auto found = modules.find(static_cast<Module*>(handle));
    if (found == modules.end()) return INVALID_HANDLE;
    Module* module = *found;
    bool is_named = std::find(module->names.begin(), module->names.end(), name) != module->names.end();
    KernelEntry kernel = is_named ? find_kernel(name) : KernelEntry{};
    if (!kernel.kernel) return fail(NOT_FOUND, std::string("the module has no kernel ") + name);
    Function*& function = module->functions[name];
    if (!function) {
        function = new Function{kernel, module, DYNAMIC_WITHOUT_OPT_IN};
        functions.insert(function);
    }
    *out = function;
    return SUCCESS;
}

EMU_API int cuModuleGetGlobal_v2(DevicePointer*, std::size_t*, void*, const char* name) {
    ENTER;
    return fail(NOT_FOUND, std::string("variables of a module are not emulated: ") + name);
}

// ----------------------------------------------------------------------------------------------------------- functions

static Function* find_function(void* handle) {
    auto found = functions.find(static_cast<Function*>(handle));
    return found == functions.end() ? nullptr : *found;
}

enum FunctionAttribute {
    MOST_THREADS_PER_BLOCK = 0,
    REGISTERS = 4,
    PTX_VERSION = 5,
    BINARY_VERSION = 6,
    MOST_DYNAMIC = 8
};

EMU_API int cuFuncGetAttribute(int* value, int attribute, void* handle) {
    ENTER;
    Function* function = find_function(handle);
    if (!function) return INVALID_HANDLE;
    switch (attribute) {
        case MOST_THREADS_PER_BLOCK:
            *value = 1024;
            break;
        case REGISTERS:
            *value = 64;
            break;
        case PTX_VERSION:
        case BINARY_VERSION:
            *value = settings.arch;
            break;
        case MOST_DYNAMIC:
            *value = function->most_dynamic;
            break;
        default:
            *value = 0;
    }
    return SUCCESS;
}

EMU_API int cuFuncSetAttribute(void* handle, int attribute, int value) {
    ENTER;
    Function* function = find_function(handle);
    if (!function) return INVALID_HANDLE;
    if (attribute != MOST_DYNAMIC) return SUCCESS;
    if (value < 0 || value > most_dynamic_shared())
        return fail(INVALID_VALUE, std::to_string(value) + " bytes of dynamic shared memory: the device has " +
                                       std::to_string(most_dynamic_shared()));
    function->most_dynamic = value;
    return SUCCESS;
}

EMU_API int cuFuncGetParamInfo(void* handle, std::size_t index, std::size_t* offset, std::size_t* bytes) {
    ENTER;
    Function* function = find_function(handle);
    if (!function) return INVALID_HANDLE;
    const Kernel* kernel = function->entry.kernel;
    if (index >= kernel->parameter_count) return INVALID_VALUE;
    std::size_t at = 0;
    for (std::size_t i = 0;; i++) {
        const Parameter& parameter = kernel->parameters[i];
        at = (at + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
        if (i == index) break;
        at += parameter.bytes;
    }
    *offset = at;
    if (bytes) *bytes = kernel->parameters[index].bytes;
    return SUCCESS;
}

EMU_API int cuFuncSetCacheConfig(void* handle, int) {
    ENTER;
    return find_function(handle) ? SUCCESS : INVALID_HANDLE;
}

EMU_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads, std::size_t) {
    ENTER;
    if (!find_function(handle)) return INVALID_HANDLE;
    if (threads <= 0) return INVALID_VALUE;
    *blocks = 2048 / threads;
    return SUCCESS;
}

// -------------------------------------------------------------------------------------------------------------- launch

// The arguments' values at the call. A driver reads them from the addresses that it was given; with one too few, it
// reads what lies behind the list.
struct ArgumentCopy {
    std::unique_ptr<unsigned char[]> bytes;
    std::vector<void*> pointers;
};

constexpr std::size_t ARGUMENT_ALIGNMENT = 64;

// process_vm_readv reads this process's memory without a fault where there is none. Where it is not allowed, a wrong
// address is a fault.
static bool read_argument(void* to, const void* from, std::size_t bytes) {
    iovec local{to, bytes}, remote{const_cast<void*>(from), bytes};
    ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (got == static_cast<ssize_t>(bytes)) return true;
    if (got < 0 && (errno == EPERM || errno == ENOSYS)) {
        memcpy(to, from, bytes);
        return true;
    }
    return false;
}

static Status copy_arguments(const Kernel* kernel, void** given, ArgumentCopy* copy) {
    std::string launch = std::string("launch of ") + kernel->name;
    if (kernel->parameter_count && !given) return fail(INVALID_VALUE, launch + ": no arguments");
    std::size_t total = 0;
    std::vector<std::size_t> offsets;
    for (unsigned i = 0; i < kernel->parameter_count; i++) {
        std::size_t alignment = std::max<std::size_t>(kernel->parameters[i].alignment, 16);
        total = (total + alignment - 1) / alignment * alignment;
        offsets.push_back(total);
        total += kernel->parameters[i].bytes;
    }
    copy->bytes.reset(new unsigned char[total + ARGUMENT_ALIGNMENT]);
    auto start = reinterpret_cast<std::uintptr_t>(copy->bytes.get());
    start = (start + ARGUMENT_ALIGNMENT - 1) & ~(ARGUMENT_ALIGNMENT - 1);
    for (unsigned i = 0; i < kernel->parameter_count; i++) {
        void* to = reinterpret_cast<void*>(start + offsets[i]);
        if (!given[i] || !read_argument(to, given[i], kernel->parameters[i].bytes))
            return fail(INVALID_VALUE, launch + ": argument " + std::to_string(i + 1) + " of " +
                                           std::to_string(kernel->parameter_count) +
                                           " cannot be read: too few arguments?");
        copy->pointers.push_back(to);
    }
    return SUCCESS;
}

struct LaunchShape {
    dim3 grid, block;
    unsigned dynamic_bytes;
};

static Status check_shape(const Function* function, const LaunchShape& shape) {
    std::string launch = std::string("launch of ") + function->entry.kernel->name;
    const dim3 &grid = shape.grid, &block = shape.block;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        return fail(INVALID_VALUE, launch + ": no grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                                       " x " + std::to_string(grid.z) + " blocks");
    unsigned long long threads = static_cast<unsigned long long>(block.x) * block.y * block.z;
    if (!threads || threads > 1024 || block.z > 64)
        return fail(INVALID_VALUE, launch + ": no block of " + std::to_string(block.x) + " x " +
                                       std::to_string(block.y) + " x " + std::to_string(block.z) + " threads");
    if (static_cast<long long>(shape.dynamic_bytes) > function->most_dynamic)
        return fail(INVALID_VALUE, launch + ": " + std::to_string(shape.dynamic_bytes) +
                                       " bytes of dynamic shared memory, but the function may have " +
                                       std::to_string(function->most_dynamic) + " (cuFuncSetAttribute)");
    return SUCCESS;
}

static Status launch(void* handle, const LaunchShape& shape, void* stream_handle, void** arguments, void** extra) {
    Function* function = find_function(handle);
    Stream* stream = find_stream(stream_handle);
    if (!function || !stream) return INVALID_HANDLE;
    if (function->module->context != stream->context)
        return fail(INVALID_HANDLE, "a launch's function and stream are of different devices");
    if (extra) return fail(NOT_SUPPORTED, "arguments of a launch in `extra` are not emulated");
    REQUIRE(check_shape(function, shape));
    auto copy = std::make_shared<ArgumentCopy>();
    REQUIRE(copy_arguments(function->entry.kernel, arguments, copy.get()));
    if (is_due(Fault::Submit)) return fail(static_cast<Status>(settings.submit_status), "planned fault: launch refused");
    Context* context = stream->context;
    Launch description{function->entry.kernel, function->entry.library, shape.grid, shape.block,
                       shape.dynamic_bytes,    context->device,         nullptr};
    Operation operation;
    operation.run = [context, description, copy] {
        if (is_due(Fault::Launch))
            return fail_for_good(context, LAUNCH_FAILED,
                                 std::string("planned fault: kernel ") + description.kernel->name);
        Launch now = description;
        now.arguments = copy->pointers.data();
        std::string message;
        Status status = run_grid(now, message);
        return status == SUCCESS ? SUCCESS : fail_for_good(context, status, message);
    };
    return enqueue(stream, std::move(operation));
}

EMU_API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned dynamic_bytes, void* stream, void** arguments,
                           void** extra) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_bytes};
    return launch(function, shape, stream, arguments, extra);
}

// CUlaunchConfig; attributes (clusters, programmatic dependent launch) do not change what a kernel computes here.
struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_bytes;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

EMU_API int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    LaunchShape shape{{config->grid_x, config->grid_y, config->grid_z},
                      {config->block_x, config->block_y, config->block_z},
                      config->dynamic_bytes};
    return launch(function, shape, config->stream, arguments, extra);
}

}  // namespace emu
