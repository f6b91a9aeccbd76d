// Products of activations with weights: out[row][column] = sum over k of x[row][k] * weight[column][k], bf16 in, f32
// out. Launches: src/kernels/product.rs.
//
// Order of additions, the same in all kernels here, whatever the number of rows: `k` is cut into segments of 1,024.
// Within a segment one f32 accumulator an output takes mma.m16n8k16 in ascending k; segments are added in ascending
// order, in f32, to a sum that begins at 0. Of 32 adjacent k the first product takes those with k % 8 < 4, the second
// one the others: then 16 adjacent bytes of a row are what a lane needs for both, and no operand goes through ldmatrix.
//
// product_rows_*: few rows, bound by the bandwidth of the weights. Weights go from memory to registers, each once for
// 16, 32 or 64 rows, two groups of k ahead; activations come from the L1 and L2 caches. Segments are computed by
// different warps of a block, which add them in order through shared memory: no atomics, no scratch in global memory.
//
// product_tiles_*: many rows, bound by the tensor cores. Both operands go through four stages of shared memory by
// cp.async; a stage is 32 k of each row, 64 bytes, so that 8 lanes read 128 adjacent bytes: no bank conflicts without
// padding. Segments one after another. (On Hopper mma.sync reaches about 60 % of what wgmma does.) Where there are too
// few tiles for a card, each segment is a block of its own, its results go to scratch memory, and product_sum adds
// them.
#include "device.cuh"

constexpr u32 SEGMENT = 1024;
// Values of k that a warp takes at a time: 16 bytes of each row for each of four lanes.
constexpr u32 STEP = 32;

// What becomes of results, as `Output` in product.rs; 0 stores them.
constexpr u32 ADD = 1, SWIGLU = 2;

// Results of one row and two neighbouring columns, `column` even.
__device__ __forceinline__ void output(void* out, u32 mode, u32 n, u32 row, u32 column, float first, float second) {
    if (mode == SWIGLU) {
        float silu = first / (1.0f + expf(-first));
        static_cast<bf16*>(out)[static_cast<u64>(row) * (n / 2) + column / 2] = to_bf16(silu * second);
        return;
    }
    float* at = static_cast<float*>(out) + static_cast<u64>(row) * n + column;
    if (n % 2 == 0) {
        float2* pair = reinterpret_cast<float2*>(at);
        float2 before = mode == ADD ? *pair : make_float2(0.0f, 0.0f);
        *pair = mode == ADD ? make_float2(before.x + first, before.y + second) : make_float2(first, second);
    } else {
        at[0] = mode == ADD ? at[0] + first : first;
        if (column + 1 < n) at[1] = mode == ADD ? at[1] + second : second;
    }
}

template <u32 MT, u32 NT>
__device__ __forceinline__ void clear(float (&sums)[MT][NT][4]) {
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][tile][i] = 0.0f;
}

// d += the 16 x 8 outputs over 32 k: `low` and `high` are a lane's 16 bytes of rows group and group + 8 of x, `w` those
// of row group of the weights.
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& low, const uint4& high, const uint4& w) {
    u32 a[4] = {low.x, high.x, low.y, high.y}, b[2] = {w.x, w.y};
    mma_m16n8k16(d, a, b);
    u32 c[4] = {low.z, high.z, low.w, high.w}, e[2] = {w.z, w.w};
    mma_m16n8k16(d, c, e);
}

// ----------------------------------------------------------------------------------------------------------- few rows

// 16 bytes of a row of the activations, zeros beyond the last one. They are read again by other warps.
__device__ __forceinline__ uint4 load_x(const bf16* x, u32 k, u32 row, u32 rows, u32 at) {
    if (row >= rows) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(x + static_cast<u64>(row) * k + at));
}

// 16 bytes of a row of the weights. Nobody reads them again in this step: they leave the caches first.
__device__ __forceinline__ uint4 load_weight(const bf16* weight, u32 k, u32 row, u32 rows, u32 at) {
    if (row >= rows) return make_uint4(0, 0, 0, 0);
    return __ldcs(reinterpret_cast<const uint4*>(weight + static_cast<u64>(row) * k + at));
}

