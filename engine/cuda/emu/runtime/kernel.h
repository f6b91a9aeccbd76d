// What a kernel's source finds on the host instead of the compiler's CUDA: read before every .cu file by -include.
//
// A thread of the device is a fiber (fiber.h). Its record lies at the top of its own stack, so that `threadIdx` is a
// mask of the stack pointer away: no thread-local variable, no argument. Collectives (barriers, shuffles, tensor-core
// products) are calls into the runtime in libcuda.so.1. Vectors, mathematics and atomics: kernel_types.h,
// kernel_math.h.
#pragma once
#include "kernel_math.h"
#include "kernel_types.h"

// Hidden: a kernel that has the name of a function of the C library must not bind to that function.
#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __shared__ static thread_local /* one copy for each worker thread, and a worker runs one block at a time */
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define EMU_TEXT_OF(x) #x
#define EMU_TEXT(x) EMU_TEXT_OF(x)
#ifdef __FILE_NAME__
#define EMU_FILE __FILE_NAME__
#else
#define EMU_FILE __FILE__
#endif
#define EMU_SITE (EMU_FILE ":" EMU_TEXT(__LINE__))

namespace emu {

// ------------------------------------------------------------------------------ what the runtime does for a kernel
extern "C" {
void emu_barrier(int predicate, const char* site);
int emu_barrier_result();
void emu_collective(int kind, unsigned mask, void* operand, const char* site);
void emu_cp_async(void* to_shared, const void* from_global, unsigned bytes, const char* site);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending);
[[noreturn]] void emu_trap(const char* what, const char* site);
}

static inline unsigned full_mask(unsigned mask = 0xffffffffu) { return mask; }
static inline int full_width(int width = 32) { return width; }

template <class T>
static inline T shuffle(Collective kind, unsigned mask, T value, int argument, int width, const char* site) {
    static_assert(sizeof(T) <= sizeof(ShuffleOperand::value), "a shuffle moves up to 16 bytes");
    ShuffleOperand operand;
    std::memcpy(operand.value, &value, sizeof(T));
    operand.argument = argument;
    operand.width = width;
    emu_collective(kind, mask, &operand, site);
    T result;
    std::memcpy(&result, operand.result, sizeof(T));
    return result;
}

static inline unsigned vote(Collective kind, unsigned mask, bool predicate, const char* site) {
    VoteOperand operand{predicate, 0};
    emu_collective(kind, mask, &operand, site);
    return operand.result;
}

static inline float reduce(Reduction reduction, float value, unsigned lanes, const char* site) {
    ReduceOperand operand{reduction, lanes, value, 0};
    emu_collective(COLLECTIVE_REDUCE, 0xffffffffu, &operand, site);
    return operand.value;
}

static inline unsigned reduce_u32(unsigned value, unsigned lanes, const char* site) {
    ReduceOperand operand{REDUCE_SUM_U32, lanes, 0.0f, value};
    emu_collective(COLLECTIVE_REDUCE, 0xffffffffu, &operand, site);
    return operand.index;
}

static inline void reduce_argmax(float& value, unsigned& index, unsigned lanes, const char* site) {
    ReduceOperand operand{REDUCE_ARGMAX, lanes, value, index};
    emu_collective(COLLECTIVE_REDUCE, 0xffffffffu, &operand, site);
    value = operand.value;
    index = operand.index;
}

static inline void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, const char* site) {
    MmaOperand operand;
    std::memcpy(operand.d, d, sizeof operand.d);
    std::memcpy(operand.a, a, sizeof operand.a);
    std::memcpy(operand.b, b, sizeof operand.b);
    emu_collective(COLLECTIVE_MMA, 0xffffffffu, &operand, site);
    std::memcpy(d, operand.d, sizeof operand.d);
}

static inline void ldmatrix_x4(unsigned* result, const void* row, bool is_transposed, const char* site) {
    LdmatrixOperand operand{row, {}};
    emu_collective(is_transposed ? COLLECTIVE_LDMATRIX_TRANSPOSED : COLLECTIVE_LDMATRIX, 0xffffffffu, &operand, site);
    std::memcpy(result, operand.result, sizeof operand.result);
}

