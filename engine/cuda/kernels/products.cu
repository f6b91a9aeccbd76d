// Products of activations with weights: out[row][column] = sum over k of x[row][k] * weight[column][k], bf16 in, f32
// out. Launches: src/kernels/product.rs.
//
// Order of additions, the same in all kernels here, whatever the number of rows: `k` is cut into segments of 4,096.
// Within a segment one f32 accumulator an output takes sets of 16 adjacent k in ascending order, each by one
// mma.m16n8k16; segments are added in ascending order, in f32, to a sum that begins at 0. On a card (an H200 was asked)
// a set of 16 is one sum: neither the order within it nor which operand is which changes a bit, and wgmma and cuBLAS,
// where it does not split k, add the same way. So large products may be cuBLAS's (src/cublaslt.rs).
//
// In shared memory rows are 64 or 128 values long, and their pieces of 16 bytes change places by the row's number
// (place()): eight rows' pieces of the same k lie in different banks, for ldmatrix and for the copies there.
//
// product_few_*: few rows, bound by the bandwidth of the weights. A block has 64 rows of the weights at a time, 16 a
// warp, and all rows of x; both go through a ring of shared memory by cp.async, 128 values of k a stage. Blocks stay,
// and their rings run on from one 64 rows to the next. The weights are the left operand, which has 16 rows: that of x,
// 8 at a time, wastes less. Segments of large k may be blocks of their own, whose results go to scratch memory, and
// product_sum adds them.
//
// product_tiles_*: many rows, bound by the tensor cores, where cuBLAS is not there. (On Hopper mma.sync reaches about
// 60 % of what wgmma does, and tiles of this size what the L2 cache gives.)
#include "device.cuh"

constexpr u32 SEGMENT = 4096;