// MT x 16 rows and NT x 8 columns a warp; weights of GROUP steps are loaded while those of the group before are used.
template <u32 MT, u32 NT, u32 GROUP>
struct RowsKernel {
    static constexpr u32 ROWS = MT * 16, COLUMNS = NT * 8;
    // A row of a warp's results in shared memory, padded so that rows begin in different banks.
    static constexpr u32 STRIDE = COLUMNS + 8;
    static constexpr u32 PAIRS = ROWS * COLUMNS / 2;
    static constexpr u32 MOST_THREADS = 256, MOST_SEGMENTS = 8;

    typedef uint4 Weights[GROUP][NT];

    static __device__ __forceinline__ void load(Weights& weights, const bf16* weight, u32 n, u32 k, u32 first_column,
                                                u32 at, u32 end) {
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (u32 step = 0; step < GROUP; step++)
#pragma unroll
            for (u32 tile = 0; tile < NT; tile++)
                if (at + step * STEP < end)
                    weights[step][tile] =
                        load_weight(weight, k, first_column + tile * 8 + group, n, at + step * STEP + pair * 8);
    }

    // The sums over one segment, k from `at` to `end`.
    static __device__ __forceinline__ void segment(float (&sums)[MT][NT][4], const bf16* x, const bf16* weight,
                                                   u32 rows, u32 n, u32 k, u32 first_row, u32 first_column, u32 at,
                                                   u32 end) {
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
        clear(sums);
        Weights now, next;
        load(now, weight, n, k, first_column, at, end);
        for (; at < end; at += GROUP * STEP) {
            load(next, weight, n, k, first_column, at + GROUP * STEP, end);
#pragma unroll
            for (u32 step = 0; step < GROUP; step++) {
                if (at + step * STEP >= end) break;
                u32 here = at + step * STEP + pair * 8;
#pragma unroll
                for (u32 m = 0; m < MT; m++) {
                    uint4 low = load_x(x, k, first_row + m * 16 + group, rows, here);
                    uint4 high = load_x(x, k, first_row + m * 16 + group + 8, rows, here);
#pragma unroll
                    for (u32 tile = 0; tile < NT; tile++) multiply(sums[m][tile], low, high, now[step][tile]);
                }
            }
#pragma unroll
            for (u32 step = 0; step < GROUP; step++)
#pragma unroll
                for (u32 tile = 0; tile < NT; tile++) now[step][tile] = next[step][tile];
        }
    }

