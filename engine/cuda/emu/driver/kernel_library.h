// Kernels by name.
#pragma once
#include "driver.h"

namespace emu {

struct KernelEntry {
    const Kernel* kernel = nullptr;  // null: there is none
    const KernelLibrary* library = nullptr;
};
KernelEntry find_kernel(const std::string& name);

}  // namespace emu