// What becomes of results, as `Output` in product.rs; 0 stores them.
constexpr u32 ADD = 1, SWIGLU = 2;

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// Results of one row and two neighbouring columns, `column` even.
__device__ __forceinline__ void output(void* out, u32 mode, u32 n, u32 row, u32 column, float first, float second) {
    if (mode == SWIGLU) {
        static_cast<bf16*>(out)[static_cast<u64>(row) * (n / 2) + column / 2] = to_bf16(gated(first, second));
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

// Where the piece `part` of 16 bytes of a row lies, of rows of WIDTH values.
template <u32 WIDTH>
__device__ __forceinline__ u32 place(u32 row, u32 part) {
    return row * WIDTH + (part ^ (row & 7)) * 8;
}

// sums += 16 rows of A times NT x 8 rows of B over 16 values of k, which begin at the piece `part` of the rows of a
// stage. Rows are counted from the stage's first; that of B is even of 8.
template <u32 WIDTH, u32 NT>
__device__ __forceinline__ void multiply(float (&sums)[NT][4], const bf16* stage, u32 a_row, u32 b_row, u32 part) {
    u32 lane = threadIdx.x % WARP, a[4];
    ldmatrix_x4<false>(a, stage + place<WIDTH>(a_row + lane % 16, part + lane / 16));
#pragma unroll
    for (u32 tile = 0; tile < NT; tile += 2) {
        // With one tile the upper half of the lanes name its rows once more.
        u32 row = b_row + tile * 8 + lane % 8 + (NT > 1 ? lane / 16 * 8 : 0), b[4];
        ldmatrix_x4<false>(b, stage + place<WIDTH>(row, part + lane / 8 % 2));
        u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        mma_m16n8k16(sums[tile], a, low);
        if (NT > 1) mma_m16n8k16(sums[(tile + 1) % NT], a, high);
    }
}

template <u32 NT>
__device__ __forceinline__ void clear(float (&sums)[NT][4]) {
#pragma unroll
    for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[tile][i] = 0.0f;
}

// The end of a segment.
template <u32 NT>
__device__ __forceinline__ void add(float (&totals)[NT][4], float (&sums)[NT][4]) {
#pragma unroll
    for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) totals[tile][i] += sums[tile][i];
    clear(sums);
}

// What a launch multiplies. With blocks of their own for segments (gridDim.z), one segment of it.
struct Operands {
    void* out;
    const bf16 *x, *weight;
    u32 rows, n, k, mode;
    // From where to where k goes; k itself stays the length of rows.
    u32 begin, end;

    __device__ __forceinline__ Operands(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode)
        : out(out), x(x), weight(weight), rows(rows), n(n), k(k), mode(mode), begin(0), end(k) {
        if (gridDim.z == 1) return;
        begin = blockIdx.z * SEGMENT, end = min(begin + SEGMENT, k);
        this->out = static_cast<float*>(out) + blockIdx.z * static_cast<u64>(rows) * n;
    }

    // Copies 16 bytes, zeros from beyond the matrix and behind the end of k.
    __device__ __forceinline__ void copy(bf16* to, const bf16* matrix, u32 most, u32 row, u32 at) const {
        bool is_inside = row < most && at < end;
        cp_async_16(to, matrix + (is_inside ? static_cast<u64>(row) * k + at : 0), is_inside);
    }
};

// ----------------------------------------------------------------------------------------------------------- few rows

// Up to NT x 8 rows of x.
template <u32 NT, u32 STAGES>
struct FewKernel {
    static constexpr u32 ROWS = NT * 8, COLUMNS = 64, THREADS = COLUMNS / 16 * WARP;
    static constexpr u32 STEP = 128, PIECES = STEP / 8, STAGE = (COLUMNS + ROWS) * STEP;

    // Which stage is loaded next: the 64 columns, where in k, and in which place of the ring.
    struct Cursor {
        u32 panel, at, stage;

        __device__ __forceinline__ void advance(const Operands& o) {
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            at += STEP;
            if (at >= o.end) at = o.begin, panel += gridDim.x;
        }
    };

    // Rows of the weights to the front of a stage.
    static __device__ __forceinline__ void load_weights(bf16* ring, const Operands& o, const Cursor& cursor) {
        if (cursor.panel * COLUMNS >= o.n) return;
        u32 part = threadIdx.x % PIECES;
#pragma unroll
        for (u32 row = threadIdx.x / PIECES; row < COLUMNS; row += THREADS / PIECES)
            o.copy(ring + cursor.stage * STAGE + place<STEP>(row, part), o.weight, o.n, cursor.panel * COLUMNS + row,
                   cursor.at + part * 8);
    }

    // Rows of x behind them.
    static __device__ __forceinline__ void load_x(bf16* ring, const Operands& o, const Cursor& cursor) {
        if (cursor.panel * COLUMNS >= o.n) return;
        u32 part = threadIdx.x % PIECES;
#pragma unroll
        for (u32 row = threadIdx.x / PIECES; row < ROWS; row += THREADS / PIECES)
            o.copy(ring + cursor.stage * STAGE + place<STEP>(COLUMNS + row, part), o.x, o.rows, blockIdx.y * ROWS + row,
                   cursor.at + part * 8);
    }

    // Results of a warp: columns group and group + 8, and rows of x by two.
    static __device__ __forceinline__ void put(const Operands& o, u32 panel, const float (&totals)[NT][4]) {
        u32 lane = threadIdx.x % WARP, first = panel * COLUMNS + threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
        for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 row = blockIdx.y * ROWS + tile * 8 + lane % 4 * 2 + i % 2, column = first + i / 2 * 8;
                float value = totals[tile][i];
                if (o.mode == SWIGLU) {
                    // The other of a pair of columns is that of the lane whose group is the next one.
                    float up = __shfl_xor_sync(ALL_LANES, value, 4);
                    if (row < o.rows && column < o.n && column % 2 == 0)
                        static_cast<bf16*>(o.out)[static_cast<u64>(row) * (o.n / 2) + column / 2] =
                            to_bf16(gated(value, up));
                } else if (row < o.rows && column < o.n) {
                    float* at = static_cast<float*>(o.out) + static_cast<u64>(row) * o.n + column;
                    *at = o.mode == ADD ? *at + value : value;
                }
            }
    }

    static __device__ __forceinline__ void run(const Operands& o) {
        DYNAMIC_SHARED(bf16, ring);
        Cursor cursor{blockIdx.x, o.begin, 0}, ahead = cursor;
        // The weights were there before this launch, x is what the launch before writes.
#pragma unroll
        for (u32 i = 0; i + 1 < STAGES; i++) load_weights(ring, o, ahead), ahead.advance(o);
        follow_launches_before();
#pragma unroll
        for (u32 i = 0; i + 1 < STAGES; i++) load_x(ring, o, cursor), cursor.advance(o), cp_async_commit();
        u32 stage = 0;
        for (u32 panel = blockIdx.x; panel * COLUMNS < o.n; panel += gridDim.x) {
            float totals[NT][4], sums[NT][4];
            clear(totals), clear(sums);
            for (u32 at = o.begin; at < o.end; at += STEP) {
                cp_async_wait<STAGES - 2>();
                // The stage that is loaded now is the one that all warps have just left.
                __syncthreads();
                load_weights(ring, o, cursor), load_x(ring, o, cursor), cursor.advance(o);
                cp_async_commit();
#pragma unroll
                for (u32 part = 0; part < PIECES; part += 2)
                    multiply<STEP, NT>(sums, ring + stage * STAGE, threadIdx.x / WARP * 16, COLUMNS, part);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                if ((at + STEP) % SEGMENT == 0 || at + STEP >= o.end) add(totals, sums);
            }
            put(o, panel, totals);
        }
    }
};

#define PRODUCT_FEW(NAME, NT, STAGES)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                         \
        NAME(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode) {                   \
        FewKernel<NT, STAGES>::run(Operands(out, x, weight, rows, n, k, mode));                                  \
    }

