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
    extern __shared__ __align__(1024) unsigned char tandem_dynamic[]; \
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

// 2^value, exact for 0 and -inf, else within two units of the last place; below 2^-126 it is 0. One instruction, where
// exp2f takes four more for results that small.
__device__ __forceinline__ float exp2_fast(float value) {
#ifdef TANDEM_EMULATE
    return value < -126.0f ? 0.0f : exp2f(value);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#endif
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

// ------------------------------------------------------------------------------------------ products of a warpgroup
// Four adjacent warps, the first of a number divisible by 4, multiply 64 rows together: on Hopper by wgmma, elsewhere
// and under emulation each warp its 16 rows by ldmatrix and mma. Warp w has rows 16 w and following, and in d[tile]
// what mma_m16n8k16 would have there, with the same bits. Operands in shared memory are panels: rows of 64 bfloat16, in
// pieces of 8 whose order depends on the row, so that neither ldmatrix nor wgmma has bank conflicts. A wider operand is
// several panels, one after the other; each begins at a multiple of 1024 bytes.
//
// wgmma goes on while its warps do (elsewhere a product is complete at once): between warpgroup_fence() and
// warpgroup_wait() its operands and results are left alone. It sees what others wrote to shared memory once each thread
// that wrote has called warpgroup_publish() before a barrier.

#if !defined(TANDEM_EMULATE) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUP_BY_WGMMA
constexpr bool WARPGROUP_IS_ASYNC = true;
#else
constexpr bool WARPGROUP_IS_ASYNC = false;
#endif

// Where `piece` (8 values) of a row begins in a panel.
__device__ __forceinline__ u32 in_panel(u32 row, u32 piece) { return row * 64 + (piece ^ row % 8) * 8; }

// In an operand of panels of ROWS rows, whichever panel the piece is in.
template <u32 ROWS>
__device__ __forceinline__ u32 in_panels(u32 row, u32 piece) {
    return piece / 8 * (ROWS * 64) + in_panel(row, piece % 8);
}

__device__ __forceinline__ void warpgroup_publish() {
#ifdef WARPGROUP_BY_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void warpgroup_fence() {
#ifdef WARPGROUP_BY_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a group of products.
__device__ __forceinline__ void warpgroup_commit() {
#ifdef WARPGROUP_BY_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the youngest PENDING groups are under way; `d` is a result of one that is not.
template <int PENDING, u32 TILES>
__device__ __forceinline__ void warpgroup_wait(float (&d)[TILES][4]) {
#ifdef WARPGROUP_BY_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    // Nothing of `d` is read before.
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++)
        asm volatile("" : "+f"(d[tile][0]), "+f"(d[tile][1]), "+f"(d[tile][2]), "+f"(d[tile][3])::"memory");
#endif
}

#ifdef WARPGROUP_BY_WGMMA
#define FLOATS_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FLOATS_32(d, i)                                                                                \
    FLOATS_4(d, i), FLOATS_4(d, i + 1), FLOATS_4(d, i + 2), FLOATS_4(d, i + 3), FLOATS_4(d, i + 4), \
        FLOATS_4(d, i + 5), FLOATS_4(d, i + 6), FLOATS_4(d, i + 7)
#define NAMES_32                                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define NAMES_64                                                                                               \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
             "%56,%57,%58,%59,%60,%61,%62,%63"

// How wgmma finds rows of panels: 8 rows are 1024 bytes, panels `panel_bytes` apart (read where values are columns).
__device__ __forceinline__ u64 panel_descriptor(const bf16* panel, u32 panel_bytes) {
    u64 address = static_cast<u32>(__cvta_generic_to_shared(panel));
    return address >> 4 | static_cast<u64>(panel_bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// d (64x64) = or, with `adds`, += a (64x16) * b (64x16) transposed.
__device__ __forceinline__ void wgmma_scores(float (&d)[8][4], u64 a, u64 b, u32 adds) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;}\n"
        : FLOATS_32(d, 0)
        : "l"(a), "l"(b), "r"(adds));
}

// d += a (64x16, in registers) * b (16x64, 16x128).
__device__ __forceinline__ void wgmma_values(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;}\n"
        : FLOATS_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_values(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;}\n"
        : FLOATS_32(d, 0), FLOATS_32(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

// d (64x64) = a (64xD) * b (64xD) transposed, over ascending columns; panels of a have A_ROWS rows, those of b 64.
template <u32 D, u32 A_ROWS>
__device__ __forceinline__ void warpgroup_scores(float (&d)[8][4], const bf16* a, const bf16* b) {
#ifdef WARPGROUP_BY_WGMMA
#pragma unroll
    for (u32 k = 0; k < D; k += 16)
        wgmma_scores(d, panel_descriptor(a + k / 64 * (A_ROWS * 64) + k % 64, 16),
                     panel_descriptor(b + k / 64 * (64 * 64) + k % 64, 16), k);
#else
#pragma unroll
    for (u32 tile = 0; tile < 8; tile++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) d[tile][i] = 0.0f;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll(D > 64 ? 1 : D / 16)
    for (u32 k = 0; k < D; k += 16) {
        u32 left[4];
        ldmatrix_x4<false>(left, a + in_panels<A_ROWS>(warp * 16 + lane % 16, k / 8 + lane / 16));
#pragma unroll
        for (u32 tile = 0; tile < 8; tile += 2) {
            u32 both[4];
            ldmatrix_x4<false>(both, b + in_panels<64>(tile * 8 + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
            u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
            mma_m16n8k16(d[tile], left, low);
            mma_m16n8k16(d[tile + 1], left, high);
        }
    }
#endif
}

// d (64x8 TILES) += a (64x64, in registers: 16 columns each) * b (64x8 TILES, panels of 64 rows), over ascending rows.
template <u32 TILES>
__device__ __forceinline__ void warpgroup_values(float (&d)[TILES][4], const u32 (&a)[4][4], const bf16* b) {
    if constexpr (WARPGROUP_IS_ASYNC && (TILES == 8 || TILES == 16)) {
#ifdef WARPGROUP_BY_WGMMA
#pragma unroll
        for (u32 k = 0; k < 4; k++) wgmma_values(d, a[k], panel_descriptor(b + k * 16 * 64, 64 * 128));
#endif
    } else {
        u32 lane = threadIdx.x % WARP;
#pragma unroll
        for (u32 k = 0; k < 4; k += 2)
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                u32 both[4];
                ldmatrix_x4<true>(both, b + in_panels<64>(k * 16 + lane, tile));
                u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
                mma_m16n8k16(d[tile], a[k], low);
                mma_m16n8k16(d[tile], a[k + 1], high);
            }
    }
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
