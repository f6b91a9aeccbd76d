// The one header of the kernels, and the only place where a card and the emulated driver differ.
//
// Three compilers read it: NVRTC (at start, without include paths, so that no header of the toolkit may be needed),
// nvcc (in CI) and the host's C++ compiler with TANDEM_EMULATE (for tests; it has read engine/cuda/emu/runtime/kernel.h
// before this file, by -include, which declares threadIdx, __syncthreads, shuffles, atomics and mathematics).
//
// Kernels write no PTX of their own: what is not here is added here, with both bodies. Every kernel is
// `extern "C" __global__ void name(...)`, followed by `TANDEM_KERNEL(name)`. Blocks of a grid do not depend on each
// other: the emulator runs them one after the other, in any order.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef TANDEM_EMULATE
// The emulator's registration (TANDEM_KERNEL) is in kernel.h: it needs the names and sizes of a kernel's arguments.
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::emu::self()->block->dynamic)
#else
#define TANDEM_KERNEL(name)
#define DYNAMIC_SHARED(T, name)                                      \
    extern __shared__ __align__(128) unsigned char tandem_dynamic[]; \
    T* name = reinterpret_cast<T*>(tandem_dynamic)
#endif

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

// ------------------------------------------------------------------------------------------ one launch behind another
// On cards from Hopper on a launch of a stream may begin before the one before has ended (programmatic dependent
// launch, src/module.rs): every kernel waits here before it reads what other launches write, and before it writes. On
// older cards, and under emulation, launches begin when the one before has ended.

__device__ __forceinline__ void wait_for_launches_before() {
#if !defined(TANDEM_EMULATE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// The next launch may begin as soon as all blocks of this one have come here, or have ended.
__device__ __forceinline__ void let_launches_behind_begin() {
#if !defined(TANDEM_EMULATE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// How most kernels begin.
__device__ __forceinline__ void follow_launches_before() {
    wait_for_launches_before();
    let_launches_behind_begin();
}

// ---------------------------------------------------------------------------------------------------------- bfloat16

// A bfloat16 as it lies in memory: the upper half of an f32.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_f32(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

// Two f32 to two bfloat16 in one word, `low` in the lower half; round to nearest even, every NaN becomes 0x7fff.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#ifdef TANDEM_EMULATE
    return emu::round_to_bf16(low) | static_cast<u32>(emu::round_to_bf16(high)) << 16;
#else
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#endif
}

__device__ __forceinline__ bf16 to_bf16(float value) { return bf16{static_cast<u16>(pack_bf16(value, 0.0f))}; }
__device__ __forceinline__ float low_f32(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_f32(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Eight bfloat16 of one 16-byte word, in the order of memory.
__device__ __forceinline__ void unpack8(float (&values)[8], const uint4& packed) {
    values[0] = low_f32(packed.x), values[1] = high_f32(packed.x);
    values[2] = low_f32(packed.y), values[3] = high_f32(packed.y);
    values[4] = low_f32(packed.z), values[5] = high_f32(packed.z);
    values[6] = low_f32(packed.w), values[7] = high_f32(packed.w);
}

__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
    return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
                      pack_bf16(values[6], values[7]));
}

// ------------------------------------------------------------------------------------------------------ tensor cores

// d (16x8, f32) += a (16x16, bfloat16, rows) * b (16x8, bfloat16, columns): mma.sync.m16n8k16 with PTX's fragments.
// With group = lane / 4 and pair = lane % 4 * 2:
//   a[0] = A[group][pair..], a[1] = A[group + 8][pair..], a[2] = A[group][pair + 8..], a[3] = A[group + 8][pair + 8..]
//   b[0] = B[pair..][group], b[1] = B[pair + 8..][group]
//   d[0], d[1] = D[group][pair, pair + 1], d[2], d[3] = D[group + 8][pair, pair + 1]
// All 32 lanes call it together.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TANDEM_EMULATE
    emu::mma_m16n8k16(d, a, b, EMU_SITE);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8 of matrix i / 8, 16
// bytes aligned. result[m] has the two elements of row lane / 4, columns lane % 4 * 2 and the next, of matrix m;
// with TRANSPOSED the same of the transposed matrix. All 32 lanes call it together.
template <bool TRANSPOSED>
__device__ __forceinline__ void ldmatrix_x4(u32 (&result)[4], const void* row) {
#ifdef TANDEM_EMULATE
    emu::ldmatrix_x4(result, row, TRANSPOSED, EMU_SITE);
#else
    u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// ------------------------------------------------------------------------------------------------ asynchronous copies

// Copies 16 bytes from global to shared memory, both aligned to 16. Where `is_inside` is false it writes zeros and does
// not read the source. The data are there for the thread that copied after cp_async_wait, for its block after a
// barrier that follows it.
__device__ __forceinline__ void cp_async_16(void* to_shared, const void* from_global, bool is_inside = true) {
#ifdef TANDEM_EMULATE
    emu::cp_async(to_shared, from_global, is_inside ? 16u : 0u, EMU_SITE);
#else
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to_shared));
    int bytes = is_inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from_global), "r"(bytes)
                 : "memory");
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#ifdef TANDEM_EMULATE
    emu::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most the youngest PENDING groups are still on their way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
#ifdef TANDEM_EMULATE
    emu::cp_async_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
#endif
}

// ------------------------------------------------------------------------------------------- reductions over a warp
// All 32 lanes call them together; every lane gets the result of its aligned group of LANES lanes (2, 4, ... 32). The
// tree is a butterfly with distances LANES / 2, ..., 2, 1, so that all lanes have the same bits. Under emulation each
// is one collective instead of log2(LANES) shuffles.

template <u32 LANES = WARP>
__device__ __forceinline__ float warp_sum(float value) {
#ifdef TANDEM_EMULATE
    return emu::reduce(emu::REDUCE_SUM, value, LANES, EMU_SITE);
#else
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
#endif
}

// The largest value; a NaN loses against a number, as in fmaxf.
template <u32 LANES = WARP>
__device__ __forceinline__ float warp_max(float value) {
#ifdef TANDEM_EMULATE
    return emu::reduce(emu::REDUCE_MAX, value, LANES, EMU_SITE);
#else
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
#endif
}

template <u32 LANES = WARP>
__device__ __forceinline__ u32 warp_sum_u32(u32 value) {
#ifdef TANDEM_EMULATE
    return emu::reduce_u32(value, LANES, EMU_SITE);
#else
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
#endif
}

// The largest value and its index; among equal values the lowest index. NaN never wins against a number.
template <u32 LANES = WARP>
__device__ __forceinline__ void warp_argmax(float& value, u32& index) {
#ifdef TANDEM_EMULATE
    emu::reduce_argmax(value, index, LANES, EMU_SITE);
#else
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, value, distance);
        u32 other_index = __shfl_xor_sync(ALL_LANES, index, distance);
        bool is_number = value == value, other_is_number = other == other;
        bool is_better =
            is_number != other_is_number ? other_is_number : other > value || (!(value > other) && other_index < index);
        if (is_better) value = other, index = other_index;
    }
#endif
}
