// Plain data that kernels and the runtime share: CUDA's vectors, the record of a thread, operands of collectives.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct alignas(16) double2 {
    double x, y;
};
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

namespace emu {

constexpr std::size_t STACK_BYTES = 64 * 1024;

struct Block {
    uint3 index;
    dim3 threads;
    dim3 grid;
    unsigned char* dynamic;  // dynamic shared memory; its end touches a guard page
    std::size_t dynamic_bytes;
};

// One thread of a block. The record lies at the top of the thread's stack.
struct Fiber {
    uint3 thread;
    std::uint32_t linear;  // number in its block
    std::uint32_t lane, warp;
    Block* block;
    void* stack_pointer;  // where it goes on, while it does not run
    // The collective or barrier in which it waits.
    void* operand;
    const char* site;    // file and line, of the source or of device.cuh
    const void* caller;  // the address in the kernel
    std::uint32_t mask;
    int kind;
    bool is_done, is_at_barrier;
    // How many barriers of the block, and synchronizations of its warp, it has passed: the checker's clocks.
    std::uint16_t barrier_epoch, warp_epoch;
    std::int32_t copy_group;  // of its next asynchronous copy
};

// Stacks are 64 KiB apart: with all records at one offset they would fill the same few sets of the cache.
static inline Fiber* fiber_of_stack(std::uintptr_t base) {
    return reinterpret_cast<Fiber*>(base + STACK_BYTES - 512 - (base / STACK_BYTES & 31) * 320);
}

// The running thread. Not volatile: the answer is constant within one activation of a function.
static inline Fiber* self() {
    std::uintptr_t stack_pointer;
    asm("mov %%rsp, %0" : "=r"(stack_pointer));
    return fiber_of_stack(stack_pointer & ~(STACK_BYTES - 1));
}

enum Collective {
    COLLECTIVE_SYNC = 1,
    COLLECTIVE_SHUFFLE,
    COLLECTIVE_SHUFFLE_XOR,
    COLLECTIVE_SHUFFLE_DOWN,
    COLLECTIVE_SHUFFLE_UP,
    COLLECTIVE_BALLOT,
    COLLECTIVE_REDUCE,
    COLLECTIVE_MMA,
    COLLECTIVE_LDMATRIX,
    COLLECTIVE_LDMATRIX_TRANSPOSED,
};
enum Reduction { REDUCE_SUM, REDUCE_MAX, REDUCE_SUM_U32, REDUCE_ARGMAX };

// Each lane's operand lies on its own stack; the lane that arrives last computes for all.
struct ShuffleOperand {
    alignas(16) unsigned char value[16];
    alignas(16) unsigned char result[16];
    int argument, width;
};
struct VoteOperand {
    bool predicate;
    unsigned result;
};
struct ReduceOperand {
    Reduction reduction;
    unsigned lanes;
    float value;
    unsigned index;
};
struct MmaOperand {
    float d[4];
    std::uint32_t a[4];
    std::uint32_t b[2];
};
struct LdmatrixOperand {
    const void* row;
    std::uint32_t result[4];
};

struct Parameter {
    std::uint32_t bytes, alignment;
};

// What TANDEM_KERNEL registers.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    unsigned parameter_count;
    const Parameter* parameters;
};

}  // namespace emu