static inline void cp_async(void* to_shared, const void* from_global, unsigned bytes, const char* site) {
    emu_cp_async(to_shared, from_global, bytes, site);
}
static inline void cp_async_commit() { emu_cp_async_commit(); }
static inline void cp_async_wait(int pending) { emu_cp_async_wait(pending); }

// ------------------------------------------------------------------------------------------------------- registration
// From a kernel's signature: how many arguments it takes and of which sizes, and a function that calls it with them.
template <class Function>
struct Signature;

template <class... Arguments>
struct Signature<void (*)(Arguments...)> {
    static constexpr unsigned COUNT = sizeof...(Arguments);
    static inline const Parameter PARAMETERS[COUNT + 1] = {{sizeof(Arguments), alignof(Arguments)}..., {0, 1}};

    template <void (*KERNEL)(Arguments...), std::size_t... INDEX>
    __attribute__((no_sanitize_thread)) static void call_with(void** arguments, std::index_sequence<INDEX...>) {
        KERNEL(*static_cast<Arguments*>(arguments[INDEX])...);
    }
    template <void (*KERNEL)(Arguments...)>
    __attribute__((no_sanitize_thread)) static void call(void** arguments) {
        call_with<KERNEL>(arguments, std::make_index_sequence<COUNT>{});
    }
};

}  // namespace emu

// One line after each kernel; nothing under nvcc. The driver finds the kernel by the symbol's name.
#define TANDEM_KERNEL(name)                                                                      \
    extern "C" __attribute__((visibility("default"))) const emu::Kernel emu_kernel_##name;       \
    const emu::Kernel emu_kernel_##name = {#name, &emu::Signature<decltype(&name)>::call<&name>, \
                                           emu::Signature<decltype(&name)>::COUNT,               \
                                           emu::Signature<decltype(&name)>::PARAMETERS};

// Once for each library of kernels: makes this thread's copies of the __shared__ variables exist, and says where.
extern "C" __attribute__((visibility("default"), weak)) void* emu_shared_probe() {
    static thread_local char probe;
    return &probe;
}

// ----------------------------------------------------------------------------------------------- the language's words
#define threadIdx (::emu::self()->thread)
#define blockIdx (::emu::self()->block->index)
#define blockDim (::emu::self()->block->threads)
#define gridDim (::emu::self()->block->grid)
#define warpSize 32

#define __syncthreads() ::emu::emu_barrier(0, EMU_SITE)
#define __syncthreads_or(p) (::emu::emu_barrier((p) ? 1 : 0, EMU_SITE), ::emu::emu_barrier_result() != 0)
#define __syncthreads_and(p) (::emu::emu_barrier((p) ? 0 : 1, EMU_SITE), ::emu::emu_barrier_result() == 0)
#define __syncthreads_count(p) (::emu::emu_barrier((p) ? 1 : 0, EMU_SITE), ::emu::emu_barrier_result())
#define __syncwarp(...) ::emu::emu_collective(::emu::COLLECTIVE_SYNC, ::emu::full_mask(__VA_ARGS__), nullptr, EMU_SITE)
#define EMU_SHUFFLE(kind, mask, value, argument, ...) \
    ::emu::shuffle(::emu::kind, mask, value, static_cast<int>(argument), ::emu::full_width(__VA_ARGS__), EMU_SITE)
#define __shfl_sync(mask, value, ...) EMU_SHUFFLE(COLLECTIVE_SHUFFLE, mask, value, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) EMU_SHUFFLE(COLLECTIVE_SHUFFLE_XOR, mask, value, __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) EMU_SHUFFLE(COLLECTIVE_SHUFFLE_DOWN, mask, value, __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...) EMU_SHUFFLE(COLLECTIVE_SHUFFLE_UP, mask, value, __VA_ARGS__)
#define __ballot_sync(mask, p) ::emu::vote(::emu::COLLECTIVE_BALLOT, mask, (p), EMU_SITE)
#define __any_sync(mask, p) (::emu::vote(::emu::COLLECTIVE_BALLOT, mask, (p), EMU_SITE) != 0)
#define __all_sync(mask, p) (::emu::vote(::emu::COLLECTIVE_BALLOT, mask, !(p), EMU_SITE) == 0)
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __trap() ::emu::emu_trap("__trap()", EMU_SITE)
#undef assert
#define assert(condition) ((condition) ? (void)0 : ::emu::emu_trap("assert(" #condition ")", EMU_SITE))