    static __device__ __forceinline__ void keep(float* results, const float (&sums)[MT][NT][4]) {
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 tile = 0; tile < NT; tile++) {
                float* at = results + (m * 16 + group) * STRIDE + tile * 8 + pair * 2;
                *reinterpret_cast<float2*>(at) = make_float2(sums[m][tile][0], sums[m][tile][1]);
                at += 8 * STRIDE;
                *reinterpret_cast<float2*>(at) = make_float2(sums[m][tile][2], sums[m][tile][3]);
            }
    }

    // A block has `segments` warps for each group of columns: 1, 2, 4 or 8. More segments than 8 take several rounds,
    // and the block has one group of columns.
    static __device__ __forceinline__ void run(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k,
                                               u32 mode, u32 segments) {
        DYNAMIC_SHARED(float, shared);
        constexpr u32 RESULTS = ROWS * STRIDE, KEPT = (PAIRS + MOST_THREADS - 1) / MOST_THREADS;
        u32 warp = threadIdx.x / WARP, columns = blockDim.x / WARP / segments;
        u32 own_segment = warp % segments, own_group = warp / segments;
        u32 first_row = blockIdx.y * ROWS, first_column = (blockIdx.x * columns + own_group) * COLUMNS;
        u32 count = (k + SEGMENT - 1) / SEGMENT;
        float2 totals[KEPT];
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) totals[i] = make_float2(0.0f, 0.0f);
        for (u32 round = 0; round < count; round += segments) {
            u32 at = (round + own_segment) * SEGMENT;
            if (at < k) {
                float sums[MT][NT][4];
                segment(sums, x, weight, rows, n, k, first_row, first_column, at, min(at + SEGMENT, k));
                keep(shared + warp * RESULTS, sums);
            }
            __syncthreads();
            u32 present = min(segments, count - round);
            bool is_last = round + segments >= count;
            // The threads of a group of columns share its results; with several rounds each always takes the same.
            const float* results = shared + own_group * segments * RESULTS;
            u32 thread = threadIdx.x % (segments * WARP);
            if (count <= segments) {
                for (u32 index = thread; index < PAIRS; index += segments * WARP) {
                    float2 total = make_float2(0.0f, 0.0f);
                    add(total, results, index, present);
                    finish(out, mode, rows, n, first_row, first_column, index, total);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < KEPT; i++) {
                    u32 index = thread + i * MOST_THREADS;
                    if (index >= PAIRS) continue;
                    add(totals[i], results, index, present);
                    if (is_last) finish(out, mode, rows, n, first_row, first_column, index, totals[i]);
                }
                __syncthreads();
            }
        }
    }

    static __device__ __forceinline__ void add(float2& total, const float* results, u32 index, u32 present) {
        u32 row = index / (COLUMNS / 2), column = index % (COLUMNS / 2) * 2;
        for (u32 segment = 0; segment < present; segment++) {
            const float* at = results + segment * ROWS * STRIDE + row * STRIDE + column;
            float2 value = *reinterpret_cast<const float2*>(at);
            total.x += value.x, total.y += value.y;
        }
    }

    static __device__ __forceinline__ void finish(void* out, u32 mode, u32 rows, u32 n, u32 first_row, u32 first_column,
                                                  u32 index, float2 total) {
        u32 row = first_row + index / (COLUMNS / 2), column = first_column + index % (COLUMNS / 2) * 2;
        if (row < rows && column < n) output(out, mode, n, row, column, total.x, total.y);
    }
};

// BLOCKS of them are on a multiprocessor together.
#define PRODUCT_ROWS(NAME, MT, NT, GROUP, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                \
        NAME(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode, u32 segments) { \
        RowsKernel<MT, NT, GROUP>::run(out, x, weight, rows, n, k, mode, segments);                          \
    }

PRODUCT_ROWS(product_rows_16, 1, 2, 4, 2)
TANDEM_KERNEL(product_rows_16)
PRODUCT_ROWS(product_rows_32, 2, 4, 1, 2)
TANDEM_KERNEL(product_rows_32)
PRODUCT_ROWS(product_rows_64, 4, 4, 1, 1)
TANDEM_KERNEL(product_rows_64)

// ---------------------------------------------------------------------------------------------------------- many rows

// Tiles of BM rows x BN columns; MT x 16 rows and NT x 8 columns a warp.
template <u32 BM, u32 BN, u32 MT, u32 NT>
struct TilesKernel {
    static constexpr u32 STAGES = 4, WARPS = BM / (MT * 16) * (BN / (NT * 8)), THREADS = WARPS * WARP;
    static constexpr u32 ROWS = BM + BN;

    // Copies the 32 values of k from `at` on of all rows of the tile to a stage: x above, weights below.
    static __device__ __forceinline__ void load(bf16* stage, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k,
                                                u32 first_row, u32 first_column, u32 at) {
#pragma unroll
        for (u32 i = 0; i < ROWS * 4 / THREADS; i++) {
            u32 piece = threadIdx.x + i * THREADS, row = piece / 4, part = piece % 4 * 8;
            bool is_x = row < BM;
            u32 source = is_x ? first_row + row : first_column + row - BM;
            bool is_inside = source < (is_x ? rows : n);
            const bf16* from = (is_x ? x : weight) + (is_inside ? static_cast<u64>(source) * k + at + part : 0);
            cp_async_16(stage + row * STEP + part, from, is_inside);
        }
    }