PRODUCT_FEW(product_few_8, 1, 5)
TANDEM_KERNEL(product_few_8)
PRODUCT_FEW(product_few_16, 2, 4)
TANDEM_KERNEL(product_few_16)
PRODUCT_FEW(product_few_32, 4, 4)
TANDEM_KERNEL(product_few_32)
PRODUCT_FEW(product_few_64, 8, 3)
TANDEM_KERNEL(product_few_64)

// ---------------------------------------------------------------------------------------------------------- many rows

// Tiles of BM rows x BN columns; MT x 16 rows and NT x 8 columns a warp.
template <u32 BM, u32 BN, u32 MT, u32 NT>
struct TilesKernel {
    static constexpr u32 STAGES = 3, WARPS = BM / (MT * 16) * (BN / (NT * 8)), THREADS = WARPS * WARP;
    static constexpr u32 STEP = 64, PIECES = STEP / 8, STAGE = (BM + BN) * STEP;

    // Copies values of k from `at` on of all rows of the tile to a stage: x above, weights below.
    static __device__ __forceinline__ void load(bf16* stage, const Operands& o, u32 at) {
        u32 part = threadIdx.x % PIECES;
#pragma unroll
        for (u32 row = threadIdx.x / PIECES; row < BM; row += THREADS / PIECES)
            o.copy(stage + place<STEP>(row, part), o.x, o.rows, blockIdx.x * BM + row, at + part * 8);
#pragma unroll
        for (u32 row = threadIdx.x / PIECES; row < BN; row += THREADS / PIECES)
            o.copy(stage + place<STEP>(BM + row, part), o.weight, o.n, blockIdx.y * BN + row, at + part * 8);
    }

    static __device__ __forceinline__ void run(const Operands& o) {
        DYNAMIC_SHARED(bf16, shared);
        constexpr u32 WARP_ROWS = BM / (MT * 16);
        u32 warp = threadIdx.x / WARP, row = warp % WARP_ROWS * MT * 16, column = warp / WARP_ROWS * NT * 8;
        u32 steps = (o.end - o.begin + STEP - 1) / STEP;
        float sums[MT][NT][4], totals[MT][NT][4];
#pragma unroll
        for (u32 m = 0; m < MT; m++) clear(sums[m]), clear(totals[m]);
        follow_launches_before();
#pragma unroll
        for (u32 stage = 0; stage + 1 < STAGES; stage++) {
            if (stage < steps) load(shared + stage * STAGE, o, o.begin + stage * STEP);
            cp_async_commit();
        }
        for (u32 step = 0; step < steps; step++) {
            cp_async_wait<STAGES - 2>();
            // The stage that is loaded now is the one that all warps have just left.
            __syncthreads();
            u32 ahead = step + STAGES - 1;
            if (ahead < steps) load(shared + ahead % STAGES * STAGE, o, o.begin + ahead * STEP);
            cp_async_commit();
            const bf16* stage = shared + step % STAGES * STAGE;
#pragma unroll
            for (u32 part = 0; part < PIECES; part += 2)
#pragma unroll
                for (u32 m = 0; m < MT; m++) multiply<STEP, NT>(sums[m], stage, row + m * 16, BM + column, part);
            if ((step + 1) % (SEGMENT / STEP) == 0 || step + 1 == steps)
#pragma unroll
                for (u32 m = 0; m < MT; m++) add(totals[m], sums[m]);
        }
        u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
#pragma unroll
        for (u32 m = 0; m < MT; m++)
#pragma unroll
            for (u32 tile = 0; tile < NT; tile++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 to_row = blockIdx.x * BM + row + m * 16 + group + half * 8;
                    u32 to_column = blockIdx.y * BN + column + tile * 8 + pair * 2;
                    const float (&d)[4] = totals[m][tile];
                    if (to_row < o.rows && to_column < o.n)
                        output(o.out, o.mode, o.n, to_row, to_column, d[2 * half], d[2 * half + 1]);
                }
    }
};

#define PRODUCT_TILES(NAME, BM, BN, MT, NT)                                                    \
    extern "C" __global__ void __launch_bounds__(TilesKernel<BM, BN, MT, NT>::THREADS)         \
        NAME(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode) { \
        TilesKernel<BM, BN, MT, NT>::run(Operands(out, x, weight, rows, n, k, mode));          \
    }

PRODUCT_TILES(product_tiles_64, 64, 64, 2, 4)
TANDEM_KERNEL(product_tiles_64)
PRODUCT_TILES(product_tiles_128, 128, 128, 4, 4)
TANDEM_KERNEL(product_tiles_128)

// Adds the results of segments, `scratch` [segments][rows][n], in ascending order. A thread has two columns of a row.
extern "C" __global__ void __launch_bounds__(256)
    product_sum(void* out, const float* scratch, u32 rows, u32 n, u32 segments, u32 mode) {
    follow_launches_before();
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
