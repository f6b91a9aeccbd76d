// What the compiler calls before each access in kernels compiled with -fsanitize=thread.
//
// The names are the interface between compiler and libtsan; libtsan itself is not linked. Outside of a kernel (static
// initializers of a library) they do nothing but the access itself.
#include <cstdint>
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace emu {

static inline void on_access(const volatile void* address, std::size_t bytes, AccessKind kind, const void* caller) {
    Worker* worker = this_worker;
    if (!worker || !worker->is_in_kernel) return;
    check_access(worker, self(), reinterpret_cast<std::uintptr_t>(address), bytes, kind, caller);
}

extern "C" {

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

// Volatile accesses are how a kernel reads what another thread writes: they race with plain accesses only.
#define PLAIN(bytes)                                                                                      \
    EXPORT void __tsan_read##bytes(void* p) { on_access(p, bytes, ACCESS_READ, CALLER); }                 \
    EXPORT void __tsan_write##bytes(void* p) { on_access(p, bytes, ACCESS_WRITE, CALLER); }               \
    EXPORT void __tsan_unaligned_read##bytes(void* p) { on_access(p, bytes, ACCESS_READ, CALLER); }       \
    EXPORT void __tsan_unaligned_write##bytes(void* p) { on_access(p, bytes, ACCESS_WRITE, CALLER); }     \
    EXPORT void __tsan_volatile_read##bytes(void* p) { on_access(p, bytes, ACCESS_ATOMIC_READ, CALLER); } \
    EXPORT void __tsan_volatile_write##bytes(void* p) { on_access(p, bytes, ACCESS_ATOMIC_WRITE, CALLER); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

EXPORT void __tsan_read_range(void* p, std::size_t bytes) { on_access(p, bytes, ACCESS_READ, CALLER); }
EXPORT void __tsan_write_range(void* p, std::size_t bytes) { on_access(p, bytes, ACCESS_WRITE, CALLER); }
EXPORT void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
    on_access(from, bytes, ACCESS_READ, CALLER);
    on_access(to, bytes, ACCESS_WRITE, CALLER);
    return memcpy(to, from, bytes);
}
EXPORT void* __tsan_memset(void* to, int value, std::size_t bytes) {
    on_access(to, bytes, ACCESS_WRITE, CALLER);
    return memset(to, value, bytes);
}

EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#define FETCH(bits, T, name, operation)                                        \
    EXPORT T __tsan_atomic##bits##_fetch_##name(volatile T* p, T value, int) { \
        on_access(p, sizeof(T), ACCESS_ATOMIC_WRITE, CALLER);                  \
        return operation(p, value, __ATOMIC_SEQ_CST);                          \
    }
#define EXCHANGE(bits, T, strength, weak)                                                                         \
    EXPORT int __tsan_atomic##bits##_compare_exchange_##strength(volatile T* p, T* expected, T value, int, int) { \
        on_access(p, sizeof(T), ACCESS_ATOMIC_WRITE, CALLER);                                                     \
        return __atomic_compare_exchange_n(p, expected, value, weak, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);         \
    }
#define ATOMIC(bits, T)                                                    \
    EXPORT T __tsan_atomic##bits##_load(const volatile T* p, int) {        \
        on_access(p, sizeof(T), ACCESS_ATOMIC_READ, CALLER);               \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                       \
    }                                                                      \
    EXPORT void __tsan_atomic##bits##_store(volatile T* p, T value, int) { \
        on_access(p, sizeof(T), ACCESS_ATOMIC_WRITE, CALLER);              \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                      \
    }                                                                      \
    EXPORT T __tsan_atomic##bits##_exchange(volatile T* p, T value, int) { \
        on_access(p, sizeof(T), ACCESS_ATOMIC_WRITE, CALLER);              \
        return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);            \
    }                                                                      \
    FETCH(bits, T, add, __atomic_fetch_add)                                \
    FETCH(bits, T, sub, __atomic_fetch_sub)                                \
    FETCH(bits, T, and, __atomic_fetch_and)                                \
    FETCH(bits, T, or, __atomic_fetch_or)                                  \
    FETCH(bits, T, xor, __atomic_fetch_xor)                                \
    EXCHANGE(bits, T, strong, false)                                       \
    EXCHANGE(bits, T, weak, true)
ATOMIC(32, std::uint32_t)
ATOMIC(64, std::uint64_t)

}  // extern "C"

}  // namespace emu