    static __device__ __forceinline__ void compute(float (&sums)[MT][NT][4], const bf16* stage, u32 row, u32 column) {
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
        uint4 w[NT];
#pragma unroll
        for (u32 tile = 0; tile < NT; tile++)
            w[tile] = *reinterpret_cast<const uint4*>(stage + (BM + column + tile * 8 + group) * STEP + pair * 8);
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            const bf16* at = stage + (row + m * 16 + group) * STEP + pair * 8;
            uint4 low = *reinterpret_cast<const uint4*>(at), high = *reinterpret_cast<const uint4*>(at + 8 * STEP);
#pragma unroll
            for (u32 tile = 0; tile < NT; tile++) multiply(sums[m][tile], low, high, w[tile]);
        }
    }

    static __device__ __forceinline__ void run(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k,
                                               u32 mode) {
        DYNAMIC_SHARED(bf16, shared);
        constexpr u32 STAGE = ROWS * STEP, WARP_ROWS = BM / (MT * 16);
        u32 warp = threadIdx.x / WARP, row = warp % WARP_ROWS * MT * 16, column = warp / WARP_ROWS * NT * 8;
        u32 first_row = blockIdx.x * BM, first_column = blockIdx.y * BN, steps = k / STEP;
        if (gridDim.z > 1) {
            // One segment: from here on the product is that of its k.
            u32 begin = blockIdx.z * (SEGMENT / STEP);
            x += begin * STEP, weight += begin * STEP;
            steps = min(steps - begin, SEGMENT / STEP);
            out = static_cast<float*>(out) + blockIdx.z * static_cast<u64>(rows) * n;
        }
        float sums[MT][NT][4], totals[MT][NT][4];
        clear(sums);
        clear(totals);
#pragma unroll
        for (u32 stage = 0; stage + 1 < STAGES; stage++) {
            if (stage < steps)
                load(shared + stage * STAGE, x, weight, rows, n, k, first_row, first_column, stage * STEP);
            cp_async_commit();
        }
        for (u32 step = 0; step < steps; step++) {
            cp_async_wait<STAGES - 2>();
            // The stage that is loaded now is the one that all warps have just left.
            __syncthreads();
            u32 ahead = step + STAGES - 1;
            if (ahead < steps)
                load(shared + ahead % STAGES * STAGE, x, weight, rows, n, k, first_row, first_column, ahead * STEP);
            cp_async_commit();
            compute(sums, shared + step % STAGES * STAGE, row, column);
            if ((step + 1) % (SEGMENT / STEP) == 0 || step + 1 == steps) {
#pragma unroll
                for (u32 m = 0; m < MT; m++)
#pragma unroll
                    for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
                        for (u32 i = 0; i < 4; i++) totals[m][tile][i] += sums[m][tile][i];
                clear(sums);
            }
        }
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 to_row = first_row + row + m * 16 + group + half * 8;
                    u32 to_column = first_column + column + tile * 8 + pair * 2;
                    const float (&d)[4] = totals[m][tile];
                    if (to_row < rows && to_column < n)
                        output(out, mode, n, to_row, to_column, d[2 * half], d[2 * half + 1]);
                }
    }
};

#define PRODUCT_TILES(NAME, BM, BN, MT, NT)                                                    \
    extern "C" __global__ void __launch_bounds__(TilesKernel<BM, BN, MT, NT>::THREADS)         \
        NAME(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode) { \
        TilesKernel<BM, BN, MT, NT>::run(out, x, weight, rows, n, k, mode);                    \
    }

PRODUCT_TILES(product_tiles_64, 64, 64, 2, 4)
TANDEM_KERNEL(product_tiles_64)
PRODUCT_TILES(product_tiles_128, 128, 128, 4, 4)
TANDEM_KERNEL(product_tiles_128)

// Adds the results of segments, `scratch` [segments][rows][n], in ascending order. A thread has two columns of a row.
extern "C" __global__ void __launch_bounds__(256)
    product_sum(void* out, const float* scratch, u32 rows, u32 n, u32 segments, u32 mode) {
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * 2, row = blockIdx.x;
    if (column >= n) return;
    float2 total = make_float2(0.0f, 0.0f);
    for (u32 segment = 0; segment < segments; segment++) {
        const float* at = scratch + (static_cast<u64>(segment) * rows + row) * n + column;
        total.x += at[0];
        if (column + 1 < n) total.y += at[1];
    }
    output(out, mode, n, row, column, total.x, total.y);
}
TANDEM_KERNEL(product_sum)
