// Libraries of kernels beside this one: libkernels.so is the product's, libplanted.so has the wrong kernels of tests.
//
// With EMU_PLANTED=prefix a wrong kernel prefix_name takes the place of the product's kernel of that name.
//
// Each exists twice, plain and with the checker's callbacks (EMU_CHECK). They are opened at the first look-up of a name
// and never closed: a module is a list of names.
#include "kernel_library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>

namespace emu {

static const char* const STEMS[] = {"libkernels", "libplanted"};

static std::string folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&folder), &info) || !info.dli_fname) return ".";
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// Its addresses, and how much it has of thread-local variables, which are the __shared__ ones.
static int measure(dl_phdr_info* info, std::size_t, void* data) {
    auto* library = static_cast<KernelLibrary*>(data);
    if (library->path != info->dlpi_name) return 0;
    library->begin = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type == PT_TLS) library->shared_bytes = header.p_memsz;
        if (header.p_type != PT_LOAD) continue;
        library->end = std::max<std::uintptr_t>(library->end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    return 1;
}

static KernelLibrary* open_library(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fail(INVALID_IMAGE, dlerror());
        return nullptr;
    }
    auto* library = new KernelLibrary;
    library->handle = handle;
    link_map* map;
    library->path = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : path;
    dl_iterate_phdr(measure, library);
    library->shared_probe = reinterpret_cast<void* (*)()>(dlsym(handle, "emu_shared_probe"));
    library->is_checked = settings.is_checked;
    return library;
}

static KernelEntry look_up(const std::string& name) {
    static auto& opened = forever<std::map<std::string, KernelLibrary*>>();
    for (const char* stem : STEMS) {
        std::string path = folder() + "/" + stem + (settings.is_checked ? "-checked.so" : ".so");
        auto found = opened.find(path);
        if (found == opened.end()) found = opened.emplace(path, open_library(path)).first;
        KernelLibrary* library = found->second;
        if (!library) continue;
        auto* kernel = static_cast<const Kernel*>(dlsym(library->handle, ("emu_kernel_" + name).c_str()));
        if (kernel) return {kernel, library};
    }
    return {};
}

KernelEntry find_kernel(const std::string& name) {
    KernelEntry planted = settings.planted.empty() ? KernelEntry{} : look_up(settings.planted + "_" + name);
    return planted.kernel ? planted : look_up(name);
}

// For the emulated NVRTC.
EMU_API int emu_has_kernel(const char* name) {
    ENTER;
    return find_kernel(name).kernel != nullptr;
}

}  // namespace emu
