// Kernels of the product with one mistake each, which is no error to any driver: they add in an order of their own.
// With EMU_PLANTED=unordered or =reversed they take the place of the kernels that they are named after, and the tests
// of equal bits (engine/cuda/tests/kernels/products.rs) must fail.
#include "products.cu"

// product_sum, but each segment is added by atomics as soon as a thread comes to it. It is what a split of k does that
// somebody writes in a hurry.
extern "C" __global__ void __launch_bounds__(256)
    unordered_product_sum(void* out, const float* scratch, u32 rows, u32 n, u32 segments, u32 mode) {
    constexpr u32 COLUMNS = 512;
    __shared__ float totals[COLUMNS];
    u32 first = blockIdx.y * COLUMNS, row = blockIdx.x;
    for (u32 i = threadIdx.x; i < COLUMNS; i += blockDim.x) totals[i] = 0.0f;
    __syncthreads();
    for (u32 i = threadIdx.x; i < COLUMNS * segments; i += blockDim.x) {
        u32 column = i / segments, segment = i % segments;
        if (first + column < n)
            atomicAdd(&totals[column], scratch[(static_cast<u64>(segment) * rows + row) * n + first + column]);
    }
    __syncthreads();
    u32 column = first + threadIdx.x * 2;
    if (column < n) output(out, mode, n, row, column, totals[threadIdx.x * 2], totals[threadIdx.x * 2 + 1]);
}
TANDEM_KERNEL(unordered_product_sum)

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
