// Kernels of the product with one mistake each, which is no error to any driver: they add in an order of their own.
// With EMU_PLANTED=unordered or =reversed they take the place of the kernels that they are named after, and the tests
// of equal bits (engine/cuda/tests/invariance.rs) must fail.
#include "products.cu"

// product_rows_16, but a segment of k is added to the result by atomics as soon as it is there: in the order in which
// the warps arrive. It is what a split of k does that somebody writes in a hurry.
extern "C" __global__ void __launch_bounds__(256)
    unordered_product_rows_16(void* out, const bf16* x, const bf16* weight, u32 rows, u32 n, u32 k, u32 mode,
                              u32 segments) {
    using Rows = RowsKernel<1, 2, 4>;
    constexpr u32 RESULTS = Rows::ROWS * Rows::STRIDE;
    DYNAMIC_SHARED(float, shared);
    u32 warp = threadIdx.x / WARP, columns = blockDim.x / WARP / segments;
    u32 own_segment = warp % segments, own_group = warp / segments;
    u32 first_row = blockIdx.y * Rows::ROWS, first_column = (blockIdx.x * columns + own_group) * Rows::COLUMNS;
    u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;
    for (u32 i = threadIdx.x; i < columns * RESULTS; i += blockDim.x) shared[i] = 0.0f;
    __syncthreads();
    for (u32 at = own_segment * SEGMENT; at < k; at += segments * SEGMENT) {
        float sums[1][2][4];
        Rows::segment(sums, x, weight, rows, n, k, first_row, first_column, at, min(at + SEGMENT, k));
        for (u32 tile = 0; tile < 2; tile++)
            for (u32 i = 0; i < 4; i++) {
                u32 row = group + i / 2 * 8, column = tile * 8 + pair * 2 + i % 2;
                atomicAdd(&shared[own_group * RESULTS + row * Rows::STRIDE + column], sums[0][tile][i]);
            }
    }
    __syncthreads();
    for (u32 index = threadIdx.x % (segments * WARP); index < Rows::PAIRS; index += segments * WARP) {
        u32 at = own_group * RESULTS + index / (Rows::COLUMNS / 2) * Rows::STRIDE + index % (Rows::COLUMNS / 2) * 2;
        Rows::finish(out, mode, rows, n, first_row, first_column, index, make_float2(shared[at], shared[at + 1]));
    }
}
TANDEM_KERNEL(unordered_product_rows_16)

// product_sum, but the last segment comes first.
extern "C" __global__ void __launch_bounds__(256)
    reversed_product_sum(void* out, const float* scratch, u32 rows, u32 n, u32 segments, u32 mode) {
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * 2, row = blockIdx.x;
    if (column >= n) return;
    float2 total = make_float2(0.0f, 0.0f);
    for (u32 segment = segments; segment-- > 0;) {
        const float* at = scratch + (static_cast<u64>(segment) * rows + row) * n + column;
        total.x += at[0];
        if (column + 1 < n) total.y += at[1];
    }
    output(out, mode, n, row, column, total.x, total.y);
}
TANDEM_KERNEL(reversed_product_sum)
